"""A call to Mooncake that does not return takes no processor from others, and no others join it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tiers.mooncake_master import Master, missing
from tests.tiers.mooncake_owner import Owner
from tests.tiers.setup import blocks, wait_until

from kvstow import TransferError
from kvstow.tiers.mooncake import MooncakeTier
from kvstow.tiers.mooncake_watch import LONG_S, CallWatch, lower_priority
from kvstow.transfer import HostArena

SLOT_BYTES = 4096
NAMESPACE = bytes(range(16))
LOWEST = 19
SOON_S = 30.0


def priority(thread_id: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, thread_id)


def lowest() -> set[int]:
    """Return the threads of this process that have the lowest priority."""
    found = set()
    for name in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has ended meanwhile
            if priority(int(name)) == LOWEST:
                found.add(int(name))
    return found


class Fixture:
    """A watch whose clock and whose priorities are the test's."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.lowered: list[int] = []
        self.num_spent = 0
        self.watch = CallWatch(long_s=1.0, clock=lambda: self.now_s, lower=self.lowered.append)

    def spend(self) -> None:
        self.num_spent += 1


def test_only_the_thread_of_a_long_call_gets_the_lowest_priority() -> None:
    it = Fixture()
    with it.watch.watched(10.0, it.spend):
        it.now_s = 0.9
        it.watch.look()
    assert (it.lowered, it.num_spent) == ([], 0)
    with it.watch.watched(10.0, it.spend):
        it.now_s = 2.0
        it.watch.look()
        it.watch.look()
        assert it.lowered == [threading.get_native_id()]
        assert it.num_spent == 0, "the thread is spent after its call"
    assert it.num_spent == 1
    it.watch.look()
    assert len(it.lowered) == 1, "no call is under way"


def test_no_call_begins_beside_a_late_one() -> None:
    it = Fixture()
    with it.watch.watched(2.0, it.spend):
        it.now_s = 1.9
        it.watch.refuse_beside_late()
        it.now_s = 2.0
        with pytest.raises(TransferError, match="has not returned in time"):
            it.watch.refuse_beside_late()
    it.watch.refuse_beside_late()


def test_a_call_that_begins_late_stops_no_other() -> None:
    it = Fixture()
    it.now_s = 5.0
    with it.watch.watched(5.1, it.spend):
        it.now_s = 5.9
        it.watch.refuse_beside_late()
        it.now_s = 6.0
        with pytest.raises(TransferError, match="has not returned in time"):
            it.watch.refuse_beside_late()


def test_a_call_that_raises_is_under_way_no_more() -> None:
    it = Fixture()
    with pytest.raises(ZeroDivisionError), it.watch.watched(0.0, it.spend):
        raise ZeroDivisionError
    it.watch.refuse_beside_late()


def test_one_thread_of_the_process_gets_the_lowest_priority() -> None:
    ids: list[int] = []
    may_end = threading.Event()

    def run() -> None:
        ids.append(threading.get_native_id())
        may_end.wait(SOON_S)

    thread = threading.Thread(target=run)
    thread.start()
    wait_until(lambda: bool(ids), "the thread does not begin")
    before = priority(threading.get_native_id())
    lower_priority(ids[0])
    assert priority(ids[0]) == LOWEST
    assert priority(threading.get_native_id()) == before < LOWEST
    may_end.set()
    thread.join()
    lower_priority(ids[0])  # a thread that has ended


def test_what_is_to_start_as_the_watch_is_closed_starts() -> None:
    watch = CallWatch(long_s=0.002)
    watch.start()
    has_begun, may_go_on = threading.Event(), threading.Event()
    started: list[str] = []

    def start() -> None:
        has_begun.set()
        assert may_go_on.wait(SOON_S)

    assert watch.soon(start)
    assert has_begun.wait(SOON_S)
    assert watch.soon(partial(started.append, "before the close"))
    closing = threading.Thread(target=watch.close)
    closing.start()
    wait_until(lambda: watch._is_closed, "it is not closed")
    assert not watch.soon(partial(started.append, "after it"))
    may_go_on.set()
    closing.join()
    assert started == ["before the close"]


def test_a_thread_that_does_not_start_is_tried_again() -> None:
    watch = CallWatch(long_s=0.002)
    watch.start()
    answers = [RuntimeError("no more threads"), RuntimeError("no more threads"), None]

    def start() -> None:
        if (answer := answers.pop(0)) is not None:
            raise answer

    assert watch.soon(start)
    wait_until(lambda: not answers, "it is not tried again")
    watch.close()


class Standing:
    """A store whose gets stand still until the test lets them go on, and who calls it."""

    may_go_on: threading.Event
    callers: list[int]
    priorities: list[int]

    def setup(self, *_: Any) -> int:
        """Accept everything."""
        return 0

    def register_buffer(self, *_: Any) -> int:
        """Accept everything."""
        return 0

    def batch_get_into_multi_buffers(self, keys: list[str], *_: Any) -> list[int]:
        """Find nothing, late."""
        self.callers.append(threading.get_native_id())
        self.priorities.append(priority(self.callers[-1]))
        assert self.may_go_on.wait(SOON_S)
        return [-704] * len(keys)

    def close(self) -> int:
        """End nothing."""
        return 0


