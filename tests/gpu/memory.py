"""Device memory in the layouts of engines, and the bytes that a transfer must move."""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvstow.transfer import (
    BlockLayout,
    CudaLink,
    CudaMover,
    HostArena,
    pinned_arena,
)
from kvstow.transfer.cuda.runtime import cuda_runtime

Bytes = npt.NDArray[np.uint8]
Path = Literal["packed", "direct"]

NUM_LAYERS = 3
# Bytes before and after the cache that no transfer may touch.
GUARD_BYTES = 4096


def _up(number: int, to: int) -> int:
    return -(-number // to) * to


def _layer_major(cache: Any, num_blocks: int, size: int) -> list[Any]:
    stride = _up(size, 16)
    layers = cache(NUM_LAYERS, num_blocks, stride)
    return [layer[:, :size] for layer in layers]


def _padded(cache: Any, num_blocks: int, size: int) -> list[Any]:
    layers = cache(NUM_LAYERS, num_blocks, _up(size, 16) + 48)
    return [layer[:, :size] for layer in layers]


def _halves(cache: Any, num_blocks: int, size: int) -> list[Any]:
    """Return tensors with K of all blocks, then V of all blocks."""
    layers = cache(NUM_LAYERS, 2, num_blocks, _up(size, 16))
    return [half[:, :size] for layer in layers for half in layer]


def _interleaved(cache: Any, num_blocks: int, size: int) -> list[Any]:
    """Return tensors with K and V of a block side by side."""
    layers = cache(NUM_LAYERS, num_blocks, 2, _up(size, 16))
    return [layer[:, i, :size] for layer in layers for i in (0, 1)]


def _block_contiguous(cache: Any, num_blocks: int, size: int) -> list[Any]:
    """Return tensors with all layers of a block side by side."""
    blocks = cache(num_blocks, NUM_LAYERS, _up(size, 16))
    return [blocks[:, layer, :size] for layer in range(NUM_LAYERS)]


LAYOUTS: dict[str, Callable[[Any, int, int], list[Any]]] = {
    "layer-major": _layer_major,
    "padded": _padded,
    "halves": _halves,
    "interleaved": _interleaved,
    "block-contiguous": _block_contiguous,
}


class DeviceCache:
    """A cache of random bytes on device 0.

    Attributes:
        memory: torch tensor of all bytes, guards included.
        layout: layout of the cache.
    """

    def __init__(self, kind: str, num_blocks: int, fragment_bytes: int) -> None:
        import torch  # noqa: PLC0415 - missing where these tests are only collected

        self._torch = torch
        self.memory: Any = None

        def cache(*shape: int) -> Any:
            num_bytes = int(np.prod(shape))
            self.memory = torch.randint(
                0, 256, (num_bytes + 2 * GUARD_BYTES,), dtype=torch.uint8, device="cuda:0"
            )
            return self.memory[GUARD_BYTES : GUARD_BYTES + num_bytes].view(*shape)

        self.tensors = LAYOUTS[kind](cache, num_blocks, fragment_bytes)
        self.layout = BlockLayout.from_tensors(self.tensors)

    def bytes(self) -> Bytes:
        """Return all bytes on the host, after all work is done."""
        self._torch.cuda.synchronize()
        found: Bytes = self.memory.cpu().numpy()
        return found

    def fill(self, ids: Sequence[int], value: int) -> None:
        """Let the current stream of torch write a value into every byte of some blocks."""
        for tensor in self.tensors:
            for block in ids:
                tensor[block].fill_(value)

    def rows(self, memory: Bytes, block: int) -> Iterator[tuple[int, Bytes]]:
        """Yield each part of a block: its offset in a slot, and a view in a copy of the memory."""
        base = self.memory.data_ptr()
        for region, offset in zip(self.layout.regions, self.layout.offsets, strict=True):
            begin = region.base_address - base + block * region.block_stride_bytes
            yield offset, memory[begin : begin + region.block_bytes]

    def slot(self, memory: Bytes, block: int) -> Bytes:
        """Return the bytes that a slot of this block holds."""
        return np.concatenate([row for _, row in self.rows(memory, block)])

    def put(self, memory: Bytes, block: int, slot: Bytes) -> None:
        """Write a slot's bytes to a block of a copy of the memory."""
        for offset, row in self.rows(memory, block):
            row[:] = slot[offset : offset + len(row)]


def all_bytes(arena: HostArena) -> Bytes:
    """Return a view of every slot with its padding, shape [num_slots, stride]."""
    memory = (ctypes.c_uint8 * arena.num_bytes).from_address(arena.base_address)
    return np.frombuffer(memoryview(memory), dtype=np.uint8).reshape(arena.num_slots, -1)


@dataclass
class World:
    """A cache, an arena of random bytes, and a mover between them."""

    cache: DeviceCache
    arena: HostArena
    mover: CudaMover


@contextmanager
def world(
    kind: str = "layer-major",
    *,
    num_blocks: int = 24,
    num_slots: int = 32,
    fragment_bytes: int = 4096,
    path: Path = "packed",
    is_pinned: bool = True,
    slot_factor: int = 1,
    verify: bool = False,
) -> Iterator[World]:
    """Build a world whose jobs take several batches through the staging memory, and close it.

    Args:
        slot_factor: slots are this many times as large as a block.
    """
    cache = DeviceCache(kind, num_blocks, fragment_bytes)
    slot_bytes = cache.layout.slot_bytes * slot_factor
    runtime = cuda_runtime(0)
    arena = (
        pinned_arena(num_slots, slot_bytes, runtime)
        if is_pinned
        else HostArena(num_slots, slot_bytes)
    )
    with arena:
        memory = all_bytes(arena)
        memory[:] = np.random.default_rng(1).integers(0, 256, memory.shape, dtype=np.uint8)
        del memory
        link = CudaLink(runtime, staging_bytes=5 * arena.slot_stride_bytes)
        with CudaMover(cache.layout, arena, link=link, path=path, verify=verify) as mover:
            yield World(cache, arena, mover)
