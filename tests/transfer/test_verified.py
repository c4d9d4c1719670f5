from __future__ import annotations

import pickle
import threading
import time
import zlib
from collections.abc import Iterator

import numpy as np
import pytest

from kvstow import ChecksumMismatch, StateError, TransferError
from kvstow.transfer import (
    READY,
    BlockLayout,
    HostArena,
    HostEvent,
    HostMover,
    ProvingMover,
    Ticket,
    TransferTimeout,
    VerifiedMover,
    outcome,
)
from kvstow.transfer.cuda.kernels import checksum
from kvstow.transfer.mover import Index
from kvstow.transfer.ticket import DamagedSlots
from kvstow.transfer.verified import have_device_sums

NUM_BLOCKS, BLOCK_BYTES, NUM_SLOTS = 8, 300, 6


@pytest.fixture
def device() -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    random = np.random.default_rng(7)
    return random.integers(0, 256, (NUM_BLOCKS, BLOCK_BYTES), dtype=np.uint8)


@pytest.fixture
def mover(device: np.ndarray[tuple[int, int], np.dtype[np.uint8]]) -> Iterator[VerifiedMover]:
    layout = BlockLayout.from_arrays([device])
    # Slots are larger than blocks, as for another group's larger blocks.
    with (
        HostArena(NUM_SLOTS, BLOCK_BYTES + 50) as arena,
        VerifiedMover(HostMover(layout, arena)) as mover,
    ):
        yield mover


def test_load_returns_the_stored_bytes(
    mover: VerifiedMover, device: np.ndarray[tuple[int, int], np.dtype[np.uint8]]
) -> None:
    before = device.copy()
    mover.arena.slots[5, BLOCK_BYTES:] = 9  # beyond the block, where any bytes may be
    mover.store([1, 2, 3], [5, 0, 2], after=READY).wait(10)
    device[:] = 0
    mover.load([5, 0, 2], [4, 5, 6], after=READY).wait(10)
    assert (device[4:7] == before[1:4]).all()


@pytest.mark.parametrize("damaged", [0, 2, 5])
def test_changed_byte_fails_the_load_before_any_copy(
    mover: VerifiedMover,
    device: np.ndarray[tuple[int, int], np.dtype[np.uint8]],
    damaged: int,
) -> None:
    mover.store([1, 2, 3], [5, 0, 2], after=READY).wait(10)
    mover.arena.slots[damaged, BLOCK_BYTES - 1] ^= 1
    device[4:7] = 7
    ticket = mover.load([5, 0, 2], [4, 5, 6], after=READY)
    with pytest.raises(TransferError, match=f"host slot {damaged} does not hold what was stored"):
        ticket.wait(10)
    assert ticket.poll() and ticket.error is not None
    assert (device[4:7] == 7).all()


def test_failed_check_names_every_damaged_slot(mover: VerifiedMover) -> None:
    mover.store([1, 2, 3], [5, 0, 2], after=READY).wait(10)
    for slot in (0, 2):
        mover.arena.slots[slot, 7] ^= 1
    ticket = mover.load([5, 0, 2, 4], [4, 5, 6, 7], after=READY)
    with pytest.raises(ChecksumMismatch, match=r"host slot 0 does not .*first of 3 damaged slots"):
        ticket.wait(10)
    assert ticket.damaged_slots == (0, 2, 4), "slot 4 was never stored"
    sound = mover.load([5], [4], after=READY)
    sound.wait(10)
    assert sound.damaged_slots == ()


def test_error_with_damaged_slots_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(DamagedSlots("host slot 3 does not hold it", [3, 4])))
    assert isinstance(error, DamagedSlots)
    assert error.slots == (3, 4)
    assert str(error) == "host slot 3 does not hold it (the first of 2 damaged slots)"


# -- the outcome of a job ------------------------------------------------------------------------


def tickets_of(mover: VerifiedMover, *jobs: list[int]) -> list[Ticket]:
    """Submit one load for each list of slots."""
    return [mover.load(slots, range(1, len(slots) + 1), after=READY) for slots in jobs]


