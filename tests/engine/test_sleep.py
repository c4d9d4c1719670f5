"""Sleep and wake of an `Engine` in one process: tables, bytes, copies in flight and counts."""

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.engine.sleep_world import (
    BLOCK,
    LOADS,
    RUNS,
    SHAPES,
    WHO,
    World,
    prompt,
    world,
)

from kvstow import (
    ConfigError,
    InvalidBlock,
    OutOfBlocks,
    StateError,
    TransferError,
    hash_tokens,
)
from kvstow.engine import HOST
from kvstow.engine.ranks import Ranks
from kvstow.transfer import (
    READY,
    Event,
    HostEvent,
    HostMover,
    Ticket,
)
from kvstow.transfer.mover import Ints

# -- the way there and back --------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("to", ["host", "file"])
@pytest.mark.parametrize("block_ids", ["same", "packed"])
def test_requests_wake_with_their_tables_and_tokens(
    shape: dict[str, Any], to: str, block_ids: str, tmp_path: Path
) -> None:
    place = HOST if to == "host" else tmp_path / "image"
    with world(**shape) as it:
        it.run("a", prompt(1, 18))
        it.run("gone", prompt(2, 9))
        it.run("b", prompt(3, 13), drafts=6)
        it.engine.finish("gone")
        del it.texts["gone"]
        it.go_on("a", 5)
        granted = {name: it.engine.ledger.num_granted_tokens(name) for name in it.texts}
        for _ in range(2):
            it.sleep(to=place, **WHO)
            awake = it.wake(block_ids=block_ids, **WHO)
            it.check()
            assert granted == {n: it.engine.ledger.num_granted_tokens(n) for n in granted}
            num_free = it.engine.ledger.pool.num_free
            num_held = len(it.memory[0][0]) - 1 - num_free
            assert num_held == len(awake.new_ids), "lookahead slots are still allocated"
            assert (awake.old_ids.tolist() == awake.new_ids.tolist()) or block_ids == "packed"
        it.go_on("b", 7)
        it.go_on("a", 9)
        it.run("c", list(range(900, 916)))
        it.settle()
        it.check()
        for name in list(it.texts):
            it.engine.finish(name)
        assert it.engine.ledger.pool.num_free == len(it.memory[0][0]) - 1
        it.engine.check()


@pytest.mark.parametrize("options", [{}, {"mode": "lazy", "horizon_blocks": 8}], ids=str)
@pytest.mark.parametrize("num_new", [0, 1, 6])
def test_a_request_wakes_without_the_tokens_that_a_rewind_took_back(
    options: dict[str, Any], num_new: int
) -> None:
    """It has reported a block that has no hash yet, and then lost tokens of this block."""
    with world(**options) as it:
        text = prompt(1, 20)
        it.engine.add("a", hash_tokens(text[:16], BLOCK))
        assert it.engine.admit("a", 20, 1000, after=READY).state is RUNS
        it.engine.computed(["a"], [20], after=READY)
        it.engine.rewind("a", 18)
        if num_new:
            it.engine.step(["a"], [num_new])
        it.sleep(to=HOST, **WHO)
        it.wake(**WHO)
        if not num_new:
            it.engine.step(["a"], [1])
        it.engine.computed(["a"], [19], after=READY)
        it.engine.finish("a")
        it.engine.check()


def test_tail_is_lost_without_the_copies_of_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """This shows that only the loads of the image restore what the tests above compare."""
    with world() as it:
        it.run("a", prompt(1, 18))
        it.sleep()
        with monkeypatch.context() as patch:
            patch.setattr(Ranks, "copy", lambda *_: [])
            it.wake()
        with pytest.raises(AssertionError):
            it.check()


def test_wake_takes_ids_that_the_caller_chooses() -> None:
    with world() as it:
        it.run("a", prompt(1, 18))
        before = it.engine.tables("a")[0].tolist()
        it.sleep()
        awake = it.wake(block_ids=np.arange(23, 0, -1))
        it.check()
        assert it.engine.tables("a")[0].tolist() == [23, 22, 21, 20, 19]
        assert awake.old_ids.tolist() == sorted(before)
        assert dict(zip(awake.old_ids, awake.new_ids, strict=True))[before[0]] == 23


def test_wake_takes_another_pool_size_if_the_blocks_fit() -> None:
    with world(num_blocks=24) as it:
        it.run("gone", prompt(2, 30))
        it.run("a", prompt(1, 18))
        it.engine.finish("gone")
        it.sleep()
        image = it.engine._state.asleep
        with pytest.raises(OutOfBlocks, match="take a pool of 6 blocks or more"):
            it.wake(5)
        with pytest.raises(ConfigError, match="packed"):
            it.wake(6)
        with pytest.raises(InvalidBlock, match="null block"):
            it.wake(8, block_ids=range(5))
        with pytest.raises(ConfigError, match="memory for 6 blocks"):
            it.memory = it.new_memory(6)
            it.engine.wake(it.layouts, after=READY)
        assert it.engine._state.asleep is image
        it.wake(6, block_ids="packed")
        it.check("a")
        assert it.engine.stats()["device_capacity_tokens"] == 5 * BLOCK
        it.sleep()
        it.wake(100)
        it.go_on("a", 200)
        it.check("a")


