"""The worker half of the disk tier: one slot file, beside one rank's part of the host tier.

```
open      the file, once vLLM has registered the KV caches; an unsuitable place ends the start
take      a step's orders: demotes, promotes, a new generation, records of the last server
report    what has ended since, once a step
```

How a wrong block could be served, and what prevents it:

- A file of another model, rank or layout: its fingerprint (`identity`).
- A step's report is lost or doubled, because steps overlap: the scheduler half names the first slot
  whose record it wants, and the number of the generation that it wants, until it has them.
- With `verify` on a GPU, a promoted slot has the sum of the block before it: it gets a new one
  before the promote is reported. The host damages a block before its demote, so that the file would
  vouch for the damage: such a block is dropped again (`tiers.sums` does both for other movers).
- Blocks that are written between a reset and the new generation: the scheduler half sends no job
  until every rank has confirmed the new generation.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from time import monotonic
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstow import ConfigError, KvstowError
from kvstow.tiers import (
    Fingerprint,
    SlotFile,
    SlotFileMismatch,
    SlotRecords,
    SlotTier,
    TierBlocks,
    TierStats,
    TierTicket,
)
from kvstow.tiers.runner import TierRunner
from kvstow.transfer import HostArena
from kvstow.transfer.verified import have_device_sums, record_device_sums
from kvstow.vllm.messages import RECORDS_PER_STEP, DiskJob, DiskOrders, DiskReport
from kvstow.vllm.options import WHERE, Options

logger = logging.getLogger("vllm." + __name__)

NO_RECORDS: Final = SlotRecords(
    np.empty(0, np.int64),
    np.empty(0, np.uint32),
    np.empty(0, np.uint64),
    np.empty((0, 0), np.uint8),
    np.empty((0, 0), np.uint8),
    np.empty(0, np.bool_),
)


@dataclass(frozen=True)
class Place:
    """Where the slot file of a rank lies, and whose blocks it holds.

    Attributes:
        path: the data file.
        max_bytes: bytes of both files, at most.
        fingerprint: whose blocks.
        is_warm: whether the blocks of an earlier server count.
    """

    path: str
    max_bytes: int
    fingerprint: Fingerprint
    is_warm: bool


class DiskWorker:
    """The slot file of one rank, and the jobs on it.

    Attributes:
        tier: the open slot file.
    """

    def __init__(
        self,
        place: Place,
        options: Options,
        arena: HostArena,
        *,
        rank: int,
        slot_bytes: Sequence[int],
    ) -> None:
        """Open the file.

        Args:
            place: the file.
            options: the user's options.
            arena: the host memory.
            rank: this worker's number in its engine.
            slot_bytes: per group, the bytes of a host slot that a block of the group fills.

        Raises:
            ConfigError: the place is unsuitable, too small, or holds something else.
            StateError: another process has the file open.
        """
        self._rank = rank
        self._slot_bytes = slot_bytes
        self._timeout_s = options.load_timeout_s
        self.tier: Final = _open(place, options, arena)
        self._runner = TierRunner(self.tier)
        self._jobs: dict[int, DiskJob] = {}
        self._renewal: TierTicket | None = None
        self._renewal_number = 0
        self._must_confirm = False
        self._records: SlotRecords | None = None
        self._report = self._new_report()
        self._mode = self.tier.mode
        self._counted = TierStats()
        if place.is_warm:
            records = self.tier.records()
            by_slot = np.argsort(records.slots)
            self._records = part_of(records, by_slot)
        else:
            self._renewal = self.tier.renew()
        logger.info(
            "kvstow: rank %d keeps up to %d blocks in %s (%.2f GiB), %d of an earlier server%s",
            rank,
            self.tier.num_slots,
            self.tier.path,
            self.tier.num_slots * self.tier.slot_bytes / 2**30,
            0 if self._records is None else len(self._records),
            "" if self.tier.is_direct else f", through the page cache: {self.tier.not_direct}",
        )

    # -- the scheduler half's orders ------------------------------------------------------------

    def take(self, orders: DiskOrders) -> None:
        """Begin a step's jobs, and what else the scheduler half asks for."""
        if orders.renewal > self._renewal_number:
            self._renewal_number, self._records = orders.renewal, None
            self._renewal = self.tier.renew()
        self._must_confirm = self._must_confirm or orders.renewal > 0
        if orders.records_from >= 0:
            self._report.records = self._part(orders.records_from)
        for job in orders.jobs:
            self._jobs[job.job_id] = job
            self._runner.begin(
                job.direction,
                job.job_id,
                job.blocks,
                job.host_slots,
                deadline=monotonic() + self._timeout_s,
            )

    def _part(self, first: int) -> tuple[int, SlotRecords] | None:
        """Return the records of the slots from `first` on; None until the file is ready."""
        if self._renewal is not None and not self._renewal.poll():
            return None  # an earlier server's blocks may come back until this has ended
        if self._records is None:
            return first, NO_RECORDS
        begin, end = np.searchsorted(self._records.slots, [first, first + RECORDS_PER_STEP])
        return first, part_of(self._records, slice(begin, end))

    def _has_renewed(self) -> bool:
        """Whether the last new generation is durable."""
        return self._renewal is not None and self._renewal.poll() and bool(self._renewal.ok[0])

    # -- the reports ----------------------------------------------------------------------------

    def report(self, *, is_asked: bool) -> DiskReport | None:
        """Return what has happened since the last report; None if it is nothing.

        Args:
            is_asked: whether the scheduler half wants to know this rank's slots.
        """
        report = self._report
        for job_id, ok in self._runner.poll():
            report.ends.append((job_id, self._checked(self._jobs.pop(job_id), ok)))
        if self._must_confirm and self._has_renewed():
            report.renewal, self._must_confirm = self._renewal_number, False
        report.mode = self.tier.mode
        is_new = report.mode != self._mode
        if is_new:
            self._mode = report.mode
            logger.warning(
                "kvstow: the disk tier of rank %d is %s, and requests go on: %s",
                self._rank,
                report.mode,
                self.tier.error,
            )
        if not (is_asked or is_new or report.ends or report.records or report.renewal):
            return None
        self._report = self._new_report()
        return report

    def _new_report(self) -> DiskReport:
        return DiskReport(self.tier.num_slots, self.tier.slot_bytes, self.tier.mode)

    def _checked(self, job: DiskJob, ok: list[bool]) -> list[bool]:
        """Return which blocks of a job count, and give promoted slots the sums of kernels.

        The tier itself does so for the checksums of other movers.
        """
        arena = self.tier.arena
        if not arena.has_device_sums:
            return ok
        # A pipeline stage has no layers of some groups, and copies nothing of them.
        own = np.array(self._slot_bytes)[job.blocks.groups]
        arrived = np.flatnonzero(np.array(ok) & (own > 0))
        slots, slot_bytes = job.host_slots[arrived].astype(np.int64), own[arrived].tolist()
        if job.direction == "promote":
            record_device_sums(arena, slots, slot_bytes)
            return ok
        damaged = arrived[~have_device_sums(arena, slots, slot_bytes)]
        if len(damaged):
            with suppress(KvstowError):
                self.tier.delete(_some(job.blocks, damaged))
            for at in damaged:
                ok[at] = False
        return ok

    def counted(self) -> dict[str, int]:
        """Return what has been counted since the last call, by the keys of the metrics."""
        now, before = self.tier.stats(), self._counted
        self._counted = now
        counts = {
            "demoted_bytes": now.put_bytes - before.put_bytes,
            "promoted_bytes": now.got_bytes - before.got_bytes,
            "disk_mismatched_blocks": now.mismatched_blocks - before.mismatched_blocks,
        }
        return {key: count for key, count in counts.items() if count}

    def close(self) -> None:
        """Carry out every job that has begun, and close the file."""
        self._runner.close()


