"""File calls that fail, lie, or do not return, as a seed says."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from typing import Final

from tests.tiers.setup import LONG_S, SLOT_BYTES, Here

from kvstow.tiers.files import Buffers

READ_FAULTS: Final = ("fail", "flip", "short", "slow", "other block", "hang")
WRITE_FAULTS: Final = ("fail", "full", "lose", "tear", "elsewhere", "short", "slow", "hang")


class Faulty(Here):
    """File calls of which some go wrong.

    Attributes:
        faults: how often each fault has been injected.
        without: faults that are never injected.
    """

    def __init__(self, seed: int, rate: float) -> None:
        self.faults: dict[str, int] = {}
        self.rate = rate
        self.without: frozenset[str] = frozenset()
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._may_hang = False
        self._let_go = threading.Event()
        self._shift_s = 0.0

    def now(self) -> float:
        return super().now() + self._shift_s

    def jump(self, seconds: float) -> None:
        """Let the clock of deadlines jump."""
        self._shift_s += seconds

    def release(self) -> None:
        """Let the calls that hang go on, and no more calls hang."""
        self._may_hang = False
        self._let_go.set()

    def hang_again(self) -> None:
        """Let calls hang from now on."""
        self._let_go.clear()
        self._may_hang = True

    def read(self, file: int, buffers: Buffers, offset: int) -> int:
        fault = self._draw(READ_FAULTS)
        if fault == "fail":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if fault == "short":
            return super().read(file, [buffers[0][: len(buffers[0]) // 8 * 4]], offset)
        if fault == "other block" and offset >= SLOT_BYTES:
            offset -= SLOT_BYTES
        self._delay(fault)
        num_bytes = super().read(file, buffers, offset)
        if fault == "flip" and num_bytes > 0:
            buffer = buffers[self._random.randrange(len(buffers))]
            buffer[self._random.randrange(len(buffer))] ^= 1 << self._random.randrange(8)
        return num_bytes

    def write(self, file: int, buffers: Buffers, offset: int) -> int:
        fault = self._draw(WRITE_FAULTS)
        num_bytes = sum(map(len, buffers))
        if fault == "fail":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if fault == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if fault == "lose":
            return num_bytes
        if fault == "tear":
            super().write(file, [buffers[0][: len(buffers[0]) // 2]], offset)
            return num_bytes
        if fault == "short":
            return super().write(file, [buffers[0][: len(buffers[0]) // 8 * 4]], offset)
        if fault == "elsewhere" and offset >= 2 * SLOT_BYTES:
            offset -= SLOT_BYTES
        self._delay(fault)
        return super().write(file, buffers, offset)

    def _delay(self, fault: str | None) -> None:
        if fault == "slow":
            time.sleep(0.002)
        elif fault == "hang":
            assert self._let_go.wait(LONG_S)

    def _draw(self, faults: tuple[str, ...]) -> str | None:
        with self._lock:
            if self._random.random() >= self.rate:
                return None
            fault = self._random.choice(faults)
            if fault in self.without:
                return None
            if fault == "hang" and (not self._may_hang or self._random.random() < 0.8):
                return None
            self.faults[fault] = self.faults.get(fault, 0) + 1
            return fault
