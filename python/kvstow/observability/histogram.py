"""Histograms of transfers: how long they take, and how many bytes they copy."""

from bisect import bisect_left
from itertools import accumulate
from math import inf
from typing import Final

DURATION_BOUNDS_S: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0,
    10.0, 30.0, 60.0,
)  # fmt: skip
"""From a brief copy on the host to the default deadline of the vLLM connector."""

SIZE_BOUNDS_BYTES: Final = tuple(float(4**power) for power in range(8, 18))
"""From one small block, 64 KiB, to 16 GiB."""


def bucket(key: str, bound: float) -> str:
    """Return the key of the number of values up to `bound`. Their sum has the key `key`."""
    return f"{key} le {bound:g}"


class Histogram:
    """Counts values by size.

    Args:
        key: the key of the sum of the values, which the caller keeps.
        bounds: the largest value of each bucket. One more bucket takes what is larger.
    """

    def __init__(self, key: str, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._keys = [bucket(key, bound) for bound in (*bounds, inf)]
        self._counts = [0] * len(self._keys)

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1

    def stats(self) -> dict[str, float]:
        """Return the number of values up to each bound, by `bucket`."""
        return dict(zip(self._keys, accumulate(self._counts), strict=True))
