"""Interrupts such as Ctrl-C: a lane loses no job, and runs none whose call raised."""

from __future__ import annotations

import linecache
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from tests.interrupts import is_interrupted, lines_of
from tests.sampled import IS_FULL, sampled
from tests.transfer.cuda.simulated.test_mover import (
    ILLEGAL_ADDRESS,
    INVALID_VALUE,
    Bench,
    bench,
    busy,
    paced,
    run_all,
)
from tests.transfer.cuda.simulation import library

from kvstow.transfer import CudaError, Event, HostEvent, Ticket, order
from kvstow.transfer.cuda import job, lane, mover, runtime

MOST_POLLS = 200
# How often a line is interrupted, each time at its next turn.
MOST_TIMES = 2 if IS_FULL else 1
NUM_BLOCKS = 8
NEW_OWNERS = 201  # each byte of a target that has a new owner
SOURCES = (lane.__file__, job.__file__)
OUT_OF_MEMORY = 2


def each_interrupt(
    scenario: Callable[[Bench], object],
    share: float = 1,
    sources: tuple[str, ...] = SOURCES,
    prepare: Callable[[Bench], object] = lambda _: None,
    **options: object,
) -> Iterator[Bench]:
    """Yield a bench for each line of the sources, after the line was interrupted in a scenario.

    Nothing interrupts `prepare`, which comes before the scenario.
    A line that is carried out more often is interrupted the first `MOST_TIMES` times. CI tries a
    share of the lines. Each bench begins alike, so each has all the lines.
    """
    with bench(**options) as setup:
        prepare(setup)
        lines = lines_of(lambda: scenario(setup), sources)
    repair(setup)
    seen = Counter[tuple[str, int]]()
    tried = []
    for number, where in enumerate(lines, 1):
        seen[where] += 1
        text = linecache.getline(*where).strip()
        # An interrupt at the end of a lane costs its staging memory, as at the end of any memory.
        if seen[where] <= MOST_TIMES and "self.runtime.free" not in text:
            tried.append((number, where, text))
    for number, (name, line), text in sampled(tried, share):
        with bench(**options) as setup:
            prepare(setup)
            print(f"interrupted in {Path(name).name}, line {line}: {text}")  # shown if a test fails
            assert is_interrupted(partial(scenario, setup), number, sources)
            yield setup
        repair(setup)


def repair(setup: Bench) -> None:
    """Let the next bench begin with a device that works, and on which no call is to fail."""
    library.forget_failures()
    if setup.runtime.lost is not None:
        library.library().simulation_repair()
        runtime._runtimes.clear()


class Jobs:
    """The jobs of a bench. The targets of an interrupted call get a new owner at once."""

    def __init__(self, setup: Bench) -> None:
        self.setup = setup
        self._tickets: list[tuple[list[int], list[int], Ticket]] = []
        self._new_owners: list[npt.NDArray[np.uint8]] = []

    def store(self, blocks: list[int], slots: list[int], after: Event) -> Ticket:
        try:
            ticket = self.setup.mover.store(blocks, slots, after=after)
        except KeyboardInterrupt:
            self._give_away(self.setup.arena.slots[slot] for slot in slots)
            raise
        self._tickets.append((blocks, slots, ticket))
        return ticket

    def load(self, slots: list[int], blocks: list[int], after: Event) -> Ticket:
        try:
            ticket = self.setup.mover.load(slots, blocks, after=after)
        except KeyboardInterrupt:
            self._give_away(self.setup.memory[:, block] for block in blocks)
            raise
        self._tickets.append((blocks, slots, ticket))
        return ticket

    def _give_away(self, targets: Iterable[npt.NDArray[np.uint8]]) -> None:
        for target in targets:
            target[:] = NEW_OWNERS
            self._new_owners.append(target)

    def end(self) -> None:
        """Expect every job to end, and those that ended well to have moved their bytes."""
        tickets, self._tickets = self._tickets, []
        for blocks, slots, ticket in tickets:
            num_polls = 0
            while not ticket.poll():
                num_polls += 1
                assert num_polls < MOST_POLLS, f"the job of blocks {blocks} never ends"
                library.step()
            assert ticket.source_released()
            if ticket.error is None:
                for block, slot in zip(blocks, slots, strict=True):
                    assert np.array_equal(self.setup.arena.slots[slot], self.setup.block(block))
        run_all()
        targets, self._new_owners = self._new_owners, []
        for target in targets:
            assert (target == NEW_OWNERS).all(), "a job whose call raised has run later"


