"""Host slots whose movers keep checksums, beside a shared store: damage is not put, gets count."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
import pytest
from tests.tiers.mooncake_master import Master, missing, owning
from tests.tiers.resp.server import Server
from tests.tiers.resp.small import patient
from tests.tiers.setup import LONG_S

from kvstow.tiers import SharedTier, TierBlocks, TierTicket
from kvstow.tiers.sums import ArenaSums
from kvstow.tiers.ticket import Bools
from kvstow.transfer import READY, BlockLayout, HostArena, HostMover, VerifiedMover
from kvstow.transfer.mover import Index
from kvstow.transfer.ticket import DamagedSlots

SLOT_BYTES = 4096
NAMESPACE = bytes(range(16))
BLOCKS = TierBlocks([bytes([at]) * 32 for at in range(3)], [0, 0, 0])
Open = Callable[[HostArena, Path], AbstractContextManager[SharedTier]]


@contextmanager
def resp(arena: HostArena, folder: Path) -> Iterator[SharedTier]:
    with Server(folder) as server, patient(arena, server.url, NAMESPACE) as tier:
        yield tier


@contextmanager
def mooncake(arena: HostArena, folder: Path) -> Iterator[SharedTier]:
    master = Master(folder)
    try:
        with owning(arena, master.url, NAMESPACE) as tier:
            yield tier
    finally:
        master.kill()


def answer(ticket: TierTicket) -> list[bool]:
    ticket.wait(LONG_S)
    ok: list[bool] = ticket.ok.tolist()
    return ok


BOTH = pytest.mark.parametrize(
    "opened",
    [resp, pytest.param(mooncake, marks=pytest.mark.skipif(bool(missing()), reason=missing()))],
)


@pytest.mark.parametrize("blocks_per_part", [3, 1])
@BOTH
def test_damaged_slot_is_not_put_and_promoted_slot_is_summed(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks_per_part: int
) -> None:
    device = np.random.default_rng(7).integers(1, 256, (4, SLOT_BYTES), np.uint8)
    content = device.copy()
    with HostArena(8, SLOT_BYTES) as arena, opened(arena, tmp_path) as tier:
        monkeypatch.setattr(tier, "blocks_per_part", blocks_per_part)
        mover = VerifiedMover(HostMover(BlockLayout.from_arrays([device]), arena))
        with mover:
            mover.store([1, 2, 3], [0, 1, 2], after=READY).wait(LONG_S)
            arena.slots[1, -1] ^= 1
            assert answer(tier.put(BLOCKS, [0, 1, 2])) == [True, False, True]
            wanted = BLOCKS.some(np.array([1, 0, 2]))
            assert answer(tier.get(wanted, [4, 2, 1])) == [False, True, True]
            assert arena.checksums[4] < 0, "nothing has come"
            mover.load([2, 1], [2, 1], after=READY).wait(LONG_S)  # they held other blocks
            np.testing.assert_array_equal(device[[2, 1]], content[[1, 3]])
            arena.slots[2, 0] ^= 1
            with pytest.raises(DamagedSlots):
                mover.load([2], [1], after=READY).wait(LONG_S)


@BOTH
def test_slot_that_is_damaged_after_its_check_is_not_served(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ArenaSums.are_sound

    def damage_after(sums: ArenaSums, rows: Index) -> Bools:
        sound = real(sums, rows)
        sums._slots[1, 0] ^= 1
        return sound

    monkeypatch.setattr(ArenaSums, "are_sound", damage_after)
    with HostArena(8, SLOT_BYTES) as arena, opened(arena, tmp_path) as tier:
        content, block = arena.slots[1].copy(), BLOCKS.some(np.array([1]))
        assert answer(tier.put(block, [1])) == [True]
        [is_served] = answer(tier.get(block, [4]))
        assert not is_served or (arena.slots[4] == content).all(), "a copy was put before"
