"""What every mover promises: submit a store or a load with the event it waits for, then poll.

A mover copies between the blocks of one `BlockLayout` (the device side) and the slots of one
`HostArena`. A job waits for its event, and for earlier jobs of its direction that still wait and
write to the same slot (of a store) or block (of a load): the later one is last. No other order is
promised. Jobs of one direction may overtake each other, and stores and loads know nothing of each
other. Blocks and slots under way are the caller's to keep pinned.

`CudaMover` promises no more, but streams run in order. So a `CudaEvent` that never happens holds up
all later jobs of its direction on that device; an event of the host does not.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, Final, Protocol, Self, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvstow._core import ConfigError, InvalidBlock, StateError, TransferError
from kvstow.closing import Closing
from kvstow.transfer.arena import HostArena
from kvstow.transfer.layout import BlockLayout
from kvstow.transfer.ticket import HostTicket, Ticket

Ints: TypeAlias = Sequence[int] | npt.NDArray[np.integer]
Index: TypeAlias = npt.NDArray[np.int64]


# So many numbers are compared faster as Python's own: a call of numpy's takes some 30 us when a
# step of compute has left none of its code in the caches.
_FEW = 16


@runtime_checkable
class Event(Protocol):
    """What a transfer waits for: the compute that fills, or still reads, its blocks."""

    def wait(self) -> None:
        """Return once it has happened; raise if it failed and never will."""

    def add_done_callback(self, callback: Callable[[], None], /) -> None:
        """Call `callback` once, from any thread, as soon as `wait` would not block.

        At once if that is so already. This is how a mover learns of it without a thread that
        blocks in `wait`, which could not be interrupted by `close`.
        """


class HostEvent:
    """An `Event` that host code sets, once."""

    def __init__(self) -> None:
        """Begin unset."""
        self._lock = threading.Lock()
        self._moment = HostTicket()  # an interrupt in threading.Event can leave its lock held
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], None]] = []

    @classmethod
    def of(cls, future: Future[Any]) -> Self:
        """Return the event that happens when `future` is done, and fails where it failed."""
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
            StateError: it is set already. One event stands for one moment: used again for a later
                step it would not hold back that step's transfers.

        And what a callback raises, once all of them were called. After an interrupt some transfers
        may still wait: close their mover.
        """
        with self._lock:
            if self._moment.poll():
                raise StateError("this HostEvent is set already; make a new one for each step")
            self._error = error
            self._moment.end(None)
            callbacks, self._callbacks = self._callbacks, []
        # All of them, whatever one raises: each is a transfer of its own that would never end.
        errors: list[BaseException] = []
        for callback in callbacks:
            try:
                callback()
            except BaseException as raised:
                errors.append(raised)
        if errors:
            raise errors[0]

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


def _set_event() -> HostEvent:
    event = HostEvent()
    event.set()
    return event


READY: Final[Event] = _set_event()
"""The event that has happened: for transfers with nothing to wait for."""


