"""The simplest shared tier: blocks in a dictionary, whose calls end when the test says so."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from kvstow import StateError, TransferError
from kvstow.tiers import SharedTier, TierStats, TierTicket
from kvstow.tiers.tier import Checked, Mode
from kvstow.transfer import HostArena
from kvstow.transfer.mover import Index


class MemoryStore(SharedTier):
    """Keeps blocks of each namespace. A job ends at once, unless `waits`.

    Attributes:
        waits: whether jobs end only with `go_on`.
        num_gets: blocks that were asked for.
    """

    def __init__(self, arena: HostArena, *, keeps: bool = True) -> None:
        """Begin empty. Without `keeps`, it loses each block at once."""
        super().__init__(arena)
        self._keeps = keeps
        self.waits = False
        self.num_gets = 0
        self._namespace = bytes(16)
        self._held: dict[tuple[bytes, bytes, int], bytes] = {}
        self._stats = TierStats()
        self._is_closed = False
        self._ends: list[Callable[[], None]] = []

    @property
    def mode(self) -> Mode:
        return "off" if self._is_closed else "on"

    @property
    def error(self) -> TransferError | None:
        return None

    def stats(self) -> TierStats:
        return self._stats

    def rename(self, namespace: bytes) -> None:
        self._namespace = namespace

    def go_on(self) -> None:
        """End the jobs that wait."""
        ends, self._ends = self._ends, []
        for end in ends:
            end()

    def close(self) -> None:
        self.go_on()
        self._is_closed = True

    def _check_open(self) -> None:
        if self._is_closed:
            raise StateError("this MemoryStore is closed; build a new one")

    def _keys(self, blocks: Checked) -> list[tuple[bytes, bytes, int]]:
        groups = blocks.groups.tolist()
        pairs = zip(blocks.hashes, groups, strict=True)
        return [(self._namespace, digest, group) for digest, group in pairs]

    def _begin(
        self, num_blocks: int, deadline: float | None, end: Callable[[], object]
    ) -> TierTicket:
        ticket = TierTicket(num_blocks, deadline)
        ticket.announce()
        is_late = deadline is not None and time.monotonic() > deadline

        def ended() -> None:
            ok = np.zeros(num_blocks, np.bool_) if is_late else end()
            ticket.end(np.asarray(ok, np.bool_))

        if self.waits:
            self._ends.append(ended)
        else:
            ended()
        return ticket

    def _put(self, blocks: Checked, host_slots: Index, deadline: float | None) -> TierTicket:
        keys = self._keys(blocks)

        def end() -> list[bool]:
            for key, host in zip(keys, host_slots, strict=True):
                if self._keeps:
                    self._held[key] = self._rows[host].tobytes()
            return [True] * len(keys)

        return self._begin(len(keys), deadline, end)

    def _get(self, blocks: Checked, host_slots: Index, deadline: float | None) -> TierTicket:
        keys = self._keys(blocks)
        self.num_gets += len(keys)

        def end() -> list[bool]:
            ok = [key in self._held for key in keys]
            for key, host in zip(keys, host_slots, strict=True):
                if key in self._held:
                    self._rows[host] = np.frombuffer(self._held[key], np.uint8)
            num, old = sum(ok), self._stats
            self._stats = replace(
                old,
                got_blocks=old.got_blocks + num,
                got_bytes=old.got_bytes + num * self.slot_bytes,
                mismatched_blocks=old.mismatched_blocks + len(ok) - num,
            )
            return ok

        before = self._stats.failed_gets + len(keys)
        ticket = self._begin(len(keys), deadline, end)
        if ticket.has_ended:
            self._stats = replace(self._stats, failed_gets=before - int(ticket.ok.sum()))
        return ticket

    def _contains(self, blocks: Checked, deadline: float | None) -> TierTicket:
        keys = self._keys(blocks)
        return self._begin(len(keys), deadline, lambda: [key in self._held for key in keys])

    def _delete(self, blocks: Checked) -> TierTicket:
        keys = self._keys(blocks)

        def end() -> list[bool]:
            return [self._held.pop(key, None) is None or True for key in keys]

        return self._begin(len(keys), None, end)
