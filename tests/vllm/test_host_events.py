"""The block events of the host tier in vLLM's form."""

from __future__ import annotations

import pytest
from tests.vllm.halves import BLOCK_SIZE, FULL, NUM_BLOCKS, Scheduler, cache_config
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvstow import (
    BlockPool,
    BlockRemoved,
    BlockStored,
    FullAttention,
    OffloadScheduler,
    TransferCompleted,
    TransferInitiated,
)
from kvstow.vllm.events import HostEvents

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own


def test_block_that_is_computed_again_keeps_its_tokens_longest() -> None:
    request = Scheduler(FULL).request("a", 4 * BLOCK_SIZE)
    hashes = request.block_hashes
    host = HostEvents(cache_config(FULL), (0,), max_blocks=3)
    for index in (0, 1, 2, 0, 3):
        host.computed(request, 0, BLOCK_SIZE, [(index, hashes[index], None)])
    tokens = {}
    for index, block_hash in enumerate(hashes):
        pool = BlockPool(4, events=True)
        pool.cache(pool.allocate(1), [block_hash])
        [event] = host.convert(pool.take_events())
        tokens[index] = event.token_ids
    blocks = {at: list(range(at * BLOCK_SIZE, (at + 1) * BLOCK_SIZE)) for at in range(4)}
    assert tokens == blocks | {1: []}, "block 1 was computed longest ago"


def test_a_block_after_one_that_the_tier_lacks_names_its_parent() -> None:
    """A window stores no block before it. For a router, a block without a parent is a root."""
    request = Scheduler(FULL).request("a", 2 * BLOCK_SIZE)
    first, second = request.block_hashes
    host = HostEvents(cache_config(FULL), (0,), max_blocks=2)
    host.computed(request, 0, BLOCK_SIZE, [(1, second, first)])
    pool = BlockPool(4, events=True)
    pool.cache(pool.allocate(1), [second])
    [event] = host.convert(pool.take_events())
    assert event.parent_block_hash == maybe_convert_block_hash(first)


def test_reset_names_the_blocks_of_each_tier() -> None:
    """vLLM's event for all blocks has no medium, and would take the device's blocks, too."""
    tier = OffloadScheduler(
        8, [FullAttention(BLOCK_SIZE)], num_disk_blocks=8, max_disk_blocks_in_flight=8, events=True
    )
    tier.set_disk("on")
    tier.add("a", [b"1" * 32, b"2" * 32])
    store = tier.store(["a"], [2 * BLOCK_SIZE], [1, 2], [0, 2])
    assert store is not None
    tier.complete(store.job_id)
    demote = tier.demote()
    assert demote is not None
    tier.complete(demote.job_id)
    host = HostEvents(cache_config(FULL), (0,), max_blocks=8)
    stored = list(host.convert([*tier.take_events(), *tier.take_disk_events()]))
    tier.reset()
    removed = list(host.convert([*tier.take_events(), *tier.take_disk_events()]))
    blocks, dropped = (
        {event.medium: set(event.block_hashes) for event in events} for events in (stored, removed)
    )
    assert {medium: len(names) for medium, names in blocks.items()} == {"CPU": 2, "STORAGE": 2}
    assert dropped == blocks


def test_a_tier_that_is_turned_off_reports_that_its_blocks_are_gone() -> None:
    """Else a router goes on to send requests to a server that recomputes them."""
    scheduler = Scheduler(FULL, num_host_blocks=None)
    scheduler.let_go_off()
    half = scheduler.half
    half.tier.events = True
    half.create_tier(NUM_BLOCKS)
    scheduler.store_request()
    scheduler.begin_store(scheduler.request("b", 50, num_shared=0))
    (stored,) = half.take_events()
    assert isinstance(stored, BlockStored)
    scheduler.step(reports=[(99, 0, "no number")])  # type: ignore[list-item]
    assert half.tier.is_off
    (removed,) = half.take_events()
    assert isinstance(removed, BlockRemoved)
    assert set(removed.block_hashes) == set(stored.block_hashes)
    jobs = half.take_transfer_events()
    begun, ended = (
        [event.job_id for event in jobs if isinstance(event, kind)]
        for kind in (TransferInitiated, TransferCompleted)
    )
    assert begun == ended and len(begun) == 2
    assert not half.take_events() and not half.take_transfer_events()