def test_sleeping_engine_holds_no_device_memory_and_refuses_calls() -> None:
    with world(events=True) as it:
        it.run("a", prompt(1, 18))
        [own] = it.memory
        gone = weakref.ref(own[0])
        assert it.engine.take_events()
        it.sleep()
        it.memory, own = [], []
        gc.collect()
        assert gone() is None
        assert it.engine.movers == []
        for use in (
            lambda: it.engine.add("b", []),
            lambda: it.engine.admit("a", 18, 1, after=READY),
            lambda: it.engine.step(["a"], [1]),
            lambda: it.engine.computed(["a"], [18], after=READY),
            lambda: it.engine.extend("a", []),
            lambda: it.engine.rewind("a", 17),
            lambda: it.engine.preempt("a"),
            lambda: it.engine.finish("a"),
            it.engine.poll,
            it.engine.reset,
            lambda: it.engine.sleep(after=READY),
        ):
            with pytest.raises(StateError, match="sleeps: wake it first"):
                use()
        it.engine.check()
        assert it.engine.stats()["requests"] == 1
        it.engine.take_events()
        it.memory = it.new_memory(24)
        it.engine.wake(it.layouts, after=READY)
        it.check()


def test_evictions_before_and_after_sleep_are_counted_once() -> None:
    with world(num_blocks=8) as it:
        it.run("gone", prompt(2, 12))
        it.settle()
        it.engine.finish("gone")
        it.run("a", list(range(500, 520)))
        del it.texts["gone"]
        evicted = [it.engine.stats()["device_evicted_blocks"]]
        for change in it.sleep, it.wake, it.sleep, it.engine.close:
            change()
            evicted.append(it.engine.stats()["device_evicted_blocks"])
        assert evicted == [1] * 5


def test_engine_closed_while_asleep_knows_no_request_and_passes_check() -> None:
    with world() as it:
        it.run("a", prompt(1, 9))
        it.sleep()
        it.engine.close()
        it.engine.check()
        assert it.engine.stats()["requests"] == 0
        with pytest.raises(StateError, match="is closed"):
            it.engine.add("b", [])


def test_events_report_blocks_that_only_the_device_cached_as_removed() -> None:
    with world(num_host=20, events=True, mode="lazy", horizon_blocks=1) as it:
        it.run("gone", prompt(2, 12))
        it.engine.finish("gone")
        it.run("a", prompt(1, 9))
        hashes = hash_tokens(prompt(2, 12), BLOCK)
        it.engine.take_events()
        it.sleep()
        [event] = [one for one in it.engine.take_events() if one.medium == "GPU"]
        assert event.block_hashes == hashes[2:]  # type: ignore[union-attr]


def test_events_report_the_blocks_of_requests_as_removed_without_preserve() -> None:
    with world(events=True) as it:
        it.run("a", prompt(1, 9))
        it.engine.take_events()
        it.sleep(preserve=False)
        removed = [one for one in it.engine.take_events() if one.medium == "GPU"]
        found = [digest for one in removed for digest in one.block_hashes]  # type: ignore[union-attr]
        assert sorted(found) == sorted(hash_tokens(prompt(1, 8), BLOCK))


def test_sleep_that_copies_nothing_waits_for_the_compute() -> None:
    event = HostEvent()
    event.set(RuntimeError("the step has crashed"))
    with world() as it:
        with pytest.raises(TransferError, match="the step has crashed"):
            it.sleep(after=event, preserve=False)
        it.sleep(preserve=False)


# -- copies in flight --------------------------------------------------------------------------


def test_copies_end_before_sleep_and_the_next_poll_reports_them() -> None:
    with world() as it:
        it.run("writer", prompt(1, 17))
        it.settle()
        it.engine.finish("writer")
        del it.texts["writer"]
        it.engine.reset()
        assert it.engine.scheduler.num_resident == 0
        it.run("writer", prompt(1, 17))
        it.settle()
        it.engine.finish("writer")
        del it.texts["writer"]
        it.engine.ledger.pool.evict(np.arange(1, 24))
        it.texts["a"] = [*prompt(1, 16), 5]
        it.engine.add("a", hash_tokens(it.texts["a"], BLOCK))
        assert it.engine.admit("a", 17, 100, after=READY).state is LOADS
        it.run("b", list(range(500, 513)))  # a store is in flight too
        assert len(it.engine.transfers) == 2
        it.sleep()
        it.wake(block_ids="packed")
        assert not it.engine.transfers
        landed = it.engine.poll()
        assert (landed.loaded, landed.failed, landed.num_stored_blocks) == (["a"], [], 3)
        assert it.engine.poll().loaded == []
        it.texts["a"].pop()
        it.check()


def start_load(it: World, *, after: Event) -> None:
    """Let request "a" load what another one has stored."""
    it.run("writer", prompt(1, 16))
    it.settle()
    it.engine.finish("writer")
    it.engine.ledger.pool.evict(np.arange(1, 24))
    del it.texts["writer"]
    it.engine.add("a", hash_tokens(prompt(1, 16), BLOCK))
    assert it.engine.admit("a", 17, 100, after=after).state is LOADS


