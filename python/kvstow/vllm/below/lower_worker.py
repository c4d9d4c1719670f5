"""The worker half of a tier below the host: the jobs on one rank's part of the host tier.

```
take      a step's orders: demotes, promotes, and what the kind of tier adds
report    what has ended since, once a step
```

How a wrong block could be served, and what prevents it:

- With `verify` on a GPU, a promoted slot has the sum of the block before it: it gets a new one
  before the promote is reported. The host damages a block before its demote, so that the tier would
  vouch for the damage: such a block is dropped again (`tiers.sums` does both for other movers).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from time import monotonic

import numpy as np
import numpy.typing as npt

from kvstow import KvstowError
from kvstow.tiers import TierBlocks, TierStats
from kvstow.tiers.runner import TierRunner
from kvstow.tiers.tier import Tier
from kvstow.transfer.verified import have_device_sums, record_device_sums
from kvstow.vllm.messages import LowerJob, LowerOrders, LowerReport

logger = logging.getLogger("vllm." + __name__)


class LowerWorker:
    """The jobs between one rank's host memory and a tier.

    Attributes:
        tier: the tier.
    """

    tier: Tier

    def __init__(
        self, tier: Tier, name: str, *, rank: int, slot_bytes: Sequence[int], timeout_s: float
    ) -> None:
        """Take an open tier, which `close` closes.

        Args:
            tier: the tier.
            name: of the kind of tier, for messages.
            rank: this worker's number in its engine.
            slot_bytes: per group, the bytes of a host slot that a block of the group fills.
            timeout_s: the most seconds for a job.
        """
        self.tier = tier
        self._name, self._rank = name, rank
        self._slot_bytes, self._timeout_s = slot_bytes, timeout_s
        self._runner = TierRunner(tier)
        self._jobs: dict[int, LowerJob] = {}
        self._report = self._new_report()
        self._mode = self._watched.mode
        self._counted = Counted(self._watched)
        self._has_warned = False

    def take(self, orders: LowerOrders) -> None:
        """Begin a step's jobs."""
        for job in orders.jobs:
            self._begin(job, monotonic() + self._timeout_s)

    def used(self, host_slots: npt.NDArray[np.int32]) -> None:
        """Note that a store writes to these host slots from now on."""

    def _begin(self, job: LowerJob, deadline: float) -> None:
        self._jobs[job.job_id] = job
        self._runner.begin(job.direction, job.job_id, job.blocks, job.host_slots, deadline=deadline)

    def report(self, *, is_asked: bool) -> LowerReport | None:
        """Return what has happened since the last report; None if it is nothing.

        Args:
            is_asked: whether the scheduler half wants to know what this rank has.
        """
        report = self._report
        for job_id, ok in self._runner.poll():
            report.ends.append((job_id, self._checked(self._jobs.pop(job_id), ok)))
        report.mode = self._watched.mode
        is_new = report.mode != self._mode
        if is_new:
            self._mode = report.mode
            logger.warning(
                "kvstow: the %s tier of rank %d is %s, and requests go on: %s",
                self._name,
                self._rank,
                report.mode,
                self._watched.error,
            )
        if not (is_asked or is_new or report.ends or report.records or report.renewal):
            return None
        self._report = self._new_report()
        return report

    def _new_report(self) -> LowerReport:
        return LowerReport(self.tier.slot_bytes, self._watched.mode)

    @property
    def _watched(self) -> Tier:
        """The tier that may fail for good."""
        return self.tier

    def _checked(self, job: LowerJob, ok: list[bool]) -> list[bool]:
        """Return which blocks of a job count, and give promoted slots the sums of kernels.

        The tier itself does so for the checksums of other movers.
        """
        arena = self.tier.arena
        if not arena.has_device_sums:
            return ok
        # A pipeline stage has no layers of some groups, and copies nothing of them.
        own = np.array(self._slot_bytes)[job.blocks.groups]
        is_demote = job.direction == "demote"
        # A demote that was late may have written blocks that count as failed. They last.
        at = np.flatnonzero((np.array(ok, np.bool_) | is_demote) & (own > 0))
        slots, slot_bytes = job.host_slots[at].astype(np.int64), own[at].tolist()
        if not is_demote:
            record_device_sums(arena, slots, slot_bytes)
            return ok
        damaged = at[~have_device_sums(arena, slots, slot_bytes)]
        if len(damaged):
            with suppress(KvstowError):
                self.tier.delete(some_of(job.blocks, damaged))
            for index in damaged:
                ok[index] = False
        return ok

    def counted(self) -> dict[str, int]:
        """Return what has been counted since the last call, by the keys of the metrics."""
        counts = self._counted.news()
        if counts.get("disk_mismatched_blocks") and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "kvstow: %d blocks of the %s tier of rank %d are not what was written there, and "
                "requests recompute them. Later ones are only counted",
                counts["disk_mismatched_blocks"],
                self._name,
                self._rank,
            )
        return counts

    def close(self) -> None:
        """Carry out every job that has begun, and close the tier."""
        self._runner.close()


class Counted:
    """What a tier has done since it was last asked, by the keys of a disk's metrics."""

    def __init__(self, tier: Tier) -> None:
        """Begin with a tier that has just been opened."""
        self._tier, self._before = tier, TierStats()

    def news(self) -> dict[str, int]:
        """Return what has been counted since the last call."""
        now, before = self._tier.stats(), self._before
        self._before = now
        counts = {
            "demoted_bytes": now.put_bytes - before.put_bytes,
            "promoted_bytes": now.got_bytes - before.got_bytes,
            "disk_mismatched_blocks": now.mismatched_blocks - before.mismatched_blocks,
        }
        return {key: count for key, count in counts.items() if count}


def some_of(blocks: TierBlocks, at: npt.NDArray[np.intp]) -> TierBlocks:
    """Return some blocks of a job, without their parents."""
    assert blocks.slots is not None, "the blocks of a job have slots"
    return replace(blocks, parents=None).some(at)
