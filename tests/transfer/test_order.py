"""On every mover, only jobs without a common target overtake each other."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstow import TransferError
from kvstow.transfer import (
    READY,
    BlockLayout,
    HostArena,
    HostEvent,
    HostMover,
    Mover,
    ProvingMover,
    TransferTimeout,
    VerifiedMover,
)
from kvstow.transfer.order import JobOrder, OrderedJob

NUM_BLOCKS, NUM_SLOTS, BLOCK_BYTES = 8, 6, 300
LONG_S, SHORT_S = 60.0, 0.05

Bytes = npt.NDArray[np.uint8]


# -- the order by itself -------------------------------------------------------------------------

TARGETS = st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True)


# A new job (targets, whether its event has happened), or the event of an earlier job.
STEPS = st.lists(st.tuples(TARGETS, st.booleans()) | st.integers(0, 30), max_size=30)


@given(STEPS)
def test_job_runs_when_no_earlier_waiting_job_shares_a_target(
    steps: list[tuple[list[int], bool] | int],
) -> None:
    order: JobOrder[OrderedJob] = JobOrder(6)
    jobs: list[OrderedJob] = []
    ran: list[int] = []
    model_ran: set[int] = set()

    def shares(job: OrderedJob, other: OrderedJob) -> bool:
        return bool(set(job.targets.tolist()) & set(other.targets.tolist()))

    for step in steps:
        if isinstance(step, tuple):
            targets, is_ready = step
            job = OrderedJob(np.array(targets), READY, is_ready=is_ready)
            jobs.append(job)
            ran += [jobs.index(job)] if order.enter(job) else []
        elif step < len(jobs):
            ran += [jobs.index(job) for job in order.release(jobs[step])]
        for at, job in enumerate(jobs):  # the naive model: every pair, in the order of submission
            if job.is_ready and not any(
                shares(job, jobs[before]) for before in range(at) if before not in model_ran
            ):
                model_ran.add(at)
        assert set(ran) == model_ran
    assert len(ran) == len(set(ran)), "each job runs once"
    for later, at in enumerate(ran):
        for before in ran[later + 1 :]:
            assert before > at or not shares(jobs[before], jobs[at])
    abandoned = order.abandon()
    assert sorted([*ran, *map(jobs.index, abandoned)]) == list(range(len(jobs)))
    assert not any(order.release(job) for job in jobs), "nothing is left to run"


def test_order_without_waiting_jobs_touches_no_memory() -> None:
    order: JobOrder[OrderedJob] = JobOrder(4)
    assert order.enter(OrderedJob(np.array([1, 2]), READY, is_ready=True))
    assert not order._last.any()


def test_first_waiting_job_imports_no_module() -> None:
    """An import would take milliseconds of a step."""
    script = """
import sys
import numpy as np
from kvstow.transfer import *
mover = HostMover(BlockLayout.from_arrays([np.zeros((9, 64), np.uint8)]), HostArena(8, 64))
before = set(sys.modules)
event = HostEvent()
tickets = [mover.store([1, 2], [1, 2], after=event) for _ in range(2)]
event.set()
tickets[-1].wait(60)
print(sorted(set(sys.modules) - before))
"""
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert ran.stdout == "[]\n"


# -- the movers ----------------------------------------------------------------------------------


class Made:
    """A mover of a kind, and the memory on both sides."""

    def __init__(self, kind: str) -> None:
        rng = np.random.default_rng(3)
        self.device: Bytes = rng.integers(0, 256, (NUM_BLOCKS, BLOCK_BYTES), np.uint8)
        self.arena = HostArena(NUM_SLOTS, BLOCK_BYTES)
        self.arena.slots[:] = rng.integers(0, 256, self.arena.slots.shape, np.uint8)
        self.arena.checksums[:] = self.arena.compute_checksums(np.arange(NUM_SLOTS))
        self.arena.unproven = np.ones(NUM_SLOTS, bool)
        layout = BlockLayout.from_arrays([self.device])
        mover: Mover = HostMover(layout, self.arena)
        if kind == "verified":
            mover = VerifiedMover(mover)
        if kind == "proving":
            mover = ProvingMover(mover)
        self.mover = mover


@pytest.fixture(params=["host", "verified", "proving"])
def made(request: pytest.FixtureRequest) -> Iterator[Made]:
    setup = Made(request.param)
    yield setup
    setup.mover.close()
    setup.arena.close()


def test_event_that_never_happens_holds_up_no_other_job(made: Made) -> None:
    never = HostEvent()
    held = [
        made.mover.store([1], [0], after=never),
        made.mover.load([1], [2], after=never),
        made.mover.store([1], [4], after=never),
        made.mover.load([4], [6], after=never),
    ]
    want = made.device[3].copy()
    for _ in range(2):
        made.mover.store([3], [2], after=READY).wait(LONG_S)
        made.mover.load([2], [4], after=READY).wait(LONG_S)
        assert np.array_equal(made.device[4], want)
        made.mover.load([3], [5], after=READY).wait(LONG_S)
        assert np.array_equal(made.device[5], made.arena.slots[3])
    assert not any(ticket.poll() for ticket in held)
    made.mover.close()
    for ticket in held:
        with pytest.raises(TransferError, match="closed before"):
            ticket.wait(0)


def test_later_store_to_a_slot_writes_last(made: Made) -> None:
    event = HostEvent()
    first = made.mover.store([1], [0], after=event)
    second = made.mover.store([2, 3], [0, 1], after=READY)
    with pytest.raises(TransferTimeout):
        second.wait(SHORT_S)
    event.set()
    second.wait(LONG_S)
    assert first.poll()
    assert np.array_equal(made.arena.slots[:2], made.device[2:4])
    made.mover.load([0], [7], after=READY).wait(LONG_S)
    assert np.array_equal(made.device[7], made.device[2])


def test_later_load_into_a_block_writes_last(made: Made) -> None:
    event = HostEvent()
    first = made.mover.load([1], [2], after=event)
    second = made.mover.load([3, 4], [2, 5], after=READY)
    with pytest.raises(TransferTimeout):
        second.wait(SHORT_S)
    event.set()
    second.wait(LONG_S)
    assert first.poll()
    assert np.array_equal(made.device[2], made.arena.slots[3])
