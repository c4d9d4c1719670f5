"""The scheduler half before vLLM sleeps, and when vLLM resets its caches."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.halves import BLOCK_SIZE, FULL, WINDOW, Scheduler, Step
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from kvstow import ConfigError
from kvstow.vllm import identity
from kvstow.vllm.messages import Copies

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own


def with_a_request_stored(version: Path) -> Scheduler:
    """Return a scheduler whose tier has a request of weights 1, which the file names."""
    version.write_text("1")
    scheduler = Scheduler(FULL, preserve_on_sleep=True, weights_version_path=str(version))
    scheduler.store_request()
    return scheduler


def test_a_reset_empties_the_tier_unless_it_is_preserved(tmp_path: Path) -> None:
    for preserve, expected in ((False, 0), (True, 96)):
        scheduler = Scheduler(FULL, preserve_on_sleep=preserve)
        scheduler.store_request()
        scheduler.half.reset()
        assert scheduler.half.lookup(scheduler.request("b", 100), 0) == expected


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({}, "this reset empties the host tier"),
        ({"preserve_on_sleep": True}, "this reset keeps the host tier"),
        (
            {"disk_path": "/a", "disk_bytes_to_use": 1 << 30},
            "this reset empties the host tier and the disk tier",
        ),
    ],
)
def test_the_log_says_what_a_reset_leaves(
    log: list[str], options: dict[str, Any], line: str
) -> None:
    scheduler = Scheduler(FULL, **options)
    scheduler.half.reset()
    assert log == [f"kvstow: {line}"]
    scheduler.half.lookup(scheduler.request("b", 100), 0)
    assert len(log) == 1, "a lookup after it resets nothing"


def test_other_weights_empty_the_tier_at_the_next_reset(tmp_path: Path) -> None:
    version = tmp_path / "version"
    scheduler = with_a_request_stored(version)
    for content, expected in (("1", 96), ("2", 0), ("2", 0), (None, 0)):
        version.unlink() if content is None else version.write_text(content)
        scheduler.half.reset()
        request = scheduler.request(f"b{content}{expected}", 100)
        assert scheduler.half.lookup(request, 0) == expected
        scheduler.half.finished(request)
    with pytest.raises(ConfigError, match=r"weights_version_path.*cannot be read"):
        Scheduler(FULL, preserve_on_sleep=True, weights_version_path=str(version))


@pytest.mark.parametrize(("content", "expected"), [("1", 96), ("2", 0), (None, 0)])
def test_weights_that_change_during_sleep_empty_the_tier(
    tmp_path: Path, content: str | None, expected: int
) -> None:
    version = tmp_path / "version"
    scheduler = with_a_request_stored(version)
    scheduler.half.reset()  # vLLM's last call before it sleeps; there is none when it wakes
    version.unlink() if content is None else version.write_text(content)
    assert scheduler.half.lookup(scheduler.request("b", 100), 0) == expected
    if expected == 0:
        scheduler.store_request("c")  # and resets vLLM's pool
    is_used_again = scheduler.half.lookup(scheduler.request("d", 100), 0) == 96
    assert is_used_again == (content is not None), "without the file, each reset empties the tier"


def test_weights_that_change_after_a_reset_empty_the_tier_though_requests_held_blocks(
    tmp_path: Path,
) -> None:
    """Then vLLM does not reset its pool, which would show as well that weights may change."""
    version = tmp_path / "version"
    scheduler = with_a_request_stored(version)
    running = scheduler.request("b", 100, num_shared=0)
    scheduler.admit(running)
    assert not scheduler.manager.reset_prefix_cache()
    scheduler.half.reset()
    version.write_text("2")
    assert scheduler.half.lookup(scheduler.request("c", 100), 0) == 0


@pytest.mark.parametrize(("content", "expected"), [("1", 96), ("2", 0), (None, 0)])
def test_other_weights_empty_the_tier_when_vllm_resets_its_pool_alone(
    tmp_path: Path, content: str | None, expected: int
) -> None:
    """vLLM's `/reset_prefix_cache` reports itself to no connector without `reset_external`."""
    version = tmp_path / "version"
    scheduler = with_a_request_stored(version)
    assert scheduler.half.lookup(scheduler.request("b", 100), 0) == 96
    version.unlink() if content is None else version.write_text(content)
    assert scheduler.half.lookup(scheduler.request("c", 100), 0) == 96, "nothing was reset"
    assert scheduler.manager.reset_prefix_cache()
    assert scheduler.half.lookup(scheduler.request("d", 100), 0) == expected
    if expected == 0:
        scheduler.store_request("e")
    is_used_again = scheduler.half.lookup(scheduler.request("f", 100), 0) == 96
    assert is_used_again == (content is not None), "without the file, each reset empties the tier"


