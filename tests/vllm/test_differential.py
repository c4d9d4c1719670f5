"""Random operations on `BlockLedger` and on vLLM's `KVCacheManager`, compared after each.

`KVSTOW_SEQUENCES` is the number of sequences of operations, spread evenly over the models
(`make test-differential` runs two thousand).
"""

import os
from collections import Counter

import pytest
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import init_none_hash

from kvstow import ChunkedLocal, FullAttention, SlidingWindow, StateSpace

from .pair import Model, Pair

NUM_OPS = 150

MODELS = [
    Model("full", (FullAttention(4),)),
    Model("full, one token a block", (FullAttention(1),)),
    Model("two full", (FullAttention(2), FullAttention(2))),
    Model("sliding", (SlidingWindow(4, 11),)),
    Model("chunked", (ChunkedLocal(4, 8),)),
    Model("state", (StateSpace(4),)),
    Model("full + sliding", (FullAttention(4), SlidingWindow(4, 9))),
    Model("sliding + full + sliding", (SlidingWindow(4, 9), FullAttention(4), SlidingWindow(4, 9))),
    Model("full + 2 windows", (FullAttention(4), SlidingWindow(4, 6), SlidingWindow(4, 17))),
    Model("2 windows", (SlidingWindow(4, 5), SlidingWindow(4, 21))),
    Model("retaining", (SlidingWindow(4, 6, extra_retained_tokens=5),)),
    Model(
        "full + retaining + sliding",
        (FullAttention(4), SlidingWindow(4, 9, extra_retained_tokens=2), SlidingWindow(4, 9)),
    ),
    Model(
        "retaining in smaller blocks",
        (FullAttention(8), SlidingWindow(2, 3, extra_retained_tokens=4)),
    ),
    Model("full + chunked", (FullAttention(4), ChunkedLocal(4, 12))),
    Model("full + chunked + sliding", (FullAttention(2), ChunkedLocal(2, 8), SlidingWindow(2, 7))),
    Model("full + state", (FullAttention(4), StateSpace(4))),
    Model("full + state + sliding", (FullAttention(4), StateSpace(4), SlidingWindow(4, 10))),
    Model("sliding in smaller blocks", (FullAttention(8), SlidingWindow(4, 6))),
    Model("sliding in much smaller blocks", (FullAttention(16), SlidingWindow(2, 6))),
    Model("sliding in larger blocks", (FullAttention(4), SlidingWindow(8, 20))),
    Model("three block sizes", (FullAttention(4), SlidingWindow(8, 9), SlidingWindow(2, 3))),
    Model("no common block size", (FullAttention(4), SlidingWindow(6, 14))),
]
NUM_SEQUENCES = -(-int(os.environ.get("KVSTOW_SEQUENCES", "814")) // len(MODELS))


def run(model: Model, seed: int) -> Counter[str]:
    """One sequence. Where it fails, the operations so far are the shortest that do."""
    pair = Pair(model, seed)
    for at in range(NUM_OPS):
        try:
            pair.one_op()
            pair.compare()
        except BaseException:
            print(f"{model.name!r}, seed {seed}, fails at operation {at + 1}:")
            print(*pair.log, sep="\n  ")
            raise
    return pair.seen


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_ledger_equals_vllms_manager(model: Model) -> None:
    init_none_hash(sha256_cbor)
    seen: Counter[str] = Counter()
    for seed in range(NUM_SEQUENCES):
        seen += run(model, seed)
    expected = {
        "hit tokens",
        "hits in the free queue",
        "external tokens",
        "loads",
        "failed loads",
        "refused admissions",
        "rejected drafts",
        "sampled tokens",
        "steps cut short",
        "steps of several",
    }
    if not all(isinstance(group, FullAttention) for group in model.groups):
        expected.add("skipped blocks")
    seen = +seen
    assert expected <= set(seen), f"never seen: {expected - set(seen)}"
