"""The runner of tier jobs reports each job once, once the tier uses its host slots no more."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
import pytest
from tests.interrupts import is_interrupted
from tests.tiers.memory import MemoryTier
from tests.tiers.setup import (
    LONG_S,
    NUM_SLOTS,
    Here,
    blocks_of,
    bytes_of,
    key_of,
    open_file,
)

from kvstow import StateError
from kvstow.tiers import TierTicket, queued, slot_store
from kvstow.tiers.files import Buffers
from kvstow.tiers.lanes import Work
from kvstow.tiers.queued import Job, QueuedTier, Worker
from kvstow.tiers.runner import TierRunner
from kvstow.tiers.tier import Checked
from kvstow.transfer import HostArena
from kvstow.transfer.mover import Index


class Held(Here):
    """Reads wait until `gate` opens, and the clock can jump."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.shift_s = 0.0

    def now(self) -> float:
        return super().now() + self.shift_s

    def read(self, file: int, buffers: Buffers, offset: int) -> int:
        assert self.gate.wait(LONG_S)
        return super().read(file, buffers, offset)


class Interrupted(MemoryTier):
    """A tier whose next put is interrupted, before or after it has begun."""

    interrupt: str = ""
    open_ticket: TierTicket | None = None

    def _put(self, blocks: Checked, host_slots: Index, deadline: float | None) -> TierTicket:
        if self.interrupt == "before":
            raise KeyboardInterrupt
        if self.interrupt == "after":
            self.open_ticket = TierTicket(len(blocks), deadline)
            self.open_ticket.announce()
            raise KeyboardInterrupt
        return super()._put(blocks, host_slots, deadline)


def fill(arena: HostArena, num_blocks: int) -> None:
    for at in range(num_blocks):
        arena.slots[at] = bytes_of(key_of(at))


def test_blocks_come_back_in_the_slots_of_the_job(tmp_path: Path, arena: HostArena) -> None:
    keys = [key_of(at) for at in range(3)]
    fill(arena, 3)
    with TierRunner(open_file(tmp_path, arena)) as runner:
        runner.begin("demote", 7, blocks_of(keys, [4, 5, 9]), [0, 1, 2])
        assert runner.running == (7,)
        assert runner.wait(LONG_S)
        assert runner.poll() == [(7, [True] * 3)]
        assert not runner.running
        assert not runner.poll()
        runner.begin("promote", 8, blocks_of(keys, [4, 5, 9]), [30, 31, 32])
        assert runner.wait(LONG_S)
        assert runner.poll() == [(8, [True] * 3)]
        for at, key in enumerate(keys):
            np.testing.assert_array_equal(arena.slots[30 + at], bytes_of(key))


def test_job_that_the_tier_refuses_has_failed(arena: HostArena) -> None:
    runner = TierRunner(MemoryTier(arena, NUM_SLOTS))
    runner.begin("demote", 1, blocks_of([key_of(0)], [NUM_SLOTS]), [0])
    runner.close()
    runner.begin("promote", 2, blocks_of([key_of(0)], [0]), [0])
    assert runner.poll() == [(1, [False]), (2, [False])]


def test_late_job_is_reported_only_when_it_has_ended(tmp_path: Path, arena: HostArena) -> None:
    files = Held()
    files.gate.set()
    with TierRunner(open_file(tmp_path, arena, files=files)) as runner:
        blocks = blocks_of([key_of(0)], [0])
        runner.begin("demote", 1, blocks, [0])
        assert runner.wait(LONG_S)
        files.gate.clear()
        runner.begin("promote", 2, blocks, [1], deadline=files.now() + 60.0)
        assert not runner.wait(0.0)
        assert runner.running == (1, 2)
        files.shift_s += 61.0
        assert runner.poll() == [(1, [True])]
        assert list(runner.running) == [2], "it still uses its host slot"
        files.gate.set()
        assert runner.wait(LONG_S)
        assert runner.poll() == [(2, [False])]


@pytest.mark.parametrize("when", ["before", "after"])
def test_interrupted_job_fails_once_its_ticket_has_ended(arena: HostArena, when: str) -> None:
    tier = Interrupted(arena, NUM_SLOTS)
    tier.interrupt = when
    runner = TierRunner(tier)
    with pytest.raises(KeyboardInterrupt):
        runner.begin("demote", 3, blocks_of([key_of(0), key_of(1)], [0, 1]), [0, 1])
    assert runner.running == (3,)
    if tier.open_ticket is not None:
        assert runner.poll() == []
        tier.open_ticket.end(np.ones(2, np.bool_))
    assert runner.poll() == [(3, [False, False])]
    tier.interrupt = ""
    runner.begin("demote", 4, blocks_of([key_of(0)], [0]), [0])
    assert runner.poll() == [(4, [True])]


# Python looks for no signal at the heads of `with` and `try`.
WITHOUT_SIGNALS = ("with ", "try:")


