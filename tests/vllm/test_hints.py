"""Hints of requests: what they take away from stores and loads, and how wrong ones are refused."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tests.vllm.halves import BLOCK_SIZE, FULL, NUM_BLOCKS, WINDOW, Scheduler, Step
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvstow import ConfigError
from kvstow.vllm.hints import MAX_BODY_BYTES, MAX_WARNINGS, HintReader, Hints, RefuseWrongHints
from kvstow.vllm.messages import Copies, StepReports
from kvstow.vllm.stats import EXPORTED

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own


def hinted(scheduler: Scheduler, name: str, num_tokens: int, **hints: object) -> Request:
    request = scheduler.request(name, num_tokens)
    request.kv_transfer_params = {"kvstow": hints}
    return request


def run(scheduler: Scheduler, request: Request, num_generated: int = 0) -> list[Copies]:
    """Compute a request that hits nothing on the host, and return what was stored meanwhile."""
    assert scheduler.admit(request) == 0
    stores: list[Copies] = []
    for at in range(1 + num_generated):
        if at:
            scheduler.manager.allocate_slots(request, 1)
        scheduler.step(request)
        stores += scheduler.jobs.stores
        request.append_output_token_ids(7)
    scheduler.finish(request)
    for _ in range(3):  # a lazy store is planned once its blocks are free
        scheduler.step()
        stores += scheduler.jobs.stores
    scheduler.step(reports=[(copies.job_id, 0, True) for copies in stores])
    assert not scheduler.half.transfers.in_flight
    return stores


def keys(scheduler: Scheduler, block_ids: Sequence[int]) -> list[bytes]:
    return [scheduler.manager.block_pool.blocks[block_id].block_hash for block_id in block_ids]


def num_resident(scheduler: Scheduler) -> int:
    assert scheduler.half.offload is not None
    scheduler.half.offload.check()
    return scheduler.half.offload.num_resident


# -- store --------------------------------------------------------------------------------------


def test_a_request_with_store_false_is_not_stored() -> None:
    scheduler = Scheduler(FULL)
    run(scheduler, hinted(scheduler, "a", 100, store=False), num_generated=30)
    assert num_resident(scheduler) == 0
    assert scheduler.half.stats()["unwanted_blocks"] == (100 + 30) // BLOCK_SIZE
    assert scheduler.half.stats()["store_hints"] == 1


def test_a_request_with_store_false_still_loads() -> None:
    scheduler = Scheduler(FULL)
    scheduler.store_request("a", 100)
    assert scheduler.admit(hinted(scheduler, "b", 100, store=False)) == 96


def test_the_lookup_of_a_request_with_store_false_counts() -> None:
    scheduler = Scheduler(FULL)
    run(scheduler, hinted(scheduler, "a", 100, store=False))
    assert scheduler.half.stats()["query_tokens"] == 96


def test_blocks_that_others_share_are_stored_for_those() -> None:
    scheduler = Scheduler(FULL)
    run(scheduler, hinted(scheduler, "a", 100, store=False))
    second = scheduler.request("b", 100)  # hits the blocks on the device
    hit, num_local = scheduler.manager.get_computed_blocks(second)[:2]
    assert num_local == 96
    scheduler.half.lookup(second, num_local)
    scheduler.manager.allocate_slots(second, 4, num_local, hit)
    scheduler.half.allocated(second, scheduler.manager.get_blocks("b"), 0)
    second.num_computed_tokens = num_local
    scheduler.step(second)
    scheduler.step()
    (store,) = scheduler.jobs.stores
    assert len(store.block_ids) == 6


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
def test_lazy_mode_does_not_store_what_a_request_declines(lazy: bool) -> None:
    scheduler = Scheduler(FULL, lazy_offload=lazy)
    assert run(scheduler, hinted(scheduler, "a", 100, store=False)) == []
    assert run(scheduler, scheduler.request("b", 200)) != []
    # "b" hits the blocks of "a" on the device, and kvstow stores them for it.
    assert num_resident(scheduler) == 12


def test_a_preempted_request_with_store_false_keeps_the_keys_of_written_blocks() -> None:
    """Only blocks that the step granted and did not compute lose their keys."""
    scheduler = Scheduler(FULL)
    request = hinted(scheduler, "a", 64, store=False)
    scheduler.admit(request)
    scheduler.step(request)
    for _ in range(33):
        request.append_output_token_ids(7)
    scheduler.manager.allocate_slots(request, 33)
    written = scheduler.manager.get_blocks("a").blocks[0][: 64 // BLOCK_SIZE]
    scheduler.half.build(Step(preempted_req_ids={"a"}))
    assert all(block.block_hash is not None for block in written)
    assert scheduler.manager.block_pool.get_cached_block(request.block_hashes[4], [0]) is None


# -- offload_prompt_only ------------------------------------------------------------------------


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
def test_only_blocks_of_the_prompt_are_stored(lazy: bool) -> None:
    scheduler = Scheduler(FULL, offload_prompt_only=True, lazy_offload=lazy)
    request = scheduler.request("a", 40)
    run(scheduler, request, num_generated=60)
    assert num_resident(scheduler) == 40 // BLOCK_SIZE
    assert scheduler.half.stats()["generated_blocks"] == 100 // BLOCK_SIZE - 40 // BLOCK_SIZE
    again = scheduler.request("b", request.num_tokens)
    again.block_hashes[:] = request.block_hashes
    assert scheduler.half.lookup(again, 0) == 32


def test_each_group_stores_only_blocks_of_the_prompt() -> None:
    scheduler = Scheduler(FULL, WINDOW, offload_prompt_only=True, retention=None)
    request = scheduler.request("a", 40)
    (store,) = run(scheduler, request, num_generated=60)
    assert store.offsets.tolist() == [0, 2, 4]
    hashes = request.block_hashes[:2]
    full, window = ([bytes(key) + bytes([0, 0, 0, g]) for key in hashes] for g in (0, 1))
    assert keys(scheduler, store.block_ids.tolist()) == full + window


def test_a_prompt_that_grows_leaves_no_gap_in_what_is_stored() -> None:
    """A streaming session makes generated tokens a part of its next prompt.

    If the limit grew with the prompt, the tier would take a later block for one that was left out.
    """
    scheduler = Scheduler(FULL, offload_prompt_only=True)
    request = scheduler.request("a", 40)
    assert scheduler.admit(request) == 0
    stored: dict[int, bytes] = {}
    for at in range(100):
        if at:
            request.append_output_token_ids(7)
            scheduler.manager.allocate_slots(request, 1)
        if at == 70:
            request.num_prompt_tokens = request.num_tokens + 30
        scheduler.step(request)
        for copies in scheduler.jobs.stores:
            found = keys(scheduler, copies.block_ids.tolist())
            stored |= dict(zip(copies.host_slots.tolist(), found, strict=True))
            scheduler.step(reports=[(copies.job_id, 0, True)])
    scheduler.finish(request)
    scheduler.step()
    assert scheduler.manager.reset_prefix_cache()
    again = scheduler.request("b", request.num_tokens)
    again.block_hashes[:] = request.block_hashes
    num_tokens = scheduler.admit(again)
    scheduler.step()
    (load,) = scheduler.jobs.loads
    block_key = scheduler.half.tier.model.block_key
    expected = [block_key(again, at, 0) for at in range(num_tokens // BLOCK_SIZE)]
    assert num_tokens == 32
    assert [stored[slot] for slot in load.host_slots.tolist()] == expected


# -- max_load_tokens ----------------------------------------------------------------------------


@pytest.mark.parametrize("most", [0, 1, 15, 16, 40, 96, 97, 2**70])
def test_no_more_than_max_load_tokens_are_loaded(most: int) -> None:
    scheduler = Scheduler(FULL)
    scheduler.store_request("a", 100)
    request = hinted(scheduler, "b", 100, max_load_tokens=most)
    found = scheduler.half.lookup(request, 0)
    assert found == min(most // BLOCK_SIZE * BLOCK_SIZE, 96)
    assert scheduler.half.stats()["max_load_tokens_hints"] == 1


def test_max_load_tokens_does_not_count_the_local_hit() -> None:
    scheduler = Scheduler(FULL)
    scheduler.store_request("a", 100)
    assert scheduler.half.lookup(hinted(scheduler, "b", 100, max_load_tokens=20), 32) == 16


# -- priority -----------------------------------------------------------------------------------


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
@pytest.mark.parametrize(("priority", "left"), [("low", (96, 48)), ("normal", (48, 96))])
def test_blocks_of_low_priority_leave_first(
    priority: str, left: tuple[int, int], lazy: bool
) -> None:
    scheduler = Scheduler(FULL, num_host_blocks=12, lazy_offload=lazy)
    first, second, third = (
        scheduler.request(name, num_tokens, cache_salt=name)
        for name, num_tokens in (("a", 100), ("b", 100), ("c", 50))
    )
    second.kv_transfer_params = {"kvstow": {"priority": priority}}
    for request in (first, second, third):
        run(scheduler, request)
    assert num_resident(scheduler) == 12
    for name, num_tokens in zip("ab", left, strict=True):
        again = scheduler.request(name, 100, cache_salt=name)
        assert scheduler.half.lookup(again, 0) == num_tokens
    assert scheduler.half.stats().get("priority_hints", 0) == (priority == "low")


def test_a_request_that_comes_before_the_tier_keeps_its_low_priority() -> None:
    """The first requests wait until every rank has reported its host memory."""
    scheduler = Scheduler(FULL, num_host_blocks=None)
    request = hinted(scheduler, "a", 100, priority="low")
    assert scheduler.half.lookup(request, 0) is None
    meta = StepReports(capacities={0: 12})
    scheduler.half.processed(KVConnectorOutput(kv_connector_worker_meta=meta))
    run(scheduler, scheduler.request("b", 100, cache_salt="b"))
    run(scheduler, request)
    run(scheduler, scheduler.request("c", 50, cache_salt="c"))
    for salt, num_tokens in ((None, 48), ("b", 96)):
        again = scheduler.request(f"again {salt}", 100, cache_salt=salt)
        assert scheduler.half.lookup(again, 0) == num_tokens


# -- store_threshold ----------------------------------------------------------------------------


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
@pytest.mark.parametrize("threshold", [1, 2, 3])
def test_a_block_is_stored_once_enough_requests_have_seen_it(threshold: int, lazy: bool) -> None:
    scheduler = Scheduler(FULL, store_threshold=threshold, lazy_offload=lazy)
    for at in range(1, threshold + 1):
        run(scheduler, scheduler.request(f"a{at}", 100))
        assert num_resident(scheduler) == (6 if at == threshold else 0)
    assert scheduler.half.stats()["rare_blocks"] == 6 * (threshold - 1)


def test_only_the_prefix_that_requests_share_reaches_the_threshold() -> None:
    scheduler = Scheduler(FULL, store_threshold=2)
    run(scheduler, scheduler.request("a", 50))
    run(scheduler, scheduler.request("b", 100))
    assert num_resident(scheduler) == 50 // BLOCK_SIZE
    assert scheduler.half.lookup(scheduler.request("c", 100), 0) == 48


def test_lookups_of_a_request_that_waits_count_once() -> None:
    scheduler = Scheduler(FULL, store_threshold=2)
    request = scheduler.request("a", 100)
    for _ in range(5):
        assert scheduler.half.lookup(request, 0) == 0
    assert run(scheduler, request) == []


def test_a_request_that_starts_over_counts_once() -> None:
    scheduler = Scheduler(FULL, store_threshold=2)
    request = scheduler.request("a", 100)
    for _ in range(3):
        assert scheduler.admit(request) == 0
        scheduler.step(request)
        assert not scheduler.half.transfers.in_flight
        scheduler.manager.free(request)
        assert scheduler.manager.reset_prefix_cache()
        request.num_computed_tokens = 0
        scheduler.half.build(Step(preempted_req_ids={"a"}))
    scheduler.half.finished(request)
    run(scheduler, scheduler.request("b", 100))
    assert num_resident(scheduler) == 6


# -- back-pressure ------------------------------------------------------------------------------


def late(scheduler: Scheduler, *requests: Request) -> list[Copies]:
    """Compute these requests in one step, without an end of their stores; return these."""
    for request in requests:
        assert scheduler.admit(request) == 0
    scheduler.step(*requests)
    scheduler.step()
    return list(scheduler.jobs.stores)


def test_stores_hold_no_more_blocks_than_they_may() -> None:
    """The step goes on, and the rest of a running request is stored when it is next due."""
    scheduler = Scheduler(FULL, max_store_blocks_in_flight=4)
    request = scheduler.request("a", 100)
    (store,) = late(scheduler, request)
    assert len(store.block_ids) == 4
    for _ in range(20):  # fills a block while the link lags
        request.append_output_token_ids(7)
        scheduler.manager.allocate_slots(request, 1)
        scheduler.step(request)
        assert not scheduler.jobs.stores
    scheduler.step(reports=[(store.job_id, 0, True)])
    for _ in range(16):
        request.append_output_token_ids(7)
        scheduler.manager.allocate_slots(request, 1)
        scheduler.step(request)
    scheduler.step()
    assert num_resident(scheduler) == 4
    (second,) = scheduler.half.transfers.in_flight.values()
    table = scheduler.manager.get_blocks("a").blocks[0]
    assert second.blocks == table[4:8]
    assert scheduler.half.stats()["throttled_blocks"] == 0
    scheduler.finish(request)
    assert scheduler.half.stats()["throttled_blocks"] == 136 // BLOCK_SIZE - 8


def test_a_block_that_was_left_out_is_stored_at_its_next_hit() -> None:
    scheduler = Scheduler(FULL, max_store_blocks_in_flight=4)
    request = scheduler.request("a", 100)
    (store,) = late(scheduler, request)
    scheduler.finish(request)
    assert scheduler.half.stats()["throttled_blocks"] == 2
    scheduler.step(reports=[(store.job_id, 0, True)])
    again = scheduler.request("b", 120)
    hit, num_local = scheduler.manager.get_computed_blocks(again)[:2]
    assert num_local == 96 and scheduler.half.lookup(again, num_local) == 0
    scheduler.manager.allocate_slots(again, 24, num_local, hit)
    scheduler.half.allocated(again, scheduler.manager.get_blocks("b"), 0)
    again.num_computed_tokens = num_local
    scheduler.step(again)
    scheduler.step()
    (store,) = scheduler.jobs.stores
    assert len(store.block_ids) == 3


def test_blocks_that_every_rank_has_read_make_room_before_the_copy_ends() -> None:
    scheduler = Scheduler(FULL, max_store_blocks_in_flight=4)
    (store,) = late(scheduler, scheduler.request("a", 64))
    assert len(store.block_ids) == 4 and scheduler.half.transfers.num_storable() == 0
    scheduler.step(released=[store.job_id])
    assert scheduler.half.transfers.num_storable() == 4


def test_stores_leave_a_quarter_of_the_device_to_vllm_by_default() -> None:
    scheduler = Scheduler(FULL, num_host_blocks=1000)
    other = scheduler.request("b", 700, cache_salt="b")
    stores = late(scheduler, scheduler.request("a", 200), other)
    held = [len(copies.block_ids) for copies in stores]
    assert sum(held) == NUM_BLOCKS * 3 // 4


def test_lazy_mode_puts_off_what_stores_may_not_hold() -> None:
    scheduler = Scheduler(FULL, lazy_offload=True, max_store_blocks_in_flight=4)
    request = scheduler.request("a", 100)
    scheduler.admit(request)
    scheduler.step(request)
    scheduler.finish(request)
    scheduler.step()
    scheduler.step()
    (store,) = scheduler.jobs.stores
    assert len(store.block_ids) == 4
    assert scheduler.half.stats()["postponed_blocks"] >= 2
    scheduler.step(reports=[(store.job_id, 0, True)])
    scheduler.step()
    (store,) = scheduler.jobs.stores
    assert len(store.block_ids) == 2
    scheduler.step(reports=[(store.job_id, 0, True)])
    assert num_resident(scheduler) == 6


# -- wrong hints --------------------------------------------------------------------------------

WRONG: list[tuple[object, str]] = [
    ({"stroe": False}, "has no option 'stroe': did you mean 'store'?"),
    ({"x": 1}, "has no option 'x': use one of store, max_load_tokens, priority"),
    ({"store": 0}, "kv_transfer_params.kvstow.store is 0, and it must be true or false"),
    ({"store": "no"}, "store is 'no'"),
    ({"max_load_tokens": -1}, "max_load_tokens is -1, and it must be a whole number of at least 0"),
    ({"max_load_tokens": True}, "max_load_tokens is True"),
    ({"max_load_tokens": 1.5}, "max_load_tokens is 1.5"),
    ({"max_load_tokens": [1]}, "max_load_tokens is [1]"),
    ({"priority": "high"}, "priority is 'high', and it must be one of normal, low"),
    ({"priority": 1}, "priority is 1"),
    (False, "kv_transfer_params.kvstow is a bool, and it must be an object with store"),
    ([], "kv_transfer_params.kvstow is a list"),
]


@pytest.mark.parametrize(("given", "message"), WRONG)
def test_a_wrong_hint_is_ignored_with_one_warning(given: Any, message: str, log: list[str]) -> None:
    reader = HintReader()
    for _ in range(3):
        assert reader.read({"kvstow": given}) == Hints()
    (warning,) = [line for line in log if "hint" in line]
    assert message in warning
    assert reader.num_given["wrong_hints"] == 3


def test_a_wrong_hint_leaves_the_other_hints_of_its_request() -> None:
    reader = HintReader()
    given = {"kvstow": {"max_load_tokens": "5", "store": False, "foo": 1}, "do_remote_decode": 1}
    assert reader.read(given) == Hints(store=False)
    assert reader.num_given["wrong_hints"] == 2


def test_clients_cannot_flood_the_log(log: list[str]) -> None:
    reader = HintReader()
    for at in range(3 * MAX_WARNINGS):
        reader.read({"kvstow": {f"{at}" + "x" * 10_000: "y" * 10_000, "store": "z" * 10_000}})
    assert len(log) == MAX_WARNINGS
    assert max(map(len, log)) < 300


def test_clients_cannot_hold_up_the_scheduler_with_many_or_long_names(log: list[str]) -> None:
    """Each of these took seconds, in which vLLM's scheduler did nothing else."""
    reader, began_s = HintReader(), time.process_time()
    many = {f"storf{at}": 1 for at in range(100_000)}
    assert reader.read({"kvstow": {"store": False, **many}}) == Hints()
    long = {"storelowprt" * 1_000_000: 1, "store": False}
    assert reader.read({"kvstow": long}) == Hints(store=False)
    assert time.process_time() - began_s < 1
    assert reader.num_given["wrong_hints"] == len(log) == 2
    assert sum(map(len, reader._warned)) < 100


