"""A connector that damages blocks before it loads them, so that a check of answers fails."""

from __future__ import annotations

from typing import Any

from tests.vllm.movers import ChangedMover

from kvstow.transfer import Event, Mover, Ticket
from kvstow.vllm.connector import KVStowConnector


class DamagingConnector(KVStowConnector):
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        changed = [DamagingMover(mover) for mover in self._worker.movers]
        self._worker.movers = changed  # type: ignore[assignment] # it has all methods that a worker calls


class DamagingMover(ChangedMover):
    """Zeroes one region of each tenth block on the host before the load."""

    def __init__(self, mover: Mover) -> None:
        super().__init__(mover)
        self._num_blocks = 0

    def load(self, host_slots: Any, block_ids: Any, *, after: Event) -> Ticket:
        layout, slots = self.mover.layout, self.mover.arena.slots
        start = layout.offsets[-1]
        for slot in host_slots:
            self._num_blocks += 1
            if self._num_blocks % 10 == 0:
                slots[slot, start : start + layout.regions[-1].block_bytes] = 0
        return super().load(host_slots, block_ids, after=after)
