"""The pace of stores while the engine computes.

A store is in no hurry, but its kernels and copies take memory bandwidth from the engine's compute.
So while that compute runs, a lane queues only so many bytes at a time. Loads have no pace, because
a request waits for each.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class Pace:
    """The bytes that may be queued now.

    They grow with the time between two polls, and not beyond what that time gives. So the rate is
    bounded, and yet an engine whose steps are long can queue more at each poll.
    """

    def __init__(
        self,
        bytes_per_ms: int,
        burst_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with a burst.

        Args:
            bytes_per_ms: the rate.
            burst_bytes: what may be queued at once after a pause.
            clock: returns seconds.
        """
        self._bytes_per_s, self._burst_bytes, self._clock = 1000 * bytes_per_ms, burst_bytes, clock
        self.restart()

    def restart(self) -> None:
        """Allow a burst, and nothing more until time passes."""
        self._allowed_bytes: float = self._burst_bytes
        self._since_s = self._clock()

    def refill(self) -> None:
        """Allow what the time since the last refill gives."""
        now_s = self._clock()
        earned_bytes = self._bytes_per_s * (now_s - self._since_s)
        self._since_s = now_s
        most_bytes = max(self._burst_bytes, earned_bytes)
        self._allowed_bytes = min(self._allowed_bytes + earned_bytes, most_bytes)

    def take(self, num_bytes: int) -> bool:
        """Return whether `num_bytes` may be queued now, and count them if so.

        The last batch may exceed what is allowed. The next one then waits longer.
        """
        if self._allowed_bytes <= 0:
            return False
        self._allowed_bytes -= num_bytes
        return True
