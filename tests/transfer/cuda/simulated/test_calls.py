"""The calls of CUDA that a job makes. Each costs the engine's thread some microseconds."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import cupy
import numpy as np
import pytest
from tests.transfer.cuda.simulation import library

from kvstow.transfer import BlockLayout, CudaEvent, CudaLink, CudaMover, HostArena, Region
from kvstow.transfer.cuda.runtime import cuda_runtime

FRAGMENT_BYTES, NUM_LAYERS, NUM_BLOCKS = 1024, 4, 600
BLOCKS_PER_PLACE = 64
# Of one block, and of 512 blocks in 8 places: what a trial of this design reached.
MOST_CALLS = {1: 18, 512: 67}


@pytest.fixture
def mover() -> Iterator[CudaMover]:
    gpu = cuda_runtime(0)
    layers = [gpu.allocate(FRAGMENT_BYTES * NUM_BLOCKS) for _ in range(NUM_LAYERS)]
    regions = tuple(Region(layer, FRAGMENT_BYTES, FRAGMENT_BYTES) for layer in layers)
    layout = BlockLayout(NUM_BLOCKS, regions, device=0)
    with HostArena(NUM_BLOCKS, layout.slot_bytes) as arena:
        gpu.register(arena.base_address, arena.num_bytes)
        link = CudaLink(gpu, staging_bytes=BLOCKS_PER_PLACE * layout.slot_bytes)
        with CudaMover(layout, arena, link=link, path="packed") as mover:
            yield mover
        gpu.unregister(arena.base_address)


@pytest.mark.parametrize("num", [1, 512])
@pytest.mark.parametrize("way", ["store", "load"])
@pytest.mark.parametrize("has_context", [True, False])
def test_calls_of_a_job(mover: CudaMover, num: int, way: str, has_context: bool) -> None:
    gpu = mover._runtime
    stream = gpu.stream()
    ids = np.arange(1, num + 1)[::-1]
    slots = np.arange(num)

    def submit() -> dict[str, int]:
        """Submit a job while the engine does not compute, and return its calls."""
        library.by_hand()
        after = CudaEvent.record(stream)
        while library.step():
            pass
        ticket = (
            mover.store(ids, slots, after=after)
            if way == "store"
            else mover.load(slots, ids, after=after)
        )
        calls = library.calls()
        library.by_hand(False)
        ticket.wait(60)
        return calls

    submit()  # makes the events that later jobs use again
    cupy.cuda.driver.ctxSetCurrent(1 if has_context else 0)
    gc.collect()  # now, so that nothing is destroyed in between
    library.calls()
    made = submit()
    # The first batch of a store, and the last of a load, fills an eighth of a place.
    num_batches = 1 if num == 1 else 1 + -(-(num - BLOCKS_PER_PLACE // 8) // BLOCKS_PER_PLACE)
    num_streams = min(num_batches, 3)
    assert sum(made.values()) - made.get("cuCtxSetCurrent", 0) <= MOST_CALLS[num]
    assert made.pop("cuCtxGetCurrent") == 2, "once for the event, and once for the job"
    assert made.pop("cuCtxSetCurrent", 0) == (0 if has_context else 4)
    # Whether the engine computes, which slows stores down.
    assert made.pop("cudaEventQuery", 0) == (1 if way == "store" else 0)
    # cupy's own: it frees the event of the job before, and looks up the device at each launch.
    made.pop("cudaEventDestroy", None)
    assert made.pop("cudaGetDevice") == num_batches
    assert made == {
        # The event that the job waits for, and where each stream has read and has ended.
        "cudaStreamIsCapturing": 1,
        "cudaEventCreateWithFlags": 1,
        "cudaEventRecord": 1 + num_streams * (2 if way == "store" else 1),
        "cudaStreamWaitEvent": num_streams,
        "cuLaunchKernel": num_batches,
        "cudaMemcpyAsync": num_batches,
    }


def test_poll_of_a_job_asks_for_one_event_of_each_stream(mover: CudaMover) -> None:
    library.by_hand()
    cupy.cuda.driver.ctxSetCurrent(1)
    ticket = mover.store([1], [0], after=CudaEvent.record(mover._runtime.stream()))
    library.calls()
    assert not ticket.poll()
    # Of the job's end, and of the release of its source.
    assert library.calls() == {"cuCtxGetCurrent": 1, "cudaEventQuery": 2}
    while library.step():
        pass
    library.calls()
    assert ticket.poll()
    assert library.calls() == {"cuCtxGetCurrent": 1, "cudaEventQuery": 1}
    assert ticket.poll()
    assert library.calls() == {}, "the job has ended"
