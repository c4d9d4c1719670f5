"""The connector without an engine: what it refuses, how ranks agree, what a step costs it."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.vllm import models
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

import kvstow.vllm
from kvstow import ConfigError, TransferError
from kvstow.transfer import READY
from kvstow.vllm import KVStowConnector
from kvstow.vllm.lazy_queue import LazyQueue
from kvstow.vllm.messages import Copies, StepJobs, StepReports
from kvstow.vllm.model import Model
from kvstow.vllm.options import Options
from kvstow.vllm.scheduler import SchedulerHalf

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

BLOCK_SIZE = 16
NUM_BLOCKS = 64
FULL = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32)
WINDOW = SlidingWindowSpec(
    block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=32
)
PAGE_BYTES = FULL.page_size_bytes


def cache_config(*specs: Any, retention: int | None = 0) -> KVCacheConfig:
    """Groups of one layer each, overlaid in one allocation, as vLLM lays hybrids out."""
    size = PAGE_BYTES * NUM_BLOCKS
    return KVCacheConfig(
        num_blocks=NUM_BLOCKS,
        kv_cache_tensors=[
            KVCacheTensor(size, [str(at)], layer_stride=size, block_stride=PAGE_BYTES)
            for at in range(len(specs))
        ],
        kv_cache_groups=[KVCacheGroupSpec([str(at)], spec) for at, spec in enumerate(specs)],
        prefix_cache_retention_interval=retention,  # vLLM's default: 0
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.make_model(models.LLAMA, tmp_path_factory.mktemp("llama"))


def engine_config(folder: Path, options: dict[str, Any], **settings: Any) -> Any:
    transfer = {
        "kv_connector": "KVStowConnector",
        "kv_connector_module_path": "kvstow.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": options,
    }
    defaults = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "block_size": BLOCK_SIZE,
        "kv_transfer_config": transfer,
    }
    return EngineArgs(**(defaults | settings)).create_engine_config()


# -- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"cpu_bytes_touse": 1}, "did you mean 'cpu_bytes_to_use'"),
        ({"lazy": True}, "lazy_offload"),
        ({"cpu_bytes_to_use": 0}, "cpu_bytes_to_use is 0"),
        ({"cpu_bytes_to_use": "8 GiX"}, "cpu_bytes_to_use is '8 GiX'"),
        ({"cpu_bytes_to_use_per_rank": 1.5}, "cpu_bytes_to_use_per_rank is 1.5"),
        ({"num_cpu_blocks": 1.5}, "num_cpu_blocks is 1.5"),
        ({"num_cpu_blocks": "4"}, "num_cpu_blocks is '4'"),
        ({"num_cpu_blocks": True}, "num_cpu_blocks is True"),
        ({"num_cpu_blocks": 4, "cpu_bytes_to_use": 1 << 30}, "keep one"),
        ({"lazy_offload": "yes"}, "true or false"),
        ({"load_timeout_s": 0}, "seconds above 0"),
        ({"load_timeout_s": float("inf")}, "seconds above 0"),
        ({"eviction_policy": "fifo"}, "lru, hit-density"),
        ({"verify": "md5"}, "off, checksum"),
        ({"events_path": ""}, "events_path"),
    ],
)
def test_options_that_cannot_be_right(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match="kv_connector_extra_config") as refused:
        Options.parse(options)
    assert told in str(refused.value)


def test_sizes_are_read_as_people_write_them() -> None:
    for given in ("32GiB", "32 gib", 32 << 30, float(32 << 30), str(32 << 30)):
        assert Options.parse({"cpu_bytes_to_use": given}).cpu_bytes_to_use == 32 << 30
        options = Options.parse({"cpu_bytes_to_use_per_rank": given})
        assert options.cpu_bytes_to_use_per_rank == 32 << 30
    assert Options.parse({"num_cpu_blocks": 4.0}).num_cpu_blocks == 4


def test_a_budget_below_one_block_names_the_least_that_will_do() -> None:
    with pytest.raises(ConfigError, match="raise cpu_bytes_to_use to at least 8192"):
        Options(cpu_bytes_to_use=4096).num_host_blocks(4096, world_size=2)
    assert Options(cpu_bytes_to_use=8192).num_host_blocks(4096, world_size=2) == 1
    assert Options(cpu_bytes_to_use_per_rank=8192).num_host_blocks(4096, world_size=2) == 2
    assert Options(num_cpu_blocks=7).num_host_blocks(4096, world_size=2) == 7


def test_vllm_without_prefix_caching_is_refused(folder: Path) -> None:
    config = engine_config(folder, {"num_cpu_blocks": 4}, enable_prefix_caching=False)
    with pytest.raises(ConfigError, match="--enable-prefix-caching"):
        KVStowConnector(config, KVConnectorRole.SCHEDULER, cache_config(FULL))


def test_a_typo_ends_the_start_in_both_roles(folder: Path) -> None:
    config = engine_config(folder, {"num_cpu_block": 4})
    for role in KVConnectorRole:
        with pytest.raises(ConfigError, match="did you mean 'num_cpu_blocks'"):
            KVStowConnector(config, role, cache_config(FULL))


def test_a_scheduler_beside_each_rank_is_refused(folder: Path) -> None:
    """None of them would ever hear of the other ranks' copies."""
    config = engine_config(folder, {"num_cpu_blocks": 4})
    config.parallel_config.distributed_executor_backend = "external_launcher"
    KVStowConnector(config, KVConnectorRole.SCHEDULER, cache_config(FULL))
    config.parallel_config.world_size = 2
    with pytest.raises(ConfigError, match="external_launcher"):
        KVStowConnector(config, KVConnectorRole.SCHEDULER, cache_config(FULL))


