"""Laws of two tiers on a real trace, in pure accounting: whole blocks, one request after another.

A request uses the whole blocks of its prompt. It hits blocks of the device, then of the host right
after them, and computes the rest. Copies complete before the next request comes.
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
HOSTS = (600, 1000, 5000, NEVER_FULL)
DEVICES = (240, 1000, 5000)


@cache
def block_size() -> int:
    return read_trace(BUNDLED_TRACE, limit=1).block_size


@cache
def prompts() -> list[list[bytes]]:
    """Return the hashes of each prompt's whole blocks, without prompts shorter than a block."""
    trace, size = read_trace(BUNDLED_TRACE), block_size()
    whole = [
        block_digests(request, size)[: request.prompt_tokens // size] for request in trace.requests
    ]
    return [hashes for hashes in whole if hashes]


def longest() -> int:
    return max(map(len, prompts()))


def num_distinct() -> int:
    return len({hash for hashes in prompts() for hash in hashes})


def test_the_slice_of_the_trace_fills_most_tiers() -> None:
    """Every prompt fits every tier, most tiers fill up, and the larger ones hit more."""
    assert longest() <= min(*DEVICES, *HOSTS)
    assert max(DEVICES) < num_distinct() < NEVER_FULL
    tiers = [OneTier(num_blocks) for num_blocks in HOSTS]
    hits = [sum(tier.serve(hashes) for hashes in prompts()) for tier in tiers]
    assert hits == sorted(set(hits))


class OneTier:
    """The oracle holds keys in the order of their last use, a prompt's tail before its root."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.keys: OrderedDict[bytes, None] = OrderedDict()

    def serve(self, hashes: list[bytes]) -> int:
        """Return how many leading blocks of a prompt are here, and count a use of all of it."""
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
            load = scheduler.load(
                "one", num_found, [table[len(hit) : len(hit) + num_found // size]]
            )
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
        """Serve every prompt of the slice in order, and check invariants now and then."""
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


@pytest.mark.parametrize("num_host", HOSTS)
@pytest.mark.parametrize("num_device", DEVICES)
def test_two_inclusive_tiers_hit_what_one_lru_of_the_larger_hits(
    num_device: int, num_host: int
) -> None:
    """Request by request, and the device alone hits what one LRU of its own size hits.

    Inclusive means that the host stores whatever a request computes or loads, before the request
    leaves. The host also learns of each use, even of one that the device served alone: `finish`
    ranks the whole chain. So both tiers rank the same blocks by the same uses, each prompt's root
    as the most recent. After every request each tier holds the most recent blocks of one common
    order, as many as it has room for. So the smaller tier is a part of the larger, and both
    together hold what the larger holds.

    The law holds exactly, because each of its conditions holds:

    - No prompt is larger than a tier. Of such a prompt the host would keep the first blocks, and an
      LRU the last ones used.
    - When a tier makes room, only the prompt's own blocks are pinned. One LRU would not evict them
      for it either.
    - The least recent block is always a leaf. So it costs nothing that only leaves may go.
    """
    both = TwoTiers(num_device, num_host).serve_all()
    device, larger = OneTier(num_device), OneTier(max(num_device, num_host))
    assert [one.device for one in both] == [device.serve(hashes) for hashes in prompts()]
    assert [one.together for one in both] == [larger.serve(hashes) for hashes in prompts()]


@pytest.mark.parametrize("num_device", DEVICES)
@pytest.mark.parametrize("num_host", HOSTS)
def test_lazy_stores_no_more_than_eager(num_device: int, num_host: int) -> None:
    """Eager stores what is computed; lazy stores what of it the device is about to evict.

    A host that never fills stores each key once, so lazy stores a part of what eager stores. A host
    that fills stores again what it evicted. There the law holds of this slice only.
    """
    eager = TwoTiers(num_device, num_host)
    lazy = TwoTiers(num_device, num_host, horizon=longest())
    eager.serve_all()
    lazy.serve_all()
    assert 0 < lazy.stat("stored_blocks") <= eager.stat("stored_blocks")


@pytest.mark.parametrize("num_device", DEVICES)
def test_lazy_stores_only_blocks_that_the_device_is_about_to_evict(num_device: int) -> None:
    """A horizon of the largest prompt loses nothing, and stores only what it has seen.

    No block leaves the device unstored, because no request takes more than the horizon. At the end
    the device holds its full number of blocks. It may have spared those beyond the horizon.
    """
    eager = TwoTiers(num_device, NEVER_FULL)
    lazy = TwoTiers(num_device, NEVER_FULL, horizon=longest())
    assert lazy.serve_all() == eager.serve_all()
    assert eager.stat("stored_blocks") == num_distinct()
    num_spared = eager.stat("stored_blocks") - lazy.stat("stored_blocks")
    assert 0 < num_spared <= num_device - longest()


@pytest.mark.parametrize("num_device", DEVICES)
@pytest.mark.parametrize("num_host", [5000, NEVER_FULL])
def test_lazy_with_the_device_as_horizon_equals_eager(num_device: int, num_host: int) -> None:
    """Request by request and tier by tier.

    When a request has left, all its blocks are in the free queue, and lazy stores what eager has
    stored already. So the law also holds of a host that fills, if it is as large as the device. It
    then evicts nothing that the device still has.
    """
    eager = TwoTiers(num_device, num_host)
    lazy = TwoTiers(num_device, num_host, horizon=num_device)
    assert lazy.serve_all() == eager.serve_all()
    assert lazy.stat("stored_blocks") == eager.stat("stored_blocks")
    assert (eager.stat("evicted_blocks") == 0) == (num_host == NEVER_FULL)