@pytest.mark.parametrize("given", [{1: True}, {("a", 2): 3}, {"priority": np.array([1, 2])}])
def test_a_hint_that_only_python_can_give_is_ignored(given: Any) -> None:
    """An error would turn the tier off."""
    reader = HintReader()
    assert reader.read({"kvstow": {**given, "store": False}}) == Hints(store=False)
    assert reader.num_given["wrong_hints"] == 1


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": True}, [], "x", {"kvstow": {}}])
def test_a_request_without_hints_has_the_defaults(params: object) -> None:
    reader = HintReader()
    assert reader.read(params) == Hints()
    assert not +reader.num_given


def test_vllm_exports_every_count_of_hints() -> None:
    scheduler = Scheduler(FULL, offload_prompt_only=True)
    scheduler.half.lookup(
        hinted(scheduler, "a", 10, store=False, max_load_tokens=1, priority="low", x=2), 0
    )
    counted = scheduler.half.tier.counts
    assert (
        dict.fromkeys(("store_hints", "max_load_tokens_hints", "priority_hints", "wrong_hints"), 1)
        == counted
    )
    assert counted.keys() <= EXPORTED.keys()


# -- the server ---------------------------------------------------------------------------------


def served(
    *parts: bytes, content_types: Sequence[bytes] = (b"application/json",)
) -> tuple[list[dict[str, Any]], bytes]:
    """Return what the client gets, and the body that vLLM reads; its answer has status 200."""
    to_come = [
        {"type": "http.request", "body": part, "more_body": at < len(parts)}
        for at, part in enumerate(parts, 1)
    ]
    sent: list[dict[str, Any]] = []
    read = b""

    async def receive() -> dict[str, Any]:
        return to_come.pop(0) if to_come else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    async def vllm(scope: Any, receive: Any, send: Any) -> None:
        nonlocal read
        while (message := await receive())["type"] == "http.request":
            read += message["body"]
        await send({"type": "http.response.start", "status": 200})

    headers = [(b"content-type", content_type) for content_type in content_types]
    scope = {"type": "http", "method": "POST", "headers": headers}
    asyncio.run(RefuseWrongHints(vllm)(scope, receive, send))
    return sent, read