def drain(setup: Bench) -> None:
    """Let the lanes and the device do all that they can."""
    for _ in range(2):  # the second call sees what the device has carried out
        for it in (setup.link.stores, setup.link.loads):
            it.advance()
        run_all()


def stores_and_loads(jobs: Jobs) -> None:
    """Run two jobs of each direction, of which one takes several turns at the places."""
    after = jobs.setup.after
    first = jobs.store([1, 2, 3, 4, 5], [0, 1, 2, 3, 4], after())
    jobs.store([6], [5], after())
    for _ in range(4):
        library.step()
        first.source_released()
    jobs.end()
    jobs.load([0, 1], [7, 8], after())
    jobs.load([2], [6], after())
    jobs.end()


def beside_compute(jobs: Jobs) -> None:
    """Queue a store bit by bit, with another one behind it."""
    clock = paced(jobs.setup, bytes_per_ms=4096)
    first = jobs.store([1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5], busy(jobs.setup))
    jobs.store([7], [6], jobs.setup.after())
    for _ in range(3):
        clock.now_s += 0.001
        first.poll()
        library.step()
    clock.now_s += 1
    jobs.end()


@pytest.mark.parametrize("scenario", [stores_and_loads, beside_compute])
def test_interrupted_lane_ends_every_job(scenario: Callable[[Jobs], None]) -> None:
    blocks, slots = list(range(1, NUM_BLOCKS + 1)), list(range(NUM_BLOCKS))
    of: dict[Bench, Jobs] = {}

    def run(setup: Bench) -> None:
        of[setup] = Jobs(setup)
        scenario(of[setup])

    for setup in each_interrupt(run, 1 / 2, verify=True, num_slots=NUM_BLOCKS):
        jobs = of[setup]
        setup.link.stores._pace = None
        jobs.end()
        # There is room for the sums of each of these jobs, but not for those of two.
        setup.memory[:, 1:] = 50 + np.arange(NUM_BLOCKS, dtype=np.uint8)[:, None]
        tickets = [jobs.store(blocks, slots, setup.after()) for _ in range(2)]
        jobs.end()
        setup.memory[:] = 1
        tickets.append(jobs.load(slots, blocks, setup.after()))
        jobs.end()
        assert [ticket.error for ticket in tickets] == [None] * 3
        assert (setup.block(NUM_BLOCKS) == 50 + NUM_BLOCKS - 1).all()
    assert len(of) > (100 if IS_FULL else 50)


@pytest.mark.parametrize("direction", ["store", "load"])
@pytest.mark.parametrize("event", ["host", "device"])
def test_interrupted_call_moves_no_bytes_later(direction: str, event: str) -> None:
    """Interrupts also the lines of the mover and of the order."""
    of: dict[Bench, tuple[Jobs, HostEvent]] = {}

    def call(setup: Bench) -> None:
        jobs, filled = of[setup] = Jobs(setup), HostEvent()
        after = busy(setup) if event == "device" else filled
        if direction == "store":
            jobs.store([1, 2, 3], [0, 1, 2], after)
        else:
            jobs.load([0, 1, 2], [1, 2, 3], after)

    def end(setup: Bench) -> None:
        jobs, filled = of[setup]
        filled.set()
        drain(setup)
        jobs.end()

    for setup in each_interrupt(call, 1 / 4, (*SOURCES, order.__file__, mover.__file__)):
        end(setup)
    assert len(of) > 10
    with bench() as setup:
        call(setup)
        jobs, _ = of[setup]
        jobs._give_away(setup.arena.slots[:3] if direction == "store" else [setup.memory[:, 1:4]])
        with pytest.raises(AssertionError, match="has run later"):  # the job was not interrupted
            end(setup)


