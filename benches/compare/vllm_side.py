"""vLLM's own accounting, built as its scheduler builds it, without engine or model."""

import dataclasses
import functools
import os
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Protocol

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheTensor
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request
from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler
from vllm.v1.simple_kv_offload.metadata import (
    SimpleCPUOffloadMetadata,
    SimpleCPUOffloadWorkerMetadata,
)

from kvstow import FullAttention, SlidingWindow
from kvstow.vllm.bench_side import MAX_MODEL_TOKENS, block_ids, cache_config, manager

__all__ = [
    "BlockPool",
    "Group",
    "KVCacheManager",
    "KVConnectorOutput",
    "Request",
    "SchedulerOutput",
    "SimpleCPUOffloadMetadata",
    "SimpleCPUOffloadScheduler",
    "block_ids",
    "cache_config",
    "free_order",
    "loaded",
    "manager",
    "num_resident",
    "offload",
    "step",
    "stored",
]

Group = FullAttention | SlidingWindow


class HasId(Protocol):
    block_id: int


def request(request_id: str, num_tokens: int, block_size: int) -> Request:
    """Return a request whose prompt shares no prefix with that of another id."""
    draw = random.Random(request_id)
    tokens = [draw.randrange(128_000) for _ in range(num_tokens)]
    params = SamplingParams(max_tokens=MAX_MODEL_TOKENS)
    return Request(request_id, tokens, params, None, block_hasher=_hasher(block_size))


def offload(
    manager: KVCacheManager, num_host_blocks: int, groups: Sequence[Group]
) -> SimpleCPUOffloadScheduler:
    """Return the scheduler half of vLLM's host tier, for one rank, eager, without events.

    The configuration has only what this half reads.
    """
    num_blocks = manager.block_pool.num_gpu_blocks
    # vLLM sizes the host pool by the bytes of a block: let a block have one byte.
    tensors = [KVCacheTensor(num_blocks, [], layer_stride=0, block_stride=1)]
    block_size = groups[0].block_size
    made = SimpleCPUOffloadScheduler(
        SimpleNamespace(
            kv_events_config=None,
            parallel_config=SimpleNamespace(decode_context_parallel_size=1, world_size=1),
            speculative_config=None,
            model_config=SimpleNamespace(max_model_len=MAX_MODEL_TOKENS),
            max_in_flight_tokens=MAX_MODEL_TOKENS,
            num_prefill_lookahead_tokens=0,
        ),
        dataclasses.replace(cache_config(num_blocks, groups), kv_cache_tensors=tensors),
        cpu_capacity_bytes=num_host_blocks,
        scheduler_block_size=block_size,
        hash_block_size=block_size,
    )
    made.bind_gpu_block_pool(manager.block_pool)
    return made


def step(
    new: Sequence[tuple[Request, tuple[list[int], ...]]] = (),
    running: Sequence[tuple[Request, tuple[list[int], ...] | None]] = (),
    num_tokens: int = 1,
) -> SchedulerOutput:
    """Return vLLM's description of a step: requests, each with its new block ids.

    Each request computes `num_tokens` in the step.
    """
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = [NewRequestData.from_request(each, ids) for each, ids in new]
    requests = [request for request, _ in running]
    output.scheduled_cached_reqs = CachedRequestData(
        req_ids=[request.request_id for request in requests],
        resumed_req_ids=set(),
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[ids for _, ids in running],
        num_computed_tokens=[request.num_computed_tokens for request in requests],
        num_output_tokens=[request.num_output_tokens for request in requests],
    )
    names = [request.request_id for request in [each for each, _ in new] + requests]
    output.num_scheduled_tokens = dict.fromkeys(names, num_tokens)
    output.total_num_scheduled_tokens = num_tokens * len(names)
    return output


def num_resident(offload: SimpleCPUOffloadScheduler) -> int:
    """Return the number of blocks that a lookup can find on the host."""
    return len(offload.cpu_block_pool.cached_block_hash_to_block)


def stored(meta: SimpleCPUOffloadMetadata) -> KVConnectorOutput:
    """Return the worker's report that a step's stores have landed."""
    events = SimpleCPUOffloadWorkerMetadata({meta.store_event: 1})
    return KVConnectorOutput(kv_connector_worker_meta=events)


def loaded(request: Request) -> KVConnectorOutput:
    """Return the worker's report that a request's load has landed."""
    return KVConnectorOutput(finished_recving={request.request_id})


def free_order(manager: KVCacheManager) -> list[int]:
    return _ids(manager.block_pool.free_block_queue.get_all_free_blocks())


def _ids(blocks: Sequence[HasId]) -> list[int]:
    return [block.block_id for block in blocks]


@functools.cache
def _hasher(block_size: int) -> Callable[[Request], list[bytes]]:
    init_none_hash(sha256_cbor)
    made: Callable[[Request], list[bytes]] = get_request_block_hasher(block_size, sha256_cbor)
    return made