def _open(place: Place, options: Options, arena: HostArena) -> SlotTier:
    """Open the slot file, with errors that name the connector's options."""

    def opened(on_mismatch: str) -> SlotTier:
        file = SlotFile(place.path, place.max_bytes, on_mismatch)  # type: ignore[arg-type]
        return file.open(arena, place.fingerprint)

    try:
        try:
            return opened("refuse")
        except SlotFileMismatch as error:
            if options.disk_on_mismatch == "refuse":
                raise ConfigError(
                    f"{WHERE}.disk_path is {options.disk_path!r}: {error} "
                    f"({WHERE}.disk_on_mismatch)"
                ) from error
            logger.warning("kvstow: %s is emptied, because %s", place.path, error)
        return opened("reset")
    except KvstowError as error:
        if WHERE in str(error):
            raise
        raise type(error)(
            f"{WHERE}.disk_path is {options.disk_path!r} and disk_bytes_to_use gives this rank "
            f"{place.max_bytes} bytes: {error}"
        ) from error


def part_of(records: SlotRecords, at: slice | npt.NDArray[np.intp]) -> SlotRecords:
    """Return some of these records, in the order of `at`."""
    return SlotRecords(*(getattr(records, field.name)[at] for field in fields(records)))


def _some(blocks: TierBlocks, at: npt.NDArray[np.intp]) -> TierBlocks:
    """Return some blocks of a job, as `Tier.delete` takes them."""
    assert blocks.slots is not None, "a disk tier has slots"
    hashes = [blocks.hashes[index] for index in at]
    return TierBlocks(hashes, np.asarray(blocks.groups)[at], None, np.asarray(blocks.slots)[at])
