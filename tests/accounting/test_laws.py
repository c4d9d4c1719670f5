"""Laws of two tiers on a real trace, in pure accounting: whole blocks, one request after the other.

A request uses the whole blocks of its prompt: what the device has, then what the host has right
after it, then what it computes. Copies land before the next request comes.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from functools import cache

import pytest

from kvstow import BlockPool, FullAttention, OffloadScheduler
from kvstow.replay import BUNDLED_TRACE, read_trace
from kvstow.replay.keys import block_digests

NEVER_FULL = 30_000
"""Slots: more than the trace has distinct blocks."""


@cache
def block_size() -> int:
    return read_trace(BUNDLED_TRACE, limit=1).block_size


@cache
def prompts() -> list[list[bytes]]:
    """The hashes of each prompt's whole blocks; prompts shorter than a block are left out."""
    trace, size = read_trace(BUNDLED_TRACE), block_size()
    whole = [block_digests(one, size)[: one.prompt_tokens // size] for one in trace.requests]
    return [hashes for hashes in whole if hashes]


def longest() -> int:
    return max(map(len, prompts()))


def test_the_slice_can_tell_laws_apart() -> None:
    """Prompts share blocks, tiers of the sizes below fill up, and every prompt fits the device."""
    distinct = {hash for hashes in prompts() for hash in hashes}
    assert longest() <= min(DEVICES)
    assert max(DEVICES) < len(distinct) < NEVER_FULL
    assert sum(map(len, prompts())) > len(distinct) * 5 // 4


class OneTier:
    """The oracle: keys in the order of their last use, a prompt's tail before its root."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.keys: OrderedDict[bytes, None] = OrderedDict()

    def serve(self, hashes: list[bytes]) -> int:
        """How many leading blocks of a prompt are here; then all of it has been used."""
        missing = (at for at, hash in enumerate(hashes) if hash not in self.keys)
        num_hits = next(missing, len(hashes))
        for hash in reversed(hashes):
            self.keys[hash] = None
            self.keys.move_to_end(hash)
        while len(self.keys) > self.num_blocks:
            self.keys.popitem(last=False)
        return num_hits


@dataclass(frozen=True)
class Served:
    """Blocks of one prompt that each tier had."""

    device: int
    host: int

    @property
    def together(self) -> int:
        return self.device + self.host


class TwoTiers:
    """A device's pool and a host tier. With a horizon, in blocks, stores are lazy."""

    def __init__(self, num_device: int, num_host: int, horizon: int | None = None) -> None:
        self.pool = BlockPool(num_device + 1)
        self.horizon = horizon
        self.scheduler = OffloadScheduler(
            num_host, [FullAttention(block_size())], mode="lazy" if horizon else "eager"
        )

    def serve(self, hashes: list[bytes]) -> Served:
        pool, scheduler, size = self.pool, self.scheduler, block_size()
        scheduler.add("one", hashes)
        hit = pool.lookup(hashes).tolist()
        num_found = scheduler.lookup("one", len(hit) * size, len(hashes) * size)
        assert num_found is not None, "nothing else is being loaded"
        pool.touch(hit)
        table = hit + pool.allocate(len(hashes) - len(hit)).tolist()
        if num_found:
            load = scheduler.load("one", num_found, [table[len(hit) : len(hit) + num_found // size]])
            scheduler.complete(load.job_id)
        pool.cache(table, hashes)
        store = scheduler.store(["one"], [len(hashes) * size], table, [0, len(table)])
        scheduler.finish("one")
        pool.free(table[::-1])
        if self.horizon:
            assert store is None
            store = scheduler.store_evictable(pool, self.horizon)
        if store is not None:
            scheduler.complete(store.job_id)
        return Served(len(hit), num_found // size)

    def serve_all(self) -> list[Served]:
        """Every prompt of the slice, in order; invariants are checked now and then."""
        served = []
        for number, hashes in enumerate(prompts()):
            served.append(self.serve(hashes))
            if number % 50 == 0:
                self.check()
        self.check()
        return served

    def check(self) -> None:
        self.pool.check()
        self.scheduler.check()

    def stat(self, name: str) -> int:
        return self.scheduler.stats()[name]


DEVICES = (240, 600, 2000)


@pytest.mark.parametrize("num_host", [300, 1000, 5000, NEVER_FULL])
@pytest.mark.parametrize("num_device", DEVICES)
def test_two_inclusive_tiers_hit_what_one_lru_of_the_larger_hits(
    num_device: int, num_host: int
) -> None:
    """Request by request, and the device alone hits what one LRU of its own size hits.

    Inclusive means: whatever a request computes or loads is stored on the host too before it
    leaves, and the host learns of each use, also of one that the device served alone (`finish`
    ranks the whole chain). So both tiers rank the same blocks by the same uses, each prompt's root
    most recent, and after every request each holds the most recent ones of one common order, as
    many as it has room for: the smaller tier is a part of the larger, and what the two hold
    together is what the larger holds.

    It holds without a remainder because each of its conditions does: no prompt is larger than a
    tier (of one that is, the host would keep the first blocks, an LRU the last ones used); nothing
    is pinned when room is made but the prompt's own blocks, which one LRU would not evict for it
    either; and the least recent block is always a leaf, so that leaves alone may go costs nothing.
    """
    both = TwoTiers(num_device, num_host).serve_all()
    device, larger = OneTier(num_device), OneTier(max(num_device, num_host))
    assert [one.device for one in both] == [device.serve(hashes) for hashes in prompts()]
    assert [one.together for one in both] == [larger.serve(hashes) for hashes in prompts()]
    # A host no larger than the device has nothing to add.
    assert (sum(one.host for one in both) > 0) == (num_host > num_device)


@pytest.mark.parametrize("num_device", DEVICES)
@pytest.mark.parametrize("num_host", [NEVER_FULL, 5000, 1000])
def test_lazy_stores_no_more_than_eager(num_device: int, num_host: int) -> None:
    eager = TwoTiers(num_device, num_host)
    lazy = TwoTiers(num_device, num_host, horizon=longest())
    eager.serve_all()
    lazy.serve_all()
    assert 0 < lazy.stat("stored_blocks") <= eager.stat("stored_blocks")


@pytest.mark.parametrize("num_device", DEVICES)
@pytest.mark.parametrize("covers", ["the whole device", "the largest prompt"])
def test_with_a_host_that_never_fills_lazy_serves_what_eager_serves(
    num_device: int, covers: str
) -> None:
    """A block that leaves the device has been stored, if the horizon covers what one request takes.

    Eager stores each block once. Lazy stores the same with the whole device in view, as a prompt's
    blocks are all in the free queue when it has left; with less in view it spares those that the
    device has still in hand when the trace ends.
    """
    horizon = num_device if covers == "the whole device" else longest()
    eager = TwoTiers(num_device, NEVER_FULL)
    lazy = TwoTiers(num_device, NEVER_FULL, horizon)
    assert lazy.serve_all() == eager.serve_all()
    num_distinct = len({hash for hashes in prompts() for hash in hashes})
    assert eager.stat("stored_blocks") == num_distinct
    assert eager.stat("evicted_blocks") == lazy.stat("evicted_blocks") == 0
    num_spared = max(0, num_device - horizon)
    assert num_distinct - num_spared <= lazy.stat("stored_blocks") <= num_distinct
