"""The threads of a slot file: what waits when they go off, and which of them end."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from tests.tiers.setup import LONG_S, wait_until

from kvstow import TransferError
from kvstow.tiers.lanes import Lanes, Work

STUCK_AFTER_S = 1000.0


class Task:
    """Work that waits until `may_end`."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        self.error: TransferError | None = None

    def take_in(self, _: Work) -> bool:
        return False

    def run(self) -> None:
        self.has_begun.set()
        assert self.may_end.wait(LONG_S)

    def fail(self, error: TransferError) -> None:
        self.error = error


def lanes_of(now: Callable[[], float] = time.monotonic) -> Lanes:
    return Lanes(1, stuck_after_s=STUCK_AFTER_S, max_quarantined_bytes=1, now=now)


def submit(lanes: Lanes, num_bytes: int = 1) -> Task:
    task = Task(num_bytes)
    lanes.submit(deque([task]), is_put=False)
    return task


def test_lanes_that_are_off_begin_no_work() -> None:
    lanes = lanes_of()
    waits = submit(lanes)
    lanes.error = TransferError("injected")
    lanes.start()
    wait_until(lambda: waits.error is lanes.error, "what waits has begun")
    lanes.stop()
    assert lanes.join()
    assert submit(lanes).error is lanes.error, "no thread is left, so the caller fails it"


def test_threads_end_although_what_wakes_them_was_taken() -> None:
    lanes = lanes_of()
    lanes.start()
    lanes.error = TransferError("injected")
    lanes.stop()
    lanes._fail_waiting()
    joined = threading.Thread(target=lanes.join, daemon=True)
    joined.start()
    joined.join(LONG_S)
    assert not joined.is_alive(), "a thread still waits"


def test_abandoned_thread_ends_with_its_call() -> None:
    before, now_s = threading.active_count(), [0.0]
    lanes = lanes_of(lambda: now_s[0])
    lanes.start()
    num_threads, num_lanes = threading.active_count(), len(lanes._lanes)
    stuck = submit(lanes)
    assert stuck.has_begun.wait(LONG_S)
    now_s[0] += STUCK_AFTER_S + 1.0
    lanes.look_after()
    assert threading.active_count() == num_threads + 1, "another takes its place"
    stuck.may_end.set()
    wait_until(lambda: threading.active_count() == num_threads, "it goes on")
    assert len(lanes._lanes) == num_lanes
    assert (lanes.in_flight_bytes, lanes.quarantined_bytes) == (0, 0)
    lanes.stop()
    assert lanes.join()
    wait_until(lambda: threading.active_count() == before, "a thread is left")


def test_calls_without_bytes_that_do_not_return_turn_the_lanes_off() -> None:
    """As the sync of a header on a dead disk, at each reset."""
    shift_s = 0.0
    lanes = lanes_of(lambda: time.monotonic() + shift_s)
    lanes.start()
    tasks: list[Task] = []
    while lanes.error is None:
        assert len(tasks) <= 64, "each call that hangs costs a thread"
        tasks.append(task := submit(lanes, num_bytes=0))
        assert task.has_begun.wait(LONG_S)
        shift_s += 2 * STUCK_AFTER_S
        lanes.look_after()
    assert (len(tasks), lanes.quarantined_bytes) == (65, 0)
    assert "0 bytes are in 65 calls that have not returned" in str(lanes.error)
    for task in tasks:
        task.may_end.set()
    wait_until(lambda: not any(lane.is_abandoned for lane in lanes._lanes), "a call does not end")
    lanes.stop()
    assert lanes.join()
