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

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from kvstow._core import StateError, TransferError
from kvstow.transfer.arena import HostArena
from kvstow.transfer.host_mover import HostTicket
from kvstow.transfer.kernels import checksum
from kvstow.transfer.mover import DamagedSlots, Event, Index, Mover, Ticket


class VerifiedMover(Mover):
    """Wraps a mover: a block whose bytes changed on the host is a failed load, never served.

    The checksum is CRC-32 of the slot's bytes: it guards against damaged memory and misdirected
    writes, not against an adversary. It is kept with the arena, for this mover and those after it.
    Slots that were never stored through such a mover fail to load.
    """

    def __init__(self, mover: Mover) -> None:
        """Wrap `mover`, which is closed with this one."""
        super().__init__(mover.layout, mover.arena)
        self._mover = mover
        self._checksums = mover.arena.checksums
        # One thread each, as movers have: in a direction jobs keep their order.
        self._stores = ThreadPoolExecutor(1, thread_name_prefix="kvstow-checksum")
        self._loads = ThreadPoolExecutor(1, thread_name_prefix="kvstow-verify")
        self._is_open = True

    def close(self) -> None:
        """End every job, and close the mover."""
        self._is_open = False
        self._mover.close()
        self._stores.shutdown(cancel_futures=True)
        self._loads.shutdown(cancel_futures=True)

    def _check_open(self) -> None:
        if not self._is_open:
            raise StateError("this VerifiedMover is closed; build a new one")

    def _submit_store(self, block_ids: Index, host_slots: Index, after: Event) -> Ticket:
        # Not to be found under the old checksum while it is overwritten.
        self._checksums[host_slots] = -1
        stored = self._mover.store(block_ids, host_slots, after=after)

        def take_down() -> None:
            stored.wait()
            for slot in host_slots.tolist():
                self._checksums[slot] = self._arena.checksum(slot)

        return _run(self._stores, take_down)

    def _submit_load(self, host_slots: Index, block_ids: Index, after: Event) -> Ticket:
        def check_and_load() -> None:
            _compare(self._arena, host_slots.tolist(), "does not hold what was stored in it")
            self._mover.load(host_slots, block_ids, after=after).wait()

        return _run(self._loads, check_and_load)


class ProvingMover(Mover):
    """Wraps a mover: slots that a file has filled are compared with their checksums once.

    A restart need not read the whole file first, and yet serves nothing that is damaged: each slot
    is proven by the first load of it, on a thread of its own. From then on, and once it is stored
    to, it costs nothing.
    """

    def __init__(self, mover: Mover) -> None:
        """Wrap `mover`, whose arena has `unproven` slots, and which is closed with this one."""
        super().__init__(mover.layout, mover.arena)
        unproven = mover.arena.unproven
        self._mover = mover
        self._unproven = np.zeros(mover.arena.num_slots, bool) if unproven is None else unproven
        self._loads = ThreadPoolExecutor(1, thread_name_prefix="kvstow-prove")
        self._last: Ticket | None = None
        # Of a mover that sums up on its device: the file has none of these.
        self._sums = mover.arena.device_sums if mover.arena.has_device_sums else None
        self._is_open = True

    def close(self) -> None:
        """End every job, and close the mover."""
        self._is_open = False
        self._mover.close()
        self._loads.shutdown(cancel_futures=True)

    def _check_open(self) -> None:
        if not self._is_open:
            raise StateError("this ProvingMover is closed; build a new one")

    def _submit_store(self, block_ids: Index, host_slots: Index, after: Event) -> Ticket:
        self._unproven[host_slots] = False
        self._arena.checksums[host_slots] = -1
        return self._mover.store(block_ids, host_slots, after=after)

    def _submit_load(self, host_slots: Index, block_ids: Index, after: Event) -> Ticket:
        unproven = host_slots[self._unproven[host_slots]].tolist()
        # In a direction jobs keep their order: none overtakes one that is still being proven.
        if not unproven and (self._last is None or self._last.poll()):
            return self._mover.load(host_slots, block_ids, after=after)

        def prove_and_load() -> None:
            _compare(self._arena, unproven, "does not hold what the snapshot says")
            for slot in unproven:
                self._sum_up(slot)
                self._unproven[slot] = False
            self._mover.load(host_slots, block_ids, after=after).wait()

        self._last = _run(self._loads, prove_and_load)
        return self._last

    def _sum_up(self, slot: int) -> None:
        """Let a mover that sums up what it loads find what it would have stored."""
        if self._sums is not None:
            sums, is_known = self._sums
            sums[slot] = checksum(self._arena.slots[slot : slot + 1, : self._layout.slot_bytes])[0]
            is_known[slot] = 1


def _compare(arena: HostArena, slots: list[int], what_is_wrong: str) -> None:
    """Raise `DamagedSlots` with all slots that do not have their checksum."""
    found = {slot: arena.checksum(slot) for slot in slots}
    damaged = [slot for slot in slots if found[slot] != arena.checksums[slot]]
    if damaged:
        slot, expected = damaged[0], int(arena.checksums[damaged[0]])
        raise DamagedSlots(
            f"host slot {slot} was never stored through a mover that keeps checksums"
            if expected < 0
            else f"host slot {slot} {what_is_wrong}: its checksum is {found[slot]:#010x}, not "
            f"{expected:#010x}",
            damaged,
        )


def _run(threads: ThreadPoolExecutor, work: Callable[[], None]) -> Ticket:
    """A ticket that ends with `work`."""
    ticket = HostTicket()
    threads.submit(work).add_done_callback(lambda future: ticket.end(_why(future)))
    return ticket


def _why(future: Future[None]) -> TransferError | None:
    if future.cancelled():
        return TransferError("the mover was closed before this transfer began")
    error = future.exception()
    if error is None or isinstance(error, TransferError):
        return error
    return TransferError(f"the transfer failed: {error!r}")
