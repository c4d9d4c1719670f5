"""Streaming sessions replace their last tokens, and steps overwrite device blocks.

The content of a block is the hash that its KV was computed for, or "torn" before its step has run.
A block that is stored under the hash of another content would serve wrong KV.
"""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstow import (
    BlockLedger,
    ConfigError,
    FullAttention,
    InvalidBlock,
    Job,
    OffloadScheduler,
    SlidingWindow,
    StateError,
    UnknownRequest,
)

BLOCK = 4
ALL = 2**40
GROUP = FullAttention(BLOCK)
WINDOW = SlidingWindow(BLOCK, 2 * BLOCK)
TORN = b"torn"
NUM_DEVICE_BLOCKS = 12

Mode = Literal["eager", "lazy"]


class Sessions:
    """Sessions, one after the other. The device pool publishes hashes when it grants blocks."""

    def __init__(self, mode: Mode) -> None:
        self.tier = OffloadScheduler(200, [GROUP], mode=mode)
        self.lazy = mode == "lazy"
        self.device: dict[int, bytes] = {}
        self.published: dict[int, bytes] = {}
        self.host: dict[int, bytes] = {}
        self.num_names = self.num_sessions = 0
        self.ever: list[list[bytes]] = []
        self.begin()

    def begin(self) -> None:
        self.hashes: list[bytes] = []
        self.table: list[int] = []
        self.num_reported = 0
        self.id = f"session {self.num_sessions}"
        self.tier.add(self.id, [])

    def new_names(self, num: int) -> list[bytes]:
        first = self.num_names
        self.num_names += num
        return [name.to_bytes(8, "big") for name in range(first, self.num_names)]

    def grant(self, names: list[bytes]) -> list[int]:
        """Grant and publish blocks for these hashes. No step has filled them yet."""
        free = [block for block in range(1, NUM_DEVICE_BLOCKS) if block not in self.table]
        granted = free[: len(names)]
        for block, name in zip(granted, names, strict=False):
            self.device[block], self.published[block] = TORN, name
        self.tier.invalidate(granted)
        return granted

    def grow(self, num: int) -> None:
        names = self.new_names(num)
        granted = self.grant(names)
        names = names[: len(granted)]
        self.hashes += names
        self.table += granted
        self.tier.extend(self.id, names)
        self.compute(len(self.hashes) - len(names))

    def compute(self, first: int) -> None:
        """Fill the blocks from `first` on, as a step does, and report them."""
        self.device |= dict(zip(self.table[first:], self.hashes[first:], strict=True))
        self.ever.append(list(self.hashes))
        new = self.table[self.num_reported :]
        self.num_reported = len(self.table)
        self.land(self.tier.store([self.id], [len(self.table) * BLOCK], new, [0, len(new)]))

    def replace(self, num: int) -> None:
        """Give the last blocks other tokens, and compute them again in place."""
        first = max(len(self.hashes) - num, 0)
        if first == len(self.hashes):
            return
        self.tier.truncate(self.id, first)
        names = self.new_names(len(self.hashes) - first)
        self.hashes[first:] = names
        self.published |= dict(zip(self.table[first:], names, strict=True))
        self.tier.invalidate(self.table[first:])
        self.tier.extend(self.id, names)
        self.compute(first)

    def abort(self, num: int) -> None:
        """Grant blocks to a request with known hashes, which leaves before its step."""
        if self.ever:
            self.grant(self.ever[-1][:num])

    def finish(self) -> None:
        self.tier.finish(self.id)
        self.num_sessions += 1
        self.begin()

    def evictable(self) -> None:
        if self.lazy:
            blocks = [block for block in self.published if block not in self.table]
            hashes = [self.published[block] for block in blocks]
            self.land(self.tier.store_candidates(blocks, hashes))

    def land(self, job: Job | None) -> None:
        if job is not None:
            for block, slot in zip(job.block_ids.tolist(), job.host_slots.tolist(), strict=True):
                self.host[slot] = self.device[block]
            self.tier.complete(job.job_id)
        self.tier.check()

    def check_served(self, hashes: list[bytes]) -> int:
        """Load a prompt, check that each block has the content of its hash, and return how many."""
        self.tier.add("probe", hashes)
        num_tokens = self.tier.lookup("probe", 0, ALL)
        assert num_tokens is not None
        if num_tokens:
            job = self.tier.load("probe", num_tokens, [range(100, 100 + num_tokens // BLOCK)])
            served = [self.host[slot] for slot in job.host_slots.tolist()]
            assert served == hashes[: num_tokens // BLOCK]
            self.tier.complete(job.job_id)
        self.tier.finish("probe")
        return num_tokens // BLOCK


count = st.integers(1, 4)
ops = st.one_of(
    st.tuples(st.sampled_from(["grow", "replace", "abort"]), count),
    st.tuples(st.sampled_from(["finish", "evictable"])),
)


@settings(max_examples=300, deadline=None)
@given(mode=st.sampled_from(["eager", "lazy"]), script=st.lists(ops, max_size=25))
def test_every_block_is_stored_under_its_own_hash(
    mode: Mode, script: list[tuple[str] | tuple[str, int]]
) -> None:
    sessions = Sessions(mode)
    for name, *args in script:
        getattr(sessions, name)(*args)
        for hashes in sessions.ever:
            sessions.check_served(hashes)
        if mode == "eager":
            assert sessions.check_served(sessions.hashes) == len(sessions.hashes), (
                "a block is not stored"
            )


def test_truncated_request_stores_new_blocks_and_keeps_stored_blocks() -> None:
    sessions = Sessions("eager")
    sessions.grow(3)
    before = list(sessions.hashes)
    sessions.replace(1)
    assert sessions.check_served(before) == 3, "the block held the right KV when it was stored"
    assert sessions.check_served(sessions.hashes) == 3


def test_truncate_releases_the_slots_of_a_lookup() -> None:
    sessions = Sessions("eager")
    sessions.grow(3)
    tier = sessions.tier
    tier.add("again", sessions.hashes)
    assert tier.lookup("again", 0, ALL) == 3 * BLOCK
    tier.truncate("again", 2)
    with pytest.raises(StateError, match="its lookup comes first"):
        tier.load("again", 3 * BLOCK, [[7, 8, 9]])
    assert tier.lookup("again", 0, ALL) == 2 * BLOCK
    tier.check()


def test_truncated_blocks_do_not_count_as_dropped() -> None:
    tier = OffloadScheduler(8, [GROUP])
    tier.add("a", [b"12345671", b"12345672", b"12345673"])
    job = tier.store(["a"], [3 * BLOCK], [1, 2, 3], [0, 3])
    assert job is not None
    tier.complete(job.job_id)
    tier.truncate("a", 1)
    tier.finish("a")
    assert tier.stats()["dropped_blocks"] == 0


@pytest.mark.parametrize("is_reset", [False, True])
def test_truncate_forgets_what_a_lazy_scheduler_would_store(is_reset: bool) -> None:
    tier = OffloadScheduler(8, [GROUP], mode="lazy")
    names = [b"12345671", b"12345672"]
    tier.add("a", names)
    tier.store(["a"], [2 * BLOCK], [1, 2], [0, 2])
    if is_reset:
        tier.reset()
    tier.truncate("a", 1)
    job = tier.store_candidates([1, 2], names)
    assert job is not None
    assert job.block_ids.tolist() == [1]


def test_truncate_refuses_more_hashes_than_are_known() -> None:
    tier = OffloadScheduler(8, [GROUP])
    tier.add("a", [b"12345678"])
    with pytest.raises(ConfigError, match="2 of 1 hashes cannot be kept"):
        tier.truncate("a", 2)
    with pytest.raises(UnknownRequest):
        tier.truncate("b", 0)


@pytest.mark.parametrize("mode", ["eager", "lazy"])
@pytest.mark.parametrize("num_kept", [0, 1, 3])
def test_blocks_of_a_window_are_not_stored_under_hashes_that_come_later(
    mode: Mode, num_kept: int
) -> None:
    """A window may have left a computed block, and another request may own it."""
    tier = OffloadScheduler(16, [WINDOW], mode=mode)
    old = [bytes([at]) * 8 for at in range(4)]
    new = [*old[:num_kept], *(bytes([16 + at]) * 8 for at in range(num_kept, 6))]
    tier.add("a", old)
    first = tier.store(["a"], [4 * BLOCK], [1, 2, 3, 4], [0, 4])
    if first is not None:
        assert mode == "eager"
        tier.complete(first.job_id)
    tier.truncate("a", num_kept)
    tier.extend("a", new[num_kept:])
    job = tier.store(["a"], [6 * BLOCK], [5, 6], [0, 2])
    if mode == "lazy":
        assert job is None
        job = tier.store_candidates([*range(1, 7)], new)
    assert job is not None
    assert set(job.block_ids.tolist()) - set(range(1, num_kept + 1)) == {5, 6}
    tier.check()


@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_blocks_of_a_window_are_not_stored_if_their_hashes_come_late(mode: Mode) -> None:
    tier = OffloadScheduler(16, [WINDOW], mode=mode)
    hashes = [bytes([at]) * 8 for at in range(5)]
    tier.add("a", hashes[:2])
    first = tier.store(["a"], [4 * BLOCK], [1, 2, 3, 4], [0, 4])
    if first is not None:
        assert first.block_ids.tolist() == [1, 2]
        tier.complete(first.job_id)
    tier.extend("a", hashes[2:])
    job = tier.store(["a"], [5 * BLOCK], [5], [0, 1])
    if mode == "lazy":
        assert job is None
        job = tier.store_candidates([3, 4, 5], hashes[2:])
    assert job is not None
    assert job.block_ids.tolist() == [5]


def test_lazy_stores_no_block_that_was_published_but_not_computed() -> None:
    """A block held one prompt, then another, and is granted for the first prompt again."""
    ledger = BlockLedger(3, [GROUP])
    tier = OffloadScheduler(8, [GROUP], mode="lazy", num_device_blocks=3)
    prompt = [b"A" * 8]

    def admit(id: str, hashes: list[bytes]) -> list[int]:
        ledger.add(id, hashes)
        tier.add(id, hashes)
        granted = ledger.allocate(id, len(hashes) * BLOCK)
        assert granted is not None
        tier.invalidate(granted[0])
        blocks: list[int] = granted[0].tolist()
        return blocks

    (first,) = admit("first", prompt)
    tier.store(["first"], [BLOCK], [first], [0, 1])
    ledger.free("first")
    tier.finish("first")
    admit("other", [b"x" * 8, b"y" * 8])
    ledger.free("other")
    tier.finish("other")
    ledger.pool.evict([1, 2])
    assert admit("again", prompt) == [first]
    # The request leaves before its step has run.
    ledger.free("again")
    tier.finish("again")
    assert tier.store_evictable(ledger.pool, 2) is None


def test_lazy_stores_no_block_that_a_failed_load_may_have_overwritten() -> None:
    tier = OffloadScheduler(8, [GROUP], mode="lazy")
    for id, name in (("a", b"A" * 8), ("b", b"B" * 8)):
        tier.add(id, [name])
        tier.store([id], [BLOCK], [1 if id == "a" else 2], [0, 1])
    job = tier.store_candidates([1], [b"A" * 8])
    assert job is not None
    tier.complete(job.job_id)
    tier.add("loads", [b"A" * 8])
    assert tier.lookup("loads", 0, ALL) == BLOCK
    load = tier.load("loads", BLOCK, [[2]])
    tier.complete(load.job_id, ok=False)
    assert tier.store_candidates([2], [b"B" * 8]) is None, "the load may have overwritten it"


def test_invalidate_refuses_blocks_outside_the_device() -> None:
    tier = OffloadScheduler(8, [GROUP], mode="lazy", num_device_blocks=4)
    with pytest.raises(InvalidBlock, match="block 4 is not in this pool"):
        tier.invalidate([1, 4])


def test_block_with_the_hash_of_its_parent_is_stored_as_a_root() -> None:
    tier = OffloadScheduler(8, [GROUP], mode="lazy")
    hashes = [b"one", b"one"]
    tier.add("r", hashes)
    tier.store(["r"], [2 * BLOCK], [1, 2], [0, 2])
    tier.finish("r")
    job = tier.store_candidates([2], hashes[:1])
    assert job is not None
    tier.complete(job.job_id)
    tier.check()
    tier.reset()
    tier.check()
