"""The host mover ends every job and thread when it is closed, dropped, or the process ends."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from tests.transfer.host.memory import LONG_S, SHORT_S, Held, Setup

from kvstow._core import StateError, TransferError
from kvstow.transfer import (
    READY,
    HostEvent,
    HostMover,
)
from kvstow.transfer.host.queue import HostQueue


def test_close_carries_out_ready_jobs_and_fails_the_others(setup: Setup) -> None:
    others = set(threading.enumerate())  # daemons that tests of tiers abandon
    event = HostEvent()
    want = setup.block(1)
    before = setup.arena.slots[1:].copy()
    done = setup.mover.store([1], [0], after=READY)
    held = setup.mover.store([2], [1], after=event)
    behind = setup.mover.store([3], [1], after=READY)
    load = setup.mover.load([5], [6], after=HostEvent())
    setup.mover.close()
    assert done.poll()
    assert done.error is None
    assert np.array_equal(setup.arena.slots[0], want)
    for ticket in (held, behind, load):
        assert ticket.poll()
        with pytest.raises(TransferError, match="closed before"):
            ticket.wait(0)
    event.set()
    assert np.array_equal(setup.arena.slots[1:], before)
    assert set(threading.enumerate()) <= others
    setup.mover.close()


def test_closed_mover_or_arena_accepts_no_job(setup: Setup) -> None:
    before = setup.snapshot()
    view = setup.arena.slots
    setup.arena.close()
    with pytest.raises(StateError, match="HostArena is closed"):
        setup.mover.store([1], [0], after=READY)
    setup.mover.close()
    for ids in ([1], []):
        with pytest.raises(StateError, match="HostMover is closed"):
            setup.mover.store(ids, ids, after=READY)
        with pytest.raises(StateError, match="HostMover is closed"):
            setup.mover.load(ids, ids, after=READY)
    assert np.array_equal(view, before[1])
    with pytest.raises(StateError, match="HostArena is closed"):
        HostMover(setup.layout, setup.arena)


def test_close_waits_for_a_brief_job_of_another_thread(setup: Setup) -> None:
    brief = Held()
    submitter = threading.Thread(target=setup.mover.store, args=([1], [0]), kwargs={"after": brief})
    submitter.start()
    assert brief.reached.wait(LONG_S)
    closer = threading.Thread(target=setup.mover.close)
    closer.start()
    closer.join(SHORT_S)
    assert closer.is_alive()
    brief.go.set()
    closer.join(LONG_S)
    assert not closer.is_alive()
    assert np.array_equal(setup.arena.slots[0], setup.block(1))
    submitter.join(LONG_S)


def test_several_threads_can_wait_for_one_ticket(setup: Setup) -> None:
    event = HostEvent()
    ticket = setup.mover.store([1], [0], after=event)
    waiting = [threading.Thread(target=ticket.wait) for _ in range(3)]
    for thread in waiting:
        thread.start()
        thread.join(SHORT_S)
        assert thread.is_alive()
    event.set()
    for thread in waiting:
        thread.join(LONG_S)
        assert not thread.is_alive()
    ticket.wait(0)


def test_arena_closed_during_a_job_stays_mapped_until_it_ends(setup: Setup) -> None:
    event = HostEvent()
    want = setup.arena.slots[3].copy()
    ticket = setup.mover.load([3], [2], after=event)
    setup.arena.close()
    event.set()
    ticket.wait(LONG_S)
    assert np.array_equal(setup.block(2), want)


def test_dropped_mover_carries_out_its_jobs_and_ends() -> None:
    made = Setup(num_blocks=4, num_slots=2, block_bytes=16, num_regions=1)
    event = HostEvent()
    ticket = made.mover.store([1], [0], after=event)
    threads = [made.mover._stores._thread, made.mover._loads._thread]
    del made.mover
    gc.collect()
    assert not ticket.poll()
    event.set()
    ticket.wait(LONG_S)
    assert np.array_equal(made.arena.slots[0], made.block(1))
    gc.collect()
    for thread in threads:
        thread.join(LONG_S)
        assert not thread.is_alive()


def test_process_can_end_with_a_mover_open() -> None:
    script = """
import numpy as np
from kvstow.transfer import READY, BlockLayout, HostArena, HostEvent, HostMover
layout = BlockLayout.from_arrays([np.ones((4096, 8192), np.uint8)])
arena = HostArena(4096, layout.slot_bytes)
mover = HostMover(layout, arena)
mover.store(range(1, 4096), range(4095), after=READY)
mover.load([0], [1], after=HostEvent())
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], timeout=LONG_S, capture_output=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_stopped_queue_takes_no_job() -> None:
    """As if another thread closed the mover in the middle of a submission."""
    queue = HostQueue("kvstow-test", 4)
    queue.start()
    queue.stop()
    queue.join()
    for is_brief in False, True:
        with pytest.raises(StateError, match="this mover is closed"):
            queue.submit(lambda: None, np.array([1]), READY, is_brief=is_brief)


def test_brief_job_waits_for_those_that_are_queued_and_under_way() -> None:
    queue, ran, may_end = HostQueue("kvstow-test", 4), list[str](), threading.Event()

    def long() -> None:
        may_end.wait(LONG_S)
        ran.append("long")

    slot = np.array([1])
    first = queue.submit(long, slot, READY)
    queued = queue.submit(lambda: ran.append("queued"), slot, READY, is_brief=True)
    assert not queued.poll(), "the first job is queued"
    queue.start()
    second = queue.submit(long, slot, READY)
    may_end.set()
    second.wait(LONG_S)
    may_end.clear()
    third = queue.submit(long, slot, READY)
    while queue._under_way is None or queue._queue:
        time.sleep(0.001)
    brief = queue.submit(lambda: ran.append("brief"), slot, READY, is_brief=True)
    assert not brief.poll(), "the third job is under way"
    may_end.set()
    brief.wait(LONG_S)
    queue.stop()
    queue.join()
    assert first.poll()
    assert third.poll()
    assert ran == ["long", "queued", "long", "long", "brief"]
