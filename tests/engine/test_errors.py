"""An `Engine` after an error in the middle of an operation, late copies, and damaged slots."""

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.engine.world import BLOCK, DOCUMENT, LOADS, NOTHING, RUNS, polled, world

from kvstow import (
    AdmissionState,
    ChunkedLocal,
    ConfigError,
    Engine,
    FullAttention,
    OutOfBlocks,
    SlidingWindow,
    StateError,
    StateSpace,
    TransferError,
    hash_tokens,
)
from kvstow.engine.state import State
from kvstow.transfer import READY, BlockLayout, HostEvent, HostMover, mover_for

OTHER = list(range(50, 66))


class Raises:
    """An event that raises when a copy registers with it, from the `begin`-th copy on."""

    def __init__(self, error: BaseException, begin: int = 1) -> None:
        self.error, self.num_left = error, begin

    def wait(self) -> None:
        pass

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        self.num_left -= 1
        if self.num_left <= 0:
            raise self.error
        callback()


ERRORS = [RuntimeError("cudaErrorLaunchFailure"), MemoryError(), KeyboardInterrupt()]

# -- errors in the middle ----------------------------------------------------------------------


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_store_fails_if_its_event_raises_and_the_engine_goes_on(error: BaseException) -> None:
    with world(mover=HostMover) as it:
        it.admit("one", DOCUMENT)
        with pytest.raises(type(error)):
            it.compute("one", DOCUMENT, after=Raises(error))
        assert polled(it.engine).num_failed_stores == 1
        assert it.engine.poll() == NOTHING
        it.engine.check()
        assert it.engine.ledger.pool.pin_counts(range(17)).sum() == 0
        it.engine.step(["one"], [4])
        it.engine.extend("one", hash_tokens([*DOCUMENT, 1, 2, 3, 4], BLOCK)[4:])
        it.compute("one", [*DOCUMENT, 1, 2, 3, 4])
        assert polled(it.engine).num_stored_blocks == 5, "the next store takes all blocks"


def test_no_lookup_finds_a_step_that_failed_after_preempt_and_reset() -> None:
    with world(mover=HostMover) as it:
        it.admit("one", DOCUMENT)
        step = HostEvent()
        it.compute("one", DOCUMENT, after=step)
        step.set(RuntimeError("the model failed"))
        assert polled(it.engine).num_failed_stores == 1
        assert it.admit("two", DOCUMENT).num_hit_tokens == len(DOCUMENT) - BLOCK, "not known here"
        it.engine.preempt("one")
        it.engine.preempt("two")
        it.engine.reset()
        for name in "one", "two":
            found = it.engine.admit(name, len(DOCUMENT), 100, after=READY)
            assert (found.num_hit_tokens, found.num_external_tokens) == (0, 0)
        it.engine.check()


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_request_recomputes_if_the_event_of_its_load_raises(error: BaseException) -> None:
    with world(mover=HostMover) as it:
        it.admit("writer", DOCUMENT)
        it.compute("writer", DOCUMENT)
        polled(it.engine)
        it.engine.finish("writer")
        assert it.engine.ledger.pool.reset()
        with pytest.raises(type(error)):
            it.admit("again", [*DOCUMENT, 91], after=Raises(error))
        assert it.engine.poll().failed == ["again"]
        assert it.admit("again", [*DOCUMENT, 91]).state is RUNS
        it.engine.finish("again")
        assert it.engine.ledger.pool.reset()
        assert it.admit("third", [*DOCUMENT, 92]).state is LOADS


def test_interrupt_between_two_ranks_ends_the_copy_of_the_first() -> None:
    """No other request gets its blocks before that."""
    never = HostEvent()

    class Queued(Raises):
        def add_done_callback(self, callback: Callable[[], None]) -> None:
            super().add_done_callback(lambda: None)
            never.add_done_callback(callback)

        def wait(self) -> None:
            never.wait()

    kv = [np.zeros((17, BLOCK), np.int64) for _ in range(2)]
    layouts = [[BlockLayout.from_arrays([one])] for one in kv]
    with Engine(17, 64, [FullAttention(BLOCK)], layouts, world_size=2) as engine:
        engine.add("one", hash_tokens(DOCUMENT, BLOCK))
        engine.admit("one", 16, 100, after=READY)
        before = engine.movers
        with pytest.raises(KeyboardInterrupt):
            engine.computed(["one"], [16], after=Queued(KeyboardInterrupt(), begin=2))
        assert engine.ledger.pool.pin_counts(range(17)).sum() == 4, "a copy is in flight"
        assert engine.poll().num_failed_stores == 1
        assert engine.ledger.pool.pin_counts(range(17)).sum() == 0
        for mover in before:
            with pytest.raises(StateError, match="is closed"):
                mover.store([1], [0], after=READY)
        engine.check()
        engine.finish("one")
    never.set()