def test_a_reset_of_vllms_pool_alone_keeps_a_tier_without_a_version_of_the_weights() -> None:
    for preserve in (False, True):
        scheduler = Scheduler(FULL, preserve_on_sleep=preserve)
        scheduler.store_request()
        assert scheduler.half.lookup(scheduler.request("b", 100), 0) == 96
        assert scheduler.manager.reset_prefix_cache()
        assert scheduler.half.lookup(scheduler.request("c", 100), 0) == 96


def test_vllms_map_of_the_device_is_freed_when_vllm_resets_its_pool() -> None:
    scheduler = Scheduler(FULL)
    scheduler.half.lookup(scheduler.request("a", 100), 0)
    pool = scheduler.manager.block_pool
    device_keys = weakref.ref(pool.cached_block_hash_to_block)
    assert pool.reset_prefix_cache()
    assert device_keys() is None


def test_weights_that_are_put_back_during_sleep_count_as_other_weights(tmp_path: Path) -> None:
    """A change that is called off while vLLM sleeps, and made in the next sleep."""
    version = tmp_path / "version"
    version.write_text("1")
    scheduler = Scheduler(FULL, preserve_on_sleep=True, weights_version_path=str(version))
    version.write_text("2")
    scheduler.half.reset()
    version.write_text("1")
    scheduler.store_request("a")  # computed with the weights 1
    assert scheduler.half.lookup(scheduler.request("b", 100), 0) == 96
    version.write_text("2")
    scheduler.half.reset()
    assert scheduler.half.lookup(scheduler.request("c", 100), 0) == 0


def test_weights_that_no_file_named_count_as_others_when_the_file_is_back(tmp_path: Path) -> None:
    """The file is away while the server has weights 2, and says 1 again with weights 1."""
    version = tmp_path / "version"
    scheduler = with_a_request_stored(version)
    version.unlink()
    scheduler.half.reset()
    assert scheduler.half.lookup(scheduler.request("b", 100), 0) == 0
    scheduler.store_request("c")  # computed with the weights 2
    version.write_text("1")
    scheduler.half.reset()
    assert scheduler.half.lookup(scheduler.request("d", 100), 0) == 0


def test_a_version_written_while_vllm_loaded_the_weights_never_keeps_the_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    """The server has weights 1, the file says 2 when vLLM builds the connector."""
    version = tmp_path / "version"
    monkeypatch.setattr(identity, "process_began", lambda: version.stat().st_ctime)
    scheduler = with_a_request_stored(version)
    assert any("has changed since this process began" in line for line in log)
    for name in ("b", "c"):
        scheduler.half.reset()  # the trainer has sent weights 2, and the file says so already
        assert scheduler.half.lookup(scheduler.request(name, 100), 0) == 0
        scheduler.store_request(f"{name} again")
    for content in ("3", "1"):
        version.write_text(content)
        scheduler.half.reset()
        assert scheduler.half.lookup(scheduler.request(f"d{content}", 100), 0) == 0
        scheduler.store_request(f"e{content}")
        scheduler.half.reset()
        again = scheduler.half.lookup(scheduler.request(f"f{content}", 100), 0)
        assert again == 96, "the version is known"


