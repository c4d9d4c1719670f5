"""Gets of several jobs that one thread of a slot file carries out together.

A block could come to the wrong request in two ways: outcomes that go to another job, and slots that
ascend without being a run, because two jobs read one slot.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import numpy as np
import pytest
from tests.tiers.damage import all_proven, flip
from tests.tiers.joins import KEYS, Jobs, hold_gets
from tests.tiers.setup import (
    LONG_S,
    NUM_SLOTS,
    SLOT_BYTES,
    blocks_of,
    bytes_of,
    open_file,
    put,
    rows_of,
)
from tests.tiers.test_slot_join_faults import Faulty

from kvstow.tiers import SlotTier, slot_pieces, slot_store
from kvstow.tiers.slot_store import SlotStore
from kvstow.transfer import HostArena
from kvstow.transfer.mover import Index


def get_many(tier: SlotTier, seed: int, *, late: frozenset[int] = frozenset()) -> Jobs:
    """Queue gets of random blocks, some of them twice, into host slots in a random order."""
    choose = random.Random(seed)
    host = choose.sample(range(NUM_SLOTS, 2 * NUM_SLOTS - 1), NUM_SLOTS - 1)
    jobs: Jobs = []
    while host:
        of_host = [host.pop() for _ in range(min(choose.randint(1, 4), len(host)))]
        slots = choose.sample(range(NUM_SLOTS - 1), len(of_host))
        deadline = time.monotonic() - 1 if len(jobs) in late else None
        blocks = blocks_of([KEYS[slot] for slot in slots], slots)
        jobs.append((slots, of_host, tier.get(blocks, of_host, deadline=deadline)))
    return jobs


def outcomes(tier: SlotTier, jobs: Jobs) -> list[list[str]]:
    """Return what each job brought: the block itself, other bytes, or nothing."""
    rows, found = rows_of(tier), []
    for slots, of_host, ticket in jobs:
        ticket.wait_until_ended(LONG_S)
        is_right = [
            np.array_equal(rows[row], bytes_of(KEYS[slot]))
            for slot, row in zip(slots, of_host, strict=True)
        ]
        found.append(
            [
                ("right" if right else "wrong") if ok else "miss"
                for right, ok in zip(is_right, ticket.ok, strict=True)
            ]
        )
    return found


@pytest.fixture
def files() -> Faulty:
    return Faulty()


@pytest.fixture
def tier(tmp_path: Path, arena: HostArena, files: Faulty) -> SlotTier:
    tier = open_file(tmp_path, arena, files=files, num_threads=1)
    assert all(put(tier, KEYS, range(NUM_SLOTS)))
    files.sizes.clear()
    return tier


@pytest.mark.parametrize("seed", range(20))
def test_joined_gets_bring_each_block_to_its_own_host_slot(
    tier: SlotTier, files: Faulty, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    num_joined = []

    def joined(parts: list[slot_pieces.Part]) -> slot_pieces.Joined:
        num_joined.append(len(parts))
        return slot_pieces.Joined(parts)

    monkeypatch.setattr(slot_store, "Joined", joined)
    with tier:
        held = hold_gets(files, tier)
        jobs = get_many(tier, seed)
        num_named = [number for slots, _, _ in jobs for number in slots]
        assert len(set(num_named)) < len(num_named), "two jobs read one slot"
        files.gate.set()
        assert {one for job in outcomes(tier, jobs) for one in job} == {"right"}
        held.wait(LONG_S)
        assert num_joined == [1, len(jobs)]
        assert tier.stats().got_blocks == NUM_SLOTS


def test_joined_gets_in_a_wrong_order_are_found(
    tier: SlotTier, files: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prove that the test above would find host slots in another order than the slots."""
    keep = slot_pieces.Joined._keep

    def keep_all_but_host(self: slot_pieces.Joined, at: Index) -> None:
        host = self.host
        keep(self, at)
        self.host = host

    with tier:
        hold_gets(files, tier)
        jobs = get_many(tier, 1)
        monkeypatch.setattr(slot_pieces.Joined, "_keep", keep_all_but_host)
        files.gate.set()
        assert "wrong" in {one for job in outcomes(tier, jobs) for one in job}


def test_late_get_fails_alone(tier: SlotTier, files: Faulty) -> None:
    with tier:
        hold_gets(files, tier)
        jobs = get_many(tier, 2, late=frozenset({0, 3}))
        files.gate.set()
        for at, found in enumerate(outcomes(tier, jobs)):
            assert set(found) == {"miss" if at in {0, 3} else "right"}
            assert jobs[at][2].error is None


def test_slot_that_cannot_be_read_fails_alone(tier: SlotTier, files: Faulty) -> None:
    with tier:
        hold_gets(files, tier)
        jobs = get_many(tier, 3)
        files.bad = {jobs[1][0][0]}
        files.gate.set()
        for (slots, _, ticket), found in zip(jobs, outcomes(tier, jobs), strict=True):
            assert found == ["miss" if slot in files.bad else "right" for slot in slots]
            assert ("cannot read" in str(ticket.error)) == ("miss" in found)
        assert tier.mode == "on"


@pytest.mark.parametrize("is_checked", [True, False])
def test_damaged_block_fails_alone(
    tier: SlotTier,
    tmp_path: Path,
    files: Faulty,
    monkeypatch: pytest.MonkeyPatch,
    is_checked: bool,
) -> None:
    if not is_checked:
        monkeypatch.setattr(SlotStore, "_are_proven", all_proven)
    with tier:
        hold_gets(files, tier)
        jobs = get_many(tier, 4)
        damaged = {jobs[0][0][0], jobs[2][0][0]}
        for slot in damaged:
            flip(tmp_path / "slots", slot * SLOT_BYTES + 99)
        files.gate.set()
        for (slots, _, ticket), found in zip(jobs, outcomes(tier, jobs), strict=True):
            as_damaged = "miss" if is_checked else "wrong"
            assert found == [as_damaged if slot in damaged else "right" for slot in slots]
            assert ticket.error is None
        num_damaged = sum(slot in damaged for slots, _, _ in jobs for slot in slots)
        assert tier.stats().mismatched_blocks == num_damaged * is_checked


def test_job_that_is_too_large_to_be_joined_is_the_next_one(
    tier: SlotTier, files: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_pieces, "_JOINED_GETS_BYTES", 3 * SLOT_BYTES)
    with tier:
        held = hold_gets(files, tier)
        tickets, begin = [], 0
        for num in (1, 1, 5, 1, 1, 1, 1):
            slots = range(begin, begin + num)
            begin += num
            blocks = blocks_of([KEYS[slot] for slot in slots], list(slots))
            tickets.append(tier.get(blocks, [NUM_SLOTS + slot for slot in slots]))
        files.gate.set()
        for ticket in (held, *tickets):
            ticket.wait(LONG_S)
            assert ticket.ok.all()
    assert [num_bytes // SLOT_BYTES for num_bytes in files.sizes] == [1, 2, 5, 3, 1]
