"""The bytes that a tier below the host may write per second."""

from typing import Final

ALL: Final = 2**31 - 1
"""A number of blocks without a bound."""


class Budget:
    """Bounds the bytes that are written per second. It saves up at most a second's bytes."""

    def __init__(self, bytes_per_s: int | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._left = float(bytes_per_s or 0)
        self._at_s: float | None = None

    def num_blocks(self, block_bytes: int, now_s: float) -> int:
        """Return the blocks that may be written now."""
        if self._bytes_per_s is None:
            return ALL
        passed_s = 0.0 if self._at_s is None else max(0.0, now_s - self._at_s)
        self._at_s = now_s
        most = float(max(self._bytes_per_s, block_bytes))
        self._left = min(most, self._left + passed_s * self._bytes_per_s)
        return int(self._left // block_bytes)

    def spend(self, num_bytes: int) -> None:
        """Count bytes that are about to be written."""
        self._left -= num_bytes

    def take(self, num_blocks: int, block_bytes: int) -> int:
        """Return how many of these blocks may be written now, and count their bytes."""
        if self._bytes_per_s is not None:
            num_blocks = max(0, min(num_blocks, int(self._left // block_bytes)))
        self.spend(num_blocks * block_bytes)
        return num_blocks