@pytest.mark.parametrize("leave", ["preempt", "finish"])
def test_next_poll_leaves_out_a_load_whose_request_was_given_up_after_waking(leave: str) -> None:
    """The request of this id runs again by then, or is another one that was only added."""
    with world() as it:
        it.run("a", prompt(1, 16))
        it.settle()
        it.engine.preempt("a")
        it.engine.ledger.pool.evict(np.arange(1, 24))
        assert it.engine.admit("a", 16, 100, after=READY).state is LOADS
        it.sleep()
        it.wake()
        if leave == "preempt":
            it.engine.preempt("a")
        else:
            it.engine.finish("a")
            it.engine.add("a", hash_tokens(prompt(2, 16), BLOCK))
        assert it.engine.admit("a", 16, 100, after=READY).state is RUNS
        assert it.engine.poll().loaded == []
        it.engine.check()


@pytest.mark.parametrize("leave", ["preempt", "finish"])
def test_next_poll_leaves_out_a_failed_load_of_a_request_that_was_given_up(leave: str) -> None:
    """Its user has put it back into the queue, and must not do so twice."""
    with world() as it:
        it.run("a", prompt(1, 16))
        it.settle()
        it.engine.preempt("a")
        it.engine.ledger.pool.evict(np.arange(1, 24))
        assert it.engine.admit("a", 16, 100, after=READY).state is LOADS
        it.sleep(preserve=False)
        it.wake()
        getattr(it.engine, leave)("a")
        if leave == "finish":
            it.engine.add("a", hash_tokens(prompt(2, 16), BLOCK))
        assert it.engine.poll().failed == []
        it.engine.check()


def test_copy_past_the_timeout_has_failed_and_cannot_land_later() -> None:
    never = HostEvent()
    with world() as it:
        start_load(it, after=never)
        it.run("b", list(range(500, 513)))
        it.sleep(timeout_s=0.05)
        it.wake(block_ids="packed")
        landed = it.engine.poll()
        assert (landed.loaded, landed.failed) == ([], ["a"])
        never.set()
        it.check()
        again = it.engine.admit("a", 17, 100, after=READY)
        assert (again.state, again.num_new_tokens) == (RUNS, 17), "it recomputes"


def test_store_that_released_its_blocks_can_still_time_out() -> None:
    """The engine has unpinned them, and must not do so again when it gives the store up."""

    class Released(Ticket):
        def __init__(self, ticket: Ticket) -> None:
            self._ticket = ticket

        def poll(self) -> bool:
            return self._ticket.poll()

        def source_released(self) -> bool:
            return True

        @property
        def error(self) -> TransferError | None:
            return self._ticket.error

        def wait(self, timeout_s: float | None = None) -> None:
            self._ticket.wait(timeout_s)

    class Staged(HostMover):
        def store(self, block_ids: Ints, host_slots: Ints, *, after: Event) -> Ticket:
            return Released(super().store(block_ids, host_slots, after=after))

    with world(mover=Staged) as it:
        it.engine.add("a", hash_tokens(prompt(1, 18), BLOCK))
        it.engine.admit("a", 18, 100, after=READY)
        it.engine.computed(["a"], [18], after=HostEvent())
        it.engine.poll()
        it.sleep(timeout_s=0.01)
        it.wake()
        assert it.engine.poll().num_failed_stores == 1
        assert not it.engine._copies._unpinned
        it.engine.check()
        it.engine.finish("a")
        assert it.engine.ledger.pool.num_free == 23


def test_next_poll_reports_what_landed_before_a_sleep_that_failed() -> None:
    with world(num_host=3) as it:
        it.run("a", prompt(1, 13))
        with pytest.raises(OutOfBlocks, match="needs 1 host slots and 0 are available"):
            it.engine.sleep(after=READY)
        assert it.engine.poll().num_stored_blocks == 3
        it.check()


# -- without preserving ------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["host", "file"])
def test_requests_recompute_what_the_host_lacks_without_preserve(to: str, tmp_path: Path) -> None:
    with world(num_host=8) as it:
        it.run("a", prompt(1, 18))
        it.settle()
        it.sleep(preserve=False, to=HOST if to == "host" else tmp_path / "image", **WHO)
        it.wake(8, **WHO)
        it.engine.check()
        assert it.engine.tables("a")[0].size == 0
        again = it.engine.admit("a", 18, 100, after=READY)
        assert (again.state, again.num_external_tokens) == (LOADS, 16)
        it.settle()
        it.texts["a"] = it.texts["a"][:16]
        it.check()


def test_request_that_was_loading_is_reported_as_failed_without_preserve() -> None:
    with world() as it:
        start_load(it, after=READY)
        it.sleep(preserve=False)
        it.wake()
        landed = it.engine.poll()
        assert (landed.loaded, landed.failed) == ([], ["a"])
        assert it.engine.admit("a", 17, 100, after=READY).state is LOADS, "the host still has it"
