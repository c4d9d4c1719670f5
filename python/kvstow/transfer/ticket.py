"""What a submitted transfer is known by: a ticket, which ends once."""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvstow._core import ChecksumMismatch, ConfigError, KvstowError, TransferError

__all__ = [
    "DamagedSlots",
    "HostTicket",
    "Ticket",
    "TransferTimeout",
    "checked_timeout_s",
    "outcome",
]


class TransferTimeout(KvstowError, TimeoutError):
    """`Ticket.wait` gave up: the transfer is still queued or under way.

    Not a `TransferError`: a transfer that failed touches nothing any more, while one that is late
    may still write, so its blocks and slots must stay pinned.
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

    Done means that every byte has arrived, and so also that the source is no longer read.
    """

    @abstractmethod
    def poll(self) -> bool:
        """Whether the transfer has ended, well or not. Never blocks, never raises."""

    def source_released(self) -> bool:
        """Whether the source is no longer read, which may be before all has arrived.

        Of a store: its device blocks may be given away. Never blocks, never raises.
        """
        return self.poll()

    @property
    @abstractmethod
    def error(self) -> TransferError | None:
        """Why it failed; None while under way and after success."""

    @property
    def damaged_slots(self) -> tuple[int, ...]:
        """Host slots of this transfer whose content failed its check, once it has ended.

        Empty otherwise: after another failure the slots may still hold what was stored in them.
        """
        error = self.error
        return error.slots if isinstance(error, DamagedSlots) else ()

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> None:
        """Block until the transfer has ended, at most `timeout_s` seconds.

        A timeout of 0 or less does not block; an infinite one is as good as None.

        Raises:
            TransferError: it failed. Nothing touches its blocks or slots any more; what the
                destination holds is undefined.
            TransferTimeout: it has not ended in time.
            ConfigError: a timeout that is not a number.
        """


class HostTicket(Ticket):
    """A ticket that whoever makes the copy ends."""

    def __init__(self) -> None:
        """Begin under way."""
        self._has_ended = False
        self._error: TransferError | None = None
        # Each waiter has a lock of its own: one that is interrupted takes nothing from the others.
        # And a ticket that nobody waits for, as nearly all are, has none.
        self._waiting: list[threading.Lock] = []

    def poll(self) -> bool:
        """Whether the transfer has ended, well or not."""
        return self._has_ended

    @property
    def error(self) -> TransferError | None:
        """Why it failed; None while under way and after success."""
        return self._error if self._has_ended else None

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until the transfer has ended; see `Ticket.wait`."""
        patience_s = -1.0 if timeout_s is None else checked_timeout_s(timeout_s)  # -1: for ever
        if not self._has_ended:
            has_ended = threading.Lock()
            has_ended.acquire()
            self._waiting.append(has_ended)
            # Looked at again: `end` may have gone through the list just before.
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


def late(timeout_s: float | None) -> TransferTimeout:
    """Return the error of a wait that took too long."""
    return TransferTimeout(
        f"the transfer has not ended within {timeout_s} s; keep its blocks and slots pinned and "
        "wait again"
    )


def outcome(
    tickets: Iterable[Ticket], host_slots: Sequence[int] | npt.NDArray[np.integer]
) -> bool | list[bool]:
    """Block until the transfers of one job have ended, and return how they went.

    Args:
        tickets: of the job.
        host_slots: shape [n], the slots of the job in its order.

    Returns:
        True if all went well. If a check found damaged slots, one bool for each of `host_slots`,
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
    """Return `timeout_s`, from 0 to what a thread can wait; `ConfigError` for no number."""
    # A bool is an int: True is no timeout that anybody means.
    is_number = isinstance(timeout_s, int | float | np.integer | np.floating)
    if not is_number or isinstance(timeout_s, bool):
        raise ConfigError(
            f"timeout_s is {timeout_s!r}, not a number; pass seconds, or None to wait for ever"
        )
    if math.isnan(timeout_s):
        raise ConfigError("timeout_s is nan; pass seconds, or None to wait for ever")
    return float(min(max(timeout_s, 0.0), threading.TIMEOUT_MAX))
