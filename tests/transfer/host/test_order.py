"""The host mover waits for events and for jobs with a common target, and for nothing else."""

from __future__ import annotations

import threading
from unittest import mock

import numpy as np
import pytest
from tests.transfer.host.memory import LONG_S, SHORT_S, Held, Observed, Setup

from kvstow._core import ConfigError, StateError
from kvstow.transfer import (
    READY,
    Event,
    HostEvent,
    TransferTimeout,
)
from kvstow.transfer.host import mover as host_mover


def test_store_reads_nothing_before_its_event(setup: Setup) -> None:
    event = HostEvent()
    before = setup.snapshot()
    ticket = setup.mover.store([2, 3], [4, 0], after=event)
    with pytest.raises(TransferTimeout, match="pinned"):
        ticket.wait(SHORT_S)
    assert not ticket.poll()
    assert ticket.error is None
    assert setup.unchanged(before)
    # Fill the blocks as late as possible. A store that did not wait has copied stale bytes by now.
    for region in setup.device:
        region[2:4] += 1
    want = [setup.block(2), setup.block(3)]
    event.set()
    ticket.wait(LONG_S)
    assert ticket.poll()
    assert np.array_equal(setup.arena.slots[[4, 0]], want)


def test_load_writes_nothing_before_its_event(setup: Setup) -> None:
    event = HostEvent()
    before = setup.snapshot()
    ticket = setup.mover.load([4, 0], [2, 3], after=event)
    with pytest.raises(TransferTimeout):
        ticket.wait(SHORT_S)
    # Compute that still reads the blocks sees the old bytes.
    assert setup.unchanged(before)
    event.set()
    ticket.wait(LONG_S)
    assert np.array_equal([setup.block(2), setup.block(3)], setup.arena.slots[[4, 0]])


def test_stores_of_one_slot_keep_their_order(setup: Setup) -> None:
    event = HostEvent()
    first = setup.mover.store([1], [0], after=event)
    second = setup.mover.store([2], [0], after=READY)
    with pytest.raises(TransferTimeout):
        second.wait(SHORT_S)
    event.set()
    second.wait(LONG_S)
    assert first.poll()
    assert np.array_equal(setup.arena.slots[0], setup.block(2))


def test_loads_of_one_block_keep_their_order(setup: Setup) -> None:
    event = HostEvent()
    first = setup.mover.load([0, 1], [1, 2], after=event)
    second = setup.mover.load([2, 3], [2, 3], after=READY)
    with pytest.raises(TransferTimeout):
        second.wait(SHORT_S)
    event.set()
    second.wait(LONG_S)
    assert first.poll()
    assert np.array_equal([setup.block(1), setup.block(2)], setup.arena.slots[[0, 2]])


@pytest.mark.parametrize("waiting", ["store", "load"])
def test_waiting_job_does_not_hold_up_the_other_direction(setup: Setup, waiting: str) -> None:
    event = HostEvent()
    if waiting == "store":
        held = setup.mover.store([1], [0], after=event)
        free = setup.mover.load([1], [2], after=READY)
    else:
        held = setup.mover.load([1], [2], after=event)
        free = setup.mover.store([1], [0], after=READY)
    free.wait(LONG_S)
    assert not held.poll()
    event.set()
    held.wait(LONG_S)


def test_events_may_happen_in_any_order(setup: Setup) -> None:
    events = [HostEvent() for _ in range(6)]
    tickets = [setup.mover.store([i + 1], [i], after=event) for i, event in enumerate(events)]
    for ticket, event in zip(reversed(tickets), reversed(events), strict=True):
        assert not ticket.poll()
        event.set()
        ticket.wait(LONG_S)
    assert np.array_equal(setup.arena.slots, [setup.block(i) for i in range(1, 7)])


@pytest.mark.parametrize("direction", ["store", "load"])
def test_brief_job_has_ended_when_submitted(setup: Setup, direction: str) -> None:
    event = Observed()
    if direction == "store":
        ticket = setup.mover.store([2, 4], [5, 1], after=event)
    else:
        ticket = setup.mover.load([5, 1], [2, 4], after=event)
    assert ticket.poll()
    ticket.wait(0)
    assert event.thread is threading.current_thread()
    assert np.array_equal(setup.arena.slots[[5, 1]], [setup.block(2), setup.block(4)])


