"""Movers that compare what they load with its checksum, slot by slot.

```
           VerifiedMover                          ProvingMover
store      copies device -> slot, then records    copies device -> slot; then the slot holds nothing
           the slot's checksum                    of the file any more
load       compares the checksum, then copies     compares the checksum of a slot that the file
           slot -> device                         filled at its first load, then copies
```

A load fails if the checksum differs from the recorded one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstow._core import ConfigError, TransferError
from kvstow.transfer.arena import HostArena
from kvstow.transfer.cuda.kernels import checksum
from kvstow.transfer.host.mover import HostMover
from kvstow.transfer.host.queue import CANCELLED, HostQueue, QueuedMover
from kvstow.transfer.mover import READY, Direction, Event, Index, Mover
from kvstow.transfer.ticket import HostTicket, Ticket, find_damage

_ACCEPTANCE_S = 1e-4  # between two looks whether the caller has its ticket; few proofs need one


class _WrappingMover(QueuedMover):
    """A mover that hands its jobs to another, which it owns."""

    def __init__(self, mover: Mover) -> None:
        if not isinstance(mover, Mover):
            raise ConfigError(
                f"mover is {mover!r}, expected a Mover: pass one, such as HostMover(layout, arena)"
            )
        super().__init__(mover.layout, mover.arena)
        self._mover = mover

    def close(self) -> None:
        """End every job, and close the wrapped mover."""
        try:
            super().close()
        finally:
            self._mover.close()


class VerifiedMover(_WrappingMover):
    """Wraps a mover: the load of a block whose bytes changed on the host fails.

    The checksum is CRC-32 of the slot's bytes. It guards against damaged memory and misdirected
    writes, but not against an adversary. The arena keeps it, for this mover and later ones. A slot
    that was never stored through such a mover fails to load.
    """

    def __init__(self, mover: Mover) -> None:
        """Wrap `mover`, and close it when this mover is closed.

        Raises:
            ConfigError: `mover` is no `Mover`.
            StateError: the system starts no more threads.
        """
        super().__init__(mover)
        self._checksums = mover.arena.checksums
        mover.arena.keeps_checksums = True
        self._stores = HostQueue("kvstow-checksum", mover.arena.num_slots)
        self._loads = HostQueue("kvstow-verify", mover.layout.num_blocks)
        self._start(self._stores, self._loads)

    def _submit(
        self, direction: Direction, block_ids: Index, host_slots: Index, after: Event
    ) -> Ticket:
        # The queues wait for the event. So the wrapped mover gets a job that need not wait, and the
        # thread of a queue waits for a copy only.
        def check_and_load() -> None:
            _compare(self.arena, host_slots)
            self._mover.load(host_slots, block_ids, after=READY).wait()

        def store_and_record() -> None:
            self._checksums[host_slots] = -1  # an earlier store of the slot may have ended since
            if isinstance(self._mover, HostMover):
                sums = self._mover.copy_and_sum(block_ids, host_slots)
            else:
                self._mover.store(block_ids, host_slots, after=READY).wait()
                sums = self.arena.compute_checksums(host_slots)
            self._checksums[host_slots] = sums

        if direction == "load":
            return self._loads.submit(check_and_load, block_ids, after)
        # No load may find the old checksum while the store overwrites the slot.
        self._checksums[host_slots] = -1
        return self._stores.submit(store_and_record, host_slots, after)


class ProvingMover(_WrappingMover):
    """Wraps a mover: compares each slot that a file filled with its checksum, once.

    A restart need not read the whole file first, and still serves no damaged block. A thread
    compares a slot at its first load. After that, or after a store to it, the slot costs nothing.
    """

    def __init__(self, mover: Mover) -> None:
        """Wrap `mover`, whose arena has `unproven` slots, and close it when this one is closed.

        Raises:
            StateError: the system starts no more threads.
        """
        super().__init__(mover)
        unproven = mover.arena.unproven
        self._unproven = np.zeros(mover.arena.num_slots, bool) if unproven is None else unproven
        self._proofs = HostQueue("kvstow-prove", mover.layout.num_blocks)
        self._last_proof: HostTicket | None = None
        # Whether the wrapped mover's kernels compare sums. The file has none.
        self._needs_sums = mover.arena.has_device_sums
        self._start(self._proofs)

    def _submit(
        self, direction: Direction, block_ids: Index, host_slots: Index, after: Event
    ) -> Ticket:
        if direction == "store":
            self._unproven[host_slots] = False
            self.arena.checksums[host_slots] = -1
            return self._mover.store(block_ids, host_slots, after=after)
        unproven = host_slots[self._unproven[host_slots]]
        # The wrapped mover keeps the order of loads into a block. So while an earlier load is still
        # being proven, this one must go through the thread too.
        if not len(unproven) and (self._last_proof is None or self._last_proof.poll()):
            return self._mover.load(host_slots, block_ids, after=after)
        ticket = _ProvenTicket()
        proof = ticket.proof = HostTicket()

        def prove_and_load() -> None:
            _compare(self.arena, unproven, "what the snapshot says", "; the file is damaged")
            if self._needs_sums:
                num_bytes = self.layout.slot_bytes
                record_device_sums(self.arena, unproven, [num_bytes] * len(unproven))
            self._unproven[unproven] = False
            # If the caller's thread is interrupted before it has the ticket, nothing may load.
            while not ticket.is_accepted:
                if proof.is_cancelled:
                    raise TransferError(CANCELLED)
                time.sleep(_ACCEPTANCE_S)
            # Does not wait: the event may be far off, and must not hold up the next load.
            ticket.copy = self._mover.load(host_slots, block_ids, after=after)

        try:
            self._last_proof = self._proofs.submit(prove_and_load, block_ids, READY, ticket=proof)
            ticket.is_accepted = True  # no call follows, so no interrupt does
        except BaseException:  # an interrupt, also one that comes as `submit` returns
            proof.is_cancelled = True
            raise
        return ticket


def _compare(
    arena: HostArena, slots: Index, expectation: str = "what was stored in it", advice: str = ""
) -> None:
    """Raise `DamagedSlots` with all slots that do not have their checksum."""
    found, expected = arena.compute_checksums(slots), arena.checksums[slots]
    damage = find_damage(slots, found, expected, expected >= 0, expectation, advice)
    if damage is not None:
        raise damage


def record_device_sums(arena: HostArena, slots: Index, slot_bytes: Sequence[int]) -> None:
    """Record the sums of slots that no kernel has stored, so that a verified load finds them.

    Prove the slots first: a load then takes their bytes for right.

    Args:
        arena: an arena that keeps `device_sums`.
        slots: shape [n], its slots.
        slot_bytes: for each slot, the bytes that its layout copies.
    """
    sums, is_known = arena.device_sums
    for slot, num_bytes in zip(slots.tolist(), slot_bytes, strict=True):
        sums[slot] = _device_sum(arena, slot, num_bytes)
        is_known[slot] = 1


def have_device_sums(
    arena: HostArena, slots: Index, slot_bytes: Sequence[int]
) -> npt.NDArray[np.bool_]:
    """Return which slots have the sum that a kernel has recorded for them, if any has.

    Arguments are those of `record_device_sums`.
    """
    sound: npt.NDArray[np.bool_] = np.ones(len(slots), np.bool_)
    if not arena.has_device_sums:  # to read them would make them, and no mover would renew them
        return sound
    sums, is_known = arena.device_sums
    for at, (slot, num_bytes) in enumerate(zip(slots.tolist(), slot_bytes, strict=True)):
        if is_known[slot]:
            sound[at] = _device_sum(arena, slot, num_bytes) == sums[slot]
    return sound


def _device_sum(arena: HostArena, slot: int, num_bytes: int) -> np.uint64:
    """Return the sum of a slot's first bytes, as a kernel computes it."""
    found: np.uint64 = checksum(arena.slots[slot : slot + 1, :num_bytes])[0]
    return found


class _ProvenTicket(Ticket):
    """The ticket of a load that is submitted after its slots are proven.

    Attributes:
        proof: ends when the load is submitted, or when a slot is damaged.
        copy: the ticket of the submitted load; None before, and if a slot is damaged.
        is_accepted: whether the caller gets this ticket.
    """

    proof: HostTicket
    is_accepted: bool = False
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