def test_options_are_checked_before_weights_load() -> None:
    """vLLM's configuration asks about CUDA graphs, long before it builds an engine."""
    asks = KVStowConnector.requires_piecewise_for_cudagraph
    assert not asks({}) and not asks({"num_cpu_blocks": 4})
    with pytest.raises(ConfigError, match="did you mean 'num_cpu_blocks'"):
        asks({"num_cpu_block": 4})
    kvstow.vllm.register()
    child = {"kv_connector": "KVStowConnector", "kv_role": "kv_both"}
    children = [child | {"kv_connector_extra_config": {"lazy": True}}]
    with pytest.raises(ConfigError, match="has no option 'lazy'"):
        MultiConnector.requires_piecewise_for_cudagraph({"connectors": children})


def test_a_kind_of_attention_that_is_not_known_is_refused() -> None:
    mamba = MambaSpec(block_size=BLOCK_SIZE, shapes=((8,),), dtypes=(torch.float32,))
    with pytest.raises(ConfigError, match="KV cache group 1 is of kind MambaSpec"):
        Model.of(cache_config(FULL, mamba))


def test_a_layout_that_is_not_where_vllm_says_is_refused() -> None:
    model = Model.of(cache_config(FULL))
    tensor = torch.zeros(NUM_BLOCKS * PAGE_BYTES, dtype=torch.uint8)
    assert model.layouts({"0": tensor})[0].slot_bytes == PAGE_BYTES
    with pytest.raises(ConfigError, match=r"layer '0' begins \+64 bytes from where"):
        model.layouts({"0": tensor[64:]})
    with pytest.raises(ConfigError, match=f"it should take {NUM_BLOCKS * PAGE_BYTES}"):
        model.layouts({"0": tensor[:-1].clone()})
    with pytest.raises(ConfigError, match="registers no KV cache for layer '0'"):
        model.layouts({})


def test_more_host_blocks_than_memory_are_refused(folder: Path) -> None:
    config = engine_config(folder, {"num_cpu_blocks": 2**31 - 2})
    connector = KVStowConnector(config, KVConnectorRole.WORKER, cache_config(FULL))
    tensor = torch.zeros(NUM_BLOCKS * PAGE_BYTES, dtype=torch.uint8)
    with pytest.raises(ConfigError, match="lower cpu_bytes_to_use or num_cpu_blocks"):
        connector.register_kv_caches({"0": tensor})


def test_layers_side_by_side_in_a_block_are_one_region() -> None:
    size = 2 * PAGE_BYTES * NUM_BLOCKS
    packed = KVCacheTensor(size, ["a", "b"], layer_stride=PAGE_BYTES, block_stride=2 * PAGE_BYTES)
    model = Model.of(KVCacheConfig(NUM_BLOCKS, [packed], [KVCacheGroupSpec(["b", "a"], FULL)]))
    tensor = torch.zeros(size, dtype=torch.uint8)
    (layout,) = model.layouts({"a": tensor, "b": tensor[PAGE_BYTES:]})
    (region,) = layout.regions
    assert (region.base_address, region.block_bytes) == (tensor.data_ptr(), 2 * PAGE_BYTES)