@pytest.mark.parametrize("direction", ["store", "load"])
def test_worker_carries_out_a_job_that_is_not_brief(setup: Setup, direction: str) -> None:
    event = Observed()
    num_bytes = 2 * setup.layout.slot_bytes
    with mock.patch.object(host_mover, "_BRIEF_BYTES", num_bytes - 1):
        if direction == "store":
            setup.mover.store([2, 4], [5, 1], after=event).wait(LONG_S)
        else:
            setup.mover.load([5, 1], [2, 4], after=event).wait(LONG_S)
    assert event.thread is not threading.current_thread()
    assert np.array_equal(setup.arena.slots[[5, 1]], [setup.block(2), setup.block(4)])


def test_brief_job_waits_for_a_waiting_job(setup: Setup) -> None:
    event = HostEvent()
    first = setup.mover.store([1], [0], after=event)
    brief = Observed()
    second = setup.mover.store([2], [0], after=brief)
    assert not second.poll()
    assert not brief.passed
    event.set()
    second.wait(LONG_S)
    assert first.poll()
    assert brief.thread is not threading.current_thread()
    assert np.array_equal(setup.arena.slots[0], setup.block(2))


def test_brief_job_waits_for_a_job_under_way(setup: Setup) -> None:
    long = Held()
    with mock.patch.object(host_mover, "_BRIEF_BYTES", 0):
        first = setup.mover.store([1], [0], after=long)
    assert long.reached.wait(LONG_S)  # so the job has left the queue
    second = setup.mover.store([2], [0], after=READY)
    with pytest.raises(TransferTimeout):
        second.wait(SHORT_S)
    other_direction = setup.mover.load([3], [4], after=READY)
    assert other_direction.poll()
    long.go.set()
    second.wait(LONG_S)
    assert first.poll()
    assert np.array_equal(setup.arena.slots[0], setup.block(2))


def test_brief_and_long_jobs_keep_their_order(setup: Setup) -> None:
    # Here a job of one block is brief. All jobs write slot 0, so it must hold the last one's block.
    choose = np.random.default_rng(4)
    with mock.patch.object(host_mover, "_BRIEF_BYTES", setup.layout.slot_bytes):
        for _ in range(300):
            submitted = [
                (setup.mover.store(ids, range(len(ids)), after=READY), int(ids[0]))
                for ids in (
                    choose.permutation(np.arange(1, 8))[:num_blocks]
                    for num_blocks in choose.choice([1, 1, 3, 6], size=4).tolist()
                )
            ]
            ticket, last = submitted[-1]
            ticket.wait(LONG_S)
            assert np.array_equal(setup.arena.slots[0], setup.block(last))


def test_brief_jobs_of_several_threads_are_copied_one_at_a_time(setup: Setup) -> None:
    first = Held()
    others = [Observed() for _ in range(3)]
    threads = [
        threading.Thread(target=setup.mover.store, args=([1], [0]), kwargs={"after": event})
        for event in (first, *others)
    ]
    threads[0].start()
    assert first.reached.wait(LONG_S)
    for thread in threads[1:]:
        thread.start()
        thread.join(SHORT_S)
    assert not any(event.passed for event in others)
    first.go.set()
    for thread in threads:
        thread.join(LONG_S)
    setup.mover.store([1], [0], after=READY).wait(LONG_S)
    assert all(event.passed for event in others)


def test_job_without_an_event_is_refused(setup: Setup) -> None:
    with pytest.raises(TypeError, match="after"):
        setup.mover.store([1], [0])  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        setup.mover.load([0], [1], READY)  # type: ignore[call-arg]
    for wrong in (None, threading.Event(), HostEvent, 0):
        with pytest.raises(ConfigError, match="expected an Event"):
            setup.mover.store([1], [0], after=wrong)  # type: ignore[arg-type]
    assert isinstance(READY, Event)


def test_event_can_be_set_only_once() -> None:
    event = HostEvent()
    called: list[bool] = []
    event.add_done_callback(lambda: called.append(True))
    assert not called
    event.set()
    assert called == [True]
    event.wait()
    event.add_done_callback(lambda: called.append(False))
    assert called == [True, False]
    with pytest.raises(StateError, match="set already"):
        event.set(ValueError("late"))
    event.wait()
