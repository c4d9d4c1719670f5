"""Requests of an `Engine`: hits, loads, stores, preemption, and admission without room."""

import time
from collections.abc import Callable

import numpy as np
import pytest
from tests.engine.world import (
    BLOCK,
    DOCUMENT,
    LOADS,
    NO_ROOM,
    NOTHING,
    PENDING,
    RUNS,
    polled,
    state,
    world,
)
from tests.movers import ManualMover, ManualTicket

from kvstow import (
    ConfigError,
    Engine,
    FullAttention,
    Hashes,
    Landed,
    OutOfBlocks,
    SlidingWindow,
    StateError,
    TransferError,
    hash_tokens,
)
from kvstow.transfer import (
    READY,
    BlockLayout,
    Event,
    HostEvent,
    HostMover,
    Ticket,
)
from kvstow.transfer.mover import Ints

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
        assert (third.num_hit_tokens, third.num_new_tokens) == (16, 1), "loaded blocks are cached"


@pytest.mark.parametrize("group", [FullAttention(BLOCK), SlidingWindow(BLOCK, 6)])
def test_request_that_loads_gets_its_lookahead_slots_from_step(
    group: FullAttention | SlidingWindow,
) -> None:
    kv = np.zeros((17, BLOCK), np.int64)
    with Engine(17, 64, [group], [BlockLayout.from_arrays([kv])]) as engine:
        engine.add("first", hash_tokens(DOCUMENT, BLOCK))
        engine.admit("first", len(DOCUMENT), 100, after=READY)
        stored = engine.computed(["first"], [len(DOCUMENT)], after=READY)
        assert stored is not None
        engine.end(stored)
        engine.finish("first")
        assert engine.ledger.pool.reset()

        engine.add("again", hash_tokens([*DOCUMENT, 91], BLOCK))
        found = engine.admit("again", 17, 100, after=READY, num_lookahead_tokens=6)
        assert (found.state, found.num_external_tokens) == (LOADS, 16)
        assert len(engine.tables("again")[0]) == 4
        assert polled(engine).loaded == ["again"]
        engine.step(["again"], [1], num_lookahead_tokens=6)
        assert len(engine.tables("again")[0]) == 6
        engine.check()


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
    """The model has a window of 6 tokens in blocks of 2, and full attention in blocks of 4."""
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
        assert not it.engine.transfers, "no block of it can be evicted"
        first = it.engine.tables("first")[0].tolist()
        it.engine.finish("first")
        transfer = it.engine.computed([], [], after=READY)
        assert transfer is not None
        assert set(transfer.job.block_ids.tolist()) == set(first[2:]), "6 blocks, 4 never used"
        it.engine.check()
        assert it.engine.ledger.pool.num_free == 8 - 2


@pytest.mark.parametrize("leave", ["finish", "preempt"])
def test_poll_of_a_lazy_engine_stores_what_a_request_gave_up(leave: str) -> None:
    """The next step may evict it, and the report of that step comes too late."""
    with world(num_device_blocks=9, mode="lazy", horizon_blocks=8) as it:
        it.admit("first", DOCUMENT)
        compute = HostEvent()
        it.compute("first", DOCUMENT, after=compute)
        blocks = it.engine.tables("first")[0].tolist()
        assert it.engine.poll() == NOTHING
        assert not it.engine.transfers, "the request still has its blocks"
        getattr(it.engine, leave)("first")
        it.engine.poll()
        (transfer,) = it.engine.transfers
        assert sorted(transfer.job.block_ids.tolist()) == sorted(blocks)
        assert it.mover.store_events == [compute], "the copy does not wait for the compute"
        it.engine.poll()
        assert len(it.engine.transfers) == 1, "nothing was given up since"
        compute.set()
        it.mover.stores[0].land()
        assert it.engine.poll().num_stored_blocks == 4


# -- loads that fail or are late ---------------------------------------------------------------


def test_request_recomputes_after_a_failed_load_and_the_next_one_loads() -> None:
    with world() as it:
        it.put_on_the_host(DOCUMENT)
        assert it.admit("again", [*DOCUMENT, 91]).state is LOADS
        it.mover.loads[0].fail()
        assert it.engine.poll() == Landed([], ["again"], 0, 0)
        assert it.engine.tables("again")[0].size == 0, "it still holds blocks"

        it.engine.preempt("again")  # it holds nothing to give up
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
        assert it.engine.poll() == NOTHING, "no request waits for it any more"
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
    """Refuses loads."""

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
        assert it.admit("other", [50]).state is NO_ROOM, (
            "a block was allocated while a copy used it"
        )
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
        assert it.engine.poll() == NOTHING, "no request waits for it"
        assert it.engine.ledger.pool.num_free == 5
        assert it.admit("again", [*DOCUMENT, 91]).state is LOADS


