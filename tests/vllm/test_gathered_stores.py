"""The stores of several steps are planned together, and nothing is lost by it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.vllm.halves import BLOCK_SIZE, FULL, NUM_BLOCKS, WINDOW, Scheduler
from tests.vllm.simulated import Simulated, WrongKV, tokens
from tests.vllm.test_simulated import Life

from kvstow.vllm.steps import Steps

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own


def num_stored(scheduler: Scheduler) -> list[int]:
    """Return the blocks of each store that the next step begins."""
    scheduler.step()
    return [len(copies.block_ids) for copies in scheduler.jobs.stores]


def test_steps_are_stored_together_once_they_have_had_enough_tokens() -> None:
    scheduler = Scheduler(FULL, gathered_tokens=200)
    requests = [scheduler.request(name, 100, num_shared=0) for name in "abc"]
    for request in requests[:2]:
        scheduler.admit(request)
        assert num_stored(scheduler) == []
        scheduler.step(request)
    assert num_stored(scheduler) == [12]
    scheduler.admit(requests[2])
    scheduler.step(requests[2])
    assert num_stored(scheduler) == []


def test_a_request_that_is_not_computed_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstow.vllm.stores.MAX_REQUESTS", 1)
    scheduler = Scheduler(FULL, gathered_tokens=1)
    requests = [scheduler.request(name, 100, num_shared=0) for name in "abc"]
    for request in requests:
        scheduler.admit(request)
    requests[0].num_in_flight_tokens = 100
    scheduler.step(*requests)
    stored = [num_stored(scheduler) for _ in range(4)]
    assert sorted(stored) == [[], [], [6], [6]]
    requests[0].num_in_flight_tokens = 0
    assert num_stored(scheduler) + num_stored(scheduler) == [6]


@pytest.mark.parametrize("event", ["finished", "preempts", "rests", "full"])
def test_gathered_blocks_are_stored_before_vllm_may_take_them(event: str) -> None:
    scheduler = Scheduler(FULL, gathered_tokens=10_000)
    request = scheduler.request("a", 100)
    scheduler.admit(request)
    scheduler.step(request)
    if event == "finished":
        scheduler.half.finished(request)
    elif event == "preempts":
        assert not scheduler.half.holds_freed_blocks()
    elif event == "rests":
        assert not scheduler.half.may_rest()
    else:
        other = scheduler.request("b", (NUM_BLOCKS - 12) * BLOCK_SIZE, num_shared=0)
        scheduler.admit(other)
        scheduler.step(other)
        # The blocks of the step that left no room are not computed when it begins.
        assert [len(copies.block_ids) for copies in scheduler.jobs.stores] == [6]
        assert num_stored(scheduler) == [NUM_BLOCKS * 3 // 4 - 6]  # as many as stores may hold
        return
    assert num_stored(scheduler) == [6]


@pytest.mark.parametrize(("most_blocks", "expected"), [(None, 96), (16, 32), (1, 2)])
def test_no_more_waits_than_stores_may_hold(
    folder: Path, most_blocks: int | None, expected: int
) -> None:
    """Else blocks of a request that ends would be lost: the store holds only so many."""
    options = {"num_cpu_blocks": 400, "max_store_blocks_in_flight": most_blocks}
    options = {name: value for name, value in options.items() if value is not None}
    made = Simulated(folder, options, num_blocks=64)
    assert made.half.tier.gathered_tokens == expected
    made.close()


def test_models_with_windows_are_stored_in_each_step() -> None:
    scheduler = Scheduler(FULL, WINDOW, gathered_tokens=10_000)
    request = scheduler.request("a", 100)
    scheduler.admit(request)
    scheduler.step(request)
    assert num_stored(scheduler) != []


@pytest.mark.parametrize("reason", ["", "prompt only", "events"])
def test_a_load_is_not_taken_for_computed_tokens(reason: str) -> None:
    """A request is preempted while its blocks wait for a store, and then loads others.

    The load reports these blocks, unless there is a reason to report them with a store.
    """
    prompt_only = reason == "prompt only"
    scheduler = Scheduler(FULL, gathered_tokens=10_000, offload_prompt_only=prompt_only)
    scheduler.half.loads.sees_all_blocks = reason == "events"
    scheduler.store_request("b", 100)
    request = scheduler.request("a", 100)
    request.skip_reading_prefix_cache = True
    scheduler.admit(request)
    scheduler.step(request)
    scheduler.manager.free(request)
    scheduler.manager.reset_prefix_cache()
    request.num_computed_tokens = 0
    request.skip_reading_prefix_cache = False
    assert scheduler.admit(request) == 96
    half = scheduler.half
    half.stores.store_gathered()
    assert not half.requests.due
    assert half.transfers._stores == []
    # A load that reports its blocks knows that they are not due.
    tracked = half.requests.tracked["a"]
    assert (tracked.num_reported, tracked.due_tokens) == (([0], 16) if reason else ([6], 112))


def engine(folder: Path, gathered_tokens: int, **settings: object) -> Simulated:
    made = Simulated(folder, {"num_cpu_blocks": 400}, **settings)  # type: ignore[arg-type]
    made.half.tier.gathered_tokens = gathered_tokens
    return made


@pytest.mark.parametrize("num_in_flight", [1, 2], ids=["sync", "async"])
@pytest.mark.parametrize(("gathered_tokens", "lazy"), [(60, False), (60, True), (10_000, False)])
@pytest.mark.parametrize("drafts", [False, True], ids=["", "drafts"])
def test_requests_read_their_own_kv_from_gathered_stores(
    folder: Path, gathered_tokens: int, lazy: bool, num_in_flight: int, drafts: bool
) -> None:
    if drafts and (lazy or num_in_flight == 2):
        pytest.skip("one of each is enough")
    made = Simulated(
        folder,
        {"num_cpu_blocks": 400, "lazy_offload": lazy},
        num_blocks=60 if drafts else 40,
        num_in_flight=num_in_flight,
        drafts=drafts,
        seed=gathered_tokens,
        settings={} if lazy else {"scheduling_policy": "priority"},
    )
    made.half.tier.gathered_tokens = gathered_tokens
    life = Life(made, gathered_tokens)
    life.go(400, *(("session", "chunk") if drafts else ()))
    assert life.num_host_tokens > 300, "too few hits to prove anything"
    made.close()


@pytest.mark.parametrize("is_asked", [True, False], ids=["asked", "not asked"])
def test_a_preempted_request_loses_no_computed_block(folder: Path, is_asked: bool) -> None:
    """vLLM preempts the patient request, whose stores wait, for a more urgent one."""
    made = engine(
        folder,
        10_000,
        num_blocks=16,
        settings={"scheduling_policy": "priority", "long_prefill_token_threshold": 32},
    )
    made.half.tier._min_free_blocks = 0  # the tier does not see the shortage come
    if not is_asked:
        made.scheduler.connector._scheduler.holds_freed_blocks = lambda: False
    made.add("patient", tokens(200, 1), priority=1)
    num_computed = 0
    while made.requests["patient"].num_computed_tokens < 96:
        made.step()
    made.add("urgent", tokens(47, 2), max_tokens=6, priority=0)
    while not made.requests["patient"].num_preemptions:
        num_computed = made.requests["patient"].num_computed_tokens
        made.step()
    assert num_computed >= 96
    offload = made.half.offload
    assert offload is not None
    stored = offload.num_resident + offload.stats()["storing_blocks"]
    assert (stored >= num_computed // BLOCK_SIZE) is is_asked
    made.settle()
    assert made.answers["patient"] == made.right_answer(tokens(200, 1), 4, None)
    made.close()


@pytest.mark.parametrize("is_guarded", [True, False], ids=["guarded", "unguarded"])
def test_blocks_that_were_granted_and_not_written_lose_their_keys(
    folder: Path, is_guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request is preempted in the step that grants it blocks, while its stores wait."""
    if not is_guarded:
        monkeypatch.setattr(Steps, "evict_unwritten", lambda *_: None)
    made = engine(
        folder,
        10_000,
        num_blocks=16,
        settings={"scheduling_policy": "priority", "long_prefill_token_threshold": 32},
    )
    made.half.tier._min_free_blocks = 0
    made.add("patient", tokens(200, 1), priority=1)
    while made.requests["patient"].num_computed_tokens < 64:
        made.step()
    made.add("urgent", tokens(47, 2), max_tokens=6, priority=0)
    if is_guarded:
        made.settle()
        assert made.answers["patient"] == made.right_answer(tokens(200, 1), 4, None)
        made.check_at_rest()
        made.ask_for_all()
    else:
        with pytest.raises(WrongKV, match="patient"):
            made.settle()
    made.close()
