"""The ticket of a submitted transfer, which reports the transfer's end once.

A ticket is not a `concurrent.futures.Future`, for four reasons:

- A Future guards its state with a Condition, which is Python code. An interrupt or a fork in the
  middle of it can leave the lock held for ever.
- A Future has no `source_released`, no damaged slots, and a `cancel` that no copy under way obeys.
- Nothing sets the end of a transfer on a device: the caller of `poll` asks the device for it.
- To make and to end a Future takes 7 us, seven times as long as a `HostTicket` takes.
"""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstow._core import ChecksumMismatch, ConfigError, KvstowError, TransferError

NOT_BEGUN: Final = "the mover was closed before the transfer began; nothing was copied"


class TransferTimeout(KvstowError, TimeoutError):
    """`Ticket.wait` ran out of time: the transfer is still queued or under way.

    This is not a `TransferError`. A failed transfer touches nothing any more. A late one may still
    write, so its blocks and slots must stay pinned.
    """


class DamagedSlots(ChecksumMismatch):
    """Host slots of one load do not hold what was stored in them.

    Attributes:
        slots: all damaged slots of the transfer, in its order.
    """

    def __init__(self, message: str, slots: Sequence[int] = ()) -> None:
        """Name the damaged slots; the message is about the first of them."""
        others = f" (the first of {len(slots)} damaged slots)" if len(slots) > 1 else ""
        super().__init__(message + others)
        self.slots = tuple(slots)


class Ticket(ABC):
    """One submitted store or load.

    The transfer has ended well when every byte has arrived. Then nothing reads its source any more.
    """

    @abstractmethod
    def poll(self) -> bool:
        """Return whether the transfer has ended, well or not. Never blocks, never raises."""

    def source_released(self) -> bool:
        """Return whether the transfer reads its source no more, which may be before it ends.

        The device blocks of a store may be reused then. Never blocks, never raises.
        """
        return self.poll()

    @property
    @abstractmethod
    def error(self) -> TransferError | None:
        """Why the transfer failed; None while it is under way and after success."""

    @property
    def damaged_slots(self) -> tuple[int, ...]:
        """Host slots of this transfer that failed their check, once it has ended.

        Empty after any other failure: the slots may still hold what was stored in them.
        """
        error = self.error
        return error.slots if isinstance(error, DamagedSlots) else ()

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> None:
        """Block until the transfer has ended, for at most `timeout_s` seconds.

        A timeout of 0 or less does not block. An infinite timeout equals None.

        Raises:
            TransferError: the transfer failed. It touches its blocks and slots no more. The content
                of the destination is undefined.
            TransferTimeout: the transfer has not ended in time.
            ConfigError: the timeout is not a number.
        """


