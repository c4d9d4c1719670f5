"""A pool of a million blocks: the time to build it, and its memory per block in use."""

import gc
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import kvstow

from . import vllm_side
from .measure import Clock, Row, take_turns

BLOCK_SIZE = 16
NUM_BLOCKS = 1_000_000
BLOCKS_PER_PROMPT = 8_192


class Million:
    """A turn builds one pool."""

    def __init__(self, num_turns: int) -> None:
        self.num_turns = min(num_turns, 5)
        self.clock = Clock()
        draw = random.Random(0)
        self.hashes = [draw.randbytes(32) for _ in range(NUM_BLOCKS - 1)]
        self.request = vllm_side.request("million", BLOCK_SIZE, BLOCK_SIZE)

    def run(self) -> list[Row]:
        gc.collect()
        gc.freeze()
        # kvstow first, because it returns its memory to the system. Python may keep that of vLLM.
        ours, theirs = self._kvstow_bytes(), self._vllm_bytes()
        for turn in range(self.num_turns):
            take_turns(turn, self._build_vllm, self._build_kvstow)
        gc.unfreeze()
        blocks = f"{NUM_BLOCKS:,} blocks"
        return [
            Row(
                f"build a pool of {blocks}",
                self.clock.samples["vllm"],
                self.clock.samples["kvstow"],
                target_most=50,
            ),
            Row(
                f"memory of {blocks}, each allocated, cached and freed",
                [theirs],
                [ours],
                unit="B/block",
                target_most=100,
            ),
        ]

    def _build_vllm(self) -> None:
        self.clock.time("vllm", vllm_side.BlockPool, NUM_BLOCKS, True, BLOCK_SIZE)

    def _build_kvstow(self) -> None:
        self.clock.time("kvstow", kvstow.BlockPool, NUM_BLOCKS)

    def _kvstow_bytes(self) -> float:
        before = resident_bytes()
        pool = kvstow.BlockPool(NUM_BLOCKS)
        for hashes in prompts(self.hashes):
            ids = pool.allocate(len(hashes))
            pool.cache(ids, hashes)
            pool.free(ids[::-1])
        grown = resident_bytes() - before
        if pool.num_cached != NUM_BLOCKS - 1:
            sys.exit("kvstow's million blocks are not all cached")
        # A page may have been resident before, so count at least what the pool reports.
        return max(grown, pool.memory_bytes) / NUM_BLOCKS

    def _vllm_bytes(self) -> float:
        before = resident_bytes()
        pool = vllm_side.BlockPool(NUM_BLOCKS, True, BLOCK_SIZE)
        for hashes in prompts(self.hashes):
            self.request.block_hashes = hashes
            blocks = pool.get_new_blocks(len(hashes))
            pool.cache_full_blocks(self.request, blocks, 0, len(blocks), BLOCK_SIZE, 0)
            pool.free_blocks(reversed(blocks))
            del blocks
        gc.collect()
        grown = resident_bytes() - before
        if len(pool.cached_block_hash_to_block) != NUM_BLOCKS - 1:
            sys.exit("vLLM's million blocks are not all cached")
        return grown / NUM_BLOCKS


def prompts(hashes: list[bytes]) -> Iterator[list[bytes]]:
    """Yield the hashes in prompts of 8,192 blocks, as a server takes them."""
    for first in range(0, len(hashes), BLOCKS_PER_PROMPT):
        yield hashes[first : first + BLOCKS_PER_PROMPT]


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    num_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return num_pages * os.sysconf("SC_PAGE_SIZE")
