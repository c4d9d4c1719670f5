"""Faults in the middle of what one thread of a slot file joins: no block is wrong, few are lost."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import numpy as np
import pytest
from tests.tiers.damage import all_proven, flip
from tests.tiers.joins import KEYS, Gated, Jobs, hold_puts, put_many
from tests.tiers.power import Volatile
from tests.tiers.setup import (
    LONG_S,
    NUM_SLOTS,
    SLOT_BYTES,
    blocks_of,
    bytes_of,
    get,
    key_of,
    open_file,
    put,
)

from kvstow.tiers import SlotTier, lanes
from kvstow.tiers.files import Buffers
from kvstow.tiers.slot_jobs import Marks
from kvstow.tiers.slot_store import SlotStore
from kvstow.transfer import HostArena

NUM = 16
OLD_KEYS = [key_of(1000 + slot) for slot in range(NUM_SLOTS)]
# Calls of a joined piece have so many slots here.
SLOTS_PER_CALL = 4


class Faulty(Gated):
    """Calls on the data of slots that move less than they should, or fail.

    Attributes:
        most_bytes: the most bytes that a call moves.
        fails_at: the number of the call that fails, counted from `begin`; -1 for none.
        fails_with: its error; 0 lets it move nothing.
        bad: slots that no call can read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most_bytes = 1 << 30
        self.fails_at = -1
        self.bad: set[int] = set()
        self.fails_with = 0
        self.num_calls = 0
        self._data = -1

    def begin(self, *, fails_at: int = -1, fails_with: int = 0) -> None:
        self.num_calls = 0
        self.fails_at, self.fails_with = fails_at, fails_with

    def open(self, path: str, flags: int) -> int:
        file = super().open(path, flags)
        if path.endswith("/slots"):
            self._data = file
        return file

    def read(self, file: int, buffers: Buffers, offset: int) -> int:
        if file == self._data:
            if self._fails():
                return 0
            buffers = self._first(buffers)
            end = offset + sum(map(len, buffers))
            if any(offset < (slot + 1) * SLOT_BYTES - 9 < end for slot in self.bad):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read(file, buffers, offset)

    def write(self, file: int, buffers: Buffers, offset: int) -> int:
        if file == self._data:
            assert self.gate.wait(LONG_S)
            if self._fails():
                return 0
            buffers = self._first(buffers)
        return super().write(file, buffers, offset)

    def _fails(self) -> bool:
        self.num_calls += 1
        fails = self.num_calls - 1 == self.fails_at
        if fails and self.fails_with:
            raise OSError(self.fails_with, os.strerror(self.fails_with))
        return fails

    def _first(self, buffers: Buffers) -> Buffers:
        """Return the first `most_bytes` of buffers."""
        first, left = [], self.most_bytes
        for buffer in buffers:
            first.append(buffer[:left])
            left -= len(buffer)
            if left <= 0:
                break
        return first


@pytest.fixture
def small_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_LEAST_BYTES", "_MOST_BYTES"):
        monkeypatch.setattr(lanes, name, SLOTS_PER_CALL * SLOT_BYTES)


def answers(jobs: Jobs) -> list[bool]:
    """Wait for jobs, and return the answers for their blocks."""
    for _, _, ticket in jobs:
        ticket.wait(LONG_S)
    return [bool(one) for _, _, ticket in jobs for one in ticket.ok]


def read_apart(tier: SlotTier, num: int, seed: int = 0) -> list[bool]:
    """Read the first blocks in one job, into host slots in a random order; compare their bytes."""
    host = random.Random(seed).sample(range(NUM_SLOTS, 2 * NUM_SLOTS), num)
    tier.arena.slots[host] = 0
    ticket = tier.get(blocks_of(KEYS[:num], range(num)), host)
    ticket.wait(LONG_S)
    for at in np.flatnonzero(ticket.ok).tolist():
        assert np.array_equal(tier.arena.slots[host[at]], bytes_of(KEYS[at]))
    return [bool(one) for one in ticket.ok]