def test_poll_that_raises_loses_no_result() -> None:
    with world() as it:
        it.put_on_the_host([*DOCUMENT, *OTHER])
        it.admit("one", [*DOCUMENT, 91])
        it.admit("two", [*DOCUMENT, *OTHER, 91])
        assert len(it.mover.loads) == 1, "the second waits for the first"
        it.mover.loads[0].land()
        times = iter([1.0, float("nan")])
        it.engine._copies._clock = lambda: next(times)
        it.admit("three", [7, 7, 7])
        it.engine._copies._clock = lambda: float("nan")
        with pytest.raises(ConfigError, match="clock says nan"):
            it.engine.poll()
        it.engine._copies._clock = lambda: 2.0
        assert it.engine.poll().loaded == ["one"]


def test_next_poll_reports_what_a_poll_that_raised_had_found() -> None:
    with world() as it:
        it.put_on_the_host(DOCUMENT)
        it.put_on_the_host(OTHER)
        it.admit("one", [*DOCUMENT, 91])
        it.admit("two", [*OTHER, 91])
        it.admit("three", [7] * 8)
        it.engine.computed(["three"], [8], after=READY)
        for ticket in [*it.mover.loads, it.mover.stores[-1]]:
            ticket.land()
        times = [1.0, 1.0, float("nan")]
        it.engine._copies._clock = lambda: times.pop(0)
        with pytest.raises(ConfigError, match="clock says nan"):
            it.engine.poll()
        it.engine._copies._clock = lambda: 2.0
        it.engine.finish("two")
        found = it.engine.poll()
        assert (found.loaded, found.num_stored_blocks) == (["one"], 2), (
            "request two has finished since"
        )
        assert it.engine.poll() == NOTHING


class FailsToClose(HostMover):
    num_closed = 0

    def close(self) -> None:
        super().close()
        type(self).num_closed += 1
        if self.num_closed == 1:
            raise TransferError("CUDA error 700")
        if self.num_closed == 2:
            raise RuntimeError("another one")


