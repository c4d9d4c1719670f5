"""The mover interface: submit a store or a load with the event that it waits for, then poll.

A mover copies between the blocks of one `BlockLayout` (the device side) and the slots of one
`HostArena` (the host side). A job waits for its event. It also waits for an earlier job of its
direction that still waits and has a common target: a slot (a store) or a block (a load). So the
later job writes last. No other order is promised. Jobs of one direction may overtake each other,
and stores and loads are not ordered against each other. The caller pins the blocks and slots of a
job until its ticket ends.

A `CudaMover` puts its jobs on streams, which run in order. So a `CudaEvent` that never happens
holds up all later jobs of its direction on that device. An event of the host does not.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, Final, Literal, Protocol, Self, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvstow._core import ConfigError, InvalidBlock, StateError, TransferError
from kvstow.closing import Closing, call_all
from kvstow.transfer.arena import HostArena
from kvstow.transfer.layout import BlockLayout
from kvstow.transfer.ticket import HostTicket, Ticket

Ints: TypeAlias = Sequence[int] | npt.NDArray[np.integer]
Index: TypeAlias = npt.NDArray[np.int64]
Direction: TypeAlias = Literal["store", "load"]

# Up to this many numbers, Python's own ints are compared faster than numpy's: after a step of
# compute the caches hold no code of numpy's, and one call then takes some 30 us.
_FEW = 64


@runtime_checkable
class Event(Protocol):
    """What a transfer waits for: the compute that fills, or still reads, its blocks."""

    def wait(self) -> None:
        """Return once it has happened; raise if it failed."""

    def add_done_callback(self, callback: Callable[[], None], /) -> None:
        """Call `callback` once, from any thread, as soon as `wait` would not block.

        Calls it at once if the event has happened. So a mover needs no thread that blocks in
        `wait`, which `close` could not interrupt.
        """


class HostEvent:
    """An `Event` that host code sets, once."""

    def __init__(self) -> None:
        """Begin unset."""
        self._lock = threading.Lock()
        # Not a threading.Event: an interrupt in it can leave its lock held.
        self._moment = HostTicket()
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], None]] = []

    @classmethod
    def of(cls, future: Future[Any]) -> Self:
        """Return the event that happens when `future` is done, and fails where it failed."""
        if not callable(getattr(future, "add_done_callback", None)):
            raise ConfigError(
                f"future is {future!r}, expected a Future: pass one, as an executor returns it"
            )
        event = cls()

        def done(future: Future[Any]) -> None:
            try:
                error = future.exception()
            except CancelledError as cancelled:
                error = cancelled
            event.set(error)

        future.add_done_callback(done)
        return event

    def set(self, error: BaseException | None = None) -> None:
        """Let the waiters go on, or fail them with `error`.

        Raises:
            StateError: it is set already. An event stands for one moment: an event that is used
                again for a later step would not hold back that step's transfers.

        Then raises what a callback raised, after all callbacks were called. After an interrupt some
        transfers may still wait: close their mover.
        """
        with self._lock:
            if self._moment.poll():
                raise StateError("this HostEvent is set already; make a new one for each step")
            self._error = error
            self._moment.end(None)
            callbacks, self._callbacks = self._callbacks, []
        call_all(callbacks)  # each belongs to another transfer, which would otherwise never end

    def wait(self) -> None:
        """Block until `set`; raise `TransferError` from the error it was set with, if any."""
        self._moment.wait()
        if self._error is not None:
            raise TransferError(
                f"the event a transfer waited for failed: {self._error!r}"
            ) from self._error

    def add_done_callback(self, callback: Callable[[], None], /) -> None:
        """Call `callback` from `set`, or at once if it is set."""
        if not self._moment.poll():
            with self._lock:
                if not self._moment.poll():
                    self._callbacks.append(callback)
                    return
        callback()


_ready = HostEvent()
_ready.set()
READY: Final[Event] = _ready
"""An event that has happened, for transfers that have nothing to wait for."""


def check_sides(layout: object, arena: object) -> None:
    """Refuse what is no layout, or no arena."""
    if not isinstance(layout, BlockLayout):
        raise ConfigError(
            f"layout is {layout!r}, expected a BlockLayout: pass BlockLayout.from_arrays(arrays)"
        )
    if not isinstance(arena, HostArena):
        raise ConfigError(
            f"arena is {arena!r}, expected a HostArena: pass arena_for([layout], num_slots)"
        )


class Mover(Closing):
    """Copies blocks between a layout and an arena, and does not block the caller.

    A job that takes less time than to hand it to a thread may have ended when it is submitted.

    This class checks the arguments before it queues anything, so a call that raises changes
    nothing. Its subclasses move the bytes. If an interrupt such as Ctrl-C ends `store` or `load`,
    it is raised once the job touches its blocks and slots no more.

    Attributes:
        layout: the device side.
        arena: the host side.
    """

    def __init__(self, layout: BlockLayout, arena: HostArena) -> None:
        """Tie a layout to an arena.

        Raises:
            ConfigError: no layout or no arena, or a slot of the arena is smaller than a block of
                the layout. A slot may be larger, because groups with blocks of several sizes share
                an arena.
            StateError: the arena is closed.
        """
        check_sides(layout, arena)
        arena.check_open()
        if arena.slot_bytes < layout.slot_bytes:
            raise ConfigError(
                f"the arena's slot_bytes is {arena.slot_bytes}, but a block of the layout has "
                f"{layout.slot_bytes} bytes; build HostArena(num_slots, layout.slot_bytes), for "
                "several layouts with the largest slot_bytes"
            )
        self.layout: Final = layout
        self.arena: Final = arena

    def store(self, block_ids: Ints, host_slots: Ints, *, after: Event) -> Ticket:
        """Copy device block `block_ids[i]` to host slot `host_slots[i]`, for every i.

        Args:
            block_ids: shape [n], 1 to `num_blocks - 1`; copied, the array may be reused.
            host_slots: shape [n], 0 to `num_slots - 1`, each at most once; copied.
            after: the compute that fills the blocks. The mover reads nothing before it.

        Raises:
            InvalidBlock: an id or slot out of range, the null block, or a host slot given twice.
            ConfigError: not 1-D integers of equal length, or `after` is not an `Event`.
            StateError: the mover or its arena is closed, or belongs to the parent process.
        """
        ids, slots = self._checked_pairs("store", block_ids, host_slots, after)
        return self._submit("store", ids, slots, after)

    def load(self, host_slots: Ints, block_ids: Ints, *, after: Event) -> Ticket:
        """Copy host slot `host_slots[i]` to device block `block_ids[i]`, for every i.

        Args:
            host_slots: shape [n], 0 to `num_slots - 1`; copied, the array may be reused.
            block_ids: shape [n], 1 to `num_blocks - 1`, each at most once; copied.
            after: the compute that may still read the blocks. The mover writes nothing before it.

        Raises:
            InvalidBlock: an id or slot out of range, the null block, or a block id given twice.
            ConfigError: not 1-D integers of equal length, or `after` is not an `Event`.
            StateError: the mover or its arena is closed, or belongs to the parent process.
        """
        ids, slots = self._checked_pairs("load", block_ids, host_slots, after)
        return self._submit("load", ids, slots, after)

    @abstractmethod
    def close(self) -> None:
        """End every job and stop; calling it again does nothing.

        The mover carries out the jobs whose event has happened, unless they wait for a job whose
        event has not. All other jobs fail. When `close` returns, every ticket has ended, and the
        mover touches layout and arena no more. After an interrupt the mover accepts no job; call
        `close` again.
        """

    @abstractmethod
    def _check_open(self) -> None:
        """Raise `StateError` after `close`."""

    @abstractmethod
    def _submit(
        self, direction: Direction, block_ids: Index, host_slots: Index, after: Event
    ) -> Ticket:
        """Queue a job of checked pairs. The mover may keep the arrays."""

    def _checked_pairs(
        self, direction: Direction, block_ids: Ints, host_slots: Ints, after: Event
    ) -> tuple[Index, Index]:
        """Return both arrays as int64 copies, or raise; see `store` and `load` for the rules."""
        self._check_open()
        check_event(after)
        self.arena.check_open()
        ids = checked_ids("block_ids", block_ids, self.layout.num_blocks, has_null=True)
        slots = checked_ids("host_slots", host_slots, self.arena.num_slots)
        if len(ids) != len(slots):
            raise ConfigError(
                f"{len(ids)} block_ids but {len(slots)} host_slots; pass one slot for each block"
            )
        if direction == "store":
            refuse_repeated("host_slots", slots)
        else:
            refuse_repeated("block_ids", ids)
        return ids, slots


def check_event(after: object) -> None:
    """Raise `ConfigError` unless `after` is an `Event`."""
    # As isinstance(after, Event) would, which takes 5 to 10 us, most of a brief job's time.
    if isinstance(after, type) or not (
        callable(getattr(after, "wait", None))
        and callable(getattr(after, "add_done_callback", None))
    ):
        fix = "pass READY where there is nothing to wait for"
        if isinstance(after, Future):
            fix = "pass HostEvent.of(future)"
        elif isinstance(after, type):
            fix = "pass an event, and not its class"
        raise ConfigError(f"after is {after!r}, expected an Event (wait, add_done_callback): {fix}")


def checked_ids(name: str, values: Ints, bound: int, *, has_null: bool = False) -> Index:
    """Return `values` as a new int64 array, or raise unless each is below `bound`.

    The least valid id is 0, or 1 with `has_null`.
    """
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"{name} is {values!r}, expected 1-D integers ({error}): pass a flat array"
        ) from error
    # An empty list has no integer type of its own.
    is_empty_list = array.size == 0 and not isinstance(values, np.ndarray)
    if array.ndim != 1 or not (array.dtype.kind in "iu" or is_empty_list):
        raise ConfigError(
            f"{name} is {array.dtype} of shape {array.shape}, expected 1-D integers: pass a flat "
            "array of an integer type"
        )
    if array.size:
        # Compare Python ints, because an unsigned 64-bit value could wrap in int64.
        items = array.tolist() if array.size <= _FEW else (array.min().item(), array.max().item())
        low, high = min(items), max(items)
        if low < 0 or high >= bound:
            wrong = low if low < 0 else high
            position = int(np.argmin(array) if low < 0 else np.argmax(array))
            raise InvalidBlock(
                f"{name}[{position}] is {wrong}, outside 0 to {bound - 1}; pass ids of this pool, "
                "and build layout and arena as large as their pools"
            )
        if has_null and low == 0:
            raise InvalidBlock(
                f"{name}[{int(np.argmin(array))}] is 0, the null block, which holds nothing; "
                "leave null blocks out"
            )
    return array.astype(np.int64)


def refuse_repeated(name: str, values: Index) -> None:
    """Raise `InvalidBlock` for a repeated destination, because which copy is last is undefined."""
    if len(values) <= _FEW and len(set(values.tolist())) == len(values):
        return
    ordered = np.sort(values)
    repeated = np.flatnonzero(ordered[1:] == ordered[:-1])
    if len(repeated):
        raise InvalidBlock(
            f"{name} names destination {int(ordered[repeated[0]])} more than once in one job; "
            "name each destination once"
        )
