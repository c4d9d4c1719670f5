"""`OffloadScheduler` with windows, several groups, and slots of several blocks."""

from __future__ import annotations

import pytest
from tests.accounting.offload_rig import ALL, BLOCK_SIZE, GROUP, hashes, some

from kvstow import (
    ChunkedLocal,
    ConfigError,
    FullAttention,
    InvalidBlock,
    OffloadScheduler,
    SlidingWindow,
    StateError,
    StateSpace,
)

WINDOW = SlidingWindow(BLOCK_SIZE, 2 * BLOCK_SIZE)


def test_load_of_a_window_takes_only_the_blocks_that_are_read() -> None:
    """Two blocks cover what a token after a full block reads of a window of two blocks."""
    scheduler = OffloadScheduler(16, [GROUP, WINDOW])
    scheduler.add("a", hashes("abcd"))
    table = [[1, 2, 3, 4], [5, 6, 7, 8]]
    store = some(scheduler.store(["a"], [4 * BLOCK_SIZE], [*table[0], *table[1]], [0, 4, 8]))
    assert store.offsets.tolist() == [0, 4, 8]
    assert store.block_ids.tolist() == [*table[0], *table[1]]
    scheduler.complete(store.job_id)
    scheduler.add("b", hashes("abcdx"))
    assert scheduler.lookup("b", 0, ALL) == 4 * BLOCK_SIZE
    for targets in ([[11, 12, 13, 14], [15, 16, 17, 18]], [[11, 12, 13, 14]]):
        with pytest.raises(ConfigError, match="group"):
            scheduler.load("b", 4 * BLOCK_SIZE, targets)
    load = scheduler.load("b", 4 * BLOCK_SIZE, [[11, 12, 13, 14], [17, 18]])
    assert load.offsets.tolist() == [0, 4, 6]
    slot_of = dict(zip(store.block_ids.tolist(), store.host_slots.tolist(), strict=True))
    assert load.host_slots.tolist() == [slot_of[id] for id in (1, 2, 3, 4, 7, 8)]
    scheduler.check()


def test_lookup_needs_no_local_block_of_a_window_on_the_host() -> None:
    """Also where a later block is missing, so that the hit ends before it."""
    scheduler = OffloadScheduler(16, [SlidingWindow(BLOCK_SIZE, 3 * BLOCK_SIZE)])
    scheduler.add("a", hashes("abcd"))
    store = some(scheduler.store(["a"], [4 * BLOCK_SIZE], [0, 0, 3, 0], [0, 4]))
    assert store.block_ids.tolist() == [3]
    scheduler.complete(store.job_id)
    scheduler.add("b", hashes("abcd"))
    assert scheduler.lookup("b", 2 * BLOCK_SIZE, ALL) == BLOCK_SIZE
    assert scheduler.lookup("b", BLOCK_SIZE, ALL) == 0
    scheduler.check()


def test_shorter_load_is_refused_where_the_host_lacks_its_window() -> None:
    """Its window begins before the one that lookup held."""
    scheduler = OffloadScheduler(16, [WINDOW])
    scheduler.add("a", hashes("abcd"))
    store = some(scheduler.store(["a"], [4 * BLOCK_SIZE], [0, 0, 3, 4], [0, 4]))
    scheduler.complete(store.job_id)
    scheduler.add("b", hashes("abcd"))
    assert scheduler.lookup("b", 0, ALL) == 4 * BLOCK_SIZE
    for num_blocks in (2, 3):
        with pytest.raises(StateError, match="not on the host in group 0"):
            scheduler.load("b", num_blocks * BLOCK_SIZE, [[11, 12]])
    load = scheduler.load("b", 4 * BLOCK_SIZE, [[11, 12]])
    assert load.host_slots.tolist() == store.host_slots.tolist()
    scheduler.check()


def test_key_that_a_window_lists_twice_is_stored_once() -> None:
    scheduler = OffloadScheduler(4, [WINDOW])
    scheduler.add("a", [b"a" * 8] * 2)
    store = some(scheduler.store(["a"], [2 * BLOCK_SIZE], [1, 2], [0, 2]))
    assert store.block_ids.tolist() == [1]
    scheduler.check()
    assert some(scheduler.complete(store.job_id)).ok
    assert scheduler.num_resident == 1
    scheduler.check()


def test_null_blocks_are_never_stored() -> None:
    scheduler = OffloadScheduler(16, [GROUP, WINDOW])
    scheduler.add("a", hashes("abcd"))
    with pytest.raises(InvalidBlock, match="null"):
        scheduler.store(["a"], [BLOCK_SIZE], [0, 5], [0, 1, 2])
    table = [1, 2, 3, 4, 0, 0, 7, 8]
    store = some(scheduler.store(["a"], [4 * BLOCK_SIZE], table, [0, 4, 8]))
    assert store.block_ids.tolist() == [1, 2, 3, 4, 7, 8]
    scheduler.check()


