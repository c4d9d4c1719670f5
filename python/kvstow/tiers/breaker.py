"""A circuit breaker: after several failures in a row, callers leave a store alone for a while.

```
closed ---- num_failures in a row ----> open ---- pause over ----> one try
  ^                                       ^                         |   |
  |                                       +--- it fails: longer ----+   |
  +------------------------------- it succeeds ------------------------+
```
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from kvstow._core import TransferError

FIRST_PAUSE_S: Final = 1.0
LAST_PAUSE_S: Final = 30.0
FAIR_S: Final = 0.02
"""A store that had less time to answer has not failed."""

# What the log says when a breaker opens, of which store and why, and when it closes.
FAILS: Final = (
    "kvstow: the shared tier at %s fails (%s). It is left alone for some seconds at a time, and "
    "its blocks are recomputed"
)
ANSWERS_AGAIN: Final = "kvstow: the shared tier at %s answers again"


def left_alone(store: object) -> TransferError:
    """Return why a store is not asked while its breaker is open."""
    return TransferError(f"{store} has failed and is left alone for a while")


class Breaker:
    """Decides whether callers may ask a store. Any thread may use it."""

    def __init__(
        self, num_failures: int = 3, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begin closed. It opens after `num_failures` failures in a row."""
        self._num_allowed = num_failures
        self._clock = clock
        self._lock = threading.Lock()
        self._num_failed = 0
        self._pause_s = FIRST_PAUSE_S
        self._open_until = 0.0
        self._is_trying = False

    @property
    def is_open(self) -> bool:
        """Whether callers leave the store alone now."""
        return self._num_failed >= self._num_allowed and self._clock() < self._open_until

    def may_try(self) -> bool:
        """Return whether the caller may ask the store. The caller then reports how that went.

        After a pause one caller may. The others may once that caller has succeeded.
        """
        with self._lock:
            if self._num_failed < self._num_allowed:
                return True
            now_s = self._clock()
            if now_s < self._open_until:
                return False
            self._open_until = now_s + self._pause_s  # for the others
            self._is_trying = True
            return True

    def succeeded(self) -> bool:
        """Close the breaker, and return whether it was open."""
        with self._lock:
            was_open = self._num_failed >= self._num_allowed
            self._num_failed, self._pause_s = 0, FIRST_PAUSE_S
        return was_open

    def failed(self) -> bool:
        """Count a failure, and return whether it opens the breaker for the first time.

        Calls that were under way when it opened may fail too. They make no pause longer.
        """
        with self._lock:
            self._num_failed += 1
            if self._num_failed < self._num_allowed:
                return False
            is_first = self._num_failed == self._num_allowed
            if is_first or self._is_trying:
                self._is_trying = False
                self._open_until = self._clock() + self._pause_s
                self._pause_s = min(2 * self._pause_s, LAST_PAUSE_S)
        return is_first
