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
- A block is whole on one rank only. After a restart a slot counts only if all ranks hold the same
  key in it, by the same write: each write has a number above those of all records.
- The server ends, and a rank writes what only the host has (`DiskWorker`), while another rank has
  other plans: each plan has numbers of its own, so the ranks do not agree on these slots.
- What the jobs could do wrong: `lower_tier`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, fields
from typing import ClassVar, Final, Literal, TypeAlias

import numpy as np

from kvstow import OffloadScheduler
from kvstow.tiers import SlotRecords, TierBlocks
from kvstow.tiers.tier import MODES
from kvstow.tiers.warm import adopt, agreed
from kvstow.vllm.below.lower_tier import LowerTier
from kvstow.vllm.messages import RECORDS_PER_STEP, LowerJob, LowerOrders, LowerReport

logger = logging.getLogger("vllm." + __name__)

Phase: TypeAlias = Literal["absent", "warming", "renewing", "on"]

# The most host blocks that a plan for the server's end looks at.
_MAX_LAST_BLOCKS: Final = RECORDS_PER_STEP


@dataclass
class DiskTier(LowerTier):
    """Opens the disk of a new scheduler, or after a reset.

    Attributes:
        phase: see the head of this file.
    """

    name: ClassVar[str] = "disk"

    phase: Phase = "absent"
    # While the phase is not "on": vLLM goes on stepping until then.
    _until: float = 0.0
    _renewal: int = 0
    _confirmed: set[int] = field(default_factory=set)
    _next_slot: int = 0
    _parts: dict[int, SlotRecords] = field(default_factory=dict)
    _agreed: list[SlotRecords] = field(default_factory=list)
    _to_adopt: SlotRecords | None = None
    # Whether the workers' plan for the end is out of date, and whether they have one.
    _must_plan: bool = False
    _has_plan: bool = False

    # -- the start and resets -----------------------------------------------------------------

    @property
    def num_slots(self) -> int:
        """Slots that every file has; 0 if no rank has reported a file."""
        return min((report.num_slots for report in self._ranks.values()), default=0)

    def num_blocks(self, num_host_blocks: int) -> int:
        """Return the slots that every file has."""
        return self.num_slots

    def begin(self, offload: OffloadScheduler) -> None:
        """Open the disk of a new scheduler.

        Only the first one finds an earlier server's blocks, unless a reset has come before it.
        """
        is_first = self._offload is None and not self._renewal
        super().begin(offload)
        if self.num_slots and is_first:
            self._enter("warming")
        elif self.num_slots:
            self.reset()

    def reset(self) -> None:
        """Draw a new generation; see `LowerTier.reset`. Without a scheduler, `begin` draws it."""
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

    def _is_opening(self) -> bool:
        """Whether the records of an earlier server are still to come."""
        return self.phase == "warming" and self.clock() < self._until

    # -- steps --------------------------------------------------------------------------------

    def _orders(self, offload: OffloadScheduler, now: float) -> LowerOrders | None:
        """Return the jobs of a step, or what opens the disk."""
        self._must_plan = self._must_plan or not self._is_at_rest
        if self.phase == "renewing":
            return LowerOrders(renewal=self._renewal)
        if self.phase == "warming":
            no_more = self._to_adopt is not None
            return None if no_more else LowerOrders(records_from=self._next_slot)
        if self.phase == "absent":
            return None
        planned = self._plan(offload, now)
        last = self._plan_last(offload) if self._is_at_rest else None
        return None if not planned and last is None else LowerOrders(planned, last=last)

    def _plan_last(self, offload: OffloadScheduler) -> list[LowerJob] | None:
        """Return what the ranks write if the server ends now; None if they have that plan.

        The blocks of a generation that a reset has drawn are of no use to the next server.
        """
        if not self._must_plan or super().has_work:
            return None
        self._must_plan = False
        is_warm = not self._renewal and all(report.is_warm for report in self._ranks.values())
        lower, max_blocks = self.options.lower, _MAX_LAST_BLOCKS
        if (rate := lower.max_write_bytes_per_s) is not None:
            max_blocks = min(max_blocks, int(rate * lower.flush_s // self._bytes_per_block))
        host, slots, hashes, groups, parents = offload.unsaved(
            max_blocks=max_blocks if is_warm else 0
        )
        per_job, jobs = self.max_in_flight(offload.num_host_blocks), []
        begins = range(0, len(host), per_job)
        self._sequence += len(begins)
        for at, begin in enumerate(begins):
            part = slice(begin, begin + per_job)
            # The first are the most recent, and get the highest number.
            blocks = TierBlocks(
                hashes[part], groups[part], parents[part], slots[part], self._sequence - at
            )
            jobs.append(LowerJob(-1 - at, "demote", host[part], blocks))
        had_plan, self._has_plan = self._has_plan, bool(jobs)
        return jobs if jobs or had_plan else None

    def _reported(self, rank: int, report: LowerReport) -> None:
        """Take records, and confirmed generations."""
        if report.renewal == self._renewal:
            self._confirmed.add(rank)
        if report.records is not None and self.phase == "warming":
            first, records = report.records
            if first == self._next_slot:
                self._parts[rank] = records

    def _advance(self, offload: OffloadScheduler) -> None:
        """Go on to open the disk, and follow what the files still do."""
        if self.phase == "renewing" and self._confirmed >= self._ranks.keys():
            self.phase = "on"
        if self.phase == "warming":
            self._warm(offload)
        if self.phase == "on":
            self._follow(offload)

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
            adopt(offload, self._to_adopt.some(slice(RECORDS_PER_STEP)))
            self._to_adopt = self._to_adopt.some(slice(RECORDS_PER_STEP, None))
            if not len(self._to_adopt):
                num_blocks = offload.disk_stats()["disk_resident_blocks"]
                logger.info("kvstow: the disk tier begins with %d blocks", num_blocks)
                self._forget_records()
                self.phase = "on"

    # -- figures ------------------------------------------------------------------------------

    def stats(self) -> dict[str, int]:
        """Return the counters and gauges of the disk."""
        if self._offload is None:
            return {}
        own = {"disk_capacity_blocks": self.num_slots}
        if (mode := self._offload.disk_mode) is not None:
            own["disk_mode"] = MODES.index(mode)
        return {**self._offload.disk_stats(), **own}

    @property
    def has_work(self) -> bool:
        """Whether vLLM must go on stepping, for copies to land and for the disk to open."""
        if self.phase == "absent":
            return False
        if self.phase == "on":
            return super().has_work or self._must_plan
        return self.clock() < self._until


def _joined(parts: list[SlotRecords]) -> SlotRecords:
    """Return the records of all parts, the oldest write first."""
    used = [part for part in parts if len(part)] or parts[:1]
    columns = [np.concatenate([getattr(p, each.name) for p in used]) for each in fields(used[0])]
    joined = SlotRecords(*columns)
    return joined.some(np.argsort(joined.sequences, kind="stable"))