def test_close_closes_every_part_even_if_one_raises(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(FailsToClose, "num_closed", 0)
    num_threads = threading.active_count()
    layouts = [[BlockLayout.from_arrays([np.zeros((9, 4), np.int64)])] for _ in range(3)]
    engine = Engine(
        9, 64, [FullAttention(BLOCK)], layouts, world_size=3, mover=FailsToClose,
        events_path=tmp_path / "events",
    )  # fmt: skip
    engine.add("one", hash_tokens(DOCUMENT, BLOCK))
    engine.admit("one", 16, 100, after=READY)
    engine.computed(["one"], [16], after=HostEvent())
    with pytest.raises(TransferError, match="CUDA error 700") as caught, engine:
        pass
    assert any("another one" in note for note in caught.value.__notes__)
    assert threading.active_count() <= num_threads
    assert all(arena.closed for arena in engine.arenas)
    assert engine._events.file is not None
    assert engine._events.file._descriptor is None
    engine.check()
    engine.finish("one")
    assert engine.ledger.pool.num_free == 8
    engine.close()


def test_extension_that_was_cut_short_can_be_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The ledger must not have the hashes of a block twice when the caller extends again."""
    hashes = hash_tokens([*DOCUMENT, *OTHER], BLOCK)
    with world(mover=HostMover) as it:
        it.engine.add("one", hashes[:4])
        it.engine.admit("one", 32, 100, after=READY)
        real = it.engine.scheduler

        class Interrupts:
            def __getattr__(self, name: str) -> Any:
                return getattr(real, name)

            def extend(self, *_: object) -> None:
                raise KeyboardInterrupt

        it.engine._state.scheduler = Interrupts()  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            it.engine.extend("one", hashes[4:])
        it.engine._state.scheduler = real
        it.engine.check()
        it.engine.extend("one", hashes[4:])
        assert it.engine.ledger.known("one")[0] == hashes
        assert it.engine.poll().failed == ["one"], "recovery restarted it"
        assert it.engine.admit("one", 32, 100, after=READY).state is RUNS


# -- copies that never end ---------------------------------------------------------------------


def test_late_store_is_reported_once_and_its_blocks_stay_pinned() -> None:
    with world(num_device_blocks=9, store_timeout_s=5.0) as it:
        it.admit("one", DOCUMENT)
        it.compute("one", DOCUMENT)
        it.engine.finish("one")
        it.now_s = 5.1
        assert it.engine.poll().num_failed_stores == 1
        assert it.engine.poll() == NOTHING
        it.engine.check()
        stats = it.engine.stats()
        assert (stats["late_jobs"], stats["quarantined_jobs"], stats["jobs_in_flight"]) == (1, 1, 0)
        assert it.engine.ledger.pool.num_free == 4, "the copy may still read its blocks"
        # Another request with this prefix stores it.
        assert it.admit("two", [*DOCUMENT, 91]).num_hit_tokens == 16
        transfer = it.engine.computed(["two"], [17], after=READY)
        assert transfer is not None
        assert len(transfer.job) == 4
        it.mover.stores[1].land()
        assert it.engine.poll().num_stored_blocks == 4
        it.mover.stores[0].land()
        assert it.engine.poll() == NOTHING
        assert not it.engine._copies._late | it.engine._copies._unpinned
        it.engine.finish("two")
        assert it.engine.ledger.pool.num_free == 8


def test_expire_leaves_late_stores_to_poll() -> None:
    with world(store_timeout_s=5.0, load_timeout_s=5.0) as it:
        it.put_on_the_host(DOCUMENT)
        it.admit("one", [*DOCUMENT, 91])
        it.admit("two", OTHER)
        it.compute("two", OTHER)
        it.engine._state.unreported.failed.append("gave up")  # as a call that raised leaves it
        it.engine.add("gave up", [])
        it.now_s = 6.0
        assert it.engine.expire() == ["one"]
        found = it.engine.poll()
        assert (found.failed, found.num_failed_stores) == (["gave up"], 1)


def test_engine_with_a_copy_in_flight_takes_no_file() -> None:
    with world() as it:
        it.put_on_the_host(DOCUMENT)
        it.admit("one", [*DOCUMENT, 91])
        it.engine.finish("one")
        it.engine.reset()
        with pytest.raises(StateError, match="restart one that was just built"):
            it.engine.restart("file", after=READY, identity="m", weights_version="1")
        it.mover.loads[0].land()
        it.engine.poll()


# -- damaged slots -----------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2])
def test_damaged_slot_is_dropped_and_stored_again(world_size: int) -> None:
    kv = [np.zeros((17, BLOCK), np.int64) for _ in range(world_size)]
    ranks = [[BlockLayout.from_arrays([one])] for one in kv]
    layouts: Any = ranks if world_size > 1 else ranks[0]
    verified = partial(mover_for, verify=True)
    with Engine(
        17, 64, [FullAttention(BLOCK)], layouts, world_size=world_size, mover=verified
    ) as engine:

        def serve(name: str) -> AdmissionState:
            """Admit, load or compute, and store what the host lacks."""
            engine.add(name, hash_tokens([*DOCUMENT, 9], BLOCK))
            state = engine.admit(name, 17, 100, after=READY).state
            recomputes = state is RUNS
            if state is LOADS:
                recomputes = polled(engine).failed == [name]
                if recomputes:
                    assert engine.admit(name, 17, 100, after=READY).state is RUNS
                else:
                    for memory in kv:
                        held = memory[engine.tables(name)[0][:4]].reshape(-1)
                        assert held.tolist() == DOCUMENT
            for memory in kv:
                memory[engine.tables(name)[0][:4]] = np.reshape(DOCUMENT, (4, 4))
            if recomputes:
                engine.computed([name], [17], after=READY)
            while engine.transfers:
                engine.poll()
            engine.finish(name)
            assert engine.ledger.pool.reset()
            for memory in kv:
                memory[:] = -1
            return state

        assert serve("first") is RUNS
        slots = engine.scheduler.used_slots()
        engine.arenas[-1].slots[slots[1], 0] ^= 1
        assert serve("fails") is LOADS
        stats = engine.stats()
        assert (stats["failed_loads"], stats["stored_blocks"]) == (1, 5), (
            "one block is stored again"
        )
        assert serve("loads") is LOADS
        assert engine.stats()["failed_loads"] == 1
        engine.check()


# -- requests that can never fit ---------------------------------------------------------------

GROUPS = [FullAttention(4), SlidingWindow(4, 6), ChunkedLocal(4, 8), StateSpace(4)]


@pytest.mark.parametrize("group", GROUPS, ids=repr)
def test_admission_raises_out_of_blocks_only_if_it_can_never_fit(group: FullAttention) -> None:
    """A request that could run to its end alone, token by token, must not be refused."""
    layouts = [BlockLayout.from_arrays([np.zeros((6, 8), np.uint8)])] * 2
    refused, impossible = set(), set()
    for num_tokens in range(1, 100):
        with Engine(6, 8, [FullAttention(16), group], layouts) as engine:
            engine.add("one", [])
            assert engine.admit("one", 1, 1, after=READY).state is RUNS
            steps = (engine.step(["one"], [1]).num_granted for _ in range(num_tokens - 1))
            if not all(steps):
                impossible.add(num_tokens)
            engine.preempt("one")
            try:
                engine.admit("one", num_tokens, 1, after=READY)
            except OutOfBlocks:
                refused.add(num_tokens)
    assert refused <= impossible < set(range(1, 100))
    assert {*range(80, 100)} <= refused
    assert refused == impossible or isinstance(group, ChunkedLocal)


def test_error_of_a_prompt_that_never_fits_names_the_numbers() -> None:
    with world(num_device_blocks=9) as it:
        it.engine.add("big", [])
        before = it.engine.stats()
        for options in {}, {"must_fit_tokens": 100}:
            with pytest.raises(OutOfBlocks, match=r"'big' needs 25 blocks for 100 tokens.* has 8"):
                it.engine.admit("big", 100, 4, after=READY, **options)
        with pytest.raises(OutOfBlocks, match="needs 9 blocks now, 3 of them in reserve, and"):
            it.engine.admit("big", 24, 24, after=READY, reserve=3)
        assert it.engine.stats() == before
        assert it.engine.admit("big", 32, 32, after=READY).state is RUNS


def test_error_names_must_fit_tokens_if_the_request_could_run_without() -> None:
    with world(num_device_blocks=9) as it:
        it.engine.add("short", [])
        with pytest.raises(OutOfBlocks) as caught:
            it.engine.admit("short", 9, 4, after=READY, must_fit_tokens=100)
        assert str(caught.value) == (
            "must_fit_tokens=100 counts 25 blocks for request 'short', the pool has 8: pass no "
            "must_fit_tokens, or build the engine with num_device_blocks=26 or more"
        )
        assert it.engine.admit("short", 9, 4, after=READY).state is RUNS


@pytest.mark.parametrize("group", [SlidingWindow(16, 20), ChunkedLocal(16, 32)], ids=repr)
def test_window_that_could_run_is_not_reported_as_impossible(
    group: SlidingWindow | ChunkedLocal,
) -> None:
    """`must_fit_tokens` counts all tokens of a window if nothing bounds those in flight."""
    layouts = [BlockLayout.from_arrays([np.zeros((9, 8), np.uint8)])]
    with Engine(9, 8, [group], layouts) as engine:
        engine.add("long", [])
        with pytest.raises(OutOfBlocks, match=r"counts 63 blocks .* has 8: .* max_in_flight"):
            engine.admit("long", 1000, 16, after=READY, must_fit_tokens=1000)
        assert engine.admit("long", 1000, 16, after=READY).state is RUNS
    with Engine(9, 8, [group], layouts, max_in_flight_tokens=16) as engine:
        engine.add("long", [])
        assert engine.admit("long", 1000, 16, after=READY, must_fit_tokens=1000).state is RUNS
        assert all(engine.step(["long"], [16]).num_granted for _ in range(61))


def test_admission_refuses_fewer_tokens_than_were_hashed() -> None:
    """Hashes of a smaller block size would give a prompt the blocks of a longer one."""
    with world(num_device_blocks=9) as it:
        it.engine.add("one", list(hash_tokens(range(8), 2)))  # plain bytes know no block size
        with pytest.raises(ConfigError, match=f"has 8 tokens, but hashes of 16, {BLOCK} each"):
            it.engine.admit("one", 8, 8, after=READY)
        with pytest.raises(ConfigError, match="the hashes are of 2 tokens each"):
            it.engine.add("two", hash_tokens(range(8), 2))
        assert it.engine.admit("one", 17, 17, after=READY).state is RUNS


def test_load_that_does_not_fit_now_is_no_error() -> None:
    with world(num_device_blocks=9) as it:
        it.put_on_the_host(DOCUMENT)
        it.admit("other", OTHER)
        it.engine.step(["other"], [4])
        assert it.admit("again", [*DOCUMENT, 91]).state is AdmissionState.NO_ROOM
        it.engine.add("long", hash_tokens([*DOCUMENT, *OTHER, 1], BLOCK))
        with pytest.raises(OutOfBlocks, match="needs 9 blocks"):
            it.engine.admit("long", 33, 100, after=READY)


# -- other threads -----------------------------------------------------------------------------


def test_stats_from_another_thread_count_an_eviction_once() -> None:
    """Another thread may read at any moment, so this reads after each attribute that is set."""
    with world(num_device_blocks=9, mover=HostMover) as it:
        for number in range(6):
            name, tokens = str(number), [number] * 16
            it.admit(name, tokens)
            it.compute(name, tokens)
            polled(it.engine)
            it.engine.finish(name)
        expected = it.engine.stats()["device_evicted_blocks"]
        assert expected > 0
        seen = set()

        class Watched(State):
            def __setattr__(self, name: str, value: object) -> None:
                super().__setattr__(name, value)
                seen.add(it.engine.stats()["device_evicted_blocks"])

        it.engine._state.__class__ = Watched
        it.engine.sleep(after=READY)
        it.engine.wake([BlockLayout.from_arrays([it.kv])], after=READY)
        assert seen == {expected}
        assert it.engine.stats()["device_evicted_blocks"] == expected
