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
    "a unit less": ("first < count;", "first + 1 < count;"),
    "rounds overlap": ("first += IN_FLIGHT * LANES", "first += LANES"),
    "rounds leave gaps": ("first += IN_FLIGHT * LANES", "first += 2 * IN_FLIGHT * LANES"),
    "alignment of one side alone": ("(source | target | position)", "(source | position)"),
    "alignment without the slot": ("(source | target | position)", "(source | target)"),
    "the last block is left out": ("num_turns = num_blocks *", "num_turns = (num_blocks - 1) *"),
    "the last chunk is left out": ("turn < num_turns;", "turn + 1 < num_turns;"),
    "one turn too many": ("turn < num_turns;", "turn <= num_turns;"),
    "the id of another block": ("ids.of[i]", "ids.of[i + 1]"),
    "always the first id": ("ids.of[i]", "ids.of[0]"),
    "the region's place in the slot": ("staging_stride + chunk.offset", "staging_stride"),
    "stride of the block": ("id * chunk.stride", "id * chunk.num_bytes"),
    "stride of the block in 32 bits": (
        "id * chunk.stride",
        "static_cast<unsigned int>(id * chunk.stride)",
    ),
    "stride of staging": ("i * staging_stride", "turn * staging_stride"),
    "stride of staging in 32 bits": (
        "i * staging_stride",
        "i * static_cast<unsigned int>(staging_stride)",
    ),
    "thread blocks counted in 16 bits": (
        "turn = blockIdx.x * (",
        "turn = (blockIdx.x & 65535) * (",
    ),
    "warps share work": ("turn += num_warps", "turn += num_warps / 2 + 1"),
    "warps skip work": ("turn += num_warps", "turn += num_warps + 1"),
    "one turn for each warp": ("turn += num_warps", "turn = num_turns"),
    "one thread block does it all": ("turn = blockIdx.x * (", "turn = 0 * ("),
    "the chunk of another turn": ("chunks[turn - i * num_chunks]", "chunks[turn % num_warps]"),
    "chunks of the first block alone": ("i = turn / num_chunks", "i = 0"),
    "the wrong way": ("is_gather ? in_block : in_slot, is", "is_gather ? in_slot : in_block, is"),
    "checksum of the wrong place": ("position + (first + k * LANES)", "position + k * LANES"),
    "checksum of the wrong tail": ("position + done, summed", "position, summed"),
    "checksum of bytes not in words": ("position % 4 * 8", "position % 4 * 4"),
    "checksum without the last word": ("weighted(words.w, index + 3)", "0"),
    "checksum of half the lanes": ("distance = LANES / 2", "distance = LANES / 4"),
    "checksum of another lane": ("LANES == 0) atomicAdd", "LANES == 1) atomicAdd"),
    "checksum of another block": (
        "atomicAdd(checksums + i",
        "atomicAdd(checksums + turn % num_blocks",
    ),
    "lanes that part": (
        "sum = sum_of_lanes(sum);",
        "if (threadIdx.x % LANES < 9) sum = sum_of_lanes(sum);",
    ),
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
