"""The memory and the events of the host mover's tests."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvstow.transfer import (
    BlockLayout,
    HostArena,
    HostMover,
)

Bytes = npt.NDArray[np.uint8]

LONG_S = 60.0  # limit for what should happen at once; only a defect waits this long
SHORT_S = 0.05  # time for what should not happen at all


class Setup:
    """A device pool of random bytes, an arena of random bytes, and a mover between them."""

    def __init__(self, num_blocks: int, num_slots: int, block_bytes: int, num_regions: int) -> None:
        rng = np.random.default_rng(1)
        self.device = [
            rng.integers(0, 256, (num_blocks, block_bytes), dtype=np.uint8)
            for _ in range(num_regions)
        ]
        self.layout = BlockLayout.from_arrays(self.device)
        self.arena = HostArena(num_slots, self.layout.slot_bytes)
        self.arena.slots[:] = rng.integers(0, 256, self.arena.slots.shape, dtype=np.uint8)
        self.mover = HostMover(self.layout, self.arena)

    def block(self, block_id: int) -> Bytes:
        return np.concatenate([region[block_id] for region in self.device])

    def snapshot(self) -> tuple[list[Bytes], Bytes]:
        return [region.copy() for region in self.device], self.arena.slots.copy()

    def unchanged(self, snapshot: tuple[list[Bytes], Bytes]) -> bool:
        device, slots = snapshot
        return np.array_equal(device, self.device) and np.array_equal(slots, self.arena.slots)


def close_in_time(setup: Setup) -> None:
    """Close the mover on another thread, so that a close that hangs fails the test."""
    closing = threading.Thread(target=setup.mover.close, daemon=True)
    closing.start()
    closing.join(LONG_S)
    assert not closing.is_alive(), "close hangs"


class Observed:
    """An event that has happened. It records whether and in which thread `wait` was called."""

    passed = False
    thread: threading.Thread | None = None

    def wait(self) -> None:
        self.passed = True
        self.thread = threading.current_thread()

    def add_done_callback(self, callback: Callable[[], None], /) -> None:
        callback()


class Held(Observed):
    """An event that has happened, but whose `wait` blocks the copying thread until `go`."""

    def __init__(self) -> None:
        self.reached, self.go = threading.Event(), threading.Event()

    def wait(self) -> None:
        super().wait()
        self.reached.set()
        assert self.go.wait(LONG_S)
