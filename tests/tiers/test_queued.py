"""The threads of a shared tier: the system starts none, or an interrupt comes."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.forks import in_child
from tests.interrupts import is_interrupted, lines_of
from tests.tiers.resp.small import patient
from tests.tiers.setup import LONG_S, new_arena, open_file, wait_until
from tests.tiers.test_runner import WITHOUT_SIGNALS, Kept, KeptWorker

from kvstow import StateError
from kvstow.tiers import TierBlocks, TierTicket, mooncake, mooncake_watch, queued
from kvstow.tiers.asking import Asker
from kvstow.tiers.mooncake import MooncakeTier
from kvstow.tiers.queued import Job, QueuedTier
from kvstow.tiers.resp import RespTier
from kvstow.tiers.resp.nodes import Topology
from kvstow.tiers.resp.tier import _Connections
from kvstow.transfer import HostArena

NAMESPACE = bytes(16)
KINDS: dict[str, Callable[[HostArena], QueuedTier]] = {
    "resp": lambda arena: RespTier(arena, "redis://127.0.0.1:1", NAMESPACE),
    "mooncake": lambda arena: MooncakeTier(arena, "mooncake://127.0.0.1:1", NAMESPACE),
}


def _no_store() -> Any:
    raise AssertionError("nothing is asked")


def has_freed(it: weakref.ref[Any]) -> bool:
    gc.collect()
    return it() is None


@pytest.mark.parametrize("num_allowed", range(4))
@pytest.mark.parametrize("kind", KINDS)
def test_tier_without_threads_is_refused_and_leaves_nothing(
    kind: str, num_allowed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstow.tiers.mooncake._store_class", lambda: object)
    before, start, started = threading.active_count(), threading.Thread.start, list[Any]()

    def limited(thread: threading.Thread) -> None:
        if len(started) == num_allowed:
            raise RuntimeError("can't start new thread")
        started.append(thread.name)
        start(thread)

    arena = new_arena()
    freed = weakref.ref(arena)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", limited)
        with pytest.raises(StateError, match=r"can't start new thread.*ulimit -u"):
            KINDS[kind](arena)
    assert len(started) == num_allowed
    wait_until(lambda: threading.active_count() == before, "a thread is left")
    arena.close()
    del arena
    wait_until(lambda: has_freed(freed), "the arena is not freed")


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_child_waits_for_no_lock_of_a_thread_that_it_has_not(
    tmp_path: Path, arena: HostArena
) -> None:
    with open_file(tmp_path, arena) as tier, Kept(arena) as kept, Asker(_no_store) as asker:
        is_held, may_end = threading.Event(), threading.Event()

        def hold() -> None:
            with tier._store._lock, kept._lock, asker._lock:
                is_held.set()
                assert may_end.wait(LONG_S)

        def check() -> None:
            tier.stats()
            kept.stats()
            asker.reset()

        threading.Thread(target=hold, daemon=True).start()
        assert is_held.wait(LONG_S)
        try:
            in_child(check)
        finally:
            may_end.set()


@pytest.mark.parametrize("kind", ["kept", *KINDS])
def test_tier_whose_start_is_interrupted_leaves_no_thread(
    arena: HostArena, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("kvstow.tiers.mooncake._store_class", lambda: object)
    before, line, is_cut_short = threading.active_count(), 0, True
    files = (str(queued.__file__), str(mooncake.__file__), str(mooncake_watch.__file__))
    while is_cut_short:
        line += 1
        opened: list[QueuedTier] = []
        is_cut_short = is_interrupted(
            partial(_open, KINDS.get(kind, Kept), arena, opened),
            line,
            files,
            skipped=WITHOUT_SIGNALS,
        )
        for tier in opened:
            tier.close()
        wait_until(lambda: threading.active_count() == before, f"line {line}: a thread is left")
    assert line > 40, "some lines were interrupted"


def _open(
    build: Callable[[HostArena], QueuedTier], arena: HostArena, opened: list[QueuedTier]
) -> None:
    opened.append(build(arena))


def test_closed_tier_that_its_user_drops_runs_nothing_more(arena: HostArena) -> None:
    """Python ignores what a finalizer raises, so Ctrl-C would be lost there."""
    opened = [Kept(arena)]
    opened[0].close()
    dropped = weakref.ref(opened[0])
    assert not lines_of(opened.clear, str(queued.__file__))
    assert dropped() is None


@pytest.mark.parametrize("kind", KINDS)
def test_tier_that_its_user_drops_before_a_job_goes_with_its_arena(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstow.tiers.mooncake._store_class", lambda: object)
    before, arena = threading.active_count(), new_arena()
    freed, tier = weakref.ref(arena), KINDS[kind](arena)
    assert threading.active_count() > before
    del tier, arena
    wait_until(lambda: has_freed(freed), "a thread keeps the tier")
    wait_until(lambda: threading.active_count() == before, "a thread is left")


def test_tier_that_its_user_drops_after_a_job_goes_with_its_arena() -> None:
    before, arena = threading.active_count(), new_arena()
    freed, tier = weakref.ref(arena), KINDS["resp"](arena)
    for _ in range(4):  # so that each thread has had a job
        tier.contains(TierBlocks([bytes(32)], [0])).wait(LONG_S)
    del tier, arena
    wait_until(lambda: has_freed(freed), "a thread keeps the tier")
    wait_until(lambda: threading.active_count() == before, "a thread is left")


@pytest.mark.parametrize("num_blocks", [0, 3])
@pytest.mark.parametrize("operation", ["put", "get"])
def test_job_that_begins_while_another_thread_closes_the_tier_ends(
    arena: HostArena, monkeypatch: pytest.MonkeyPatch, operation: str, num_blocks: int
) -> None:
    class Closes(TierTicket):
        def announce(self) -> None:
            super().announce()
            closer = threading.Thread(target=tier.close)
            closer.start()
            closer.join()

    tier = Kept(arena)
    monkeypatch.setattr(queued, "TierTicket", Closes)
    slots = list(range(num_blocks))
    blocks = TierBlocks([bytes([at]) for at in slots], [0] * num_blocks)
    ticket = getattr(tier, operation)(blocks, slots)
    assert ticket.has_ended, "its host slots stay in use for ever"
    assert not ticket.ok.any()
    assert not num_blocks or "closed" in str(ticket.error)


def test_job_that_has_ended_is_forgotten(arena: HostArena) -> None:
    with Kept(arena) as tier:
        ticket = tier.put(TierBlocks([bytes(32)], [0]), [0])
        ticket.wait_until_ended(LONG_S)
        known = weakref.ref(ticket)
        del ticket
        wait_until(lambda: has_freed(known), "the tier keeps the job")


def test_job_that_is_late_does_not_reach_the_store(arena: HostArena) -> None:
    with Kept(arena) as tier:
        ticket = tier.put(TierBlocks([bytes(32)], [0]), [0], deadline=time.monotonic())
        ticket.wait_until_ended(LONG_S)
        assert "late before a thread began it" in str(ticket.error)
        assert not tier.kept


def test_late_job_counts_as_failed(arena: HostArena, monkeypatch: pytest.MonkeyPatch) -> None:
    deadline, carry_out = time.monotonic() + 0.05, KeptWorker.carry_out

    def delayed(worker: KeptWorker, job: Job, part: range) -> None:
        carry_out(worker, job, part)
        time.sleep(max(0.0, deadline - time.monotonic()) + 0.001)

    monkeypatch.setattr(KeptWorker, "carry_out", delayed)
    with Kept(arena) as tier:
        tier.put(TierBlocks([bytes(32)], [0]), [0], deadline=deadline).wait_until_ended(LONG_S)
        wait_until(lambda: tier.stats().failed_puts == 1, "it counts as written")
        assert tier.stats().put_blocks == 0


def test_unexpected_error_is_named_by_its_type_alone(
    arena: HostArena, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    password = "open-sesame"

    def fail(*_: object) -> None:
        raise UnicodeEncodeError("utf-8", password, 0, 1, "not allowed")

    closed = list[object]()
    monkeypatch.setattr(Topology, "assign", fail)
    monkeypatch.setattr(_Connections, "close", lambda it: closed.extend([it]))
    with patient(arena, "redis://127.0.0.1:1", NAMESPACE) as tier:
        ticket = tier.contains(TierBlocks([bytes(32)], [0]))
        ticket.wait(LONG_S)
        assert len(closed) == 1, "its connections are not used again"
        for _ in range(3):
            tier.contains(TierBlocks([bytes(32)], [0])).wait(LONG_S)
    assert len(caplog.records) == 1, "it would fill the log"
    assert "the shared tier failed (UnicodeEncodeError); the log" in str(ticket.error)
    assert "please report this" in caplog.text
    assert password not in str(ticket.error) + caplog.text
