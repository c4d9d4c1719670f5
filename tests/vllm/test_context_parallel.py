"""Decode context parallelism: blocks, keys and hits are vLLM's, and each rank keeps its share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.vllm.halves import (
    BLOCK_SIZE,
    FULL,
    NUM_BLOCKS,
    PAGE_BYTES,
    WINDOW,
    Scheduler,
    cache_config,
    engine_config,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import (
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvstow import ConfigError
from kvstow.vllm import KVStowConnector
from kvstow.vllm.messages import StepReports
from kvstow.vllm.model import Model
from kvstow.vllm.options import Options
from kvstow.vllm.scheduler import SchedulerHalf
from kvstow.vllm.tier import HostTier
from kvstow.vllm.worker import WorkerHalf

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

if not hasattr(KVCacheSpec, "dcp_sharded"):
    pytest.skip("kvstow refuses context parallelism on this vLLM", allow_module_level=True)

DCP = 2
SPREAD = DCP * BLOCK_SIZE
MLA = MLAAttentionSpec(
    block_size=BLOCK_SIZE, num_kv_heads=1, max_tp_shards=1, head_size=8, dtype=FULL.dtype
)
# A group that every rank holds whole, as some indexers of sparse attention.
WHOLE = replace(FULL, dcp_sharded=False)


class Spread(Scheduler):
    """vLLM's accounting with decode context parallelism, and a worker half for each rank."""

    def __init__(self, *specs: Any) -> None:
        super().__init__(FULL)
        config = cache_config(*specs)
        self.manager = KVCacheManager(
            config,
            max_model_len=1 << 20,
            scheduler_block_size=SPREAD,
            hash_block_size=SPREAD if len(specs) == 1 else BLOCK_SIZE,
            max_in_flight_tokens=None,
            dcp_world_size=DCP,
        )
        self.unit = SPREAD if len(specs) == 1 else BLOCK_SIZE
        model = Model.of(config, DCP)
        tier = HostTier(
            replace(model, tokens_per_vllm_hash=self.unit),
            Options(),
            world_size=DCP,
            horizon_blocks=NUM_BLOCKS,
            clock=lambda: self.now,
        )
        self.half = SchedulerHalf(tier)
        self.half.bind(self.manager)
        self.half.create_tier(NUM_BLOCKS)
        self.devices, self.workers = [], []
        for rank in range(DCP):
            worker = WorkerHalf(
                model,
                Options(num_cpu_blocks=NUM_BLOCKS),
                rank=rank,
                world_size=DCP,
                num_local_ranks=DCP,
            )
            names = [str(at) for at in range(len(specs))]
            device = {name: torch.zeros(PAGE_BYTES * NUM_BLOCKS).byte() for name in names}
            worker.register(device)
            self.devices.append(device)
            self.workers.append(worker)

    def request(self, name: str, num_tokens: int, **settings: Any) -> Request:
        return Request(
            request_id=name,
            prompt_token_ids=list(range(num_tokens)),
            sampling_params=SamplingParams(max_tokens=8),
            pooling_params=None,
            block_hasher=get_request_block_hasher(self.unit, sha256_cbor),
            **settings,
        )

    def copy(self) -> None:
        """Let both ranks carry out the jobs of the last step."""
        meta = StepReports()
        for worker in self.workers:
            worker.bind(self.jobs if worker is self.workers[-1] else _copied(self.jobs))
            worker.begin("load")
            worker.begin("store")
            reports = worker.reports()
            meta = meta if reports is None else meta.aggregate(reports)
        self.half.processed(KVConnectorOutput(kv_connector_worker_meta=meta))

    def pages(self, rank: int, ids: list[int]) -> torch.Tensor:
        return self.devices[rank]["0"].view(NUM_BLOCKS, PAGE_BYTES)[ids]


def _copied(jobs: Any) -> Any:
    """Return the jobs with lists of their own, as vLLM sends them to another process."""
    return replace(jobs, loads=list(jobs.loads), stores=list(jobs.stores))


@pytest.mark.parametrize("spec", [FULL, MLA], ids=["full", "mla"])
@pytest.mark.parametrize("num_tokens", [31, 32, 33, 64, 65, 100, 129])
def test_hits_and_keys_are_those_of_vllm(spec: KVCacheSpec, num_tokens: int) -> None:
    scheduler = Spread(spec)
    request = scheduler.request("a", num_tokens)
    assert scheduler.admit(request) == 0
    scheduler.step(request)
    scheduler.finish(request)
    scheduler.step()
    stores = scheduler.jobs.stores
    ids = [block_id for copies in stores for block_id in copies.block_ids.tolist()]
    assert len(ids) == num_tokens // SPREAD == len(request.block_hashes)
    cached = scheduler.manager.block_pool.blocks
    for block_id, block_hash in zip(ids, request.block_hashes, strict=True):
        assert cached[block_id].block_hash == block_hash + bytes(4)
    scheduler.copy()
    # vLLM's own hit on the device, and then kvstow's, without it.
    own = scheduler.manager.get_computed_blocks(scheduler.request("b", num_tokens))[1]
    assert own == (num_tokens - 1) // SPREAD * SPREAD
    assert scheduler.manager.reset_prefix_cache()
    assert scheduler.half.lookup(scheduler.request("c", num_tokens), 0) == own


