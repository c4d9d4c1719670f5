"""Pure accounting: a bare `BlockPool` over every id of a trace, partial tails included.

Each request takes its longest cached prefix, allocates and publishes the rest, and frees its blocks
last block first. This is plain LRU that touches the blocks of a request in that order.
"""

import os
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from kvstow import BlockPool
from kvstow.replay import BUNDLED_TRACE, read_trace

Prompts = Iterable[Sequence[int]]


def pool_hits(prompts: Prompts, num_usable: int) -> int:
    """Return the hit blocks of a pool with `num_usable` usable blocks."""
    pool = BlockPool(num_usable + 1)
    num_hits = 0
    for ids in prompts:
        hashes = [trace_id.to_bytes(8, "little") for trace_id in ids]
        hit = pool.lookup(hashes)
        pool.touch(hit)
        fresh = pool.allocate(len(hashes) - len(hit))
        pool.cache(fresh, hashes[len(hit) :])
        pool.free(fresh[::-1])
        pool.free(hit[::-1])
        num_hits += len(hit)
    pool.check()
    return num_hits


def lru_hits(prompts: Prompts, capacity: int) -> int:
    """Return the hit blocks of an LRU cache made of an ordered dict."""
    resident: OrderedDict[int, None] = OrderedDict()
    num_hits = 0
    for ids in prompts:
        num_hits += sum(trace_id in resident for trace_id in ids)
        for trace_id in reversed(ids):
            resident[trace_id] = None
            resident.move_to_end(trace_id)
        while len(resident) > capacity:
            resident.popitem(last=False)
    return num_hits


@pytest.mark.parametrize("capacity", [250, 251, 1000, 5000, 20_000])
def test_the_bundled_slice_hits_as_plain_lru(capacity: int) -> None:
    trace = read_trace(BUNDLED_TRACE)
    prompts = [request.trace_ids for request in trace.requests]
    unlimited = trace.num_blocks - len(set().union(*prompts))

    hits = pool_hits(prompts, capacity)

    assert hits == lru_hits(prompts, capacity)
    assert (hits == unlimited) == (capacity == 20_000)


@pytest.mark.skipif(
    "KVSTOW_TRACES" not in os.environ, reason="KVSTOW_TRACES names no folder with whole traces"
)
@pytest.mark.parametrize(
    ("name", "num_usable", "expected"),
    [
        ("conversation", 1_000, 0.0445),
        ("conversation", 9_999, 61_044),
        ("conversation", 10_000, 61_046),
        ("conversation", 30_000, 0.3257),
        ("conversation", 100_000, 0.3637),
        ("conversation", 200_000, 105_710),
        ("synthetic", 1_000, 0.0841),
        ("synthetic", 10_000, 0.4239),
        ("synthetic", 30_000, 0.6242),
        ("synthetic", 100_000, 0.6396),
        ("synthetic", 200_000, 0.6396),
    ],
)
def test_whole_traces_have_the_published_hits(name: str, num_usable: int, expected: float) -> None:
    """Compare with known hits of the Mooncake traces, in blocks or as a share of four digits."""
    path = Path(os.environ["KVSTOW_TRACES"]) / f"mooncake_{name}_trace.jsonl.gz"
    trace = read_trace(path)

    hits = pool_hits([request.trace_ids for request in trace.requests], num_usable)

    assert expected == (hits if expected > 1 else round(hits / trace.num_blocks, 4))