class Kept(QueuedTier):
    """A store in this process, which takes up to four blocks of puts, one at a time."""

    def __init__(self, arena: HostArena) -> None:
        super().__init__(arena, bytes(16), timeout_s=LONG_S, num_threads=2, max_queued_bytes=2**30)
        self._max_queued_bytes = 4 * self.slot_bytes
        self.blocks_per_part = 1
        self.kept: dict[bytes, bytes] = {}
        self.start()

    def _worker(self) -> Worker:
        return KeptWorker(self)


class KeptWorker:
    def __init__(self, tier: Kept) -> None:
        self.tier = tier

    def carry_out(self, job: Job, part: range) -> None:
        for at in part:
            row, key = self.tier.arena.slots[job.host_slots[at]], job.blocks.hashes[at]
            if job.operation == "put":
                self.tier.kept[key] = row.tobytes()
            else:
                row[:] = np.frombuffer(self.tier.kept[key], np.uint8)
            job.ok[at] = True

    def hand_over(self, _: Callable[[], None]) -> bool:
        """Go on."""
        return False

    def close(self) -> None:
        """Nothing is open."""


@pytest.mark.parametrize("num_blocks", [0, 2])
@pytest.mark.parametrize("direction", ["demote", "promote"])
@pytest.mark.parametrize("sources", [slot_store, queued])
def test_job_that_is_interrupted_anywhere_in_its_tier_ends(
    tmp_path: Path,
    arena: HostArena,
    direction: Literal["demote", "promote"],
    sources: ModuleType,
    num_blocks: int,
) -> None:
    fill(arena, 2)
    slots, line = list(range(num_blocks)), 0
    blocks = blocks_of([key_of(at) for at in slots], slots)
    is_file = sources is slot_store
    with TierRunner(open_file(tmp_path, arena) if is_file else Kept(arena)) as runner:
        runner.begin("demote", 1, blocks, slots)
        assert runner.wait(LONG_S)
        is_cut_short = True
        while is_cut_short:
            line += 1
            is_cut_short = is_interrupted(
                lambda: runner.begin(direction, 2, blocks, slots),
                line,
                str(sources.__file__),
                skipped=WITHOUT_SIGNALS,
            )
            assert runner.wait(LONG_S), f"line {line}: the job does not end"
            runner.poll()
        assert line > 10, "some lines were interrupted"
        runner.begin(direction, 3, blocks, slots)
        assert runner.wait(LONG_S)
        ok = [True] * num_blocks
        assert runner.poll() == [(3, ok)], "a slot is still in use, or the queue is full"
        if not is_file:
            many = list(range(5))
            runner.begin("demote", 4, blocks_of([key_of(at) for at in many], many), many)
            assert runner.poll() == [(4, [False] * 5)], "the queue has more room than before"


def test_job_that_goes_on_after_an_interrupt_is_not_reported(
    tmp_path: Path, arena: HostArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the scheduler gives its host slot to another block, and the read overwrites it."""
    files, blocks = Held(), blocks_of([key_of(0)], [0])
    files.gate.set()
    tier = open_file(tmp_path, arena, files=files)
    lanes = tier._store._lanes
    submit = lanes.submit

    def submit_then_interrupt(pieces: deque[Work], *, is_put: bool) -> None:
        submit(pieces, is_put=is_put)
        while pieces:  # until a thread has taken them
            time.sleep(0.001)
        raise KeyboardInterrupt

    with TierRunner(tier) as runner:
        runner.begin("demote", 0, blocks, [0])
        assert runner.wait(LONG_S)
        runner.poll()
        files.gate.clear()
        with monkeypatch.context() as patch:
            patch.setattr(lanes, "submit", submit_then_interrupt)
            with pytest.raises(KeyboardInterrupt):
                runner.begin("promote", 1, blocks, [1])
        try:
            assert not runner.poll(), "the tier still reads"
            with pytest.raises(StateError, match="1 jobs of this slot file have not ended"):
                tier.records()
        finally:
            files.gate.set()
        assert runner.wait(LONG_S)
        assert runner.poll() == [(1, [False])]


@pytest.mark.parametrize("when", ["made", "announced"])
@pytest.mark.parametrize("sources", [slot_store, queued])
def test_job_that_is_interrupted_beside_its_ticket_ends(
    tmp_path: Path,
    arena: HostArena,
    monkeypatch: pytest.MonkeyPatch,
    sources: ModuleType,
    when: str,
) -> None:
    """A signal comes as a call of the tier's own returns, which no line shows."""

    class Cut(TierTicket):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            if when == "made":
                raise KeyboardInterrupt

        def announce(self) -> None:
            super().announce()
            raise KeyboardInterrupt

    fill(arena, 1)
    is_file = sources is slot_store
    with TierRunner(open_file(tmp_path, arena) if is_file else Kept(arena)) as runner:
        monkeypatch.setattr(sources, "TierTicket", Cut)
        with pytest.raises(KeyboardInterrupt):
            runner.begin("demote", 1, blocks_of([key_of(0)], [0]), [0])
        assert runner.wait(LONG_S)
        assert runner.poll() == [(1, [False])]
