"""The worker half of the disk tier: one slot file, beside one rank's part of the host tier.

```
open      the file, once vLLM has registered the KV caches; an unsuitable place ends the start
take      a step's orders: demotes, promotes, a new generation, records of the last server
report    what has ended since, once a step
close     what only the host has, as the last plan of the scheduler half says, and the file
```

vLLM ends the workers before its scheduler, so they write the last blocks alone.

How a wrong block could be served, and what prevents it:

- A file of another model, rank or layout: its fingerprint (`identity`).
- A step's report is lost or doubled, because steps overlap: the scheduler half names the first slot
  whose record it wants, and the number of the generation that it wants, until it has them.
- A host slot gets another block after the plan for the end: the worker sees each job that writes to
  a slot, and leaves the slot out. The same holds for slots of the file.
- The plan for the end is older than a reset: its blocks are of the weights with which the server
  started, and so is the generation of the file. A worker that draws a new one drops the plan.
- Blocks that are written between a reset and the new generation: the scheduler half sends no job
  until every rank has confirmed the new generation.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import monotonic
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstow import ConfigError, KvstowError
from kvstow.sizes import format_bytes
from kvstow.tiers import (
    Fingerprint,
    SlotFile,
    SlotFileMismatch,
    SlotRecords,
    SlotTier,
    TierTicket,
)
from kvstow.tiers.files import Files
from kvstow.tiers.opening import check_place
from kvstow.tiers.tier import Tier
from kvstow.transfer import HostArena
from kvstow.vllm.below.lower_worker import LowerWorker
from kvstow.vllm.messages import RECORDS_PER_STEP, LowerJob, LowerOrders, LowerReport
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


# When the time for the last blocks is over, calls are still under way.
_LAST_CALLS_S: Final = 1.0


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


class DiskWorker(LowerWorker):
    """The slot file of one rank, and the jobs on it.

    Attributes:
        file: the open slot file.
    """

    def __init__(  # noqa: PLR0913 - each keyword by its name
        self,
        place: Place,
        options: Options,
        arena: HostArena,
        *,
        rank: int,
        slot_bytes: Sequence[int],
        timeout_s: float | None = None,
    ) -> None:
        """Open the file.

        Args:
            place: the file.
            options: the user's options.
            arena: the host memory.
            rank: this worker's number in its engine.
            slot_bytes: per group, the bytes of a host slot that a block of the group fills.
            timeout_s: the most seconds for a job; None for `load_timeout_s`.

        Raises:
            ConfigError: the place is unsuitable, too small, or holds something else.
            StateError: another process has the file open.
        """
        file = _open(place, options, arena)
        self.file: Final = file
        self._is_warm = place.is_warm
        timeout_s = timeout_s or options.load_timeout_s
        super().__init__(
            self._over(file), "disk", rank=rank, slot_bytes=slot_bytes, timeout_s=timeout_s
        )
        self._flush_s, self._last = options.disk_flush_s, list[LowerJob]()
        # Which slots no job has used since the plan for the end, on the host and in the file.
        self._unused_on_host = np.zeros(file.num_host_slots, np.bool_)
        self._unused_in_file = np.zeros(file.num_slots, np.bool_)
        self._renewal: TierTicket | None = None
        self._renewal_number = 0
        self._must_confirm = False
        self._records: SlotRecords | None = None
        if place.is_warm:
            records = file.records()
            self._records = records.some(np.argsort(records.slots))
        else:
            self._renewal = file.renew()
        logger.info(
            "kvstow: rank %d keeps up to %d blocks in %s (%s), %d of an earlier server%s",
            rank,
            file.num_slots,
            file.path,
            format_bytes(file.num_slots * file.slot_bytes),
            0 if self._records is None else len(self._records),
            "" if file.is_direct else f", through the page cache: {file.not_direct}",
        )

    def _over(self, file: SlotTier) -> Tier:
        """Return the tier that moves the blocks: the file, or one that the file is a part of."""
        return file

    @property
    def _watched(self) -> SlotTier:
        return self.file

    # -- the scheduler half's orders ------------------------------------------------------------

    def take(self, orders: LowerOrders) -> None:
        """Begin a step's jobs, and what else the scheduler half asks for."""
        if orders.renewal > self._renewal_number:
            self._renewal_number, self._records = orders.renewal, None
            self._renewal, self._last = self._renew(orders), []
        self._must_confirm = self._must_confirm or orders.renewal > 0
        if orders.records_from >= 0:
            self._report.records = self._part(orders.records_from)
        if orders.last is not None:
            self._last = orders.last
            self._unused_on_host.fill(True)
            self._unused_in_file.fill(True)
        for job in orders.jobs:
            self.used(job.host_slots)
            self._unused_in_file[job.blocks.slots] = False
        super().take(orders)

    def _renew(self, orders: LowerOrders) -> TierTicket:
        """Begin to draw a new generation."""
        return self.file.renew()

    def used(self, host_slots: npt.NDArray[np.int32]) -> None:
        """Leave these slots out of what is written at the end, because a job uses them now."""
        self._unused_on_host[host_slots] = False

    def _part(self, first: int) -> tuple[int, SlotRecords] | None:
        """Return the records of the slots from `first` on; None until the file is ready."""
        if self._renewal is not None and not self._renewal.poll():
            return None  # an earlier server's blocks may come back until this has ended
        if self._records is None:
            return first, NO_RECORDS
        begin, end = np.searchsorted(self._records.slots, [first, first + RECORDS_PER_STEP])
        return first, self._records.some(slice(begin, end))

    def _has_renewed(self) -> bool:
        """Whether the last new generation is durable."""
        return self._renewal is not None and self._renewal.poll() and bool(self._renewal.ok[0])

    # -- the reports ----------------------------------------------------------------------------

    def report(self, *, is_asked: bool) -> LowerReport | None:
        """Return what has happened since the last report; see `LowerWorker.report`."""
        if self._must_confirm and self._has_renewed():
            self._report.renewal, self._must_confirm = self._renewal_number, False
        return super().report(is_asked=is_asked)

    def _new_report(self) -> LowerReport:
        return replace(super()._new_report(), num_slots=self.file.num_slots, is_warm=self._is_warm)

    # -- the end --------------------------------------------------------------------------------

    def close(self) -> None:
        """Carry out every job that has begun, write what only the host has, and close the file."""
        self._flush()
        super().close()

    def _flush(self) -> None:
        """Write what only the host has, the most recent first, for at most `disk_flush_s`."""
        last, self._last = self._last, []
        if not last:
            logger.info("kvstow: rank %d has no block to write at its end", self._rank)
            return
        end, num_written = monotonic() + self._flush_s, 0
        for job in map(self._still_true, last):
            if (left_s := end - monotonic()) <= 0 or self.file.mode != "on":
                break
            self._begin(job, end)
            if not self._runner.wait(left_s + _LAST_CALLS_S):
                break
            for job_id, ok in self._runner.poll():
                sound = self._checked(self._jobs.pop(job_id), ok)
                num_written += sum(sound) if job_id == job.job_id else 0
        logger.info(
            "kvstow: rank %d has written %d of %d blocks that only the host had",
            self._rank,
            num_written,
            sum(len(job.blocks) for job in last),
        )

    def _still_true(self, job: LowerJob) -> LowerJob:
        """Return a job of the plan for the end without the slots that jobs have used since."""
        is_unused = self._unused_on_host[job.host_slots] & self._unused_in_file[job.blocks.slots]
        kept = np.flatnonzero(is_unused)
        return replace(job, host_slots=job.host_slots[kept], blocks=job.blocks.some(kept))


