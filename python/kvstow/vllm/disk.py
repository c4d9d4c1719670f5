"""The scheduler half of the disk tier: what a restart finds, and which blocks go up and down.

```
          every rank has reported its slots
                       |
                       v
                    warming --- all records are agreed and adopted ---> on <---+
                       |                                                |      |
                       +----------------- a reset ----------------------+      |
                                             v                                 |
                                         renewing --- all ranks have drawn ----+
                                                      a new generation
```

Except when it is on, the disk is closed: nothing moves, and lookups see the host only. While it is
warming, requests wait for it, as they wait for promotes: `promote_timeout_s` long at most.

How a wrong block could be served, and what prevents it:

- Weights change in place, and a server reads what it wrote before. Each reset that empties the host
  tier draws a new generation on every rank, which is durable before anything moves again. Records
  that were collected before the reset are dropped. A reset before the first step counts, too.
- A block is whole on one rank only. A job ends when every rank has reported it, and each block
  counts only if it arrived on all. After a restart a slot counts only if all ranks hold the same
  key in it, by the same write: each write has a number above those of all records.
- A promoted block is loaded before it has arrived. `OffloadScheduler` withholds its key until then.
- A late copy overwrites a slot that has another block. Slots stay reserved until every rank has
  reported, and a rank reports once its file uses them no more.
- An adapter changes under its name. The hashes do not show it, so requests with adapters promote
  nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Final, Literal, TypeAlias

import numpy as np
from vllm.v1.request import Request

from kvstow import OffloadScheduler, TierJob
from kvstow.tiers import SlotRecords
from kvstow.tiers.tier import Mode
from kvstow.tiers.warm import adopt, agreed
from kvstow.vllm.messages import RECORDS_PER_STEP, DiskJob, DiskOrders, DiskReport
from kvstow.vllm.options import Options

logger = logging.getLogger("vllm." + __name__)

Phase: TypeAlias = Literal["absent", "warming", "renewing", "on"]

_MODES: Final[tuple[Mode, ...]] = ("off", "read_only", "on")
# Bytes that a rank demotes at a time, and as many that it promotes.
_MAX_IN_FLIGHT_BYTES: Final = 128 << 20


@dataclass
class DiskTier:
    """Plans demotes and promotes, and opens the disk of a new scheduler, or after a reset.

    Attributes:
        options: the user's options.
        world_size: workers that report each job. Those without a file of their own copy nothing.
        clock: seconds, monotonic.
        phase: see the head of this file.
        is_due: blocks may be due that no step has planned.
    """

    options: Options
    world_size: int
    clock: Callable[[], float]
    phase: Phase = "absent"
    is_due: bool = False
    _offload: OffloadScheduler | None = None
    # By rank, the first report, and what each file still does.
    _ranks: dict[int, DiskReport] = field(default_factory=dict)
    _modes: dict[int, Mode] = field(default_factory=dict)
    _in_flight: set[int] = field(default_factory=set)
    _sequence: int = 0
    # While the phase is not "on": vLLM goes on stepping until then.
    _until: float = 0.0
    _flush_until: float = 0.0
    _renewal: int = 0
    _confirmed: set[int] = field(default_factory=set)
    _next_slot: int = 0
    _parts: dict[int, SlotRecords] = field(default_factory=dict)
    _agreed: list[SlotRecords] = field(default_factory=list)
    _to_adopt: SlotRecords | None = None
    _allowance: float = 0.0
    _allowed_at: float = 0.0

    # -- the start and resets -----------------------------------------------------------------

    @property
    def num_slots(self) -> int:
        """Slots that every file has; 0 if no rank has reported a file."""
        return min((report.num_slots for report in self._ranks.values()), default=0)

    def max_in_flight(self, num_host_blocks: int) -> int:
        """Return the most slots that demotes, or promotes, copy at a time.

        They are not more than a quarter of the host, because the host cannot evict them meanwhile.
        """
        slot_bytes = max((report.slot_bytes for report in self._ranks.values()), default=1)
        return max(1, min(_MAX_IN_FLIGHT_BYTES // slot_bytes, num_host_blocks // 4))

    def begin(self, offload: OffloadScheduler) -> None:
        """Open the disk of a new scheduler.

        Only the first one finds an earlier server's blocks, unless a reset has come before it.
        """
        is_first = self._offload is None and not self._renewal
        self._offload = offload
        self._in_flight.clear()
        if self.num_slots and is_first:
            self._enter("warming")
        elif self.num_slots:
            self.reset()

    def reset(self) -> None:
        """Draw a new generation: `OffloadScheduler.reset` has emptied and closed the disk.

        Without a scheduler there is nothing to empty yet, and `begin` draws the generation.
        """
        self._renewal += 1
        self._confirmed.clear()
        self._forget_records()
        if self._offload is not None:
            self._enter("renewing")

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self._until = self.clock() + self.options.load_timeout_s

    def _forget_records(self) -> None:
        self._next_slot, self._to_adopt = 0, None
        self._parts.clear()
        self._agreed.clear()

    # -- lookups ------------------------------------------------------------------------------

    def lookup(
        self, request: Request, num_local_tokens: int, end: int, *, may_wait: bool
    ) -> int | None:
        """Look up a prefix on the host; None while the disk brings more of it.

        Args:
            request: the request.
            num_local_tokens: tokens of the local hit.
            end: upper bound for the whole request, the local hit included.
            may_wait: whether the request has time left to wait for the disk.
        """
        assert self._offload is not None, "there is no lookup before `begin`"
        may_wait = may_wait and request.lora_request is None
        if may_wait and self.phase == "warming" and self.clock() < self._until:
            return None
        name = request.request_id
        return self._offload.lookup(name, num_local_tokens, end, promote=may_wait)

    # -- steps --------------------------------------------------------------------------------

    def build(self, *, is_idle: bool) -> DiskOrders | None:
        """Return what the ranks do in this step; None for nothing.

        Args:
            is_idle: the step computes no token. Then demotes go on for `disk_flush_s` only.
        """
        if self._offload is None or self.phase == "absent":
            return None
        now = self.clock()
        if not is_idle:
            self._flush_until = now + self.options.disk_flush_s
        if self.phase == "renewing":
            return DiskOrders(renewal=self._renewal)
        if self.phase == "warming":
            return None if self._to_adopt is not None else DiskOrders(records_from=self._next_slot)
        deadline = now + self.options.load_timeout_s
        jobs = [self._offload.promote(deadline=deadline)]
        if now < self._flush_until:
            jobs.append(self._demote(now, deadline))
        planned = [self._begin(job) for job in jobs if job is not None]
        return DiskOrders(planned) if planned else None

    def _demote(self, now: float, deadline: float) -> TierJob | None:
        """Plan a demote, within what `disk_max_write_bytes_per_s` allows."""
        assert self._offload is not None, "a disk that is on has a scheduler"
        rate, max_blocks = self.options.disk_max_write_bytes_per_s, None
        bytes_per_block = sum(report.slot_bytes for report in self._ranks.values())
        if rate is not None:
            earned = rate * (now - self._allowed_at)
            self._allowance = min(max(rate, bytes_per_block), self._allowance + earned)
            self._allowed_at = now
            max_blocks = int(self._allowance // bytes_per_block)
            if not max_blocks:
                return None
        job = self._offload.demote(max_blocks=max_blocks, deadline=deadline)
        if job is None:
            self.is_due = bool(self._in_flight)  # which may take all the room for jobs
        else:
            self._allowance -= len(job) * bytes_per_block
        return job

    def _begin(self, job: TierJob) -> DiskJob:
        assert self._offload is not None, "a disk that is on has a scheduler"
        self._sequence += 1
        self._in_flight.add(job.job_id)
        for rank in range(self.world_size):
            if rank not in self._ranks:  # it shares the memory of a rank that has a file
                self._offload.complete(job.job_id, rank=rank)
        return DiskJob.of(job, self._sequence)

    def expired(self, job_ids: Iterable[int]) -> None:
        """Take the ids of late jobs. They end when no rank uses their slots any more."""
        for job_id in job_ids:
            self._in_flight.discard(job_id)
            logger.warning(
                "kvstow: job %d of the disk tier has not ended within load_timeout_s (%g s), so it "
                "counts as failed. If this repeats, check the disk",
                job_id,
                self.options.load_timeout_s,
            )

    def processed(self, reports: Mapping[int, DiskReport]) -> None:
        """Take the reports of a step: sizes, ends of jobs, records, and confirmed generations."""
        for rank, report in reports.items():
            self._ranks.setdefault(rank, report)
            self._modes[rank] = report.mode
            if self._offload is None:
                continue
            for job_id, ok in report.ends:
                if self._offload.complete(job_id, ok=ok, rank=rank) is not None:
                    self._in_flight.discard(job_id)
            if report.renewal == self._renewal:
                self._confirmed.add(rank)
            if report.records is not None and self.phase == "warming":
                first, records = report.records
                if first == self._next_slot:
                    self._parts[rank] = records
        if self._offload is not None:
            self._advance(self._offload)

    def _advance(self, offload: OffloadScheduler) -> None:
        """Go on to open the disk, and follow what the files still do."""
        if self.phase == "renewing" and self._confirmed >= self._ranks.keys():
            self.phase = "on"
        if self.phase == "warming":
            self._warm(offload)
        if self.phase == "on":
            mode = min(self._modes.values(), key=_MODES.index)
            if mode != offload.disk_mode:
                offload.set_disk(mode)

    def _warm(self, offload: OffloadScheduler) -> None:
        """Agree on a part of the records, or adopt a part of what is agreed."""
        if self._parts.keys() == self._ranks.keys():
            parts = [self._parts[rank] for rank in sorted(self._parts)]
            highest = [int(part.sequences.max()) for part in parts if len(part)]
            self._sequence = max([self._sequence, *highest])
            self._agreed.append(agreed(parts, self.num_slots))
            self._parts.clear()
            self._next_slot += RECORDS_PER_STEP
            if self._next_slot >= self.num_slots:
                self._to_adopt = _joined(self._agreed)
        if self._to_adopt is not None:
            now, rest = slice(0, RECORDS_PER_STEP), slice(RECORDS_PER_STEP, None)
            adopt(offload, _part(self._to_adopt, now))
            self._to_adopt = _part(self._to_adopt, rest)
            if not len(self._to_adopt):
                num_blocks = offload.disk_stats()["disk_resident_blocks"]
                logger.info("kvstow: the disk tier begins with %d blocks", num_blocks)
                self._forget_records()
                self.phase = "on"

    def stats(self) -> dict[str, int]:
        """Return the counters and gauges of the disk."""
        if self._offload is None:
            return {}
        own = {"disk_capacity_blocks": self.num_slots}
        if (mode := self._offload.disk_mode) is not None:
            own["disk_mode"] = _MODES.index(mode)
        return {**self._offload.disk_stats(), **own}

    @property
    def has_work(self) -> bool:
        """Whether vLLM must go on stepping, for copies to land and for the disk to open."""
        if self.phase == "absent":
            return False
        now = self.clock()
        if self.phase != "on":
            return now < self._until
        return bool(self._in_flight) or (self.is_due and now < self._flush_until)


def _part(records: SlotRecords, at: slice) -> SlotRecords:
    return SlotRecords(*(getattr(records, each.name)[at] for each in fields(records)))


def _joined(parts: list[SlotRecords]) -> SlotRecords:
    """Return the records of all parts, the oldest write first."""
    used = [part for part in parts if len(part)] or parts[:1]
    columns = [np.concatenate([getattr(p, each.name) for p in used]) for each in fields(used[0])]
    joined = SlotRecords(*columns)
    order = np.argsort(joined.sequences, kind="stable")
    return SlotRecords(*(getattr(joined, each.name)[order] for each in fields(joined)))
