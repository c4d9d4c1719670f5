"""A slot file of eight blocks whose file calls fail as a row of `disk_faults` asks."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from tests.tiers.setup import (
    MODEL,
    SLOT_BYTES,
    Here,
    blocks_of,
    bytes_of,
    key_of,
    open_file,
)

from kvstow.tiers import Fingerprint, SlotTier
from kvstow.tiers.files import Buffers
from kvstow.transfer import HostArena

NUM: Final = 8
KEYS: Final = [key_of(number) for number in range(NUM)]
OTHER: Final = Fingerprint({"model": "b", "rank": 0, "world_size": 1})
LATE_S: Final = 0.2


class Bad(Here):
    """File calls that fail as a row asks."""

    read_error = write_error = 0
    loses_data = tears_data = loses_frames = False
    shift_s = slow_s = 0.0
    gate: threading.Event | None = None

    def now(self) -> float:
        return super().now() + self.shift_s

    def read(self, file: int, buffers: Buffers, offset: int) -> int:
        if self.gate is not None:
            self.gate.wait(20)
        time.sleep(self.slow_s)
        if self.read_error:
            raise OSError(self.read_error, os.strerror(self.read_error))
        return super().read(file, buffers, offset)

    def write(self, file: int, buffers: Buffers, offset: int) -> int:
        if self.write_error:
            raise OSError(self.write_error, os.strerror(self.write_error))
        num_bytes = sum(map(len, buffers))
        is_data = num_bytes % SLOT_BYTES == 0
        if self.loses_data if is_data else self.loses_frames:
            return num_bytes
        if is_data and self.tears_data:
            super().write(file, [buffers[0][: num_bytes // 2]], offset)
            return num_bytes
        return super().write(file, buffers, offset)


@dataclass
class Seen:
    """What a request sees.

    Attributes:
        hits: blocks that came back.
        wrong: of these, blocks with other bytes.
        error: what an opening or a call raised; empty for nothing.
        leaks: what is still in use at the end.
        recover_ms: until everything works again; None where that was not tried.
    """

    hits: int = 0
    wrong: int = 0
    error: str = ""
    leaks: int = 0
    recover_ms: float | None = None

    def text(self) -> str:
        return self.error or f"{self.hits} hit, {NUM - self.hits} miss"


class Disk:
    """A slot file of a row."""

    def __init__(self, folder: Path, arena: HostArena, files: Bad | None = None) -> None:
        self.folder, self.arena, self.files = folder, arena, files or Bad()
        self.epoch, self.model, self.mismatch = 0, MODEL, "refuse"
        self.keys = list(KEYS)  # what the request believes to be in each slot
        self.deadline_s: float | None = None
        self.tier = self.open()

    def open(self) -> SlotTier:
        return open_file(
            self.folder, self.arena, model=self.model, files=self.files, on_mismatch=self.mismatch
        )

    def reopen(self) -> None:
        self.tier.close()
        self.tier = self.open()

    def put(self) -> None:
        for row, key in enumerate(KEYS):
            self.arena.slots[row] = bytes_of(key, self.epoch)
        self.tier.put(blocks_of(KEYS, range(NUM)), range(NUM)).wait(20)

    def get(self) -> tuple[int, int]:
        host = np.arange(NUM, 2 * NUM)
        deadline = None if self.deadline_s is None else self.files.now() + self.deadline_s
        ticket = self.tier.get(blocks_of(self.keys, range(NUM)), host, deadline=deadline)
        ticket.wait(20)
        hits = np.flatnonzero(ticket.ok)
        wrong = [at for at in hits if (self.arena.slots[NUM + at] != self.expected(at)).any()]
        return len(hits), len(wrong)

    def expected(self, at: int) -> np.ndarray[Any, Any]:
        return bytes_of(self.keys[at], self.epoch)

    def path(self, name: str = "slots") -> Path:
        return self.folder / name
