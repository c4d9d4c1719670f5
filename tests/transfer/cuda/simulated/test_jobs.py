"""Jobs of all sizes on every path, with slots of other sizes and overwritten targets."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from kvstow.transfer import READY, BlockLayout, CudaEvent, CudaLink, CudaMover, Region, pinned_arena
from kvstow.transfer.cuda.link_speed import Path
from kvstow.transfer.cuda.runtime import cuda_runtime

NUM_BLOCKS, NUM_LAYERS, FRAGMENT_BYTES = 1100, 4, 1024
BLOCKS_PER_PLACE = 64


# Slots that are larger than a block take copies of rows with pitches.
@pytest.mark.parametrize(
    ("path", "slot_factor", "verify"),
    [("packed", 1, False), ("packed", 1, True), ("packed", 3, False), ("direct", 3, False)],
)
def test_jobs_of_all_sizes_move_the_right_bytes(path: Path, slot_factor: int, verify: bool) -> None:
    runtime = cuda_runtime(0)
    rng = np.random.default_rng(0)
    content = rng.integers(0, 256, (NUM_LAYERS, NUM_BLOCKS, FRAGMENT_BYTES), dtype=np.uint8)
    layers = [runtime.allocate(FRAGMENT_BYTES * NUM_BLOCKS) for _ in range(NUM_LAYERS)]
    for address, layer in zip(layers, content, strict=True):
        runtime.upload(address, layer.tobytes())
    regions = tuple(Region(address, FRAGMENT_BYTES, FRAGMENT_BYTES) for address in layers)
    layout = BlockLayout(NUM_BLOCKS, regions, device=0)
    stream = runtime.stream()

    def expected(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        return content[:, ids].transpose(1, 0, 2).reshape(len(ids), -1)

    def block_of(slots: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        return slots[:, : layout.slot_bytes]

    with pinned_arena(NUM_BLOCKS, slot_factor * layout.slot_bytes, runtime) as arena:
        link = CudaLink(runtime, staging_bytes=BLOCKS_PER_PLACE * layout.slot_bytes)
        with CudaMover(layout, arena, link=link, path=path, verify=verify) as mover:
            for num in (1, 512, 512, 1):
                ids, slots = rng.permutation(num) + 1, np.arange(num)
                mover.store(ids, slots, after=CudaEvent.record(stream)).wait(60)
                np.testing.assert_array_equal(block_of(arena.slots[:num]), expected(ids))
                mover.load(slots, ids[::-1], after=CudaEvent.record(stream)).wait(60)
                content[:, ids[::-1]] = content[:, ids]
            first = mover.store(np.arange(1, 301), np.arange(300), after=READY)
            second = mover.store(np.arange(400, 500), np.arange(50, 150), after=READY)
            for ticket in (first, second):
                ticket.wait(60)
            overwritten = expected(np.arange(400, 500))
            np.testing.assert_array_equal(block_of(arena.slots[50:150]), overwritten)