def _open(place: Place, options: Options, arena: HostArena) -> SlotTier:
    """Open the slot file, with errors that name the connector's options."""

    def opened(on_mismatch: str) -> SlotTier:
        file = SlotFile(place.path, place.max_bytes, on_mismatch)  # type: ignore[arg-type]
        return file.open(arena, place.fingerprint)

    with _names_of_options(options, place.max_bytes):
        try:
            return opened("refuse")
        except SlotFileMismatch as error:
            if options.disk_on_mismatch == "refuse":
                raise ConfigError(
                    f"{WHERE}.disk_path is {options.disk_path!r}: {error.why}; name another "
                    'folder, or set disk_on_mismatch: "reset" to empty the file'
                ) from error
            logger.warning("kvstow: the slot file is emptied, because %s", error.why)
        return opened("reset")


def check_disk(path: str, max_bytes: int, options: Options, arena: HostArena) -> None:
    """Refuse an unsuitable place, before anything is read or written.

    Raises:
        ConfigError: the place is unsuitable, or too small.
    """
    with _names_of_options(options, max_bytes):
        check_place(Files(), path, max_bytes, arena.slot_stride_bytes * arena.slots_per_run)


@contextmanager
def _names_of_options(options: Options, max_bytes: int) -> Iterator[None]:
    """Let errors name the connector's options."""
    try:
        yield
    except KvstowError as error:
        if WHERE in str(error):
            raise
        raise type(error)(
            f"{WHERE}.disk_path is {options.disk_path!r} and disk_bytes_to_use gives this rank "
            f"{max_bytes} bytes: {error}"
        ) from error