def test_each_rank_loads_its_own_share() -> None:
    scheduler = Spread(FULL)
    request = scheduler.request("a", 100)
    scheduler.admit(request)
    ids = [b.block_id for b in scheduler.manager.get_blocks("a").blocks[0]][: 100 // SPREAD]
    for rank in range(DCP):
        shares = torch.arange(NUM_BLOCKS)[:, None] + torch.arange(PAGE_BYTES)[None] + 100 * rank
        scheduler.devices[rank]["0"].copy_((shares % 251).byte().reshape(-1))
    before = [scheduler.pages(rank, ids).clone() for rank in range(DCP)]
    assert not before[0].equal(before[1])
    scheduler.step(request)
    scheduler.finish(request)
    scheduler.step()
    scheduler.copy()
    assert scheduler.manager.reset_prefix_cache()
    for device in scheduler.devices:
        device["0"].zero_()
    again = scheduler.request("b", 100)
    assert scheduler.admit(again) == 96
    targets = [b.block_id for b in scheduler.manager.get_blocks("b").blocks[0]][: 100 // SPREAD]
    scheduler.step()
    scheduler.copy()
    for rank in range(DCP):
        assert scheduler.pages(rank, targets).equal(before[rank])


def test_a_group_that_no_rank_divides_keeps_its_block_size() -> None:
    """A hit must fit both sizes, and vLLM says so, too."""
    scheduler = Spread(FULL, WHOLE)
    groups = scheduler.half.tier.model.groups
    assert [group.block_size for group in groups] == [SPREAD, BLOCK_SIZE]
    managers = scheduler.manager.coordinator.single_type_managers
    assert [manager.block_size for manager in managers] == [SPREAD, BLOCK_SIZE]
    for num_tokens in (63, 65, 100):
        name = f"r{num_tokens}"
        request = scheduler.request(name, num_tokens, cache_salt=name)
        assert scheduler.admit(request) == 0
        scheduler.step(request)
        scheduler.finish(request)
        scheduler.step()
        scheduler.copy()
        again = scheduler.request("again", num_tokens, cache_salt=name)
        own = scheduler.manager.get_computed_blocks(again)[1]
        assert scheduler.manager.reset_prefix_cache()
        assert scheduler.half.lookup(again, 0) == own == (num_tokens - 1) // SPREAD * SPREAD
        scheduler.half.finished(again)


def test_layers_of_several_sizes_in_a_group_are_spread() -> None:
    specs = {"0": MLA, "1": replace(MLA, head_size=16)}
    whole = UniformTypeKVCacheSpecs(block_size=BLOCK_SIZE, kv_cache_specs=specs)
    config = cache_config(MLA)
    config.kv_cache_groups[0] = replace(config.kv_cache_groups[0], kv_cache_spec=whole)
    model = Model.of(config, DCP)
    assert model.groups[0].block_size == SPREAD
    assert model.slot_bytes == MLA.page_size_bytes, "of this rank's share"


@pytest.mark.parametrize("kind", [MLA, WINDOW], ids=["mla", "window"])
def test_recurrent_state_is_refused(kind: KVCacheSpec) -> None:
    mamba = MambaSpec(
        block_size=BLOCK_SIZE, shapes=((8,),), dtypes=(torch.float32,), mamba_cache_mode="align"
    )
    with pytest.raises(
        ConfigError,
        match="--decode-context-parallel-size is 2, and KV cache group 1 is of kind MambaSpec",
    ):
        Model.of(cache_config(kind, mamba), DCP)


def test_the_connector_takes_vllms_size(folder: Path) -> None:
    config = engine_config(folder, {"num_cpu_blocks": 4})
    parallel = config.parallel_config
    parallel.tensor_parallel_size = parallel.world_size = DCP
    parallel.decode_context_parallel_size = DCP
    cache = cache_config(MLA)
    assert resolve_kv_cache_block_sizes(cache, config) == (SPREAD, SPREAD)
    half = KVStowConnector(config, KVConnectorRole.SCHEDULER, cache)._scheduler
    model = half.tier.model
    assert (model.tokens_per_hit, model.tokens_per_hash, model.tokens_per_vllm_hash) == (
        SPREAD,
        SPREAD,
        SPREAD,
    )
    worker = KVStowConnector(config, KVConnectorRole.WORKER, cache)._worker
    assert worker._model.slot_bytes == MLA.page_size_bytes
    assert worker._replicas is None


def test_prefill_context_parallelism_changes_no_block(folder: Path) -> None:
    """Each rank holds the KV of all tokens, and stores and loads it for itself."""
    config = engine_config(folder, {"num_cpu_blocks": 4})
    config.parallel_config.prefill_context_parallel_size = DCP
    config.parallel_config.world_size = DCP
    half = KVStowConnector(config, KVConnectorRole.SCHEDULER, cache_config(MLA))._scheduler
    assert half.tier.model.groups[0].block_size == BLOCK_SIZE
    assert half.tier.world_size == DCP
