"""The scheduler half beside vLLM's accounting: which blocks it stores, loads, holds and frees."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Set
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from tests.vllm.halves import BLOCK_SIZE, FULL, NUM_BLOCKS, WINDOW, Scheduler, Step
from vllm.lora.request import LoRARequest
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from kvstow.vllm.loads import MAX_REFUSED_S
from kvstow.vllm.messages import Copies, StepReports

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own


def test_two_lora_names_share_no_block() -> None:
    scheduler = Scheduler(FULL)
    first, second = (LoRARequest(name, at, f"someone/{name}") for at, name in enumerate("ab", 1))
    scheduler.store_request("a", lora_request=first)
    assert scheduler.half.lookup(scheduler.request("b", 100, lora_request=second), 0) == 0
    assert scheduler.half.lookup(scheduler.request("c", 100), 0) == 0
    assert scheduler.half.lookup(scheduler.request("d", 100, lora_request=first), 0) == 96


def test_a_window_is_stored_when_its_request_ends() -> None:
    """The next token reads the last 32 of 100 tokens: two of the window's six blocks."""
    scheduler = Scheduler(FULL, WINDOW)
    scheduler.store_request()
    assert scheduler.half.offload is not None
    assert scheduler.half.offload.num_resident == 6 + 2, "vLLM frees the other blocks"
    assert scheduler.half.lookup(scheduler.request("b", 100), 0) == 96


