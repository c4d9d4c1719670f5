"""The kernels compute the sums that numpy computes, and the sums find damage."""

from typing import get_args

import numpy as np
import pytest
from tests.gpu.memory import DeviceCache, all_bytes, world

from kvstow import ChecksumMismatch
from kvstow.transfer import READY
from kvstow.transfer.cuda.interface import Kernel, Pack
from kvstow.transfer.cuda.kernels import MAX_BLOCKS, checksum, chunk_table, ids_for_launch
from kvstow.transfer.cuda.runtime import cuda_runtime

IDS = [7, 2, 5]


@pytest.mark.parametrize("size", [64, 1000, 4104, 100_003])
def test_kernels_and_numpy_compute_equal_sums(size: int) -> None:
    runtime, cache = cuda_runtime(0), DeviceCache("padded", 9, size)
    table = chunk_table(cache.layout.regions, cache.layout.offsets)
    stride = -(-cache.layout.slot_bytes // 16) * 16
    ids = np.zeros(MAX_BLOCKS, dtype=np.int32)
    ids[: len(IDS)] = IDS
    sums = runtime.allocate_mapped(8 * len(IDS))
    sums.host[:] = 0
    chunks, staging = runtime.allocate(table.nbytes), runtime.allocate(stride * len(IDS))
    runtime.upload(chunks, table.tobytes())
    stream, event = runtime.stream(), runtime.event()
    cache.bytes()  # waits until torch has done its queued work
    carried = ids_for_launch(ids)
    pack = Pack(chunks, len(table), carried, len(IDS), staging, stride, sums.device_address)
    expected = checksum(np.stack([cache.slot(cache.bytes(), block) for block in IDS]))
    try:
        for turn, kernel in enumerate(get_args(Kernel), start=1):
            runtime.launch(kernel, pack, stream)
            runtime.record(event, stream)
            runtime.synchronize(event)
            # The second kernel adds equal sums.
            assert np.array_equal(sums.host.view(np.uint64), expected * np.uint64(turn))
    finally:
        for address in (chunks, staging):
            runtime.free(address)
        runtime.free_mapped(sums)


def test_flipped_byte_on_the_host_fails_the_load() -> None:
    with world(verify=True) as w:
        slots = [3, 30, 11, 12, 13, 14]
        w.mover.store([1, 2, 3, 4, 5, 6], slots, after=READY).wait(60)
        w.mover.load(slots, [11, 12, 13, 14, 15, 16], after=READY).wait(60)
        memory = w.cache.bytes()
        for block in range(1, 7):
            assert np.array_equal(w.cache.slot(memory, block), w.cache.slot(memory, 10 + block))
        w.arena.slots[30, 5000] ^= 1
        ticket = w.mover.load(slots, [11, 12, 13, 14, 15, 16], after=READY)
        with pytest.raises(ChecksumMismatch, match="host slot 30"):
            ticket.wait(60)
        w.mover.load([3, 11], [11, 12], after=READY).wait(60)


def test_load_of_a_slot_that_was_never_stored_fails() -> None:
    with world(verify=True) as w, pytest.raises(ChecksumMismatch, match="never stored"):
        w.mover.load([1], [2], after=READY).wait(60)


def test_store_after_damage_makes_the_slot_good() -> None:
    with world(verify=True) as w:
        all_bytes(w.arena)[4] = 0
        w.mover.store([1], [4], after=READY).wait(60)
        w.mover.load([4], [2], after=READY).wait(60)
