"""A tier's ticket: an answer never changes, and a late job stays reserved until it has ended."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from tests.forks import in_child

from kvstow import ConfigError, StateError, TransferError
from kvstow.tiers import TierTicket
from kvstow.tiers.ticket import tickets_made
from kvstow.transfer import TransferTimeout

LONG_S = 60.0


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_ticket_without_an_answer_refuses_to_name_results() -> None:
    ticket = TierTicket(2)
    assert not ticket.poll()
    assert not ticket.has_ended
    assert ticket.error is None
    with pytest.raises(StateError, match="no answer yet"):
        _ = ticket.ok


def test_ended_ticket_has_one_result_per_block() -> None:
    ticket, error = TierTicket(3), TransferError("one call failed")
    ticket.end(np.array([True, False, True]), error)
    ticket.wait(0)
    assert (ticket.poll(), ticket.has_ended, ticket.is_late) == (True, True, False)
    assert ticket.ok.tolist() == [True, False, True]
    assert ticket.error is error


def test_late_ticket_is_all_false_and_has_not_ended() -> None:
    clock = Clock()
    ticket = TierTicket(2, 101.0, clock=clock)
    clock.now_s = 101.5
    assert ticket.poll()
    assert (ticket.is_late, ticket.has_ended) == (True, False)
    assert ticket.ok.tolist() == [False, False]
    ticket.end(np.ones(2, np.bool_))
    assert ticket.has_ended
    assert ticket.ok.tolist() == [False, False], "a late answer never counts"


def test_end_after_the_deadline_is_late_even_if_nobody_polled() -> None:
    clock = Clock()
    ticket = TierTicket(1, 101.0, clock=clock)
    clock.now_s = 102.0
    ticket.end(np.ones(1, np.bool_))
    assert ticket.is_late
    assert ticket.ok.tolist() == [False]


def test_answer_in_time_stays_after_the_deadline() -> None:
    clock = Clock()
    ticket = TierTicket(1, 101.0, clock=clock)
    ticket.end(np.ones(1, np.bool_))
    clock.now_s = 102.0
    assert ticket.poll()
    assert ticket.ok.tolist() == [True]


def test_clock_that_jumps_back_does_not_revive_a_late_answer() -> None:
    clock = Clock()
    ticket = TierTicket(1, 101.0, clock=clock)
    clock.now_s = 102.0
    assert ticket.poll()
    clock.now_s = 100.0
    ticket.end(np.ones(1, np.bool_))
    assert ticket.ok.tolist() == [False]


def test_result_belongs_to_the_caller() -> None:
    ticket = TierTicket(1)
    ticket.end(np.ones(1, np.bool_))
    ticket.ok[:] = False
    assert ticket.ok.tolist() == [True]


# Python warns of a fork in a process with threads.
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_tickets_have_ended_in_a_forked_child() -> None:
    open_ticket, ended = TierTicket(2), TierTicket(1)
    ended.end(np.ones(1, np.bool_))
    waiting = threading.Thread(target=open_ticket.wait, args=(LONG_S,))
    waiting.start()

    def check() -> None:
        open_ticket.wait_until_ended(0)
        assert open_ticket.ok.tolist() == [False, False]
        assert "forked" in str(open_ticket.error)
        assert ended.ok.tolist() == [True] and ended.error is None

    in_child(check)
    assert not open_ticket.has_ended, "the parent's ticket has ended, too"
    open_ticket.end(np.ones(2, np.bool_))
    waiting.join(LONG_S)
    assert open_ticket.ok.tolist() == [True, True]


def test_wait_returns_at_the_end_or_at_the_deadline() -> None:
    ended = TierTicket(1)
    timer = threading.Timer(0.01, ended.end, [np.ones(1, np.bool_)])
    timer.start()
    ended.wait(LONG_S)
    timer.join()
    clock = Clock()
    late = TierTicket(1, 99.0, clock=clock)
    late.wait()
    assert late.is_late
    with pytest.raises(TransferTimeout):
        TierTicket(1).wait(0.001)


@pytest.mark.parametrize("bad", ["1", True, float("nan"), 1j])
def test_deadline_that_is_not_a_number_is_a_config_error(bad: float) -> None:
    with pytest.raises(ConfigError, match="deadline is"):
        TierTicket(1, bad)


def test_watch_within_a_watch_leaves_the_rest_to_the_outer_one() -> None:
    outer: list[TierTicket] = []
    inner: list[TierTicket] = []
    first, second, third, fourth = (TierTicket(1) for _ in range(4))
    with tickets_made(outer):
        first.announce()
        with tickets_made(inner):
            second.announce()
        third.announce()
        TierTicket(1)  # one that is not announced
    fourth.announce()
    assert (outer, inner) == ([first, third], [second])


def test_wait_ends_at_the_deadline_of_a_job_that_hangs() -> None:
    begin_s = time.monotonic()
    ticket = TierTicket(1, begin_s + 0.02)
    ticket.wait(LONG_S)
    assert (ticket.is_late, ticket.has_ended) == (True, False)
    assert time.monotonic() < begin_s + LONG_S / 2
