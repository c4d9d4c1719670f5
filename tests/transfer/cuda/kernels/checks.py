"""The checks of `pack.cu`, as functions of the compiled kernels. Mutants must fail them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
from tests.transfer.cuda.kernels.emulation import (
    Grid,
    Kernels,
    Launch,
    Placement,
    aligned_bytes,
    check,
    placements,
)

from kvstow.transfer.cuda.kernels import CHUNK_DTYPE, MAX_BLOCKS, MAX_TURNS

# Regions of whole vectors, below and above a warp's turn; then any other size.
REGION_BYTES = (16, 48, 512, 2048, 2064, 8192, 1, 7, 17, 1000, 2049, 4111)
GRIDS = (Grid(1, 32), Grid(3, 96), Grid(2, 512))
NUM_LAYERS = (1, 3)
NUM_BLOCKS = 7
SHUFFLED_IDS = (5, 1, 6, 2)


def sweep() -> Iterator[tuple[Placement, Grid, bool, bool]]:
    """Run every placement of every size under every grid, half of them with checksums."""
    shapes = product(NUM_LAYERS, REGION_BYTES)
    for number, (num_layers, region_bytes) in enumerate(shapes):
        for placement, grid in product(placements(num_layers, region_bytes, NUM_BLOCKS), GRIDS):
            for is_gather in (True, False):
                yield placement, grid, is_gather, (number + grid.num_ctas + is_gather) % 2 == 0


def check_sweep(kernels: Kernels) -> None:
    for seed, (placement, grid, is_gather, is_summed) in enumerate(sweep()):
        check(
            kernels,
            placement,
            SHUFFLED_IDS,
            grid,
            is_gather=is_gather,
            is_summed=is_summed,
            seed=seed,
        )


def check_long_chunks(kernels: Kernels) -> None:
    """Run chunks of several rounds, which today's tables do not have."""
    for region_bytes, is_gather in product((4096, 6160, 5003), (True, False)):
        for placement in placements(2, region_bytes, NUM_BLOCKS):
            check(
                kernels,
                placement,
                SHUFFLED_IDS,
                Grid(2, 64),
                is_gather=is_gather,
                is_summed=True,
                is_cut=False,
            )


def check_many_blocks(kernels: Kernels) -> None:
    """Run as many blocks as one launch can carry, and more blocks than a grid has warps."""
    ids = np.random.default_rng(1).permutation(MAX_BLOCKS) + 1
    for is_gather in (True, False):
        check(
            kernels,
            placements(1, 48, MAX_BLOCKS + 1)[0],
            ids.tolist(),
            Grid(3, 64),
            is_gather=is_gather,
            is_summed=True,
        )
    ids = np.random.default_rng(1).permutation(99) + 1
    for num_layers, grid in product((1, 5), (Grid(1, 32), Grid(1, 96), Grid(7, 64), Grid(9, 512))):
        for placement in placements(num_layers, 48, 100)[:2]:
            check(kernels, placement, ids.tolist(), grid, is_gather=True, is_summed=True)


def check_far_addresses(kernels: Kernels) -> None:
    """Run strides past 32 bits. Bases lie as far below the memory as ids reach, modulo 2**64."""
    rng = np.random.default_rng(2)
    low_id, stride, slot_stride = 2**31 - 3, 2**33 + 64, -(2**34) - 64
    device, staging = aligned_bytes(128, rng), aligned_bytes(128, rng)
    table = np.zeros(1, dtype=CHUNK_DTYPE)
    for num_blocks, i in ((1, 0), (2, 1)):
        # Only the last of two blocks has memory, and only the last of two warps runs.
        base = (device.ctypes.data - (low_id + i) * stride) % 2**64
        table[0] = (base, stride, 32, 64)
        slot_0 = staging.ctypes.data - i * slot_stride
        launch = Launch(table, range(low_id, low_id + num_blocks), slot_0, slot_stride)
        grid = Grid(num_blocks, 32, range(i, i + 1))
        kernels.run(True, launch, grid, device, staging)
        np.testing.assert_array_equal(staging[32:96], device[:64])
        device[:64] = 0
        kernels.run(False, launch, grid, staging, device)
        np.testing.assert_array_equal(staging[32:96], device[:64])


def check_many_items(kernels: Kernels) -> None:
    """Run the last warps of a grid of nearly 2**31, for nearly 2**31 chunks."""
    num_blocks, num_chunks, num_pages = MAX_BLOCKS, MAX_TURNS // MAX_BLOCKS, 8
    rng = np.random.default_rng(3)
    device = aligned_bytes(num_pages * num_chunks, rng)
    # Slots that are 1 byte apart overlap, but the few copied bytes do not.
    staging = np.zeros(num_blocks + num_chunks, dtype=np.uint8)
    ids = rng.integers(0, num_pages, num_blocks, dtype=np.int32)
    table = np.zeros(num_chunks, dtype=CHUNK_DTYPE)
    table["offset"] = np.arange(num_chunks)
    table["base"] = device.ctypes.data + np.arange(num_chunks)
    table["stride"], table["num_bytes"] = num_chunks, 1
    num_turns = num_blocks * num_chunks
    for num_ctas, ran in (
        (num_turns + 3, range(num_turns - 2, num_turns + 3)),
        (2**30 + 7, range(2**30 + 4, 2**30 + 7)),
    ):
        launch = Launch(table, ids, staging.ctypes.data, 1)  # type: ignore[arg-type] # an array
        expected, expected_stores = staging.copy(), np.zeros(staging.shape, dtype=np.uint16)
        for warp in ran:
            for item in range(warp, num_turns, num_ctas):
                i, chunk = divmod(item, num_chunks)
                expected[i + chunk] = device[int(ids[i]) * num_chunks + chunk]
                expected_stores[i + chunk] += 1
        assert expected_stores.max() == 1
        stores = kernels.run(True, launch, Grid(num_ctas, 32, ran), device, staging)
        np.testing.assert_array_equal(staging, expected)
        np.testing.assert_array_equal(stores, expected_stores)


# A mutant runs them in this order until one fails. The slowest come last.
CHECKS = (
    check_far_addresses,
    check_long_chunks,
    check_many_blocks,
    check_many_items,
    check_sweep,
)