# -- registration and ranks ---------------------------------------------------------------------


def test_the_connector_is_known_by_name() -> None:
    kvstow.vllm.register()
    kvstow.vllm.register()
    assert KVConnectorFactory.get_connector_class_by_name("KVStowConnector") is KVStowConnector


# -- the scheduler half beside vLLM's own accounting -----------------------------------------------


@dataclass
class Step:
    """What of vLLM's `SchedulerOutput` the connector reads."""

    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    preempted_req_ids: set[str] = field(default_factory=set)


class Scheduler:
    """As much of vLLM's scheduler as calls the connector, over its real `KVCacheManager`."""

    def __init__(
        self,
        *specs: Any,
        world_size: int = 1,
        num_host_blocks: int | None = NUM_BLOCKS,
        retention: int | None = 0,
        **options: Any,
    ) -> None:
        """`num_host_blocks` None leaves the ranks' capacities to be reported."""
        init_none_hash(sha256_cbor)
        config = cache_config(*specs, retention=retention)
        self.manager = KVCacheManager(
            config,
            max_model_len=1 << 20,
            scheduler_block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
            max_in_flight_tokens=None,
        )
        self.now = 0.0
        self.half = SchedulerHalf(
            Model.of(config),
            Options(**options),
            world_size=world_size,
            tokens_per_hash=BLOCK_SIZE,
            horizon_blocks=NUM_BLOCKS,
            clock=lambda: self.now,
        )
        self.half.bind(self.manager)
        if num_host_blocks is not None:
            self.half.agree(num_host_blocks)
        self.jobs = StepJobs()

    @property
    def lazy(self) -> LazyQueue:
        assert self.half.tier.lazy is not None
        return self.half.tier.lazy

    def request(self, name: str, num_tokens: int, **settings: Any) -> Request:
        return Request(
            request_id=name,
            prompt_token_ids=list(range(num_tokens)),
            sampling_params=SamplingParams(max_tokens=8),
            pooling_params=None,
            block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256_cbor),
            **settings,
        )

    def admit(self, request: Request) -> int:
        """Let it in; returns the tokens that are to be loaded."""
        hit, num_local = self.manager.get_computed_blocks(request)[:2]
        found = self.half.lookup(request, num_local)
        assert found is not None
        num_new = 0 if found else request.num_tokens - num_local
        taken = self.manager.allocate_slots(
            request,
            num_new,
            num_new_computed_tokens=num_local,
            new_computed_blocks=hit,
            num_external_computed_tokens=found,
            delay_cache_blocks=found > 0,
        )
        assert taken is not None
        self.half.allocated(request, self.manager.get_blocks(request.request_id), found)
        request.num_computed_tokens = num_local + found
        return found

    def step(
        self,
        *requests: Request,
        reports: Sequence[tuple[int, int, bool]] = (),
        released: Sequence[int] = (),
    ) -> set[str]:
        """Compute all that these requests have left; returns whose loads have landed."""
        scheduled = {r.request_id: r.num_tokens - r.num_computed_tokens for r in requests}
        self.jobs = self.half.build(Step(scheduled))
        for request in requests:
            request.num_computed_tokens = request.num_tokens
        told = StepReports(list(reports), list(released))
        output = KVConnectorOutput(kv_connector_worker_meta=told)
        self.half.processed(output)
        return output.finished_recving or set()

    def finish(self, request: Request) -> None:
        self.half.finished(request)
        self.manager.free(request)

    def store_one(self, name: str = "a", num_tokens: int = 100, **settings: Any) -> None:
        """A request that was computed, stored and forgotten by the device."""
        request = self.request(name, num_tokens, **settings)
        assert self.admit(request) == 0
        self.step(request)
        self.finish(request)
        self.step()
        self.step(reports=[(copies.job_id, 0, True) for copies in self.jobs.stores])
        assert self.manager.reset_prefix_cache()


