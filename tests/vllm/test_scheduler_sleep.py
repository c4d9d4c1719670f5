"""The scheduler half before vLLM sleeps, and when vLLM resets its caches."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.vllm.halves import BLOCK_SIZE, FULL, Scheduler, Step
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from kvstow import ConfigError
from kvstow.vllm.messages import Copies

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own


def test_without_the_option_a_reset_empties_the_tier(tmp_path: Path) -> None:
    for preserve, expected in ((False, 0), (True, 96)):
        scheduler = Scheduler(FULL, preserve_on_sleep=preserve)
        scheduler.store_one()
        scheduler.half.reset()
        assert scheduler.half.lookup(scheduler.request("b", 100), 0) == expected


def test_other_weights_empty_the_tier_at_the_next_reset(tmp_path: Path) -> None:
    version = tmp_path / "version"
    version.write_text("1")
    scheduler = Scheduler(FULL, preserve_on_sleep=True, weights_version_path=str(version))
    scheduler.store_one()
    for content, expected in (("1", 96), ("2", 0), ("2", 0), (None, 0)):
        version.unlink() if content is None else version.write_text(content)
        scheduler.half.reset()
        request = scheduler.request(f"b{content}{expected}", 100)
        assert scheduler.half.lookup(request, 0) == expected
        scheduler.half.finished(request)
    with pytest.raises(ConfigError, match=r"weights_version_path.*cannot be read"):
        Scheduler(FULL, preserve_on_sleep=True, weights_version_path=str(version))


def test_other_weights_count_until_the_device_is_reset_as_well(tmp_path: Path) -> None:
    version = tmp_path / "version"
    version.write_text("1")
    scheduler = Scheduler(FULL, preserve_on_sleep=True, weights_version_path=str(version))
    running = scheduler.request("a", 100)
    scheduler.admit(running)
    scheduler.step(running)
    version.write_text("2")
    assert not scheduler.manager.reset_prefix_cache(), "a request holds blocks"
    scheduler.half.reset()
    # It hits what the old weights have computed, on the device, and stores it.
    later = scheduler.request("b", 100)
    scheduler.admit(later)
    scheduler.step(later)
    scheduler.finish(later)
    scheduler.finish(running)
    for _ in range(2):
        scheduler.step(reports=[(copies.job_id, 0, True) for copies in scheduler.jobs.stores])
    assert scheduler.half.lookup(scheduler.request("c", 100), 0) == 96
    assert scheduler.manager.reset_prefix_cache()
    scheduler.half.reset()
    assert scheduler.half.lookup(scheduler.request("d", 100), 0) == 0
    scheduler.store_one("e")
    scheduler.half.reset()
    assert scheduler.half.lookup(scheduler.request("f", 100), 0) == 96, (
        "and from then on it is kept"
    )


def test_what_was_computed_before_a_reset_is_not_stored_after_it() -> None:
    scheduler = Scheduler(FULL)
    request = scheduler.request("a", 100)
    scheduler.admit(request)
    scheduler.half.build(Step({"a": 40}))
    request.num_computed_tokens = 40
    scheduler.half.reset()
    scheduler.half.processed(KVConnectorOutput())
    scheduler.step(request)
    scheduler.finish(request)
    scheduler.step()
    assert not scheduler.jobs.stores
    scheduler.store_one("b")
    assert scheduler.half.lookup(scheduler.request("c", 100), 0) == 96


def test_lazy_stores_what_paused_requests_hold_before_a_sleep() -> None:
    scheduler = Scheduler(FULL, lazy_offload=True, preserve_on_sleep=True)
    request = scheduler.request("a", 100)
    scheduler.admit(request)
    scheduler.step(request)
    assert scheduler.half.transfers.jobs.stores == []
    assert not scheduler.half.may_rest()
    scheduler.step()
    (store,) = scheduler.jobs.stores
    assert len(store.block_ids) == 100 // BLOCK_SIZE
    assert not scheduler.half.may_rest()
    scheduler.step(reports=[(store.job_id, 0, True)])
    assert scheduler.half.may_rest()
    assert scheduler.half.transfers.jobs.stores == [], "once"


def loading(name: str = "b") -> tuple[Scheduler, Request, Copies]:
    scheduler = Scheduler(FULL, preserve_on_sleep=True)
    scheduler.store_one()
    request = scheduler.request(name, 100)
    assert scheduler.admit(request) == 96
    request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
    scheduler.step()
    (load,) = scheduler.jobs.loads
    return scheduler, request, load


@pytest.mark.parametrize("status", ["WAITING_FOR_REMOTE_KVS", "WAITING", "PREEMPTED"])
def test_a_load_that_a_sleep_meets_is_given_up_and_made_anew(status: str) -> None:
    scheduler, request, load = loading()
    assert not scheduler.half.may_rest()
    scheduler.step()
    assert request.num_computed_tokens == 96, "its copy is under way"
    assert scheduler.step(reports=[(load.job_id, 0, True)]) == {"b"}
    # Or vLLM has let it in, and then there was no room for it.
    request.status = RequestStatus[status]
    assert scheduler.half.may_rest()
    assert request.num_computed_tokens == 0
    assert scheduler.manager.reset_prefix_cache()
    scheduler.half.reset()
    # Nothing was told to vLLM: the request may have been aborted, or go on, before it is told.
    scheduler.step()
    assert scheduler.jobs.failed_request_ids == []
    # Awake: vLLM caches what it has, nothing, and asks again.
    scheduler.manager.cache_blocks(request, request.num_computed_tokens)
    assert scheduler.admit(request) == 96


def test_before_a_sleep_vllm_is_told_of_a_load_that_failed() -> None:
    scheduler, request, load = loading()
    assert scheduler.step(reports=[(load.job_id, 0, False)]) == set()
    assert not scheduler.half.may_rest()
    scheduler.step()
    assert scheduler.jobs.failed_request_ids == ["b"]
    assert not scheduler.half.may_rest(), "it is on its way to vLLM"
    request.num_computed_tokens = 0
    scheduler.half.processed(KVConnectorOutput(failed_recving={"b"}, finished_recving={"b"}))
    assert scheduler.half.may_rest()
    assert scheduler.manager.reset_prefix_cache()


def test_steps_under_way_end_before_a_sleep() -> None:
    scheduler = Scheduler(FULL, preserve_on_sleep=True, lazy_offload=True)
    request = scheduler.request("a", 64)
    scheduler.admit(request)
    scheduler.step(request)
    request.status = RequestStatus.RUNNING
    request.num_in_flight_tokens = 32
    assert not scheduler.half.may_rest()
    assert scheduler.half.transfers.jobs.stores == []
    request.num_in_flight_tokens = 0
    assert not scheduler.half.may_rest()
    (store,) = scheduler.half.transfers.jobs.stores
    assert len(store.block_ids) == 4
