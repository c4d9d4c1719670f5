"""Copies that go wrong: a seed chooses late copies, failing copies and lost loads.

    good     |----copies----|
    late     |--------------|......lands
    failed   |--------------| copies wrong bytes and reports an error
    lost     |--------------|...deadline: the request recomputes......lands

The real copy is made when it lands. So a lost load writes its bytes long after its request has
gone on without them.
"""

import random
from collections.abc import Callable

import numpy as np

from kvstow._core import TransferError
from kvstow.transfer import BlockLayout, Event, HostArena, HostMover, Ticket
from kvstow.transfer.mover import Ints

LOAD_TIMEOUT_S = 5.0
"""Deadline of loads in a replay with faults: virtual seconds, the wait for the link included."""

# Chances of each copy. Few stores fail, because lookup finds no block behind a missing one.
_STORE_CHANCES = {"late": 0.1, "failed": 0.01}
_LOAD_CHANCES = {"late": 0.1, "failed": 0.1, "lost": 0.1}
_MOST_DELAY_S = 2.0


class FaultyTicket(Ticket):
    """A copy that is made when the replay waits for it.

    Attributes:
        delay_s: virtual seconds from the regular landing to the delayed one.
    """

    def __init__(self, copy: Callable[[], Ticket], delay_s: float, *, fails: bool) -> None:
        self.delay_s = delay_s
        self._copy = copy
        self._fails = fails
        self._inner: Ticket | None = None

    def poll(self) -> bool:
        """Return whether the copy has been made."""
        return self._inner is not None and self._inner.poll()

    @property
    def error(self) -> TransferError | None:
        """The error of a copy that was chosen to fail, once it is made."""
        if not self.poll():
            return None
        return TransferError("this copy was chosen to fail") if self._fails else None

    def wait(self, timeout_s: float | None = None) -> None:
        """Make the copy."""
        self._inner = self._inner or self._copy()
        self._inner.wait(timeout_s)
        if error := self.error:
            raise error


class FaultyMover(HostMover):
    """A mover of which some copies go wrong.

    Args:
        chances: shared by the movers of a replay, so that a seed determines the run.
    """

    def __init__(self, layout: BlockLayout, arena: HostArena, chances: random.Random) -> None:
        super().__init__(layout, arena)
        self._chances = chances

    def store(self, block_ids: Ints, host_slots: Ints, *, after: Event) -> Ticket:
        """Store as any mover, or late, or with wrong bytes."""
        fault = self._draw(_STORE_CHANCES)
        ids = np.asarray(block_ids)
        if fault == "failed":
            ids = ids % (self.layout.num_blocks - 1) + 1  # the next block
        submit = super().store
        return self._ticket(fault, lambda: submit(ids, host_slots, after=after))

    def load(self, host_slots: Ints, block_ids: Ints, *, after: Event) -> Ticket:
        """Load as any mover, or late, with wrong bytes, or after the deadline."""
        fault = self._draw(_LOAD_CHANCES)
        slots = np.asarray(host_slots)
        if fault == "failed":
            slots = (slots + 1) % self.arena.num_slots
        submit = super().load
        return self._ticket(fault, lambda: submit(slots, block_ids, after=after))

    def _draw(self, chances: dict[str, float]) -> str | None:
        point = self._chances.random()
        for fault, chance in chances.items():
            point -= chance
            if point < 0:
                return fault
        return None

    def _ticket(self, fault: str | None, copy: Callable[[], Ticket]) -> Ticket:
        if fault is None:
            return copy()
        delay_s = self._chances.uniform(0, _MOST_DELAY_S)
        if fault == "lost":
            # It must exceed the deadline by more than a step, or the load would only be late.
            delay_s += LOAD_TIMEOUT_S + _MOST_DELAY_S
        return FaultyTicket(copy, 0.0 if fault == "failed" else delay_s, fails=fault == "failed")
