"""An early exit from allocations that change nothing, which most of a decode step's are.

`KVCacheManager.allocate_slots` changes something if a group needs a block, if a block is full and
not cached yet, or if a block has left a sliding window. Otherwise vLLM walks all groups four times
and returns no blocks. `_changes_nothing` finds this out in one walk. It reads the state that vLLM's
walks read, and keeps none of it.

How an early exit could be wrong, and what guards:

- Other kinds of groups do more at each call (recurrent states, circular buffers, drafts that
  re-prefill, tails of blocks with hashes of their own): `_plan` requires the two plain managers,
  exactly, and neither drafts with a KV cache of their own nor partial hits.
- vLLM withholds blocks from requests that it admits (`watermark`): only running requests count.
- A request without blocks, a hit to adopt, a load to wait for, any further argument: vLLM's code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator, UnitaryKVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SlidingWindowManager
from vllm.v1.request import RequestStatus

from kvstow.vllm.accelerate.patch import Patch

# vLLM's manager of a group, its block size, and the tokens that its window retains (None: all).
Group: TypeAlias = tuple[Any, int, int | None]


class Plan(NamedTuple):
    """What an early exit must know of a `KVCacheManager`, which never changes.

    Attributes:
        managers: vLLM's managers that the plan is of.
        groups: None if each call must reach vLLM's code.
        alignment: vLLM caches blocks up to a multiple of this number of tokens.
    """

    managers: Any
    groups: tuple[Group, ...] | None
    alignment: int


def _faster_allocate(vllm_allocate: Callable[..., Any]) -> Callable[..., Any]:
    def allocate_slots(  # noqa: PLR0913, PLR0917 - vLLM's parameters
        self: Any,
        request: Any,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: Any = None,
        num_lookahead_tokens: int = 0,
        *more: Any,
        **named: Any,
    ) -> Any:
        if (
            new_computed_blocks is None
            and num_new_tokens > 0
            and not (num_new_computed_tokens or more or named)
            and _changes_nothing(self, request, num_new_tokens, num_lookahead_tokens)
        ):
            return self.empty_kv_cache_blocks
        return vllm_allocate(
            self,
            request,
            num_new_tokens,
            num_new_computed_tokens,
            new_computed_blocks,
            num_lookahead_tokens,
            *more,
            **named,
        )

    return allocate_slots


def _changes_nothing(manager: Any, request: Any, num_new: int, num_lookahead: int) -> bool:
    # Comparisons instead of `min`, because this runs for each request in each step.
    try:
        managers, groups, alignment = manager._kvstow_plan
    except AttributeError:
        managers, groups, alignment = _plan(manager)
    if managers is not manager.coordinator.single_type_managers:
        managers, groups, alignment = _plan(manager)
    if groups is None or (manager.watermark_blocks and request.status is not RequestStatus.RUNNING):
        return False
    max_tokens = manager.max_model_len
    num_computed = request.num_computed_tokens
    if num_computed > max_tokens:  # noqa: PLR1730
        num_computed = max_tokens
    num_final = num_computed + num_new
    num_slots = num_final + num_lookahead
    if num_slots > max_tokens:  # noqa: PLR1730
        num_slots = max_tokens
    num_tokens = len(request._all_token_ids)  # as `num_tokens`, without its call
    if num_final > num_tokens:  # noqa: PLR1730
        num_final = num_tokens
    num_final -= num_final % alignment
    name = request.request_id
    for group, block_size, window in groups:
        blocks = group.req_to_blocks.get(name)
        if (
            not blocks
            or num_slots > len(blocks) * block_size
            or group.num_cached_block.get(name, 0) < num_final // block_size
            or group._partial_hit_reqs
        ):
            return False
        if window is not None:
            num_processed = num_computed - request.num_in_flight_tokens
            num_skipped = (num_processed - window) // block_size
            if num_skipped > len(blocks):  # noqa: PLR1730
                num_skipped = len(blocks)
            if num_skipped > 0 and blocks[num_skipped - 1] is not group._null_block:
                return False
    return True


def _faster_cache(vllm_cache: Callable[..., None]) -> Callable[..., None]:
    def cache_blocks(self: Any, request: Any, num_computed_tokens: int) -> None:
        _, groups, alignment = _plan(self)
        if groups is not None:
            num_final = num_computed_tokens - num_computed_tokens % alignment
            name = request.request_id
            if all(
                group.num_cached_block.get(name, 0) >= num_final // block_size
                for group, block_size, _ in groups
            ):
                return
        vllm_cache(self, request, num_computed_tokens)

    return cache_blocks


def _plan(manager: Any) -> Plan:
    """Return the manager's plan, which it keeps as an attribute."""
    plan: Plan | None = getattr(manager, "_kvstow_plan", None)
    if plan is None or plan[0] is not manager.coordinator.single_type_managers:
        plan = _make_plan(manager)
        manager._kvstow_plan = plan
    return plan


