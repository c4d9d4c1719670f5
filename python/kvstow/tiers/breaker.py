"""A circuit breaker: after several failures in a row, callers leave a store alone for a while.

```
closed ---- num_failures in a row ----> open ---- pause over ----> one try
  ^                                       ^                         |   |
  |                                       +--- it fails: longer ----+   |
  +------------------------------- it succeeds ------------------------+
```
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Final

from kvstow._core import TransferError

FIRST_PAUSE_S: Final = 1.0
LAST_PAUSE_S: Final = 30.0
LOG_EVERY_S: Final = 60.0
"""A store that fails and answers in turn fills no log: the log says so once in this time."""
FAIR_S: Final = 0.02
"""A store that had less time to answer has not failed."""

# What the log says when a breaker opens, of which store and why, and when it closes.
FAILS: Final = (
    "kvstow: the shared tier at %s fails (%s). It is left alone for some seconds at a time, and "
    "its blocks are recomputed"
)
ANSWERS_AGAIN: Final = "kvstow: the shared tier at %s answers again"


def with_times(why: object, num_times: int) -> str:
    """Return why a store fails, and how often it has begun to since the log last said so."""
    return f"{why}" if num_times == 1 else f"{why}; {num_times} times since the last such warning"


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
        self._num_opened = 0
        self._logged_s, self._is_logged = -math.inf, False

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
        """Close the breaker, and return whether the log has said that it was open."""
        with self._lock:
            was_logged, self._is_logged = self._is_logged, False
            self._num_failed, self._pause_s = 0, FIRST_PAUSE_S
        return was_logged

    def failed(self) -> int:
        """Count a failure, and return 0, unless the caller is to log that the breaker is open.

        Then return how often it has opened since the log last said so. It says so at once, and then
        again `LOG_EVERY_S` later at the earliest.

        Calls that were under way when it opened may fail too. They make no pause longer.
        """
        with self._lock:
            self._num_failed += 1
            if self._num_failed < self._num_allowed:
                return 0
            is_first = self._num_failed == self._num_allowed
            self._num_opened += is_first
            if is_first or self._is_trying:
                self._is_trying = False
                self._open_until = self._clock() + self._pause_s
                self._pause_s = min(2 * self._pause_s, LAST_PAUSE_S)
            if self._is_logged or self._clock() < self._logged_s + LOG_EVERY_S:
                return 0
            self._logged_s, self._is_logged = self._clock(), True
            num_opened, self._num_opened = self._num_opened, 0
        return num_opened
