"""A connector that damages blocks before it loads them, so that a check of answers fails."""

from __future__ import annotations

from typing import Any

from kvstow.transfer import Event, Ticket
from kvstow.vllm.connector import KVStowConnector


class DamagingConnector(KVStowConnector):
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        changed = [DamagingMover(mover) for mover in self._worker.movers]
        self._worker.movers = changed  # type: ignore[assignment] # it has all methods that a worker calls


class DamagingMover:
    """Zeroes one region of each tenth block on the host before the load."""

    def __init__(self, mover: Any) -> None:
        self._mover = mover
        self._num_blocks = 0

    def store(self, block_ids: Any, host_slots: Any, *, after: Event) -> Ticket:
        ticket: Ticket = self._mover.store(block_ids, host_slots, after=after)
        return ticket

    def load(self, host_slots: Any, block_ids: Any, *, after: Event) -> Ticket:
        layout, slots = self._mover.layout, self._mover.arena.slots
        start = layout.offsets[-1]
        for slot in host_slots:
            self._num_blocks += 1
            if self._num_blocks % 10 == 0:
                slots[slot, start : start + layout.regions[-1].block_bytes] = 0
        ticket: Ticket = self._mover.load(host_slots, block_ids, after=after)
        return ticket

    def close(self) -> None:
        self._mover.close()