def _make_plan(manager: Any) -> Plan:
    coordinator = manager.coordinator
    managers = coordinator.single_type_managers
    is_hybrid = type(coordinator) is HybridKVCacheCoordinator
    if (
        type(manager) is not KVCacheManager
        or not (is_hybrid or type(coordinator) is UnitaryKVCacheCoordinator)
        or coordinator.eagle_group_ids
        or coordinator.num_reprefillable_tokens
        or coordinator.enable_partial_hash_hits
    ):
        return Plan(managers, None, 1)
    groups = []
    for group in managers:
        is_window = type(group) is SlidingWindowManager
        if not (is_window or type(group) is FullAttentionManager) or not group.enable_caching:
            return Plan(managers, None, 1)
        # With hashes of part of a block, vLLM also caches the tail of a prompt.
        if not is_window and group.block_size != group.block_pool.hash_block_size:
            return Plan(managers, None, 1)
        window = group.sliding_window + group.extra_retained_tokens - 1 if is_window else None
        groups.append((group, group.block_size, window))
    return Plan(managers, tuple(groups), coordinator.scheduler_block_size if is_hybrid else 1)


PATCH = Patch(
    what="allocation of slots",
    replacements={
        "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots": _faster_allocate,
        "vllm.v1.core.kv_cache_manager:KVCacheManager.cache_blocks": _faster_cache,
    },
    reads={
        "vllm.v1.core.kv_cache_manager": (
            "KVCacheManager.allocate_slots",
            "KVCacheManager.cache_blocks",
            "KVCacheManager.create_kv_cache_blocks",
        ),
        "vllm.v1.core.kv_cache_coordinator": (
            "replay_boundaries",
            "KVCacheCoordinator.get_num_blocks_to_allocate",
            "KVCacheCoordinator.allocate_new_blocks",
            "KVCacheCoordinator.cache_blocks",
            "KVCacheCoordinator.remove_skipped_blocks",
            "KVCacheCoordinator.get_num_cacheable_tokens",
            "HybridKVCacheCoordinator.get_num_cacheable_tokens",
            "HybridKVCacheCoordinator.cache_blocks",
            "HybridKVCacheCoordinator._align_cacheable",
        ),
        "vllm.v1.core.single_type_kv_cache_manager": (
            "SingleTypeKVCacheManager.get_num_blocks_to_allocate",
            "SingleTypeKVCacheManager.allocate_new_blocks",
            "SingleTypeKVCacheManager.cache_blocks",
            "SingleTypeKVCacheManager.remove_skipped_blocks",
            "SingleTypeKVCacheManager._remove_blocks_in_range",
            "SingleTypeKVCacheManager.get_num_skipped_tokens",
            "FullAttentionManager.cache_blocks",
            "FullAttentionManager.remove_skipped_blocks",
            "SlidingWindowManager.cache_blocks",
            "SlidingWindowManager.remove_skipped_blocks",
            "SlidingWindowManager.get_num_skipped_tokens",
        ),
    },
    known={
        "5146df7c77c8183f75a4a8bc0b7fa861d202fbeee6c9545cd8779a0deef46216": "0.30",
        "a4edbfe9d40b2b6f7eee37b0ae110d94d30f7dff69473aefef5a34b97677188f": "0.31",
        "25dcee9963ed45cec761ec06439c825f7969f769b21d149bc338711461155b36": "0.32",
        "13b4c20763414fd8060dd1dd704538b4f08cc368a711da1c7df5998a71d3eea9": "0.33",
    },
)