@pytest.mark.parametrize(
    ("draft_groups", "chunks", "expected"),
    [(None, (90, 14), 96), ([1], (90, 14), 80), ([1], (10, 30), 16)],
    ids=["", "drafts", "drafts, and before the first hit"],
)
def test_a_window_in_smaller_blocks_is_stored_though_a_chunk_ended_within_it(
    draft_groups: list[int] | None, chunks: tuple[int, ...], expected: int
) -> None:
    """Its block from 80 to 88 is full before vLLM keys it, when the others' block ends at 96."""
    small = replace(WINDOW, block_size=BLOCK_SIZE // 2, sliding_window=16)
    scheduler = Scheduler(FULL, small, draft_groups=draft_groups)
    request = scheduler.request("a", sum(chunks))
    assert scheduler.half.lookup(request, 0) == 0
    reports: list[tuple[int, int, bool]] = []
    for num_tokens in chunks:
        assert scheduler.manager.allocate_slots(request, num_tokens) is not None
        scheduler.half.allocated(request, scheduler.manager.get_blocks("a"), 0)
        jobs = scheduler.half.build(Step({"a": num_tokens}))
        reports += [(store.job_id, 0, True) for store in jobs.stores]
        request.num_computed_tokens += num_tokens
        scheduler.half.processed(KVConnectorOutput())
    scheduler.finish(request)
    scheduler.step()
    scheduler.step(reports=reports + [(it.job_id, 0, True) for it in scheduler.jobs.stores])
    assert scheduler.manager.reset_prefix_cache()
    again = scheduler.request("b", sum(chunks) + 16, num_shared=sum(chunks))
    assert scheduler.half.lookup(again, 0) == expected


@pytest.mark.parametrize("num_last", [36, 47])
def test_a_window_is_stored_though_the_last_two_steps_of_its_request_overlap(num_last: int) -> None:
    """As with one new token. The end of the first step reports what that one has computed.

    After 47 tokens the window of the next one begins in a later block than that of a hit.
    """
    scheduler = Scheduler(FULL, WINDOW)
    request = scheduler.request("a", 64 + num_last)
    assert scheduler.half.lookup(request, 0) == 0
    for num_tokens in (64, num_last):
        assert scheduler.manager.allocate_slots(request, num_tokens) is not None
        scheduler.half.allocated(request, scheduler.manager.get_blocks("a"), 0)
        scheduler.half.build(Step({"a": num_tokens}))
        request.num_computed_tokens += num_tokens
    request.num_in_flight_tokens = num_last
    scheduler.half.processed(KVConnectorOutput())
    request.num_in_flight_tokens = 0
    scheduler.finish(request)
    scheduler.step()
    scheduler.step(reports=[(store.job_id, 0, True) for store in scheduler.jobs.stores])
    assert scheduler.manager.reset_prefix_cache()
    assert scheduler.half.lookup(scheduler.request("b", 120, num_shared=64 + num_last), 0) == 96


@pytest.mark.parametrize("retention", [0, None], ids=["sparse", "dense"])
@pytest.mark.parametrize("extra", [0, 1, 2, 3, 20])
def test_a_load_brings_what_vllm_retains_below_a_window(extra: int, retention: int | None) -> None:
    """Drafts of several modules read these blocks: vLLM allocates them and may cache them."""
    retaining = replace(WINDOW, extra_retained_tokens=extra)
    scheduler = Scheduler(FULL, retaining, retention=retention)
    scheduler.store_request("a", 200)
    request = scheduler.request("b", 200)
    assert scheduler.admit(request) == 192
    scheduler.step()
    (load,) = scheduler.jobs.loads
    tables = scheduler.manager.get_blocks("b").blocks
    taken = [block.block_id for table in tables for block in table[:12] if not block.is_null]
    assert load.block_ids.tolist() == taken
    assert len(taken) == 12 + -(-(32 - 1 + extra) // BLOCK_SIZE)
    scheduler.step(reports=[(load.job_id, 0, True)])
    scheduler.finish(request)


def test_a_retained_block_of_another_request_is_not_stored() -> None:
    """Retained blocks have no hash, so only the request's table shows the owner."""
    scheduler = Scheduler(FULL, replace(WINDOW, extra_retained_tokens=20))
    request = scheduler.request("a", 200)
    scheduler.admit(request)
    scheduler.half.build(Step({"a": 200}))
    request.num_computed_tokens = 200
    scheduler.manager.remove_skipped_blocks("a", 200, num_prompt_tokens=200)
    other = scheduler.request("b", 100, cache_salt="b")
    scheduler.manager.allocate_slots(other, 100)
    scheduler.half.processed(KVConnectorOutput())
    (store,) = scheduler.half.build(Step()).stores
    table = scheduler.manager.get_blocks("a").blocks[1]
    own = {block.block_id for block in table if not block.is_null}
    stored = store.block_ids[store.offsets[1] :].tolist()
    assert stored and set(stored) <= own


@pytest.mark.parametrize("num_loaded", [96, 90])
def test_a_retained_block_that_another_connector_loads_is_not_stored(num_loaded: int) -> None:
    """That connector may load only what a hit needs, and leave the retained block unwritten.

    It may also load a part of a block, of which the request computes the rest.
    """
    scheduler = Scheduler(FULL, replace(WINDOW, extra_retained_tokens=20))
    request = scheduler.request("a", 200)
    assert scheduler.half.lookup(request, 0) == 0
    scheduler.manager.allocate_slots(
        request, 0, num_external_computed_tokens=num_loaded, delay_cache_blocks=True
    )
    scheduler.half.allocated(request, scheduler.manager.get_blocks("a"), 0)
    request.num_computed_tokens = num_loaded
    scheduler.manager.cache_blocks(request, num_loaded)
    scheduler.half.allocated(request, scheduler.manager.get_blocks("a"), 0)
    scheduler.manager.allocate_slots(request, 200 - num_loaded)
    scheduler.step(request)
    scheduler.step()
    (store,) = scheduler.jobs.stores
    table = scheduler.manager.get_blocks("a").blocks[1]
    blocks = scheduler.manager.block_pool.blocks
    loaded = {block.block_id for block in table[:6] if not block.is_null}
    stored = set(store.block_ids[store.offsets[1] :].tolist())
    assert loaded and stored
    assert all(blocks[block_id].block_hash is not None for block_id in loaded & stored)


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
def test_a_block_that_another_connector_did_not_load_is_not_stored(lazy: bool) -> None:
    """vLLM counts it as computed for all requests that have it but the first one."""
    scheduler = Scheduler(FULL, lazy_offload=lazy)
    first, second = (scheduler.request(name, 100) for name in "ab")
    scheduler.admit(first)
    scheduler.admit(second)
    [table] = scheduler.manager.get_blocks("a").blocks
    scheduler.half.build(Step({"a": 100, "b": 4}))
    second.num_computed_tokens = 100
    scheduler.half.processed(KVConnectorOutput(invalid_block_ids={table[0].block_id}))
    assert not scheduler.manager.get_computed_blocks(scheduler.request("c", 100))[1]
    # vLLM keys the block that the second request fills now, behind those that were not loaded.
    second.append_output_token_ids(list(range(12)))
    assert scheduler.manager.allocate_slots(second, 12)
    scheduler.step(second)
    for request in (second, first):
        scheduler.finish(request)
    for _ in range(3):
        scheduler.step()
        assert not scheduler.jobs.stores


def loaded_by_another(scheduler: Scheduler, name: str) -> Request:
    """Return a request that is admitted with 96 tokens of another connector.

    That connector loads them within the first step, which computes 4 tokens.
    """
    request = scheduler.request(name, 100)
    assert scheduler.half.lookup(request, 0) == 0
    assert scheduler.manager.allocate_slots(request, 4, num_external_computed_tokens=96)
    scheduler.half.allocated(request, scheduler.manager.get_blocks(name), 0)
    request.num_computed_tokens = 96
    return request


@pytest.mark.parametrize("fails", [True, False], ids=["fails", "succeeds"])
def test_nothing_of_a_request_is_stored_before_its_first_step_has_ended(*, fails: bool) -> None:
    """The outcome may be that another connector did not load what the step read."""
    scheduler = Scheduler(FULL, gathered_tokens=10_000)
    scheduler.step()
    request = loaded_by_another(scheduler, "a")
    other = scheduler.request("b", (NUM_BLOCKS - 12) * BLOCK_SIZE, num_shared=0)
    scheduler.admit(other)
    # The step leaves no room, so it stores all that is known to be computed.
    assert not scheduler.half.build(Step({"a": 4, "b": other.num_tokens})).stores
    # Another step is scheduled while the first one runs.
    for each in (request, other):
        each.num_computed_tokens = each.num_in_flight_tokens = each.num_tokens
    request.num_in_flight_tokens = 4
    assert not scheduler.half.holds_freed_blocks()
    assert not scheduler.half.build(Step()).stores
    request.num_in_flight_tokens = other.num_in_flight_tokens = 0
    block_ids = scheduler.manager.get_blocks("a").get_block_ids()[0]
    output = KVConnectorOutput(invalid_block_ids=set(block_ids[:1]) if fails else set())
    scheduler.half.processed(output)
    (store,) = scheduler.half.build(Step()).stores
    assert set(block_ids).isdisjoint(store.block_ids.tolist()) == fails


@pytest.mark.parametrize("num_in_flight", [4, 0], ids=["in its first step", "after it"])
def test_blocks_of_a_request_that_ends_while_another_connector_loads_lose_their_keys(
    num_in_flight: int,
) -> None:
    """vLLM ignores a failed load of a request that is over."""
    scheduler = Scheduler(FULL)
    request = loaded_by_another(scheduler, "a")
    scheduler.half.build(Step({"a": 4}))
    request.num_computed_tokens, request.num_in_flight_tokens = 100, num_in_flight
    scheduler.finish(request)
    num_cached = scheduler.manager.get_computed_blocks(scheduler.request("b", 100))[1]
    assert num_cached == (0 if num_in_flight else 96)


@pytest.mark.parametrize("is_aborted", [True, False], ids=["aborted", "failed"])
def test_what_a_request_computed_from_a_block_that_is_still_loaded_loses_its_key(
    *, is_aborted: bool
) -> None:
    """It hits the blocks of another connector in the step that loads them.

    With `kv_load_failure_policy` "fail" vLLM evicts only the blocks of the first request.
    """
    scheduler = Scheduler(FULL)
    first, second = loaded_by_another(scheduler, "a"), scheduler.request("b", 200, num_shared=96)
    scheduler.admit(second)
    assert second.num_computed_tokens == 96
    scheduler.half.build(Step({"a": 4, "b": 104}))
    for request in (first, second):
        request.num_in_flight_tokens = request.num_tokens - 96
        request.num_computed_tokens = request.num_tokens
    if not is_aborted:
        second.num_computed_tokens, second.num_in_flight_tokens = 96, 0
    own = scheduler.manager.get_blocks("b").blocks[0][6:12]
    assert all(block.block_hash for block in own)
    scheduler.finish(second)
    assert not any(block.block_hash for block in own)


def test_no_later_block_of_a_request_that_read_a_block_not_loaded_has_a_key() -> None:
    """vLLM lets it read the block before the first request has computed that again.

    If another request computes the prefix anew, later requests would hit what follows it here.
    """
    scheduler = Scheduler(FULL)
    first, second = loaded_by_another(scheduler, "a"), scheduler.request("b", 120, num_shared=96)
    scheduler.admit(second)
    scheduler.half.build(Step({"a": 4, "b": 24}))
    block_ids = scheduler.manager.get_blocks("a").get_block_ids()[0]
    first.num_computed_tokens = 0
    scheduler.half.processed(KVConnectorOutput(invalid_block_ids=set(block_ids)))
    assert scheduler.manager.allocate_slots(second, 24)
    second.append_output_token_ids(list(range(20)))
    second.num_computed_tokens = 120
    assert scheduler.manager.allocate_slots(second, 20)
    later = scheduler.manager.get_blocks("b").blocks[0][7]
    assert later.block_hash
    scheduler.half.build(Step({"a": 32, "b": 20}))
    assert not later.block_hash


def test_a_request_that_hits_a_later_block_before_that_loses_its_key_keeps_no_keys() -> None:
    """vLLM keys the block and grants it to another request within one step.

    That request computes from wrong KV, and its own first step ends well.
    """
    scheduler = Scheduler(FULL)
    first, second = loaded_by_another(scheduler, "a"), scheduler.request("b", 120, num_shared=96)
    scheduler.admit(second)
    scheduler.half.build(Step({"a": 4, "b": 24}))
    block_ids = scheduler.manager.get_blocks("a").get_block_ids()[0]
    first.num_computed_tokens, second.num_computed_tokens = 0, 120
    scheduler.half.processed(KVConnectorOutput(invalid_block_ids=set(block_ids)))
    anew, third = (scheduler.request(name, 120, num_shared=96) for name in ("anew b", "third b"))
    scheduler.admit(anew)
    scheduler.step(anew)
    second.append_output_token_ids(list(range(20)))
    third.append_output_token_ids(list(range(80)))
    assert scheduler.manager.allocate_slots(second, 20)
    scheduler.admit(third)
    assert third.num_computed_tokens == 128
    own = scheduler.manager.get_blocks("third b").blocks[0][8:12]
    assert all(block.block_hash for block in own)
    scheduler.half.build(Step({"b": 20, "third b": 72}))
    third.num_computed_tokens, second.num_computed_tokens = 200, 140
    scheduler.half.processed(KVConnectorOutput())
    scheduler.half.build(Step({"b": 1, "third b": 1}))
    assert not any(block.block_hash for block in own)


@pytest.mark.parametrize("is_loading", [False, True], ids=["runs", "loads"])
def test_a_request_that_shares_only_what_followed_a_block_not_loaded_keeps_no_keys(
    *, is_loading: bool
) -> None:
    """Its prefix is right: when the first request was aborted, another computed that anew."""
    scheduler = Scheduler(FULL)
    first, second = loaded_by_another(scheduler, "a"), scheduler.request("b", 128)
    scheduler.admit(second)
    invalid = scheduler.manager.get_blocks("a").get_block_ids()[0][3]
    scheduler.half.build(Step({"a": 4, "b": 32}))
    first.num_computed_tokens, first.num_in_flight_tokens = 100, 4
    second.num_computed_tokens, second.num_in_flight_tokens = 128, 32
    scheduler.finish(first)
    anew, third = scheduler.request("d", 100), scheduler.request("c", 200, num_shared=128)
    scheduler.admit(anew)
    scheduler.admit(third)
    assert third.num_computed_tokens == 128
    scheduled = {"d": 100} if is_loading else {"d": 100, "c": 72}
    scheduler.half.build(Step(scheduled))
    second.num_computed_tokens, second.num_in_flight_tokens = 48, 0
    if not is_loading:
        third.num_computed_tokens, third.num_in_flight_tokens = 200, 72
    scheduler.half.processed(KVConnectorOutput(invalid_block_ids={invalid}))
    scheduler.finish(second)
    if is_loading:
        scheduler.half.build(Step({"c": 72}))
        third.num_computed_tokens = 200
    third.num_in_flight_tokens = 0
    scheduler.half.build(Step({"c": 1}))
    third.append_output_token_ids(list(range(20)))
    assert scheduler.manager.allocate_slots(third, 20)
    own = scheduler.manager.get_blocks("c").blocks[0][8:13]
    assert own[-1].block_hash, "vLLM gives later blocks their keys"
    scheduler.half.build(Step({"c": 20}))
    assert len(own) == 5 and not any(block.block_hash for block in own)


def test_blocks_of_a_request_preempted_while_another_connector_loads_lose_their_keys() -> None:
    """vLLM ignores a failed load of a request that does not run."""
    scheduler = Scheduler(FULL)
    request = loaded_by_another(scheduler, "a")
    scheduler.half.build(Step({"a": 4}))
    scheduler.manager.free(request)
    request.num_computed_tokens, request.num_in_flight_tokens = 0, 4
    scheduler.half.build(Step({}, {"a"}))
    assert not scheduler.manager.get_computed_blocks(scheduler.request("b", 100))[1]


def test_granted_and_unwritten_blocks_lose_their_keys_if_others_have_the_same_key() -> None:
    """Two requests share a prompt, so the second one's blocks have the keys of the first one's.

    vLLM finds the first one's blocks by these keys, and not those that were never written.
    """
    scheduler = Scheduler(FULL)
    first, second = requests = [scheduler.request(name, 100) for name in "ab"]
    for request in requests:  # neither finds blocks of the other
        assert scheduler.half.lookup(request, 0) == 0
    for num_tokens in (32, 68):
        for request in requests:
            assert scheduler.manager.allocate_slots(request, num_tokens)
            blocks = scheduler.manager.get_blocks(request.request_id)
            scheduler.half.allocated(request, blocks, 0)
        if num_tokens == 32:
            scheduler.half.build(Step({"a": 32, "b": 32}))
            for request in requests:
                request.num_computed_tokens = 32
    unwritten = scheduler.manager.get_blocks("b").blocks[0][2:6]
    assert all(block.block_hash for block in unwritten)
    scheduler.manager.free(second)
    second.num_computed_tokens = 0
    scheduler.half.build(Step({"a": 68}, {"b"}))
    first.num_computed_tokens = 100
    assert not any(block.block_hash for block in unwritten)


@pytest.mark.parametrize("is_prefix_anew", [False, True], ids=["no prefix", "prefix anew"])
def test_blocks_computed_from_a_block_not_loaded_lose_their_keys_at_a_preemption(
    *, is_prefix_anew: bool
) -> None:
    """The request has not run when another connector reports that it did not load its hit.

    It runs its first step, and vLLM preempts it before the next one.
    """
    scheduler = Scheduler(FULL)
    first, second = loaded_by_another(scheduler, "a"), scheduler.request("b", 200, num_shared=96)
    hit, num_local, found = scheduler.look_up(second)
    assert (num_local, found) == (96, 0)
    assert scheduler.manager.allocate_slots(
        second, 4, num_new_computed_tokens=96, new_computed_blocks=hit
    )
    scheduler.half.allocated(second, scheduler.manager.get_blocks("b"), 0)
    second.num_computed_tokens = 96
    block_ids = scheduler.manager.get_blocks("a").get_block_ids()[0]
    scheduler.half.build(Step({"a": 4}))
    first.num_computed_tokens = 0
    scheduler.half.processed(KVConnectorOutput(invalid_block_ids=set(block_ids)))
    if is_prefix_anew:
        anew = scheduler.request("c", 100)
        scheduler.admit(anew)
        scheduler.step(anew)
    assert scheduler.manager.allocate_slots(second, 104)
    scheduler.step(second)
    own = scheduler.manager.get_blocks("b").blocks[0][6:12]
    assert all(block.block_hash for block in own)
    scheduler.manager.free(second)
    second.num_computed_tokens = 0
    scheduler.half.build(Step({}, {"b"}))
    assert not any(block.block_hash for block in own)


def test_blocks_of_a_request_that_ends_in_its_first_step_keep_their_keys() -> None:
    """No other connector had to load any of them."""
    scheduler = Scheduler(FULL)
    scheduler.store_request()
    request = scheduler.request("b", 200)
    assert scheduler.admit(request) == 96
    scheduler.step()
    scheduler.step(reports=[(copies.job_id, 0, True) for copies in scheduler.jobs.loads])
    scheduler.manager.cache_blocks(request, 96)
    scheduler.half.allocated(request, scheduler.manager.get_blocks("b"), 0)
    assert scheduler.manager.allocate_slots(request, 104)
    scheduler.half.build(Step({"b": 104}))
    request.num_computed_tokens, request.num_in_flight_tokens = 200, 104
    scheduler.finish(request)
    assert scheduler.manager.get_computed_blocks(scheduler.request("c", 200))[1] == 192


def test_a_request_aborted_while_it_loads_stores_nothing() -> None:
    """Its table counts the external tokens as computed, and they are not."""
    scheduler = Scheduler(FULL)
    scheduler.store_request()
    request = scheduler.request("b", 100)
    assert scheduler.admit(request) == 96
    scheduler.step()
    (load,) = scheduler.jobs.loads
    scheduler.half.reset()
    scheduler.half.finished(request)
    scheduler.step()
    assert not scheduler.jobs.stores
    scheduler.step(reports=[(load.job_id, 0, True)])
    scheduler.step()
    # vLLM frees the blocks once the load is reported as failed, because of the reset.
    assert scheduler.jobs.failed_request_ids == ["b"]
    scheduler.manager.free(request)
    assert scheduler.manager.block_pool.get_num_free_blocks() == NUM_BLOCKS - 1


def test_a_load_ends_when_the_last_rank_has_reported() -> None:
    scheduler = Scheduler(FULL, world_size=2)
    request = scheduler.request("a", 100)
    store = scheduler.begin_store(request)
    scheduler.step(reports=[(store.job_id, 1, True)])
    assert not scheduler.half.may_rest()
    scheduler.step(reports=[(store.job_id, 0, True)])
    assert scheduler.half.may_rest()
    scheduler.manager.reset_prefix_cache()

    again = scheduler.request("b", 100)
    assert scheduler.admit(again) == 96
    scheduler.step()
    (load,) = scheduler.jobs.loads
    assert scheduler.step(reports=[(load.job_id, 0, True)]) == set()
    assert scheduler.step(reports=[(load.job_id, 1, False)]) == set()
    scheduler.step()
    assert scheduler.jobs.failed_request_ids == ["b"]


def test_a_load_that_was_not_offered_is_reported_as_failed() -> None:
    """vLLM waits for a load from the moment it accepts the tokens."""
    scheduler = Scheduler(FULL)
    scheduler.store_request()
    request = scheduler.request("b", 100)
    assert scheduler.half.lookup(request, 0) == 96
    taken = scheduler.manager.allocate_slots(
        request, 0, num_external_computed_tokens=112, delay_cache_blocks=True
    )
    assert taken is not None
    scheduler.half.allocated(request, scheduler.manager.get_blocks("b"), 112)
    scheduler.step()
    assert scheduler.jobs.failed_request_ids == ["b"] and not scheduler.jobs.loads
    scheduler.manager.free(request)
    request.num_computed_tokens = 0
    assert scheduler.admit(request) == 0
    scheduler.step(request)
    scheduler.finish(request)


@pytest.mark.parametrize("lazy", [False, True])
def test_blocks_are_free_once_every_rank_has_read_them(lazy: bool) -> None:
    scheduler = Scheduler(FULL, world_size=2, lazy_offload=lazy)
    request = scheduler.request("a", 100)
    scheduler.admit(request)
    scheduler.step(request)
    scheduler.finish(request)
    stores: list[Copies] = []
    for _ in range(3):
        scheduler.step()
        stores += scheduler.jobs.stores
    (store,) = stores
    pool = scheduler.manager.block_pool
    order = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    assert pool.get_num_free_blocks() == NUM_BLOCKS - 1 - len(store.block_ids)
    scheduler.step(released=[store.job_id])
    assert pool.get_num_free_blocks() == NUM_BLOCKS - 1 - len(store.block_ids)
    scheduler.step(released=[store.job_id])
    assert pool.get_num_free_blocks() == NUM_BLOCKS - 1
    assert not scheduler.half.may_rest(), "the host does not have the blocks yet"
    freed = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    assert not lazy or freed == [*order, *store.block_ids[::-1]], "as without stores"
    for rank in range(2):
        scheduler.step(reports=[(store.job_id, rank, True)])
    assert scheduler.half.may_rest()
    assert pool.get_num_free_blocks() == NUM_BLOCKS - 1


def test_a_late_load_is_reported_once_and_holds_its_blocks() -> None:
    scheduler = Scheduler(FULL, load_timeout_s=5.0)
    scheduler.store_request()
    request = scheduler.request("b", 100)
    scheduler.admit(request)
    scheduler.step()
    (load,) = scheduler.jobs.loads
    scheduler.now = 6.0
    reported: list[str] = []
    for _ in range(3):
        scheduler.step()
        reported += scheduler.jobs.failed_request_ids
    assert reported == ["b"]
    request.num_computed_tokens = 0
    scheduler.manager.free(request)
    pool = scheduler.manager.block_pool
    assert pool.get_num_free_blocks() == NUM_BLOCKS - 1 - 6
    assert scheduler.admit(request) == 0, "the request recomputes"
    assert scheduler.step(reports=[(load.job_id, 0, True)]) == set()
    scheduler.step()
    assert not scheduler.jobs.failed_request_ids
    scheduler.finish(request)
    for _ in range(2):
        scheduler.step(reports=[(copies.job_id, 0, True) for copies in scheduler.jobs.stores])
    assert pool.get_num_free_blocks() == NUM_BLOCKS - 1


def test_vllm_waits_for_the_stores_after_a_late_one_and_not_for_that() -> None:
    scheduler = Scheduler(FULL, load_timeout_s=5.0)
    stores: list[Copies] = []
    for name in "ab":
        request = scheduler.request(name, 100, num_shared=0)
        scheduler.admit(request)
        scheduler.step(request)
        scheduler.finish(request)
        assert scheduler.half.holds_freed_blocks()
        scheduler.step()
        stores += scheduler.jobs.stores
        if name == "a":
            scheduler.now = 6.0
            scheduler.step()
            assert not scheduler.half.holds_freed_blocks(), "its copy may never end"
            assert scheduler.half.may_rest()
    for store, may_rest in zip(stores, (False, True), strict=True):
        scheduler.step(reports=[(store.job_id, 0, True)])
        assert scheduler.half.may_rest() == may_rest
    assert scheduler.manager.block_pool.get_num_free_blocks() == NUM_BLOCKS - 1


def test_a_tier_that_is_off_holds_blocks_until_every_rank_has_ended() -> None:
    scheduler = Scheduler(FULL, world_size=2)
    request = scheduler.request("a", 100)
    store = scheduler.begin_store(request)
    scheduler.half.tier.turn_off()
    pool = scheduler.manager.block_pool
    for rank, num_held in enumerate((6, 0)):
        scheduler.step(reports=[(store.job_id, rank, True)])
        assert pool.get_num_free_blocks() == NUM_BLOCKS - 1 - num_held


def test_a_late_load_is_not_given_up_again_when_the_tier_goes_off() -> None:
    scheduler = Scheduler(FULL, load_timeout_s=5.0)
    scheduler.store_request()
    request = scheduler.request("b", 100)
    scheduler.admit(request)
    scheduler.step()
    (load,) = scheduler.jobs.loads
    scheduler.now = 6.0
    scheduler.step()
    assert scheduler.jobs.failed_request_ids == ["b"]
    scheduler.half.tier.turn_off()
    scheduler.half.transfers.give_up_loads()
    assert not scheduler.half.build(Step()).failed_request_ids
    request.num_computed_tokens = 0
    scheduler.manager.free(request)
    scheduler.step(reports=[(load.job_id, 0, True)])
    assert scheduler.manager.block_pool.get_num_free_blocks() == NUM_BLOCKS - 1


def test_a_lazy_store_that_fails_is_tried_again() -> None:
    scheduler = Scheduler(FULL, lazy_offload=True)
    request = scheduler.request("a", 100)
    scheduler.admit(request)
    scheduler.step(request)
    scheduler.finish(request)
    for ok, num_stored in ((False, 6), (True, 6), (True, 0)):
        stores: list[Copies] = []
        for _ in range(2):
            scheduler.step()
            stores += scheduler.jobs.stores
        assert sum(len(store.block_ids) for store in stores) == num_stored
        scheduler.step(reports=[(store.job_id, 0, ok) for store in stores])


def test_a_lazy_store_puts_blocks_back_into_their_places() -> None:
    scheduler = Scheduler(FULL, lazy_offload=True)
    scheduler.lazy.horizon_blocks = 0
    for name in ("a", "b"):
        request = scheduler.request(name, 100, cache_salt=name)
        scheduler.admit(request)
        scheduler.step(request)
        scheduler.finish(request)
    queue = scheduler.manager.block_pool.free_block_queue
    order = [block.block_id for block in queue.get_all_free_blocks()]
    scheduler.lazy.horizon_blocks = NUM_BLOCKS - 1 - 6  # all but the second request's
    scheduler.step()
    assert queue.num_free_blocks == NUM_BLOCKS - 1 - 6
    scheduler.step()
    (store,) = scheduler.jobs.stores
    scheduler.step(reports=[(store.job_id, 0, True)])
    is_cached = scheduler.manager.block_pool.blocks
    cached = [block.block_id for block in queue.get_all_free_blocks() if block.block_hash]
    assert cached == [block_id for block_id in order if is_cached[block_id].block_hash]
    assert len(cached) == 12


def test_a_request_that_ends_with_its_step_is_stored() -> None:
    """vLLM ends requests before it reports the step, so `finished` is the last chance."""
    scheduler = Scheduler(FULL, WINDOW)
    request = scheduler.request("a", 100)
    scheduler.admit(request)
    scheduler.half.build(Step({"a": 100}))
    request.num_computed_tokens = 100
    scheduler.manager.remove_skipped_blocks("a", 100, num_prompt_tokens=100)
    scheduler.finish(request)
    scheduler.step()
    (store,) = scheduler.jobs.stores
    assert store.offsets.tolist() == [0, 6, 6 + 2]
    scheduler.step(reports=[(store.job_id, 0, True)])
    scheduler.manager.reset_prefix_cache()
    assert scheduler.half.lookup(scheduler.request("b", 100), 0) == 96


def test_a_rejected_draft_is_not_stored() -> None:
    """The computed tokens without those in flight count. A rejection takes tokens back."""
    scheduler = Scheduler(FULL)
    request = scheduler.request("a", 30)
    scheduler.admit(request)
    scheduler.half.build(Step({"a": 34}))  # four drafts fill block 2
    request.num_computed_tokens = 30
    scheduler.half.processed(KVConnectorOutput())
    jobs = scheduler.half.build(Step())
    (store,) = jobs.stores
    assert len(store.block_ids) == 1


@pytest.mark.parametrize(("is_replaced", "num_stored"), [(False, 5), (True, 0)])
def test_a_block_without_the_key_of_its_tokens_is_not_stored(
    *, is_replaced: bool, num_stored: int
) -> None:
    """Its last block has no key, or vLLM has replaced the tokens after it gave the blocks keys."""
    scheduler = Scheduler(FULL)
    request = scheduler.request("a", 100)
    scheduler.admit(request)
    if is_replaced:
        request.block_hashes[:] = scheduler.request("b", 100, num_shared=0).block_hashes
    else:
        scheduler.manager.block_pool.evict_blocks({scheduler.manager.get_block_ids("a")[0][5]})
    scheduler.step(request)
    scheduler.step()
    assert sum(len(store.block_ids) for store in scheduler.jobs.stores) == num_stored


def test_a_rejected_draft_does_not_count_as_written() -> None:
    """Before vLLM preempts the request, it grants and keys the block that the draft had filled."""
    scheduler = Scheduler(FULL, WINDOW, retention=None)
    request = scheduler.request("a", 30)
    scheduler.admit(request)
    scheduler.step(request)
    request.append_output_token_ids(7)
    assert scheduler.manager.allocate_slots(request, 5)
    scheduler.half.build(Step({"a": 5}))  # the first of four drafts fills block 1
    request.num_computed_tokens += 1
    request.append_output_token_ids(8)
    scheduler.half.processed(KVConnectorOutput())
    assert scheduler.manager.allocate_slots(request, 1)
    scheduler.manager.free(request)
    request.num_computed_tokens = 0
    scheduler.half.build(Step(preempted_req_ids={"a"}))
    request.append_output_token_ids(9)  # vLLM computes at least one token
    assert scheduler.manager.get_computed_blocks(request)[1] == BLOCK_SIZE


def test_steps_in_flight_are_not_stored() -> None:
    scheduler = Scheduler(FULL)
    request = scheduler.request("a", 100)
    scheduler.admit(request)
    scheduler.half.build(Step({"a": 100}))
    request.num_computed_tokens, request.num_in_flight_tokens = 100, 100
    scheduler.half.processed(KVConnectorOutput())
    assert scheduler.half.transfers._stores == []
    request.num_in_flight_tokens = 0
    scheduler.half.processed(KVConnectorOutput())
    assert len(scheduler.half.transfers._stores) == 1


def test_a_draft_model_loads_one_block_less_of_a_hit() -> None:
    scheduler = Scheduler(FULL, draft_groups=[0])
    scheduler.store_request()
    assert scheduler.half.lookup(scheduler.request("b", 100), 0) == 80


# Specs, the groups of the draft model, and its modules. With no groups vLLM does not know which.
DRAFTS = [
    ((FULL,), [], 1),
    ((FULL, WINDOW), [], 1),
    ((FULL, WINDOW), [0], 1),
    ((WINDOW, FULL), [0], 1),
    ((FULL, replace(WINDOW, extra_retained_tokens=2)), [1], 3),
    ((FULL, replace(WINDOW, extra_retained_tokens=4)), [], 5),
]


@pytest.mark.parametrize("retention", [0, None], ids=["sparse", "dense"])
@pytest.mark.parametrize(("specs", "groups", "num_modules"), DRAFTS)
def test_hits_of_draft_models_are_as_long_as_vllms(
    specs: tuple[KVCacheSpec, ...], groups: list[int], num_modules: int, retention: int | None
) -> None:
    scheduler = Scheduler(*specs, draft_groups=groups, num_modules=num_modules, retention=retention)
    scheduler.serve(scheduler.request("a", 200))
    again = scheduler.request("b", 200)
    on_device = scheduler.manager.get_computed_blocks(again)[1]
    assert on_device == 176, "192 are whole blocks, and the draft model drops the last"
    assert scheduler.manager.reset_prefix_cache()
    assert scheduler.admit(again) == on_device
    scheduler.step()
    (load,) = scheduler.jobs.loads
    tables = scheduler.manager.get_blocks("b").blocks
    taken = [block.block_id for table in tables for block in table[:11] if not block.is_null]
    assert load.block_ids.tolist() == taken
    scheduler.step(reports=[(load.job_id, 0, True)])
    scheduler.finish(again)


def test_the_block_that_a_draft_models_window_drops_is_stored_before_a_larger_one_is_full() -> None:
    """A hit of 96 tokens needs the window's block up to 112, where vLLM keys no other block."""
    large = replace(FULL, block_size=2 * BLOCK_SIZE)
    scheduler = Scheduler(FULL, large, WINDOW, draft_groups=[2], retention=None)
    scheduler.serve(scheduler.request("a", 116))
    again = scheduler.request("b", 140, num_shared=116)
    assert scheduler.manager.get_computed_blocks(again)[1] == 96
    assert scheduler.manager.reset_prefix_cache()
    assert scheduler.half.lookup(again, 0) == 96


def test_a_window_is_kept_where_prompts_part() -> None:
    """Though the device has lost what they share: the host knows how long they agree."""
    scheduler = Scheduler(FULL, WINDOW)
    hits = []
    for name in "abcde":
        hits.append(scheduler.serve(scheduler.request(name, 300, num_shared=170)))
        assert scheduler.manager.reset_prefix_cache()
    # The first request shows nothing, and the second one stores the window at 160 tokens.
    assert hits == [0, 0, 160, 160, 160]


def test_the_boundary_of_a_shared_prefix_is_only_raised() -> None:
    scheduler = Scheduler(FULL, WINDOW)
    scheduler.serve(scheduler.request("a", 300, num_shared=170))
    assert scheduler.manager.reset_prefix_cache()
    request = scheduler.request("b", 300, num_shared=170)
    request.shared_prefix_boundary = 240  # vLLM's own, of what it has on the device
    assert scheduler.half.lookup(request, 0) == 0
    assert request.shared_prefix_boundary == 240
    again = scheduler.request("a2", 304)
    assert scheduler.half.lookup(again, 0) == 0
    assert again.shared_prefix_boundary == 160
    whole = scheduler.request("c", 160)
    assert scheduler.half.lookup(whole, 0) == 0
    assert whole.shared_prefix_boundary == 144, "one token is left to compute"


def test_a_request_keeps_its_hit_when_the_requests_before_it_end() -> None:
    """While they ran, vLLM refused it for want of blocks."""
    scheduler = Scheduler(FULL)
    scheduler.store_request()
    before = scheduler.request("b", 900, cache_salt="b")
    scheduler.admit(before)
    before.status = RequestStatus.RUNNING
    refused = scheduler.request("c", 100)
    assert scheduler.half.lookup(refused, 0) == 96
    scheduler.step(before)
    scheduler.finish(before)
    assert scheduler.admit(refused) == 96


def test_a_request_that_is_refused_though_none_runs_gives_up_its_hit() -> None:
    """vLLM then reserves the blocks for loads that were taken back, and only loads respect that.

    Another connector may ask for time, also for longer. vLLM counts no hit as long as it does.
    """
    scheduler = Scheduler(FULL, num_host_blocks=6)
    scheduler.store_request()
    refused = scheduler.request("b", 100)
    for _ in range(3):
        assert scheduler.half.lookup(refused, 0) == 96
        scheduler.now += MAX_REFUSED_S
    refused.prefill_stats.set(100, 0, 96)
    assert scheduler.half.lookup(refused, 0) == 96
    scheduler.now += MAX_REFUSED_S
    assert scheduler.half.lookup(refused, 0) == 0


def test_a_preempted_request_that_is_refused_though_none_runs_gives_up_its_hit() -> None:
    """vLLM does not count its hit again."""
    scheduler = Scheduler(FULL, num_host_blocks=6)
    scheduler.store_request()
    refused = scheduler.request("b", 100)
    refused.num_preemptions = 1
    assert scheduler.half.lookup(refused, 0) == 96
    scheduler.now += MAX_REFUSED_S
    assert scheduler.half.lookup(refused, 0) == 0
    assert can_store(scheduler), "it holds nothing on the host any more"


def test_a_request_that_vllm_lets_compute_its_hit_holds_nothing_on_the_host() -> None:
    """Another connector offered as much, and vLLM took that."""
    scheduler = Scheduler(FULL, num_host_blocks=6)
    scheduler.store_request()
    request = scheduler.request("b", 100)
    assert scheduler.half.lookup(request, 0) == 96
    assert scheduler.manager.allocate_slots(request, 100)
    scheduler.half.allocated(request, scheduler.manager.get_blocks("b"), 0)
    assert can_store(scheduler)


def can_store(scheduler: Scheduler) -> bool:
    """Whether a host of 6 blocks has room for those of a new request."""
    other = scheduler.request("z", 100, num_shared=0)
    scheduler.admit(other)
    scheduler.step(other)
    scheduler.step()
    return [len(store.block_ids) for store in scheduler.jobs.stores] == [6]


def test_a_request_keeps_its_hit_while_stores_hold_the_blocks() -> None:
    """vLLM refuses the request until they are free, however long that takes."""
    scheduler = Scheduler(FULL)
    scheduler.store_request()
    before = scheduler.request("b", 900, num_shared=0)
    store = scheduler.begin_store(before)
    refused = scheduler.request("c", 100)
    refused.prefill_stats.set(100, 0, 96)
    for _ in range(3):
        assert scheduler.half.lookup(refused, 0) == 96
        scheduler.now += MAX_REFUSED_S
    scheduler.step(released=[store.job_id])
    assert scheduler.half.lookup(refused, 0) == 96
    scheduler.now += MAX_REFUSED_S
    assert scheduler.half.lookup(refused, 0) == 0


def test_a_hit_of_partial_blocks_is_not_extended() -> None:
    scheduler = Scheduler(FULL)
    scheduler.store_request()
    assert scheduler.half.lookup(scheduler.request("b", 100), 8) == 0
    blind = scheduler.request("c", 100)
    blind.skip_reading_prefix_cache = True
    assert scheduler.half.lookup(blind, 0) == 0


def test_every_block_of_a_store_is_held() -> None:
    """If the host has lost a chain, the whole chain is stored again, not only its new blocks."""
    scheduler = Scheduler(FULL)
    request = scheduler.request("a", 113)
    scheduler.admit(request)
    scheduler.half.build(Step({"a": 96}))
    request.num_computed_tokens = 96
    scheduler.half.processed(KVConnectorOutput())
    scheduler.step(reports=[])
    (first,) = scheduler.jobs.stores
    scheduler.step(reports=[(first.job_id, 0, True)])
    assert scheduler.half.offload is not None
    scheduler.half.offload.reset()
    scheduler.step(request)
    scheduler.step()
    (again,) = scheduler.jobs.stores
    blocks = scheduler.manager.block_pool.blocks
    assert [blocks[block_id].ref_cnt for block_id in again.block_ids] == [2] * 7


def test_a_preempted_request_starts_over() -> None:
    scheduler = Scheduler(FULL)
    request = scheduler.request("a", 100)
    scheduler.admit(request)
    scheduler.step(request)
    scheduler.manager.free(request)
    request.num_computed_tokens = 0
    scheduler.jobs = scheduler.half.build(Step(preempted_req_ids={"a"}))
    (store,) = scheduler.jobs.stores
    assert not scheduler.half.requests.tracked["a"].is_admitted
    assert not scheduler.half.requests.due
    scheduler.step(reports=[(store.job_id, 0, True)])
    scheduler.manager.reset_prefix_cache()
    assert scheduler.admit(request) == 96
    # vLLM preempted the request before it admitted it in this step: that is an older preemption.
    scheduler.half.build(Step(preempted_req_ids={"a"}))
    assert scheduler.half.requests.tracked["a"].is_loading


@pytest.mark.parametrize("stores_sessions", [True, False], ids=["", "not stored"])
@pytest.mark.parametrize("is_processed", [True, False], ids=["processed", "under way"])
@pytest.mark.parametrize("specs", [(FULL,), (FULL, WINDOW)], ids=["full", "hybrid"])
def test_only_blocks_that_no_step_writes_lose_their_keys(
    specs: tuple[KVCacheSpec, ...], *, is_processed: bool, stores_sessions: bool
) -> None:
    """vLLM preempts a session in the step that grants its second chunk.

    Its twin has blocks with the same keys, and vLLM keys few blocks of a window.
    """
    scheduler = Scheduler(*specs)
    scheduler.half.requests.stores_sessions = stores_sessions
    twin, request = scheduler.request("a", 200), scheduler.request("b", 200, resumable=True)
    scheduler.admit(twin)
    scheduler.step(twin)
    assert scheduler.half.lookup(request, 0) == 0
    assert scheduler.manager.allocate_slots(request, 64)
    scheduler.half.allocated(request, scheduler.manager.get_blocks("b"), 0)
    scheduler.half.build(Step({"b": 64}))
    request.num_computed_tokens = 64
    if is_processed:
        scheduler.half.processed(KVConnectorOutput())
    else:
        request.num_in_flight_tokens = 64
    assert scheduler.manager.allocate_slots(request, 136)
    tables = [list(table) for table in scheduler.manager.get_blocks("b").blocks]
    assert all(table[11].block_hash for table in tables)
    scheduler.manager.free(request)
    request.num_computed_tokens = request.num_in_flight_tokens = 0
    scheduler.half.build(Step(preempted_req_ids={"b"}))
    assert all(block.block_hash for block in tables[0][:4])
    assert not any(block.block_hash for table in tables for block in table[4:])


def test_blocks_held_only_by_a_transfer_count_as_pending_frees() -> None:
    scheduler = Scheduler(FULL)
    request = scheduler.request("a", 100)
    scheduler.admit(request)
    scheduler.step(request)
    assert not scheduler.half.holds_freed_blocks()
    scheduler.finish(request)
    assert scheduler.half.holds_freed_blocks()
    tier = scheduler.half.tier
    tier.turn_off()
    assert scheduler.half.holds_freed_blocks(), "its copy may still end"
    scheduler.now += tier.options.load_timeout_s
    assert not scheduler.half.holds_freed_blocks(), "vLLM would wait for a copy that never ends"


def test_a_request_that_never_ran_leaves_nothing() -> None:
    scheduler = Scheduler(FULL)
    scheduler.store_request()
    request = scheduler.request("b", 100)
    assert scheduler.half.lookup(request, 0) == 96
    scheduler.half.finished(request)
    offload = scheduler.half.offload
    assert offload is not None
    offload.check()
    assert not scheduler.half.requests.tracked


def test_jobs_are_pickled_as_plain_arrays() -> None:
    """vLLM pickles them in every step for each worker process."""
    scheduler = Scheduler(FULL)
    request = scheduler.request("a", 100)
    scheduler.admit(request)
    scheduler.step(request)
    jobs = scheduler.half.build(Step())
    again = pickle.loads(pickle.dumps(jobs))
    assert again.stores[0].block_ids.tolist() == jobs.stores[0].block_ids.tolist()
    assert SimpleNamespace(**vars(again)).loads == []


def test_a_new_chunk_of_a_preempted_session_is_not_loaded() -> None:
    """After a load vLLM takes the session for preempted, and its worker lacks the chunk."""
    scheduler = Scheduler(FULL)
    scheduler.store_request("a")
    session = scheduler.request("b", 100, resumable=True)
    session.num_preemptions = 1
    assert session.status == RequestStatus.WAITING
    assert scheduler.half.lookup(session, 0) == 0
    session.status = RequestStatus.PREEMPTED  # in the middle of a chunk
    assert scheduler.half.lookup(session, 0) == 96


def test_a_preempted_session_loads_nothing_if_its_hashes_cannot_be_trusted() -> None:
    scheduler = Scheduler(FULL)
    scheduler.half.requests.stores_sessions = False
    scheduler.store_request("a")
    session = scheduler.request("b", 100, resumable=True)
    assert scheduler.admit(session) == 0
    scheduler.step(session)
    scheduler.manager.free(session)
    session.num_computed_tokens = 0
    session.status = RequestStatus.PREEMPTED
    scheduler.half.build(Step(preempted_req_ids={"b"}))
    assert scheduler.half.lookup(session, 0) == 0


class _CountedSet(set[str]):
    """Counts the sets that are built from it by `|`."""

    num_unions = 0

    def __or__(self, other: Set[Any]) -> _CountedSet:  # type: ignore[override]
        type(self).num_unions += 1
        return _CountedSet(set(self) | set(other))


def test_loads_that_land_in_one_step_do_not_copy_what_landed_before_each() -> None:
    """Thousands may: a copy for each of 4,000 would hold up vLLM's scheduler for 0.8 s."""
    scheduler = Scheduler(FULL)
    for name in "abc":
        scheduler.store_request(name, num_shared=0)
    requests = [scheduler.request(f"again-{name}", 100, num_shared=0) for name in "abc"]
    assert [scheduler.admit(request) for request in requests] == [96] * 3
    scheduler.step()
    reports = [(job.job_id, 0, True) for job in scheduler.jobs.loads]
    landed = _CountedSet({"of another connector"})
    output = KVConnectorOutput(
        finished_recving=landed, kv_connector_worker_meta=StepReports(reports)
    )
    scheduler.half.processed(output)
    ours = {request.request_id for request in requests}
    assert output.finished_recving == {"of another connector", *ours}
    assert landed == {"of another connector"}, "it may be another connector's"
    assert _CountedSet.num_unions <= 1


class _CountedDict(dict[str, None]):
    """Counts its keys that are read one after the other."""

    num_read = 0

    def __iter__(self) -> Iterator[str]:
        for name in super().__iter__():
            self.num_read += 1
            yield name


def test_a_step_does_not_look_at_each_request_that_loads() -> None:
    """With 4,000 of them that took 0.1 ms a step."""
    scheduler = Scheduler(FULL)
    for name in "abc":
        scheduler.store_request(name, num_shared=0)
    for name in "abc":
        scheduler.admit(scheduler.request(f"again-{name}", 100, num_shared=0))
    request = scheduler.request("z", 100, num_shared=0)
    assert scheduler.admit(request) == 0
    requests = scheduler.half.requests
    fresh = requests.fresh = _CountedDict(requests.fresh)
    assert len(fresh) == 4
    scheduler.step(request)
    assert fresh.num_read <= 1
    assert list(fresh) == ["again-a", "again-b", "again-c"]
