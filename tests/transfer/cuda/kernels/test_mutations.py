"""Wrong versions of the kernels, each of which must fail a check."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.transfer.cuda.kernels.checks import CHECKS
from tests.transfer.cuda.kernels.emulation import Kernels

from kvstow.transfer.cuda.kernels import SOURCE

# Name of the mistake: (text, replacement).
MUTATIONS = {
    "the tail is left out": ("num_bytes - done,", "0 * (num_bytes - done),"),
    "the tail begins anew": ("unsigned int done = num_wide * 16;", "unsigned int done = 0;"),
    "one unit too many": ("if (k * LANES < left)", "if (k * LANES <= left)"),
    "rounds overlap": ("first += IN_FLIGHT * LANES", "first += LANES"),
    "rounds leave gaps": ("first += IN_FLIGHT * LANES", "first += 2 * IN_FLIGHT * LANES"),
    "alignment of one side alone": ("(source | target | position)", "(source | position)"),
    "alignment without the slot": ("(source | target | position)", "(source | target)"),
    "the last block is left out": ("i < num_blocks;", "i + 1 < num_blocks;"),
    "the id of another block": ("kept_id, i - kept_from)", "kept_id, i - kept_from + 1)"),
    "ids kept too long": ("i - kept_from >= LANES", "i - kept_from > LANES"),
    "ids never read again": ("is_first || i - kept_from >= LANES", "is_first"),
    "ids of the wrong lanes": ("block_ids + i + lane", "block_ids + lane"),
    "ids past the last": ("if (lane < num_blocks - i) ", ""),
    "an id read anew for each chunk": ("is_first || i - kept_from >= LANES", "true"),
    "the region's place in the slot": ("staging_stride + chunk.offset", "staging_stride"),
    "stride of the block": ("id * chunk.stride", "id * chunk.num_bytes"),
    "stride of the block in 32 bits": (
        "id * chunk.stride",
        "static_cast<unsigned int>(id * chunk.stride)",
    ),
    "stride of staging": ("i * staging_stride", "kept_from * staging_stride"),
    "stride of staging in 32 bits": (
        "i * staging_stride",
        "i * static_cast<unsigned int>(staging_stride)",
    ),
    "thread blocks counted in 16 bits": (
        "warp = blockIdx.x * (",
        "warp = (blockIdx.x & 65535) * (",
    ),
    "warps share work": (
        "chunk_step = num_warps % num_chunks",
        "chunk_step = (num_warps - 1) % num_chunks",
    ),
    "warps skip blocks": (
        "i_step = num_warps / num_chunks",
        "i_step = num_warps / num_chunks + 1",
    ),
    "one thread block does it all": ("warp = blockIdx.x * (", "warp = 0 * ("),
    "past the last chunk": ("chunk_index >= num_chunks", "chunk_index > num_chunks"),
    "the wrong way": ("is_gather ? in_block : in_slot, is", "is_gather ? in_slot : in_block, is"),
    "checksum of the wrong place": ("position + (first + k * LANES)", "position + k * LANES"),
    "checksum of the wrong tail": ("position + done, summed", "position, summed"),
    "checksum of bytes not in words": ("position % 4 * 8", "position % 4 * 4"),
    "checksum without the last word": ("weighted(words.w, index + 3)", "0"),
    "checksum of half the lanes": ("distance = LANES / 2", "distance = LANES / 4"),
    "checksum of another lane": ("if (lane == 0) atomicAdd", "if (lane == 1) atomicAdd"),
    "checksum of another block": ("atomicAdd(checksums + i", "atomicAdd(checksums + kept_from"),
    "lanes that part": ("sum = sum_of_lanes(sum);", "if (lane < 9) sum = sum_of_lanes(sum);"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_caught(name: str, tmp_path: Path) -> None:
    text, wrong = MUTATIONS[name]
    assert text in SOURCE
    mutant = tmp_path / "mutant.cu"
    mutant.write_text(SOURCE.replace(text, wrong))
    kernels = Kernels(mutant, tmp_path, ["-O1"])
    with pytest.raises(AssertionError):
        for check in CHECKS:
            check(kernels)
