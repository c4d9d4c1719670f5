"""What the scheduler half does once a step: before the workers run it, and after."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvstow.vllm.messages import StepJobs, StepReports
from kvstow.vllm.requests import Requests, TrackedRequest
from kvstow.vllm.stores import Stores
from kvstow.vllm.tier import HostTier
from kvstow.vllm.transfers import Transfers


@dataclass
class Steps:
    """Hands out jobs when a step is scheduled; ends jobs and plans stores when it was processed."""

    tier: HostTier
    requests: Requests
    transfers: Transfers
    stores: Stores

    def build(self, scheduled: SchedulerOutput) -> StepJobs:
        """Return what the workers begin in the step that vLLM has just scheduled."""
        tracked_of = self.requests.tracked.get
        for request_id in scheduled.preempted_req_ids or ():
            tracked = tracked_of(request_id)
            if tracked is None or not tracked.is_admitted:
                continue
            if request_id not in self.requests.fresh:
                self.evict_unwritten(request_id, tracked)
                self.requests.start_over(request_id)
        had_room = self.requests.has_room
        self.requests.scheduled(scheduled)
        if had_room and not self.requests.has_room:
            self.stores.store_gathered()
        self.transfers.expire()
        jobs = self.transfers.take_jobs()
        if self.tier.below is not None:
            if (slow_loads := self.tier.below.slow_loads) is not None:
                slow_loads.scheduled(self.requests.chunks(scheduled))
            is_copying = self.transfers.is_work_left or self.transfers.is_loading
            is_idle = not scheduled.total_num_scheduled_tokens
            jobs.below = self.tier.below.build(is_idle=is_idle, is_copying=is_copying)
        return jobs

    def evict_unwritten(self, request_id: str, tracked: TrackedRequest) -> None:
        """Drop the keys of blocks that this step granted to a request and did not compute.

        With priorities vLLM may preempt a request after it has granted it blocks in the same step.
        vLLM then frees these blocks with their keys. A later request would hit KV that was never
        written, and the tier would store it.
        """
        request, model, pool = tracked.request, tracked.model, self.tier.pool
        num_submitted = self.requests.num_submitted_tokens(request_id, tracked)
        for g, group in enumerate(model.groups):
            # Blocks that earlier steps fill are written, because those steps were submitted.
            first = max(tracked.num_reported[g], num_submitted // group.block_size)
            for index in range(first, request.num_tokens // group.block_size):
                block_hash, has_key = model.block_hash(request, index, g), False
                # Other blocks may have the same key, and vLLM does not say which one it granted.
                while found := pool.get_cached_block(block_hash, [g]):
                    pool.evict_blocks({found[0].block_id})
                    has_key = True
                if not has_key and not model.is_window[g]:
                    break  # vLLM keys the blocks of a table in their order

    def processed(self, output: KVConnectorOutput) -> None:
        """End the jobs that every rank has reported, and plan the stores that the step made due."""
        if self.tier.below is not None and self.tier.below.slow_loads is not None:
            self.tier.below.slow_loads.processed()
        sent = output.kv_connector_worker_meta
        # Most steps report nothing, and the check for a subclass of an abstract class is slow.
        reports = sent if sent is not None and isinstance(sent, StepReports) else None
        if reports is not None:
            if self.tier.below is not None:
                self.tier.below.processed(reports.below)
            self.tier.add_capacities(reports.capacities, self.requests.tracked)
            for job_id, rank, _ in reports.reports:
                if job_id in self.transfers.in_flight:
                    self.transfers.in_flight[job_id].ranks.add(rank)
        if self.tier.is_off:
            self.transfers.end_reported()
        offload = self.tier.offload
        if reports is not None and offload is not None:
            ends = [
                end
                for job_id, rank, ok in reports.reports
                if (end := offload.complete(job_id, ok=ok, rank=rank)) is not None
            ]
            self.transfers.released(reports.released)
            self.transfers.end(ends, output)
            if ends and self.tier.below is not None:
                self.tier.below.is_due = True
        for request_id in output.finished_recving or ():
            if request_id in self.requests.tracked:
                self.requests.tracked[request_id].is_load_reported = True
        if offload is None:
            return
        self.stores.store_step()
        self.stores.store_evictable()

    def finished(self, request: Request) -> None:
        """Store what is due of a request that is over, while its blocks are still its own."""
        request_id = request.request_id
        tracked = self.requests.tracked.get(request_id)
        if tracked is None:
            return
        if tracked.model.is_full_attention:
            self.requests.look_at(request_id, tracked)
        if request_id in self.requests.due:
            self.stores.store_due([request_id])
        self.requests.forget(request_id)