@pytest.mark.parametrize(("given", "message"), WRONG)
def test_the_middleware_refuses_a_wrong_hint(given: Any, message: str) -> None:
    body = json.dumps({"prompt": [1], "kv_transfer_params": {"kvstow": given}}).encode()
    sent, read = served(body[:20], body[20:])
    assert sent[0]["status"] == 400 and read == b""
    error = json.loads(sent[1]["body"])["error"]
    assert error["code"] == 400 and message in error["message"]


@pytest.mark.parametrize("key", ["kvstow", r"kvst\u006fw", r"\u006B\u0076stow"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-32-le"])
def test_the_middleware_reads_hints_in_each_form_of_json(key: str, encoding: str) -> None:
    """vLLM reads the same forms."""
    body = f'{{"kv_transfer_params": {{"{key}": {{"store": 1}}}}}}'.encode(encoding)
    assert served(body)[0][0]["status"] == 400


@pytest.mark.parametrize(
    "content_types",
    [
        [b"Application/JSON"],
        [b"application/json; charset=utf-8"],
        [b"application/vnd.api+json"],
        [b"application/json", b"text/plain"],  # vLLM takes the first
    ],
)
def test_the_middleware_knows_each_name_of_json(content_types: list[bytes]) -> None:
    wrong = b'{"kv_transfer_params": {"kvstow": 1}}'
    assert served(wrong, content_types=content_types)[0][0]["status"] == 400


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b'{"prompt": "kvstow"}',
        b'{"prompt": "kvst\\u006fw"}',
        b'{"kv_transfer_params": {"kvstow": {"store": false}}}',
        b'{"kv_transfer_params": {"kvstow": ',
        b'{"kvstow": ' + b"[" * 200_000,
        b'["kvstow"]',
        b'{"kv_transfer_params": ["kvstow"]}',
        b'"kvstow"' + b" " * (MAX_BODY_BYTES + 1),
    ],
    ids=range(9),
)
def test_the_middleware_passes_other_requests_on(body: bytes) -> None:
    sent, read = served(body[:9], body[9:-9], body[-9:] if len(body) > 9 else b"")
    assert sent[0]["status"] == 200 and read == (body if len(body) > 18 else read)
    assert len(read) >= len(body) - 9


def test_the_middleware_reads_json_only() -> None:
    wrong = b'{"kv_transfer_params": {"kvstow": 1}}'
    assert served(wrong, content_types=[b"multipart/form-data"])[0][0]["status"] == 200
    with pytest.raises(ConfigError):
        Hints.read({"kvstow": 1}, _raise)


def _raise(name: str, error: ConfigError) -> None:
    raise error
