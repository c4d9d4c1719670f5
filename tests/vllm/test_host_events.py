"""The block events of the host tier in vLLM's form."""

from __future__ import annotations

import pytest
from tests.vllm.halves import BLOCK_SIZE, FULL, Scheduler, cache_config

from kvstow import BlockPool
from kvstow.vllm.events import HostEvents

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own


def test_block_that_is_computed_again_keeps_its_tokens_longest() -> None:
    request = Scheduler(FULL).request("a", 4 * BLOCK_SIZE)
    hashes = request.block_hashes
    host = HostEvents(cache_config(FULL), max_blocks=3)
    for index in (0, 1, 2, 0, 3):
        host.computed(request, 0, BLOCK_SIZE, [(index, hashes[index])])
    tokens = {}
    for index, block_hash in enumerate(hashes):
        pool = BlockPool(4, events=True)
        pool.cache(pool.allocate(1), [block_hash])
        [event] = host.convert(pool.take_events())
        tokens[index] = event.token_ids
    blocks = {at: list(range(at * BLOCK_SIZE, (at + 1) * BLOCK_SIZE)) for at in range(4)}
    assert tokens == blocks | {1: []}, "block 1 was computed longest ago"
