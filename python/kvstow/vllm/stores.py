"""Which blocks the scheduler half stores, and when.

Eager, a step's full blocks are stored once the step was processed: their KV is written. In a model
with windows or states that is right after the step, before another request takes the blocks that
fell out of a window. Else the stores of several steps are gathered (`requests`). Lazy, the tier
only learns then that they are computed. They are stored when they come near the head of vLLM's
free queue (`LazyQueue`). States do not wait for that, because vLLM frees one while its request
runs, and may overwrite it in the same step. A state that was not stored then, because of
`num_storable`, a full host or a failed copy, waits for the queue.

Why a stored state is the state of its key: vLLM gives a hash to each state that it keeps, and does
not write to a block that has one. `Steps.evict_skipped` drops the hash of a state that no step
writes. `Requests.look_at` records the blocks of the table. When the step was processed,
`TrackedRequest.window_ids` leaves out each block that does not have the hash of its tokens. If vLLM
has dropped the state, or if another request has taken the block, it has another hash or none. A
partial block, which vLLM copies before it writes on, has the hash of fewer tokens.
vLLM also offers its states to connectors (`boundary_state_offloads`). kvstow does not read the
offers, because the table names the same full blocks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from kvstow import StateSpace
from kvstow.vllm.events import HostEvents
from kvstow.vllm.lazy_queue import LazyQueue
from kvstow.vllm.requests import Requests
from kvstow.vllm.tier import HostTier
from kvstow.vllm.tracked import TrackedRequest
from kvstow.vllm.transfers import Transfers

# The most requests that one step stores of those that can wait, so that no step takes much longer.
MAX_REQUESTS = 32


@dataclass
class Stores:
    """Plans stores."""

    tier: HostTier
    requests: Requests
    transfers: Transfers
    host_events: HostEvents | None

    def store_gathered(self) -> None:
        """Store all that steps have made due, because vLLM may take its blocks."""
        if self.requests.num_gathered:
            self.requests.look()
        if self.requests.due:
            self.store_due(list(self.requests.due))

    def store_step(self) -> None:
        """Store what steps have made due, now that one was processed; some of it may wait."""
        requests, gathered_tokens = self.requests, self.tier.gathered_tokens
        if not (gathered_tokens and requests.has_room):
            self.store_gathered()
            return
        if requests.num_gathered >= gathered_tokens:
            requests.look()
        if requests.due:
            self.store_due(list(islice(requests.due, MAX_REQUESTS)))

    def store_due(self, request_ids: Iterable[str]) -> None:
        """Report to the tier what these due requests have computed; eager, that plans stores."""
        offload = self.tier.offload
        if offload is None:
            return
        named: list[str] = []
        computed: list[int] = []
        hashes: list[Sequence[bytes]] = []
        ids: list[int] = []
        blocks: list[KVCacheBlock] = []
        states: list[KVCacheBlock] = []
        offsets = [0]
        due, model, tables = self.requests.due, self.tier.model, self.tier.tables
        for request_id in request_ids:
            tracked = due[request_id]
            if tracked.is_stale:
                del due[request_id]
                continue
            num_computed = tracked.num_cached_tokens(tables)
            if num_computed < tracked.due_tokens:
                # Its step is under way, or vLLM rejected its drafts. It goes behind the others,
                # because it may wait for long.
                due[request_id] = due.pop(request_id)
                continue
            hashes.append(tracked.new_hashes(offload, num_computed))
            for g, group in enumerate(model.groups):
                num_full = model.num_cacheable_blocks(g, num_computed)
                wanted = filled = tracked.filled(g, num_full, tables)
                if tracked.max_stored_tokens != sys.maxsize:
                    wanted = filled[: tracked.num_wanted(g)]
                own = self._report_blocks(tracked, g, wanted)
                if isinstance(group, StateSpace):
                    states += (b for b, at in zip(wanted, own, strict=True) if at)
                ids += own
                blocks += wanted
                offsets.append(len(ids))
                if wanted is not filled:
                    self._leave_out(tracked, g, filled[len(wanted) :])
            named.append(request_id)
            computed.append(num_computed)
            self.requests.reported(tracked, num_computed)
        if named:
            job = offload.store(
                named,
                computed,
                ids,
                offsets,
                new_hashes=hashes,
                max_blocks=self.transfers.num_storable(),
                deadline=self.tier.deadline(),
            )
            if job is not None:
                self.transfers.begin_store(job, blocks)
            elif self.tier.lazy is not None and states:
                # Those beyond what stores may hold wait for `store_evictable`.
                num_storable = self.transfers.num_storable()
                self.tier.counts["postponed_blocks"] += max(0, len(states) - num_storable)
                self.store_cached(states[:num_storable])

    def _report_blocks(
        self, tracked: TrackedRequest, g: int, filled: list[KVCacheBlock]
    ) -> list[int]:
        """Count a group's filled blocks as reported; return their ids, 0 for those not to store."""
        if tracked.model.is_window[g]:
            ids = tracked.window_ids(g, filled, self.tier.tables)
        else:
            ids = [block.block_id for block in filled]
        if self.tier.lazy is not None:
            # Also blocks that were stored before, because the host may have evicted them.
            self.tier.lazy.computed(ids, filled)
        if self.host_events is not None:
            request, first = tracked.request, tracked.num_reported[g]
            model = tracked.model
            stored = [
                (
                    index,
                    model.block_hash(request, index, g),
                    model.block_hash(request, index - 1, g) if index else None,
                )
                for index, block_id in enumerate(ids, first)
                if block_id
            ]
            block_size = model.groups[g].block_size
            self.host_events.computed(request, g, block_size, stored)
        tracked.num_reported[g] += len(filled)
        return ids

    def _leave_out(self, tracked: TrackedRequest, g: int, blocks: list[KVCacheBlock]) -> None:
        """Count a group's filled blocks that are not to be stored, and do not report them."""
        tracked.num_reported[g] += len(blocks)
        reason = "generated_blocks" if tracked.max_stored_tokens else "unwanted_blocks"
        self.tier.counts[reason] += sum(not block.is_null for block in blocks)

    def store_evictable(self, lazy: LazyQueue) -> None:
        """Lazy, store the blocks that vLLM overwrites next, as many as stores may hold."""
        blocks = lazy.evictable()
        if not blocks:
            return
        num_storable = self.transfers.num_storable()
        if len(blocks) > num_storable:
            blocks, too_many = blocks[:num_storable], blocks[num_storable:]
            lazy.offer_again(too_many)
            self.tier.counts["postponed_blocks"] += len(too_many)
        self.store_cached(blocks)

    def store_cached(self, blocks: list[KVCacheBlock]) -> None:
        """Plan the stores of those of these cached blocks that the host does not have."""
        assert self.tier.offload is not None
        model, by_group = self.tier.model, dict[int, list[KVCacheBlock]]()
        if len(model.groups) == 1:
            by_group[0] = blocks
        else:
            for block in blocks:
                by_group.setdefault(model.group_of(block.block_hash[-4:]), []).append(block)
        for group, cached in by_group.items():
            job = self.tier.offload.store_candidates(
                [block.block_id for block in cached],
                [block._block_hash for block in cached],
                group=group,
                suffix_bytes=4,  # vLLM's number of the group
                deadline=self.tier.deadline(),
            )
            if job is not None:
                self.transfers.begin_store(job, cached)
