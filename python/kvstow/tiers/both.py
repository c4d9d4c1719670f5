r"""A slot file and a shared store as one tier, which has the slots of the file.

```
put   host slot --+--> the file --> True, also if the store failed
                  +--> the store
get   the file has the block in its slot? -- yes --> read it from there
                                          \- no ---> ask the store --> proven --> True, and the
                                                                  file keeps it in that slot
```

A *claim* is a slot whose block only the store has. The file may hold another block there, or none.
If one half fails, the other goes on. While a call to the disk is late, the file is left alone.

How a wrong block could be served, and what prevents it:

- Foreign: a claimed slot holds another block in the file. The frame there names its key, so the
  store is asked.
- Torn: both halves write one host slot. Each block is asked of one half, and of no other after it.
- Never computed: the file keeps a block that the store did not prove, or whose host slot changed.
  Only proven blocks are written, and the job ends when the write has ended.
- Stale: a get from before a reset writes its block into the file after it, as one of the new
  generation. `renew` cancels what is still to be written.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace
from typing import Final, Literal, NamedTuple

import numpy as np

from kvstow._core import ConfigError, KvstowError, TransferError
from kvstow.closing import call_all
from kvstow.tiers.frame import Fingerprint
from kvstow.tiers.slot_file import SlotTier
from kvstow.tiers.slot_index import SlotRecords
from kvstow.tiers.ticket import Bools, TierTicket, tickets_made
from kvstow.tiers.tier import Checked, Mode, SharedTier, Tier, TierStats
from kvstow.transfer import TransferTimeout
from kvstow.transfer.mover import Index
from kvstow.transfer.ticket import checked_timeout_s, late


class BothTier(Tier):
    """A slot file before a shared store. `close` closes both.

    `shared.contains` asks what the store has. Give its blocks slots of the file, as claims. Give a
    get a `sequence` too, because the file may keep what it brings.

    Attributes:
        disk: the slot file.
        shared: the store.
        num_slots: slots of the file.
    """

    def __init__(
        self,
        disk: SlotTier,
        shared: SharedTier,
        *,
        may_keep: Callable[[int], int] = lambda num_blocks: num_blocks,
    ) -> None:
        """Take two open tiers of one arena.

        Args:
            disk: the slot file.
            shared: the store.
            may_keep: how many of this many blocks the file may keep that a get brought from the
                store. It keeps the first.

        Raises:
            ConfigError: the tiers have different arenas.
            StateError: the arena is closed.
        """
        if shared.arena is not disk.arena:
            raise ConfigError("disk and shared have different arenas: open both over one")
        super().__init__(disk.arena, disk.num_slots)
        self.disk: Final = disk
        self.shared: Final = shared
        self.num_slots: Final = disk.num_slots
        self._may_keep = may_keep
        # Calls to the disk that had not ended when it was last looked.
        self._at_disk: list[TierTicket] = []
        self._num_renewals = 0

    # -- as a slot file --------------------------------------------------------------------------

    def records(self) -> SlotRecords:
        """Return what the file holds; see `SlotTier.records`."""
        return self.disk.records()

    def renew(self, namespace: bytes, fingerprint: Fingerprint | None = None) -> TierTicket:
        """Drop every block of the file, durably, and use another namespace of the store.

        Call it when weights change in place.

        Args:
            namespace: 16 bytes, new on all ranks.
            fingerprint: what the blocks of the file are from now on, if that is known.

        Returns:
            The ticket of `SlotTier.renew`. Until it is True, put and get nothing.

        Raises:
            ConfigError: the namespace is not 16 bytes.
            StateError: the tier is closed, or belongs to the parent process.
        """
        self._check_open()
        self._num_renewals += 1
        self.shared.rename(namespace)
        return self.disk.renew(fingerprint)

    # -- as a tier -------------------------------------------------------------------------------

    @property
    def mode(self) -> Mode:
        """What the tier still does. A disk that has failed does not lower it."""
        return "on" if "on" in (self.disk.mode, self.shared.mode) else self.disk.mode

    @property
    def error(self) -> TransferError | None:
        """Why the file is not on; None while it is."""
        return self.disk.error

    def stats(self) -> TierStats:
        """Return the sums of both, but of puts only those into the file."""
        disk = self.disk.stats()
        shared = replace(self.shared.stats(), put_blocks=0, put_bytes=0, failed_puts=0)
        names = [field.name for field in fields(TierStats)]
        return TierStats(*(getattr(disk, name) + getattr(shared, name) for name in names))

    def close(self) -> None:
        """Carry out what has begun, and close both; see `Tier.close`."""
        call_all([self.shared.close, self.disk.close])

    def _check_open(self) -> None:
        self.disk._check_open()
        self.shared._check_open()

    def _put(self, blocks: Checked, host_slots: Index, deadline: float | None) -> TierTicket:
        job = _Job(blocks, host_slots, deadline)
        ticket, every = BothTicket(len(blocks), deadline), np.arange(len(blocks))
        ticket.announce()
        with tickets_made(ticket.made):
            if self._may_use_disk():
                ticket.ask(self._move("put", self.disk, job, every), every)
            self._move("put", self.shared, job, every)
        return ticket

    def _get(self, blocks: Checked, host_slots: Index, deadline: float | None) -> TierTicket:
        job = _Job(blocks, host_slots, deadline)
        ticket, number = BothTicket(len(blocks), deadline), self._num_renewals
        in_file = self._are_in_file(blocks)
        here, there = np.flatnonzero(in_file), np.flatnonzero(~in_file)

        def keep() -> None:
            at = there[ticket.ok_so_far[there]]
            is_over = deadline is not None and time.monotonic() >= deadline
            may_write = number == self._num_renewals and not is_over and self._may_use_disk()
            if len(at) and may_write:
                self._move("put", self.disk, job, at[: self._may_keep(len(at))])

        ticket.announce()
        with tickets_made(ticket.made):
            ticket.ask(self._move("get", self.disk, job, here), here)
            ticket.ask(self._move("get", self.shared, job, there), there)
            ticket.then = keep
        return ticket

    def _delete(self, blocks: Checked) -> TierTicket:
        ticket, every = BothTicket(len(blocks), None), np.arange(len(blocks))
        ticket.announce()
        with tickets_made(ticket.made):
            ticket.ask(self.disk._delete(blocks), every)
            ticket.ask(self.shared._delete(blocks), every)
        return ticket

    # -- the halves ------------------------------------------------------------------------------

    def _are_in_file(self, blocks: Checked) -> Bools:
        """Return which blocks to read from the file."""
        if self.disk.mode == "off" or self._is_stuck():
            return np.zeros(len(blocks), np.bool_)
        return self.disk.holds(blocks)

    def _may_use_disk(self) -> bool:
        """Return whether to write into the file."""
        return self.disk.mode == "on" and not self._is_stuck()

    def _is_stuck(self) -> bool:
        """Return whether a call to the disk is late and has not ended."""
        self._at_disk = [ticket for ticket in self._at_disk if not ticket.has_ended]
        return any(ticket.poll() for ticket in self._at_disk)

    def _move(
        self, kind: Literal["put", "get"], half: Tier, job: _Job, at: Index
    ) -> TierTicket | None:
        """Begin a half's part of a job. None if it has no block, or refuses the part.

        The blocks are checked already, but a half may be closed before the file keeps them.
        """
        if not len(at):
            return None
        part = job.some(at)
        begin = half._put if kind == "put" else half._get
        # The store gets half of the time, so that a late store does not make the whole job late.
        limit_s = _halfway(part.deadline) if half is self.shared else part.deadline
        with suppress(KvstowError):
            self.arena.check_open()
            half._check_open()
            ticket = begin(part.blocks, part.host_slots, limit_s)
            if half is self.disk:
                self._at_disk.append(ticket)
            return ticket
        return None


class _Job(NamedTuple):
    """What a put or a get was asked for."""

    blocks: Checked
    host_slots: Index
    deadline: float | None

    def some(self, at: Index) -> _Job:
        """Return the job of the blocks `at`, which ascend."""
        if len(at) == len(self.blocks):
            return self
        return _Job(self.blocks.some(at), self.host_slots[at], self.deadline)


class BothTicket(TierTicket):
    """A job on both halves. It goes on whenever the caller looks at it.

    Attributes:
        made: the tickets of its halves.
        then: what begins when these have ended; None for nothing.
    """

    def __init__(self, num_blocks: int, deadline: float | None) -> None:
        """Begin without halves."""
        super().__init__(num_blocks, deadline)
        self.made: list[TierTicket] = []
        self.then: Callable[[], None] | None = None
        self._asked: list[tuple[TierTicket | None, Index]] = []

    def ask(self, ticket: TierTicket | None, at: Index) -> None:
        """Let a half decide which of the blocks `at` are ok; None for none of them."""
        self._asked.append((ticket, at))

    @property
    def ok_so_far(self) -> Bools:
        """Which blocks are ok for each half that decides about them, and for one at least."""
        ok = np.ones(self.num_blocks, np.bool_)
        is_decided = np.zeros(self.num_blocks, np.bool_)
        for ticket, at in self._asked:
            ok[at] &= False if ticket is None else ticket.ok
            is_decided[at] = True
        return ok & is_decided

    def poll(self) -> bool:
        """Go on, and return whether there is an answer."""
        self._go_on()
        return super().poll()

    @property
    def has_ended(self) -> bool:
        """Go on, and return whether both halves touch the host slots no more."""
        self._go_on()
        return super().has_ended

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until there is an answer; see `TierTicket.wait`."""
        limit_s = math.inf if self.deadline is None else self.deadline
        self._wait_for(self.poll, timeout_s, limit_s)

    def wait_until_ended(self, timeout_s: float | None = None) -> None:
        """Block until both halves have ended; see `TierTicket.wait_until_ended`."""
        self._wait_for(lambda: self.has_ended, timeout_s, math.inf)

    def _wait_for(
        self, is_over: Callable[[], bool], timeout_s: float | None, limit_s: float
    ) -> None:
        patience_s = math.inf if timeout_s is None else checked_timeout_s(timeout_s)
        end_s = self._clock() + patience_s
        while not is_over():
            now_s = self._clock()
            if now_s >= end_s:
                raise late(timeout_s)
            left_s = min(end_s, limit_s) - now_s
            for part in [part for part in self.made if not part.has_ended][:1]:
                with suppress(TransferTimeout):
                    part.wait_until_ended(None if math.isinf(left_s) else left_s)

    def _go_on(self) -> None:
        while not self._moment.poll() and all(part.has_ended for part in self.made):
            if self.then is None:
                errors = (part.error for part in self.made if part.error is not None)
                self.end(self.ok_so_far, next(errors, None))
            else:
                then, self.then = self.then, None  # once, also if it is interrupted
                with tickets_made(self.made):
                    then()

    def _has_passed(self) -> bool:
        # The caller may look late at a job that ended in time.
        was_late = any(part.is_late or not part.has_ended for part in self.made)
        return was_late and super()._has_passed()


def _halfway(deadline: float | None) -> float | None:
    """Return the time half way to a deadline."""
    now_s = time.monotonic()
    return None if deadline is None else now_s + (deadline - now_s) / 2
