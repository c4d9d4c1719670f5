"""The checksums that movers keep of arena slots, beside a tier that reads and writes the slots.

How a wrong block could be served, and what prevents it:

- A slot is damaged on the host, and a put gives its bytes a new, valid frame: a put compares the
  slot with the checksum of its store first. The frame's own checksum must be taken before that, so
  that damage in between shows.
- A get fills a slot whose old checksum stays: loads of the new block would fail. So a get records
  the checksum of what it has proven.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from kvstow._core import row_checksums
from kvstow.tiers.ticket import Bools
from kvstow.transfer import HostArena
from kvstow.transfer.arena import slots_of_runs
from kvstow.transfer.mover import Index


class ArenaSums:
    """Compares and records checksums of an arena's slots. Any thread may call it."""

    def __init__(self, arena: HostArena) -> None:
        """Keep the arrays of the arena, which stay valid after it is closed."""
        self._arena: Final = arena
        self._slots: Final = arena.slots
        self._per_row: Final = arena.slots_per_run

    def are_sound(self, rows: Index) -> Bools:
        """Return which rows hold what was stored in them, as far as a checksum is known."""
        if not self._is_kept:
            return np.ones(len(rows), np.bool_)
        slots = slots_of_runs(rows, self._per_row)
        expected = self._arena.checksums[slots]
        sound: Bools = np.asarray(expected < 0)
        known = np.flatnonzero(~sound)
        sound[known] = row_checksums(self._slots, slots[known]) == expected[known]
        whole: Bools = np.asarray(sound.reshape(len(rows), self._per_row).all(axis=1))
        return whole

    def record(self, rows: Index) -> None:
        """Record that a tier has filled these rows with proven bytes."""
        if not self._is_kept:
            return
        slots = slots_of_runs(rows, self._per_row)
        self._arena.checksums[slots] = row_checksums(self._slots, slots)
        if self._arena.unproven is not None:
            self._arena.unproven[slots] = False

    @property
    def _is_kept(self) -> bool:
        arena = self._arena
        return not arena.closed and (arena.keeps_checksums or arena.unproven is not None)