def test_outcome_of_good_transfers_is_true(mover: VerifiedMover) -> None:
    mover.store([1, 2, 3], [0, 1, 2], after=READY).wait(10)
    assert outcome(tickets_of(mover, [0, 1], [2]), [0, 1, 2]) is True
    assert outcome([], np.empty(0, np.int32)) is True


def test_outcome_names_damaged_slots_of_all_transfers(mover: VerifiedMover) -> None:
    mover.store([1, 2, 3], [0, 1, 2], after=READY).wait(10)
    tickets = tickets_of(mover, [0, 4], [2, 1], [5])
    assert outcome(tickets, np.array([0, 4, 2, 1, 5])) == [True, False, True, True, False]


def test_outcome_of_a_failure_without_damage_is_false(mover: VerifiedMover) -> None:
    mover.store([1], [0], after=READY).wait(10)
    failed = HostEvent()
    failed.set(RuntimeError("the step has crashed"))
    ticket = mover.load([0], [1], after=failed)
    assert outcome([ticket], [0]) is False
    assert ticket.damaged_slots == ()


def test_outcome_waits_for_the_transfers(mover: VerifiedMover) -> None:
    mover.store([1], [0], after=READY).wait(10)
    event = HostEvent()
    ticket = mover.load([0], [1], after=event)
    timer = threading.Timer(0.05, event.set)
    timer.start()
    assert outcome([ticket], [0]) is True
    assert ticket.poll()
    timer.join()


def test_slot_without_a_recorded_checksum_fails_to_load(
    mover: VerifiedMover,
) -> None:
    with pytest.raises(TransferError, match="host slot 3"):
        mover.load([3], [1], after=READY).wait(10)
    mover.store([1], [3], after=READY).wait(10)
    mover.load([3], [2], after=READY).wait(10)
    under_way = HostEvent()
    ticket = mover.store([4], [3], after=under_way)
    with pytest.raises(TransferError, match="host slot 3"):
        mover.load([3], [2], after=READY).wait(10)
    with pytest.raises(TransferTimeout):
        ticket.wait(0.01)
    assert not ticket.poll() and ticket.error is None
    under_way.set()
    ticket.wait(10)
    mover.load([3], [2], after=READY).wait(10)


@pytest.mark.parametrize("has_copied", [False, True])
def test_store_that_ends_before_its_sum_is_recorded_holds_nothing(
    mover: VerifiedMover, monkeypatch: pytest.MonkeyPatch, has_copied: bool
) -> None:
    mover.store([1], [3], after=READY).wait(10)
    copy_and_sum = HostMover.copy_and_sum

    def interrupted(self: HostMover, block_ids: Index, host_slots: Index) -> None:
        if has_copied:
            copy_and_sum(self, block_ids, host_slots)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(HostMover, "copy_and_sum", interrupted)
        with pytest.raises(TransferError, match="KeyboardInterrupt"):
            mover.store([2], [3], after=READY).wait(10)
    with pytest.raises(ChecksumMismatch, match="host slot 3 was never stored"):
        mover.load([3], [4], after=READY).wait(10)


