"""Host slots whose movers keep checksums, beside a slot file: damage is not stored, gets count."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.tiers.setup import LONG_S, SLOT_BYTES, blocks_of, bytes_of, key_of, open_file

from kvstow.tiers import SlotTier
from kvstow.transfer import READY, BlockLayout, HostArena, HostMover, VerifiedMover
from kvstow.transfer.ticket import DamagedSlots

KEYS = [key_of(at) for at in range(3)]
NUM_ROWS = 8


class World:
    """A slot file over an arena, between whose runs and a device a verified mover copies."""

    def __init__(self, path: Path, per_row: int) -> None:
        self.per_row, num_bytes = per_row, SLOT_BYTES // per_row
        self.arena = HostArena(NUM_ROWS * per_row, num_bytes, slots_per_run=per_row)
        self.device = np.zeros((1 + 3 * per_row, num_bytes), np.uint8)
        layout = BlockLayout.from_arrays([self.device])
        self.mover = VerifiedMover(HostMover(layout, self.arena))
        self.tier: SlotTier = open_file(path, self.arena)
        self.rows = self.arena.memory.reshape(NUM_ROWS, SLOT_BYTES)

    def store(self) -> None:
        """Store the blocks into rows 0 to 2."""
        for at, key in enumerate(KEYS):
            own = bytes_of(key).reshape(self.per_row, -1)
            self.device[1 + at * self.per_row :][: self.per_row] = own
        places = np.arange(3 * self.per_row)
        self.mover.store(1 + places, places, after=READY).wait(LONG_S)

    def load(self, row: int) -> None:
        """Load one row into the device."""
        places = np.arange(self.per_row)
        self.mover.load(row * self.per_row + places, 1 + places, after=READY).wait(LONG_S)

    def put(self) -> list[bool]:
        ticket = self.tier.put(blocks_of(KEYS, [0, 1, 2]), [0, 1, 2])
        ticket.wait(LONG_S)
        return [bool(one) for one in ticket.ok]

    def get(self, row: int) -> list[bool]:
        ticket = self.tier.get(blocks_of(KEYS, [0, 1, 2]), range(row, row + 3))
        ticket.wait(LONG_S)
        return [bool(one) for one in ticket.ok]

    def close(self) -> None:
        self.tier.close()
        self.mover.close()
        self.arena.close()


@pytest.fixture(params=[1, 2], ids=["block", "run"])
def world(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[World]:
    made = World(tmp_path, request.param)
    yield made
    made.close()


def test_damaged_host_slot_is_not_stored(world: World) -> None:
    world.store()
    world.rows[1][-1] ^= 1
    assert world.put() == [True, False, True]
    assert world.get(4) == [True, False, True]


def test_promoted_slot_loads_with_its_new_checksum(world: World) -> None:
    world.store()
    assert all(world.put())
    assert all(world.get(1)), "rows 1 and 2 held other blocks"
    world.load(1)
    np.testing.assert_array_equal(world.device[1 : 1 + world.per_row].ravel(), bytes_of(KEYS[0]))
    world.rows[1][0] ^= 1
    with pytest.raises(DamagedSlots):
        world.load(1)


def test_slot_that_a_snapshot_filled_is_compared_before_it_is_stored(world: World) -> None:
    world.store()
    world.arena.keeps_checksums = False
    world.arena.unproven = world.arena.checksums >= 0
    world.rows[0][0] ^= 1
    assert world.put() == [False, True, True]
    assert world.get(3)[1:] == [True, True]
    assert not world.arena.unproven[4 * world.per_row :].any()
