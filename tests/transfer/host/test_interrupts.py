"""Interrupts such as Ctrl-C: the host mover loses no job, and runs none whose call raised."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pytest
from tests.interrupts import is_interrupted
from tests.transfer.host.memory import LONG_S, SHORT_S, Held, Setup, close_in_time

from kvstow.transfer import READY, Event, HostEvent, HostMover, ProvingMover, Ticket, order
from kvstow.transfer.host import mover as host_mover

SOURCES = str(Path(order.__file__).parent)


class InterruptedLock:
    """A lock whose next exit is interrupted: the lock is free, and then the exit raises."""

    def __init__(self, before_interrupt: Callable[[], object]) -> None:
        self._lock = threading.RLock()
        self._owner = threading.get_ident()
        self._before_interrupt: Callable[[], object] | None = before_interrupt

    def __enter__(self) -> Self:
        self._lock.acquire()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._lock.release()
        act = self._before_interrupt
        if act is not None and threading.get_ident() == self._owner:
            self._before_interrupt = None
            act()
            raise KeyboardInterrupt


def submit_and_interrupt(
    setup: Setup, direction: str, after: Event, before_interrupt: Callable[[], object]
) -> None:
    """Submit block 1 and slot 2, and interrupt the call when the job is queued."""
    mover = setup.mover
    queue = mover._stores if direction == "store" else mover._loads
    queue._lock = InterruptedLock(before_interrupt)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        if direction == "store":
            mover.store([1], [2], after=after)
        else:
            mover.load([2], [1], after=after)


def end_all(setup: Setup) -> None:
    """Carry out a job of each direction after all others."""
    setup.mover.store([7], [5], after=READY).wait(LONG_S)
    setup.mover.load([4], [7], after=READY).wait(LONG_S)


@pytest.mark.parametrize("direction", ["store", "load"])
def test_interrupted_call_leaves_no_job_that_waits_for_its_event(
    setup: Setup, direction: str
) -> None:
    before, event = setup.snapshot(), HostEvent()
    submit_and_interrupt(setup, direction, event, lambda: None)
    event.set()
    setup.mover.close()
    assert setup.unchanged(before)


@pytest.mark.parametrize("direction", ["store", "load"])
def test_interrupted_call_leaves_no_queued_job(
    setup: Setup, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_mover, "_BRIEF_BYTES", 0)
    held = Held()
    # The thread is busy with another job, so the interrupted one stays in the queue.
    if direction == "store":
        busy = setup.mover.store([3], [3], after=held)
    else:
        busy = setup.mover.load([3], [3], after=held)
    assert held.reached.wait(LONG_S)
    block, slot = setup.block(1), setup.arena.slots[2].copy()
    submit_and_interrupt(setup, direction, READY, lambda: None)
    held.go.set()
    busy.wait(LONG_S)
    end_all(setup)
    assert np.array_equal(setup.block(1), block)
    assert np.array_equal(setup.arena.slots[2], slot)


@pytest.mark.parametrize("direction", ["store", "load"])
def test_interrupt_is_raised_after_the_end_of_a_job_that_has_begun(
    setup: Setup, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_mover, "_BRIEF_BYTES", 0)
    held = Held()

    def begin() -> None:
        assert held.reached.wait(LONG_S)
        threading.Timer(0.2, held.go.set).start()

    submit_and_interrupt(setup, direction, held, begin)
    assert held.go.is_set(), "the call raised while the job was under way"
    assert np.array_equal(setup.block(1), setup.arena.slots[2])
    for region in setup.device:
        region[1] += 1
    before = setup.snapshot()
    setup.mover.close()
    assert setup.unchanged(before)


def test_interrupted_load_of_a_slot_under_proof_does_not_run_later(setup: Setup) -> None:
    setup.arena.checksums[:] = setup.arena.compute_checksums(np.arange(6))
    setup.arena.unproven = np.ones(6, bool)
    before, event = setup.snapshot(), HostEvent()
    with ProvingMover(setup.mover) as mover:

        def prove() -> None:
            end_s = time.monotonic() + LONG_S
            while mover._unproven[2] and time.monotonic() < end_s:
                time.sleep(SHORT_S)
            time.sleep(SHORT_S)  # for a load that should not be submitted

        mover._proofs._lock = InterruptedLock(prove)  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            mover.load([2], [1], after=event)
        event.set()
    assert setup.unchanged(before)
    with ProvingMover(HostMover(setup.layout, setup.arena)) as mover:
        mover.load([2], [1], after=READY).wait(LONG_S)
    assert np.array_equal(setup.block(1), setup.arena.slots[2])


def test_load_under_proof_that_is_interrupted_as_submit_returns_does_not_run(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup.arena.checksums[:] = setup.arena.compute_checksums(np.arange(6))
    setup.arena.unproven = np.ones(6, bool)
    before = setup.block(1)
    mover = ProvingMover(setup.mover)
    submit = mover._proofs.submit

    def submit_then_interrupt(*given: Any, **more: Any) -> None:
        submit(*given, **more)
        raise KeyboardInterrupt

    with monkeypatch.context() as cut:
        cut.setattr(mover._proofs, "submit", submit_then_interrupt)
        with pytest.raises(KeyboardInterrupt):
            mover.load([2], [1], after=READY)
    mover.load([3], [2], after=READY).wait(LONG_S)  # the proof before it has ended
    assert np.array_equal(setup.block(2), setup.arena.slots[3])
    assert np.array_equal(setup.block(1), before), "the interrupted load ran"
    mover.close()


def test_interrupted_call_does_not_hold_up_later_jobs_of_its_slot(setup: Setup) -> None:
    submit_and_interrupt(setup, "store", HostEvent(), lambda: None)  # never happens
    setup.mover.store([3], [2], after=READY).wait(LONG_S)
    assert np.array_equal(setup.arena.slots[2], setup.block(3))


def test_close_ends_every_job_after_an_interrupted_set() -> None:
    num_lines = 0
    for line in range(1, 1000):
        setup, event = Setup(num_blocks=8, num_slots=6, block_bytes=8, num_regions=1), HostEvent()
        tickets = [setup.mover.store([1], [0], after=event)]
        tickets += [setup.mover.store([2 + at], [at], after=READY) for at in (0, 0, 0)]
        tickets += [setup.mover.store([5, 6], [0, 1], after=READY)]
        # An interrupt right before the exit of a lock, which only a tracer raises, would hold it.
        was_interrupted = is_interrupted(event.set, line, SOURCES, skipped=("with self._lock",))
        close_in_time(setup)
        num_ended = sum(ticket.poll() for ticket in tickets)
        assert num_ended == len(tickets), f"interrupted at line {line}"
        if not was_interrupted:
            assert all(ticket.error is None for ticket in tickets)
            break
        num_lines += 1
    assert num_lines > 5


def test_interrupted_call_changes_no_order_and_loses_no_job() -> None:
    num_lines = 0
    for line in range(1, 1000):
        setup, event = Setup(num_blocks=8, num_slots=6, block_bytes=8, num_regions=1), HostEvent()
        mover = setup.mover
        earlier: list[Ticket] = [mover.store([1 + at], [at], after=event) for at in range(3)]

        def call(setup: Setup = setup) -> None:
            setup.mover.store([4, 5, 6], [0, 1, 2], after=READY)

        was_interrupted = is_interrupted(call, line, order.__file__)
        later = mover.store([7, 6], [0, 1], after=READY)
        assert not later.poll()
        event.set()
        later.wait(LONG_S)
        assert all(ticket.poll() for ticket in earlier), f"interrupted at line {line}"
        assert np.array_equal(setup.arena.slots[:2], [setup.block(7), setup.block(6)])
        if not was_interrupted:
            break
        assert np.array_equal(setup.arena.slots[2], setup.block(3)), "an interrupted job ran"
        close_in_time(setup)
        num_lines += 1
    assert num_lines > 10
