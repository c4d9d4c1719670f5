import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from tests.movers import ManualMover, ManualTicket

from kvstow import (
    Admission,
    AdmissionState,
    ConfigError,
    Engine,
    FullAttention,
    Landed,
    SlidingWindow,
    StateError,
    TransferError,
    UnknownRequest,
    hash_tokens,
)
from kvstow.transfer import (
    READY,
    BlockLayout,
    Event,
    HostArena,
    HostEvent,
    HostMover,
    Mover,
    Ticket,
)
from kvstow.transfer.mover import Ints

BLOCK = 4
RUNS, LOADS = AdmissionState.RUNS, AdmissionState.LOADS
PENDING, NO_ROOM = AdmissionState.PENDING, AdmissionState.NO_ROOM
NOTHING = Landed([], [], 0, 0)

DOCUMENT = list(range(16))  # 4 blocks


class World:
    """An engine, its device memory, and a clock."""

    def __init__(self, num_device_blocks: int, num_host_blocks: int, **options: object) -> None:
        self.kv = np.zeros((num_device_blocks, BLOCK), np.int64)
        self.now_s = 0.0
        self.engine = Engine(
            num_device_blocks,
            num_host_blocks,
            [FullAttention(BLOCK)],
            [BlockLayout.from_arrays([self.kv])],
            clock=lambda: self.now_s,
            **options,  # type: ignore[arg-type]
        )

    @property
    def mover(self) -> ManualMover:
        mover = self.engine.movers[0]
        assert isinstance(mover, ManualMover)
        return mover

    def admit(self, name: str, tokens: list[int], after: Event = READY) -> Admission:
        """Add a request that is not known, and admit it whole."""
        try:
            self.engine.tables(name)
        except UnknownRequest:
            self.engine.add(name, hash_tokens(tokens, BLOCK))
        return self.engine.admit(name, len(tokens), 1000, after=after)

    def compute(self, name: str, tokens: list[int], after: Event = READY) -> None:
        """Write all tokens of a request, and tell."""
        at = np.arange(len(tokens))
        self.kv[self.engine.tables(name)[0][at // BLOCK], at % BLOCK] = tokens
        self.engine.computed([name], [len(tokens)], after=after)

    def cached(self, name: str, num_tokens: int) -> list[int]:
        """What the request's blocks hold."""
        at = np.arange(num_tokens)
        found: list[int] = self.kv[self.engine.tables(name)[0][at // BLOCK], at % BLOCK].tolist()
        return found

    def put_on_the_host(self, tokens: list[int]) -> None:
        """Compute and store a prompt, and let the device forget it."""
        assert self.admit("writer", tokens).state is RUNS
        self.compute("writer", tokens)
        self.engine.finish("writer")
        for ticket in self.mover.stores:
            if not ticket.poll():
                ticket.land()
        assert self.engine.poll().num_stored_blocks == len(tokens) // BLOCK
        assert self.engine.ledger.pool.reset()
        self.kv[:] = -1


@contextmanager
def world(
    num_device_blocks: int = 17, num_host_blocks: int = 64, **options: object
) -> Iterator[World]:
    options = {"mover": ManualMover} | options
    it = World(num_device_blocks, num_host_blocks, **options)
    try:
        yield it
        it.engine.check()
    finally:
        it.engine.close()
    for name in list(it.engine._state.requests):
        it.engine.finish(name)
    assert it.engine.ledger.pool.num_free == num_device_blocks - 1, "a pin was left behind"


def polled(engine: Engine) -> Landed:
    """What lands next; copies of real movers take a moment."""
    while (landed := engine.poll()) == NOTHING:
        time.sleep(0.001)
    return landed


# -- the way of a prefix -----------------------------------------------------------------------


def test_prefix_is_stored_on_the_host_and_loaded_again() -> None:
    with world(mover=HostMover) as it:
        first = it.admit("first", [*DOCUMENT, 90])
        assert (first.state, first.num_hit_tokens, first.num_external_tokens) == (RUNS, 0, 0)
        assert (first.num_new_tokens, first.transfer) == (17, None)
        it.compute("first", [*DOCUMENT, 90])
        assert polled(it.engine) == Landed([], [], 4, 0)
        it.engine.finish("first")
        assert it.engine.ledger.pool.reset()
        it.kv[:] = -1

        again = it.admit("again", [*DOCUMENT, 91])
        assert (again.state, again.num_hit_tokens, again.num_external_tokens) == (LOADS, 0, 16)
        assert again.num_new_tokens == 0
        assert np.array_equal(again.block_tables[0], it.engine.tables("again")[0])
        assert polled(it.engine) == Landed(["again"], [], 0, 0)
        assert it.cached("again", 16) == DOCUMENT

        step = it.engine.step(["again"], [1])
        assert (step.num_granted, len(step.ids)) == (1, 1)
        third = it.admit("third", [*DOCUMENT, 92])
        assert (third.num_hit_tokens, third.num_new_tokens) == (16, 1), "what was loaded is cached"


def test_copies_wait_for_their_events() -> None:
    filled, read = HostEvent(), HostEvent()
    with world(mover=HostMover) as it:
        it.admit("first", DOCUMENT)
        it.engine.computed(["first"], [16], after=filled)
        time.sleep(0.05)
        assert it.engine.poll() == NOTHING
        it.kv[it.engine.tables("first")[0]] = 7  # the compute that `after` stands for
        filled.set()
        assert polled(it.engine).num_stored_blocks == 4
        it.engine.finish("first")
        assert it.engine.ledger.pool.reset()
        it.kv[:] = -1

        it.admit("again", [*DOCUMENT, 91], after=read)
        time.sleep(0.05)
        assert it.engine.poll() == NOTHING
        assert it.cached("again", 16) == [-1] * 16
        read.set()
        assert polled(it.engine).loaded == ["again"]
        assert it.cached("again", 16) == [7] * 16


def test_only_full_blocks_are_stored_and_each_once() -> None:
    with world() as it:
        it.engine.add("one", hash_tokens(DOCUMENT, BLOCK))
        assert it.engine.admit("one", 16, 3, after=READY).num_new_tokens == 3
        assert it.engine.computed(["one"], [3], after=READY) is None
        assert it.engine.transfers == ()
        sizes = []
        for num_tokens in (5, 6, 7, 12, 13):
            it.engine.step(["one"], [num_tokens - it.engine.ledger.num_granted_tokens("one")])
            transfer = it.engine.computed(["one"], [num_tokens], after=READY)
            sizes.append(0 if transfer is None else len(transfer.job))
        assert sizes == [1, 0, 0, 2, 0]


@pytest.mark.parametrize("ends_well", [True, False])
def test_blocks_that_a_store_has_read_are_free_before_it_ends(ends_well: bool) -> None:
    with world(num_device_blocks=5) as it:
        it.admit("one", DOCUMENT)
        it.compute("one", DOCUMENT)
        it.engine.finish("one")
        (store,) = it.mover.stores
        assert it.engine.poll() == NOTHING
        assert it.engine.ledger.pool.num_free == 0, "the copy may still read them"
        store.release()
        assert it.engine.poll() == it.engine.poll() == NOTHING
        assert it.engine.ledger.pool.num_free == 4
        assert it.admit("other", list(range(50, 66))).state is RUNS
        store.land() if ends_well else store.fail()
        assert it.engine.poll() == Landed([], [], 4 if ends_well else 0, 0 if ends_well else 1)


def test_generated_blocks_are_stored_too() -> None:
    with world() as it:
        it.admit("one", DOCUMENT)
        it.compute("one", DOCUMENT)
        it.engine.step(["one"], [4])
        it.engine.extend("one", hash_tokens([*DOCUMENT, 1, 2, 3, 4], BLOCK)[4:])
        transfer = it.engine.computed(["one"], [20], after=READY)
        assert transfer is not None
        assert transfer.job.block_ids.tolist() == it.engine.tables("one")[0][4:].tolist()
        assert transfer.num_bytes == BLOCK * 8


def test_load_brings_only_the_blocks_that_each_group_reads() -> None:
    """A window of 6 tokens in blocks of 2, beside full attention in blocks of 4."""
    full, window = np.zeros((40, 4), np.int64), np.zeros((40, 2), np.int32)
    layouts = [BlockLayout.from_arrays([full]), BlockLayout.from_arrays([window])]
    groups: list[FullAttention | SlidingWindow] = [FullAttention(4), SlidingWindow(2, 6)]
    tokens = [*DOCUMENT, 5]
    with Engine(40, 64, groups, layouts) as engine:
        for name in "first", "again":
            engine.add(name, hash_tokens(tokens, 2))
            found = engine.admit(name, 17, 100, after=READY)
            full_table, window_table = engine.tables(name)
            if name == "first":
                assert found.state is RUNS
                full[full_table[:4]] = np.reshape(DOCUMENT, (4, 4))
                window[window_table[:8]] = np.reshape(DOCUMENT, (8, 2))
                engine.computed([name], [17], after=READY)
                assert polled(engine).num_stored_blocks == 4 + 8
                engine.finish(name)
                assert engine.ledger.pool.reset()
                full[:], window[:] = -1, -1
            else:
                assert (found.state, found.num_external_tokens) == (LOADS, 16)
                assert polled(engine).loaded == [name]
                assert full[full_table].reshape(-1).tolist() == DOCUMENT
                assert window_table[:5].tolist() == [0] * 5
                assert window[window_table[5:]].reshape(-1).tolist() == DOCUMENT[10:]
            engine.check()


def test_lazy_engine_stores_the_blocks_that_the_device_evicts_next() -> None:
    with world(num_device_blocks=9, mode="lazy", horizon_blocks=6) as it:
        it.admit("first", DOCUMENT)
        it.compute("first", DOCUMENT)
        assert not it.engine.transfers, "nothing of it can be evicted"
        first = it.engine.tables("first")[0].tolist()
        it.engine.finish("first")
        transfer = it.engine.computed([], [], after=READY)
        assert transfer is not None
        assert set(transfer.job.block_ids.tolist()) == set(first[2:]), "6 blocks, 4 never used"
        it.engine.check()
        assert it.engine.ledger.pool.num_free == 8 - 2


# -- loads that fail or are late ---------------------------------------------------------------


def test_request_recomputes_after_a_failed_load_and_the_next_one_loads() -> None:
    with world() as it:
        it.put_on_the_host(DOCUMENT)
        assert it.admit("again", [*DOCUMENT, 91]).state is LOADS
        it.mover.loads[0].fail()
        assert it.engine.poll() == Landed([], ["again"], 0, 0)
        assert it.engine.tables("again")[0].size == 0, "it still holds blocks"

        again = it.admit("again", [*DOCUMENT, 91])
        assert (again.state, again.num_external_tokens, again.num_new_tokens) == (RUNS, 0, 17)
        it.compute("again", [*DOCUMENT, 91])
        it.engine.finish("again")
        assert it.engine.ledger.pool.reset()
        assert it.admit("next", [*DOCUMENT, 92]).state is LOADS


def test_request_may_load_again_after_it_has_recomputed() -> None:
    with world() as it:
        it.put_on_the_host(DOCUMENT)
        it.admit("again", [*DOCUMENT, 91])
        it.mover.loads[0].fail()
        it.engine.poll()
        assert it.admit("again", [*DOCUMENT, 91]).state is RUNS
        it.engine.preempt("again")
        assert it.engine.ledger.pool.reset()
        assert it.admit("again", [*DOCUMENT, 91]).state is LOADS


def test_late_load_fails_once_and_its_blocks_stay_pinned() -> None:
    with world(num_device_blocks=9, load_timeout_s=5.0) as it:
        it.put_on_the_host(DOCUMENT)
        late = it.admit("again", [*DOCUMENT, 91])
        assert late.transfer is not None
        held = set(late.transfer.job.block_ids.tolist())
        it.now_s = 5.0
        assert it.engine.poll() == NOTHING
        it.now_s = 5.1
        assert it.engine.poll() == Landed([], ["again"], 0, 0)
        it.now_s = 99.0
        assert it.engine.poll() == NOTHING, "it failed twice"
        it.engine.check()

        assert it.engine.ledger.pool.num_free == 8 - 4
        assert it.admit("again", [*DOCUMENT, 91]).state is NO_ROOM
        other = it.admit("other", list(range(50, 66)))
        assert other.state is RUNS
        assert not held & set(other.block_tables[0].tolist())
        it.compute("other", list(range(50, 66)))
        it.engine.finish("again")

        it.mover.loads[0].land()
        assert it.engine.poll() == NOTHING, "nobody waits for it any more"
        assert it.cached("other", 16) == list(range(50, 66))
        it.engine.finish("other")
        it.mover.stores[-1].land()
        assert it.engine.poll().num_stored_blocks == 4
        assert it.engine.ledger.pool.num_free == 8


def test_load_that_has_ended_before_poll_is_not_late() -> None:
    with world(load_timeout_s=5.0) as it:
        it.put_on_the_host(DOCUMENT)
        it.admit("again", [*DOCUMENT, 91])
        it.mover.loads[0].land()
        it.now_s = 99.0
        assert it.engine.poll() == Landed(["again"], [], 0, 0)


def test_failed_store_is_counted_and_gives_no_hit() -> None:
    with world() as it:
        it.admit("writer", DOCUMENT)
        it.compute("writer", DOCUMENT)
        it.mover.stores[0].fail()
        assert it.engine.poll() == Landed([], [], 0, 1)
        it.engine.finish("writer")
        assert it.engine.ledger.pool.reset()
        assert it.admit("again", [*DOCUMENT, 91]).state is RUNS


class RefusingMover(ManualMover):
    """Takes on no loads."""

    def load(self, host_slots: Ints, block_ids: Ints, *, after: Event) -> Ticket:
        raise TransferError("the device is gone")


def test_load_fails_if_the_mover_refuses_it() -> None:
    with world(mover=RefusingMover) as it:
        it.put_on_the_host(DOCUMENT)
        loads = it.admit("again", [*DOCUMENT, 91])
        assert loads.transfer is not None
        assert "the device is gone" in str(loads.transfer.tickets[0].error)
        assert it.engine.poll().failed == ["again"]
        assert it.admit("again", [*DOCUMENT, 91]).state is RUNS


# -- requests that go --------------------------------------------------------------------------


def test_blocks_of_a_store_stay_pinned_when_their_request_finishes() -> None:
    with world(num_device_blocks=5) as it:
        it.admit("writer", DOCUMENT)
        it.compute("writer", DOCUMENT)
        it.engine.finish("writer")
        assert it.admit("other", [50]).state is NO_ROOM, "a block was taken from under its copy"
        it.engine.check()
        it.mover.stores[0].land()
        assert it.engine.poll().num_stored_blocks == 4
        assert it.admit("other", [50]).state is RUNS
        it.engine.finish("other")
        assert it.engine.ledger.pool.reset()
        assert it.admit("again", [*DOCUMENT[:12], 91]).state is LOADS


@pytest.mark.parametrize("how", ["finish", "preempt"])
@pytest.mark.parametrize("end", [ManualTicket.land, ManualTicket.fail])
def test_request_may_finish_while_it_loads(how: str, end: Callable[[ManualTicket], None]) -> None:
    with world(num_device_blocks=6) as it:
        it.put_on_the_host(DOCUMENT)
        assert it.admit("again", [*DOCUMENT, 91]).state is LOADS
        getattr(it.engine, how)("again")
        it.engine.check()
        assert it.engine.ledger.pool.num_free == 1
        if how == "preempt":
            assert it.admit("again", [*DOCUMENT, 91]).state is PENDING
        end(it.mover.loads[0])
        assert it.engine.poll() == NOTHING, "nobody waits for it"
        assert it.engine.ledger.pool.num_free == 5
        assert it.admit("again", [*DOCUMENT, 91]).state is LOADS


def test_preempted_request_finds_its_blocks_again() -> None:
    with world() as it:
        it.admit("one", DOCUMENT)
        it.compute("one", DOCUMENT)
        it.engine.extend("one", hash_tokens([*DOCUMENT, 1, 2, 3, 4], BLOCK)[4:])
        it.engine.step(["one"], [4])
        it.engine.preempt("one")
        it.engine.preempt("one")  # again does nothing
        assert it.engine.ledger.pool.num_free == 16 - 4, "only the copies hold blocks"
        with pytest.raises(StateError, match="is added and does not run"):
            it.engine.step(["one"], [1])
        it.engine.ledger.check()
        found = it.engine.admit("one", 21, 100, after=READY)
        # The last step was never computed.
        assert (found.state, found.num_hit_tokens, found.num_new_tokens) == (RUNS, 16, 5)


# -- pending, no room --------------------------------------------------------------------------


def test_admission_is_pending_while_another_request_loads_the_blocks() -> None:
    with world() as it:
        it.put_on_the_host(DOCUMENT)
        assert it.admit("again", [*DOCUMENT, 91]).state is LOADS
        assert it.admit("third", [*DOCUMENT, 92]).state is PENDING
        assert it.engine.tables("third")[0].size == 0
        it.mover.loads[0].land()
        assert it.engine.poll().loaded == ["again"]
        third = it.admit("third", [*DOCUMENT, 92])
        assert (third.state, third.num_hit_tokens) == (RUNS, 16)
        assert len(it.mover.loads) == 1


def state(engine: Engine) -> list[object]:
    pool, stats = engine.ledger.pool, engine.stats()
    everything = np.arange(pool.num_blocks)
    return [pool.free_order().tolist(), pool.ref_counts(everything).tolist(), pool.num_free, stats]


@pytest.mark.parametrize("limit", [{}, {"must_fit_tokens": 28}, {"reserve": 3}])
def test_no_room_changes_nothing(limit: dict[str, int]) -> None:
    with world(num_device_blocks=9) as it:
        it.put_on_the_host(DOCUMENT)
        it.admit("other", list(range(50, 70 if not limit else 58)))
        it.engine.add("again", hash_tokens([*DOCUMENT, 91], BLOCK))
        before = state(it.engine)
        refused = it.engine.admit("again", 17, 100, after=READY, **limit)
        assert (refused.state, refused.num_external_tokens) == (NO_ROOM, 16)
        assert refused.block_tables == ()
        assert state(it.engine) == before
        it.engine.finish("other")
        assert it.admit("again", [*DOCUMENT, 91]).state is LOADS


def test_host_keeps_the_hit_of_one_refused_request_only() -> None:
    """Or those that wait would fill the host tier with what they have pinned."""
    with world(num_device_blocks=9, num_host_blocks=4) as it:
        it.put_on_the_host(DOCUMENT)
        it.admit("other", list(range(50, 70)))
        assert it.admit("again", [*DOCUMENT, 91]).state is NO_ROOM
        assert it.engine.computed(["other"], [20], after=READY) is None, "it was not held"
        assert it.admit("third", list(range(80, 97))).state is NO_ROOM
        assert it.engine.step(["other"], [4]).num_granted == 1
        assert it.engine.computed(["other"], [24], after=READY) is not None


# -- the end -----------------------------------------------------------------------------------


def test_close_ends_all_copies_in_flight() -> None:
    never = HostEvent()
    with world(mover=HostMover, load_timeout_s=1.0) as it:
        it.admit("first", DOCUMENT)
        it.compute("first", DOCUMENT)
        assert polled(it.engine).num_stored_blocks == 4
        it.engine.finish("first")
        assert it.engine.ledger.pool.reset()
        it.admit("loads", [*DOCUMENT, 91], after=never)
        it.admit("stores", list(range(50, 58)))
        it.compute("stores", list(range(50, 58)), after=never)
        it.now_s = 2.0
        assert it.engine.poll().failed == ["loads"]
        it.admit("loads too", list(range(50, 58)))
        assert len(it.engine.transfers) == 2
        assert it.engine.ledger.pool.num_free == 16 - 4 - 3
        it.engine.close()

        assert not it.engine.transfers
        it.engine.check()
        for name in "loads", "stores", "loads too":
            it.engine.finish(name)
        assert it.engine.ledger.pool.num_free == 16
        it.engine.close()
        assert it.engine.poll() == NOTHING
        with pytest.raises(StateError, match="this HostMover is closed"):
            it.engine.movers[0].store([1], [0], after=READY)


def test_closed_engine_refuses_calls() -> None:
    with world() as it:
        it.put_on_the_host(DOCUMENT)
        it.admit("loads", [*DOCUMENT, 91])
        it.engine.add("waits", [])
        it.engine.close()
        for use in (
            lambda: it.engine.add("new", []),
            lambda: it.engine.admit("waits", 1, 1, after=READY),
            lambda: it.engine.computed([], [], after=READY),
            it.engine.reset,
            lambda: it.engine.step(["loads"], [1]),
        ):
            with pytest.raises(StateError, match=r"is closed|is stranded"):
                use()


def test_reset_forgets_every_prefix_at_any_moment() -> None:
    with world() as it:
        it.put_on_the_host(DOCUMENT)
        it.admit("loads", [*DOCUMENT, 91])
        it.admit("runs", list(range(50, 66)))
        it.compute("runs", list(range(50, 66)))
        it.engine.reset()
        assert it.engine.stats()["device_blocks_cached"] == 0
        it.mover.loads[0].land()
        it.mover.stores[-1].land()
        assert it.engine.poll().failed == ["loads"]
        for name, tokens in ("loads", DOCUMENT), ("new", list(range(50, 66))):
            found = it.admit(name, [*tokens, 91])
            assert (found.state, found.num_hit_tokens) == (RUNS, 0)
        assert it.engine.step(["runs"], [1]).num_granted == 1


# -- misuse ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("use", "error", "problem"),
    [
        (lambda e: e.add("runs", []), StateError, "runs"),
        (lambda e: e.admit("runs", 9, 9, after=READY), StateError, "is running; admit it once"),
        (lambda e: e.admit("loads", 17, 9, after=READY), StateError, "is loading; admit it once"),
        (lambda e: e.admit("nobody", 9, 9, after=READY), UnknownRequest, "'nobody' is not known"),
        (lambda e: e.admit("waits", 9, 9, after=None), ConfigError, "expected an Event"),
        (lambda e: e.admit("waits", 0, 9, after=READY), ConfigError, "num_tokens is 0"),
        (lambda e: e.admit("waits", 9, 0, after=READY), ConfigError, "max_new_tokens is 0"),
        (lambda e: e.admit("waits", 9, 9, after=READY, reserve=-1), ConfigError, "-1"),
        (lambda e: e.step(["runs", "loads"], [1, 1]), StateError, "'loads' is loading and does"),
        (lambda e: e.step(["waits"], [1]), StateError, "'waits' is added and does not run"),
        (lambda e: e.step(["nobody"], [1]), UnknownRequest, "nobody"),
        (lambda e: e.computed(["runs", "loads"], [16, 16], after=READY), StateError, "loading"),
        (lambda e: e.computed(["runs"], [17], after=READY), ConfigError, "it was granted 16"),
        (lambda e: e.computed(["runs"] * 2, [16, 16], after=READY), ConfigError, "twice"),
        (lambda e: e.computed(["runs"], [8, 8], after=READY), ConfigError, "1 .* but 2"),
        (lambda e: e.computed(["runs"], [16], after=None), ConfigError, "expected an Event"),
        (lambda e: e.rewind("loads", 0), StateError, "loading"),
        (lambda e: e.finish("nobody"), UnknownRequest, "nobody"),
        (lambda e: e.preempt("nobody"), UnknownRequest, "nobody"),
        (lambda e: e.extend("nobody", []), UnknownRequest, "nobody"),
        (lambda e: e.tables("nobody"), UnknownRequest, "nobody"),
    ],
)  # fmt: skip
def test_misuse_raises_and_changes_nothing(
    use: Callable[[Engine], object], error: type[Exception], problem: str
) -> None:
    with world() as it:
        it.put_on_the_host(DOCUMENT)
        it.admit("loads", [*DOCUMENT, 91])
        it.admit("runs", list(range(50, 66)))
        it.engine.add("waits", hash_tokens(range(80, 89), BLOCK))
        before = state(it.engine)
        with pytest.raises(error, match=problem):
            use(it.engine)
        assert state(it.engine) == before
        it.engine.check()
        transfer = it.engine.computed(["runs"], [16], after=READY)
        assert transfer is not None
        assert len(transfer.job) == 4
        assert it.engine.admit("waits", 9, 9, after=READY).state is RUNS


def test_wrong_time_leaves_no_pin_and_no_job_behind() -> None:
    with world(load_timeout_s=1.0) as it:
        it.put_on_the_host(DOCUMENT)
        it.engine.add("again", hash_tokens(DOCUMENT, BLOCK))
        before = state(it.engine)
        it.now_s = float("nan")
        with pytest.raises(ConfigError, match="clock"):
            it.admit("again", [*DOCUMENT, 91])
        assert state(it.engine) == before
        it.now_s = 1.0
        assert it.admit("again", [*DOCUMENT, 91]).state is LOADS


def test_wrong_time_neither_begins_nor_ends_a_transfer() -> None:
    with world() as it:
        it.admit("one", DOCUMENT)
        it.compute("one", DOCUMENT[:8])
        it.mover.stores[0].land()
        before = state(it.engine)
        it.now_s = float("inf")
        for use in it.engine.poll, lambda: it.engine.computed(["one"], [16], after=READY):
            with pytest.raises(ConfigError, match="clock says inf"):
                use()
        assert state(it.engine) == before
        it.now_s = 1.0
        assert it.engine.poll().num_stored_blocks == 2
        transfer = it.engine.computed(["one"], [16], after=READY)
        assert transfer is not None
        assert len(transfer.job) == 2


def test_refused_admission_pins_no_host_slot() -> None:
    with world(num_host_blocks=4) as it:
        it.put_on_the_host(DOCUMENT)
        it.engine.add("again", hash_tokens(DOCUMENT, BLOCK))
        with pytest.raises(ConfigError):
            it.engine.admit("again", 17, 100, after=READY, reserve=-1)
        it.admit("other", list(range(50, 54)))
        assert it.engine.computed(["other"], [4], after=READY) is not None


def test_a_transfer_ends_once() -> None:
    with world(mover=HostMover) as it:
        it.admit("writer", DOCUMENT)
        it.compute("writer", DOCUMENT)
        [transfer] = it.engine.transfers
        assert it.engine.end(transfer).ok, "end waits for the copies"
        with pytest.raises(StateError, match="a transfer ends once"):
            it.engine.end(transfer)


def test_rewind_takes_granted_tokens_back() -> None:
    with world() as it:
        it.admit("one", [*DOCUMENT, 91])
        it.engine.step(["one"], [3])
        it.engine.rewind("one", 18)
        assert it.engine.ledger.num_granted_tokens("one") == 18


def test_events_cover_both_pools_and_survive_a_restart() -> None:
    with world(events=True) as it:
        it.engine.add("one", hash_tokens(DOCUMENT, BLOCK)[:2], tokens=DOCUMENT[:8])
        it.engine.extend("one", hash_tokens(DOCUMENT, BLOCK)[2:], tokens=np.array(DOCUMENT[8:]))
        it.engine.admit("one", 16, 100, after=READY)
        it.engine.preempt("one")
        assert it.engine.ledger.pool.reset()
        assert it.engine.take_events()
        it.engine.admit("one", 16, 100, after=READY)
        it.engine.computed(["one"], [16], after=READY)
        it.mover.stores[0].land()
        it.engine.poll()
        device, host = it.engine.take_events()
        assert (device.medium, host.medium) == ("GPU", "CPU")
        assert device.token_ids == DOCUMENT  # type: ignore[union-attr]
        assert it.engine.take_events() == []


# -- building ----------------------------------------------------------------------------------


def layout(num_blocks: int) -> BlockLayout:
    return BlockLayout.from_arrays([np.zeros((num_blocks, 8), np.uint8)])


@pytest.mark.parametrize(
    ("layouts", "options", "problem"),
    [
        ([], {}, "1 groups but 0 layouts"),
        ([layout(8), layout(8)], {}, "1 groups but 2 layouts"),
        ([layout(7)], {}, r"layouts\[0\] has memory for 7 blocks, the pool has 8"),
        ([layout(8)], {"load_timeout_s": 0.0}, "load_timeout_s is 0.0"),
        ([layout(8)], {"load_timeout_s": float("nan")}, "load_timeout_s is nan"),
        ([layout(8)], {"policy": "arc"}, "arc"),
        ([layout(8)], {"mode": "lazy"}, "a lazy engine needs a horizon"),
        ([layout(8)], {"horizon_blocks": 4}, "an eager one has none"),
        ([layout(8)], {"mode": "lazy", "horizon_blocks": 0}, "horizon_blocks is 0"),
    ],
)
def test_constructor_names_the_argument_that_is_wrong(
    layouts: list[BlockLayout], options: dict[str, object], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        Engine(8, 8, [FullAttention(4)], layouts, **options)  # type: ignore[arg-type]


def test_failed_constructor_closes_the_movers_it_made() -> None:
    built: list[HostMover] = []

    def make(layout: BlockLayout, arena: HostArena) -> Mover:
        if built:
            raise ConfigError("no second one")
        built.append(HostMover(layout, arena))
        return built[0]

    with pytest.raises(ConfigError, match="no second one"):
        Engine(8, 8, [FullAttention(4)] * 2, [layout(8)] * 2, mover=make)
    with pytest.raises(StateError, match="this HostMover is closed"):
        built[0].store([1], [0], after=READY)
    assert built[0].arena.closed


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", *command],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_runs() -> None:
    printed = run(str(Path(__file__).parents[1] / "examples" / "engine.py"))

    assert printed.splitlines() == [
        "asks: 0 tokens on the device, 0 on the host",
        "other: 0 tokens on the device, 0 on the host",
        "again: 16 tokens on the device, 80 on the host",
    ]


def test_engine_is_imported_at_its_first_use() -> None:
    code = "import sys, kvstow; before = 'kvstow.transfer' in sys.modules; kvstow.Engine; "
    assert run("-c", code + "print(before, 'kvstow.transfer' in sys.modules)") == "False True\n"


def test_block_that_left_the_window_before_it_was_computed_is_not_stored() -> None:
    """Its memory on the device may hold another block by then."""
    arrays = [np.zeros((16, BLOCK), np.int64) for _ in range(2)]
    groups: list[FullAttention | SlidingWindow] = [FullAttention(BLOCK), SlidingWindow(BLOCK, 6)]
    layouts = [BlockLayout.from_arrays([array]) for array in arrays]
    with Engine(16, 16, groups, layouts) as engine:
        engine.add("a", hash_tokens(range(24), BLOCK))
        assert engine.admit("a", 24, 6, after=READY).state is RUNS
        engine.computed(["a"], [6], after=READY)
        engine.step(["a"], [14])
        engine.step(["a"], [4])  # granted before the step above is computed
        held = engine.ledger.block_table("a", 1).tolist()
        assert not held[1], "the block that was half full is still in the window"
        transfer = engine.computed(["a"], [24], after=READY)
        assert transfer is not None
        begin, end = transfer.job.offsets[1:3].tolist()
        stored = transfer.job.block_ids[begin:end].tolist()
        assert stored == [block_id for block_id in held if block_id]
