"""The open slot file: its frames in memory, the jobs under way, and the file calls of each.

```
put    host slot --> XXH3 into a new frame --> data, in runs --> frame into the index --> True
                 +-> differs from the checksum of its store --> False
get    frame in memory is of this block? --> data, in runs --> XXH3 is the frame's? --> True
```

How a wrong block could be served, and what prevents it:

- A slot that is being overwritten: its frame is dropped before the first byte is written. A job for
  a slot, or a host slot, that another job has in use fails for that block.
- A call that returns after its job was given up: its slot and its host slot stay in use.
- A job of an earlier generation: its frames do not match, and what it read does not count.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Final

import numpy as np

from kvstow._core import StateError, TransferError, row_digests
from kvstow.tiers.files import Files
from kvstow.tiers.frame import (
    FRAME,
    Context,
    Fingerprint,
    Frames,
    are_of,
    expected_frames,
    match,
    new_frames,
    seal,
    taken,
    words_of,
)
from kvstow.tiers.lanes import Lanes, Work
from kvstow.tiers.opening import Opened
from kvstow.tiers.slot_calls import SlotCalls
from kvstow.tiers.slot_index import new_generation
from kvstow.tiers.slot_jobs import Job, Kind, Marks
from kvstow.tiers.slot_pieces import Joined, Part, Piece
from kvstow.tiers.sums import ArenaSums
from kvstow.tiers.ticket import Bools, TierTicket
from kvstow.tiers.tier import Checked, Mode, Rows, TierStats, count_end
from kvstow.transfer.fork import FORKED, close_in_children
from kvstow.transfer.mover import Index

# A piece of a job, which one thread carries out. Each costs some switches between threads, but a
# small job waits for a piece of each large one before it.
_PIECE_BYTES = 8 << 20
# After this many calls in a row that cannot read, the disk is given up.
_MAX_READ_ERRORS = 8


class SlotStore:
    """Carries out jobs on an open slot file. Its methods block for no file call, except `close`.

    Attributes:
        header: the header as the file has it, or gets it now.
        context: what all new frames have in common.
        frames: the frames of all slots, zeros where a slot holds nothing.
    """

    def __init__(  # noqa: PLR0913 - the file, its host side, and its threads
        self,
        files: Files,
        opened: Opened,
        rows: Rows,
        sums: ArenaSums,
        lanes: Lanes,
        *,
        most_bytes: int,
    ) -> None:
        """Take over the file, and the threads. Each moves at most `most_bytes` at a time."""
        self.header = opened.header
        self.context = self._opened_context = opened.context
        self.frames: Final = opened.frames
        self._words = words_of(self.frames)
        self._now = files.now
        self._rows, self._sums = rows, sums
        slot_bytes = opened.header.slot_bytes
        self._most_bytes = most_bytes
        self._per_piece = max(1, min(_PIECE_BYTES, most_bytes) // slot_bytes)
        self._lock = threading.RLock()
        self._header_lock = threading.Lock()
        self._slots_in_use = Marks(opened.header.num_slots)
        self._host_in_use = Marks(len(rows))
        self._jobs: set[Job] = set()
        self._counts: Counter[str] = Counter()
        self._num_read_errors = 0
        self._read_only: TransferError | None = None
        self._off: TransferError | None = None
        self._is_closed = self._is_forked = False
        self._lanes = lanes
        self._calls = SlotCalls(files, opened.data, opened.index, rows, lanes)
        close_in_children(self)

    @property
    def mode(self) -> Mode:
        """What the store still does."""
        if self._off is not None or self._lanes.error is not None:
            return "off"
        return "on" if self._read_only is None else "read_only"

    @property
    def error(self) -> TransferError | None:
        """Why the store is not on; None while it is."""
        return self._off or self._lanes.error or self._read_only

    @property
    def stats(self) -> TierStats:
        """What the store has done, and what it does now."""
        with self._lock:
            return TierStats(
                **self._counts,
                in_flight_bytes=self._lanes.in_flight_bytes,
                quarantined_bytes=self._lanes.quarantined_bytes,
            )

    def check_open(self) -> None:
        """Raise `StateError` after `close`, and in a forked child."""
        if self._is_forked:
            raise StateError(f"this slot file {FORKED}; open one here")
        if self._is_closed:
            raise StateError("this slot file is closed; open it again")

    def held(self) -> Frames:
        """Return the frames of all slots, zeros where a slot holds nothing of this generation.

        Raises:
            StateError: a job has not ended.
        """
        with self._lock:
            if self._jobs:
                raise StateError(
                    f"{len(self._jobs)} jobs of this slot file have not ended; wait for their "
                    "tickets, then ask what it holds"
                )
            if self.context is not self._opened_context:  # only a reset leaves earlier ones
                self._words[~are_of(self.frames, self.context)] = 0
            return self.frames

    def holds(self, blocks: Checked) -> Bools:
        """Return which blocks have a frame in their slots. A `get` proves them."""
        assert blocks.slots is not None, "a slot file has slots"
        return match(taken(self._words, blocks.slots), expected_frames(blocks, self.context))

    # -- jobs ------------------------------------------------------------------------------------

    def submit(
        self, kind: Kind, blocks: Checked, host: Index, deadline: float | None
    ) -> TierTicket:
        """Begin a job, except for blocks whose slot or host slot another job has in use."""
        assert blocks.slots is not None, "a slot file has slots"
        job: Job | None = None
        ticket = TierTicket(len(blocks), deadline, clock=self._now)
        try:
            ticket.announce()
            context, slots = self.context, blocks.slots
            frames = (new_frames if kind == "put" else expected_frames)(blocks, context)
            job = Job(kind, frames, slots, host, context, ticket)
            refused = self.error if kind == "put" or self.mode == "off" else None
            if refused is not None:
                self._end(job, refused)
                return ticket
            with self._lock:
                free = self._slots_in_use.are_free(slots, to_write=kind != "get")
                if kind != "delete":
                    free &= self._host_in_use.are_free(host, to_write=kind == "get")
                if kind == "get":
                    self._find(job, free)
                job.keep(free)
                self._begin(job)
        except BaseException:  # an interrupt: nobody else ends a job that is not queued
            if not (ticket.has_ended or (job is not None and job.is_begun)):
                ticket.end()
            raise
        return ticket

    def renew(self, fingerprint: Fingerprint | None) -> TierTicket:
        """Draw a new generation, and begin to make it durable; see `SlotTier.renew`."""
        job: Job | None = None
        ticket, before = TierTicket(1, clock=self._now), (self.header, self.context)
        try:
            ticket.announce()
            header, context = before
            generation, fields, digest = new_generation(), header.fingerprint, context.fingerprint
            if fingerprint is not None:
                fields, digest = dict(fingerprint.fields), fingerprint.digest
            none, one = np.empty(0, np.int64), np.zeros(1, np.int64)
            with self._lock:
                self.header = replace(
                    header,
                    generation=generation,
                    is_renewed=fingerprint is None,
                    fingerprint=fields,
                )
                self.context = Context(digest, generation, context.length)
                job = Job("renew", np.zeros(1, FRAME), one, none, self.context, ticket)
                if self.mode == "off":
                    self._end(job, self.error)
                else:
                    self._begin(job)
        except BaseException:  # an interrupt: a generation that the file does not get never counts
            # A job that has begun takes place, unless `_begin` has taken it back, or it has failed.
            if job is None or not job.is_begun or (ticket.has_ended and not ticket.ok[0]):
                self.header, self.context = before
                ticket.end()
            raise
        return ticket

    def _begin(self, job: Job) -> None:
        """Take what a job needs, and queue its pieces. The caller holds the lock."""
        pieces: deque[Work] = deque(
            Piece(
                self,
                job,
                slice(begin, min(begin + self._per_piece, len(job.at))),
                self.header.slot_bytes,
                self._most_bytes,
            )
            for begin in range(0, len(job.at), self._per_piece)
        )
        job.num_left = len(pieces)
        if not pieces:
            self._end(job, None)
            return
        try:
            job.is_begun = True
            self._jobs.add(job)
            self._mark(job, Marks.take)
            self._lanes.submit(pieces, is_put=job.kind == "put")
        except BaseException:  # an interrupt, at any line: take back what no thread has begun
            with suppress(IndexError):
                while True:
                    pieces.pop()
                    job.num_left -= 1
            if not job.num_left:
                self._jobs.discard(job)
                self._mark_again()
                job.ticket.end()
            raise

    def _mark_again(self) -> None:
        """Compute again which slots the jobs have in use."""
        self._slots_in_use.clear()
        self._host_in_use.clear()
        for job in self._jobs:
            self._mark(job, Marks.take)

    def _mark(self, job: Job, change: Callable[..., None]) -> None:
        if job.kind == "renew":
            return
        change(self._slots_in_use, job.slots, to_write=job.kind != "get")
        if job.kind != "delete":
            change(self._host_in_use, job.host, to_write=job.kind == "get")

    def end_piece(self, job: Job, error: TransferError | None) -> None:
        """Report the end of a piece, and with the last one that of the job."""
        with self._lock:
            job.error = job.error or error
            job.num_left -= 1
            if job.num_left or job not in self._jobs:
                return
            self._jobs.discard(job)
            self._mark(job, Marks.release)
        self._end(job, job.error)

    def _end(self, job: Job, error: TransferError | None) -> None:
        if job.kind in {"put", "get"} and job.context is not self.context:
            job.ok[:] = False  # a reset came between
        if job.kind == "renew" and error is not None:
            self._off = self._off or TransferError(
                f"the tier is off because its new generation cannot be written ({error}); check "
                "the disk, and open the tier again"
            )
        job.ticket.end(job.ok, error)
        num_ok = 0 if job.ticket.is_late else int(job.ok.sum())
        with self._lock:
            num_failed, slot_bytes = len(job.ok) - num_ok, self.header.slot_bytes
            count_end(self._counts, job.kind, num_ok, num_failed, slot_bytes)
            self._counts["mismatched_blocks"] += job.num_mismatched

    # -- on the threads --------------------------------------------------------------------------

    def carry_out(self, parts: list[Part]) -> None:
        """Do parts of jobs of one kind; raise `OSError` if all of them failed."""
        job, part = parts[0]
        if job.kind == "put":
            self._write(Joined(parts))
        elif job.kind == "get":
            self._read(Joined(parts))
        elif job.kind == "delete":
            self._drop(job, part)
        else:
            with self._header_lock:
                self._calls.write_header(self.header)
            job.ok[:] = True

    def fail(self, kind: Kind, error: OSError) -> TransferError:
        """Lower the mode after a failed call, and return why."""
        what = {"put": "write", "get": "read", "delete": "write", "renew": "write"}[kind]
        failed = TransferError(f"the slot file cannot {what} ({error.strerror or error})")
        failed.__cause__ = error
        if kind in {"put", "delete"}:
            self._read_only = self._read_only or TransferError(
                f"the tier only reads because a write failed ({error}); check the disk, and open "
                "the tier again"
            )
        return failed

    def _write(self, blocks: Joined) -> None:
        digests = row_digests(self._rows, blocks.host)
        sound = self._sums.are_sound(blocks.host)  # after the digests, see `sums`
        if not sound.all():
            blocks.keep(sound)
            digests = digests[sound]
        seal(blocks.frames, digests)
        self._words[blocks.slots] = 0
        num = self._calls.write_data(blocks.slots, blocks.host, may_go_on=blocks.are_wanted)
        if num < len(blocks.slots):
            blocks.keep(np.arange(len(blocks.slots)) < num)
        self._calls.write_frames(blocks.slots, blocks.frames)
        self._words[blocks.slots] = words_of(blocks.frames)
        blocks.succeed()

    def _drop(self, job: Job, part: slice) -> None:
        found = taken(self._words, job.slots[part])
        slots = job.slots[part][match(found, job.frames[part])]
        self._calls.write_frames(slots, np.zeros(len(slots), FRAME))
        self._words[slots] = 0  # only now, so that a delete that failed can be tried again
        job.ok[job.at[part]] = True

    def _find(self, job: Job, free: Bools) -> None:
        """Give a get the frames of its slots, and take those of other blocks out of `free`.

        The caller does it, because a thread takes several times as long: the bytes of a piece have
        driven the code out of the processor's cache. No put changes a slot that a get has in use.
        """
        found = taken(self._words, job.slots)
        fits = self._fit(found, job.frames)
        job.num_mismatched = int((free & ~fits).sum())
        free &= fits
        job.frames = found

    def _read(self, blocks: Joined) -> None:
        arrived, error = self._calls.read_data(
            blocks.slots,
            blocks.host,
            report=self._count_read,
            may_go_on=lambda: self.mode != "off" and blocks.are_wanted(),
        )
        if error is not None:
            for job, _ in blocks.num_of(~arrived):
                job.error = job.error or self.fail("get", error)
        if not arrived.all():
            blocks.keep(arrived)
        proven = self._are_proven(blocks.host, blocks.frames)
        if not proven.all():
            for job, num_damaged in blocks.num_of(~proven):
                job.num_mismatched += num_damaged
            self._words[blocks.slots[~proven]] = 0
            blocks.keep(proven)
        self._sums.record(blocks.host)
        blocks.succeed()

    @staticmethod
    def _fit(found: Frames, expected: Frames) -> Bools:
        """Return which slots hold the block that the caller asks for."""
        return match(found, expected)

    def _are_proven(self, host: Index, frames: Frames) -> Bools:
        """Return which host slots hold the bytes that were written."""
        proven: Bools = row_digests(self._rows, host) == frames["checksum"]
        return proven

    def _count_read(self, error: OSError | None) -> None:
        """Count how many calls in a row cannot read."""
        self._num_read_errors = 0 if error is None else self._num_read_errors + 1
        if self._num_read_errors >= _MAX_READ_ERRORS:
            self._off = self._off or TransferError(
                f"the tier is off because {_MAX_READ_ERRORS} reads in a row failed ({error}); "
                "check the disk, and open the tier again"
            )

    # -- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Carry out every job, and stop."""
        if self._is_forked:
            return
        if self._lanes.is_own_thread:
            # The garbage collector runs a finalizer here, and this thread cannot wait for itself.
            threading.Thread(target=self.close, name="kvstow-tier-close", daemon=True).start()
            return
        self._is_closed = True
        self._lanes.stop()
        if not self._lanes.join():
            # A call still uses the files. Another file could get their numbers, so they stay open,
            # and with them the lock.
            return
        self._calls.close()

    def close_in_child(self) -> None:
        """Close the files in a forked child, where each ticket ends itself."""
        self._is_forked = True
        self._lock = threading.RLock()
        self._lanes.close_in_child()
        self._calls.close()  # the lock stays with the parent
