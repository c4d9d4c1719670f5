"""Both halves of the connector without an engine.

`Scheduler` runs the scheduler half beside vLLM's real accounting. `stage` makes the memory of a
worker.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.vllm.setting import CONNECTOR
from tests.vllm.versions import planning
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
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
from vllm.v1.request import Request

from kvstow.vllm import KVStowConnector
from kvstow.vllm.lazy_queue import LazyQueue
from kvstow.vllm.messages import Copies, StepJobs, StepReports
from kvstow.vllm.model import Model
from kvstow.vllm.options import Options
from kvstow.vllm.scheduler import SchedulerHalf
from kvstow.vllm.tier import HostTier

BLOCK_SIZE = 16
NUM_BLOCKS = 64
FULL = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32)
WINDOW = SlidingWindowSpec(
    block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=32
)
PAGE_BYTES = FULL.page_size_bytes
STATE = MambaSpec(
    block_size=BLOCK_SIZE,
    shapes=((8,),),
    dtypes=(torch.float32,),
    page_size_padded=PAGE_BYTES,
    mamba_cache_mode="align",
)


def cache_config(
    *specs: Any, num_blocks: int = NUM_BLOCKS, retention: int | None = 0
) -> KVCacheConfig:
    """Return groups of one layer each in one allocation, as vLLM lays hybrids out."""
    size = PAGE_BYTES * num_blocks
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[
            KVCacheTensor(size, [str(at)], layer_stride=size, block_stride=PAGE_BYTES)
            for at in range(len(specs))
        ],
        kv_cache_groups=[KVCacheGroupSpec([str(at)], spec) for at, spec in enumerate(specs)],
        prefix_cache_retention_interval=retention,  # vLLM's default: 0
    )


def engine_config(folder: Path, options: dict[str, Any], **settings: Any) -> Any:
    """Return the configuration of an engine with the connector."""
    defaults = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "block_size": BLOCK_SIZE,
        "kv_transfer_config": CONNECTOR | {"kv_connector_extra_config": options},
    }
    return EngineArgs(**(defaults | settings)).create_engine_config()


def own_part(connector: Any) -> KVStowConnector:
    """Return kvstow's connector, which is alone or in a `MultiConnector`."""
    parts = getattr(connector, "sub_connectors", [connector])
    (own,) = (part for part in parts if isinstance(part, KVStowConnector))
    return own


@dataclass
class Step:
    """The part of vLLM's `SchedulerOutput` that the connector reads."""

    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    preempted_req_ids: set[str] = field(default_factory=set)

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


