"""The host mover fails a job alone, and refuses bad input before it queues anything."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
from tests.transfer.host.memory import LONG_S, Observed, Setup, close_in_time

from kvstow._core import ConfigError, InvalidBlock, KvstowError, TransferError
from kvstow.transfer import (
    READY,
    HostArena,
    HostEvent,
    HostMover,
    TransferTimeout,
    VerifiedMover,
    arena_for,
    mover_for,
)
from kvstow.transfer.host import mover as host_mover


def test_failed_event_fails_only_its_job(setup: Setup) -> None:
    event = HostEvent()
    before = setup.snapshot()
    failed = setup.mover.load([1], [2], after=event)
    cause = ValueError("the step failed")
    event.set(cause)
    with pytest.raises(TransferError, match="the step failed") as raised:
        failed.wait(LONG_S)
    assert raised.value.__cause__ is cause
    assert failed.poll()
    assert failed.error is raised.value
    assert setup.unchanged(before)
    setup.mover.load([1], [2], after=READY).wait(LONG_S)
    assert np.array_equal(setup.block(2), setup.arena.slots[1])


def test_failed_copy_fails_only_its_job(setup: Setup) -> None:
    event = HostEvent()
    failed = setup.mover.store([1, 2], [0, 1], after=event)
    behind = setup.mover.store([3], [2], after=READY)
    want = setup.block(3)
    before = setup.arena.slots[:2].copy()
    # One block beyond the memory, so that the native call raises. No checked id reaches that far.
    [(job, _)] = setup.mover._stores._order._waiting.values()
    assert isinstance(job.work, partial)
    _, block_ids, _, _ = job.work.args
    assert block_ids.tolist() == [1, 2]
    block_ids[1] = setup.layout.num_blocks
    event.set()
    with pytest.raises(TransferError, match=r"InvalidBlock.*block 8 is outside 0 to 7") as raised:
        failed.wait(LONG_S)
    assert isinstance(raised.value.__cause__, InvalidBlock)
    assert np.array_equal(setup.arena.slots[:2], before), "the job has copied a part"
    behind.wait(LONG_S)
    assert np.array_equal(setup.arena.slots[2], want)


@pytest.mark.parametrize("direction", ["store", "load"])
def test_brief_job_with_a_failed_event_fails(setup: Setup, direction: str) -> None:
    event = HostEvent()
    event.set(ValueError("the step failed"))
    before = setup.snapshot()
    if direction == "store":
        ticket = setup.mover.store([1], [2], after=event)
    else:
        ticket = setup.mover.load([2], [1], after=event)
    assert ticket.poll()
    assert "the step failed" in str(ticket.error)
    with pytest.raises(TransferError, match="the step failed"):
        ticket.wait(0)
    assert setup.unchanged(before)
    setup.mover.store([1], [2], after=READY).wait(0)
    assert np.array_equal(setup.arena.slots[2], setup.block(1))


def test_interrupt_of_a_brief_job_is_raised_to_its_submitter(setup: Setup) -> None:
    class Interrupted(Observed):
        def wait(self) -> None:
            raise KeyboardInterrupt

    before = setup.snapshot()
    with pytest.raises(KeyboardInterrupt):
        setup.mover.store([1], [2], after=Interrupted())
    assert setup.unchanged(before)
    # On a worker it fails the job, and other jobs go on.
    with mock.patch.object(host_mover, "_BRIEF_BYTES", 0):
        ticket = setup.mover.store([1], [2], after=Interrupted())
        with pytest.raises(TransferError, match="KeyboardInterrupt"):
            ticket.wait(LONG_S)
    setup.mover.store([1], [2], after=READY).wait(LONG_S)
    assert np.array_equal(setup.arena.slots[2], setup.block(1))


@pytest.mark.parametrize("brief_bytes", [0, 1 << 18])
def test_interrupt_of_another_thread_is_reported_by_the_ticket_only(
    setup: Setup, brief_bytes: int
) -> None:
    exited: Future[None] = Future()
    exited.set_exception(SystemExit(3))
    before = setup.snapshot()
    with mock.patch.object(host_mover, "_BRIEF_BYTES", brief_bytes):
        ticket = setup.mover.store([1], [2], after=HostEvent.of(exited))
    with pytest.raises(TransferError, match=r"SystemExit\(3\)"):
        ticket.wait(LONG_S)
    assert setup.unchanged(before)


@pytest.mark.parametrize("raised", [AttributeError, SystemExit])
@pytest.mark.parametrize("brief_bytes", [0, 1 << 18])
def test_error_without_a_repr_fails_only_its_job(
    brief_bytes: int, raised: type[BaseException]
) -> None:
    class Unprintable(Exception):
        def __repr__(self) -> str:
            raise raised

    class Failed(Observed):
        def wait(self) -> None:
            raise Unprintable

    setup = Setup(num_blocks=8, num_slots=6, block_bytes=24, num_regions=3)
    try:
        with mock.patch.object(host_mover, "_BRIEF_BYTES", brief_bytes):
            failed = setup.mover.store([1], [2], after=Failed())
            later = setup.mover.store([3], [4], after=READY)
        with pytest.raises(TransferError, match="Unprintable, whose __repr__ raises") as error:
            failed.wait(LONG_S)
        assert isinstance(error.value.__cause__, Unprintable)
        later.wait(LONG_S)
    finally:
        close_in_time(setup)


def test_late_transfer_has_not_failed(setup: Setup) -> None:
    event = HostEvent()
    ticket = setup.mover.store([1], [0], after=event)
    for timeout_s in (0, -1.0, 1e-9):
        with pytest.raises(TransferTimeout) as raised:
            ticket.wait(timeout_s)
        assert isinstance(raised.value, KvstowError)
        assert isinstance(raised.value, TimeoutError)
        assert not isinstance(raised.value, TransferError)
    with pytest.raises(ConfigError, match="nan"):
        ticket.wait(float("nan"))
    event.set()
    ticket.wait(float("inf"))
    ticket.wait(0)


# -- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "slots", "error", "named"),
    [
        ([0, 1], [1, 2], InvalidBlock, r"block_ids\[0\] is 0, the null block"),
        ([1, 8], [1, 2], InvalidBlock, r"block_ids\[1\] is 8, outside 0 to 7"),
        ([1, -1], [1, 2], InvalidBlock, r"block_ids\[1\] is -1, outside 0 to 7"),
        ([1, 2], [1, 6], InvalidBlock, r"host_slots\[1\] is 6, outside 0 to 5"),
        ([1, 2], [-6, 2], InvalidBlock, r"host_slots\[0\] is -6, outside 0 to 5"),
        (np.array([1, 2**64 - 1], np.uint64), [1, 2], InvalidBlock, "18446744073709551615"),
        ([1, 2], [1], ConfigError, "2 block_ids but 1 host_slots"),
        ([], [1], ConfigError, "0 block_ids but 1 host_slots"),
        (
            [[1], [2]],
            [1, 2],
            ConfigError,
            r"block_ids is \w+ of shape \(2, 1",
        ),
        (1, [1], ConfigError, "block_ids is int64 of .* expected 1-D integers"),
        ([1.0], [1], ConfigError, "block_ids is float64 of .* expected 1-D integers"),
        (np.zeros(0), [], ConfigError, "block_ids is float64 of .* expected 1-D integers"),
        ([True], [1], ConfigError, "block_ids is bool of .* expected 1-D integers"),
        (["1"], [1], ConfigError, "block_ids is <U1 of .* expected 1-D integers"),
        ([1, [2, 3]], [1, 2], ConfigError, r"block_ids is \[1, \[2, 3\]\], expected 1-D integers"),
        ([2**70], [1], ConfigError, "block_ids is object of .* expected 1-D integers"),
        ([1], None, ConfigError, "host_slots is object of .* expected 1-D integers"),
    ],
)
def test_bad_pairs_are_refused_and_change_nothing(
    setup: Setup, ids: list[int], slots: list[int], error: type[Exception], named: str
) -> None:
    before = setup.snapshot()
    with pytest.raises(error, match=named):
        setup.mover.store(ids, slots, after=READY)
    with pytest.raises(error, match=named):
        setup.mover.load(slots, ids, after=READY)
    setup.mover.close()
    assert setup.unchanged(before)


def test_repeated_destination_is_refused(setup: Setup) -> None:
    before = setup.snapshot()
    with pytest.raises(InvalidBlock, match="host_slots names destination 3 more than once"):
        setup.mover.store([1, 2, 4], [3, 0, 3], after=READY)
    with pytest.raises(InvalidBlock, match="block_ids names destination 5 more than once"):
        setup.mover.load([0, 1, 2], [5, 5, 4], after=READY)
    setup.mover.close()
    assert setup.unchanged(before)


def test_event_that_refuses_its_callback_leaves_nothing_queued(setup: Setup) -> None:
    class Refusing(Observed):
        def add_done_callback(self, callback: Callable[[], None], /) -> None:
            raise RuntimeError("no")

    before = setup.snapshot()
    with pytest.raises(RuntimeError, match="no"):
        setup.mover.store([1], [0], after=Refusing())
    setup.mover.close()
    assert setup.unchanged(before)


def test_mover_refuses_what_is_no_layout_no_arena_and_no_mover(setup: Setup) -> None:
    layout, arena = setup.layout, setup.mover.arena
    wrong: Any = 5
    for make in HostMover, mover_for:
        with pytest.raises(ConfigError, match="layout is 5, expected a BlockLayout: pass"):
            make(wrong, arena)
        with pytest.raises(ConfigError, match="arena is 5, expected a HostArena: pass"):
            make(layout, wrong)
    with pytest.raises(ConfigError, match="mover is 5, expected a Mover: pass one"):
        VerifiedMover(wrong)
    wrongs: list[Any] = [wrong, None, [], [wrong], layout]
    for layouts in wrongs:
        with pytest.raises(ConfigError, match=r"layouts is .*, expected a list of BlockLayout"):
            arena_for(layouts, 2)
    with pytest.raises(ConfigError, match="future is 5, expected a Future: pass one"):
        HostEvent.of(wrong)


def test_arena_with_smaller_slots_is_refused(setup: Setup) -> None:
    with HostArena(2, 71) as arena, pytest.raises(ConfigError, match=r"is 71, .* has 72 bytes"):
        HostMover(setup.layout, arena)
