"""Lookups in the host tier, and the loads of what vLLM accepts of a hit."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request, RequestStatus

from kvstow import KvstowError
from kvstow.vllm.adapters import Adapters
from kvstow.vllm.below.lower_tier import LowerTier
from kvstow.vllm.requests import Requests
from kvstow.vllm.tier import HostTier
from kvstow.vllm.tracked import TrackedRequest
from kvstow.vllm.transfers import Transfers

logger = logging.getLogger("vllm." + __name__)

# vLLM may refuse a load for this long though nothing is in its way. Then the request computes.
MAX_REFUSED_S = 1.0


@dataclass
class Loads:
    """Answers vLLM's lookups, and plans loads.

    Attributes:
        adapters: what changed under a name that hashes have.
        sees_all_blocks: whether `Stores` must see each block of a request, loaded ones too.
    """

    tier: HostTier
    requests: Requests
    transfers: Transfers
    adapters: Adapters
    sees_all_blocks: bool

    def lookup(self, request: Request, num_local_tokens: int) -> int | None:
        """Return the tokens after the local hit that the host can serve; None: ask again later."""
        tracked = self.requests.tracked.get(request.request_id)
        if tracked is not None and tracked.is_admitted:
            # vLLM preempted it, or its load has failed: it starts over.
            tracked = self.requests.start_over(request.request_id, recompute=tracked.is_loading)
        elif tracked is None:
            tracked = self.requests.track(request)
        elif self._is_refused(tracked):
            tracked.recompute = True
        tracked.num_local_tokens = num_local_tokens
        # Also for a request that loads nothing: its blocks are stored.
        has_changed = self.adapters.has_changed(request, self.requests.tracked.values())
        offload, model = self.tier.offload, self.tier.model
        if offload is None:
            # The first step brings the ranks' capacities. vLLM steps while a request waits.
            must_wait = not request.skip_reading_prefix_cache and self.tier.is_awaited()
            return None if must_wait else 0
        new_hashes = tracked.new_hashes(offload, request.num_tokens)
        if new_hashes:
            offload.extend(request.request_id, new_hashes)
        if (
            tracked.recompute
            or request.skip_reading_prefix_cache
            or num_local_tokens % model.tokens_per_hit
            or has_changed
            or _is_new_chunk_of_preempted(request)
        ):
            offload.release(request.request_id)
            return 0
        # At least one token is left to compute.
        end = min(request.num_tokens - 1, num_local_tokens + tracked.max_load_tokens)
        if self.tier.below is None:
            found = offload.lookup(request.request_id, num_local_tokens, end)
        else:
            found = self._lookup_below(self.tier.below, tracked, end)
        if not (found and _has_taken_answer(request) and self._is_idle()):
            tracked.offered_since = None
        elif tracked.offered_since is None:
            tracked.offered_since = self.tier.clock()
        if found is not None and end == request.num_tokens - 1 and any(model.is_window):
            # Where prompts part, vLLM keeps what a later hit needs of a window or a state, but only
            # as far as the device holds the prefix. The host may hold more of it.
            shared = offload.full_attention_hit(request.request_id)
            if shared > num_local_tokens + found:
                request.shared_prefix_boundary = max(request.shared_prefix_boundary, shared)
        return found

    def _lookup_below(self, below: LowerTier, tracked: TrackedRequest, end: int) -> int | None:
        """Look up a prefix on the host and below, for which the request waits for a while."""
        now, until = self.tier.clock(), tracked.promote_until
        may_wait = until is None or now < until
        found = below.lookup(tracked.request, tracked.num_local_tokens, end, may_wait=may_wait)
        if found is None and until is None:
            tracked.promote_until = now + self.tier.options.promote_timeout_s
        return found

    def _is_refused(self, tracked: TrackedRequest) -> bool:
        """Whether vLLM would never let this request load, so that it must compute.

        vLLM sets free blocks aside for drafts, and for requests that it believes to be loading. It
        believes that of requests whose loads were taken back, and this one may be one of them. Only
        loads must leave these blocks free.

        One more question proves nothing: beside another connector, vLLM asks both again until both
        have answered (`_has_taken_answer`). If requests, loads or stores held the blocks, these
        come free.
        """
        since = tracked.offered_since
        if since is None or self.tier.clock() < since + MAX_REFUSED_S:
            return False
        return self._is_idle()

    def _is_idle(self) -> bool:
        """Whether no request runs, no load is under way, and no store will give blocks back."""
        is_running = any(
            tracked.request.status == RequestStatus.RUNNING
            for tracked in self.requests.tracked.values()
        )
        transfers = self.transfers
        return not (is_running or transfers.is_loading or transfers.holds_freed_blocks())

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Plan the load of the external tokens, now that vLLM has given the request its blocks."""
        request_id = request.request_id
        tracked = self.requests.tracked.get(request_id)
        if tracked is None:
            return
        if self.tier.is_off and num_external_tokens:
            # The tier offered them before an error turned it off, and vLLM waits for them.
            self.requests.admit(tracked)
            tracked.is_loading = True
            self.transfers.fail_load(request_id)
            return
        if tracked.is_admitted:
            tracked.is_loading = False  # its load has landed, and it runs now
            return
        self.requests.admit(tracked)
        start = tracked.num_local_tokens
        tracked.num_own_tokens = start + num_external_tokens
        groups, tables = self.tier.model.groups, self.tier.model.own(blocks.blocks)
        if self.tier.lazy is not None:
            for table, group in zip(tables, groups, strict=True):
                self.tier.lazy.used(table[: start // group.block_size])
        offload = self.tier.offload
        if offload is None:
            return  # without a tier nothing was offered
        if num_external_tokens == 0:
            offload.release(request_id)
            return
        end, unit = start + num_external_tokens, tracked.model.tokens_per_hash
        target_ids: list[list[int]] = []
        targets: list[KVCacheBlock] = []
        for g, (group, table) in enumerate(zip(groups, tables, strict=True)):
            own = table[start // group.block_size : end // group.block_size]
            if tracked.model.is_window[g]:
                own = [block for block in own if not block.is_null]
            target_ids.append([block.block_id for block in own])
            targets += own
        tracked.is_loading = True
        deadline = self.tier.deadline()
        local_ids = self._local_ids(tracked, tables)
        try:
            job = offload.load(
                request_id, num_external_tokens, target_ids, local_ids=local_ids, deadline=deadline
            )
        except KvstowError:
            # vLLM accepted tokens that were not offered. It waits for this load, so the load must
            # fail, or the request would wait forever.
            logger.exception(
                "kvstow: vLLM asked request %s to load %d tokens, which the host tier did not "
                "offer; the request recomputes them. Please report this with the traceback",
                request_id,
                num_external_tokens,
            )
            offload.release(request_id)
            self.transfers.fail_load(request_id)
            return
        if local_ids is not None:  # if the load fails, the request starts over
            tracked.num_reported = [end // group.block_size for group in groups]
            tracked.due_tokens = (end // unit + 1) * unit
        self.transfers.begin_load(job, targets, request_id)

    def _local_ids(
        self, tracked: TrackedRequest, tables: Sequence[Sequence[KVCacheBlock]]
    ) -> list[list[int]] | None:
        """Return the blocks before a load, which then reports them with its own.

        None if `Stores` must see each block of the request: a window drops its blocks, the lazy
        queue and the events learn what was computed, and a hint may leave blocks out.
        """
        model = tracked.model
        if (
            self.sees_all_blocks
            or self.tier.lazy is not None
            or not model.is_full_attention
            or tracked.max_stored_tokens != sys.maxsize
        ):
            return None
        return [
            [block.block_id for block in table[: tracked.num_local_tokens // group.block_size]]
            for table, group in zip(tables, model.groups, strict=True)
        ]


def _has_taken_answer(request: Request) -> bool:
    """Whether vLLM has accepted a hit of this request, and so looked for blocks for its load.

    Right before that it counts the hit. It does neither while another connector asks for time,
    which may be seconds. It counts no hit after a preemption, so that one passes as accepted.
    """
    stats = request.prefill_stats
    was_preempted: bool = request.num_preemptions > 0
    return was_preempted or stats is None or bool(stats.num_external_cached_tokens)


def _is_new_chunk_of_preempted(request: Request) -> bool:
    """Whether a session that vLLM has preempted before waits with a chunk that has not run.

    After a load vLLM takes such a session for preempted again. Its worker then does not get the
    chunk, and decodes wrong tokens. Without a load vLLM sends the chunk.
    """
    was_preempted: bool = request.resumable and request.num_preemptions > 0
    return was_preempted and request.status == RequestStatus.WAITING
