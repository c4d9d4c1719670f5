"""The scheduler half and recurrent states: which of vLLM's state blocks it stores, and when."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.halves import (
    BLOCK_SIZE,
    FULL,
    STATE,
    Scheduler,
    Step,
    cache_config,
    engine_config,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvstow import ConfigError
from kvstow.vllm import KVStowConnector
from kvstow.vllm.connector import _horizon_blocks
from kvstow.vllm.model import Model

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

MODES = pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])


def schedule(scheduler: Scheduler, request: Request, num_tokens: int) -> list[Any]:
    """Schedule tokens of a request, and return the offers of states that vLLM makes then."""
    if not request.num_computed_tokens:
        assert scheduler.half.lookup(request, 0) == 0
    scheduler.manager.new_step_starts()
    assert scheduler.manager.allocate_slots(request, num_tokens) is not None
    if not request.num_computed_tokens:
        scheduler.half.allocated(request, scheduler.manager.get_blocks(request.request_id), 0)
    scheduler.jobs = scheduler.half.build(Step({request.request_id: num_tokens}))
    request.num_computed_tokens += num_tokens
    offers: dict[str, list[Any]] = scheduler.manager.take_boundary_state_offloads()
    return offers.get(request.request_id, [])


def stored(scheduler: Scheduler) -> list[int]:
    """End the step, and return the ids of the states that it stores."""
    scheduler.half.processed(KVConnectorOutput())
    scheduler.jobs = scheduler.half.build(Step())
    return [
        block_id
        for store in scheduler.jobs.stores
        for block_id in store.block_ids[store.offsets[1] : store.offsets[2]].tolist()
    ]


def table(scheduler: Scheduler, name: str) -> list[KVCacheBlock]:
    blocks: list[KVCacheBlock] = scheduler.manager.get_blocks(name).blocks[1]
    return blocks


@MODES
def test_a_state_is_stored_in_the_step_that_wrote_it(lazy: bool) -> None:
    """Of 100 tokens vLLM keeps the state at 96, which a second lookup can reach."""
    scheduler = Scheduler(FULL, STATE, lazy_offload=lazy)
    request = scheduler.request("a", 100)
    assert schedule(scheduler, request, 64) == [], "no later prompt can end its hit here"
    assert stored(scheduler) == []
    [(group, block_id, num_tokens)] = schedule(scheduler, request, 32)
    assert (group, num_tokens) == (1, 96)
    assert stored(scheduler) == [block_id] == [table(scheduler, "a")[5].block_id]
    assert schedule(scheduler, request, 4) == []
    assert stored(scheduler) == []


@MODES
def test_stores_of_states_hold_no_more_blocks_than_they_may(lazy: bool) -> None:
    scheduler = Scheduler(FULL, STATE, lazy_offload=lazy, max_store_blocks_in_flight=1)
    for name in "abc":
        request = scheduler.request(name, 100, num_shared=0)
        schedule(scheduler, request, 96)
        stored(scheduler)
        transfers = scheduler.half.transfers.in_flight.values()
        assert sum(len(transfer.held) for transfer in transfers) <= 1
    assert not lazy or scheduler.half.stats()["postponed_blocks"] == 2


@MODES
def test_a_state_that_vllm_gave_away_is_not_stored(lazy: bool) -> None:
    """Another request gets its block before the step is processed."""
    scheduler = Scheduler(FULL, STATE, lazy_offload=lazy)
    request = scheduler.request("a", 100)
    schedule(scheduler, request, 64)
    stored(scheduler)
    [(_, block_id, _)] = schedule(scheduler, request, 32)
    block = scheduler.manager.block_pool.blocks[block_id]
    scheduler.manager.block_pool.free_blocks([block])
    table(scheduler, "a")
    taken = scheduler.manager.block_pool.get_new_blocks(
        scheduler.manager.block_pool.get_num_free_blocks()
    )
    assert block in taken
    assert stored(scheduler) == []


@MODES
@pytest.mark.parametrize("end", ["preempted", "finished"])
def test_a_state_of_a_request_that_ends_in_its_step_is_not_stored(lazy: bool, end: str) -> None:
    scheduler = Scheduler(FULL, STATE, lazy_offload=lazy)
    request = scheduler.request("a", 100)
    schedule(scheduler, request, 64)
    stored(scheduler)
    schedule(scheduler, request, 32)
    request.num_in_flight_tokens = 32  # the step is not processed
    if end == "preempted":
        scheduler.half.build(Step({}, {"a"}))
    else:
        scheduler.half.finished(request)
    scheduler.manager.free(request)
    assert stored(scheduler) == []
    other = scheduler.request("b", 100)
    assert scheduler.half.lookup(other, 0) == 0


@MODES
@pytest.mark.parametrize("num_drafts", [0, 2])
def test_generated_states_are_stored_if_vllm_keeps_them(lazy: bool, num_drafts: int) -> None:
    """With drafts vLLM hashes a block a step after their tokens are known."""
    state = replace(STATE, num_speculative_blocks=num_drafts)
    scheduler = Scheduler(FULL, state, retention=None, lazy_offload=lazy)
    request = scheduler.request("a", 100)
    offered: list[int] = []
    found: list[int] = []
    for num_tokens in (96, 4):
        offered += [block_id for _, block_id, _ in schedule(scheduler, request, num_tokens)]
        found += stored(scheduler)
    request.append_output_token_ids(7)
    for _ in range(60):
        offers = schedule(scheduler, request, 1 + num_drafts)
        offered += [block_id for _, block_id, _ in offers]
        request.append_output_token_ids([7] * (1 + num_drafts))
        found += stored(scheduler)
    assert len(offered) > 3
    assert found == offered


def test_the_horizon_counts_states_per_request(folder: Path) -> None:
    config = engine_config(folder, {"num_cpu_blocks": 4}, max_num_seqs=8, max_model_len=1024)
    config.scheduler_config.max_num_batched_tokens = 1024
    attention = (1024 + 1024) // BLOCK_SIZE + 8
    config.cache_config.mamba_cache_mode = "align"
    model = Model.of(cache_config(FULL, STATE, STATE))
    assert _horizon_blocks(model, config) == attention + 2 * 8 * 2
    config.cache_config.mamba_cache_mode = "all"
    assert _horizon_blocks(model, config) == 3 * attention


def test_a_unit_below_the_block_is_warned_of(folder: Path, log: list[str]) -> None:
    for unit, warns in ((None, False), (BLOCK_SIZE // 2, True)):
        config = engine_config(folder, {"num_cpu_blocks": 4})
        config.cache_config.prefix_match_unit = unit
        log.clear()
        KVStowConnector(config, KVConnectorRole.SCHEDULER, cache_config(FULL, STATE))
        assert ("--prefix-match-unit" in "".join(log)) == warns
    assert f"units of {BLOCK_SIZE // 2} tokens" in "".join(log)


def test_hashes_of_more_tokens_than_a_block_are_refused(folder: Path) -> None:
    """In the mode "all" vLLM hashes the least common multiple of the block sizes."""
    config = engine_config(folder, {"num_cpu_blocks": 4})
    states = replace(STATE, mamba_cache_mode="all", block_size=2 * BLOCK_SIZE)
    with pytest.raises(ConfigError, match=r"hashes 32 .*16, 32.*with --mamba-cache-mode align, or"):
        KVStowConnector(config, KVConnectorRole.SCHEDULER, cache_config(FULL, states))
    config.cache_config.block_size = 2 * BLOCK_SIZE
    with pytest.raises(ConfigError, match=r"hashes 32 .*16.*: start vLLM without the connector"):
        KVStowConnector(config, KVConnectorRole.SCHEDULER, cache_config(FULL))


def test_hit_density_is_warned_of(folder: Path, log: list[str]) -> None:
    for policy, groups, warns in (
        ("lru", (FULL, STATE), False),
        ("hit-density", (FULL,), False),
        ("hit-density", (FULL, STATE), True),
    ):
        config = engine_config(folder, {"num_cpu_blocks": 4, "eviction_policy": policy})
        log.clear()
        KVStowConnector(config, KVConnectorRole.SCHEDULER, cache_config(*groups))
        assert ("eviction_policy is hit-density" in "".join(log)) == warns


@pytest.mark.skipif(
    not hasattr(STATE, "num_prefill_checkpoint_blocks"), reason="this vLLM writes no checkpoints"
)
@MODES
@pytest.mark.parametrize("is_guarded", [True, False], ids=["guarded", "unguarded"])
def test_a_state_that_vllm_keys_and_does_not_write_is_not_stored(
    lazy: bool, is_guarded: bool
) -> None:
    """A prompt goes on at token 80, within the block that ends at 96, and passes the end.

    The model writes the state at 112, where a later prompt can end its hit, into another block.
    vLLM rounds 112 down to a block's end, and keys the state of token 80 as the one of token 96.
    """
    state = replace(
        STATE,
        block_size=2 * BLOCK_SIZE,
        num_prefill_checkpoint_blocks=1,
        prefill_checkpoint_alignment=1,
    )
    scheduler = Scheduler(FULL, state, draft_groups=[0], lazy_offload=lazy)
    if not is_guarded:
        scheduler.half.steps.evict_skipped = lambda scheduled: None  # type: ignore[method-assign]
    request = scheduler.request("a", 138)
    for num_tokens in (64, 16):
        schedule(scheduler, request, num_tokens)
        stored(scheduler)
    schedule(scheduler, request, 58)
    block = table(scheduler, "a")[2]
    if not is_guarded and block.block_hash is None:
        pytest.skip("this vLLM does not key it")
    assert (block.block_hash is None) == is_guarded
    assert (block.block_id in stored(scheduler)) != is_guarded
    pool, key = scheduler.manager.block_pool, scheduler.half.tier.model.block_hash(request, 2, 1)
    assert (pool.get_cached_block(key, [1]) is None) == is_guarded


@MODES
def test_a_state_that_vllm_keys_a_step_late_is_not_stored(lazy: bool) -> None:
    """A chunk goes on at token 48, and an image without room in the encoder ends it at 66.

    Four modules of MTP may compute three tokens again. So the block that ends at 64 gets its key
    in the next step, if vLLM schedules that before the chunk is processed.
    """
    state = replace(STATE, block_size=2 * BLOCK_SIZE)
    scheduler = Scheduler(
        FULL, state, draft_groups=[], num_modules=4, retention=None, lazy_offload=lazy
    )
    request = scheduler.request("a", 138)
    schedule(scheduler, request, 48)
    stored(scheduler)
    schedule(scheduler, request, 18)
    block = table(scheduler, "a")[1]
    assert block.block_hash is None
    request.num_in_flight_tokens = 18
    schedule(scheduler, request, 30)
    assert table(scheduler, "a")[1] is block
    assert block.block_hash is None
    request.num_in_flight_tokens = 0
    assert block.block_id not in stored(scheduler)
    schedule(scheduler, request, 42)
    assert not scheduler.half.steps._skipped, "vLLM has dropped the block"
