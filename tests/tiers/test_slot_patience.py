"""A slot file on a slow disk: how long one call may take, and how long a piece of many calls."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
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
    stats_after,
    wait_until_busy,
)

from kvstow.tiers import SlotFile, SlotTier, TierTicket, lanes, slot_store
from kvstow.tiers.files import Buffers
from kvstow.tiers.lanes import Lanes
from kvstow.transfer import HostArena

KEYS = [key_of(number) for number in range(NUM_SLOTS)]
NUM = 16
PATIENCE_S = 30.0


class Slow(Here):
    """Calls on the data of slots that take seconds of a clock which nothing else moves.

    The lanes look at their threads before each of them returns.

    Attributes:
        gate: each call waits until it is set.
        call_s: seconds of each call.
        long_s: seconds of the call number `long_at`, counted from `begin`.
        num_failing: reads that fail, the first ones.
        time_s: what the clock shows.
        sizes: bytes of each call since `begin`.
        quarantined: the bytes in quarantine at each look.
    """

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.call_s = self.long_s = 0.0
        self.long_at = -1
        self.num_failing = 0
        self.tier: SlotTier | None = None
        self.time_s = 0.0
        self.begin()

    def begin(self) -> None:
        self.sizes: list[int] = []
        self.quarantined: list[int] = []

    def now(self) -> float:
        return self.time_s

    def read(self, file: int, buffers: Buffers, offset: int) -> int:
        self._take_time(buffers)
        if self.tier is not None and len(self.sizes) <= self.num_failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read(file, buffers, offset)

    def write(self, file: int, buffers: Buffers, offset: int) -> int:
        self._take_time(buffers)
        return super().write(file, buffers, offset)

    def _take_time(self, buffers: Buffers) -> None:
        num_bytes = sum(map(len, buffers))
        if self.tier is None or num_bytes < SLOT_BYTES:  # the opening, or frames
            return
        assert self.gate.wait(LONG_S)
        self.time_s += self.long_s if len(self.sizes) == self.long_at else self.call_s
        self.sizes.append(num_bytes)
        self.tier._store._lanes.look_after()
        self.quarantined.append(self.tier.stats().quarantined_bytes)


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Slow:
    for name in ("_LEAST_BYTES", "_MOST_BYTES"):
        monkeypatch.setattr(lanes, name, SLOT_BYTES)
    return Slow()


def open_slow(path: Path, arena: HostArena, files: Slow) -> SlotTier:
    files.tier = open_file(path, arena, files=files, num_threads=1, stuck_after_s=PATIENCE_S)
    return files.tier


def put_one_by_one(
    files: Slow, tier: SlotTier, deadlines: dict[int, float] | None = None
) -> list[TierTicket]:
    """Queue a put of each block while the only thread waits, so that it joins them."""
    files.gate.clear()
    last = NUM_SLOTS - 1
    held = tier.put(blocks_of(KEYS[last:], [last]), [last])
    wait_until_busy(tier)
    files.begin()
    for at in range(NUM):
        tier.arena.slots[at] = bytes_of(KEYS[at])
    deadlines = deadlines or {}
    tickets = [
        tier.put(blocks_of([KEYS[at]], [at]), [at], deadline=deadlines.get(at)) for at in range(NUM)
    ]
    files.gate.set()
    held.wait_until_ended(LONG_S)
    return tickets


def move(kind: str, files: Slow, tier: SlotTier) -> list[bool]:
    """Write blocks in one joined piece, or read them in one; return the answers."""
    if kind == "put":
        tickets = put_one_by_one(files, tier)
        for ticket in tickets:
            ticket.wait_until_ended(LONG_S)
        return [bool(ticket.ok[0]) for ticket in tickets]
    call_s, files.call_s = files.call_s, 0.0
    assert all(put(tier, KEYS[:NUM], range(NUM)))
    files.call_s = call_s
    files.begin()
    return get(tier, KEYS[:NUM], range(NUM))


@pytest.mark.parametrize("kind", ["put", "get"])
def test_piece_may_take_longer_than_a_call(
    tmp_path: Path, arena: HostArena, files: Slow, kind: str
) -> None:
    with open_slow(tmp_path, arena, files) as tier:
        files.time_s += 2 * PATIENCE_S  # without work, no call is under way
        files.call_s = PATIENCE_S / 4
        assert move(kind, files, tier) == [True] * NUM
        assert len(files.sizes) >= NUM, "they are calls of their own"
        assert not any(files.quarantined)
        assert tier.mode == "on"


@pytest.mark.parametrize("kind", ["put", "get"])
def test_lane_that_notes_no_return_finds_a_slow_disk_stuck(
    tmp_path: Path, arena: HostArena, files: Slow, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lanes, "note_return", lambda *_: None)
    with open_slow(tmp_path, arena, files) as tier:
        files.call_s = PATIENCE_S / 4
        move(kind, files, tier)
        stats_after(tier)
        assert max(files.quarantined) == NUM * SLOT_BYTES


@pytest.mark.parametrize("kind", ["put", "get"])
@pytest.mark.parametrize("long_at", [0, 1, NUM // 2, NUM - 1])
def test_call_that_does_not_return_is_found_within_a_long_piece(
    tmp_path: Path, arena: HostArena, files: Slow, kind: str, long_at: int
) -> None:
    with open_slow(tmp_path, arena, files) as tier:
        files.call_s, files.long_s = PATIENCE_S / 4, PATIENCE_S + 0.1
        # The call that holds the thread counts before the joined puts.
        files.long_at = long_at + (kind == "put")
        assert move(kind, files, tier) == [True] * NUM
        assert files.quarantined.index(NUM * SLOT_BYTES) == files.long_at
        assert stats_after(tier).quarantined_bytes == 0, "the call has returned"


def test_calls_that_fail_have_returned(tmp_path: Path, arena: HostArena, files: Slow) -> None:
    with open_slow(tmp_path, arena, files) as tier:
        files.call_s, files.num_failing = PATIENCE_S / 4, 6
        assert move("get", files, tier) == [at >= 6 for at in range(NUM)]
        assert not any(files.quarantined)


def test_call_moves_a_part_of_a_large_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "_MOST_BYTES", lanes._LEAST_BYTES)
    monkeypatch.setattr(slot_store, "_PIECE_BYTES", lanes._LEAST_BYTES)
    slot_bytes = lanes._LEAST_BYTES * 5 // 2
    files = Slow()
    with (
        HostArena(4, slot_bytes) as arena,
        SlotFile(tmp_path / "slots", SlotFile.bytes_for(2, slot_bytes)).open(
            arena, MODEL, files=files
        ) as tier,
    ):
        files.tier = tier
        assert put(tier, KEYS[:2], range(2)) == [True] * 2
        assert get(tier, KEYS[:2], range(2)) == [True] * 2
        assert max(files.sizes) == lanes._LEAST_BYTES
        assert sum(files.sizes) == 4 * slot_bytes


def sizes_of_puts(files: Slow, tier: SlotTier) -> list[int]:
    """Write blocks in one piece; return how many slots each call moved."""
    files.begin()
    num = NUM - 1  # their frames are smaller than half a slot, so the pace ignores them
    assert all(put(tier, KEYS[:num], range(num)))
    return [num_bytes // SLOT_BYTES for num_bytes in files.sizes]


def test_calls_follow_the_speed_of_the_disk(
    tmp_path: Path, arena: HostArena, files: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "_MOST_BYTES", 8 * SLOT_BYTES)
    slow_s = PATIENCE_S / lanes._MARGIN
    with open_slow(tmp_path, arena, files) as tier:
        assert sizes_of_puts(files, tier) == [1, 2, 4, 8]
        files.call_s = 0.75 * slow_s
        assert sizes_of_puts(files, tier) == [8, 7], "as fast as need be"
        files.call_s = 1.25 * slow_s
        assert sizes_of_puts(files, tier) == [8, 4, 2, 1]
        assert sizes_of_puts(files, tier) == [1] * (NUM - 1)
        files.call_s = 0.75 * slow_s
        assert sizes_of_puts(files, tier) == [1] * (NUM - 1), "twice the bytes would take too long"
        files.call_s = 0.0
        assert sizes_of_puts(files, tier) == [1, 2, 4, 8]
        files.begin()
        assert all(get(tier, KEYS[: NUM - 1], range(NUM - 1)))
        sizes = [num_bytes // SLOT_BYTES for num_bytes in files.sizes]
        assert sizes == [1, 2, 4, 8], "reads have a pace of their own"


def test_calls_are_small_after_one_that_did_not_return(
    tmp_path: Path, arena: HostArena, files: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "_MOST_BYTES", 8 * SLOT_BYTES)
    with open_slow(tmp_path, arena, files) as tier:
        assert sizes_of_puts(files, tier)[3] == 8
        files.long_s, files.long_at = PATIENCE_S + 0.1, 0
        assert sizes_of_puts(files, tier) == [8, 1, 2, 4]
        assert max(files.quarantined) > 0


def test_small_calls_say_little_of_the_speed() -> None:
    pace = lanes.Pace(1.0, lanes._LEAST_BYTES)
    for _ in range(100):
        pace.note(lanes._LEAST_BYTES // 2, 0.0)
    assert pace.most_bytes == lanes._LEAST_BYTES
    for _ in range(100):
        pace.note(lanes._LEAST_BYTES // 2 + 1, 0.0)
    assert lanes._LEAST_BYTES < pace.most_bytes < lanes._MOST_BYTES


def test_late_puts_end_after_the_call_under_way(
    tmp_path: Path, arena: HostArena, files: Slow
) -> None:
    with open_slow(tmp_path, arena, files) as tier:
        files.call_s = 1.0
        tickets = put_one_by_one(files, tier, dict.fromkeys(range(NUM), 5.5))
        stats_after(tier, *tickets)
        assert all(ticket.is_late for ticket in tickets)
        assert len(files.sizes) == 6, "one that held the thread, and five within the deadline"
        # What was written whole has its frame, so a flush at the end is not in vain.
        assert get(tier, KEYS[:NUM], range(NUM)) == [at < 5 for at in range(NUM)]
    with open_file(tmp_path, arena) as again:
        assert len(again.records()) == 6, "the block that held the thread too"
        assert get(again, KEYS[:NUM], range(NUM)) == [at < 5 for at in range(NUM)]


def test_late_puts_do_not_end_those_that_are_joined_with_them(
    tmp_path: Path, arena: HostArena, files: Slow
) -> None:
    with open_slow(tmp_path, arena, files) as tier:
        files.call_s = 1.0
        tickets = put_one_by_one(files, tier, dict.fromkeys(range(NUM - 1), 5.5))
        stats_after(tier, *tickets)
        assert [bool(ticket.ok[0]) for ticket in tickets] == [False] * (NUM - 1) + [True]
        assert get(tier, KEYS[:NUM], range(NUM)) == [True] * NUM


def test_late_get_ends_after_the_call_under_way(
    tmp_path: Path, arena: HostArena, files: Slow
) -> None:
    with open_slow(tmp_path, arena, files) as tier:
        assert all(put(tier, KEYS[:NUM], range(NUM)))
        files.call_s = 1.0
        files.begin()
        blocks = blocks_of(KEYS[:NUM], range(NUM))
        ticket = tier.get(blocks, range(NUM_SLOTS, NUM_SLOTS + NUM), deadline=4.5)
        stats_after(tier, ticket)
        assert ticket.is_late
        assert len(files.sizes) == 5
        files.call_s = 0.0
        assert get(tier, KEYS[:NUM], range(NUM)) == [True] * NUM