def test_two_lora_names_share_no_block() -> None:
    scheduler = Scheduler(FULL)
    one, two = (LoRARequest(name, at, f"/{name}") for at, name in enumerate(("one", "two"), 1))
    scheduler.store_one("a", lora_request=one)
    assert scheduler.half.lookup(scheduler.request("b", 100, lora_request=two), 0) == 0
    assert scheduler.half.lookup(scheduler.request("c", 100), 0) == 0
    assert scheduler.half.lookup(scheduler.request("d", 100, lora_request=one), 0) == 96


def test_a_window_is_stored_though_it_is_given_away_with_the_request() -> None:
    """Of 100 tokens the last 32 are read by what follows: two blocks of the window's six."""
    scheduler = Scheduler(FULL, WINDOW)
    scheduler.store_one()
    assert scheduler.half.offload is not None
    assert scheduler.half.offload.num_resident == 6 + 2, "vLLM keeps the others for nobody"
    assert scheduler.half.lookup(scheduler.request("b", 100), 0) == 96


@pytest.mark.parametrize("retention", [0, None], ids=["sparse", "dense"])
@pytest.mark.parametrize("extra", [0, 1, 2, 3, 20])
def test_a_load_brings_what_vllm_retains_below_a_window(extra: int, retention: int | None) -> None:
    """Drafts of several modules need it: vLLM allocates these blocks and may cache them."""
    retaining = replace(WINDOW, extra_retained_tokens=extra)
    scheduler = Scheduler(FULL, retaining, retention=retention)
    scheduler.store_one("a", 200)
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


def test_a_retained_block_that_was_given_away_is_not_stored() -> None:
    """It has no hash that would tell."""
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


def test_a_retained_block_that_another_connector_loads_is_not_stored() -> None:
    """It may have loaded what a hit needs, and left the retained block as it was."""
    scheduler = Scheduler(FULL, replace(WINDOW, extra_retained_tokens=20))
    request = scheduler.request("a", 200)
    assert scheduler.half.lookup(request, 0) == 0
    scheduler.manager.allocate_slots(
        request, 0, num_external_computed_tokens=96, delay_cache_blocks=True
    )
    scheduler.half.allocated(request, scheduler.manager.get_blocks("a"), 0)
    request.num_computed_tokens = 96
    scheduler.manager.cache_blocks(request, 96)
    scheduler.half.allocated(request, scheduler.manager.get_blocks("a"), 0)
    scheduler.manager.allocate_slots(request, 104)
    scheduler.step(request)
    scheduler.step()
    (store,) = scheduler.jobs.stores
    table = scheduler.manager.get_blocks("a").blocks[1]
    blocks = scheduler.manager.block_pool.blocks
    loaded = {block.block_id for block in table[:6] if not block.is_null}
    stored = set(store.block_ids[store.offsets[1] :].tolist())
    assert loaded and stored
    assert all(blocks[block_id].block_hash is not None for block_id in loaded & stored)


def test_a_request_aborted_while_it_loads_stores_nothing() -> None:
    """Its table says that the external tokens are computed, and they are not."""
    scheduler = Scheduler(FULL)
    scheduler.store_one()
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
    # vLLM frees its blocks once it is told of the end, as failed: the reset has voided the load.
    assert scheduler.jobs.failed_request_ids == ["b"]
    scheduler.manager.free(request)
    assert scheduler.manager.block_pool.get_num_free_blocks() == NUM_BLOCKS - 1


def test_a_load_ends_when_the_last_rank_has_reported() -> None:
    scheduler = Scheduler(FULL, world_size=2)
    request = scheduler.request("a", 100)
    scheduler.admit(request)
    scheduler.step(request)
    scheduler.finish(request)
    scheduler.step()
    (store,) = scheduler.jobs.stores
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


def test_a_load_that_cannot_be_is_told_as_failed() -> None:
    """vLLM waits for a load from the moment it has accepted one."""
    scheduler = Scheduler(FULL)
    scheduler.store_one()
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


