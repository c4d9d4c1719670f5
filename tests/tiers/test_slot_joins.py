"""Pieces of a slot file's jobs that one thread carries out together."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest
from tests.tiers.joins import KEYS, Gated, Jobs, hold_gets, hold_puts, put_many
from tests.tiers.setup import (
    LONG_S,
    MODEL,
    NUM_SLOTS,
    SLOT_BYTES,
    Here,
    blocks_of,
    bytes_of,
    get,
    key_of,
    open_file,
    put,
    rows_of,
)

from kvstow._core import row_checksums
from kvstow.tiers import SlotFile, SlotTier, lanes, slot_pieces, slot_store
from kvstow.tiers.files import Buffers
from kvstow.transfer import HostArena
from kvstow.transfer.mover import Index


@pytest.mark.parametrize("seed", range(20))
def test_joined_puts_write_each_block_in_its_own_slot(
    tmp_path: Path, arena: HostArena, seed: int
) -> None:
    files = Gated()
    with open_file(tmp_path, arena, files=files, num_threads=1) as tier:
        hold_puts(files, tier)
        jobs = put_many(tier, seed)
        files.sizes.clear()
        files.gate.set()
        for numbers, slots, ticket in jobs:
            ticket.wait(LONG_S)
            assert ticket.ok.all()
            assert all(get(tier, [KEYS[number] for number in numbers], slots))
        assert (NUM_SLOTS - 1) * SLOT_BYTES in files.sizes, "they were not joined"
    # The frames on the disk are those in memory.
    with open_file(tmp_path, arena) as again:
        for numbers, slots, _ in jobs:
            assert all(get(again, [KEYS[number] for number in numbers], slots))


def served(tier: SlotTier, jobs: Jobs) -> list[str]:
    """Return what the gets of blocks bring: the block itself, nothing, or other bytes."""
    rows, found = rows_of(tier), []
    for numbers, slots, _ in jobs:
        for number, slot in zip(numbers, slots, strict=True):
            ticket = tier.get(blocks_of([KEYS[number]], [slot]), [NUM_SLOTS + 1])
            ticket.wait(LONG_S)
            is_right = np.array_equal(rows[NUM_SLOTS + 1], bytes_of(KEYS[number]))
            found.append(("right" if is_right else "wrong") if ticket.ok[0] else "miss")
    return found


@pytest.mark.parametrize("column", ["host", "frames"])
def test_joined_puts_in_a_wrong_order_are_found(
    tmp_path: Path, arena: HostArena, column: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prove that the tests above would find a column in another order than the slots."""
    files = Gated()
    keep = slot_pieces.Joined._keep

    def keep_all_but_one(self: slot_pieces.Joined, at: Index) -> None:
        old = getattr(self, column)
        keep(self, at)
        setattr(self, column, old)

    with open_file(tmp_path, arena, files=files, num_threads=1) as tier:
        hold_puts(files, tier)
        jobs = put_many(tier, 1)
        monkeypatch.setattr(slot_pieces.Joined, "_keep", keep_all_but_one)
        files.gate.set()
        for _, _, ticket in jobs:
            ticket.wait(LONG_S)
        found = served(tier, jobs)
    assert "wrong" in found if column == "host" else "miss" in found


def test_late_put_fails_alone(tmp_path: Path, arena: HostArena) -> None:
    files = Gated()
    with open_file(tmp_path, arena, files=files, num_threads=1) as tier:
        hold_puts(files, tier)
        jobs = put_many(tier, 2, late=frozenset({0, 3}))
        files.gate.set()
        for at, (numbers, slots, ticket) in enumerate(jobs):
            ticket.wait_until_ended(LONG_S)
            assert ticket.ok.tolist() == [at not in {0, 3}] * len(numbers)
            assert ticket.error is None
            held = get(tier, [KEYS[number] for number in numbers], slots)
            assert held == [at not in {0, 3}] * len(numbers)


def test_late_put_has_no_error_of_those_that_were_written(tmp_path: Path, arena: HostArena) -> None:
    files = Gated()
    with open_file(tmp_path, arena, files=files, num_threads=1) as tier:
        hold_puts(files, tier)
        jobs = put_many(tier, 2, late=frozenset({0, 3}))
        files.error = errno.EIO
        files.gate.set()
        for at, (_, _, ticket) in enumerate(jobs):
            ticket.wait_until_ended(LONG_S)
            assert (ticket.error is None) == (at in {0, 3})


def test_damaged_host_slot_fails_alone(tmp_path: Path, arena: HostArena) -> None:
    arena.keeps_checksums = True
    files = Gated()
    with open_file(tmp_path, arena, files=files, num_threads=1) as tier:
        hold_puts(files, tier)
        jobs = put_many(tier, 3)
        rest = np.arange(NUM_SLOTS - 1)
        arena.checksums[rest] = row_checksums(arena.slots, rest)
        damaged = {4, 11}
        right = arena.memory.reshape(-1, SLOT_BYTES).copy()
        arena.memory.reshape(-1, SLOT_BYTES)[list(damaged), 7] ^= 1
        files.gate.set()
        number_of = {right[at].tobytes(): at for at in rest.tolist()}
        num_failed = 0
        for numbers, slots, ticket in jobs:
            ticket.wait(LONG_S)
            sound = [number_of[bytes_of(KEYS[it]).tobytes()] not in damaged for it in numbers]
            assert ticket.ok.tolist() == sound
            arena.keeps_checksums = False
            assert get(tier, [KEYS[number] for number in numbers], slots) == sound
            num_failed += sound.count(False)
        assert num_failed == len(damaged)


