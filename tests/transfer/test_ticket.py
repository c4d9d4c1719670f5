"""Tickets and events: what happens to one waiter does not affect the others."""

from __future__ import annotations

import sys
import threading
from types import FrameType

import numpy as np
import pytest

from kvstow import ConfigError
from kvstow.transfer import HostEvent, TransferTimeout
from kvstow.transfer.ticket import HostTicket

LONG_S = 60.0


class Interrupted(BaseException):
    """An interrupt like Ctrl-C, at any line."""


def test_interrupted_waiter_does_not_affect_other_waiters() -> None:
    num_lines = 0
    for at_line in range(1, 100):
        ticket = HostTicket()
        others = [threading.Thread(target=ticket.wait, daemon=True) for _ in range(6)]
        for other in others[:3]:
            other.start()
        # Some threads begin to wait before this thread, some after it.
        timers = [threading.Timer(0.01, other.start) for other in others[3:]]
        timers.append(threading.Timer(0.03, ticket.end, [None]))
        seen = 0

        def trace(frame: FrameType, event: str, _: object, at_line: int = at_line) -> object:
            nonlocal seen
            if frame.f_code is not HostTicket.wait.__code__:
                return None
            if event == "line":
                seen += 1
                if seen == at_line:
                    raise Interrupted
            return trace

        usual = sys.gettrace()
        for timer in timers:
            timer.start()
        sys.settrace(trace)  # type: ignore[arg-type]
        try:
            ticket.wait(LONG_S)
        except Interrupted:
            num_lines += 1
        finally:
            sys.settrace(usual)
        for thread in [*timers, *others]:
            thread.join(LONG_S)
            assert not thread.is_alive(), f"interrupted at line {at_line} of wait"
        if seen < at_line:
            break
    assert num_lines > 3, "it was interrupted at each line"


@pytest.mark.parametrize("bad", ["1", [1], True, float("nan"), 1j, b"1"])
def test_timeout_that_is_not_a_number_is_a_config_error(bad: float) -> None:
    ticket = HostTicket()
    with pytest.raises(ConfigError, match="timeout_s is"):
        ticket.wait(bad)
    ticket.end(None)
    with pytest.raises(ConfigError, match="timeout_s is"):
        ticket.wait(bad)


@pytest.mark.parametrize("timeout_s", [0, -1, -float("inf"), np.float32(0.001), np.int64(0)])
def test_timeouts_of_any_number_type_are_accepted(timeout_s: float) -> None:
    ticket = HostTicket()
    with pytest.raises(TransferTimeout):
        ticket.wait(timeout_s)
    ticket.end(None)
    ticket.wait(timeout_s)


def test_event_calls_every_callback_even_if_one_raises() -> None:
    event, called = HostEvent(), list[int]()

    def raises() -> None:
        called.append(1)
        raise KeyboardInterrupt

    event.add_done_callback(lambda: called.append(0))
    event.add_done_callback(raises)
    event.add_done_callback(lambda: called.append(2))
    with pytest.raises(KeyboardInterrupt):
        event.set()
    assert called == [0, 1, 2]
    event.wait()