def test_registering_anew_keeps_what_the_host_holds(folder: Path) -> None:
    config = engine_config(folder, {"num_cpu_blocks": 4})
    connector = KVStowConnector(config, KVConnectorRole.WORKER, cache_config(FULL))
    worker = connector._worker
    assert worker is not None
    tensors = [torch.full((NUM_BLOCKS * PAGE_BYTES,), at, dtype=torch.uint8) for at in (7, 8)]
    connector.register_kv_caches({"0": tensors[0]})
    worker.movers[0].store([1], [2], after=READY).wait(10)
    connector.register_kv_caches({"0": tensors[1]})
    worker.movers[0].load([2], [3], after=READY).wait(10)
    loaded = tensors[1][3 * PAGE_BYTES : 4 * PAGE_BYTES]
    assert loaded.eq(7).all() and tensors[1].eq(7).sum() == PAGE_BYTES
    connector.shutdown()
    assert worker.arena is None


def test_what_is_known_of_the_slots_outlives_sleep(folder: Path) -> None:
    """vLLM 0.33 has its connectors let go of the device's memory and take hold of it again."""
    config = engine_config(folder, {"num_cpu_blocks": 4, "verify": "checksum"})
    connector = KVStowConnector(config, KVConnectorRole.WORKER, cache_config(FULL))
    worker = connector._worker
    assert worker is not None
    tensor = torch.full((NUM_BLOCKS * PAGE_BYTES,), 7, dtype=torch.uint8)
    connector.register_kv_caches({"0": tensor})
    worker.movers[0].store([1], [2], after=READY).wait(10)
    for _ in range(2):
        connector.unregister_kv_caches()
    tensor.zero_()
    load = Copies(1, *(np.array(ids, dtype=np.int32) for ids in ([3], [2], [0, 1])))
    connector.bind_connector_metadata(StepJobs(loads=[load]))
    connector.start_load_kv(None)
    reports = connector.build_connector_worker_meta()
    assert isinstance(reports, StepReports) and reports.reports == [(1, 0, False)], "no memory"
    for _ in range(2):
        connector.restore_kv_caches()
    worker.movers[0].load([2], [3], after=READY).wait(10)
    assert tensor[3 * PAGE_BYTES : 4 * PAGE_BYTES].eq(7).all() and tensor.sum() == 7 * PAGE_BYTES
    assert worker.arena is not None
    worker.arena.slots[2, 5] ^= 1
    with pytest.raises(TransferError, match="slot 2 does not hold"):
        worker.movers[0].load([2], [3], after=READY).wait(10)
    connector.shutdown()
    connector.restore_kv_caches()
    assert worker.movers == []


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
    assert not scheduler.half.may_rest(), "the host does not have them yet"
    freed = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    assert not lazy or freed == [*order, *store.block_ids[::-1]], "as if nothing was stored"
    for rank in range(2):
        scheduler.step(reports=[(store.job_id, rank, True)])
    assert scheduler.half.may_rest()
    assert pool.get_num_free_blocks() == NUM_BLOCKS - 1


# -- sleep -----------------------------------------------------------------------------------------


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


def test_a_late_load_is_told_once_and_its_blocks_wait_for_the_copy() -> None:
    scheduler = Scheduler(FULL, load_timeout_s=5.0)
    scheduler.store_one()
    request = scheduler.request("b", 100)
    scheduler.admit(request)
    scheduler.step()
    (load,) = scheduler.jobs.loads
    scheduler.now = 6.0
    told = []
    for _ in range(3):
        scheduler.step()
        told += scheduler.jobs.failed_request_ids
    assert told == ["b"]
    request.num_computed_tokens = 0
    scheduler.manager.free(request)
    pool = scheduler.manager.block_pool
    assert pool.get_num_free_blocks() == NUM_BLOCKS - 1 - 6
    assert scheduler.admit(request) == 0, "it computes what it could not load"
    assert scheduler.step(reports=[(load.job_id, 0, True)]) == set()
    scheduler.step()
    assert scheduler.jobs.failed_request_ids == []
    scheduler.finish(request)
    for _ in range(2):
        scheduler.step(reports=[(copies.job_id, 0, True) for copies in scheduler.jobs.stores])
    assert pool.get_num_free_blocks() == NUM_BLOCKS - 1


def test_what_a_lazy_store_takes_from_the_free_queue_goes_back_where_it_was() -> None:
    scheduler = Scheduler(FULL, lazy_offload=True)
    scheduler.lazy.horizon_blocks = 0
    for name in ("a", "b"):
        request = scheduler.request(name, 100, cache_salt=name)
        scheduler.admit(request)
        scheduler.step(request)
        scheduler.finish(request)
    queue = scheduler.manager.block_pool.free_block_queue
    order = [block.block_id for block in queue.get_all_free_blocks()]
    scheduler.lazy.horizon_blocks = NUM_BLOCKS - 1 - 6  # all but the second one's
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
    """vLLM ends requests before it tells of the step: then this is the last chance."""
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


