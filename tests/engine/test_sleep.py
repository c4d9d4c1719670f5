import gc
import re
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import kvstow
from kvstow import (
    AdmissionState,
    ConfigError,
    Engine,
    FullAttention,
    InvalidBlock,
    OutOfBlocks,
    SlidingWindow,
    SnapshotError,
    StateError,
    TransferError,
    hash_tokens,
)
from kvstow.engine import HOST, Awake
from kvstow.engine.ranks import Ranks
from kvstow.engine.snapshot_file import SnapshotFile
from kvstow.transfer import (
    READY,
    BlockLayout,
    Event,
    HostArena,
    HostEvent,
    HostMover,
    Ticket,
    VerifiedMover,
)
from kvstow.transfer.mover import Ints

BLOCK = 4
GARBAGE = -1
WHO: dict[str, Any] = {"identity": "a model", "weights_version": "7"}
RUNS, LOADS = AdmissionState.RUNS, AdmissionState.LOADS
Memory = list[list[npt.NDArray[np.int64]]]


def prompt(name: int, num_tokens: int) -> list[int]:
    """All prompts begin with the same two blocks."""
    return [*range(8), *range(100 * name, 100 * name + num_tokens)][:num_tokens]


class World:
    """An engine, the memory it computes in, and what its requests have computed."""

    def __init__(
        self, num_blocks: int = 24, num_host: int = 64, *, ranks: int = 1, windows: int = 0,
        **options: Any,
    ) -> None:  # fmt: skip
        windowed = [SlidingWindow(BLOCK, 6)] * windows
        self.groups: list[FullAttention | SlidingWindow] = [FullAttention(BLOCK), *windowed]
        self.ranks = ranks
        self.texts: dict[str, list[int]] = {}
        self.memory = self.new_memory(num_blocks)
        self.engine = Engine(
            num_blocks, num_host, self.groups, self.layouts, world_size=ranks,
            **({"clock": lambda: 0.0} | options),
        )  # fmt: skip

    def new_memory(self, num_blocks: int, per_block: int = BLOCK) -> Memory:
        shape = (num_blocks, per_block)
        return [[np.full(shape, GARBAGE) for _ in self.groups] for _ in range(self.ranks)]

    @property
    def layouts(self) -> Any:
        ranks = [[BlockLayout.from_arrays([group]) for group in own] for own in self.memory]
        return ranks if self.ranks > 1 else ranks[0]

    def run(self, name: str, text: list[int], *, drafts: int = 0) -> None:
        """Admit a request and compute all its tokens; its blocks become due for a store."""
        self.texts[name] = list(text)
        self.engine.add(name, hash_tokens(text, BLOCK))
        admitted = self.engine.admit(
            name, len(text), 1000, after=READY, num_lookahead_tokens=drafts
        )
        assert admitted.state is RUNS
        self.write(name, admitted.num_hit_tokens)

    def go_on(self, name: str, num_tokens: int) -> None:
        """Generate so many tokens."""
        text = self.texts[name]
        known = len(text)
        text += [7 * known + at for at in range(num_tokens)]
        assert self.engine.step([name], [num_tokens]).num_granted == 1
        self.engine.extend(name, hash_tokens(text, BLOCK)[known // BLOCK :])
        self.write(name, known)

    def write(self, name: str, begin: int) -> None:
        text, tables = self.texts[name], self.engine.tables(name)
        at = np.arange(begin, len(text))
        for rank, own in enumerate(self.memory):
            for group, (memory, table) in enumerate(zip(own, tables, strict=True)):
                memory[table[at // BLOCK], at % BLOCK] = self.value(text, rank, group)[begin:]
                memory[0] = GARBAGE
        self.engine.computed([name], [len(text)], after=READY)

    @staticmethod
    def value(text: list[int], rank: int, group: int) -> npt.NDArray[np.int64]:
        return np.array(text) + 10_000 * (rank + 1) + 1_000_000 * group

    def check(self, *names: str) -> None:
        """Every token that a request still reads is where its tables say."""
        self.engine.check()
        for name in names or self.texts:
            text, tables = self.texts[name], self.engine.tables(name)
            for rank, own in enumerate(self.memory):
                for group, (memory, table) in enumerate(zip(own, tables, strict=True)):
                    at = np.arange(len(text))
                    blocks = table[at // BLOCK]
                    kept = blocks > 0
                    held = memory[blocks, at % BLOCK][kept]
                    assert held.tolist() == self.value(text, rank, group)[kept].tolist(), name
                    assert kept[max(0, len(text) - 5) :].all()

    def sleep(self, **options: Any) -> None:
        self.engine.sleep(**({"after": READY} | options))
        for group in (group for own in self.memory for group in own):
            group[:] = GARBAGE  # whoever has it now

    def wake(self, num_blocks: int | None = None, **options: Any) -> Awake:
        size = num_blocks or len(self.memory[0][0])
        self.memory = self.new_memory(size)
        given: dict[str, Any] = {"after": READY, "num_device_blocks": size} | options
        return self.engine.wake(self.layouts, **given)

    def settle(self) -> None:
        while self.engine.transfers:
            self.engine.poll()
            time.sleep(0.001)


@contextmanager
def world(*sizes: int, **options: Any) -> Iterator[World]:
    it = World(*sizes, **options)
    try:
        yield it
    finally:
        it.engine.close()


def state(engine: Engine) -> object:
    """What a refused call must not change."""
    tables = {name: [t.tolist() for t in engine.tables(name)] for name in engine._state.requests}
    pool = engine.ledger.pool
    order = pool.free_order().tolist()
    return tables, order, pool.num_cached, engine.scheduler.snapshot(), engine._state.running.copy()


# -- the way there and back --------------------------------------------------------------------

SHAPES: list[dict[str, Any]] = [
    {},
    {"ranks": 2},
    {"windows": 2, "num_blocks": 70},
    {"windows": 1, "ranks": 3, "num_blocks": 50},
    {"mode": "lazy", "horizon_blocks": 6},
    {"policy": "hit-density"},
    {"blocks_per_slot": 3, "num_host": 30},
]


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
            assert num_free == len(it.memory[0][0]) - 1 - len(awake.new_ids), "drafts keep slots"
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


def test_tail_is_lost_without_the_copies_of_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: nothing but the image's loads brings back what is compared above."""
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
        with pytest.raises(OutOfBlocks, match="5 blocks are needed and 4 are free"):
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
        it.run("b", list(range(500, 513)))  # and a store
        assert len(it.engine.transfers) == 2
        it.sleep()
        it.wake(block_ids="packed")
        assert not it.engine.transfers
        landed = it.engine.poll()
        assert (landed.loaded, landed.failed, landed.num_stored_blocks) == (["a"], [], 3)
        assert it.engine.poll().loaded == []
        it.texts["a"].pop()
        it.check()


def test_copy_past_the_timeout_has_failed_and_cannot_land_later() -> None:
    never = HostEvent()
    with world() as it:
        it.run("writer", prompt(1, 16))
        it.settle()
        it.engine.finish("writer")
        it.engine.ledger.pool.evict(np.arange(1, 24))
        del it.texts["writer"]
        it.engine.add("a", hash_tokens(prompt(1, 16), BLOCK))
        assert it.engine.admit("a", 17, 100, after=never).state is LOADS
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
    """It has unpinned them, and does not once more when it is given up."""

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
        it.engine.check()
        it.engine.finish("a")
        assert it.engine.ledger.pool.num_free == 23


def test_next_poll_reports_what_landed_before_a_sleep_that_failed() -> None:
    with world(num_host=3) as it:
        it.run("a", prompt(1, 13))
        with pytest.raises(OutOfBlocks, match="the sleep image needs 1 host slots and at most 0"):
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
        it.run("writer", prompt(1, 16))
        it.settle()
        it.engine.finish("writer")
        it.engine.ledger.pool.evict(np.arange(1, 24))
        it.engine.add("a", hash_tokens(prompt(1, 16), BLOCK))
        assert it.engine.admit("a", 17, 100, after=READY).state is LOADS
        it.sleep(preserve=False)
        it.wake()
        landed = it.engine.poll()
        assert (landed.loaded, landed.failed) == ([], ["a"])
        assert it.engine.admit("a", 17, 100, after=READY).state is LOADS, "the host has it still"


# -- refusals ----------------------------------------------------------------------------------


def test_sleep_changes_nothing_if_the_host_is_too_small() -> None:
    with world(num_host=4) as it:
        it.run("a", prompt(1, 18))
        it.run("b", prompt(3, 18))
        it.settle()
        before = state(it.engine)
        with pytest.raises(OutOfBlocks, match="preempt requests first"):
            it.engine.sleep(after=READY)
        assert state(it.engine) == before
        it.go_on("a", 5)
        it.check()
        it.engine.preempt("b")
        del it.texts["b"]
        it.settle()
        it.engine.reset()
        with pytest.raises(OutOfBlocks):
            it.engine.sleep(after=READY)


class FailingMover(HostMover):
    """Refuses what it is told to."""

    fails: str = ""

    def store(self, block_ids: Ints, host_slots: Ints, *, after: Event) -> Ticket:
        if FailingMover.fails == "store":
            raise TransferError("no store today")
        return super().store(block_ids, host_slots, after=after)

    def load(self, host_slots: Ints, block_ids: Ints, *, after: Event) -> Ticket:
        if FailingMover.fails == "load":
            raise TransferError("no load today")
        return super().load(host_slots, block_ids, after=after)


@pytest.mark.parametrize("ranks", [1, 2])
def test_failed_copies_leave_the_engine_as_it_was(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with world(ranks=ranks, mover=FailingMover) as it:
        it.run("a", prompt(1, 18))
        it.settle()
        before = state(it.engine)
        monkeypatch.setattr(FailingMover, "fails", "store")
        with pytest.raises(TransferError, match=r"could not be stored.*no store today"):
            it.engine.sleep(after=READY)
        assert state(it.engine) == before
        monkeypatch.setattr(FailingMover, "fails", "")
        it.sleep()
        monkeypatch.setattr(FailingMover, "fails", "load")
        for _ in range(2):
            with pytest.raises(TransferError, match=r"could not be loaded.*no load today"):
                it.wake()
        monkeypatch.setattr(FailingMover, "fails", "")
        it.wake()
        it.check()


def test_engine_is_awake_without_copies_after_sleep_was_interrupted() -> None:
    class Interrupted:
        def wait(self) -> None:
            raise AssertionError("movers do not block in it")

        def add_done_callback(self, callback: Callable[[], None]) -> None:
            self.callback = callback

    event = Interrupted()
    with world() as it, pytest.MonkeyPatch.context() as patch:
        it.run("a", prompt(1, 18))
        it.settle()
        tables = it.engine.tables("a")[0].tolist()
        movers = list(it.engine.movers)

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        patch.setattr("kvstow.engine.sleep._finish", interrupt)
        with pytest.raises(KeyboardInterrupt):
            it.engine.sleep(after=event)
        it.engine.check()
        assert it.engine.tables("a")[0].tolist() == tables
        assert it.engine.scheduler.num_resident == len(it.engine.scheduler.used_slots())
        with pytest.raises(StateError, match="this HostMover is closed"):
            movers[0].load([0], [1], after=READY)
        event.callback()
        it.go_on("a", 5)
        it.check()


def test_wake_raises_unless_the_engine_sleeps() -> None:
    with world() as it:
        with pytest.raises(StateError, match="does not sleep"):
            it.wake()
        it.sleep()
        it.wake()
        with pytest.raises(StateError, match="does not sleep"):
            it.wake()
        it.sleep()
        it.engine.close()
        with pytest.raises(StateError, match="is closed"):
            it.wake()
        with pytest.raises(StateError, match="is closed"):
            it.sleep()


def test_wake_refuses_another_model_or_other_layouts() -> None:
    with world() as it:
        it.run("a", prompt(1, 18))
        it.sleep(**WHO)
        it.memory = it.new_memory(24, per_block=8)
        with pytest.raises(SnapshotError, match="give layouts of the model that slept"):
            it.engine.wake(it.layouts, after=READY, **WHO)
        with pytest.raises(ConfigError, match="1 groups but 2 layouts"):
            it.engine.wake(it.layouts * 2, after=READY, **WHO)
        with pytest.raises(SnapshotError, match="is of 'a model', not of 'b'"):
            it.wake(identity="b", weights_version="7")
        with pytest.raises(SnapshotError, match=r"weights version '7', not of '8'.*reset it"):
            it.wake(identity="a model", weights_version="8")
        with pytest.raises(ConfigError, match="expected an Event"):
            it.wake(after=None, **WHO)
        it.wake(**WHO)
        it.check()


def test_file_needs_identity_and_weights_version(tmp_path: Path) -> None:
    with world() as it:
        halves: list[dict[str, Any]] = [{}, {"identity": "a"}, {"weights_version": "1"}]
        for options in halves:
            with pytest.raises(ConfigError, match="a file needs both"):
                it.engine.sleep(after=READY, to=tmp_path / "image", **options)
        for place in 5, None, b"image", "im\0age":
            with pytest.raises(ConfigError, match="pass HOST, or the name of a file"):
                it.engine.sleep(after=READY, to=place, **WHO)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="pass strings"):
            it.engine.sleep(after=READY, identity=b"a", weights_version="1")  # type: ignore[arg-type]
        with pytest.raises(SnapshotError, match="cannot be written: No such file"):
            it.engine.sleep(after=READY, to=tmp_path / "no" / "image", **WHO)
        it.run("a", prompt(1, 9))
        it.check()


# -- files -------------------------------------------------------------------------------------


def put_to_sleep(path: Path, **shape: Any) -> None:
    """An engine with two requests and a cached prompt, in a file."""
    with world(**shape) as it:
        it.run("a", prompt(1, 18))
        it.run("gone", prompt(2, 17))
        it.settle()
        it.engine.finish("gone")
        it.run("b", prompt(3, 13))
        it.engine.add("waits", hash_tokens(prompt(2, 17), BLOCK))
        it.sleep(to=path, **WHO)
        assert all(arena.closed for arena in it.engine.arenas)


@pytest.mark.parametrize(
    "shape", [{}, {"ranks": 2, "windows": 1, "num_blocks": 50}, SHAPES[-1]], ids=str
)
def test_another_engine_goes_on_with_the_requests_of_a_file(
    shape: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "image"
    put_to_sleep(path, **shape)
    before = path.read_bytes()
    for _ in range(2):
        with world(**shape) as it:
            it.engine.restart(path, after=READY, requests=True, **WHO)
            it.texts = {"a": prompt(1, 18), "b": prompt(3, 13)}
            it.check()
            it.go_on("a", 9)
            found = it.engine.admit("waits", 17, 100, after=READY)
            whole = 16 if shape.get("blocks_per_slot", 1) == 1 else 12
            assert found.num_hit_tokens + found.num_external_tokens == whole
            it.settle()
            it.texts["waits"] = prompt(2, whole)
            it.check()
    assert path.read_bytes() == before, "copy-on-write"


def test_restart_without_requests_warms_the_host_only(tmp_path: Path) -> None:
    path = tmp_path / "image"
    put_to_sleep(path)
    with world() as it:
        awake = it.engine.restart(path, after=READY, **WHO)
        assert (len(awake.old_ids), it.engine.ledger.num_requests) == (0, 0)
        it.engine.check()
        assert it.engine.ledger.pool.num_free == 23
        it.engine.add("new", hash_tokens(prompt(2, 17), BLOCK))
        assert it.engine.admit("new", 17, 100, after=READY).num_external_tokens == 16
        it.settle()
        it.texts = {"new": prompt(2, 16)}
        it.check()
        it.engine.finish("new")
        scheduler = it.engine.scheduler
        assert scheduler.num_resident == len(scheduler.used_slots())


def test_restart_reads_no_slot_before_its_load(tmp_path: Path) -> None:
    """A slot that is damaged fails the loads that want it, and no others."""
    path = tmp_path / "image"
    put_to_sleep(path)
    found = hash_tokens(prompt(2, 17), BLOCK)
    with world() as it:
        it.engine.restart(path, after=READY, **WHO)
        it.engine.add("new", found)
        it.engine.admit("new", 17, 100, after=READY)
        [transfer] = it.engine.transfers
        slot = int(transfer.job.host_slots[3])
        it.settle()
    at = path.read_bytes().find(World.value(prompt(2, 17), 0, 0)[12:16].tobytes())
    assert at > 0
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"\xff")
    with world() as it:
        it.engine.restart(path, after=READY, **WHO)
        again = tmp_path / "again"
        it.sleep(to=again, **WHO)
        with SnapshotFile(again) as file:
            assert file.damaged_slots() == [(0, slot)], "it keeps the checksum that it has not met"
        it.wake(**WHO)
        it.engine.add("other", found[:3])
        assert it.engine.admit("other", 13, 100, after=READY).state is LOADS
        it.settle()
        assert "other" in it.engine._state.running
        it.engine.add("new", found)
        assert it.engine.admit("new", 17, 100, after=READY).state is LOADS
        [transfer] = it.engine.transfers
        assert not transfer.wait()
        assert re.search(f"host slot {slot} does not hold", str(transfer.tickets[0].error))
        assert it.engine.poll().failed == ["new"]


def test_restart_from_a_damaged_image_restores_no_request(tmp_path: Path) -> None:
    path = tmp_path / "image"
    put_to_sleep(path)
    whole = path.read_bytes()
    at = whole.find(World.value(prompt(1, 18), 0, 0)[16:18].tobytes())
    damaged = bytearray(whole)
    damaged[at] ^= 1
    path.write_bytes(damaged)
    with world() as it:
        arenas = it.engine.arenas
        with pytest.raises(TransferError, match="the file is damaged"):
            it.engine.restart(path, after=READY, requests=True, **WHO)
        assert (it.engine.arenas, it.engine.ledger.num_requests) == (arenas, 0)
        it.engine.restart(path, after=READY, **WHO)
        assert it.engine.scheduler.num_resident > 0


def test_restart_needs_a_new_engine_with_equal_options(tmp_path: Path) -> None:
    path = tmp_path / "image"
    put_to_sleep(path)
    with world() as it:
        it.run("a", prompt(1, 9))
        with pytest.raises(StateError, match="restart one that was just built"):
            it.engine.restart(path, after=READY, **WHO)
    with world(mode="lazy", horizon_blocks=1) as it:
        it.run("a", prompt(1, 9))
        it.engine.finish("a")  # its blocks are cached on the device alone
        assert not len(it.engine.scheduler.used_slots())
        with pytest.raises(StateError, match="restart one that was just built"):
            it.engine.restart(path, after=READY, **WHO)
    refusals: list[tuple[dict[str, Any], str]] = [
        ({"num_host": 63}, "number of host blocks is 64, not 63"),
        ({"policy": "hit-density"}, "policy is Lru, not HitDensity"),
        ({"windows": 1, "num_blocks": 50}, "give layouts of the model"),
        ({"ranks": 2}, "give layouts of the model"),
        ({"mode": "lazy", "horizon_blocks": 4}, "mode is Eager, not Lazy"),
    ]
    for shape, why in refusals:
        with world(**shape) as it:
            with pytest.raises(SnapshotError, match=re.escape(why)):
                it.engine.restart(path, after=READY, requests=True, **WHO)
            it.run("a", prompt(1, 9))
            it.check()
    with world() as it, pytest.raises(SnapshotError, match="weights version '7', not of '8'"):
        it.engine.restart(path, after=READY, identity="a model", weights_version="8")


def test_wake_refuses_the_file_of_another_engine(tmp_path: Path) -> None:
    path, mine = tmp_path / "image", tmp_path / "mine"
    with world() as first, world() as second:
        first.run("alice", prompt(1, 18))
        second.run("bob", prompt(3, 13))
        first.sleep(to=path, **WHO)
        mine.write_bytes(path.read_bytes())
        second.sleep(to=path, **WHO)
        written = path.read_bytes()
        with pytest.raises(SnapshotError, match=r"was written by another sleep.*Put back the file"):
            first.wake(**WHO)
        assert str(path) not in Path("/proc/self/maps").read_text()
        assert path.read_bytes() == written
        with pytest.raises(StateError, match="sleeps: wake it first"):
            first.engine.poll()
        second.wake(**WHO)
        second.check()
        mine.rename(path)
        first.wake(**WHO)
        first.check()


def test_wake_refuses_the_file_of_an_earlier_sleep(tmp_path: Path) -> None:
    path, early = tmp_path / "image", tmp_path / "early"
    with world() as it:
        it.run("a", prompt(1, 18))
        it.sleep(to=early, **WHO)
        it.wake(**WHO)
        it.go_on("a", 5)
        it.sleep(to=path, **WHO)
        early.rename(path)
        with pytest.raises(SnapshotError, match="of this engine or of another"):
            it.wake(**WHO)


def test_wake_from_host_and_from_file_into_a_pool_of_another_size(tmp_path: Path) -> None:
    assert {"Awake", "Engine", "HOST"} <= set(dir(kvstow))
    with world() as it:
        it.run("a", prompt(1, 18))
        for place in HOST, tmp_path / "image":
            it.engine.sleep(after=READY, to=place, timeout_s=5.0, preserve=True, **WHO)
            it.wake(**WHO)
            it.check()
            it.sleep(to=place, **WHO)
            it.memory = it.new_memory(24)
            awake = it.engine.wake(
                it.layouts, after=READY, num_device_blocks=24, block_ids="packed", **WHO
            )
            assert awake.new_ids.tolist() == [1, 2, 3, 4, 5]
            it.check()


# -- movers that check what they load ----------------------------------------------------------


@pytest.mark.parametrize("to", ["host", "file"])
@pytest.mark.parametrize("shape", [{}, {"windows": 1, "num_blocks": 50, "ranks": 2}], ids=str)
def test_checksums_outlive_the_movers(shape: dict[str, Any], to: str, tmp_path: Path) -> None:
    def verified(layout: BlockLayout, arena: HostArena) -> VerifiedMover:
        return VerifiedMover(HostMover(layout, arena))

    with world(mover=verified, **shape) as it:
        it.run("a", prompt(1, 18))
        it.run("gone", prompt(2, 17))
        it.settle()
        it.engine.finish("gone")
        del it.texts["gone"]
        slot = int(it.engine.scheduler.used_slots()[-1])
        it.sleep(to=HOST if to == "host" else tmp_path / "image", **WHO)
        it.wake(**WHO)
        it.check()
        it.engine.add("again", hash_tokens(prompt(2, 17), BLOCK))
        assert it.engine.admit("again", 17, 100, after=READY).state is LOADS
        it.settle()
        assert "again" in it.engine._state.running
        # What is damaged in memory is not found sound because a file was made of it.
        it.engine.arenas[0].slots[slot, 3] ^= 1
        it.sleep(to=tmp_path / "image", **WHO)
        with SnapshotFile(tmp_path / "image") as file:
            assert file.damaged_slots() == [(0, slot)]


def test_tokens_and_extra_keys_survive_sleep(tmp_path: Path) -> None:
    text, keys = prompt(1, 16), [None, ("image", 3, b"\0", (1, None)), None, None]
    hashes = hash_tokens(text, BLOCK, extra_keys=keys)
    with world(events=True) as it:
        it.engine.add("a", hashes[:2], tokens=text[:8], extra_keys=keys[:2])
        it.engine.admit("a", 16, 8, after=READY)
        it.engine.computed(["a"], [8], after=READY)
        for place in HOST, tmp_path / "image":
            before = it.engine.ledger.known("a")
            it.sleep(to=place, **WHO)
            it.wake(**WHO)
            assert it.engine.ledger.known("a") == before == (hashes[:2], text[:8], keys[:2])
        it.engine.take_events()
        it.engine.step(["a"], [8])
        it.engine.extend("a", hashes[2:], tokens=text[8:], extra_keys=keys[2:])
        it.engine.computed(["a"], [16], after=READY)
        [event] = [one for one in it.engine.take_events() if one.medium == "GPU"]
        assert event.token_ids == text[8:]  # type: ignore[union-attr]
        assert event.parent_block_hash == hashes[1]  # type: ignore[union-attr]
        it.engine.preempt("a")
        it.engine.reset()
        it.engine.take_events()
        assert it.engine.admit("a", 16, 100, after=READY).state is RUNS
        it.engine.computed(["a"], [16], after=READY)
        [event] = [one for one in it.engine.take_events() if one.medium == "GPU"]
        assert event.extra_keys == keys  # type: ignore[union-attr]
        it.engine.check()