def test_slot_holds_nothing_while_a_second_store_overwrites_it(
    mover: VerifiedMover, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_and_sum, found = HostMover.copy_and_sum, []

    def spy(self: HostMover, block_ids: Index, host_slots: Index) -> object:
        found.append(int(self.arena.checksums[host_slots[0]]))
        return copy_and_sum(self, block_ids, host_slots)

    monkeypatch.setattr(HostMover, "copy_and_sum", spy)
    events = HostEvent(), HostEvent()
    tickets = [mover.store([at], [3], after=event) for at, event in enumerate(events, 1)]
    for ticket, event in zip(tickets, events, strict=True):
        event.set()
        ticket.wait(10)
    assert found == [-1, -1]


def test_sums_of_stores_are_those_of_the_slots(mover: VerifiedMover) -> None:
    slots = np.array([5, 0, 2])
    mover.arena.slots[:, BLOCK_BYTES:] = 9
    mover.store([1, 2, 3], slots, after=READY).wait(10)
    assert mover.arena.checksums.tolist() == [
        zlib.crc32(mover.arena.slots[slot]) if slot in slots else -1 for slot in range(NUM_SLOTS)
    ]


def test_close_ends_every_ticket(mover: VerifiedMover) -> None:
    never = HostEvent()
    tickets = [mover.store([at], [at], after=never) for at in (1, 2, 3)]
    mover.close()
    assert all(ticket.poll() and ticket.error is not None for ticket in tickets)
    with pytest.raises(StateError, match="closed"):
        mover.store([1], [1], after=READY)


# -- slots that a file has filled -----------------------------------------------------------------


def filled(arena: HostArena) -> None:
    """Set all slots as filled by a file."""
    arena.slots[:] = np.random.default_rng(8).integers(0, 256, arena.slots.shape, np.uint8)
    arena.checksums[:] = arena.compute_checksums(np.arange(NUM_SLOTS))
    arena.unproven = arena.checksums >= 0


def test_load_does_not_overtake_a_load_that_is_being_proven(
    device: np.ndarray[tuple[int, int], np.dtype[np.uint8]],
) -> None:
    layout, event = BlockLayout.from_arrays([device]), HostEvent()
    with HostArena(NUM_SLOTS, BLOCK_BYTES) as arena:
        filled(arena)
        with ProvingMover(HostMover(layout, arena)) as mover:
            mover.load([0], [1], after=READY).wait(10)
            first = mover.load([1], [2], after=event)
            second = mover.load([0], [2], after=READY)  # is proven, so it is not compared again
            with pytest.raises(TransferTimeout):
                second.wait(0.05)
            event.set()
            second.wait(10)
            assert first.poll()
            assert (device[2] == arena.slots[0]).all()
            assert mover.load([0], [3], after=READY).poll(), "a brief one is over at once again"


def test_failed_proof_names_every_damaged_slot(
    device: np.ndarray[tuple[int, int], np.dtype[np.uint8]],
) -> None:
    layout = BlockLayout.from_arrays([device])
    with HostArena(NUM_SLOTS, BLOCK_BYTES) as arena:
        filled(arena)
        arena.slots[[1, 4], 0] ^= 1
        with ProvingMover(HostMover(layout, arena)) as mover:
            device[:] = 7
            ticket = mover.load([0, 1, 3, 4], [1, 2, 3, 4], after=READY)
            with pytest.raises(ChecksumMismatch, match="host slot 1 does not hold what the snap"):
                ticket.wait(10)
            assert ticket.damaged_slots == (1, 4)
            assert (device == 7).all(), "nothing is loaded"
            mover.load([0, 3], [1, 2], after=READY).wait(10)


def test_proven_slot_gets_the_sum_that_the_kernels_would_record(
    device: np.ndarray[tuple[int, int], np.dtype[np.uint8]],
) -> None:
    layout = BlockLayout.from_arrays([device])
    with HostArena(NUM_SLOTS, BLOCK_BYTES + 50) as arena:
        filled(arena)
        sums, is_known = arena.device_sums  # as a mover whose kernels sum up reads them
        with ProvingMover(HostMover(layout, arena)) as mover:
            mover.load([4, 2], [1, 2], after=READY).wait(10)
        assert is_known.tolist() == [0, 0, 1, 0, 1, 0]
        assert sums[[2, 4]].tolist() == checksum(arena.slots[[2, 4], :BLOCK_BYTES]).tolist()
        slots, sizes = np.array([0, 2, 4]), [BLOCK_BYTES] * 3
        arena.slots[4, 0] ^= 1
        sound = have_device_sums(arena, slots, sizes)
        assert sound.tolist() == [True, True, False], "no kernel knows slot 0"


def test_slot_that_is_damaged_after_its_proof_is_named(
    device: np.ndarray[tuple[int, int], np.dtype[np.uint8]],
) -> None:
    layout, event = BlockLayout.from_arrays([device]), HostEvent()
    with HostArena(NUM_SLOTS, BLOCK_BYTES) as arena:
        filled(arena)
        with ProvingMover(VerifiedMover(HostMover(layout, arena))) as mover:
            ticket = mover.load([1], [2], after=event)
            while arena.unproven is not None and arena.unproven[1]:
                time.sleep(0.001)
            arena.slots[1, 0] ^= 1
            event.set()
            assert outcome([ticket], [1]) == [False]
