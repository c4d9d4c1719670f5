"""Lazy mode of `OffloadScheduler`: stores of blocks that the device is about to evict."""

from __future__ import annotations

import pytest
from tests.accounting.offload_rig import ALL, BLOCK_SIZE, GROUP, hashes, some

from kvstow import (
    BlockLedger,
    BlockPool,
    ConfigError,
    OffloadScheduler,
    StateError,
)


class LazyRig:
    """A device pool whose blocks hold names, and a lazy scheduler beside it."""

    def __init__(self, num_device_blocks: int, num_host_blocks: int) -> None:
        self.ledger = BlockLedger(num_device_blocks, [GROUP])
        self.scheduler = OffloadScheduler(num_host_blocks, [GROUP], mode="lazy")

    def serve(self, id: str, prompt: str) -> None:
        """A request computes its prompt and leaves."""
        for part in (self.ledger, self.scheduler):
            part.add(id, hashes(prompt))
        hit = self.ledger.lookup(id, ALL)
        num_new = len(prompt) * BLOCK_SIZE - hit.num_tokens
        assert self.ledger.allocate(id, num_new, hit=hit) is not None
        table = self.ledger.block_table(id)
        assert (
            self.scheduler.store([id], [len(prompt) * BLOCK_SIZE], table, [0, len(table)]) is None
        )
        self.scheduler.finish(id)
        self.ledger.free(id)

    def store(self, num_blocks: int) -> list[int]:
        """Store what is due of the next `num_blocks`, and return the block ids."""
        order = self.ledger.pool.free_order().tolist()
        job = self.scheduler.store_evictable(self.ledger.pool, num_blocks)
        assert self.ledger.pool.free_order().tolist() == order
        if job is None:
            return []
        assert some(self.scheduler.complete(job.job_id)).ok
        self.scheduler.check()
        stored: list[int] = job.block_ids.tolist()
        return stored

    def found(self, prompt: str) -> int:
        self.scheduler.add("probe", hashes(prompt))
        num_tokens = self.scheduler.lookup("probe", 0, ALL)
        self.scheduler.finish("probe")
        assert num_tokens is not None
        return num_tokens // BLOCK_SIZE


def test_lazy_stores_the_next_evictions_up_to_the_horizon() -> None:
    rig = LazyRig(9, 16)
    rig.serve("first", "abcd")
    # The queue begins with the four unused blocks, then the prompt, its tail first.
    assert rig.ledger.pool.free_order().tolist() == [5, 6, 7, 8, 4, 3, 2, 1]
    assert rig.store(4) == []
    assert rig.store(6) == [3, 4]
    assert rig.found("abcd") == 0, "its root is only on the device"
    assert rig.store(6) == []
    assert rig.store(8) == [1, 2]
    assert rig.found("abcd") == 4


def test_lazy_and_eager_skip_blocks_on_the_host_or_in_flight() -> None:
    scheduler = OffloadScheduler(16, [GROUP], mode="lazy")
    scheduler.add("a", hashes("ab"))
    scheduler.store(["a"], [2 * BLOCK_SIZE], [1, 2], [0, 2])
    scheduler.add("b", hashes("ab"))
    scheduler.store(["b"], [2 * BLOCK_SIZE], [3, 4], [0, 2])
    # Two blocks hold each key. One is stored, also while the first store is in flight.
    first = some(scheduler.store_candidates([2, 4, 1], [hashes("ab")[at] for at in (1, 1, 0)]))
    assert first.block_ids.tolist() == [1, 2]
    assert scheduler.store_candidates([3], hashes("a")) is None
    scheduler.complete(first.job_id)
    assert scheduler.store_candidates([1, 2, 3, 4], hashes("ab") * 2) is None
    scheduler.check()


def test_lazy_stores_only_computed_blocks() -> None:
    scheduler = OffloadScheduler(16, [GROUP], mode="lazy")
    scheduler.add("a", hashes("abc"))
    scheduler.store(["a"], [2 * BLOCK_SIZE - 1], [1, 2], [0, 2])
    # Block 2 is not full, 3 was never reported, and 1 does not hold this hash.
    assert scheduler.store_candidates([2, 3], hashes("abc")[1:]) is None
    assert scheduler.store_candidates([1], hashes("x")) is None
    assert len(some(scheduler.store_candidates([1], hashes("a")))) == 1