class Scheduler:
    """The calls of vLLM's scheduler, over its real `KVCacheManager`."""

    def __init__(
        self,
        *specs: Any,
        world_size: int = 1,
        num_host_blocks: int | None = NUM_BLOCKS,
        retention: int | None = 0,
        draft_groups: Sequence[int] | None = None,
        num_modules: int = 1,
        gathered_tokens: int = 0,
        num_blocks: int = NUM_BLOCKS,
        **options: Any,
    ) -> None:
        """With `num_host_blocks` None the test reports the ranks' capacities.

        With `draft_groups` a draft model of so many modules computes these groups; with an empty
        list vLLM does not know which.
        """
        init_none_hash(sha256_cbor)
        config = cache_config(*specs, num_blocks=num_blocks, retention=retention)
        for group in draft_groups or ():
            config.kv_cache_groups[group].is_eagle_group = True
        sizes = [spec.block_size for spec in specs]
        self.tokens_per_hash = math.gcd(*sizes)
        self.manager = KVCacheManager(
            config,
            max_model_len=1 << 20,
            scheduler_block_size=math.lcm(*sizes),
            hash_block_size=self.tokens_per_hash,
            max_in_flight_tokens=None,
            use_eagle=draft_groups is not None,
            num_prefill_lookahead=0 if draft_groups is None else num_modules,
        )
        self.now = 0.0
        tier = HostTier(
            replace(Model.of(config), tokens_per_vllm_hash=self.tokens_per_hash),
            Options(**options),
            world_size=world_size,
            horizon_blocks=NUM_BLOCKS,
            clock=lambda: self.now,
        )
        self.half = SchedulerHalf(tier)
        # Else most tests would not see that the tier is off. See `let_go_off`.
        self.half._turn_off = reraise  # type: ignore[method-assign]
        self.half.bind(self.manager)
        tier.gathered_tokens = gathered_tokens
        if num_host_blocks is not None:
            self.half.create_tier(num_host_blocks)
        self.jobs = StepJobs()

    def let_go_off(self) -> None:
        """Let an error turn the tier off, as in a server. Without this call it ends the test."""
        del self.half._turn_off

    @property
    def lazy(self) -> LazyQueue:
        assert self.half.tier.lazy is not None
        return self.half.tier.lazy

    def request(
        self, name: str, num_tokens: int, *, num_shared: int | None = None, **settings: Any
    ) -> Request:
        """Return a request whose first `num_shared` tokens (by default all) others have, too."""
        shared = list(range(num_tokens))[:num_shared]
        own = [1000 + ord(name[-1])] * (num_tokens - len(shared))
        return Request(
            request_id=name,
            prompt_token_ids=shared + own,
            sampling_params=SamplingParams(max_tokens=8),
            pooling_params=None,
            block_hasher=get_request_block_hasher(self.tokens_per_hash, sha256_cbor),
            **settings,
        )

    def look_up(self, request: Request) -> tuple[KVCacheBlocks, int, int | None]:
        """Return the hit on the device, its tokens, and the tokens to load; None: ask again."""
        hit, num_local, boundary = self.manager.get_computed_blocks(request)
        request.shared_prefix_boundary = boundary
        return hit, num_local, self.half.lookup(request, num_local)

    def admit(self, request: Request) -> int:
        """Admit a request, and return the tokens to load."""
        hit, num_local, found = self.look_up(request)
        assert found is not None
        self.allocate(request, hit, num_local, found)
        return found

    def allocate(self, request: Request, hit: KVCacheBlocks, num_local: int, found: int) -> None:
        """Give a request its blocks after a lookup, all of them unless it loads."""
        num_new = 0 if found else request.num_tokens - num_local
        allocated = self.manager.allocate_slots(
            request,
            num_new,
            num_new_computed_tokens=num_local,
            new_computed_blocks=hit,
            num_external_computed_tokens=found,
            delay_cache_blocks=found > 0,
        )
        assert allocated is not None
        self.half.allocated(request, self.manager.get_blocks(request.request_id), found)
        request.num_computed_tokens = num_local + found

    def resume(self, request: Request) -> None:
        """Give a request whose load has landed the rest of its blocks."""
        self.manager.cache_blocks(request, request.num_computed_tokens)
        self.half.allocated(request, self.manager.get_blocks(request.request_id), 0)
        self.manager.allocate_slots(request, request.num_tokens - request.num_computed_tokens)

    def step(
        self,
        *requests: Request,
        reports: Sequence[tuple[int, int, bool]] = (),
        released: Sequence[int] = (),
    ) -> set[str]:
        """Compute the rest of these requests, and return the requests whose loads have landed."""
        scheduled = {r.request_id: r.num_tokens - r.num_computed_tokens for r in requests}
        self.jobs = self.half.build(Step(scheduled))
        for request in requests:
            request.num_computed_tokens = request.num_tokens
        meta = StepReports(list(reports), list(released))
        output = KVConnectorOutput(kv_connector_worker_meta=meta)
        self.half.processed(output)
        return output.finished_recving or set()

    def finish(self, request: Request) -> None:
        # vLLM first frees what is out of a window.
        num_processed = request.num_computed_tokens - request.num_in_flight_tokens
        self.manager.remove_skipped_blocks(request.request_id, num_processed)
        self.half.finished(request)
        self.manager.free(request)

    def begin_store(self, request: Request) -> Copies:
        """Compute and finish a request, and return the store of its blocks, which is under way."""
        self.admit(request)
        self.step(request)
        self.finish(request)
        self.step()
        (store,) = self.jobs.stores
        return store

    def store_request(self, name: str = "a", num_tokens: int = 100, **settings: Any) -> None:
        """Compute and store a request, and drop it from the device."""
        assert self.serve(self.request(name, num_tokens, **settings)) == 0
        assert self.manager.reset_prefix_cache()

    def serve(self, request: Request) -> int:
        """Load, compute and store a request, and return the tokens that were loaded."""
        found = self.admit(request)
        if found:
            self.step()
            self.step(reports=[(copies.job_id, 0, True) for copies in self.jobs.loads])
            self.resume(request)
        self.step(request)
        self.finish(request)
        self.step()
        self.step(reports=[(copies.job_id, 0, True) for copies in self.jobs.stores])
        return found


def reraise() -> None:
    """Raise the error that is being handled."""
    error = sys.exc_info()[1]
    assert error is not None
    raise error


def stage(*layers: str) -> tuple[KVCacheConfig, dict[str, torch.Tensor]]:
    """Return a pipeline stage with these layers of a hybrid, projected by vLLM's own function."""
    specs = {"f0": FULL, "f1": FULL, "w0": WINDOW, "w1": WINDOW}
    groups = [KVCacheGroupSpec(["f0", "f1"], FULL), KVCacheGroupSpec(["w0", "w1"], WINDOW)]
    own = planning._project_kv_cache_groups_to_worker(
        groups, {name: specs[name] for name in layers}
    )
    assert len(own) == 2, "vLLM keeps groups without layers"
    size = PAGE_BYTES * NUM_BLOCKS
    tensors = [KVCacheTensor(size, [name], size, PAGE_BYTES) for name in layers]
    caches = {name: torch.zeros(size, dtype=torch.uint8) for name in layers}
    return KVCacheConfig(NUM_BLOCKS, tensors, own, prefix_cache_retention_interval=0), caches


def copies(job_id: int, blocks: list[int], slots: list[int], offsets: list[int]) -> Copies:
    return Copies(job_id, *(np.array(ids, dtype=np.int32) for ids in (blocks, slots, offsets)))