def test_failed_write_fails_all_that_it_carries(tmp_path: Path, arena: HostArena) -> None:
    files = Gated()
    with open_file(tmp_path, arena, files=files, num_threads=1) as tier:
        hold_puts(files, tier)
        jobs = put_many(tier, 4)
        files.error = errno.ENOSPC
        files.gate.set()
        for numbers, slots, ticket in jobs:
            ticket.wait(LONG_S)
            assert not ticket.ok.any()
            assert "No space" in str(ticket.error)
            assert not any(get(tier, [KEYS[number] for number in numbers], slots))
        assert tier.mode == "read_only"


def test_gets_join_pieces_of_one_job_while_others_wait(
    tmp_path: Path, arena: HostArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_store, "_PIECE_BYTES", 2 * SLOT_BYTES)
    monkeypatch.setitem(slot_pieces._JOINED_BYTES, "get", 6 * SLOT_BYTES)
    files = Gated()
    with open_file(tmp_path, arena, files=files, num_threads=1) as tier:
        assert all(put(tier, KEYS, range(NUM_SLOTS)))
        files.sizes.clear()
        held = hold_gets(files, tier)
        large, small = range(10), range(10, 12)
        tickets = [
            tier.get(
                blocks_of([KEYS[at] for at in job], list(job)), [NUM_SLOTS + 1 + at for at in job]
            )
            for job in (large, small)
        ]
        files.gate.set()
        for ticket in (held, *tickets):
            ticket.wait(LONG_S)
            assert ticket.ok.all()
        rows = arena.memory.reshape(-1, SLOT_BYTES)
        for at in (*large, *small):
            assert np.array_equal(rows[NUM_SLOTS + 1 + at], bytes_of(KEYS[at]))
        sizes = [num_bytes // SLOT_BYTES for num_bytes in files.sizes]
    assert sizes == [1, 6, 2, 2, 2], "the small job has its turn after a part of the large one"


def test_pieces_of_a_delete_are_not_joined(
    tmp_path: Path, arena: HostArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_store, "_PIECE_BYTES", 2 * SLOT_BYTES)
    files = Gated()
    with open_file(tmp_path, arena, files=files, num_threads=1) as tier:
        assert all(put(tier, KEYS, range(NUM_SLOTS)))
        held = hold_gets(files, tier)
        deleted = tier.delete(blocks_of(KEYS[:10], range(10)))
        read = tier.get(blocks_of(KEYS[10:12], [10, 11]), [NUM_SLOTS + 1, NUM_SLOTS + 2])
        files.gate.set()
        for ticket in (held, deleted, read):
            ticket.wait(LONG_S)
            assert ticket.ok.all()
        assert get(tier, KEYS[:12], range(12)) == [False] * 10 + [True] * 2


class Counted(Gated):
    """Notes the bytes in flight at each call."""

    tier: SlotTier | None = None
    most = 0

    def _note(self) -> None:
        if self.tier is not None:
            self.most = max(self.most, self.tier.stats().in_flight_bytes)

    def read(self, file: int, buffers: Buffers, offset: int) -> int:
        self._note()
        return super().read(file, buffers, offset)

    def write(self, file: int, buffers: Buffers, offset: int) -> int:
        self._note()
        return super().write(file, buffers, offset)


@pytest.mark.parametrize("kind", ["put", "get"])
def test_joined_pieces_keep_the_bound_of_bytes_in_flight(
    tmp_path: Path, arena: HostArena, kind: str
) -> None:
    files, bound = Counted(), 4 * SLOT_BYTES
    with open_file(
        tmp_path, arena, files=files, num_threads=1, max_in_flight_bytes=bound
    ) as files.tier:
        assert all(put(files.tier, KEYS, range(NUM_SLOTS)))
        files.gate.clear()
        move = files.tier.put if kind == "put" else files.tier.get
        tickets = [move(blocks_of([KEYS[at]], [at]), [at]) for at in range(12)]
        files.gate.set()
        for ticket in tickets:
            ticket.wait(LONG_S)
            assert ticket.ok.all()
    assert SLOT_BYTES < files.most <= bound, "they are joined, up to the bound"


def test_call_has_no_more_buffers_than_the_system_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num = 1100
    monkeypatch.setattr(lanes, "_LEAST_BYTES", lanes._MOST_BYTES)
    config = SlotFile(tmp_path / "slots", SlotFile.bytes_for(num, SLOT_BYTES))
    with HostArena(num, SLOT_BYTES) as arena, config.open(arena, MODEL, files=Here()) as tier:
        blocks = blocks_of([key_of(at) for at in range(num)], range(num))
        for move in (tier.put, tier.get):
            ticket = move(blocks, range(num - 1, -1, -1))  # so each is a buffer of its own
            ticket.wait(LONG_S)
            assert ticket.ok.all()
