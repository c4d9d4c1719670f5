"""A round trip that is small enough for compute-sanitizer, which slows kernels by a factor of 100.

compute-sanitizer --tool memcheck python3 -m tests.gpu.small_round_trip
"""

import numpy as np

from kvstow.transfer import (
    READY,
    BlockLayout,
    CudaLink,
    CudaMover,
    Region,
    pinned_arena,
)
from kvstow.transfer.cuda.runtime import cuda_runtime

NUM_BLOCKS, NUM_LAYERS = 12, 3
IDS, SLOTS = [3, 9, 1, 7, 4], [2, 8, 3, 4, 0]


def main() -> None:
    """Run both kernels with checksums, on sizes with and without a tail."""
    runtime = cuda_runtime(0)
    for size in (64, 1000, 4104):
        stride = -(-size // 16) * 16
        # Each allocation ends with a layer's last block, so one byte too far is an error.
        layers = [runtime.allocate(NUM_BLOCKS * stride) for _ in range(NUM_LAYERS)]
        layout = BlockLayout(
            NUM_BLOCKS, tuple(Region(layer, stride, size) for layer in layers), device=0
        )
        content = np.random.default_rng(size).integers(
            0, 256, (NUM_BLOCKS, NUM_LAYERS, stride), dtype=np.uint8
        )
        for layer, address in enumerate(layers):
            runtime.upload(address, content[:, layer].tobytes())
        link = CudaLink(runtime, staging_bytes=2 * 4096 * NUM_LAYERS * 2)
        with (
            pinned_arena(10, layout.slot_bytes, runtime) as arena,
            CudaMover(layout, arena, link=link, verify=True) as mover,
        ):
            mover.store(IDS, SLOTS, after=READY).wait(300)
            mover.load(SLOTS, IDS[::-1], after=READY).wait(300)
            for block, slot in zip(IDS, SLOTS, strict=True):
                assert np.array_equal(arena.slots[slot], content[block, :, :size].ravel())
        for address in layers:
            runtime.free(address)
    print("round trips of 64, 1000 and 4104 bytes: equal")


if __name__ == "__main__":
    main()