@pytest.mark.parametrize("is_behind_another", [False, True])
def test_interrupted_call_holds_up_no_later_job(is_behind_another: bool) -> None:
    """Interrupts also the lines of the order. The event of the interrupted job never happens."""
    of: dict[Bench, tuple[Jobs, HostEvent]] = {}

    def prepare(setup: Bench) -> None:
        jobs, filled = of[setup] = Jobs(setup), HostEvent()
        if is_behind_another:
            jobs.load([3], [5], filled)

    def call(setup: Bench) -> None:
        of[setup][0].load([4], [5], HostEvent())

    for setup in each_interrupt(call, sources=(*SOURCES, order.__file__), prepare=prepare):
        jobs, filled = of[setup]
        setup.arena.slots[5] = 5
        later = setup.mover.load([5], [5], after=setup.after())
        drain(setup)
        assert later.poll() != is_behind_another
        filled.set()
        setup.land(later)
        assert (setup.block(5) == 5).all()
        assert all(ticket.poll() for _, _, ticket in jobs._tickets)
    assert len(of) > 20


def test_close_after_an_interrupted_close_ends_every_job() -> None:
    tickets: list[Ticket] = []

    def close(setup: Bench) -> None:
        mover, after = setup.mover, setup.after
        tickets[:] = [
            mover.store([1, 2, 3], [0, 1, 2], after=after()),
            mover.store([4], [3], after=HostEvent()),
            mover.store([5], [3], after=after()),
            mover.load([4], [6], after=HostEvent()),
        ]
        mover.close()

    for setup in each_interrupt(close):
        setup.mover.close()
        assert all(ticket.poll() for ticket in tickets)


def test_lost_device_fails_every_job_after_an_interrupt() -> None:
    tickets: list[Ticket] = []

    def lose(setup: Bench) -> None:
        tickets.clear()
        tickets.append(setup.mover.store([1], [0], after=setup.after()))
        tickets.append(setup.mover.store([2], [1], after=HostEvent()))
        tickets.append(setup.mover.store([3], [2], after=setup.after()))
        library.fail("cudaEventQuery", ILLEGAL_ADDRESS)
        tickets[0].poll()

    num_lost = 0
    for setup in each_interrupt(lose):
        have_ended = [ticket.poll() for ticket in tickets]
        if setup.runtime.lost is not None:  # not so if the interrupt came before
            assert all(have_ended)
            num_lost += 1
    assert num_lost > 10


def test_interrupted_launch_of_a_failed_event_moves_no_bytes() -> None:
    tickets: list[Ticket] = []

    def fail(setup: Bench) -> None:
        tickets.clear()
        filled = HostEvent()
        tickets.append(setup.mover.store([1], [0], after=filled))
        filled.set(ValueError("the step has crashed"))

    num_failed = 0
    for setup in each_interrupt(fail):
        drain(setup)
        assert not setup.arena.slots[0].any()
        for ticket in tickets:
            if ticket.poll():
                assert ticket.error is not None
                num_failed += 1
    assert num_failed > 10


def test_interrupted_launch_of_a_refused_job_ends_after_its_queued_work() -> None:
    tickets: list[Ticket] = []

    def end() -> None:
        for ticket in tickets:
            while not ticket.poll():
                assert library.step() or ticket.poll() or library.step(), "the device is idle"

    def refuse(setup: Bench) -> None:
        tickets.clear()
        for block in (1, 2):  # there is no room for the sums of both
            tickets.append(setup.mover.store([block], [0], after=setup.after()))
        library.fail("cudaMemcpyAsync", INVALID_VALUE)
        end()

    num_ended = 0
    for _ in each_interrupt(refuse, verify=True, num_slots=1):
        if len(tickets) == 2:
            end()
            assert not library.step(), "a job has ended, but its work is still queued"
            num_ended += 1
    assert num_ended > 10


def test_lane_works_on_after_an_interrupted_refusal_of_events() -> None:
    def refuse(setup: Bench) -> None:
        after = setup.after()
        library.fail("cudaEventCreateWithFlags", OUT_OF_MEMORY)
        setup.mover.store([1], [0], after=after)

    for setup in each_interrupt(refuse):
        with suppress(CudaError):  # if the interrupt came before the refusal
            setup.runtime.event()
        drain(setup)
        setup.land(setup.mover.store([2], [0], after=setup.after()))
        assert np.array_equal(setup.arena.slots[0], setup.block(2))
