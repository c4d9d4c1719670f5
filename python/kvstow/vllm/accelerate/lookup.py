"""Prefix lookup of full attention, with one dictionary access per block instead of four calls.

How a hit could be wrong, and what guards: another index or another `get_cached_block` may find
other blocks, so the classes must match exactly. Lookups inside blocks, and blocks that are spread
over ranks, stay with vLLM's code.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from vllm.v1.core.block_pool import BlockHashToBlockMap, BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock, resolve_block_hashes
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvstow.vllm.accelerate.patch import Patch


def _faster_find(vllm_find: Callable[..., Any]) -> Callable[..., Any]:
    def find_longest_cache_hit(  # noqa: PLR0913, PLR0917 - vLLM's parameters
        cls: type,
        block_hashes: Any,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: Any,
        kv_cache_spec: Any,
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> tuple[tuple[list[Any], ...], int]:
        index = block_pool.cached_block_hash_to_block
        if (
            cls is not FullAttentionManager
            or dcp_world_size != 1
            or type(block_pool) is not BlockPool
            or type(index) is not BlockHashToBlockMap
            or not isinstance(kv_cache_spec, FullAttentionSpec)
            or alignment_tokens % kv_cache_spec.block_size
        ):
            return vllm_find(  # type: ignore[no-any-return]
                cls,
                block_hashes,
                max_length,
                kv_cache_group_ids,
                block_pool,
                kv_cache_spec,
                drop_eagle_block,
                alignment_tokens,
                dcp_world_size,
                pcp_world_size,
            )
        block_size = kv_cache_spec.block_size
        hashes = resolve_block_hashes(block_hashes, block_pool.hash_block_size, block_size)
        hashes = itertools.islice(hashes, max_length // block_size)
        found = _run(index._cache, hashes, kv_cache_group_ids)
        hit_length = len(found[0]) * block_size
        if drop_eagle_block and hit_length > 0:
            hit_length -= block_size
        hit_length -= hit_length % alignment_tokens
        for blocks in found:
            del blocks[hit_length // block_size :]
        return found, hit_length

    return find_longest_cache_hit


def _run(index: dict[bytes, Any], hashes: Any, group_ids: list[int]) -> tuple[list[Any], ...]:
    """Return for each group the blocks of the longest prefix that all groups have."""
    found: tuple[list[Any], ...] = tuple([] for _ in group_ids)
    keys = [group_id.to_bytes(4, "big") for group_id in group_ids]
    if len(keys) == 1:
        [key], [blocks], get = keys, found, index.get
        for block_hash in hashes:
            block = get(block_hash + key)
            if type(block) is not KVCacheBlock:
                if block is None:
                    break
                block = _first(block)
            blocks.append(block)
        return found
    for block_hash in hashes:
        row: list[Any] = [index.get(block_hash + key) for key in keys]
        if any(block is None for block in row):
            break
        for blocks, block in zip(found, row, strict=True):
            blocks.append(block if type(block) is KVCacheBlock else _first(block))
    return found


def _first(duplicates: dict[int, Any]) -> Any:
    """Return the block that vLLM takes of several with one key."""
    return next(iter(duplicates.values()))


PATCH = Patch(
    what="prefix lookup",
    replacements={
        "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager.find_longest_cache_hit": (
            _faster_find
        )
    },
    reads={
        "vllm.v1.core.single_type_kv_cache_manager": (
            "FullAttentionManager.find_longest_cache_hit",
        ),
        "vllm.v1.core.block_pool": (
            "BlockPool.get_cached_block",
            "BlockHashToBlockMap.get_one_block",
            "BlockHashToBlockMap.insert",
        ),
        "vllm.v1.core.kv_cache_utils": ("make_block_hash_with_group_id", "resolve_block_hashes"),
    },
    known={
        "74a84e7ffa2780ef988696d6c58812557ffe5b3eb536c902d44060244e95056d": "0.30",
        "8248730c2e2e9273ace4365c60f0788de69c9bdb0502a38b743f0fc4e831aeee": "0.31, 0.32, 0.33",
    },
)
