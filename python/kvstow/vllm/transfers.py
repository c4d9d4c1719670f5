"""The jobs in flight, and the device blocks that they keep out of vLLM's reach.

```
begin_store, begin_load      the job waits for the next step, and is in flight
take_jobs                    the step hands it to the workers
released (stores)            every rank has read the blocks: vLLM may have them back
end                          every rank has reported: blocks and host slots come free
expire                       past its deadline: it counts as failed, and its blocks stay held
                             until `end`, or those of a store until `released`
```

A job holds its blocks by a reference in vLLM's own pool, because vLLM may free a request and give
its blocks to another one while the copy still runs. A load needs no such reference at first: vLLM
keeps the blocks of a request, aborted or not, until kvstow has reported its load. A load that is
reported as failed too early, because it is late, holds them from then on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import takewhile

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.outputs import KVConnectorOutput

from kvstow import Job, JobEnd
from kvstow.transfer.mover import Direction
from kvstow.vllm.messages import NO_JOBS, Copies, LowerOrders, StepJobs
from kvstow.vllm.tier import HostTier

logger = logging.getLogger("vllm." + __name__)


@dataclass(slots=True)
class Transfer:
    """A job that has not ended.

    Attributes:
        direction: from the device (store) or to it (load).
        blocks: the device blocks.
        held: those of them that a reference in vLLM's pool keeps.
        ranks: the ranks that have reported the job.
        num_released: of a store, the number of ranks that have read all blocks.
        request_id: of a load.
        is_late: it has missed its deadline, or the tier was turned off.
    """

    direction: Direction
    blocks: list[KVCacheBlock]
    held: list[KVCacheBlock] = field(default_factory=list)
    ranks: set[int] = field(default_factory=set)
    num_released: int = 0
    request_id: str = ""
    is_late: bool = False


@dataclass
class Transfers:
    """The jobs in flight.

    Attributes:
        in_flight: by job id.
        failed_request_ids: the requests whose failed loads the next step reports.
    """

    tier: HostTier
    in_flight: dict[int, Transfer] = field(default_factory=dict)
    failed_request_ids: list[str] = field(default_factory=list)
    # The jobs that the next step hands to the workers.
    _loads: list[Copies] = field(default_factory=list)
    _stores: list[Copies] = field(default_factory=list)
    _num_storing: int = 0

    def begin_load(self, job: Job, blocks: list[KVCacheBlock], request_id: str) -> None:
        """Begin to load `blocks` for a request."""
        self._loads.append(Copies.of(job))
        self.in_flight[job.job_id] = Transfer("load", blocks, request_id=request_id)

    def begin_store(self, job: Job, blocks: list[KVCacheBlock]) -> None:
        """Begin a store, and hold its blocks.

        Args:
            job: the store.
            blocks: those that were offered. The job may name fewer, or blocks offered before.
        """
        if not job.has_all_ids:
            blocks = list(map(self.tier.pool.blocks.__getitem__, job.block_ids.tolist()))
        copies, transfer = Copies.of(job), Transfer("store", blocks)
        if self.tier.lazy is None:
            self._hold(transfer)
        else:
            self.tier.lazy.hold(blocks)
            transfer.held = blocks
        self.in_flight[job.job_id] = transfer
        self._stores.append(copies)
        self._num_storing += 1

    def fail_load(self, request_id: str) -> None:
        """Have the workers report to vLLM that the load of a request has failed."""
        self.failed_request_ids.append(request_id)

    def take_jobs(self, below: LowerOrders | None) -> StepJobs:
        """Return what the workers begin in the step that was just scheduled.

        Args:
            below: what the tier below the host is to do.
        """
        is_waiting = self.tier.offload is None and not self.tier.is_off
        if self._loads or self._stores or self.failed_request_ids:
            jobs = StepJobs(self._loads, self._stores, self.failed_request_ids, is_waiting, below)
            self._loads, self._stores, self.failed_request_ids = [], [], []
            return jobs
        if is_waiting or below is not None:
            return StepJobs(asks_capacity=is_waiting, below=below)
        return NO_JOBS  # most steps

    # -- the ends of jobs -----------------------------------------------------------------------

    def end(self, ends: Iterable[JobEnd], output: KVConnectorOutput) -> None:
        """Let go of what jobs held, and report the loads that have landed.

        A job stays in flight until nothing is left to do that may raise.
        """
        loaded: set[str] | None = None
        for end in ends:
            transfer = self.in_flight[end.job_id]
            self._release(transfer)
            if transfer.direction == "load":
                if end.ok:
                    if loaded is None:  # one copy, because thousands of loads may land in a step
                        loaded = output.finished_recving = set(output.finished_recving or ())
                    loaded.add(transfer.request_id)
                elif not transfer.is_late:
                    self.fail_load(transfer.request_id)
            else:
                self._num_storing -= not transfer.is_late
                if self.tier.lazy is not None and not end.ok:
                    self.tier.lazy.offer_again(transfer.blocks)
            del self.in_flight[end.job_id]

    def end_reported(self) -> None:
        """With the tier off, end the jobs that all ranks have reported, whatever their outcome."""
        for job_id, transfer in list(self.in_flight.items()):
            if len(transfer.ranks) == self.tier.world_size:
                self._release(transfer)
                del self.in_flight[job_id]

    def released(self, job_ids: Iterable[int]) -> None:
        """Note that ranks have read the blocks of these stores; the copies may still go on."""
        for job_id in job_ids:
            transfer = self.in_flight.get(job_id)
            if transfer is not None:
                transfer.num_released += 1
                if transfer.num_released == self.tier.world_size:
                    self._release(transfer)

    def expire(self) -> None:
        """Fail the jobs that are past their deadline; hold their blocks until the copy ends."""
        offload, below = self.tier.offload, self.tier.below
        if offload is None:
            return
        for job_id in offload.expire(self.tier.clock()):
            transfer = self.in_flight.get(job_id)
            if transfer is None:
                if below is not None:
                    below.expired(job_id)
                continue
            logger.warning(
                "kvstow: %s job %d has not ended within load_timeout_s (%g s), so it counts as "
                "failed; %d device blocks stay out of use until the copy ends. If this "
                "repeats, raise load_timeout_s, and check the host for swapping and the GPU link "
                "(kvstow doctor)",
                transfer.direction,
                job_id,
                self.tier.options.load_timeout_s,
                len(transfer.held if transfer.direction == "store" else transfer.blocks),
            )
            if transfer.direction == "store":
                transfer.is_late = True
                self._num_storing -= 1
            else:
                self._give_up(transfer)

    def give_up_loads(self) -> None:
        """Fail every load in flight, because the tier is off."""
        for transfer in self.in_flight.values():
            if transfer.direction == "load" and not transfer.is_late:
                self._give_up(transfer)

    def _give_up(self, transfer: Transfer) -> None:
        """Fail a load's request; its blocks stay held until the copy has ended."""
        self._hold(transfer)  # before vLLM knows of the failure and takes the blocks back
        transfer.is_late = True
        self.fail_load(transfer.request_id)

    def remains(self) -> dict[str, int]:
        """Return the gauges of a tier that is off: the copies that have not ended."""
        blocks = sum(len(transfer.blocks) for transfer in self.in_flight.values())
        return {"quarantined_jobs": len(self.in_flight), "quarantined_blocks": blocks}

    def num_storable(self) -> int:
        """Return how many more device blocks stores may hold."""
        transfers = self.in_flight.values()
        num_held = sum(len(t.held) for t in transfers if t.direction == "store")
        return max(0, self.tier.max_stored_blocks - num_held)

    # -- what vLLM asks about them --------------------------------------------------------------

    @property
    def is_loading(self) -> bool:
        """Whether a load is under way that is not late."""
        transfers = self.in_flight.values()
        return any(t.direction == "load" and not t.is_late for t in transfers)

    @property
    def is_work_left(self) -> bool:
        """Whether vLLM must go on stepping for stores to land and failures to be reported."""
        if self.tier.off_until is None:
            is_copying = self._num_storing > 0
        else:
            is_copying = bool(self.in_flight) and self.tier.clock() < self.tier.off_until
        return is_copying or bool(self.failed_request_ids)

    def holds_freed_blocks(self) -> bool:
        """Whether a job that will end gives blocks back that nothing else holds."""
        if self.tier.off_until is not None and self.tier.clock() >= self.tier.off_until:
            return False  # a copy that has not ended by now may never end
        return any(
            block.ref_cnt == 1
            for transfer in self.in_flight.values()
            if not transfer.is_late
            for block in transfer.held
        )

    # -- references in vLLM's pool --------------------------------------------------------------

    def _hold(self, transfer: Transfer) -> None:
        """Do what `BlockPool.touch` does, but count no access, because a copy is none."""
        blocks = transfer.blocks
        remove = self.tier.pool.free_block_queue.remove
        try:
            for block in blocks:
                num_refs = block.ref_cnt
                if not num_refs:
                    remove(block)
                block.ref_cnt = num_refs + 1
        except BaseException:
            transfer.held = list(takewhile(lambda held: held is not block, blocks))
            self._let_go(transfer)
            raise
        transfer.held = blocks

    def _release(self, transfer: Transfer) -> None:
        """Let go of the blocks that a job holds, if it still does."""
        if self.tier.lazy is not None and transfer.direction == "store":
            transfer.held = self.tier.lazy.put_back(transfer.held)
        self._let_go(transfer)

    def _let_go(self, transfer: Transfer) -> None:
        """Do what `BlockPool.free_blocks` does; that is slow for blocks that others hold: most."""
        unused = []
        for block in transfer.held:
            num_refs = block.ref_cnt
            if num_refs > 1:
                block.ref_cnt = num_refs - 1
            else:
                unused.append(block)
        transfer.held = unused  # until vLLM has them back: the call may raise
        if unused:
            # Like vLLM when it frees a request: it evicts the tail before the head.
            self.tier.pool.free_blocks(unused[::-1])
            transfer.held = []
