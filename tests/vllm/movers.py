"""Movers that pass copies on, late or not at all."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from kvstow import KvstowError, TransferError
from kvstow.transfer import READY, Event, Mover, Ticket


class ChangedMover:
    """Passes everything on; a test overrides what it changes."""

    def __init__(self, mover: Mover) -> None:
        self.mover = mover

    def store(self, block_ids: Any, host_slots: Any, *, after: Event) -> Ticket:
        return self.mover.store(block_ids, host_slots, after=after)

    def load(self, host_slots: Any, block_ids: Any, *, after: Event) -> Ticket:
        return self.mover.load(host_slots, block_ids, after=after)

    def close(self) -> None:
        self.mover.close()


class Forgetful(ChangedMover):
    """Loads nothing."""

    def load(self, host_slots: Any, block_ids: Any, *, after: Event) -> Ticket:
        return self.mover.load([], [], after=READY)


class LateTicket(Ticket):
    """A copy that is made, or fails, when `go` is called."""

    def __init__(self, begin: Callable[[], Ticket]) -> None:
        self._begin = begin
        self._ticket: Ticket | None = None
        self._error: TransferError | None = None

    def go(self, *, fails: bool = False) -> None:
        if fails:
            self._error = TransferError("injected")
        else:
            self._ticket = ended(self._begin())

    def poll(self) -> bool:
        return self._error is not None or self._ticket is not None

    @property
    def error(self) -> TransferError | None:
        return self._error if self._ticket is None else self._ticket.error

    @property
    def damaged_slots(self) -> tuple[int, ...]:
        return () if self._ticket is None else self._ticket.damaged_slots

    def wait(self, timeout_s: float | None = None) -> None:
        if self.error is not None:
            raise self.error


def ended(ticket: Ticket) -> Ticket:
    """Wait until a copy has ended, so that its end depends on nothing but the test."""
    with suppress(KvstowError):
        ticket.wait()
    return ticket


class EndedStores(ChangedMover):
    """Ends each store before it returns.

    On a busy machine a store may last for steps. It holds its blocks in flight, whose number has a
    bound, so other blocks would not be stored.
    """

    def store(self, block_ids: Any, host_slots: Any, *, after: Event) -> Ticket:
        return ended(self.mover.store(block_ids, host_slots, after=READY))


class LateMover(ChangedMover):
    """Adds a late ticket for each copy to `waiting`."""

    def __init__(self, mover: Mover, waiting: list[LateTicket]) -> None:
        super().__init__(mover)
        self._waiting = waiting

    def store(self, block_ids: Any, host_slots: Any, *, after: Event) -> Ticket:
        return self._wait(lambda: self.mover.store(block_ids, host_slots, after=READY))

    def load(self, host_slots: Any, block_ids: Any, *, after: Event) -> Ticket:
        return self._wait(lambda: self.mover.load(host_slots, block_ids, after=READY))

    def _wait(self, begin: Callable[[], Ticket]) -> Ticket:
        ticket = LateTicket(begin)
        self._waiting.append(ticket)
        return ticket


class Slow(LateTicket):
    """A copy that is made after a number of polls."""

    def __init__(self, begin: Callable[[], Ticket], num_polls: int) -> None:
        super().__init__(begin)
        self._num_polls = num_polls

    def poll(self) -> bool:
        self._num_polls -= 1
        if self._num_polls < 0 and not super().poll():
            self.go()
        return super().poll()

    def source_released(self) -> bool:
        return super().poll()


class Unsteady(ChangedMover):
    """Is slow, or fails, at random."""

    dice = random.Random()
    failing = 0.0
    slow = 0.0

    def store(self, block_ids: Any, host_slots: Any, *, after: Event) -> Ticket:
        return self._begin(lambda: self.mover.store(block_ids, host_slots, after=READY))

    def load(self, host_slots: Any, block_ids: Any, *, after: Event) -> Ticket:
        return self._begin(lambda: self.mover.load(host_slots, block_ids, after=READY))

    def _begin(self, begin: Any) -> Ticket:
        if self.dice.random() < self.failing:
            raise TransferError("injected")
        if self.dice.random() >= self.slow:
            return ended(begin())
        return Slow(begin, self.dice.choice([1, 4, 12, 24]))
