"""Engines of several ranks, and host slots of several blocks: the bytes that come back."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from tests.movers import ManualMover

from kvstow import AdmissionState, ConfigError, Engine, FullAttention, Landed, SlidingWindow
from kvstow import hash_tokens as hashed
from kvstow.engine.ranks import MakeMover
from kvstow.transfer import READY, BlockLayout, HostArena, HostMover, Mover

BLOCK = 4
RUNS, LOADS, NO_ROOM = AdmissionState.RUNS, AdmissionState.LOADS, AdmissionState.NO_ROOM
NOTHING = Landed([], [], 0, 0)


class Shards:
    """An engine whose ranks hold two layers each, with a width for each rank.

    What a token's KV is depends on rank and layer, so that no shard can stand for another.
    """

    def __init__(self, world_size: int, num_device_blocks: int = 33, **options: object) -> None:
        self.now_s = 0.0
        self.kv = [
            [np.zeros((num_device_blocks, BLOCK, 3 + rank), np.int32) for _ in range(2)]
            for rank in range(world_size)
        ]
        layouts = [BlockLayout.from_arrays(layers) for layers in self.kv]
        self.engine = Engine(
            num_device_blocks,
            64,
            [FullAttention(BLOCK)],
            layouts if world_size == 1 else [[layout] for layout in layouts],
            world_size=world_size,
            clock=lambda: self.now_s,
            **options,  # type: ignore[arg-type]
        )

    @property
    def movers(self) -> list[ManualMover]:
        return [mover for mover in self.engine.movers if isinstance(mover, ManualMover)]

    def admit(self, name: str, tokens: list[int]) -> AdmissionState:
        if name not in self.engine._state.requests:
            self.engine.add(name, hashed(tokens, BLOCK))
        return self.engine.admit(name, len(tokens), 1000, after=READY).state

    def compute(self, name: str, tokens: list[int]) -> None:
        at = np.arange(len(tokens))
        blocks = self.engine.tables(name)[0][at // BLOCK]
        for rank, layers in enumerate(self.kv):
            for layer, memory in enumerate(layers):
                memory[blocks, at % BLOCK] = np.array(tokens)[:, None] * 10 + 2 * rank + layer
        self.engine.computed([name], [len(tokens)], after=READY)

    def assert_cached(self, name: str, tokens: list[int]) -> None:
        at = np.arange(len(tokens))
        blocks = self.engine.tables(name)[0][at // BLOCK]
        for rank, layers in enumerate(self.kv):
            for layer, memory in enumerate(layers):
                expected = np.array(tokens)[:, None] * 10 + 2 * rank + layer
                assert (memory[blocks, at % BLOCK] == expected).all(), (rank, layer)

    def forget(self) -> None:
        """Evict every block of the device, and overwrite its memory."""
        assert self.engine.ledger.pool.reset()
        for layers in self.kv:
            for memory in layers:
                memory[:] = -1

    def put_on_the_host(self, tokens: list[int]) -> None:
        assert self.admit("writer", tokens) is RUNS
        self.compute("writer", tokens)
        self.engine.finish("writer")
        for mover in self.movers:
            mover.stores[-1].land()
        assert self.landed().num_failed_stores == 0
        self.forget()

    def landed(self) -> Landed:
        for transfer in self.engine.transfers:
            transfer.wait()
        return self.engine.poll()


@contextmanager
def shards(world_size: int, **options: object) -> Iterator[Shards]:
    it = Shards(world_size, **options)  # type: ignore[arg-type]
    try:
        yield it
        it.engine.check()
    finally:
        it.engine.close()
    for name in list(it.engine._state.requests):
        it.engine.finish(name)
    assert it.engine.ledger.pool.num_free == len(it.kv[0][0]) - 1, "a pin was left behind"


DOCUMENT = list(range(16))


# -- the bytes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("blocks_per_slot", [1, 2, 3, 5])
@pytest.mark.parametrize("num_tokens", [3, 4, 21, 40, 47])
def test_stored_blocks_come_back_on_every_rank(
    world_size: int, blocks_per_slot: int, num_tokens: int
) -> None:
    tokens = list(range(1, num_tokens + 1))
    num_whole = num_tokens // BLOCK // blocks_per_slot * blocks_per_slot
    with shards(world_size, blocks_per_slot=blocks_per_slot) as it:
        # It takes the first slots, so the prompt gets others.
        it.put_on_the_host([99] * (BLOCK * blocks_per_slot))
        assert it.admit("first", tokens) is RUNS
        it.compute("first", tokens)
        it.landed()
        it.engine.finish("first")
        assert it.engine.stats()["stored_blocks"] == blocks_per_slot + num_whole
        it.forget()

        again = [*tokens, 1000]
        state = it.admit("again", again)
        assert state is (LOADS if num_whole else RUNS)
        if num_whole:
            assert it.landed() == Landed(["again"], [], 0, 0)
        it.assert_cached("again", tokens[: num_whole * BLOCK])
        assert it.engine.stats()["loaded_blocks"] == num_whole


@pytest.mark.parametrize("num_local", range(1, 6))
def test_load_brings_only_the_blocks_of_a_slot_that_the_device_lacks(num_local: int) -> None:
    tokens = list(range(1, 25))  # 6 blocks, 2 slots
    with shards(2, blocks_per_slot=3) as it:
        it.put_on_the_host(tokens)
        begin = [*tokens[: num_local * BLOCK], 1000]
        # It loads whole slots, and computes the rest.
        if it.admit("begin", begin) is LOADS:
            it.landed()
            num_granted = it.engine.ledger.num_granted_tokens("begin")
            assert num_granted == 3 * BLOCK
            it.engine.step(["begin"], [len(begin) - num_granted])
        it.compute("begin", begin)
        it.landed()
        num_before = it.engine.stats()["loaded_blocks"]
        assert num_before == num_local // 3 * 3

        it.engine.add("again", hashed([*tokens, 5], BLOCK))
        found = it.engine.admit("again", 25, 100, after=READY)
        assert (found.num_hit_tokens, found.num_external_tokens) == (
            num_local * BLOCK,
            (6 - num_local) * BLOCK,
        )
        assert "again" in it.landed().loaded
        it.assert_cached("again", tokens)
        assert it.engine.stats()["loaded_blocks"] - num_before == 6 - num_local


def test_generated_blocks_fill_a_slot_one_by_one() -> None:
    tokens = list(range(1, 25))
    hashes = hashed(tokens, BLOCK)
    with shards(2, blocks_per_slot=3) as it:
        it.engine.add("grows", hashes[:1])
        it.engine.admit("grows", 4, 4, after=READY)
        it.compute("grows", tokens[:4])
        for num_blocks in range(2, 7):
            it.engine.step(["grows"], [BLOCK])
            it.engine.extend("grows", hashes[num_blocks - 1 : num_blocks])
            it.compute("grows", tokens[: num_blocks * BLOCK])
            assert it.landed().num_stored_blocks == (3 if num_blocks % 3 == 0 else 0)
        it.engine.finish("grows")
        it.forget()
        assert it.admit("again", [*tokens, 9]) is LOADS
        it.landed()
        it.assert_cached("again", tokens)


def test_slot_is_a_run_of_host_memory() -> None:
    with shards(2, blocks_per_slot=4) as it:
        for rank, arena in enumerate(it.engine.arenas):
            block_bytes = 2 * BLOCK * (3 + rank) * 4
            assert (arena.num_slots, arena.slot_bytes) == (64 * 4, block_bytes)
            assert arena.slot_stride_bytes == 1024, "four slots share a page"
            assert arena.base_address % 4096 == 0


# -- one rank of two ---------------------------------------------------------------------------


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_request_recomputes_if_its_load_fails_on_one_rank(bad_rank: int) -> None:
    with shards(2, mover=ManualMover) as it:
        it.put_on_the_host(DOCUMENT)
        assert it.admit("again", [*DOCUMENT, 7]) is LOADS
        it.movers[1 - bad_rank].loads[0].land()
        assert it.engine.poll() == NOTHING, "one rank still copies"
        it.movers[bad_rank].loads[0].fail()
        assert it.engine.poll() == Landed([], ["again"], 0, 0)
        assert it.admit("again", [*DOCUMENT, 7]) is RUNS
        assert it.engine.stats()["failed_loads"] == 1
        it.compute("again", [*DOCUMENT, 7])
        it.engine.finish("again")
        it.forget()
        # The host still has the blocks.
        assert it.admit("next", [*DOCUMENT, 8]) is LOADS
        for mover in it.movers:
            mover.loads[-1].land()
        it.landed()
        it.assert_cached("next", DOCUMENT)


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_store_that_fails_on_one_rank_gives_no_hit(bad_rank: int) -> None:
    with shards(2, mover=ManualMover, blocks_per_slot=2) as it:
        it.admit("writer", DOCUMENT)
        it.compute("writer", DOCUMENT)
        it.movers[bad_rank].stores[0].fail()
        assert it.engine.poll() == NOTHING
        it.movers[1 - bad_rank].stores[0].land()
        assert it.engine.poll() == Landed([], [], 0, 1)
        it.engine.finish("writer")
        it.forget()
        assert it.admit("again", [*DOCUMENT, 7]) is RUNS


@pytest.mark.parametrize("late_rank", [0, 1])
@pytest.mark.parametrize("blocks_per_slot", [1, 2])
def test_blocks_stay_pinned_until_the_last_rank_has_ended(
    late_rank: int, blocks_per_slot: int
) -> None:
    with shards(
        2,
        num_device_blocks=9,
        mover=ManualMover,
        load_timeout_s=5.0,
        blocks_per_slot=blocks_per_slot,
    ) as it:
        it.put_on_the_host(DOCUMENT)
        assert it.admit("again", [*DOCUMENT, 7]) is LOADS
        it.movers[1 - late_rank].loads[0].land()
        it.now_s = 5.1
        assert it.engine.poll() == Landed([], ["again"], 0, 0)
        assert it.engine.stats()["quarantined_blocks"] == 4
        assert it.engine.ledger.pool.num_free == 4
        assert it.admit("again", [*DOCUMENT, 7]) is NO_ROOM
        other = list(range(50, 66))
        assert it.admit("other", other) is RUNS
        it.compute("other", other)

        it.movers[late_rank].loads[0].land()
        assert it.engine.poll() == NOTHING, "no request waits for it any more"
        it.assert_cached("other", other)
        assert it.engine.stats()["quarantined_blocks"] == 0
        it.engine.finish("other")
        for mover in it.movers:
            mover.stores[-1].land()
        it.engine.poll()
        assert it.engine.ledger.pool.num_free == 8


def test_close_ends_the_copies_of_every_rank() -> None:
    with shards(2, mover=ManualMover) as it:
        it.put_on_the_host(DOCUMENT)
        it.admit("again", [*DOCUMENT, 7])
        it.movers[0].loads[0].land()
        it.engine.close()
        assert all(arena.closed for arena in it.engine.arenas)
        assert not it.engine.transfers


# -- building ----------------------------------------------------------------------------------


def layout(num_blocks: int = 8) -> BlockLayout:
    return BlockLayout.from_arrays([np.zeros((num_blocks, 8), np.uint8)])


FULL = [FullAttention(4)]
WINDOWED = [FullAttention(4), SlidingWindow(4, 8)]


@pytest.mark.parametrize(
    ("groups", "layouts", "options", "problem"),
    [
        (FULL, [layout()], {"world_size": 2}, "world_size is 2 but layouts has length 1;"),
        (FULL, [layout()], {"world_size": 0}, "world_size is 0, outside 1 to"),
        (FULL, [layout()] * 2, {"world_size": 2}, r"world_size is 2 and layouts\[0\] is no list"),
        (FULL, [[layout()]], {}, "world_size is 1 and layouts is no list of BlockLayout"),
        (FULL, 3, {"world_size": 2}, r"layouts\[0\] is no list of BlockLayout, but of type int"),
        (FULL, layout(), {}, "no list of BlockLayout, but of type BlockLayout; pass"),
        (FULL, [np.zeros((8, 8))], {}, r"but a list of \['ndarray'\].*from_arrays"),
        (FULL, [[layout()], []], {"world_size": 2}, r"groups .* 1 but layouts\[1\] has length 0"),
        (FULL, [[layout()], [layout(7)]], {"world_size": 2}, r"layouts\[1\]\[0\] has .* 7 blocks"),
        (FULL, [[layout()]] * 2, {"world_size": 2}, r"layouts\[1\] and layouts\[0\] name the same"),
        (FULL, [layout()], {"mover": lambda *_: None}, "mover made None, expected a Mover"),
        (FULL, [layout()], {"blocks_per_slot": 0}, "0 blocks per slot: it must be 1 to 1024"),
        (FULL, [layout()], {"blocks_per_slot": 2000}, "2000 blocks per slot"),
        (WINDOWED, [layout()] * 2, {"blocks_per_slot": 2}, "2 blocks per slot with a group that"),
        (
            FULL,
            [layout()],
            {"blocks_per_slot": 2, "mode": "lazy", "horizon_blocks": 4},
            "2 blocks per slot in lazy mode.*take 1, or the eager mode",
        ),
    ],
)
def test_constructor_names_the_wrong_layout_and_leaves_no_thread(
    groups: list[FullAttention | SlidingWindow],
    layouts: list[BlockLayout],
    options: dict[str, object],
    problem: str,
) -> None:
    num_threads = threading.active_count()
    with pytest.raises(ConfigError, match=problem):
        Engine(8, 8, groups, layouts, **options)  # type: ignore[arg-type]
    assert threading.active_count() <= num_threads


def test_failed_constructor_closes_the_ranks_it_made() -> None:
    built: list[Mover] = []

    def make(layout: BlockLayout, arena: HostArena) -> Mover:
        if len(built) == 3:
            raise ConfigError("no fourth one")
        built.append(HostMover(layout, arena))
        return built[-1]

    maker: MakeMover = make
    num_threads = threading.active_count()
    layouts = [[layout(), layout()], [layout(), layout()]]
    with pytest.raises(ConfigError, match="no fourth one"):
        Engine(8, 8, [FullAttention(4)] * 2, layouts, world_size=2, mover=maker)
    assert threading.active_count() <= num_threads
    assert all(mover.arena.closed for mover in built)
    assert built[0].arena is built[1].arena is not built[2].arena, "one arena for each rank"
