"""Pieces of the jobs of a slot file. One thread carries out a piece, or several that are joined.

How a wrong block could be served, and what prevents it:

- Joined puts mix up whose bytes are whose: slots, host slots and frames are sorted in one order,
  and the outcomes go back in the reverse of it. A frame names its block and its slot, and its
  checksum is that of its own host slot.
- Two joined puts write one slot: no two jobs that write have a slot in use at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias

import numpy as np

from kvstow._core import TransferError
from kvstow.tiers.frame import FRAME, Bools, Frames, taken, words_of
from kvstow.tiers.slot_jobs import Job, Kind
from kvstow.transfer.mover import Index

# Blocks of a job.
Part: TypeAlias = tuple[Job, slice]

# Pieces that wait are joined up to so many bytes. A small get may wait for these of each large one.
_JOINED_BYTES: Final = {"put": 32 << 20, "get": 16 << 20}


class Store(Protocol):
    """Who carries out the pieces."""

    def carry_out(self, parts: list[Part]) -> None:
        """Do a part of one job, or of several puts; raise `OSError` if a call fails."""

    def fail(self, kind: Kind, error: OSError) -> TransferError:
        """Lower the mode after a failed call, and return why."""

    def end_piece(self, job: Job, error: TransferError | None) -> None:
        """Report the end of a piece."""


class Piece:
    """Part of a job, or parts of several puts, for one thread."""

    def __init__(self, store: Store, job: Job, part: slice, slot_bytes: int, most_bytes: int) -> None:
        """Cut a piece off a job.

        Args:
            store: carries it out.
            job: the job.
            part: the blocks.
            slot_bytes: bytes of a slot.
            most_bytes: the most bytes that one thread may have in flight.
        """
        self._store, self._most_bytes = store, most_bytes
        self._parts = [(job, part)]
        # The job of each piece that is joined here.
        self._jobs = [job]
        self.num_bytes = (part.stop - part.start) * slot_bytes if len(job.host) else 0

    def take_in(self, other: Piece) -> bool:
        """Join the piece that follows, of this job or of the next, unless both are too much."""
        (job, part), (next_job, next_part) = self._parts[-1], other._parts[0]
        num_bytes = self.num_bytes + other.num_bytes
        if num_bytes > min(_JOINED_BYTES.get(job.kind, 0), self._most_bytes):
            return False
        self.num_bytes = num_bytes
        self._jobs += other._jobs
        if job is next_job:
            self._parts[-1] = job, slice(part.start, next_part.stop)
        else:
            self._parts += other._parts
        return True

    def run(self) -> None:
        """Carry it out. An error ends the piece, and the thread goes on."""
        error = None
        try:
            self._store.carry_out(self._parts)
        except OSError as failed:
            error = self._store.fail(self._jobs[0].kind, failed)
        except BaseException as failed:
            error = TransferError(f"the job failed ({failed!r}); this is an error in kvstow")
            error.__cause__ = failed
        self.fail(error)

    def fail(self, error: TransferError | None) -> None:
        """End it, without carrying it out if `run` has not."""
        for job in self._jobs:
            self._store.end_piece(job, error)


@dataclass(slots=True, eq=False)
class Joined:
    """The blocks of parts of puts, as columns in the order of their slots.

    Attributes:
        parts: the parts.
        slots: shape [n], which ascend.
        host: shape [n], the host slot of each.
        frames: shape [n], the frame of each.
    """

    parts: list[Part]
    slots: Index = field(init=False)
    host: Index = field(init=False)
    frames: Frames = field(init=False)
    _order: Index | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Join the columns."""
        if len(self.parts) == 1:
            job, part = self.parts[0]
            self.slots, self.host, self.frames = job.slots[part], job.host[part], job.frames[part]
            return
        slots = np.concatenate([job.slots[part] for job, part in self.parts])
        host = np.concatenate([job.host[part] for job, part in self.parts])
        words = np.concatenate([words_of(job.frames[part]) for job, part in self.parts])
        if not (slots[1:] > slots[:-1]).all():
            self._order = order = np.argsort(slots)
            slots, host, words = slots[order], host[order], words[order]
        self.slots, self.host, self.frames = slots, host, words.reshape(-1).view(FRAME)

    def keep(self, which: Bools) -> None:
        """Leave out the other blocks. `report` still takes the outcome of all."""
        self.slots, self.host = self.slots[which], self.host[which]
        self.frames = taken(words_of(self.frames), np.flatnonzero(which))

    def report(self, ok: Bools) -> None:
        """Write the outcome of all blocks, in the order of their slots, into their jobs."""
        if self._order is not None:
            by_slot, ok = ok, np.empty_like(ok)
            ok[self._order] = by_slot
        begin = 0
        for job, part in self.parts:
            at = job.at[part]
            job.ok[at] = ok[begin : begin + len(at)]
            begin += len(at)
