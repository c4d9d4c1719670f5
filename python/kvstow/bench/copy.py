"""The speed of copies between the device's pool and host memory, beside the peak of the link.

Each row copies the same blocks in shuffled order, as after hours of use. A fragment is the part of
a block in one layer. Without a GPU the device's pool is host memory, and the peak is one memcpy of
all bytes. With a GPU the peak is one long copy to or from pinned memory. Every copied byte is
compared once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstow._core import ConfigError
from kvstow.transfer import (
    READY,
    BlockLayout,
    CudaEvent,
    Event,
    HostArena,
    Mover,
    Ticket,
    arena_for,
    mover_for,
)
from kvstow.transfer.cuda.link_speed import link_speed
from kvstow.transfer.cuda.runtime import cuda_runtime
from kvstow.transfer.mover import Direction

Device: TypeAlias = Literal["host", "cuda"]
LAYERS: Final = {4: 64, 16: 64, 64: 32, 512: 8}
"""Layers of a block, by KiB of a fragment."""
_DIRECTIONS: Final[tuple[Direction, ...]] = ("store", "load")


@dataclass(frozen=True, slots=True)
class CopyRow:
    """The best speed of one kind of copy.

    Attributes:
        fragment_kib: size of a block's part in one layer.
        num_layers: parts of a block.
        direction: "store" copies to host memory, "load" to the device's pool.
        gb_per_s: speed of the mover, from the submission of a job to its end.
        peak_gb_per_s: speed of one long copy.
        is_right: whether each byte arrived.
    """

    fragment_kib: int
    num_layers: int
    direction: Direction
    gb_per_s: float
    peak_gb_per_s: float
    is_right: bool


class Pool:
    """A device's pool whose blocks hold known bytes, an arena for them, and their mover."""

    def __init__(self, device: Device, fragment_kib: int, num_bytes: int) -> None:
        num_layers, fragment_bytes = LAYERS[fragment_kib], fragment_kib << 10
        self.num_blocks = max(2, num_bytes // (num_layers * fragment_bytes))
        # Half of the blocks for each direction, and the null block.
        shape = (2 * self.num_blocks + 1, fragment_bytes // 8)
        draw = np.random.default_rng(0)
        self._layers: list[Any] = []
        for _ in range(num_layers):
            layer = draw.integers(0, 2**62, shape, dtype=np.int64)
            self._layers.append(layer if device == "host" else _on_gpu(layer))
        made = BlockLayout.from_arrays if device == "host" else BlockLayout.from_tensors
        self.layout = made(self._layers)
        self.num_bytes = self.num_blocks * self.layout.slot_bytes
        self.after: Callable[[], Event] = (lambda: READY) if device == "host" else _after_compute
        with ExitStack() as stack:
            arena = stack.enter_context(arena_for([self.layout], 2 * self.num_blocks))
            self.mover: Mover = stack.enter_context(mover_for(self.layout, arena))
            self._opened = stack.pop_all()
        self.arena: HostArena = arena
        order = draw.permutation(self.num_blocks)
        self.ids = {"store": order + 1, "load": order + 1 + self.num_blocks}
        slots = draw.permutation(self.num_blocks)
        self.slots = {"store": slots, "load": slots + self.num_blocks}
        self.arena.slots[:] = 0

    def close(self) -> None:
        """Free the memory."""
        self._opened.close()

    def copy(self, direction: Direction) -> float:
        """Run one job; return its seconds."""
        ids, slots = self.ids[direction], self.slots[direction]
        begin = time.perf_counter()
        ticket: Ticket
        if direction == "store":
            ticket = self.mover.store(ids, slots, after=self.after())
        else:
            ticket = self.mover.load(slots, ids, after=self.after())
        while not ticket.poll():
            pass
        seconds = time.perf_counter() - begin
        if ticket.error is not None:
            raise ticket.error
        return seconds

    def prepare(self) -> None:
        """Give the slots of loads other bytes than their blocks have."""
        slots = self.slots["load"]
        words = np.arange(len(slots) * self.layout.slot_bytes // 8, dtype=np.int64)
        self.arena.slots[slots] = words.view(np.uint8).reshape(len(slots), -1)

    def is_right(self, direction: Direction) -> bool:
        """Whether each block equals its slot."""
        slots = self.arena.slots[self.slots[direction]]
        parts = np.split(slots, len(self._layers), axis=1)
        ids = self.ids[direction]
        return all(
            np.array_equal(_to_host(layer)[ids].view(np.uint8), part)
            for layer, part in zip(self._layers, parts, strict=True)
        )


def measure_copies(device: Device, num_bytes: int, num_turns: int) -> Iterator[CopyRow]:
    """Yield a row for each size of fragments and direction.

    Args:
        device: where the pool is.
        num_bytes: bytes of a job.
        num_turns: jobs of each kind, of which the best counts. One more warms up.

    Raises:
        ConfigError: no GPU, or too little memory.
    """
    for fragment_kib, num_layers in LAYERS.items():
        pool = Pool(device, fragment_kib, num_bytes)
        try:
            pool.prepare()
            for direction in _DIRECTIONS:
                pool.copy(direction)
                right = pool.is_right(direction)
                best = min(pool.copy(direction) for _ in range(num_turns))
                peak = _peak_gb_per_s(device, direction, num_bytes, num_turns)
                speed = pool.num_bytes / best / 1e9
                yield CopyRow(fragment_kib, num_layers, direction, speed, peak, right)
        finally:
            pool.close()


def _peak_gb_per_s(device: Device, direction: Direction, num_bytes: int, num_turns: int) -> float:
    if device == "cuda":
        speed = link_speed(cuda_runtime(0), anew=True)
        is_store = direction == "store"
        return (speed.store_bytes_per_s if is_store else speed.load_bytes_per_s) / 1e9
    here, there = (np.ones(num_bytes, dtype=np.uint8) for _ in range(2))
    best = float("inf")
    for _ in range(num_turns):
        begin = time.perf_counter()
        np.copyto(there, here)
        best = min(best, time.perf_counter() - begin)
    return num_bytes / best / 1e9


def _torch() -> Any:
    """Return torch, if it reaches a GPU."""
    try:
        import torch  # noqa: PLC0415 - optional, and slow to import
    except ImportError:
        raise ConfigError(
            "device is cuda, and the measurement needs torch, which is not installed: pip install "
            "torch, or pass --device host"
        ) from None
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device is cuda, and torch {torch.__version__} reaches no GPU: run kvstow doctor, or "
            "pass --device host"
        )
    return torch


def has_gpu() -> bool:
    """Whether copies of a GPU can be measured."""
    try:
        _torch()
        cuda_runtime(0)
    except ConfigError:
        return False
    return True


def _on_gpu(layer: npt.NDArray[np.int64]) -> Any:
    return _torch().from_numpy(layer).to("cuda:0")


def _to_host(layer: Any) -> npt.NDArray[np.int64]:
    array: npt.NDArray[np.int64] = layer if isinstance(layer, np.ndarray) else layer.cpu().numpy()
    return array


def _after_compute() -> Event:
    return CudaEvent.record(_torch().cuda.current_stream())
