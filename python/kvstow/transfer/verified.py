"""Movers that check what they load, slot by slot.

```
           VerifiedMover                                ProvingMover
store      device -> slot, then its checksum is         device -> slot: nothing of the file's is in
           taken down                                   there any more
load       the checksum is compared, then               the first load of what a file brought
           slot -> device                               compares; then slot -> device
```

Another checksum than the one known fails the load.
"""

from __future__ import annotations

import time
import weakref

import numpy as np

from kvstow._core import StateError, TransferError
from kvstow.transfer.arena import HostArena
from kvstow.transfer.cuda.kernels import checksum
from kvstow.transfer.host.queue import HostQueue, start_queues, stop_queues
from kvstow.transfer.mover import READY, Event, Index, Mover
from kvstow.transfer.ticket import DamagedSlots, HostTicket, Ticket


class VerifiedMover(Mover):
    """Wraps a mover: a block whose bytes changed on the host is a failed load, never served.

    The checksum is CRC-32 of the slot's bytes: it guards against damaged memory and misdirected
    writes, not against an adversary. It is kept with the arena, for this mover and those after it.
    Slots that were never stored through such a mover fail to load.
    """

    def __init__(self, mover: Mover) -> None:
        """Wrap `mover`, which is closed with this one.

        Raises:
            StateError: the system starts no more threads.
        """
        super().__init__(mover.layout, mover.arena)
        self._mover = mover
        self._checksums = mover.arena.checksums
        self._stores = HostQueue("kvstow-checksum", mover.arena.num_slots)
        self._loads = HostQueue("kvstow-verify", mover.layout.num_blocks)
        queues = self._stores, self._loads
        # At interpreter exit they stop before the mover's, which was built earlier.
        self._stop = weakref.finalize(self, stop_queues, queues)
        start_queues(queues)

    def close(self) -> None:
        """End every job, and close the mover."""
        try:
            self._stop()
            stop_queues((self._stores, self._loads))  # should another thread have called first
        finally:
            self._mover.close()

    def _check_open(self) -> None:
        if not self._stop.alive:
            raise StateError("this VerifiedMover is closed; build a new one")

    # The queues wait for the events: by the time the mover gets a job it has nothing to wait for,
    # and the thread that waits for the mover waits for a copy only.

    def _submit_store(self, block_ids: Index, host_slots: Index, after: Event) -> Ticket:
        # Not to be found under the old checksum while it is overwritten.
        self._checksums[host_slots] = -1

        def store_and_take_down() -> None:
            self._checksums[host_slots] = -1  # an earlier store of the slot may have ended since
            self._mover.store(block_ids, host_slots, after=READY).wait()
            self._checksums[host_slots] = self._arena.compute_checksums(host_slots)

        return self._stores.submit(store_and_take_down, host_slots, after)

    def _submit_load(self, host_slots: Index, block_ids: Index, after: Event) -> Ticket:
        def check_and_load() -> None:
            _compare(self._arena, host_slots, "what was stored in it")
            self._mover.load(host_slots, block_ids, after=READY).wait()

        return self._loads.submit(check_and_load, block_ids, after)


class ProvingMover(Mover):
    """Wraps a mover: slots that a file has filled are compared with their checksums once.

    A restart need not read the whole file first, and yet serves nothing that is damaged: each slot
    is proven by the first load of it, on a thread of its own. From then on, and once it is stored
    to, it costs nothing.
    """

    def __init__(self, mover: Mover) -> None:
        """Wrap `mover`, whose arena has `unproven` slots, and which is closed with this one.

        Raises:
            StateError: the system starts no more threads.
        """
        super().__init__(mover.layout, mover.arena)
        unproven = mover.arena.unproven
        self._mover = mover
        self._unproven = np.zeros(mover.arena.num_slots, bool) if unproven is None else unproven
        self._proofs = HostQueue("kvstow-prove", mover.layout.num_blocks)
        self._last_proof: HostTicket | None = None
        # Of a mover that sums up on its device: the file has none of these.
        self._sums = mover.arena.device_sums if mover.arena.has_device_sums else None
        self._stop = weakref.finalize(self, stop_queues, (self._proofs,))
        start_queues((self._proofs,))

    def close(self) -> None:
        """End every job, and close the mover."""
        try:
            self._stop()
            stop_queues((self._proofs,))  # should another thread have called first
        finally:
            self._mover.close()

    def _check_open(self) -> None:
        if not self._stop.alive:
            raise StateError("this ProvingMover is closed; build a new one")

    def _submit_store(self, block_ids: Index, host_slots: Index, after: Event) -> Ticket:
        self._unproven[host_slots] = False
        self._arena.checksums[host_slots] = -1
        return self._mover.store(block_ids, host_slots, after=after)

    def _submit_load(self, host_slots: Index, block_ids: Index, after: Event) -> Ticket:
        unproven = host_slots[self._unproven[host_slots]]
        # The mover keeps the order of loads into the same blocks. So none gets there before an
        # earlier one that is still being proven.
        if not len(unproven) and (self._last_proof is None or self._last_proof.poll()):
            return self._mover.load(host_slots, block_ids, after=after)
        ticket = _ProvenTicket()

        def prove_and_submit() -> None:
            _compare(self._arena, unproven, "what the snapshot says", "; the file is damaged")
            for slot in unproven.tolist():
                self._sum_up(slot)
            self._unproven[unproven] = False
            # Not waited for: its event may be far off, and the next load must not wait for it.
            ticket.copy = self._mover.load(host_slots, block_ids, after=after)

        self._last_proof = ticket.proof = self._proofs.submit(prove_and_submit, block_ids, READY)
        return ticket

    def _sum_up(self, slot: int) -> None:
        """Let a mover that sums up what it loads find what it would have stored."""
        if self._sums is not None:
            sums, is_known = self._sums
            sums[slot] = checksum(self._arena.slots[slot : slot + 1, : self._layout.slot_bytes])[0]
            is_known[slot] = 1


def _compare(arena: HostArena, slots: Index, expectation: str, advice: str = "") -> None:
    """Raise `DamagedSlots` with all slots that do not have their checksum."""
    found, expected = arena.compute_checksums(slots), arena.checksums[slots]
    damaged = np.flatnonzero(found != expected)
    if len(damaged):
        first = damaged[0]
        raise DamagedSlots(
            f"host slot {slots[first]} was never stored through a mover that keeps checksums"
            if expected[first] < 0
            else f"host slot {slots[first]} does not hold {expectation}: its checksum is "
            f"{found[first]:#010x}, not {expected[first]:#010x}{advice}",
            slots[damaged].tolist(),
        )


class _ProvenTicket(Ticket):
    """The ticket of a load whose slots are proven first, and which is submitted then.

    Attributes:
        proof: ends when the copy is submitted, or when it will not be.
        copy: of the copy, once the proof has ended well.
    """

    proof: HostTicket
    copy: Ticket | None = None

    def poll(self) -> bool:
        return self.proof.poll() and (self.copy is None or self.copy.poll())

    @property
    def error(self) -> TransferError | None:
        return self.proof.error or (None if self.copy is None else self.copy.error)

    def wait(self, timeout_s: float | None = None) -> None:
        begin_s = time.monotonic()
        self.proof.wait(timeout_s)
        if self.copy is not None:
            spent_s = time.monotonic() - begin_s
            self.copy.wait(None if timeout_s is None else timeout_s - spent_s)
