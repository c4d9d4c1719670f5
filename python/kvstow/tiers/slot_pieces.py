"""Pieces of the jobs of a slot file. One thread carries out a piece, or several that are joined.

How a wrong block could be served, and what prevents it:

- Joined jobs give a block the bytes of another: one index sorts slots, host slots and frames, and
  leads the outcomes back to their jobs.
- Two joined puts write one slot: no two jobs that write have a slot in use at a time.
- Two joined gets read one slot, so that slots which ascend are not those of one run: `SlotCalls`
  looks at each step from slot to slot.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias

import numpy as np

from kvstow._core import TransferError
from kvstow.tiers.frame import FRAME, Frames, taken, words_of
from kvstow.tiers.slot_jobs import Job, Kind
from kvstow.tiers.ticket import Bools
from kvstow.transfer.mover import Index

# Blocks of a job.
Part: TypeAlias = tuple[Job, slice]

# Pieces that wait are joined up to so many bytes. A small get may wait for these of each large one.
_JOINED_BYTES: Final[dict[Kind, int]] = {"put": 32 << 20, "get": 16 << 20}
# Gets of several jobs: a request waits for them, so no more than one small call brings.
_JOINED_GETS_BYTES: Final = 2 << 20


class Store(Protocol):
    """Who carries out the pieces."""

    def carry_out(self, parts: list[Part]) -> None:
        """Do parts of jobs of one kind; raise `OSError` if all of them failed."""

    def fail(self, kind: Kind, error: OSError) -> TransferError:
        """Lower the mode after a failed call, and return why."""

    def end_piece(self, job: Job, error: TransferError | None) -> None:
        """Report the end of a piece."""


class Piece:
    """Part of a job, or parts of several puts or gets, for one thread."""

    def __init__(
        self, store: Store, job: Job, part: slice, slot_bytes: int, most_bytes: int
    ) -> None:
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
        if job.kind not in _JOINED_BYTES or job.kind != next_job.kind:
            return False
        most_bytes = min(_JOINED_BYTES[job.kind], self._most_bytes)
        if job.kind == "get" and self._jobs[0] is not next_job:
            most_bytes = min(_JOINED_GETS_BYTES, most_bytes)
        if num_bytes > most_bytes:
            return False
        self.num_bytes = num_bytes
        self._jobs += other._jobs
        if job is next_job:
            assert part.stop == next_part.start, "a thread takes the pieces of a job in order"
            self._parts[-1] = job, slice(part.start, next_part.stop)
        else:
            self._parts += other._parts
        return True

    def run(self) -> None:
        """Carry out what is not late yet. An error ends the piece, and the thread goes on."""
        in_time = [(job, part) for job, part in self._parts if not job.ticket.poll()]
        error = None
        try:
            if in_time:
                self._store.carry_out(in_time)
        except OSError as failed:
            error = self._store.fail(self._jobs[0].kind, failed)
        except BaseException as failed:
            error = TransferError(f"the job failed ({failed!r}); this is an error in kvstow")
            error.__cause__ = failed
        tried = {job for job, _ in in_time}
        for job in self._jobs:
            self._store.end_piece(job, error if job in tried else None)

    def fail(self, error: TransferError) -> None:
        """End it without carrying it out."""
        for job in self._jobs:
            self._store.end_piece(job, error)


@dataclass(slots=True, eq=False)
class Joined:
    """The blocks of parts of puts or of gets, as columns in the order of their slots.

    Attributes:
        parts: the parts.
        slots: shape [n], which ascend. Two gets may name one slot.
        host: shape [n], the host slot of each.
        frames: shape [n], the frame of each.
    """

    parts: list[Part]
    slots: Index = field(init=False)
    host: Index = field(init=False)
    frames: Frames = field(init=False)
    # Where each block is among those of the parts; None while all are there, in that order.
    _at: Index | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Join the columns."""
        if len(self.parts) == 1:
            job, part = self.parts[0]
            self.slots, self.host, self.frames = job.slots[part], job.host[part], job.frames[part]
            return
        self.slots = np.concatenate([job.slots[part] for job, part in self.parts])
        self.host = np.concatenate([job.host[part] for job, part in self.parts])
        words = [words_of(job.frames[part]) for job, part in self.parts]
        self.frames = np.concatenate(words).reshape(-1).view(FRAME)
        if not (self.slots[1:] > self.slots[:-1]).all():
            self._keep(np.argsort(self.slots))

    def are_wanted(self) -> bool:
        """Return whether any job of these is not late."""
        return not all(job.ticket.poll() for job, _ in self.parts)

    def keep(self, which: Bools) -> None:
        """Leave out the other blocks, which fail."""
        self._keep(np.flatnonzero(which))

    def num_of(self, which: Bools) -> Iterator[tuple[Job, int]]:
        """Yield each job that has blocks of which `which` is True, and how many."""
        at = np.flatnonzero(which) if self._at is None else self._at[which]
        part_of = np.searchsorted(self._ends(), at, side="right")
        nums = np.bincount(part_of, minlength=len(self.parts)).tolist()
        for (job, _), num in zip(self.parts, nums, strict=True):
            if num:
                yield job, num

    def succeed(self) -> None:
        """Report success for the blocks that are left."""
        if self._at is None and len(self.parts) == 1:
            job, part = self.parts[0]
            job.ok[job.at[part]] = True
            return
        ends = self._ends()
        ok = np.zeros(ends[-1], np.bool_)
        ok[slice(None) if self._at is None else self._at] = True
        for (job, part), of_part in zip(self.parts, np.split(ok, ends[:-1]), strict=True):
            job.ok[job.at[part]] = of_part

    def _ends(self) -> Index:
        """Return where the blocks of each part end among all of them."""
        return np.cumsum([part.stop - part.start for _, part in self.parts])

    def _keep(self, at: Index) -> None:
        self.slots, self.host = self.slots[at], self.host[at]
        self.frames = taken(words_of(self.frames), at)
        self._at = at if self._at is None else self._at[at]