def test_a_rejected_draft_is_not_stored() -> None:
    """Confirmed is what was computed less what is in flight, and a rejection takes tokens back."""
    scheduler = Scheduler(FULL)
    request = scheduler.request("a", 30)
    scheduler.admit(request)
    scheduler.half.build(Step({"a": 34}))  # four drafts make block 2 full
    request.num_computed_tokens = 30
    scheduler.half.processed(KVConnectorOutput())
    jobs = scheduler.half.build(Step())
    (store,) = jobs.stores
    assert len(store.block_ids) == 1


def test_steps_in_flight_are_not_confirmed() -> None:
    scheduler = Scheduler(FULL)
    request = scheduler.request("a", 100)
    scheduler.admit(request)
    scheduler.half.build(Step({"a": 100}))
    request.num_computed_tokens, request.num_in_flight_tokens = 100, 100
    scheduler.half.processed(KVConnectorOutput())
    assert scheduler.half.transfers.jobs.stores == []
    request.num_in_flight_tokens = 0
    scheduler.half.processed(KVConnectorOutput())
    assert len(scheduler.half.transfers.jobs.stores) == 1


def test_a_draft_model_reads_one_block_less_of_a_hit() -> None:
    scheduler = Scheduler(FULL)
    scheduler.store_one()
    scheduler.half.loads.drops_last_block = True
    assert scheduler.half.lookup(scheduler.request("b", 100), 0) == 80


def test_what_is_no_multiple_of_the_block_size_is_not_looked_up() -> None:
    scheduler = Scheduler(FULL)
    scheduler.store_one()
    assert scheduler.half.lookup(scheduler.request("b", 100), 8) == 0
    blind = scheduler.request("c", 100)
    blind.skip_reading_prefix_cache = True
    assert scheduler.half.lookup(blind, 0) == 0


def test_every_block_that_is_copied_is_held() -> None:
    """Of a chain that the host has lost all is stored again, not only what was just computed."""
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


def test_a_preemption_forgets_and_the_next_admission_starts_over() -> None:
    scheduler = Scheduler(FULL)
    request = scheduler.request("a", 100)
    scheduler.admit(request)
    scheduler.step(request)
    scheduler.manager.free(request)
    request.num_computed_tokens = 0
    scheduler.jobs = scheduler.half.build(Step(preempted_req_ids={"a"}))
    (store,) = scheduler.jobs.stores
    assert not scheduler.half.requests.tracked
    scheduler.step(reports=[(store.job_id, 0, True)])
    scheduler.manager.reset_prefix_cache()
    assert scheduler.admit(request) == 96
    # Preempted before, admitted again in the same step: that is no new preemption.
    scheduler.half.build(Step(preempted_req_ids={"a"}))
    assert "a" in scheduler.half.requests.tracked


def test_blocks_that_a_transfer_alone_holds_are_worth_waiting_for() -> None:
    scheduler = Scheduler(FULL)
    request = scheduler.request("a", 100)
    scheduler.admit(request)
    scheduler.step(request)
    assert not scheduler.half.holds_freed_blocks()
    scheduler.finish(request)
    assert scheduler.half.holds_freed_blocks()


def test_nothing_is_left_of_a_request_that_never_ran() -> None:
    scheduler = Scheduler(FULL)
    scheduler.store_one()
    request = scheduler.request("b", 100)
    assert scheduler.half.lookup(request, 0) == 96
    scheduler.half.finished(request)
    offload = scheduler.half.offload
    assert offload is not None
    offload.check()
    assert not scheduler.half.requests.tracked


def test_jobs_name_plain_numbers_only() -> None:
    """They are pickled, in every step, for each worker process."""
    scheduler = Scheduler(FULL)
    request = scheduler.request("a", 100)
    scheduler.admit(request)
    scheduler.step(request)
    jobs = scheduler.half.build(Step())
    again = pickle.loads(pickle.dumps(jobs))
    assert again.stores[0].block_ids.tolist() == jobs.stores[0].block_ids.tolist()
    assert SimpleNamespace(**vars(again)).loads == []
