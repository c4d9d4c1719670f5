"""A slot file on a disk that fails, hangs or is full, and in a process that is killed.

`KVSTOW_TIER_KILLS` sets the number of kills.
"""

from __future__ import annotations

import errno
import gc
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.tiers.setup import (
    LONG_S,
    NUM_SLOTS,
    SLOT_BYTES,
    Here,
    blocks_of,
    bytes_of,
    get,
    is_open_interrupted,
    key_of,
    new_arena,
    open_file,
    put,
    stats_after,
    wait_until,
)

from kvstow import StateError
from kvstow.tiers import lanes, slot_pieces
from kvstow.tiers.files import Buffers
from kvstow.transfer import HostArena, TransferTimeout

KEYS = [key_of(number) for number in range(NUM_SLOTS)]
NUM_KILLS = int(os.environ.get("KVSTOW_TIER_KILLS", "5"))


class Broken(Here):
    """Calls that fail with `error`, or hang until `gate` opens. Reads fail from `bad` on."""

    error = 0
    bad = range(0)
    hangs = writes_hang = False

    def __init__(self) -> None:
        self.gate = threading.Event()

    def read(self, file: int, buffers: Buffers, offset: int) -> int:
        if self.hangs:
            assert self.gate.wait(LONG_S)
        num_bytes = sum(map(len, buffers))
        if any(offset <= at < offset + num_bytes for at in self.bad):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read(file, buffers, offset)

    def write(self, file: int, buffers: Buffers, offset: int) -> int:
        if self.writes_hang:
            assert self.gate.wait(LONG_S)
        if self.error:
            raise OSError(self.error, os.strerror(self.error))
        return super().write(file, buffers, offset)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_failed_write_leaves_a_tier_that_only_reads(
    tmp_path: Path, arena: HostArena, number: int
) -> None:
    files = Broken()
    with open_file(tmp_path, arena, files=files) as tier:
        assert all(put(tier, KEYS[:4], range(4)))
        files.error = number
        assert put(tier, KEYS[4:8], range(4, 8)) == [False] * 4
        assert tier.mode == "read_only"
        assert "only reads because a write failed" in str(tier.error)
        files.error = 0
        assert put(tier, KEYS[4:8], range(4, 8)) == [False] * 4, "it does not come back by itself"
        assert all(get(tier, KEYS[:4], range(4)))


def test_bad_slot_spares_the_others_of_its_run(tmp_path: Path, arena: HostArena) -> None:
    files = Broken()
    with open_file(tmp_path, arena, files=files) as tier:
        assert all(put(tier, KEYS[:8], range(8)))
        files.bad = range(3 * SLOT_BYTES, 3 * SLOT_BYTES + 1)
        assert get(tier, KEYS[:8], range(8)) == [at != 3 for at in range(8)]
        assert tier.mode == "on"


def test_disk_that_only_fails_turns_the_tier_off(tmp_path: Path, arena: HostArena) -> None:
    files = Broken()
    with open_file(tmp_path, arena, files=files) as tier:
        assert all(put(tier, KEYS, range(NUM_SLOTS)))
        files.bad = range(0, NUM_SLOTS * SLOT_BYTES, SLOT_BYTES)
        assert not any(get(tier, KEYS, range(NUM_SLOTS)))
        assert tier.mode == "off"
        assert "reads in a row failed" in str(tier.error)
        assert not any(put(tier, KEYS, range(NUM_SLOTS)))


def test_read_that_hangs_keeps_its_slots_and_spares_the_others(
    tmp_path: Path, arena: HostArena
) -> None:
    files = Broken()
    tier = open_file(tmp_path, arena, files=files, num_threads=1, stuck_after_s=0.05)
    assert all(put(tier, KEYS[:4], range(4)))
    files.hangs = True
    stuck = tier.get(blocks_of(KEYS[:1], [0]), [40], deadline=files.now() + 0.01)
    stuck.wait(LONG_S)
    assert (stuck.is_late, stuck.has_ended, stuck.ok.tolist()) == (True, False, [False])
    wait_until(lambda: tier.stats().quarantined_bytes, "the call does not count as stuck")
    files.hangs = False
    assert get(tier, KEYS[1:4], range(1, 4)) == [True] * 3, "another thread took its place"
    assert put(tier, [KEYS[9]], [0]) == [False], "its slot is not reused"
    refused = tier.get(blocks_of(KEYS[1:2], [1]), [40])
    refused.wait(LONG_S)
    assert refused.ok.tolist() == [False], "its host slot is not reused"
    tier.close()
    with pytest.raises(StateError, match="in use in this process"):
        open_file(tmp_path, arena)  # the call would use the number of a file that it closes
    arena.close()
    assert not stuck.has_ended
    files.gate.set()
    stats = stats_after(tier, stuck)
    assert (stats.quarantined_bytes, stats.got_blocks) == (0, 3), "the late block does not count"
    assert stuck.ok.tolist() == [False]
    tier.close()
    with new_arena() as own, open_file(tmp_path, own) as again:
        assert all(get(again, KEYS[:4], range(4)))


