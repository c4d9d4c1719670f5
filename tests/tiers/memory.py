"""The simplest tier: blocks in a dictionary, in the caller's thread."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvstow import StateError, TransferError
from kvstow.tiers import Tier, TierStats, TierTicket
from kvstow.tiers.tier import Checked, Mode
from kvstow.transfer import HostArena
from kvstow.transfer.mover import Index


class MemoryTier(Tier):
    """Keeps up to `num_slots` blocks in the memory of this process."""

    def __init__(self, arena: HostArena, num_slots: int) -> None:
        super().__init__(arena, num_slots)
        self._held: dict[int, tuple[bytes, int, bytes]] = {}
        self._stats = TierStats()
        self._is_closed = False

    @property
    def mode(self) -> Mode:
        return "on"

    @property
    def error(self) -> TransferError | None:
        return None

    def stats(self) -> TierStats:
        return self._stats

    def close(self) -> None:
        self._is_closed = True

    def _check_open(self) -> None:
        if self._is_closed:
            raise StateError("this MemoryTier is closed; build a new one")

    def _put(self, blocks: Checked, host_slots: Index, deadline: float | None) -> TierTicket:
        ticket = TierTicket(len(blocks), deadline)
        ticket.announce()
        assert blocks.slots is not None
        columns = zip(blocks.slots, blocks.hashes, blocks.groups, host_slots, strict=True)
        for slot, digest, group, host in columns:
            self._held[int(slot)] = digest, int(group), self._rows[host].tobytes()
        ticket.end(np.ones(len(blocks), np.bool_))
        num, old = int(ticket.ok.sum()), self._stats
        self._stats = replace(
            old,
            put_blocks=old.put_blocks + num,
            put_bytes=old.put_bytes + num * self.slot_bytes,
            failed_puts=old.failed_puts + len(blocks) - num,
        )
        return ticket

    def _get(self, blocks: Checked, host_slots: Index, deadline: float | None) -> TierTicket:
        ticket = TierTicket(len(blocks), deadline)
        ticket.announce()
        assert blocks.slots is not None
        ok = np.zeros(len(blocks), np.bool_)
        columns = zip(blocks.slots, blocks.hashes, blocks.groups, host_slots, strict=True)
        for at, (slot, digest, group, host) in enumerate(columns):
            found = self._held.get(int(slot))
            if found is not None and found[:2] == (digest, int(group)):
                self._rows[host] = np.frombuffer(found[2], np.uint8)
                ok[at] = True
        ticket.end(ok)
        num, old = int(ticket.ok.sum()), self._stats
        self._stats = replace(
            old,
            got_blocks=old.got_blocks + num,
            got_bytes=old.got_bytes + num * self.slot_bytes,
            failed_gets=old.failed_gets + len(blocks) - num,
            mismatched_blocks=old.mismatched_blocks + int((~ok).sum()),
        )
        return ticket

    def _delete(self, blocks: Checked) -> TierTicket:
        ticket = TierTicket(len(blocks))
        ticket.announce()
        assert blocks.slots is not None
        ok = np.zeros(len(blocks), np.bool_)
        columns = zip(blocks.slots, blocks.hashes, blocks.groups, strict=True)
        for at, (slot, digest, group) in enumerate(columns):
            found = self._held.get(int(slot))
            if found is not None and found[:2] == (digest, int(group)):
                del self._held[int(slot)]
            ok[at] = True
        ticket.end(ok)
        return ticket