class Mover(Closing):
    """Copies blocks between a layout and an arena, without holding up the caller.

    A job so brief that handing it to others takes longer may be over when it is submitted.

    What does not depend on the device is here: the checks, all of them made before anything is
    queued, so that a call that raises has changed nothing.
    """

    def __init__(self, layout: BlockLayout, arena: HostArena) -> None:
        """Tie a layout to an arena.

        Raises:
            ConfigError: a slot of the arena is smaller than a block of the layout. It may be
                larger: groups with blocks of several sizes share an arena.
            StateError: the arena is closed.
        """
        arena.check_open()
        if arena.slot_bytes < layout.slot_bytes:
            raise ConfigError(
                f"the arena's slot_bytes is {arena.slot_bytes}, a block of the layout has "
                f"{layout.slot_bytes} bytes; build HostArena(num_slots, layout.slot_bytes), with "
                "several layouts of the largest"
            )
        self._layout = layout
        self._arena = arena

    @property
    def layout(self) -> BlockLayout:
        """The device side."""
        return self._layout

    @property
    def arena(self) -> HostArena:
        """The host side."""
        return self._arena

    def store(self, block_ids: Ints, host_slots: Ints, *, after: Event) -> Ticket:
        """Copy device block `block_ids[i]` to host slot `host_slots[i]`, for every i.

        Args:
            block_ids: shape [n], 1 to `num_blocks - 1`; copied, the array may be reused.
            host_slots: shape [n], 0 to `num_slots - 1`, none twice; copied.
            after: the compute that fills the blocks. Nothing is read before it.

        Raises:
            InvalidBlock: an id or slot out of range, the null block, or a host slot given twice.
            ConfigError: not 1-D integers of the same length, or `after` is no `Event`.
            StateError: the mover or its arena is closed, or belongs to the parent process.
        """
        self._check_open()
        ids, slots = self._checked_pairs(block_ids, host_slots, after)
        _refuse_repeated("host_slots", slots)
        return self._submit_store(ids, slots, after)

    def load(self, host_slots: Ints, block_ids: Ints, *, after: Event) -> Ticket:
        """Copy host slot `host_slots[i]` to device block `block_ids[i]`, for every i.

        Args:
            host_slots: shape [n], 0 to `num_slots - 1`; copied, the array may be reused.
            block_ids: shape [n], 1 to `num_blocks - 1`, none twice; copied.
            after: the compute that may still read the blocks. Nothing is written before it.

        Raises:
            InvalidBlock: an id or slot out of range, the null block, or a block id given twice.
            ConfigError: not 1-D integers of the same length, or `after` is no `Event`.
            StateError: the mover or its arena is closed, or belongs to the parent process.
        """
        self._check_open()
        ids, slots = self._checked_pairs(block_ids, host_slots, after)
        _refuse_repeated("block_ids", ids)
        return self._submit_load(slots, ids, after)

    @abstractmethod
    def close(self) -> None:
        """End every job and stop; calling it again does nothing.

        Jobs whose event has happened are carried out, unless they wait for a job whose event has
        not; all others fail. When it returns, every ticket has ended and nothing touches layout or
        arena any more. If it is interrupted, no job can be submitted any more; call it again.
        """

    @abstractmethod
    def _check_open(self) -> None:
        """Raise `StateError` after `close`."""

    @abstractmethod
    def _submit_store(self, block_ids: Index, host_slots: Index, after: Event) -> Ticket:
        """Queue a store of checked pairs; the arrays are the mover's to keep."""

    @abstractmethod
    def _submit_load(self, host_slots: Index, block_ids: Index, after: Event) -> Ticket:
        """Queue a load of checked pairs; the arrays are the mover's to keep."""

    def _checked_pairs(
        self, block_ids: Ints, host_slots: Ints, after: Event
    ) -> tuple[Index, Index]:
        """Both arrays as int64 copies, in range, of the same length, without the null block."""
        check_event(after)
        self._arena.check_open()
        ids = _checked_ids("block_ids", block_ids, self._layout.num_blocks, has_null=True)
        slots = _checked_ids("host_slots", host_slots, self._arena.num_slots)
        if len(ids) != len(slots):
            raise ConfigError(
                f"{len(ids)} block_ids but {len(slots)} host_slots; give one slot per block"
            )
        return ids, slots


def check_event(after: object) -> None:
    """Raise `ConfigError` unless `after` is an `Event`."""
    # What isinstance(after, Event) asks of a protocol in 5 to 10 us, most of a brief job's time.
    if not (
        callable(getattr(after, "wait", None))
        and callable(getattr(after, "add_done_callback", None))
    ):
        way_out = "pass READY where there is nothing to wait for"
        if isinstance(after, Future):
            way_out = "pass HostEvent.of(future)"
        raise ConfigError(
            f"after must be an Event (wait, add_done_callback), got {after!r}; {way_out}"
        )


def _checked_ids(name: str, values: Ints, bound: int, *, has_null: bool = False) -> Index:
    """A copy of `values` as int64, each from 0 to `bound - 1`, without the null block if any."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{name} must be 1-D integers ({error}); pass a flat array") from error
    # An empty list has no integer type of its own.
    is_empty_list = array.size == 0 and not isinstance(values, np.ndarray)
    if array.ndim != 1 or not (array.dtype.kind in "iu" or is_empty_list):
        raise ConfigError(
            f"{name} must be 1-D integers, got {array.dtype} of shape {array.shape}; "
            "pass a flat array of an integer type"
        )
    if array.size:
        # As Python ints: an unsigned 64-bit value must not wrap on its way to int64.
        items = array.tolist() if array.size <= _FEW else (array.min().item(), array.max().item())
        low, high = min(items), max(items)
        if low < 0 or high >= bound:
            wrong = low if low < 0 else high
            position = int(np.argmin(array) if low < 0 else np.argmax(array))
            raise InvalidBlock(
                f"{name}[{position}] is {wrong}, outside 0 to {bound - 1}; it belongs to another "
                "pool, or the pool is larger than its memory"
            )
        if has_null and low == 0:
            raise InvalidBlock(
                f"{name}[{int(np.argmin(array))}] is 0, the null block, which holds nothing; "
                "leave null blocks out"
            )
    return array.astype(np.int64)


def _refuse_repeated(name: str, values: Index) -> None:
    """Raise `InvalidBlock` if a destination is named twice: which copy is last is not defined."""
    if len(values) <= _FEW and len(set(values.tolist())) == len(values):
        return
    ordered = np.sort(values)
    repeated = np.flatnonzero(ordered[1:] == ordered[:-1])
    if len(repeated):
        raise InvalidBlock(
            f"{name} names destination {int(ordered[repeated[0]])} more than once in one job; "
            "give each destination once"
        )