def test_too_many_bytes_that_hang_turn_the_tier_off(
    tmp_path: Path, arena: HostArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Standing(Broken):
        """Time begins with the first call that hangs: on a busy machine no put counts as one."""

        begin_s: float | None = None

        def now(self) -> float:
            if not self.hangs:
                return 0.0
            now_s = super().now()
            self.begin_s = now_s if self.begin_s is None else self.begin_s
            return now_s - self.begin_s

    monkeypatch.setattr(slot_pieces, "_JOINED_GETS_BYTES", 0)  # so that each has a call of its own
    files = Standing()
    tier = open_file(
        tmp_path,
        arena,
        files=files,
        num_threads=1,
        stuck_after_s=0.02,
        max_quarantined_bytes=2 * SLOT_BYTES,
    )
    assert all(put(tier, KEYS[:4], range(4)))
    files.hangs = True
    jobs = [tier.get(blocks_of([KEYS[at]], [at]), [40 + at]) for at in range(4)]
    jobs[3].wait(LONG_S)
    assert tier.mode == "off"
    assert "calls that have not returned" in str(tier.error)
    assert jobs[3].ok.tolist() == [False]
    with pytest.raises(TransferTimeout):
        jobs[0].wait(0.001)
    files.gate.set()
    stats_after(tier, *jobs)
    tier.close()


def test_opening_that_is_interrupted_leaves_no_thread(tmp_path: Path, arena: HostArena) -> None:
    before, line, is_cut_short = threading.active_count(), 0, True
    while is_cut_short:
        line += 1
        is_cut_short = is_open_interrupted(tmp_path, arena, line, str(Path(lanes.__file__).parent))
        gc.collect()
        until_s = time.monotonic() + LONG_S
        while threading.active_count() > before:
            assert time.monotonic() < until_s, f"line {line}: a thread is left"
            time.sleep(0.001)
    assert line > 100, "some lines were interrupted"


def test_no_get_waits_for_puts(tmp_path: Path, arena: HostArena) -> None:
    files = Broken()
    with open_file(tmp_path, arena, files=files, num_threads=1) as tier:
        assert all(put(tier, KEYS[:4], range(4)))
        files.writes_hang = True
        puts = [tier.put(blocks_of([KEYS[at]], [at]), [at]) for at in range(4, 8)]
        assert get(tier, KEYS[:4], range(4)) == [True] * 4
        assert not any(put.has_ended for put in puts)
        files.gate.set()
        assert stats_after(tier, *puts).put_blocks == 8


KILLED = """
import sys
from pathlib import Path
from tests.tiers.setup import NUM_SLOTS, blocks_of, bytes_of, key_of, new_arena, open_file
arena = new_arena()
tier = open_file(Path(sys.argv[1]), arena)
held = {slot: 0 for slot in range(NUM_SLOTS)}
print("begin", flush=True)
for number in range(10**9):
    slot = number % NUM_SLOTS
    arena.slots[slot] = bytes_of(key_of(number))
    ticket = tier.put(blocks_of([key_of(number)], [slot], number), [slot])
    ticket.wait(60)
    print(number, flush=True)
"""


def test_killed_process_leaves_a_warm_file(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    for kill in range(NUM_KILLS):
        folder = tmp_path / str(kill)
        folder.mkdir()
        with subprocess.Popen(
            [sys.executable, "-c", KILLED, str(folder)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        ) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "begin\n"
            for _ in range(chance.randrange(40)):
                child.stdout.readline()
            time.sleep(chance.random() * 0.005)
            child.kill()
            confirmed = [int(line) for line in child.stdout if line.endswith("\n")]
        with new_arena() as arena, open_file(folder, arena) as tier:
            records = tier.records()
            slots = records.slots.tolist()
            numbers = [int(one) for one in records.sequences.tolist()]
            assert [number % NUM_SLOTS for number in numbers] == slots
            ok = get(tier, [key_of(number) for number in numbers], slots)
            assert sum(not one for one in ok) <= 1, "only the write under way may be lost"
            if confirmed:
                last = confirmed[-1]
                lost = set(range(max(0, last - NUM_SLOTS + 3), last + 1)) - set(numbers)
                assert not lost, f"confirmed blocks are gone: {lost}"


def test_bytes_of_a_key_differ_between_keys_and_weights() -> None:
    assert (bytes_of(KEYS[0]) != bytes_of(KEYS[1])).any()
    assert (bytes_of(KEYS[0]) != bytes_of(KEYS[0], 1)).any()


def test_a_tier_that_the_garbage_collector_finds_on_a_thread_of_it_is_closed(
    tmp_path: Path,
) -> None:
    class Collecting(Broken):
        def write(self, file: int, buffers: Buffers, offset: int) -> int:
            assert self.gate.wait(LONG_S)
            gc.collect()
            return super().write(file, buffers, offset)

    files = Collecting()
    files.gate.set()
    tier = open_file(tmp_path, new_arena(), files=files)
    files.gate.clear()
    ticket = tier.put(blocks_of(KEYS[:1], [0]), [0])
    tier.of_an_engine = [tier]  # type: ignore[attr-defined]
    del tier
    files.gate.set()
    ticket.wait_until_ended(LONG_S)
    end_s = time.monotonic() + LONG_S
    with new_arena() as arena:
        while True:
            try:
                open_file(tmp_path, arena).close()
                return
            except StateError:  # somebody has the lock
                assert time.monotonic() < end_s, "the tier is not closed"
                time.sleep(0.001)


def test_a_tier_that_the_garbage_collector_finds_on_its_watch_still_gives_up_a_stuck_call(
    tmp_path: Path,
) -> None:
    class Collecting(Broken):
        def now(self) -> float:
            if threading.current_thread().name == "kvstow-tier-watch":
                gc.collect()
            return super().now()

    def num_watching() -> int:
        return sum("tier-watch" in thread.name for thread in threading.enumerate())

    before, files = num_watching(), Collecting()
    tier = open_file(tmp_path, new_arena(), files=files, num_threads=1, stuck_after_s=0.05)
    files.writes_hang = True
    tier.put(blocks_of(KEYS[:1], [0]), [0])
    tier.of_an_engine = [tier]  # type: ignore[attr-defined]
    del tier
    end_s = time.monotonic() + LONG_S
    while num_watching() > before:
        assert time.monotonic() < end_s, "the watch waits for the call"
        time.sleep(0.001)
    files.gate.set()