@pytest.fixture
def tier(monkeypatch: pytest.MonkeyPatch) -> Iterator[MooncakeTier]:
    for name, value in (("may_go_on", threading.Event()), ("callers", []), ("priorities", [])):
        monkeypatch.setattr(Standing, name, value, raising=False)
    monkeypatch.setattr("kvstow.tiers.mooncake._store_class", lambda: Standing)
    monkeypatch.setattr("kvstow.tiers.mooncake.check_answers", lambda _: None)
    url = "mooncake://127.0.0.1"
    with (
        HostArena(8, SLOT_BYTES) as arena,
        MooncakeTier(arena, url, NAMESPACE, num_threads=2, timeout_s=SOON_S) as tier,
    ):
        yield tier


def test_thread_of_a_call_that_stands_still_makes_room_and_is_replaced(tier: MooncakeTier) -> None:
    # What Mooncake itself starts in a long call of another test keeps the lowest priority.
    usual, before = priority(threading.get_native_id()), lowest()
    tickets = [tier.get(blocks(at), [at], deadline=time.monotonic() + SOON_S) for at in range(2)]
    wait_until(lambda: len(Standing.callers) == 2, "both threads call")
    first = set(Standing.callers)
    wait_until(lambda: first <= lowest(), "they have no low priority")
    assert lowest() - before == first, "another thread has it, too"
    Standing.may_go_on.set()
    for ticket in tickets:
        ticket.wait()
    for at in range(8):
        tier.get(blocks(at), [at]).wait()
    assert Standing.priorities[2:] == [usual] * 8
    assert not first & set(Standing.callers[2:])
    # The watch may start one of them after these gets.
    wait_until(lambda: sum(one.is_alive() for one in tier._threads) == 4, "there are not four")


def test_threads_that_have_handed_over_are_forgotten(tier: MooncakeTier) -> None:
    gone = threading.Thread(target=int)
    gone.start()
    gone.join()
    tier._threads.append(gone)
    tier._start_thread(tier._others, tier._worker())
    assert gone not in tier._threads and len(tier._threads) == 5
    tier._others.put(None)  # ends the fifth


def test_close_ends_jobs_for_which_no_thread_starts(
    tier: MooncakeTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    standing = [tier.get(blocks(at), [at]) for at in range(2)]
    wait_until(lambda: len(Standing.callers) == 2, "both threads call")
    wait_until(lambda: set(Standing.callers) <= lowest(), "not long yet")
    waiting = [tier.get(blocks(at), [at]) for at in range(2, 6)]
    refused: list[threading.Thread] = []

    def refuse(thread: threading.Thread) -> None:
        refused.append(thread)
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        Standing.may_go_on.set()
        for ticket in standing:
            ticket.wait_until_ended(SOON_S)
        wait_until(lambda: len(refused) >= 2, "no thread hands over")
        tier.close()
    assert not any(thread.is_alive() for thread in tier._threads)
    for ticket in waiting:
        assert ticket.has_ended and not ticket.ok.any()
        assert "no thread had begun the job" in str(ticket.error)


def test_while_a_call_is_late_others_fail_at_once(tier: MooncakeTier) -> None:
    late = tier.get(blocks(1), [1], deadline=time.monotonic() + 2 * LONG_S)
    late.wait()
    begin_s = time.monotonic()
    for call in (tier.get, tier.put):
        ticket = call(blocks(2), [2], deadline=time.monotonic() + SOON_S)
        ticket.wait()
        assert not ticket.ok.any()
        assert "has not returned in time" in str(ticket.error)
    assert time.monotonic() < begin_s + SOON_S / 2
    assert len(Standing.callers) == 1 and not late.has_ended
    Standing.may_go_on.set()
    late.wait_until_ended()
    found = tier.get(blocks(2), [2])
    found.wait()
    assert found.error is None and len(Standing.callers) == 2


@pytest.mark.skipif(bool(missing()), reason=missing() or "Mooncake runs here")
def test_owner_that_stands_still_gets_one_call(tmp_path: Path) -> None:
    """The second get fails before its deadline, and the store is used again afterwards."""
    master = Master(tmp_path)
    owner = Owner(master, 64 << 20)
    try:
        with (
            HostArena(8, SLOT_BYTES) as arena,
            MooncakeTier(arena, master.url, NAMESPACE, timeout_s=SOON_S) as tier,
        ):
            put = tier.put(blocks(*range(4)), np.arange(4))
            put.wait()
            assert put.ok.all()
            owner.pause()
            late = tier.get(blocks(0, 1), [4, 5], deadline=time.monotonic() + 1)
            late.wait()
            assert late.is_late
            refused = tier.get(blocks(2, 3), [6, 7], deadline=time.monotonic() + SOON_S)
            refused.wait()
            assert not refused.ok.any() and "has not returned in time" in str(refused.error)
            owner.resume()
            late.wait_until_ended()
            wait_until(lambda: all_come(tier), "the store is not used again")
    finally:
        owner.kill()
        master.kill()


def all_come(tier: MooncakeTier) -> bool:
    ticket = tier.get(blocks(2, 3), [6, 7])
    ticket.wait()
    return bool(ticket.ok.all())