def test_preempted_request_finds_its_blocks_again() -> None:
    with world() as it:
        it.admit("one", DOCUMENT)
        it.compute("one", DOCUMENT)
        it.engine.step(["one"], [4])
        it.engine.extend("one", hash_tokens([*DOCUMENT, 1, 2, 3, 4], BLOCK)[4:])
        it.engine.preempt("one")
        it.engine.preempt("one")  # a second call does nothing
        assert it.engine.ledger.pool.num_free == 16 - 4, "only the copies hold blocks"
        with pytest.raises(StateError, match="is added and does not run: admit it"):
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
    """Otherwise the pins of waiting requests would fill the host tier."""
    with world(num_device_blocks=9, num_host_blocks=4) as it:
        it.put_on_the_host(DOCUMENT)
        it.admit("other", list(range(50, 70)))
        assert it.admit("again", [*DOCUMENT, 91]).state is NO_ROOM
        assert it.engine.computed(["other"], [20], after=READY) is None, (
            "the host did not keep its hit"
        )
        assert it.admit("third", list(range(80, 97))).state is NO_ROOM
        assert it.engine.step(["other"], [4]).num_granted == 1
        assert it.engine.computed(["other"], [24], after=READY) is not None


def test_request_is_refused_though_the_one_refused_before_it_has_finished() -> None:
    with world(num_device_blocks=9) as it:
        it.admit("other", list(range(50, 70)))
        assert it.admit("first", [*DOCUMENT, 91]).state is NO_ROOM
        it.engine.finish("first")
        assert it.admit("second", list(range(80, 97))).state is NO_ROOM


def test_host_keeps_no_hit_of_a_request_that_can_never_have_its_reserve() -> None:
    with world(num_device_blocks=9, num_host_blocks=4) as it:
        it.put_on_the_host(DOCUMENT)
        it.admit("other", list(range(50, 70)))
        it.engine.add("again", hash_tokens(DOCUMENT, BLOCK))
        with pytest.raises(OutOfBlocks, match="needs 9 blocks now, 5 of them in reserve"):
            it.engine.admit("again", 17, 1000, after=READY, reserve=5)
        assert it.engine.computed(["other"], [20], after=READY) is not None


def test_a_block_that_is_hashed_twice_is_refused() -> None:
    """Else each later block would be found under the hash of another one."""
    with world() as it:
        hashes = hash_tokens(DOCUMENT, BLOCK)
        it.admit("one", DOCUMENT)
        again = hash_tokens(DOCUMENT[-BLOCK:], BLOCK, parent=hashes[-1])
        before = state(it.engine)
        with pytest.raises(ConfigError, match=r"'one' would have hashes of 20 tokens, .* 16: hash"):
            it.engine.extend("one", again)
        assert state(it.engine) == before


def test_equal_hashes_of_a_request_are_refused() -> None:
    """Hashes that are not chained are equal for equal blocks, which have other K and V."""
    with world() as it:
        alone = [hash_tokens([7] * BLOCK, BLOCK)[0], hash_tokens(DOCUMENT, BLOCK)[0]]
        before = state(it.engine)
        with pytest.raises(ConfigError, match=r"'one' has the hash [0-9a-f]{64} at 0 and at 2: "):
            it.engine.add("one", [*alone, alone[0]])
        assert state(it.engine) == before
        # A block size alone says nothing of the chain.
        with pytest.raises(ConfigError, match=r"at 0 and at 2: "):
            it.engine.add("one", Hashes([*alone, alone[0]], BLOCK))
        it.engine.add("one", alone)


@pytest.mark.parametrize("events", [False, True])
def test_equal_hashes_of_an_extension_are_refused(events: bool) -> None:
    """After a preemption, a lookup would find the earlier block in place of the later one."""
    one, two, three = (bytes([at]) * 32 for at in range(3))

    def tokens(num_blocks: int) -> list[int] | None:
        return [0] * BLOCK * num_blocks if events else None

    with world(events=events) as it:
        it.engine.add("one", [one], tokens=tokens(1))
        it.engine.admit("one", 12 * BLOCK, 12 * BLOCK, after=READY)
        for more, places in (
            ([two, one], "0 and at 2"),
            ([two, two], "1 and at 2"),
            ([*(bytes([at]) * 32 for at in range(9, 3, -1)), two, three, one], "0 and at 9"),
        ):
            before = state(it.engine)
            for form in more, Hashes(more, BLOCK), Hashes([two, *more], BLOCK)[1:]:
                with pytest.raises(ConfigError, match=f"at {places}: chain"):
                    it.engine.extend("one", form, tokens=tokens(len(more)))
                assert state(it.engine) == before
        it.engine.extend("one", [two, three], tokens=tokens(2))
        assert list(it.engine.ledger.hashes("one")) == [one, two, three]


def test_a_block_is_hashed_when_its_last_token_is_sampled() -> None:
    """A token that was sampled has no slot yet. After a preemption many have none."""
    with world() as it:
        text = [*DOCUMENT, 1, 2, 3, 4]
        it.admit("one", text[:-1])
        it.engine.extend("one", hash_tokens(text, BLOCK)[4:])
        it.engine.add("two", hash_tokens(DOCUMENT, BLOCK))
        it.engine.admit("two", len(text), 2, after=READY)
        it.engine.extend("two", hash_tokens(text, BLOCK)[4:])