def with_old_weights_on_the_host(version: Path | None, *, is_idle: bool = False) -> Scheduler:
    """Return a scheduler whose tier has stored KV of weights 1 after a reset for weights 2.

    Without `version`, no file names the weights, and each reset empties the tier. If `is_idle`, no
    request holds a block when that KV is found on the device.
    """
    options: dict[str, Any] = {}
    if version is not None:
        version.write_text("1")
        options = {"preserve_on_sleep": True, "weights_version_path": str(version)}
    scheduler = Scheduler(FULL, **options)
    running = scheduler.request("a", 100)
    scheduler.admit(running)
    scheduler.step(running)
    if version is not None:
        version.write_text("2")
    assert not scheduler.manager.reset_prefix_cache(), "a request holds blocks"
    scheduler.half.reset()
    if is_idle:
        scheduler.finish(running)
        for _ in range(2):
            scheduler.step(reports=[(copies.job_id, 0, True) for copies in scheduler.jobs.stores])
    # A later request hits blocks of the old weights on the device, and stores them.
    later = scheduler.request("b", 100)
    scheduler.admit(later)
    scheduler.step(later)
    scheduler.finish(later)
    if not is_idle:
        scheduler.finish(running)
    for _ in range(2):
        scheduler.step(reports=[(copies.job_id, 0, True) for copies in scheduler.jobs.stores])
    assert scheduler.half.lookup(scheduler.request("c", 100), 0) == 96
    assert scheduler.manager.reset_prefix_cache()
    return scheduler


def test_weights_that_are_put_back_before_the_device_is_reset_count_as_others(
    tmp_path: Path,
) -> None:
    version = tmp_path / "version"
    scheduler = with_old_weights_on_the_host(version)
    version.write_text("1")
    scheduler.half.reset()
    assert scheduler.half.lookup(scheduler.request("d", 100), 0) == 0


@pytest.mark.parametrize("is_idle", [False, True])
def test_other_weights_empty_the_tier_until_the_device_is_reset(
    tmp_path: Path, *, is_idle: bool
) -> None:
    version = tmp_path / "version"
    scheduler = with_old_weights_on_the_host(version, is_idle=is_idle)
    scheduler.half.reset()
    assert scheduler.half.lookup(scheduler.request("d", 100), 0) == 0
    scheduler.store_request("e")
    scheduler.half.reset()
    assert scheduler.half.lookup(scheduler.request("f", 100), 0) == 96, (
        "from then on the tier is kept"
    )


def test_a_reset_is_not_over_while_a_request_fills_a_block_of_the_old_weights(
    tmp_path: Path,
) -> None:
    """No block on the device has a key yet. A later request hits the block, and stores it."""
    version = tmp_path / "version"
    version.write_text("1")
    scheduler = Scheduler(FULL, preserve_on_sleep=True, weights_version_path=str(version))
    running, later = scheduler.request("a", BLOCK_SIZE - 1), scheduler.request("b", 100)
    scheduler.admit(running)
    scheduler.step(running)
    version.write_text("2")
    assert not scheduler.manager.reset_prefix_cache()
    scheduler.half.reset()
    running.append_output_token_ids(BLOCK_SIZE - 1)
    assert scheduler.manager.allocate_slots(running, 1)
    scheduler.step(running)
    scheduler.admit(later)
    assert later.num_computed_tokens == BLOCK_SIZE
    scheduler.step(later)
    for request in (running, later):
        scheduler.finish(request)
    for _ in range(2):
        scheduler.step(reports=[(copies.job_id, 0, True) for copies in scheduler.jobs.stores])
    assert scheduler.half.lookup(scheduler.request("c", 100), 0) == 96
    assert scheduler.manager.reset_prefix_cache()
    assert scheduler.half.lookup(scheduler.request("d", 100), 0) == 0


def test_a_reset_is_over_when_the_device_is_reset_too() -> None:
    """The second call of the reset does not name the connector."""
    scheduler = with_old_weights_on_the_host(None)
    assert scheduler.half.lookup(scheduler.request("d", 100), 0) == 0
    scheduler.store_request("e")
    assert scheduler.half.lookup(scheduler.request("f", 100), 0) == 96, (
        "from then on a reset of the device alone keeps the tier"
    )


@pytest.mark.parametrize("specs", [(FULL,), (FULL, WINDOW)], ids=["full", "hybrid"])
def test_blocks_computed_before_a_reset_are_not_stored_after_it(
    specs: tuple[KVCacheSpec, ...],
) -> None:
    scheduler = Scheduler(*specs)
    request = scheduler.request("a", 100)
    scheduler.admit(request)
    scheduler.half.build(Step({"a": 40}))
    request.num_computed_tokens = 40
    scheduler.half.reset()
    scheduler.half.processed(KVConnectorOutput())
    scheduler.step(request)
    assert not scheduler.jobs.stores
    scheduler.finish(request)
    scheduler.step()
    assert not scheduler.jobs.stores
    assert scheduler.manager.reset_prefix_cache()
    scheduler.store_request("b")
    assert scheduler.half.lookup(scheduler.request("c", 100), 0) == 96