class HostTicket(Ticket):
    """A ticket that the thread which makes the copy ends.

    Attributes:
        is_cancelled: whether the call that submits the transfer was interrupted.
    """

    def __init__(self) -> None:
        """Begin under way."""
        self.is_cancelled = False
        self._has_ended = False
        self._error: TransferError | None = None
        # Each waiter has its own lock, so an interrupted waiter takes nothing from the others.
        # Nearly all tickets have no waiter, and so no lock.
        self._waiting: list[threading.Lock] = []

    def poll(self) -> bool:
        """Return whether the transfer has ended, well or not."""
        return self._has_ended

    @property
    def error(self) -> TransferError | None:
        """Why the transfer failed; None while it is under way and after success."""
        return self._error if self._has_ended else None

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until the transfer has ended; see `Ticket.wait`."""
        patience_s = -1.0 if timeout_s is None else checked_timeout_s(timeout_s)  # -1: for ever
        if not self._has_ended:
            has_ended = threading.Lock()
            has_ended.acquire()
            self._waiting.append(has_ended)
            # Look again: `end` may have gone through the list before this lock was in it.
            if not self.poll() and not has_ended.acquire(timeout=patience_s):
                raise late(timeout_s)
        if self._error is not None:
            raise self._error

    def end(self, error: TransferError | None) -> None:
        """Report the end, once."""
        self._error = error
        self._has_ended = True
        for has_ended in self._waiting:
            has_ended.release()


class Deadline:
    """The end of a wait for several tickets, which share one timeout."""

    def __init__(self, timeout_s: float | None) -> None:
        """Begin the wait. None: it never ends."""
        self._end_s = None if timeout_s is None else time.monotonic() + timeout_s

    @property
    def left_s(self) -> float | None:
        """Seconds that the wait may still take, 0 or more; None: as many as it needs."""
        return None if self._end_s is None else max(0.0, self._end_s - time.monotonic())


def late(timeout_s: float | None) -> TransferTimeout:
    """Return the error of a wait that ran out of time."""
    return TransferTimeout(
        f"the transfer has not ended within {timeout_s} s; keep its blocks and slots pinned and "
        "wait again"
    )


def failure(error: BaseException) -> TransferError:
    """Return the `TransferError` of a transfer that `error` ended."""
    if isinstance(error, TransferError):
        return error
    try:
        reason = f"{error!r}"
    except BaseException:
        # The error's own code. If it raised here, the transfer and all later ones would never end.
        reason = f"{type(error).__name__}, whose __repr__ raises"
    failed = TransferError(f"the transfer failed ({reason}); the destination is undefined")
    failed.__cause__ = error
    return failed


def find_damage(  # noqa: PLR0913, PLR0917 - a comparison and its words
    slots: npt.NDArray[np.integer],
    found: npt.NDArray[np.unsignedinteger],
    expected: npt.NDArray[np.integer],
    is_known: npt.NDArray[np.bool_],
    expectation: str = "what was stored in it",
    advice: str = "",
) -> DamagedSlots | None:
    """Return the error of the slots whose checksum is not the expected one; None if there are none.

    Args:
        slots: shape [n], the compared slots.
        found: shape [n], the checksum that each has now.
        expected: shape [n], the checksum that each should have.
        is_known: shape [n], whether `expected` holds a checksum for it.
        expectation: what a slot should hold, for the message.
        advice: what follows the checksums in the message.
    """
    damaged = np.flatnonzero((found != expected) | ~is_known)
    if not len(damaged):
        return None
    first, width = damaged[0], 2 + 2 * found.itemsize
    return DamagedSlots(
        f"host slot {slots[first]} does not hold {expectation}: its checksum is "
        f"{found[first]:#0{width}x}, not {expected[first]:#0{width}x}{advice}"
        if is_known[first]
        else f"host slot {slots[first]} was never stored through a mover that keeps checksums",
        slots[damaged].tolist(),
    )


def outcome(
    tickets: Iterable[Ticket], host_slots: Sequence[int] | npt.NDArray[np.integer]
) -> bool | list[bool]:
    """Block until the transfers of one job have ended, and return their outcome.

    Args:
        tickets: the tickets of the job.
        host_slots: shape [n], the slots of the job in its order.

    Returns:
        True if all went well. One bool for each of `host_slots` if a check found damaged slots:
        False where the slot is damaged. False if the job failed for other reasons only.
    """
    is_well, damaged = True, set[int]()
    for ticket in tickets:
        try:
            ticket.wait()
        except TransferError:
            is_well = False
            damaged.update(ticket.damaged_slots)
    sound = [slot not in damaged for slot in np.asarray(host_slots).tolist()]
    return is_well if all(sound) else sound


def checked_timeout_s(timeout_s: float) -> float:
    """Return `timeout_s`, limited to what a lock can wait; raise `ConfigError` if not a number."""
    # A bool is an int to Python, but True is never meant as a timeout.
    is_number = isinstance(timeout_s, int | float | np.integer | np.floating)
    if not is_number or isinstance(timeout_s, bool) or math.isnan(timeout_s):
        raise ConfigError(
            f"timeout_s is {timeout_s!r}, expected a number of seconds: pass seconds, or None to "
            "wait for ever"
        )
    return float(min(max(timeout_s, 0.0), threading.TIMEOUT_MAX))
