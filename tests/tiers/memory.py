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
        assert blocks.slots is not None
        columns = zip(blocks.slots, blocks.hashes, blocks.groups, host_slots, strict=True)
        for slot, digest, group, host in columns:
            self._held[int(slot)] = digest, int(group), self._rows[host].tobytes()
        num = len(blocks)
        self._stats = replace(
            self._stats,
            put_blocks=self._stats.put_blocks + num,
            put_bytes=self._stats.put_bytes + num * self.slot_bytes,
        )
        ticket.end(np.ones(num, np.bool_))
        return ticket

    def _get(self, blocks: Checked, host_slots: Index, deadline: float | None) -> TierTicket:
        ticket = TierTicket(len(blocks), deadline)
        assert blocks.slots is not None
        ok = np.zeros(len(blocks), np.bool_)
        columns = zip(blocks.slots, blocks.hashes, blocks.groups, host_slots, strict=True)
        for at, (slot, digest, group, host) in enumerate(columns):
            found = self._held.get(int(slot))
            if found is not None and found[:2] == (digest, int(group)):
                self._rows[host] = np.frombuffer(found[2], np.uint8)
                ok[at] = True
        num, num_failed = int(ok.sum()), int((~ok).sum())
        self._stats = replace(
            self._stats,
            got_blocks=self._stats.got_blocks + num,
            got_bytes=self._stats.got_bytes + num * self.slot_bytes,
            failed_gets=self._stats.failed_gets + num_failed,
            mismatched_blocks=self._stats.mismatched_blocks + num_failed,
        )
        ticket.end(ok)
        return ticket

    def _delete(self, blocks: Checked) -> TierTicket:
        ticket = TierTicket(len(blocks))
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