def test_a_request_that_waits_at_a_reset_is_stored() -> None:
    """It has no block yet that the old weights could have filled."""
    scheduler = Scheduler(FULL)
    request = scheduler.request("a", 100)
    assert scheduler.half.lookup(request, 0) == 0
    scheduler.half.reset()
    assert scheduler.serve(request) == 0
    assert scheduler.half.offload is not None and scheduler.half.offload.num_resident == 6


def test_lazy_mode_stores_blocks_of_paused_requests_before_a_sleep() -> None:
    scheduler = Scheduler(FULL, lazy_offload=True, preserve_on_sleep=True)
    request = scheduler.request("a", 100)
    scheduler.admit(request)
    scheduler.step(request)
    assert scheduler.half.transfers._stores == []
    assert not scheduler.half.may_rest()
    scheduler.step()
    (store,) = scheduler.jobs.stores
    assert len(store.block_ids) == 100 // BLOCK_SIZE
    assert not scheduler.half.may_rest()
    scheduler.step(reports=[(store.job_id, 0, True)])
    assert scheduler.half.may_rest()
    assert scheduler.half.transfers._stores == [], "blocks are stored once"


def loading(name: str = "b") -> tuple[Scheduler, Request, Copies]:
    scheduler = Scheduler(FULL, preserve_on_sleep=True)
    scheduler.store_request()
    request = scheduler.request(name, 100)
    assert scheduler.admit(request) == 96
    request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
    scheduler.step()
    (load,) = scheduler.jobs.loads
    return scheduler, request, load


@pytest.mark.parametrize("status", ["WAITING_FOR_REMOTE_KVS", "WAITING", "PREEMPTED"])
def test_a_load_that_lands_before_a_sleep_is_repeated_after_it(status: str) -> None:
    scheduler, request, load = loading()
    assert not scheduler.half.may_rest()
    scheduler.step()
    assert request.num_computed_tokens == 96, "the copy is under way"
    assert scheduler.step(reports=[(load.job_id, 0, True)]) == {"b"}
    # Or vLLM admitted the request, and then had no room for it.
    request.status = RequestStatus[status]
    assert scheduler.half.may_rest()
    assert request.num_computed_tokens == 0
    assert scheduler.manager.reset_prefix_cache()
    scheduler.half.reset()
    # vLLM got no report, because the request may be aborted or go on before the report arrives.
    scheduler.step()
    assert not scheduler.jobs.failed_request_ids
    # Awake again, vLLM caches nothing, and looks up again.
    scheduler.manager.cache_blocks(request, request.num_computed_tokens)
    assert scheduler.admit(request) == 96


def test_a_failed_load_is_reported_before_a_sleep() -> None:
    scheduler, request, load = loading()
    assert scheduler.step(reports=[(load.job_id, 0, False)]) == set()
    assert not scheduler.half.may_rest()
    scheduler.step()
    assert scheduler.jobs.failed_request_ids == ["b"]
    assert not scheduler.half.may_rest(), "the report is on its way to vLLM"
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
    assert scheduler.half.transfers._stores == []
    request.num_in_flight_tokens = 0
    assert not scheduler.half.may_rest()
    (store,) = scheduler.half.transfers._stores
    assert len(store.block_ids) == 4


def test_no_block_is_stored_before_a_sleep_while_a_step_is_under_way() -> None:
    """Another request has hit blocks of that step, and the step may prove them unwritten."""
    scheduler = Scheduler(FULL, preserve_on_sleep=True, lazy_offload=True)
    request, waiting = (scheduler.request(name, 100) for name in "ab")
    scheduler.admit(request)
    request.num_computed_tokens = request.num_in_flight_tokens = 100
    scheduler.admit(waiting)
    waiting.num_computed_tokens = 96
    waiting.status = RequestStatus.PREEMPTED
    assert not scheduler.half.may_rest()
    assert scheduler.half.transfers._stores == []
    assert waiting.num_computed_tokens == 96
    request.num_in_flight_tokens = 0
    scheduler.half.may_rest()
    assert waiting.num_computed_tokens == 0
