"""The start of the connector: capacities of the ranks, first steps and wake-ups."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.vllm.engine import DAMAGE, TOLERANCE, Engine, difference, prompts
from tests.vllm.halves import (
    BLOCK_SIZE,
    FULL,
    NUM_BLOCKS,
    PAGE_BYTES,
    WINDOW,
    Scheduler,
    Step,
    cache_config,
    copies,
    engine_config,
    stage,
)
from tests.vllm.movers import Forgetful
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvstow import ConfigError
from kvstow.vllm import KVStowConnector
from kvstow.vllm.messages import NO_JOBS, StepJobs, StepReports
from kvstow.vllm.model import Model
from kvstow.vllm.options import Options
from kvstow.vllm.worker import WorkerHalf

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own


def report(scheduler: Scheduler, capacities: dict[int, int]) -> None:
    meta = StepReports(capacities=capacities)
    scheduler.half.processed(KVConnectorOutput(kv_connector_worker_meta=meta))


# -- host memory -----------------------------------------------------------------------------------


def test_refused_host_memory_names_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of the process, such as ulimit -v, is not in the figure of free memory."""

    def refuse(*_: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    model, options = Model.of(cache_config(FULL)), Options(num_cpu_blocks=8)
    worker = WorkerHalf(model, options, rank=0, world_size=1, num_local_ranks=1)
    with monkeypatch.context() as patch:
        patch.setattr("kvstow.transfer.arena.mmap.mmap", refuse)
        with pytest.raises(ConfigError, match=r"refused them .* lower cpu_bytes_to_use or num_cpu"):
            worker.register({"0": torch.zeros(NUM_BLOCKS * PAGE_BYTES, dtype=torch.uint8)})
    worker.close()


@pytest.mark.parametrize("num_machines", [1, 2])
def test_ranks_that_ray_puts_on_other_machines_take_no_memory_here(
    folder: Path, monkeypatch: pytest.MonkeyPatch, num_machines: int
) -> None:
    """vLLM's configuration counts all ranks of Ray as ranks of this machine."""
    config = engine_config(folder, {"num_cpu_blocks": 8})
    parallel = config.parallel_config
    parallel.world_size, parallel.distributed_executor_backend = 4, "ray"
    name = "kvstow.vllm.connector"
    monkeypatch.setattr(f"{name}.get_world_group", lambda: SimpleNamespace(world_size=4))
    monkeypatch.setattr(f"{name}.get_node_count", lambda: num_machines)
    monkeypatch.setattr("kvstow.vllm.worker.free_memory", lambda: 2 * 8 * 4096)
    connector = KVStowConnector(config, KVConnectorRole.WORKER, cache_config(FULL))
    caches = {"0": torch.zeros(NUM_BLOCKS * PAGE_BYTES, dtype=torch.uint8)}
    if num_machines == 1:
        with pytest.raises(ConfigError, match="on each of 4 ranks"):
            connector.register_kv_caches(caches)
    else:
        connector.register_kv_caches(caches)
    connector.shutdown()


# -- capacities ------------------------------------------------------------------------------------


def test_lookup_is_pending_until_every_rank_has_reported() -> None:
    scheduler = Scheduler(FULL, world_size=3, num_host_blocks=None)
    request = scheduler.request("a", 100)
    for rank, num_blocks in ((1, 9), (0, 7), (2, 8)):
        assert scheduler.half.lookup(request, 0) is None
        assert not scheduler.half.may_rest(), "an empty step brings the next report"
        assert scheduler.half.build(Step()).asks_capacity
        report(scheduler, {rank: num_blocks})
    assert scheduler.half.offload is not None
    assert scheduler.half.offload.num_host_blocks == 7, "the smallest capacity of all ranks counts"
    assert scheduler.half.may_rest()
    assert not scheduler.half.build(Step()).asks_capacity
    assert scheduler.admit(request) == 0
    scheduler.step(request)
    scheduler.step()
    (store,) = scheduler.jobs.stores
    assert len(store.block_ids) == 100 // BLOCK_SIZE


def test_workers_report_their_capacity_when_asked(folder: Path) -> None:
    """Each pipeline stage has its own layers, and the same bytes of host memory."""
    size = PAGE_BYTES * NUM_BLOCKS
    stages = []
    for layers in ([str(at) for at in range(9)], ["a", "b"]):
        tensor = KVCacheTensor(size * len(layers), layers, size, PAGE_BYTES)
        stages.append(KVCacheConfig(NUM_BLOCKS, [tensor], [KVCacheGroupSpec(layers, FULL)]))
    config = engine_config(folder, {"cpu_bytes_to_use_per_rank": 60 * 4096})
    outputs = []
    for rank, part in enumerate(stages):
        config.parallel_config.world_size, config.parallel_config.rank = 2, rank
        worker = KVStowConnector(config, KVConnectorRole.WORKER, part)
        worker.bind_connector_metadata(StepJobs())
        assert worker.build_connector_worker_meta() is None
        worker.bind_connector_metadata(StepJobs(asks_capacity=True))
        meta = worker.build_connector_worker_meta()
        output = KVConnectorOutput(kv_connector_worker_meta=meta)
        assert not output.is_empty(), "vLLM drops empty outputs of steps without tokens"
        outputs.append(ModelRunnerOutput.with_kv_conn_output_only(output))
    merged = KVOutputAggregator(2).aggregate(outputs)
    assert merged is not None and merged.kv_connector_output is not None
    reports = merged.kv_connector_output.kv_connector_worker_meta
    assert isinstance(reports, StepReports)
    assert PAGE_BYTES == 1024
    assert reports.capacities == {0: 60 // 3, 1: 60}, "a slot takes whole pages of 4 KiB"
    scheduler = KVStowConnector(config, KVConnectorRole.SCHEDULER, stages[0])
    assert scheduler.get_kv_connector_stats() is None and not list(scheduler.take_events())
    scheduler.update_connector_output(merged.kv_connector_output)
    assert scheduler._scheduler.offload is not None
    assert scheduler._scheduler.offload.num_host_blocks == 20
    stats = scheduler.get_kv_connector_stats()
    assert stats is not None and stats.data["capacity_blocks"] == 20


def test_a_capacity_that_is_reported_again_changes_nothing() -> None:
    """A worker answers each step that asks, and steps overlap."""
    scheduler = Scheduler(FULL, num_host_blocks=None)
    report(scheduler, {0: 20})
    scheduler.store_request()
    offload = scheduler.half.offload
    assert offload is not None
    report(scheduler, {0: 20})
    assert scheduler.half.offload is offload and offload.num_resident == 6


def test_a_rank_that_has_lost_its_host_memory_turns_the_tier_off(
    log: list[str],
) -> None:
    scheduler = Scheduler(FULL, num_host_blocks=None)
    scheduler.let_go_off()
    report(scheduler, {0: 20})
    scheduler.store_request()
    report(scheduler, {0: 19})
    assert scheduler.half.tier.is_off and scheduler.half.offload is None
    assert "rank 0 reports 19 host blocks, expected 20" in "".join(log)
    assert scheduler.half.lookup(scheduler.request("b", 100), 0) == 0


def test_a_request_that_leaves_while_pending_is_forgotten() -> None:
    scheduler = Scheduler(FULL, num_host_blocks=None)
    request = scheduler.request("a", 100)
    assert scheduler.half.lookup(request, 0) is None
    scheduler.half.finished(request)
    assert not scheduler.half.requests.tracked
    report(scheduler, {0: NUM_BLOCKS})
    scheduler.store_request("a")
    assert scheduler.half.lookup(scheduler.request("b", 100), 0) == 96


def test_a_request_that_ran_before_the_tier_existed_is_stored() -> None:
    """vLLM admits requests that skip the caches, whatever the lookup answers."""
    scheduler = Scheduler(FULL, num_host_blocks=None)
    request = scheduler.request("a", 100)
    request.skip_reading_prefix_cache = True
    assert scheduler.admit(request) == 0
    scheduler.step(request)
    assert not scheduler.jobs.stores
    report(scheduler, {0: NUM_BLOCKS})
    scheduler.finish(request)
    scheduler.step()
    scheduler.step(reports=[(copies.job_id, 0, True) for copies in scheduler.jobs.stores])
    assert scheduler.manager.reset_prefix_cache()
    assert scheduler.half.lookup(scheduler.request("b", 100), 0) == 96


def test_blocks_from_before_a_reset_without_a_tier_are_not_stored() -> None:
    """The weights may have changed."""
    scheduler = Scheduler(FULL, num_host_blocks=None)
    request = scheduler.request("a", 100)
    request.skip_reading_prefix_cache = True
    scheduler.admit(request)
    scheduler.step(request)
    scheduler.half.reset()
    report(scheduler, {0: NUM_BLOCKS})
    scheduler.finish(request)
    scheduler.step()
    assert not scheduler.jobs.stores
    assert scheduler.half.lookup(scheduler.request("b", 100), 0) == 0


def test_requests_stop_waiting_for_a_rank_after_the_timeout(
    log: list[str],
) -> None:
    """With an executor that drops the reports, requests go on without the tier."""
    scheduler = Scheduler(FULL, world_size=2, num_host_blocks=None, load_timeout_s=5.0)
    request = scheduler.request("a", 100)
    assert scheduler.half.lookup(request, 0) is None
    report(scheduler, {0: NUM_BLOCKS})
    scheduler.now = 4.9
    assert scheduler.half.lookup(request, 0) is None and not scheduler.half.may_rest()
    scheduler.now = 5.1
    assert scheduler.admit(request) == 0
    assert scheduler.half.may_rest()
    assert len(log) == 1 and "ranks [1] have not reported" in log[0]
    scheduler.step(request)
    scheduler.finish(request)
    assert scheduler.manager.block_pool.get_num_free_blocks() == NUM_BLOCKS - 1
    report(scheduler, {1: NUM_BLOCKS})
    assert scheduler.half.offload is not None
    later = scheduler.request("b", 200)
    scheduler.admit(later)
    scheduler.step(later)
    scheduler.step()
    (store,) = scheduler.jobs.stores
    scheduler.step(reports=[(store.job_id, rank, True) for rank in range(2)])
    assert scheduler.half.offload.num_resident == 12


# -- ranks without layers of a group ---------------------------------------------------------------


def run_step(connector: KVStowConnector, jobs: StepJobs) -> list[tuple[int, int, Any]]:
    """Run a worker's step, and return its reports once all jobs have ended."""
    connector.bind_connector_metadata(jobs)
    connector.start_load_kv(None)
    connector.wait_for_save()
    ended = []
    for _ in range(10_000):
        meta = connector.build_connector_worker_meta()
        ended += meta.reports if isinstance(meta, StepReports) else []
        if not connector._worker._running:
            return ended
        time.sleep(0.001)
    raise AssertionError("the copies do not end")


@pytest.mark.parametrize("layers", [("f0", "f1"), ("w0", "w1"), ()], ids=["full", "window", "none"])
def test_a_stage_without_layers_of_a_group_copies_the_others(
    folder: Path, layers: tuple[str, ...]
) -> None:
    config = engine_config(folder, {"num_cpu_blocks": 8})
    cache, caches = stage(*layers)
    connector = KVStowConnector(config, KVConnectorRole.WORKER, cache)
    connector.register_kv_caches(caches)
    for tensor in caches.values():
        tensor[PAGE_BYTES : 3 * PAGE_BYTES] = 7
    # Block 1 belongs to the first group, block 2 to the second.
    store = StepJobs(stores=[copies(1, [1, 2], [1, 2], [0, 1, 2])])
    assert run_step(connector, store) == [(1, 0, True)]
    for tensor in caches.values():
        tensor.zero_()
    load = StepJobs(loads=[copies(2, [3, 4], [1, 2], [0, 1, 2])])
    assert run_step(connector, load) == [(2, 0, True)]
    own = 4 if layers and layers[0] == "w0" else 3
    for tensor in caches.values():
        assert tensor[own * PAGE_BYTES : (own + 1) * PAGE_BYTES].eq(7).all()
        assert tensor.sum() == 7 * PAGE_BYTES, "nothing else is written"
    connector.unregister_kv_caches()
    connector.restore_kv_caches()
    connector.shutdown()


def test_a_step_that_is_bound_twice_begins_once(folder: Path) -> None:
    config = engine_config(folder, {"num_cpu_blocks": 8})
    cache, caches = stage("f0")
    connector = KVStowConnector(config, KVConnectorRole.WORKER, cache)
    connector.register_kv_caches(caches)
    step = StepJobs(stores=[copies(1, [1], [1], [0, 1, 1])], failed_request_ids=["late"])
    connector.bind_connector_metadata(step)
    connector.wait_for_save()
    assert connector.get_transfer_results(set()).failed_recving == {"late"}
    assert run_step(connector, step) == [(1, 0, True)]
    assert not connector.get_transfer_results(set()).failed_recving
    assert run_step(connector, NO_JOBS) == []
    assert StepJobs() == NO_JOBS, "all steps without jobs have this message"
    connector.shutdown()


def test_failed_loads_of_a_step_without_results_are_reported_with_the_next(folder: Path) -> None:
    """An error of vLLM may end a step before vLLM asks. A load that is not reported hangs."""
    config = engine_config(folder, {"num_cpu_blocks": 8})
    connector = KVStowConnector(config, KVConnectorRole.WORKER, stage("f0")[0])
    for name in ("a", "b"):
        connector.bind_connector_metadata(StepJobs(failed_request_ids=[name]))
    assert connector.get_transfer_results(set()).failed_recving == {"a", "b"}


def test_a_stage_without_layers_does_not_limit_the_tier(folder: Path) -> None:
    """Each stage has the same bytes, and its blocks have different sizes."""
    config = engine_config(folder, {"cpu_bytes_to_use_per_rank": 60 * 4096})
    capacities: dict[int, int] = {}
    for rank, layers in enumerate([("f0", "f1", "w0", "w1"), ("w0",), ()]):
        config.parallel_config.world_size, config.parallel_config.rank = 3, rank
        connector = KVStowConnector(config, KVConnectorRole.WORKER, stage(*layers)[0])
        connector.bind_connector_metadata(StepJobs(asks_capacity=True))
        meta = connector.build_connector_worker_meta()
        assert isinstance(meta, StepReports)
        capacities |= meta.capacities
    assert capacities[0] == capacities[1] == 60 < capacities[2]
    scheduler = Scheduler(FULL, WINDOW, world_size=3, num_host_blocks=None)
    report(scheduler, capacities)
    assert scheduler.half.offload is not None and scheduler.half.offload.num_host_blocks == 60


def test_a_worker_without_device_memory_fails_its_jobs(folder: Path) -> None:
    """A job that succeeds without a copy would serve whatever the slots hold."""
    config = engine_config(folder, {"num_cpu_blocks": 8})
    cache, caches = stage("f0", "f1")
    connector = KVStowConnector(config, KVConnectorRole.WORKER, cache)
    for job_id, change in enumerate((lambda: None, connector.shutdown)):
        change()
        load = StepJobs(loads=[copies(job_id, [3], [1], [0, 1, 1])])
        assert run_step(connector, load) == [(job_id, 0, False)]
        connector.register_kv_caches(caches)


def test_a_model_without_kv_caches_is_refused() -> None:
    with pytest.raises(ConfigError, match="keeps no KV cache"):
        Model.of(KVCacheConfig(1, [], []))


# -- an engine -------------------------------------------------------------------------------------

PROMPTS = prompts(3, 300)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    engine = Engine(
        folder,
        num_blocks=60,
        options={"num_cpu_blocks": 400, "preserve_on_sleep": True},
    )
    yield engine
    engine.close()


def test_the_first_request_waits_for_one_empty_step(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine.half.offload is None, "no step has run yet"
    sizes = []
    build = engine.half.build

    def counting(scheduled: Any) -> StepJobs:
        sizes.append(scheduled.total_num_scheduled_tokens)
        return build(scheduled)

    monkeypatch.setattr(engine.half, "build", counting)
    engine.begin(PROMPTS)
    engine.step(2)
    assert sizes[0] == 0 and sizes[1] > 0
    assert len(engine.finish()) == len(PROMPTS)
    engine.settle()
    engine.check_idle()
    assert engine.stats()["stored_blocks"] > 0


@pytest.mark.parametrize("keeps_requests", [False, True], ids=["empty", "keep"])
def test_a_wake_up_of_vllm_033_keeps_the_tier(engine: Engine, keeps_requests: bool) -> None:
    """vLLM takes the device memory away and gives it back, and then sends all handshakes again."""
    engine.start_over()
    expected = engine.generate(PROMPTS)
    engine.settle()
    if keeps_requests:
        engine.begin(prompts(2, 200, seed=5), 40)
        engine.step(6)
    engine.sleep()
    resident = engine.stats()["resident_blocks"]
    connector = engine.connector
    engine.worker.unregister()
    engine.worker.restore()
    handshakes = engine.core.model_executor.get_kv_connector_handshake_metadata()
    content = {rank: meta for each in handshakes if each for rank, meta in each.items()}
    connector.set_xfer_handshake_metadata_pp_aware(content)
    engine.wake()
    assert engine.stats()["resident_blocks"] == resident > 0
    if keeps_requests:
        assert len(engine.finish()) == 2
        engine.settle()
    loaded = engine.stats()["loaded_blocks"]
    assert difference(engine.generate(PROMPTS), expected) < TOLERANCE
    assert engine.stats()["loaded_blocks"] > loaded
    engine.settle()
    engine.check_idle()


def test_a_missing_load_after_a_wake_up_changes_answers(engine: Engine) -> None:
    """The negative control of this file."""
    engine.start_over()
    expected = engine.generate(PROMPTS)
    engine.settle()
    engine.sleep()
    engine.wake()
    with engine.movers(Forgetful):  # type: ignore[arg-type]
        assert difference(engine.generate(PROMPTS), expected) > DAMAGE
    engine.settle()
