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
- Blocks that are written between a reset and the new generation: the scheduler half sends no job
  until every rank has confirmed the new generation.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields
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
    TierTicket,
)
from kvstow.transfer import HostArena
from kvstow.vllm.below_worker import LowerWorker
from kvstow.vllm.messages import RECORDS_PER_STEP, LowerOrders, LowerReport
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


class DiskWorker(LowerWorker):
    """The slot file of one rank, and the jobs on it.

    Attributes:
        tier: the open slot file.
    """

    tier: SlotTier

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
        tier = _open(place, options, arena)
        super().__init__(
            tier, "disk", rank=rank, slot_bytes=slot_bytes, timeout_s=options.load_timeout_s
        )
        self._renewal: TierTicket | None = None
        self._renewal_number = 0
        self._must_confirm = False
        self._records: SlotRecords | None = None
        if place.is_warm:
            records = tier.records()
            by_slot = np.argsort(records.slots)
            self._records = part_of(records, by_slot)
        else:
            self._renewal = tier.renew()
        logger.info(
            "kvstow: rank %d keeps up to %d blocks in %s (%.2f GiB), %d of an earlier server%s",
            rank,
            tier.num_slots,
            tier.path,
            tier.num_slots * tier.slot_bytes / 2**30,
            0 if self._records is None else len(self._records),
            "" if tier.is_direct else f", through the page cache: {tier.not_direct}",
        )

    # -- the scheduler half's orders ------------------------------------------------------------

    def take(self, orders: LowerOrders) -> None:
        """Begin a step's jobs, and what else the scheduler half asks for."""
        if orders.renewal > self._renewal_number:
            self._renewal_number, self._records = orders.renewal, None
            self._renewal = self.tier.renew()
        self._must_confirm = self._must_confirm or orders.renewal > 0
        if orders.records_from >= 0:
            self._report.records = self._part(orders.records_from)
        super().take(orders)

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

    def report(self, *, is_asked: bool) -> LowerReport | None:
        """Return what has happened since the last report; see `LowerWorker.report`."""
        if self._must_confirm and self._has_renewed():
            self._report.renewal, self._must_confirm = self._renewal_number, False
        return super().report(is_asked=is_asked)

    def _new_report(self) -> LowerReport:
        tier = self.tier
        return LowerReport(tier.slot_bytes, tier.mode, num_slots=tier.num_slots)


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
