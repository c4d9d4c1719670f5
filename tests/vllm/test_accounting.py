"""`BlockLedger` beside vLLM's own `KVCacheManager`: same operations, same accounting.

One full-attention group. The operations are those of vLLM's scheduler, in its order and with its
bounds: admission with local and external hits, chunked prefill, decode with drafts, delayed
caching, preemption. After each, everything that both can show must be the same.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from kvstow import BlockLedger, FullAttention

SEEDS = range(12)
NUM_OPS = 3000
NUM_REQUESTS = 6


def new_manager(num_blocks: int, block_size: int) -> KVCacheManager:
    spec = FullAttentionSpec(block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
    config = KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["0"], spec)]
    )
    return KVCacheManager(
        config, max_model_len=1 << 20, scheduler_block_size=block_size, hash_block_size=block_size
    )


class Pair:
    """Both accountings, and the requests as vLLM's scheduler would hold them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.block_size = self.random.choice([1, 2, 4, 16])
        num_blocks = self.random.randint(10, 30)
        self.vllm = new_manager(num_blocks, self.block_size)
        self.ledger = BlockLedger(num_blocks, [FullAttention(self.block_size)])
        self.requests: dict[str, Request] = {}
        self.loading: dict[str, int] = {}
        self.running: list[str] = []
        self.num_made = 0
        self.log: list[str] = [f"{num_blocks} blocks of {self.block_size}"]
        self.seen: Counter[str] = Counter()

    # Operations.

    def arrive(self) -> None:
        """A new request; its prompt begins as others do."""
        self.num_made += 1
        num_shared, num_own = self.random.randint(0, 8), self.random.randint(1, 3 * self.block_size)
        shared = [self.random.randint(0, 1)] * (num_shared * self.block_size)
        prompt = shared + [self.random.randint(2, 9) for _ in range(num_own)]
        id = f"request-{self.num_made}"
        request = Request(
            request_id=id,
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=1000),
            pooling_params=None,
            block_hasher=get_request_block_hasher(self.block_size, sha256_cbor),
        )
        self.requests[id] = request
        self.ledger.add(id, request.block_hashes)

    def admit(self, id: str) -> None:
        request = self.requests[id]
        found, num_local, _ = self.vllm.get_computed_blocks(request)
        hit = self.ledger.lookup(id, request.num_tokens - 1)
        assert hit.num_tokens == num_local
        assert hit.blocks[0].tolist() == found.get_block_ids()[0]
        num_rest = (request.num_tokens - 1 - num_local) // self.block_size
        external = self.random.choice([0, 0, self.random.randint(0, num_rest)]) * self.block_size
        is_async = external > 0 and self.random.random() < 0.7
        num_left = request.num_tokens - num_local - external
        num_new = 0 if is_async else self.random.randint(1, num_left)
        lookahead = self.random.choice([0, 0, 1, 3])
        reserve, must_fit = self.random.choice([0, 0, 2, 5]), self.random.random() < 0.3
        self.log.append(f"{external=} {num_new=} {lookahead=} {reserve=} {must_fit=}")
        theirs = self.vllm.allocate_slots(
            request,
            num_new,
            num_local,
            found,
            num_lookahead_tokens=lookahead,
            num_external_computed_tokens=external,
            delay_cache_blocks=is_async,
            full_sequence_must_fit=must_fit,
            reserved_blocks=reserve,
        )
        ours = self.ledger.allocate(
            id,
            num_new,
            hit=hit,
            num_external_tokens=external,
            num_lookahead_tokens=lookahead,
            delay_caching=is_async,
            reserve=reserve,
            must_fit_tokens=request.num_tokens if must_fit else None,
        )
        assert (ours is None) == (theirs is None)
        if ours is None:
            self.seen["refused admissions"] += 1
            return
        assert ours[0].tolist() == self.table(id)[len(hit.blocks[0]) :]
        self.seen["hit blocks"] += len(hit.blocks[0])
        self.seen["external blocks"] += external // self.block_size
        request.num_computed_tokens = num_local + external + num_new
        if is_async:
            self.loading[id] = request.num_computed_tokens
        else:
            self.running.append(id)

    def land(self, id: str) -> None:
        """A load has ended; what is lost with a failed one begins anew."""
        num_tokens = self.loading.pop(id)
        if self.random.random() < 0.2:
            self.preempt(id)
            return
        self.seen["loads"] += 1
        self.vllm.cache_blocks(self.requests[id], num_tokens)
        self.ledger.cache(id, num_tokens)
        self.running.append(id)

    def step(self) -> None:
        """Chunks and decodes of some running requests, in one call of the ledger."""
        ids = self.random.sample(self.running, self.random.randint(1, len(self.running)))
        num_drafts, lookahead = self.random.choice([0, 0, 1, 4]), self.random.choice([0, 0, 2])
        num_new = {}
        for id in ids:
            num_left = self.requests[id].num_tokens - self.requests[id].num_computed_tokens
            num_new[id] = self.random.randint(1, num_left) if num_left > 1 else 1 + num_drafts
        self.log.append(f"{num_new} {lookahead=}")
        theirs: list[list[int]] = []
        for id in ids:
            got = self.vllm.allocate_slots(
                self.requests[id], num_new[id], num_lookahead_tokens=lookahead
            )
            if got is None:
                break
            theirs.append(got.get_block_ids()[0])
        ours = self.ledger.allocate_step(
            ids, list(num_new.values()), num_lookahead_tokens=lookahead
        )
        assert ours.num_granted == len(theirs)
        assert ours.ids.tolist() == [id for ids in theirs for id in ids]
        self.seen["steps cut short"] += len(theirs) < len(ids)
        for id in ids[: len(theirs)]:
            self.end_step(id, num_new[id])

    def end_step(self, id: str, num_new: int) -> None:
        """Tokens are sampled once all known ones are computed; of drafts, some are rejected."""
        request = self.requests[id]
        num_before, num_tokens = request.num_computed_tokens, request.num_tokens
        request.num_computed_tokens += num_new
        if request.num_computed_tokens < num_tokens:
            return
        num_known = len(request.block_hashes)
        num_accepted = self.random.randint(0, num_before + num_new - num_tokens)
        request.append_output_token_ids(
            [self.random.randint(0, 9) for _ in range(num_accepted + 1)]
        )
        self.ledger.extend(id, request.block_hashes[num_known:])
        if num_tokens + num_accepted < request.num_computed_tokens:
            request.num_computed_tokens = num_tokens + num_accepted
            self.ledger.rewind(id, request.num_computed_tokens)
            self.seen["rejected drafts"] += 1
        self.seen["sampled tokens"] += num_accepted + 1

    def preempt(self, id: str) -> None:
        self.free(id)
        request = self.requests[id]
        request.num_computed_tokens = 0
        self.ledger.add(id, request.block_hashes)

    def free(self, id: str) -> None:
        self.vllm.free(self.requests[id])
        self.ledger.free(id)
        self.loading.pop(id, None)
        if id in self.running:
            self.running.remove(id)

    def evict(self) -> None:
        ids = self.random.sample(range(1, self.ledger.pool.num_blocks), 2)
        self.vllm.evict_blocks(set(ids))
        self.ledger.pool.evict(ids)

    def reset(self) -> None:
        assert self.vllm.reset_prefix_cache() == self.ledger.pool.reset()

    # Comparison.

    def table(self, id: str) -> list[int]:
        table: list[int] = self.vllm.get_block_ids(id)[0]
        return table

    def compare(self) -> None:
        self.ledger.check()
        pool, blocks = self.ledger.pool, self.vllm.block_pool.blocks
        queue = self.vllm.block_pool.free_block_queue.get_all_free_blocks()
        assert pool.num_free == self.vllm.block_pool.get_num_free_blocks()
        assert pool.free_order().tolist() == [block.block_id for block in queue]
        counts = [block.ref_cnt for block in blocks[1:]]
        assert pool.ref_counts(range(1, pool.num_blocks)).tolist() == counts
        assert pool.num_cached == sum(block.block_hash is not None for block in blocks)
        for id, request in self.requests.items():
            assert self.ledger.block_table(id).tolist() == self.table(id)
            assert self.ledger.num_granted_tokens(id) == request.num_computed_tokens
            found, num_tokens, _ = self.vllm.get_computed_blocks(request)
            hit = self.ledger.lookup(id, request.num_tokens - 1)
            assert (hit.num_tokens, hit.blocks[0].tolist()) == (
                num_tokens,
                found.get_block_ids()[0],
            )

    def one_op(self) -> None:
        waiting = [id for id in self.requests if id not in {*self.running, *self.loading}]
        held = self.running + list(self.loading)
        what = self.random.choices(
            ["arrive", "admit", "land", "step", "preempt", "finish", "evict", "reset"],
            [3, 8, 3, 12, 1, 2, 1, 0.3],
        )[0]
        among = {"admit": waiting, "land": list(self.loading), "preempt": held}
        among["finish"] = held
        if what in among and not among[what]:
            return
        id = self.random.choice(among[what]) if what in among else ""
        self.log.append(f"{what} {id}")
        if what == "finish":
            self.free(id)
            del self.requests[id]
        elif id:
            getattr(self, what)(id)
        elif what == "step" and self.running:
            self.step()
        elif what == "arrive" and len(self.requests) < NUM_REQUESTS:
            self.arrive()
        elif what in ("evict", "reset"):
            getattr(self, what)()


@pytest.mark.parametrize("seed", SEEDS)
def test_ledger_equals_vllms_manager(seed: int) -> None:
    init_none_hash(sha256_cbor)
    pair = Pair(seed)
    try:
        for _ in range(NUM_OPS):
            pair.one_op()
            pair.compare()
    except BaseException:
        print(f"seed {seed}, the last of {len(pair.log)} lines:", *pair.log[-20:], sep="\n  ")
        raise
    expected = {
        "hit blocks",
        "external blocks",
        "loads",
        "refused admissions",
        "rejected drafts",
        "sampled tokens",
        "steps cut short",
    }
    assert expected <= {what for what, num in pair.seen.items() if num}, pair.seen
