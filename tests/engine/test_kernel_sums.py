"""An engine whose movers compare with the sums of GPU kernels, and what else reads its slots.

Such a mover knows each slot's sum from its store. A tier also reads and fills these slots, and a
sleeping engine writes them into a file.
"""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.engine.disk_world import NUM_HOST, OTHER, below, fall_off, serve, settle, world
from tests.engine.world import BLOCK, DOCUMENT, LOADS, RUNS, World
from tests.tiers.setup import LONG_S, blocks_of, key_of

from kvstow.engine.kernel_sums import KernelSums
from kvstow.transfer import READY, BlockLayout, Event, HostArena, HostMover, Ticket
from kvstow.transfer.cuda.kernels import checksum
from kvstow.transfer.mover import Index
from kvstow.transfer.ticket import HostTicket, find_damage
from kvstow.transfer.verified import have_device_sums, record_device_sums

WHO: dict[str, Any] = {"identity": "m", "weights_version": "1"}


class SummingMover(HostMover):
    """A mover that sums up slots as `CudaMover` with `verify` does."""

    def __init__(self, layout: BlockLayout, arena: HostArena) -> None:
        super().__init__(layout, arena)
        self._sums, self._is_known = arena.device_sums

    def _sums_of(self, slots: Index) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        return checksum(self.arena.slots[slots, : self.layout.slot_bytes])

    def store(self, block_ids: Index, host_slots: Index, *, after: Event) -> Ticket:  # type: ignore[override]
        ticket = super().store(block_ids, host_slots, after=after)
        ticket.wait()
        self._sums[host_slots], self._is_known[host_slots] = self._sums_of(host_slots), 1
        return ticket

    def load(self, host_slots: Index, block_ids: Index, *, after: Event) -> Ticket:  # type: ignore[override]
        damage = find_damage(
            host_slots,
            self._sums_of(host_slots),
            self._sums[host_slots],
            self._is_known[host_slots] != 0,
        )
        if damage is None:
            return super().load(host_slots, block_ids, after=after)
        ticket = HostTicket()
        ticket.end(damage)
        return ticket


@pytest.mark.parametrize("per_slot", [1, 2])
def test_verified_loads_take_what_the_disk_has_brought(tmp_path: Path, per_slot: int) -> None:
    sizes = {"num_host": NUM_HOST // per_slot, "blocks_per_slot": per_slot}
    num_whole = (len(DOCUMENT) - 1) // (per_slot * BLOCK) * per_slot * BLOCK
    with world(tmp_path / "disk", mover=SummingMover, **sizes) as it:
        fall_off(it)
        assert serve(it, "reader", DOCUMENT) == num_whole
        assert it.engine.stats()["damaged_blocks"] == 0
        disk = it.engine._copies.disk
        assert disk is not None
        assert not disk._kernel_sums._jobs, "it keeps jobs that have ended"
    with world(tmp_path / "disk", mover=SummingMover, **sizes) as it:
        assert serve(it, "after a restart", DOCUMENT) == num_whole


def compute_and_damage(it: World) -> None:
    """Compute the document, and damage its first block on the host at once."""
    assert it.admit("writer", DOCUMENT).state is RUNS
    it.compute("writer", DOCUMENT)
    for transfer in it.engine.transfers:
        transfer.wait()
    damage(it)
    it.engine.finish("writer")


def damage(it: World) -> None:
    """Damage the first block of the document on the host."""
    [arena] = it.engine.arenas
    [slot] = np.flatnonzero((arena.slots[:, : 8 * BLOCK].view(np.int64) == range(BLOCK)).all(1))
    arena.slots[slot, 1] ^= 1


def reads_sound_blocks(it: World) -> bool:
    """Run a request of the document. Return whether all that it finds is the document's."""
    end_s = time.monotonic() + LONG_S
    while (admission := it.admit("reader", DOCUMENT)).state not in (RUNS, LOADS):
        it.engine.poll()
        assert time.monotonic() < end_s
    num_found = admission.num_external_tokens
    if admission.transfer is not None and not it.engine.end(admission.transfer).ok:
        num_found = 0
    is_sound = not num_found or it.cached("reader", num_found) == DOCUMENT[:num_found]
    it.engine.finish("reader")
    return is_sound


@pytest.mark.parametrize(("is_verified", "per_slot"), [(True, 1), (True, 2), (False, 1)])
def test_a_block_that_was_damaged_on_the_host_is_not_vouched_for(
    tmp_path: Path, is_verified: bool, per_slot: int
) -> None:
    """Without the sums, the disk gives the damaged block a sound frame."""
    sizes = {"num_host": NUM_HOST // per_slot, "blocks_per_slot": per_slot}
    mover = SummingMover if is_verified else HostMover
    with world(tmp_path / "disk", mover=mover, **sizes) as it:
        compute_and_damage(it)
        settle(it)
        serve(it, "other", OTHER)
    with world(tmp_path / "disk", mover=HostMover, **sizes) as it:
        assert reads_sound_blocks(it) == is_verified


def test_a_block_that_is_damaged_while_it_is_written_does_not_stay_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound_part = KernelSums.sound_part

    with world(tmp_path / "disk", mover=SummingMover) as it:

        def damaging(self: KernelSums, *given: Any) -> Any:
            part = sound_part(self, *given)
            damage(it)
            monkeypatch.undo()
            return part

        assert it.admit("writer", DOCUMENT).state is RUNS
        it.compute("writer", DOCUMENT)
        it.engine.finish("writer")
        monkeypatch.setattr(KernelSums, "sound_part", damaging)
        settle(it)
        assert it.engine.stats()["disk_resident_blocks"] == 3
    with world(tmp_path / "disk", mover=HostMover) as it:
        assert it.engine.stats()["disk_resident_blocks"] == 3
        assert reads_sound_blocks(it)


def test_a_block_is_left_out_if_it_is_damaged_on_any_rank() -> None:
    layout = BlockLayout.from_arrays([np.zeros((4, 64), np.uint8)])
    with HostArena(4, 64) as first, HostArena(4, 64) as second:
        for at, arena in enumerate((first, second)):
            record_device_sums(arena, np.arange(4), [64] * 4)
            arena.slots[at, 0] ^= 1
        ranks: Any = SimpleNamespace(arenas=[first, second], layouts=[[layout], [layout]])
        job: Any = SimpleNamespace(job_id=1, direction="demote", host_slots=range(4))
        blocks = blocks_of([key_of(at) for at in range(4)], range(4))
        _, host_slots = KernelSums().sound_part(job, blocks, ranks)
        assert host_slots.tolist() == [2, 3]


@pytest.mark.parametrize("is_verified", [True, False])
def test_a_block_that_was_damaged_before_a_sleep_is_not_loaded_after_a_restart(
    tmp_path: Path, is_verified: bool
) -> None:
    it = World(17, NUM_HOST, mover=SummingMover if is_verified else HostMover)
    with it.engine:
        compute_and_damage(it)
        settle(it)
        it.engine.sleep(after=READY, to=tmp_path / "image", **WHO)
    for restarted in SummingMover, HostMover:
        with below(NUM_HOST, 17, mover=restarted) as it:
            it.engine.restart(tmp_path / "image", after=READY, **WHO)
            assert reads_sound_blocks(it) == is_verified


def test_to_compare_sums_makes_none_that_no_mover_renews() -> None:
    """After an interrupted sleep, the next one would take each newer block for damaged."""
    with HostArena(4, 64) as arena:
        assert have_device_sums(arena, np.arange(2), [64, 64]).all()
        assert not arena.has_device_sums
