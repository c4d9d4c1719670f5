"""The ticket of a tier's job, which answers once: when the job has ended, or when it is late.

A late job may still read or write the host slots. So a ticket has two ends:

```
submitted ---- poll() is False ----+-- the job ends in time ----> ok: one bool per block
                                   |
                                   +-- the deadline passes -----> ok: all False, is_late
                                       ... the job ends later --> has_ended
```

A forked child has none of the tier's threads, so there each ticket has ended, with an error.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvstow._core import ConfigError, StateError, TransferError
from kvstow.transfer.fork import FORKED_TRANSFER, close_in_children
from kvstow.transfer.ticket import HostTicket, TransferTimeout, checked_timeout_s, late

Bools: TypeAlias = npt.NDArray[np.bool_]


class _Watched(threading.local):
    tickets: list[TierTicket] | None = None


_watched = _Watched()


@contextmanager
def tickets_made(tickets: list[TierTicket]) -> Iterator[None]:
    """Append to `tickets` each ticket that this thread announces.

    So a caller knows the ticket of a call that raises, for example by Ctrl-C. While a call within
    it watches too, only that one gets the tickets.
    """
    before, _watched.tickets = _watched.tickets, tickets
    try:
        yield
    finally:
        _watched.tickets = before


class TierTicket:
    """One job of a tier. One thread uses the ticket; any thread may end it.

    Attributes:
        num_blocks: blocks of the job.
        deadline: the time of `time.monotonic` after which an answer counts as late; None for none.
    """

    def __init__(
        self,
        num_blocks: int,
        deadline: float | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin under way.

        Raises:
            ConfigError: the deadline is not a number.
        """
        self.num_blocks = num_blocks
        self.deadline = checked_deadline(deadline)
        self._clock = clock
        self._moment = HostTicket()
        close_in_children(self)
        self._ok = np.zeros(num_blocks, np.bool_)
        self._error: TransferError | None = None
        # Never taken back, so that an answer does not change after it was read.
        self._is_late = False

    def announce(self) -> None:
        """Report this ticket to `tickets_made`, before its work begins.

        From here on somebody may wait for its end. So a call that raises later ends it, unless its
        work has begun.
        """
        if _watched.tickets is not None:
            _watched.tickets.append(self)

    def poll(self) -> bool:
        """Return whether there is an answer. Never blocks, never raises."""
        if not self._moment.poll() and self._has_passed():
            self._is_late = True
        return self._is_late or self._moment.poll()

    @property
    def has_ended(self) -> bool:
        """Whether the tier touches the job's host slots no more. Keep them reserved until then."""
        return self._moment.poll()

    @property
    def is_late(self) -> bool:
        """Whether the deadline passed before the job ended, as far as `poll` or its end found."""
        return self._is_late

    @property
    def ok(self) -> Bools:
        """Shape [num_blocks], True for each block that arrived and was proven; the caller's copy.

        Raises:
            StateError: there is no answer yet.
        """
        if not self.poll():
            raise StateError("the job has no answer yet; call wait(), or poll() until it is True")
        return np.zeros(self.num_blocks, np.bool_) if self._is_late else self._ok.copy()

    @property
    def error(self) -> TransferError | None:
        """Why blocks failed together. None if none did, and for blocks that are only missing."""
        return self._error if self._moment.poll() else None

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until there is an answer, for at most `timeout_s` seconds.

        A timeout of 0 or less does not block.

        Raises:
            TransferTimeout: there is no answer in time.
            ConfigError: the timeout is not a number.
        """
        patience_s = math.inf if timeout_s is None else checked_timeout_s(timeout_s)
        end_s = self._clock() + patience_s
        while not self.poll():
            now_s = self._clock()
            if now_s >= end_s:
                raise late(timeout_s)
            left_s = min(end_s, math.inf if self.deadline is None else self.deadline) - now_s
            try:
                self._moment.wait(None if math.isinf(left_s) else left_s)
            except TransferTimeout:
                continue

    def wait_until_ended(self, timeout_s: float | None = None) -> None:
        """Block until the job `has_ended`, late or not, for at most `timeout_s` seconds.

        Raises:
            TransferTimeout: it has not ended in time.
            ConfigError: the timeout is not a number.
        """
        self._moment.wait(timeout_s)

    def end(self, ok: Bools | None = None, error: TransferError | None = None) -> None:
        """Report the end, once. The tier calls it when it touches the host slots no more.

        Args:
            ok: shape [num_blocks]; None for all False.
            error: why blocks failed, if they failed together.
        """
        if ok is not None:
            self._ok = ok
        self._error = error
        if self._has_passed():
            self._is_late = True
        self._moment.end(None)

    def close_in_child(self) -> None:
        """End in a forked child."""
        if not self._moment.poll():
            self._error = TransferError(FORKED_TRANSFER)
            self._moment.end(None)

    def _has_passed(self) -> bool:
        return self.deadline is not None and self._clock() > self.deadline


def checked_deadline(deadline: float | None) -> float | None:
    """Return a deadline as a float; raise `ConfigError` if it is no number."""
    if deadline is None:
        return None
    is_number = isinstance(deadline, int | float | np.integer | np.floating)
    if not is_number or isinstance(deadline, bool) or math.isnan(deadline):
        raise ConfigError(
            f"deadline is {deadline!r}, expected a time in seconds: pass time.monotonic() plus the "
            "seconds that the job may take, or None"
        )
    return float(deadline)
