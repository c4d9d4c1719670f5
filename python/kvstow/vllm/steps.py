"""What the scheduler half does once a step: before the workers run it, and after."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvstow.vllm.messages import StepJobs, StepReports
from kvstow.vllm.requests import Requests
from kvstow.vllm.stores import Stores
from kvstow.vllm.tier import HostTier
from kvstow.vllm.tracked import TrackedRequest
from kvstow.vllm.transfers import Transfers


@dataclass
class Steps:
    """Hands out jobs when a step is scheduled; ends jobs and plans stores when it was processed."""

    tier: HostTier
    requests: Requests
    transfers: Transfers
    stores: Stores
    # The blocks of `evict_skipped` that requests still have, each with its group and its place.
    _skipped: list[tuple[Request, int, int, KVCacheBlock]] = field(default_factory=list)

    def build(self, scheduled: SchedulerOutput) -> StepJobs:
        """Return what the workers begin in the step that vLLM has just scheduled."""
        requests, transfers, below = self.requests, self.transfers, self.tier.below
        for request_id in scheduled.preempted_req_ids or ():
            tracked = requests.tracked.get(request_id)
            if tracked is None or not tracked.is_admitted:
                continue
            if request_id not in requests.fresh:
                self.evict_unwritten(tracked)
                requests.start_over(request_id)
        if self.tier.model.divided_states:
            self.evict_skipped(scheduled)
        had_room = requests.has_room
        requests.scheduled(scheduled)
        if had_room and not requests.has_room:
            self.stores.store_gathered()
        if transfers.in_flight or below is not None:  # not in most steps
            transfers.expire()
        orders = None
        if below is not None:
            if (slow_loads := below.slow_loads) is not None:
                chunks = requests.chunks(scheduled)
                slow_loads.scheduled((tracked.request, num) for tracked, num in chunks)
            is_copying = transfers.is_work_left or transfers.is_loading
            is_idle = not scheduled.total_num_scheduled_tokens
            orders = below.build(is_idle=is_idle, is_copying=is_copying)
        return transfers.take_jobs(orders)  # last, because an error would lose them

    def evict_unwritten(self, tracked: TrackedRequest) -> None:
        """Drop the keys of blocks that this step granted to a request and did not compute.

        With priorities vLLM may preempt a request after it has granted it blocks in the same step.
        vLLM then frees these blocks with their keys. A later request would hit KV that was never
        written, and the tier would store it.
        """
        request, model, pool = tracked.request, tracked.model, self.tier.pool
        num_submitted = tracked.num_submitted_tokens
        is_unknown = request.num_in_flight_tokens > 0 or tracked.is_distrusted
        if is_unknown and tracked.num_own_tokens < tracked.num_given_tokens:
            # Another connector may still report that it did not load these blocks. vLLM ignores
            # that of a request that does not run.
            num_submitted = tracked.num_own_tokens
        for g, group in enumerate(model.groups):
            # Blocks that earlier steps fill are written, because those steps were submitted.
            first = max(tracked.num_reported[g], num_submitted // group.block_size)
            for index in range(first, request.num_tokens // group.block_size):
                block_hash, has_key = model.block_hash(request, index, g), False
                # Other blocks may have the same key, and vLLM does not say which one it granted.
                while found := pool.get_cached_block(block_hash, [model.group_ids[g]]):
                    pool.evict_blocks({found[0].block_id})
                    has_key = True
                if not (has_key or tracked.is_distrusted or model.is_window[g]):
                    break  # vLLM keys the blocks of a table in their order

    def evict_skipped(self, scheduled: SchedulerOutput) -> None:
        """Drop the keys of states that vLLM keys and does not write.

        If vLLM hashes fewer tokens than a state's block has, a prompt may go on within a block.
        vLLM then passes the end of the block if the model writes its state for later prompts
        elsewhere. With EAGLE it still gives the block the key of its end. With several modules of
        MTP it may do so in a later step.
        """
        model, tables = self.tier.model, self.tier.tables
        for tracked, num_tokens in self.requests.chunks(scheduled):
            request = tracked.request
            start: int = request.num_computed_tokens
            if start >= max(request.num_prompt_tokens, request.num_tokens - 1):
                continue  # of drafts vLLM writes the state at a block's end
            for g, block_size in model.divided_states:
                index = start // block_size
                if start % block_size and start + num_tokens > (index + 1) * block_size:
                    block = tables[g][request.request_id][index]
                    self._skipped.append((request, g, index, block))
        if self._skipped:
            self._skipped = [skipped for skipped in self._skipped if self._evict_key(*skipped)]

    def _evict_key(self, request: Request, g: int, index: int, block: KVCacheBlock) -> bool:
        """Drop the key of a skipped block. Return whether the request still has the block."""
        if self.tier.tables[g].get(request.request_id, ())[index : index + 1] != [block]:
            return False
        if block.block_hash == self.tier.model.block_key(request, index, g):
            self.tier.pool.evict_blocks({block.block_id})
        return True

    def processed(self, output: KVConnectorOutput) -> None:
        """End the jobs that every rank has reported, and plan the stores that the step made due."""
        tier = self.tier
        if tier.below is not None and tier.below.slow_loads is not None:
            tier.below.slow_loads.processed()
        sent = output.kv_connector_worker_meta
        # Most steps report nothing, and the check for a subclass of an abstract class is slow.
        if sent is not None and isinstance(sent, StepReports):
            self._reported(sent, output)
        elif tier.off_until is not None:
            self.transfers.end_reported()
        if output.finished_recving:
            for request_id in output.finished_recving:
                if request_id in self.requests.tracked:
                    self.requests.tracked[request_id].is_load_reported = True
        if tier.offload is None:
            return
        if output.invalid_block_ids:
            self.requests.distrust(output.invalid_block_ids)
        self.stores.store_step()
        if tier.lazy is not None:
            self.stores.store_evictable(tier.lazy)

    def _reported(self, reports: StepReports, output: KVConnectorOutput) -> None:
        """End the jobs that every rank has reported, and take the news of the workers."""
        tier, transfers = self.tier, self.transfers
        if tier.below is not None:
            tier.below.processed(reports.below)
        if tier.add_capacities(reports.capacities):
            self.requests.add_tracked()
        for job_id, rank, _ in reports.reports:
            if job_id in transfers.in_flight:
                transfers.in_flight[job_id].ranks.add(rank)
        if tier.offload is None:
            if tier.is_off:
                transfers.end_reported()
            return
        ends = [
            end
            for job_id, rank, ok in reports.reports
            if (end := tier.offload.complete(job_id, ok=ok, rank=rank)) is not None
        ]
        transfers.released(reports.released)
        transfers.end(ends, output)
        if ends and tier.below is not None:
            tier.below.is_due = True

    def finished(self, request: Request) -> None:
        """Store what is due of a request that is over, while its blocks are still its own."""
        request_id = request.request_id
        tracked = self.requests.tracked.get(request_id)
        if tracked is None:
            return
        if request_id not in self.requests.due:
            # Stores may be gathered, and the last token may not have been sampled before.
            self.requests.look_at(tracked)
        if request_id in self.requests.due:
            self.stores.store_due([request_id])
        self.requests.evict_unproven(tracked)
        self.requests.evict_guessed(tracked)
        self.requests.forget(request_id)
