"""The scheduler half of a tier below the host: its jobs, and what the ranks report of them.

`disk`, `shared` and `both` say when the tier opens, what a reset does, and what a lookup waits for.

How a wrong block could be served, and what prevents it:

- A block is whole on one rank only. A job ends when every rank has reported it, and each block
  counts only if it arrived on all.
- A promoted block is loaded before it has arrived. `OffloadScheduler` withholds its key until then.
- A late copy overwrites a slot that has another block. Slots stay reserved until every rank has
  reported, and a rank reports once its tier uses them no more.
- An adapter changes under its name. The hashes do not show it, so requests with adapters promote
  nothing.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Final

from vllm.v1.request import Request

from kvstow import OffloadScheduler, TierJob
from kvstow.observability.events import BlockEvent
from kvstow.tiers.budget import Budget
from kvstow.tiers.tier import Mode, least_mode
from kvstow.vllm.below.slow_loads import SlowLoads
from kvstow.vllm.messages import LowerJob, LowerOrders, LowerReport
from kvstow.vllm.options import Options

logger = logging.getLogger("vllm." + __name__)

# Bytes that a rank demotes at a time, and as many that it promotes.
_MAX_IN_FLIGHT_BYTES: Final = 128 << 20


@dataclass
class LowerTier(ABC):
    """Plans demotes and promotes.

    Attributes:
        options: the user's options.
        world_size: workers that report each job. Those without a part of their own copy nothing.
        clock: seconds, monotonic.
        is_due: blocks may be due that no step has planned.
        slow_loads: decides which loads to skip; None without `skip_slow_loads`.
    """

    name: ClassVar[str]

    options: Options
    world_size: int
    clock: Callable[[], float]
    is_due: bool = False
    slow_loads: SlowLoads | None = field(init=False)
    _offload: OffloadScheduler | None = None
    # By rank, the first report, and what each part of the tier still does.
    _ranks: dict[int, LowerReport] = field(default_factory=dict)
    _modes: dict[int, Mode] = field(default_factory=dict)
    _in_flight: set[int] = field(default_factory=set)
    # The blocks of each promote that some rank has not reported, late ones included.
    _promoting: dict[int, int] = field(default_factory=dict)
    _sequence: int = 0
    # Until when an idle server goes on writing.
    _flush_until: float = 0.0
    # Whether the present step neither computes nor stores nor loads.
    _is_at_rest: bool = False
    _budget: Budget = field(init=False)

    def __post_init__(self) -> None:
        self._budget = Budget(self.options.lower.max_write_bytes_per_s)
        options, self.slow_loads = self.options, None
        if options.skip_slow_loads:
            self.slow_loads = SlowLoads(self.name, options.min_promote_tokens, self.clock)

    # -- the start and resets -----------------------------------------------------------------

    @abstractmethod
    def num_blocks(self, num_host_blocks: int) -> int:
        """Return the slots of the tier's index; 0 if no rank has reported a part of the tier."""

    def begin(self, offload: OffloadScheduler) -> None:
        """Open the tier of a new scheduler, which knows no job of an earlier one."""
        self._offload = offload
        self._in_flight.clear()
        self._promoting.clear()

    @abstractmethod
    def reset(self) -> None:
        """Let nothing of before be read: `OffloadScheduler.reset` has emptied and closed the tier.

        Without a scheduler there is nothing to empty yet, and the reset counts all the same.
        """

    def close(self) -> None:  # noqa: B027 - most tiers have nothing of their own
        """Release what the scheduler half itself holds of the tier."""

    def max_in_flight(self, num_host_blocks: int) -> int:
        """Return the most slots that demotes, or promotes, copy at a time.

        They are not more than a quarter of the host, because the host cannot evict them meanwhile,
        and not more than may wait for a store, which refuses a larger job as a whole.
        """
        slot_bytes = max((report.slot_bytes for report in self._ranks.values()), default=1)
        max_bytes = _MAX_IN_FLIGHT_BYTES
        if self.options.shared is not None:
            max_bytes = min(max_bytes, self.options.shared_queue_bytes)
        return max(1, min(max_bytes // slot_bytes, num_host_blocks // 4))

    # -- lookups ------------------------------------------------------------------------------

    def lookup(
        self, request: Request, num_local_tokens: int, end: int, *, may_wait: bool
    ) -> int | None:
        """Look up a prefix on the host; None while the tier brings more of it.

        Args:
            request: the request.
            num_local_tokens: tokens of the local hit.
            end: upper bound for the whole request, the local hit included.
            may_wait: whether the request has time left to wait for the tier.
        """
        assert self._offload is not None, "there is no lookup before `begin`"
        may_wait = may_wait and request.lora_request is None and self._has_room(self._offload)
        if may_wait and self._is_opening():
            return None
        slow_loads, where = self.slow_loads, (request.request_id, num_local_tokens, end)
        if may_wait and self._is_asking(request, num_local_tokens, end):
            if slow_loads is not None:
                slow_loads.asks(request, end)
            return None
        if may_wait and slow_loads is not None:
            may_wait = slow_loads.may_load(request, end, partial(self._offload.tier_hits, *where))
        found = self._offload.lookup(*where, promote=may_wait)
        if found is not None and slow_loads is not None:
            slow_loads.found(request, num_local_tokens + found)
        return found

    def _has_room(self, offload: OffloadScheduler) -> bool:
        """Whether promotes may begin before late ones end, which a disk that hangs may never do."""
        late = [num for job_id, num in self._promoting.items() if job_id not in self._in_flight]
        return not late or sum(late) < self.max_in_flight(offload.num_host_blocks)

    def _is_opening(self) -> bool:
        """Whether the index still lacks what the tier had when the server started."""
        return False

    def _is_asking(self, request: Request, num_local_tokens: int, end: int) -> bool:
        """Whether a store is still to say what it has of a request."""
        return False

    # -- steps --------------------------------------------------------------------------------

    def build(self, *, is_idle: bool, is_copying: bool) -> LowerOrders | None:
        """Return what the ranks do in this step; None for nothing.

        Args:
            is_idle: the step computes no token. Then demotes go on for `flush_s` only.
            is_copying: a store or a load is under way.
        """
        if self._offload is None or not self._ranks:
            return None
        now = self.clock()
        if not is_idle:
            self._flush_until = now + self.options.lower.flush_s
        self._is_at_rest = is_idle and not is_copying
        return self._orders(self._offload, now)

    @abstractmethod
    def _orders(self, offload: OffloadScheduler, now: float) -> LowerOrders | None:
        """Return what the ranks do in this step."""

    def _plan(self, offload: OffloadScheduler, now: float) -> list[LowerJob]:
        """Plan the jobs of a step."""
        deadline = now + self.options.load_timeout_s
        jobs = [offload.promote(deadline=deadline)]
        if now < self._flush_until:
            jobs.append(self._demote(offload, now, deadline))
        return [self._begin(offload, job) for job in jobs if job is not None]

    def _demote(self, offload: OffloadScheduler, now: float, deadline: float) -> TierJob | None:
        """Plan a demote, within what `max_write_bytes_per_s` allows."""
        max_blocks = self._budget.num_blocks(self._bytes_per_block, now)
        if max_blocks <= 0:
            return None
        job = offload.demote(max_blocks=max_blocks, deadline=deadline)
        if job is None:
            self.is_due = bool(self._in_flight)  # which may take all the room for jobs
        else:
            self._budget.spend(len(job) * self._bytes_per_block)
        return job

    @property
    def _bytes_per_block(self) -> int:
        """Bytes of a block on all ranks."""
        return sum(report.slot_bytes for report in self._ranks.values())

    def _begin(self, offload: OffloadScheduler, job: TierJob) -> LowerJob:
        self._sequence += 1
        self._in_flight.add(job.job_id)
        if job.direction == "promote":
            self._promoting[job.job_id] = len(job)
        for rank in range(self.world_size):
            if rank not in self._ranks:  # it shares the memory of a rank that has a part
                offload.complete(job.job_id, rank=rank)
        return LowerJob.of(job, self._sequence)

    def expired(self, job_id: int) -> None:
        """Take the id of a late job. It ends when no rank uses its slots any more."""
        self._in_flight.discard(job_id)
        logger.warning(
            "kvstow: job %d of the %s tier has not ended within load_timeout_s (%g s), so it "
            "counts as failed. If this repeats, check the %s",
            job_id,
            self.name,
            self.options.load_timeout_s,
            self.name,
        )

    def processed(self, reports: Mapping[int, LowerReport]) -> None:
        """Take the reports of a step: sizes, ends of jobs, and what the kind of tier adds."""
        for rank, report in reports.items():
            self._ranks.setdefault(rank, report)
            self._modes[rank] = report.mode
            if self._offload is None:
                continue
            for job_id, ok in report.ends:
                if self._offload.complete(job_id, ok=ok, rank=rank) is not None:
                    self._in_flight.discard(job_id)
                    self._promoting.pop(job_id, None)
            self._reported(rank, report)
        if self._offload is not None:
            self._advance(self._offload)

    def _reported(self, rank: int, report: LowerReport) -> None:  # noqa: B027 - a hook
        """Take what only this kind of tier reports."""

    @abstractmethod
    def _advance(self, offload: OffloadScheduler) -> None:
        """Go on to open the tier, and follow what its parts still do."""

    def _follow(self, offload: OffloadScheduler) -> None:
        """Let an open tier do what all of its parts still do."""
        mode = least_mode(self._modes.values())
        if mode != offload.disk_mode:
            offload.set_disk(mode)

    # -- figures ------------------------------------------------------------------------------

    @abstractmethod
    def stats(self) -> dict[str, int]:
        """Return the counters and gauges of the tier."""

    def take_events(self) -> list[BlockEvent]:
        """Return the events of the tier's blocks since the last call."""
        events: list[BlockEvent] = [] if self._offload is None else self._offload.take_disk_events()
        return events

    @property
    def has_work(self) -> bool:
        """Whether vLLM must go on stepping, for copies to land."""
        return bool(self._in_flight) or (self.is_due and self.clock() < self._flush_until)