def test_hashes_of_candidates_may_have_a_suffix() -> None:
    """vLLM's keys end with the group."""
    scheduler = OffloadScheduler(16, [GROUP], mode="lazy")
    scheduler.add("a", hashes("ab"))
    scheduler.store(["a"], [2 * BLOCK_SIZE], [1, 2], [0, 2])
    a, b = (each + b"\0\0\0\7" for each in hashes("ab"))
    assert scheduler.store_candidates([2, 1], [a, b], suffix_bytes=4) is None, "swapped"
    assert some(scheduler.store_candidates([2, 1], [b, a], suffix_bytes=4)).has_all_ids
    with pytest.raises(ConfigError, match="0 bytes: use hashes of 1 to 32"):
        scheduler.store_candidates([1], [a], suffix_bytes=len(a))


def test_failed_lazy_store_is_planned_again() -> None:
    rig = LazyRig(5, 16)
    rig.serve("a", "ab")
    job = some(rig.scheduler.store_evictable(rig.ledger.pool, 4))
    assert rig.scheduler.store_evictable(rig.ledger.pool, 4) is None
    assert not some(rig.scheduler.complete(job.job_id, ok=False)).ok
    assert rig.store(4) == job.block_ids.tolist()
    rig.scheduler.reset()
    assert rig.store(4) == job.block_ids.tolist()


def test_lazy_stores_the_next_evictions_if_slots_are_short() -> None:
    rig = LazyRig(6, 2)
    rig.serve("a", "abcd")
    assert rig.store(5) == [3, 4]


def test_lazy_looks_again_at_each_block_that_got_no_slot() -> None:
    """Also at one that has the key of a block before it, which the device may overwrite first."""
    scheduler = OffloadScheduler(1, [GROUP], mode="lazy")
    for block_id, prompt in enumerate("xaa", 1):
        scheduler.add("request", hashes(prompt))
        scheduler.store(["request"], [BLOCK_SIZE], [block_id], [0, 1])
        scheduler.finish("request")
    first = some(scheduler.store_candidates([1, 2, 3], [hashes(it)[0] for it in "xaa"]))
    assert first.block_ids.tolist() == [1]
    scheduler.complete(first.job_id)
    again = some(scheduler.store_candidates([3], hashes("a")))
    assert again.block_ids.tolist() == [3]
    scheduler.check()


def test_lazy_never_evicts_the_parent_of_a_stored_block() -> None:
    """A prompt's tail reaches the host before its root, and is evicted before it."""
    rig = LazyRig(9, 4)
    rig.serve("first", "abcd")
    rig.store(8)
    rig.serve("second", "wx")
    rig.store(2)
    assert rig.found("abcd") == 4, "no store needed more room"
    rig.store(8)
    assert (rig.found("abcd"), rig.found("wx")) == (2, 2)


def test_lazy_passes_over_pinned_blocks() -> None:
    rig = LazyRig(5, 16)
    rig.serve("a", "ab")
    rig.ledger.pool.pin([1])
    assert rig.store(4) == [2]
    rig.ledger.pool.unpin([1])
    assert rig.store(4) == [1]


def test_lazy_never_evicts_the_stored_parent_of_a_block_that_needs_room() -> None:
    """Its parent is the least recent of all slots, and a hit needs both."""
    rig = LazyRig(9, 2)
    for prompt in "ax":
        rig.serve(prompt, prompt)
        assert len(rig.store(8)) == 1
    rig.scheduler.add("b", hashes("ab"))
    rig.scheduler.store(["b"], [2 * BLOCK_SIZE], [1, 7], [0, 2])
    job = some(rig.scheduler.store_candidates([7], hashes("ab")[1:]))
    rig.scheduler.complete(job.job_id)
    rig.scheduler.check()
    assert (rig.found("ab"), rig.found("x")) == (2, 0)


def test_eager_scheduler_refuses_lazy_stores() -> None:
    scheduler, pool = OffloadScheduler(4, [GROUP]), BlockPool(4)
    with pytest.raises(StateError, match="eager"):
        scheduler.store_evictable(pool, 4)
    with pytest.raises(StateError, match="eager"):
        scheduler.store_candidates([], [])
    with pytest.raises(ConfigError, match="1 blocks and 0 hashes"):
        scheduler.store_candidates([1], [])


def test_lazy_stores_a_block_again_that_was_used_after_its_eviction() -> None:
    rig = LazyRig(9, 2)
    rig.serve("first", "ab")
    assert rig.store(8) == [1, 2]
    rig.serve("other", "yz")
    assert len(rig.store(8)) == 2
    assert rig.found("ab") == 0
    assert rig.store(8) == [], "an unused block is not stored twice"
    rig.serve("again", "ab")
    assert rig.store(8) == [1, 2]
    assert rig.found("ab") == 2