def test_lookup_ends_where_a_group_cannot_serve() -> None:
    scheduler = OffloadScheduler(16, [GROUP, WINDOW])
    scheduler.add("a", hashes("abcd"))
    # Of the window, only the first two blocks reached the host.
    store = some(scheduler.store(["a"], [2 * BLOCK_SIZE], [1, 2, 5, 6], [0, 2, 4]))
    scheduler.complete(store.job_id)
    store = some(scheduler.store(["a"], [4 * BLOCK_SIZE], [3, 4, 0, 0], [0, 2, 4]))
    scheduler.complete(store.job_id)
    scheduler.add("b", hashes("abcde"))
    assert scheduler.lookup("b", 0, ALL) == 2 * BLOCK_SIZE
    # Blocks on the device need not come from the host.
    assert scheduler.lookup("b", 3 * BLOCK_SIZE, ALL) == 0


@pytest.mark.parametrize("num_blocks", range(1, 8))
def test_only_whole_slots_of_several_blocks_are_stored(num_blocks: int) -> None:
    """With three blocks a slot, blocks that do not fill one are neither stored nor found."""
    scheduler = OffloadScheduler(4, [GROUP], blocks_per_slot=3)
    prompt = "abcdefg"[:num_blocks]
    scheduler.add("a", hashes(prompt))
    table = list(range(1, num_blocks + 1))
    job = scheduler.store(["a"], [num_blocks * BLOCK_SIZE], table, [0, num_blocks])
    num_whole = num_blocks // 3 * 3
    if job is not None:
        assert job.block_ids.tolist() == table[:num_whole]
        places = job.host_slots.reshape(-1, 3)
        assert (places % 3 == [0, 1, 2]).all()
        assert (places // 3 == places[:, :1] // 3).all(), "side by side"
        scheduler.complete(job.job_id)
    assert scheduler.num_resident == num_whole // 3
    scheduler.add("b", hashes(prompt + "x"))
    assert scheduler.lookup("b", 0, ALL) == num_whole * BLOCK_SIZE
    scheduler.check()


def test_load_from_a_slot_of_several_blocks_takes_only_the_missing_ones() -> None:
    scheduler = OffloadScheduler(4, [GROUP], blocks_per_slot=3)
    scheduler.add("a", hashes("abcdef"))
    store = some(scheduler.store(["a"], [6 * BLOCK_SIZE], range(1, 7), [0, 6]))
    scheduler.complete(store.job_id)
    scheduler.add("b", hashes("abcdefg"))
    assert scheduler.lookup("b", BLOCK_SIZE, ALL) == 5 * BLOCK_SIZE
    load = scheduler.load("b", 3 * BLOCK_SIZE, [[11, 12, 13]])
    assert load.host_slots.tolist() == store.host_slots.tolist()[1:4]
    assert some(scheduler.complete(load.job_id)).block_ids.tolist() == [11, 12, 13]
    assert scheduler.stats()["loaded_blocks"] == 3
    assert scheduler.stats()["stored_blocks"] == 6
    scheduler.check()


@pytest.mark.parametrize(
    ("groups", "blocks_per_slot", "num_tokens"),
    [
        ([FullAttention(4)], 1, 40),
        ([FullAttention(4)], 3, 120),
        # 12 tokens are 3 blocks of 4 and 2 of 6, and 10 slots hold these twice.
        ([FullAttention(4), SlidingWindow(6, 20)], 1, 24),
        ([FullAttention(4), FullAttention(4)], 2, 40),
    ],
)
def test_capacity_in_tokens_counts_the_blocks_of_all_groups(
    groups: list[FullAttention | SlidingWindow], blocks_per_slot: int, num_tokens: int
) -> None:
    scheduler = OffloadScheduler(10, groups, blocks_per_slot=blocks_per_slot)
    assert scheduler.stats()["capacity_tokens"] == num_tokens


def test_impossible_blocks_per_slot_are_refused() -> None:
    with pytest.raises(ConfigError, match="0 blocks per slot"):
        OffloadScheduler(4, [GROUP], blocks_per_slot=0)
    with pytest.raises(ConfigError, match="2 blocks per slot in lazy mode"):
        OffloadScheduler(4, [GROUP], blocks_per_slot=2, mode="lazy")
    with pytest.raises(ConfigError, match="at most"):
        OffloadScheduler(2**30, [GROUP], blocks_per_slot=4)
    for group in (WINDOW, ChunkedLocal(BLOCK_SIZE, 8), StateSpace(BLOCK_SIZE)):
        with pytest.raises(ConfigError, match="2 blocks per slot with a group that skips"):
            OffloadScheduler(4, [GROUP, group], blocks_per_slot=2)


@pytest.mark.parametrize("finished_first", [False, True])
def test_evictions_from_a_hybrid_leave_a_shorter_prefix_in_every_group(
    finished_first: bool,
) -> None:
    scheduler = OffloadScheduler(8, [GROUP, WINDOW])
    scheduler.add("old", hashes("abcd"))
    table = [1, 2, 3, 4, 5, 6, 7, 8]
    job = some(scheduler.store(["old"], [4 * BLOCK_SIZE], table, [0, 4, 8]))
    if finished_first:
        scheduler.finish("old")
    scheduler.complete(job.job_id)
    if not finished_first:
        scheduler.finish("old")
    # It needs a block of each group, so the last of each is evicted.
    scheduler.add("new", hashes("x"))
    job = some(scheduler.store(["new"], [BLOCK_SIZE], [9, 10], [0, 1, 2]))
    assert len(job) == 2
    scheduler.add("probe", hashes("abcde"))
    assert scheduler.lookup("probe", 0, ALL) == 3 * BLOCK_SIZE
    scheduler.check()
