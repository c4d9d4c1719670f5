"""Transfers of two GPUs in one process, from threads with and without a device of their own.

python3 -m tests.transfer.cuda.simulation.program tests.transfer.cuda.simulation.two_devices
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import cupy
import numpy as np
from tests.transfer.cuda.simulation.library import has_context

from kvstow.transfer import (
    BlockLayout,
    CudaEvent,
    CudaLink,
    CudaMover,
    HostArena,
    Region,
    pinned_arena,
)
from kvstow.transfer.cuda.runtime import cuda_runtime

NUM_BLOCKS, BLOCK_BYTES = 8, 4096
IDS, SLOTS = [3, 1, 5], [0, 4, 2]


def build(device: int) -> tuple[CudaMover, HostArena]:
    gpu = cuda_runtime(device)
    cache = gpu.allocate(NUM_BLOCKS * BLOCK_BYTES)
    gpu.upload(cache, bytes([7 + device]) * (NUM_BLOCKS * BLOCK_BYTES))
    layout = BlockLayout(NUM_BLOCKS, (Region(cache, BLOCK_BYTES, BLOCK_BYTES),), device=device)
    arena = pinned_arena(NUM_BLOCKS, BLOCK_BYTES, gpu)
    link = CudaLink(gpu, staging_bytes=2 * BLOCK_BYTES)
    return CudaMover(layout, arena, link=link, path="packed", verify=True), arena


def transfer(mover: CudaMover, arena: HostArena) -> None:
    gpu = mover._runtime
    arena.slots[SLOTS] = 0
    mover.store(IDS, SLOTS, after=CudaEvent.record(gpu.stream())).wait(60)
    assert np.all(arena.slots[SLOTS] == 7 + gpu.device)
    mover.load(SLOTS, IDS, after=CudaEvent.record(gpu.stream())).wait(60)


def in_new_thread(device: int, mover: CudaMover, arena: HostArena) -> None:
    """Transfer in a thread that has a device of its own, and in one that has none."""

    def with_own() -> None:
        cupy.cuda.runtime.setDevice(1 - device)
        transfer(mover, arena)
        assert cupy.cuda.runtime.getDevice() == 1 - device, "the thread's device changed"

    def with_none() -> None:
        transfer(mover, arena)
        assert cupy.cuda.driver.ctxGetCurrent() == 0, "the thread has got a context"

    for work in (with_none, with_own):
        with ThreadPoolExecutor(1) as thread:
            thread.submit(work).result()


def main() -> None:
    second, second_arena = build(1)
    transfer(second, second_arena)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(transfer, second, second_arena).result()
    assert has_context(1)
    assert not has_context(0), "a transfer of device 1 initialised device 0"
    first, first_arena = build(0)
    for device, mover, arena in ((0, first, first_arena), (1, second, second_arena)):
        transfer(mover, arena)
        in_new_thread(device, mover, arena)
    for mover, arena in ((first, first_arena), (second, second_arena)):
        mover.close()
        arena.close()
    print("each device moved its own blocks")


if __name__ == "__main__":
    main()
