"""vLLM's own accounting, built as its scheduler builds it, without engine or model."""

import functools
import os
import random
from collections.abc import Callable, Sequence
from typing import Protocol

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from kvstow import FullAttention, SlidingWindow

__all__ = ["BlockPool", "Group", "KVCacheManager", "Request", "block_ids", "free_order", "manager"]

Group = FullAttention | SlidingWindow

MAX_MODEL_TOKENS = 1 << 20


class HasId(Protocol):
    block_id: int


def request(request_id: str, num_tokens: int, block_size: int) -> Request:
    """A request whose prompt shares no prefix with another id's."""
    draw = random.Random(request_id)
    tokens = [draw.randrange(128_000) for _ in range(num_tokens)]
    params = SamplingParams(max_tokens=MAX_MODEL_TOKENS)
    return Request(request_id, tokens, params, None, block_hasher=_hasher(block_size))


def manager(num_blocks: int, groups: Sequence[Group]) -> KVCacheManager:
    """A manager of groups of one block size, prefix caching on, events and statistics off."""
    block_size = groups[0].block_size
    specs = [KVCacheGroupSpec([str(at)], _spec(group)) for at, group in enumerate(groups)]
    return KVCacheManager(
        KVCacheConfig(num_blocks, [], specs, prefix_cache_retention_interval=None),
        max_model_len=MAX_MODEL_TOKENS,
        scheduler_block_size=block_size,
        hash_block_size=block_size,
    )


def block_ids(blocks: KVCacheBlocks) -> list[int]:
    """Of all groups, one after the other."""
    return [id for group in blocks.blocks for id in _ids(group)]


def free_order(manager: KVCacheManager) -> list[int]:
    return _ids(manager.block_pool.free_block_queue.get_all_free_blocks())


def _ids(blocks: Sequence[HasId]) -> list[int]:
    return [block.block_id for block in blocks]


def _spec(group: Group) -> KVCacheSpec:
    sizes = {"block_size": group.block_size, "num_kv_heads": 8, "head_size": 128}
    if isinstance(group, SlidingWindow):
        return SlidingWindowSpec(**sizes, dtype=torch.bfloat16, sliding_window=group.window)
    return FullAttentionSpec(**sizes, dtype=torch.bfloat16)


@functools.cache
def _hasher(block_size: int) -> Callable[[Request], list[bytes]]:
    init_none_hash(sha256_cbor)
    made: Callable[[Request], list[bytes]] = get_request_block_hasher(block_size, sha256_cbor)
    return made
