"""vLLM's own accounting of blocks, without engine or model, for benchmarks beside kvstow's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from kvstow import FullAttention, SlidingWindow

MAX_MODEL_TOKENS: Final = 1 << 20


def manager(num_blocks: int, groups: Sequence[FullAttention | SlidingWindow]) -> KVCacheManager:
    """Return a manager of groups of one block size, with prefix caching, without events."""
    block_size = groups[0].block_size
    return KVCacheManager(
        cache_config(num_blocks, groups),
        max_model_len=MAX_MODEL_TOKENS,
        scheduler_block_size=block_size,
        hash_block_size=block_size,
    )


def cache_config(num_blocks: int, groups: Sequence[FullAttention | SlidingWindow]) -> KVCacheConfig:
    """Return vLLM's description of such a pool. vLLM keeps all windows."""
    specs = [KVCacheGroupSpec([str(at)], _spec(group)) for at, group in enumerate(groups)]
    return KVCacheConfig(num_blocks, [], specs, prefix_cache_retention_interval=None)


def block_ids(blocks: KVCacheBlocks) -> list[int]:
    """Return the block ids of all groups, group by group."""
    return [block.block_id for group in blocks.blocks for block in group]


def _spec(group: FullAttention | SlidingWindow) -> KVCacheSpec:
    sizes = {"block_size": group.block_size, "num_kv_heads": 8, "head_size": 128}
    if isinstance(group, SlidingWindow):
        return SlidingWindowSpec(**sizes, dtype=torch.bfloat16, sliding_window=group.window)
    return FullAttentionSpec(**sizes, dtype=torch.bfloat16)


class VllmSide:
    """vLLM's `KVCacheManager`, called as its scheduler calls it. A side of `kvstow bench`."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        hashes: Sequence[Sequence[bytes]],
        lengths: Sequence[int],
    ) -> None:
        self._manager = manager(num_blocks, [FullAttention(block_size)])
        params = SamplingParams(max_tokens=MAX_MODEL_TOKENS)
        self._requests = [
            Request(str(number), [0] * length, params, None)
            for number, length in enumerate(lengths)
        ]
        for request, own in zip(self._requests, hashes, strict=True):
            request.block_hashes = list(own)

    def admit(self, request: int, num_tokens: int) -> None:
        """Allocate the slots of a request's tokens."""
        self._manager.allocate_slots(self._requests[request], num_tokens)

    def look_up(self, request: int) -> list[int]:
        """Return the ids of the blocks that a prompt finds."""
        return block_ids(self._manager.get_computed_blocks(self._requests[request])[0])

    def free(self, request: int) -> None:
        """Free a request's blocks."""
        self._manager.free(self._requests[request])

    def sample(self) -> None:
        """Count the tokens of the last step as computed, and append one to each request."""
        for request in self._requests:
            request.num_computed_tokens = request.num_tokens
            request.append_output_token_ids(0)

    def step(self) -> None:
        """Allocate a slot for each request's next token."""
        for request in self._requests:
            self._manager.allocate_slots(request, 1)

    def table(self, request: int) -> list[int]:
        """Return a request's block ids."""
        return block_ids(self._manager.get_blocks(str(request)))