# -- calls that move less ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "most_bytes", [512, SLOT_BYTES - 512, SLOT_BYTES, SLOT_BYTES + 512, 5 * SLOT_BYTES // 2]
)
def test_short_calls_lose_nothing(tmp_path: Path, arena: HostArena, most_bytes: int) -> None:
    files = Faulty()
    with open_file(tmp_path, arena, files=files, num_threads=1) as tier:
        hold_puts(files, tier)
        jobs = put_many(tier, most_bytes)
        files.most_bytes = most_bytes
        files.gate.set()
        assert all(answers(jobs))
        files.most_bytes = 1 << 30
        for numbers, slots, _ in jobs:
            assert all(get(tier, [KEYS[number] for number in numbers], slots))
        assert all(put(tier, KEYS[:NUM], range(NUM)))
        files.most_bytes = most_bytes
        assert read_apart(tier, NUM) == [True] * NUM


@pytest.mark.usefixtures("small_calls")
@pytest.mark.parametrize("fails_at", range(NUM // SLOTS_PER_CALL))
def test_call_that_moves_nothing_ends(tmp_path: Path, arena: HostArena, fails_at: int) -> None:
    """The file has been cut off."""
    files = Faulty()
    with open_file(tmp_path, arena, files=files, num_threads=1) as tier:
        assert all(put(tier, KEYS[:NUM], range(NUM)))
        files.begin(fails_at=fails_at)
        assert read_apart(tier, NUM) == [True] * NUM, "another call reads the slots"
        files.begin(fails_at=fails_at)
        assert put(tier, KEYS[:NUM], range(NUM)) == [False] * NUM
        assert tier.mode == "read_only"


# -- reads that fail --------------------------------------------------------------------------


@pytest.mark.usefixtures("small_calls")
@pytest.mark.parametrize("number", [errno.EIO, errno.EINTR])
@pytest.mark.parametrize("fails_at", range(NUM // SLOTS_PER_CALL))
def test_read_that_fails_once_loses_nothing(
    tmp_path: Path, arena: HostArena, fails_at: int, number: int
) -> None:
    files = Faulty()
    with open_file(tmp_path, arena, files=files, num_threads=1) as tier:
        assert all(put(tier, KEYS[:NUM], range(NUM)))
        files.begin(fails_at=fails_at, fails_with=number)
        assert read_apart(tier, NUM) == [True] * NUM
        assert files.num_calls == NUM // SLOTS_PER_CALL + SLOTS_PER_CALL
        assert tier.mode == "on"


@pytest.mark.usefixtures("small_calls")
@pytest.mark.parametrize("most_bytes", [1 << 30, SLOT_BYTES + 512])
@pytest.mark.parametrize("bad", range(NUM))
def test_bad_slot_of_a_large_read_is_lost_alone(
    tmp_path: Path, arena: HostArena, bad: int, most_bytes: int
) -> None:
    files = Faulty()
    with open_file(tmp_path, arena, files=files, num_threads=1) as tier:
        assert all(put(tier, KEYS[:NUM], range(NUM)))
        files.bad, files.most_bytes = {bad}, most_bytes
        assert read_apart(tier, NUM) == [at != bad for at in range(NUM)]
        assert tier.mode == "on"
        files.bad = set()
        assert read_apart(tier, NUM) == [True] * NUM, "an error drops no frame"


@pytest.mark.usefixtures("small_calls")
def test_many_bad_slots_among_good_ones_leave_the_tier_on(tmp_path: Path, arena: HostArena) -> None:
    files = Faulty()
    with open_file(tmp_path, arena, files=files, num_threads=1) as tier:
        assert all(put(tier, KEYS[:NUM], range(NUM)))
        files.bad = set(range(0, NUM, 2))
        assert read_apart(tier, NUM) == [at % 2 == 1 for at in range(NUM)]
        assert tier.mode == "on"


@pytest.mark.usefixtures("small_calls")
def test_tier_that_goes_off_reads_no_more(tmp_path: Path, arena: HostArena) -> None:
    files = Faulty()
    with open_file(tmp_path, arena, files=files, num_threads=1) as tier:
        assert all(put(tier, KEYS[:NUM], range(NUM)))
        files.begin()
        files.bad = set(range(NUM))
        assert read_apart(tier, NUM) == [False] * NUM
        assert tier.mode == "off"
        assert files.num_calls == 8


@pytest.mark.usefixtures("small_calls")
@pytest.mark.parametrize("bad", [0, 5, NUM - 1])
def test_damaged_slot_of_a_large_read_is_lost_alone(
    tmp_path: Path, arena: HostArena, bad: int
) -> None:
    with open_file(tmp_path, arena, num_threads=1) as tier:
        assert all(put(tier, KEYS[:NUM], range(NUM)))
        flip(tmp_path / "slots", bad * SLOT_BYTES + 77)
        assert read_apart(tier, NUM) == [at != bad for at in range(NUM)]
        flip(tmp_path / "slots", bad * SLOT_BYTES + 77)
        assert read_apart(tier, NUM) == [at != bad for at in range(NUM)], "its frame is dropped"


# -- writes that fail -------------------------------------------------------------------------


def found(tier: SlotTier, jobs: Jobs) -> tuple[int, int, int]:
    """Read each slot of joined puts as its old block and as its new one.

    Returns:
        How many old blocks, new blocks and wrong bytes come back.
    """
    host, num_old, num_new, num_wrong = NUM_SLOTS + 1, 0, 0, 0
    for numbers, slots, _ in jobs:
        for number, slot in zip(numbers, slots, strict=True):
            for key in (OLD_KEYS[slot], KEYS[number]):
                tier.arena.slots[host] = 0
                ticket = tier.get(blocks_of([key], [slot]), [host])
                ticket.wait(LONG_S)
                if not ticket.ok[0]:
                    continue
                if not np.array_equal(tier.arena.slots[host], bytes_of(key)):
                    num_wrong += 1
                elif key == OLD_KEYS[slot]:
                    num_old += 1
                else:
                    num_new += 1
    return num_old, num_new, num_wrong


def fail_in_the_middle(path: Path, arena: HostArena, fails_at: int, number: int) -> Jobs:
    """Let a call of joined puts over older blocks fail."""
    files = Faulty()
    with open_file(path, arena, files=files, num_threads=1) as tier:
        assert all(put(tier, OLD_KEYS, range(NUM_SLOTS)))
        hold_puts(files, tier)
        jobs = put_many(tier, 5)
        files.begin(fails_at=fails_at + 1, fails_with=number)  # the first call holds the thread
        files.most_bytes = SLOT_BYTES + 512  # a part of a slot is written when a call fails
        files.gate.set()
        assert not any(answers(jobs))
        assert all(ticket.error is not None for _, _, ticket in jobs)
        assert tier.mode == "read_only"
        assert found(tier, jobs) == (0, 0, 0), "no frame of the piece is left in memory"
    return jobs


@pytest.mark.usefixtures("small_calls")
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("fails_at", [1, 2, 7, 20])
def test_write_that_fails_in_the_middle_serves_no_wrong_block(
    tmp_path: Path, arena: HostArena, fails_at: int, number: int
) -> None:
    jobs = fail_in_the_middle(tmp_path, arena, fails_at, number)
    with open_file(tmp_path, arena) as again:
        num_old, num_new, num_wrong = found(again, jobs)
    assert (num_new, num_wrong) == (0, 0)
    assert num_old > 0, "what was not overwritten is still warm"


@pytest.mark.usefixtures("small_calls")
def test_without_checksums_a_write_that_fails_in_the_middle_serves_wrong_blocks(
    tmp_path: Path, arena: HostArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = fail_in_the_middle(tmp_path, arena, 7, errno.ENOSPC)
    monkeypatch.setattr(SlotStore, "_are_proven", all_proven)
    with open_file(tmp_path, arena) as again:
        assert found(again, jobs)[2] > 0


# -- a slot that is read and rewritten --------------------------------------------------------


def race(tier: SlotTier, files: Faulty) -> tuple[list[bool], list[bool]]:
    """Read slots that a put is about to rewrite, and rewrite slots that a get is about to read.

    Returns:
        Whether the get of the first brings anything, and whether the put of the second succeeds.
    """
    assert all(put(tier, OLD_KEYS, range(NUM_SLOTS)))
    hold_puts(files, tier)
    jobs = put_many(tier, 6)
    # Threads of gets are free, but for the gate.
    numbers = [number for numbers, _, _ in jobs for number in numbers]
    slots = [slot for _, slots, _ in jobs for slot in slots]
    keys = [OLD_KEYS[slot] for slot in slots]
    read = tier.get(blocks_of(keys, slots), range(NUM_SLOTS, NUM_SLOTS + len(keys)))
    files.gate.set()
    assert all(answers(jobs))
    read.wait(LONG_S)

    files.gate.clear()
    keys = [KEYS[number] for number in numbers]
    late = tier.get(blocks_of(keys, slots), range(NUM_SLOTS, NUM_SLOTS + len(keys)))
    written = tier.put(blocks_of(OLD_KEYS[: len(slots)], slots), range(len(slots)))
    files.gate.set()
    for ticket in (late, written):
        ticket.wait(LONG_S)
    for at in np.flatnonzero(late.ok).tolist():
        assert np.array_equal(tier.arena.slots[NUM_SLOTS + at], bytes_of(keys[at]))
    return read.ok.tolist(), written.ok.tolist()


def test_slot_is_not_read_and_rewritten_at_once(tmp_path: Path, arena: HostArena) -> None:
    files = Faulty()
    with open_file(tmp_path, arena, files=files, num_threads=1) as tier:
        read, written = race(tier, files)
        assert not any(read)
        assert not any(written)


def test_without_marks_a_slot_is_read_while_it_is_rewritten(
    tmp_path: Path, arena: HostArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Marks, "are_free", lambda _, places, **__: np.ones(len(places), np.bool_))
    files = Faulty()
    with open_file(tmp_path, arena, files=files, num_threads=1) as tier:
        _, written = race(tier, files)
        assert any(written)


# -- a loss of power --------------------------------------------------------------------------


class Losing(Volatile, Gated):
    """Joined calls of a machine whose power fails."""

    def __init__(self, folder: Path, chance: random.Random, cut_at: int) -> None:
        Gated.__init__(self)
        Volatile.__init__(self, folder, chance, cut_at)


def after_a_cut(path: Path, arena: HostArena, seed: int, cut_at: int) -> tuple[int, int, int]:
    """Lose the power in joined puts over older blocks; return what is found after it."""
    chance = random.Random(seed)
    with open_file(path, arena) as tier:
        assert all(put(tier, OLD_KEYS, range(NUM_SLOTS)))
    files = Losing(path, chance, 1 << 30)
    with open_file(path, arena, files=files, num_threads=1) as tier:
        hold_puts(files, tier)
        jobs = put_many(tier, seed)
        files._left = cut_at
        files.gate.set()
        assert all(answers(jobs))
        files.cut()
    assert files.image is not None
    for name, content in files.image.items():
        Path(name).write_bytes(content)
    with open_file(path, arena) as again:
        return found(again, jobs)


def after_cuts(path: Path, arena: HostArena) -> tuple[int, int, int]:
    """Lose the power at each write of joined puts, with several seeds; sum what is found."""
    total = np.zeros(3, np.int64)
    # Eight calls write the data of the 31 blocks, and one their frames.
    for cut_at in range(1, 11):
        for seed in range(4):
            folder = path / f"{cut_at} {seed}"
            folder.mkdir()
            total += after_a_cut(folder, arena, seed, cut_at)
    num_old, num_new, num_wrong = total.tolist()
    return num_old, num_new, num_wrong


@pytest.mark.usefixtures("small_calls")
def test_loss_of_power_within_joined_puts_serves_no_wrong_block(
    tmp_path: Path, arena: HostArena
) -> None:
    num_old, num_new, num_wrong = after_cuts(tmp_path, arena)
    assert num_wrong == 0
    assert num_old > 0
    assert num_new > 0


@pytest.mark.usefixtures("small_calls")
def test_without_checksums_a_loss_of_power_serves_wrong_blocks(
    tmp_path: Path, arena: HostArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SlotStore, "_are_proven", all_proven)
    assert after_cuts(tmp_path, arena)[2] > 0
