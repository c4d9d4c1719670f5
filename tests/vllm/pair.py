"""`BlockLedger` beside vLLM's `KVCacheManager`: equal operations must give equal accounting.

The operations are those of vLLM's scheduler, in its order and with its bounds. After each operation
everything that both sides can show must be equal. All choices come from one seed.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass

import torch
from tests.vllm.versions import LOOKS_ABOVE_HIT, skip_without_all_states
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from kvstow import BlockLedger, ChunkedLocal, FullAttention, SlidingWindow, StateSpace

Group = FullAttention | SlidingWindow | ChunkedLocal | StateSpace

NUM_REQUESTS = 6


@dataclass(frozen=True)
class Model:
    """Groups, and their names on both sides."""

    name: str
    groups: tuple[Group, ...]

    @property
    def hash_block_size(self) -> int:
        return math.gcd(*(group.block_size for group in self.groups))

    @property
    def hit_block_size(self) -> int:
        return math.lcm(*(group.block_size for group in self.groups))

    def max_hit_tokens(self, num_tokens: int) -> int:
        """Return the most tokens that vLLM lets a hit of a request have.

        It leaves one token to compute. With one group, and before 0.32 with any number, it looks
        for no block above that, so a hit that drops its last block ends a block lower.
        """
        dropped = [group.block_size for group in self.groups if drops_last_block(group)]
        if len(self.groups) > 1 and LOOKS_ABOVE_HIT:
            dropped.clear()
        return max(0, num_tokens - 1 - max(dropped, default=0))

    def manager(self, num_blocks: int, max_in_flight_tokens: int | None) -> KVCacheManager:
        specs = [
            KVCacheGroupSpec([str(at)], spec(group), is_eagle_group=drops_last_block(group))
            for at, group in enumerate(self.groups)
        ]
        manager = KVCacheManager(
            KVCacheConfig(num_blocks, [], specs, prefix_cache_retention_interval=None),
            max_model_len=1 << 20,
            scheduler_block_size=self.hit_block_size,
            hash_block_size=self.hash_block_size,
            max_in_flight_tokens=max_in_flight_tokens,
            use_eagle=any(map(drops_last_block, self.groups)),
            num_prefill_lookahead=int(any(map(drops_last_block, self.groups))),
        )
        # kvstow has no hits that end inside a block. If hashes are finer than blocks, vLLM keys the
        # last block of a prompt for such hits, although no lookup here asks for them.
        assert not manager.coordinator.enable_partial_hash_hits
        for group in manager.coordinator.single_type_managers:
            if isinstance(group, FullAttentionManager):
                group._cache_partial_tail_block = lambda request, num_tokens: None
        return manager


def drops_last_block(group: Group) -> bool:
    return isinstance(group, FullAttention | SlidingWindow) and group.drops_last_block


def spec(group: Group) -> KVCacheSpec:
    match group:
        case StateSpace():
            skip_without_all_states()
            return MambaSpec(
                block_size=group.block_size,
                shapes=((1,),),
                dtypes=(torch.float32,),
                mamba_cache_mode="all",
            )
        case SlidingWindow():
            return SlidingWindowSpec(
                block_size=group.block_size,
                num_kv_heads=1,
                head_size=1,
                dtype=torch.float32,
                sliding_window=group.window,
                extra_retained_tokens=group.extra_retained_tokens,
            )
        case ChunkedLocal():
            return ChunkedLocalAttentionSpec(
                block_size=group.block_size,
                num_kv_heads=1,
                head_size=1,
                dtype=torch.float32,
                attention_chunk_size=group.chunk,
            )
    return FullAttentionSpec(
        block_size=group.block_size, num_kv_heads=1, head_size=1, dtype=torch.float32
    )


class Pair:
    """Both sides, and the requests as vLLM's scheduler holds them."""

    def __init__(self, model: Model, seed: int) -> None:
        self.random = random.Random(seed)
        self.model = model
        self.unit = model.hit_block_size
        # From a pool that starves its requests to a pool with room for all of them.
        num_blocks = self.random.randint(8, 20 * (1 + len(model.groups)))
        max_in_flight = self.random.choice([None, self.unit, 3 * self.unit])
        self.vllm = model.manager(num_blocks, max_in_flight)
        self.ledger = BlockLedger(num_blocks, model.groups, max_in_flight_tokens=max_in_flight)
        assert self.ledger.hash_block_size == model.hash_block_size
        assert self.ledger.hit_block_size == model.hit_block_size
        self.requests: dict[str, Request] = {}
        self.loading: dict[str, int] = {}
        self.running: list[str] = []
        self.num_made = 0
        self.log = [f"{model.name}: {num_blocks} blocks, {max_in_flight=}"]
        self.seen: Counter[str] = Counter()

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
        self.vllm.new_step_starts()
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

    # -- operations -----------------------------------------------------------------------------

    def arrive(self) -> None:
        """Add a request whose prompt begins like others."""
        self.num_made += 1
        num_shared, num_own = self.random.randint(0, 8), self.random.randint(1, 3 * self.unit)
        shared = [self.random.randint(0, 1)] * (num_shared * self.unit)
        prompt = shared + [self.random.randint(2, 9) for _ in range(num_own)]
        id = f"request-{self.num_made}"
        self.requests[id] = request = Request(
            request_id=id,
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=1000),
            pooling_params=None,
            block_hasher=get_request_block_hasher(self.model.hash_block_size, sha256_cbor),
        )
        self.ledger.add(id, request.block_hashes)

    def admit(self, id: str) -> None:
        request = self.requests[id]
        found, num_local, _ = self.vllm.get_computed_blocks(request)
        hit = self.ledger.lookup(id, self.model.max_hit_tokens(request.num_tokens))
        num_rest = (request.num_tokens - 1 - num_local) // self.unit
        external = self.random.choice([0, 0, self.random.randint(0, num_rest)]) * self.unit
        is_async = external > 0 and self.random.random() < 0.7
        num_left = request.num_tokens - num_local - external
        num_new = 0 if is_async else self.random.randint(1, num_left)
        lookahead = self.random.choice([0, 0, 1, 3])
        reserve, must_fit = self.random.choice([0, 0, 2, 5]), self.random.random() < 0.3
        self.log.append(f"  {external=} {num_new=} {lookahead=} {reserve=} {must_fit=}")
        free_before = set(self.ledger.pool.free_order().tolist())
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
        assert (ours is None) == (theirs is None), f"ours {ours}, vLLM's {theirs}"
        if ours is None:
            self.seen["refused admissions"] += 1
            return
        hits = {block for blocks in hit.blocks for block in blocks.tolist()}
        kept: set[int] = set()
        for table, allocated in zip(self.tables(id), ours, strict=True):
            assert allocated.tolist() == table[len(table) - len(allocated) :]
            kept.update(table[: len(table) - len(allocated)])
            self.seen["skipped blocks"] += table.count(0)
        assert kept <= hits | {0}
        assert kept.isdisjoint(id for allocated in ours for id in allocated.tolist())
        self.seen["hit tokens"] += hit.num_tokens
        self.seen["hits in the free queue"] += len(kept & free_before)
        self.seen["hits out of the window"] += len(hits - kept - {0})
        self.seen["external tokens"] += external
        request.num_computed_tokens = num_local + external + num_new
        if is_async:
            self.loading[id] = request.num_computed_tokens
        else:
            self.running.append(id)

    def land(self, id: str) -> None:
        """End a load. The request of a failed load starts over."""
        num_tokens = self.loading.pop(id)
        if self.random.random() < 0.2:
            self.seen["failed loads"] += 1
            self.preempt(id)
            return
        self.seen["loads"] += 1
        self.vllm.cache_blocks(self.requests[id], num_tokens)
        self.ledger.cache(id, num_tokens)
        self.running.append(id)

    def step(self) -> None:
        """Schedule chunks and decodes of some running requests, in one call of the ledger."""
        ids = self.random.sample(self.running, self.random.randint(1, len(self.running)))
        num_drafts, lookahead = self.random.choice([0, 0, 1, 4]), self.random.choice([0, 0, 2])
        in_flight = self.random.choice([0, 0, 1, self.unit])
        num_new = {}
        for id in ids:
            num_left = self.requests[id].num_tokens - self.requests[id].num_computed_tokens
            num_new[id] = self.random.randint(1, num_left) if num_left > 1 else 1 + num_drafts
        self.log.append(f"  {num_new} {lookahead=} {in_flight=}")
        theirs: list[KVCacheBlocks] = []
        for id in ids:
            self.requests[id].num_in_flight_tokens = in_flight
            got = self.vllm.allocate_slots(
                self.requests[id], num_new[id], num_lookahead_tokens=lookahead
            )
            self.requests[id].num_in_flight_tokens = 0
            if got is None:
                break
            theirs.append(got)
        ours = self.ledger.allocate_step(
            ids,
            list(num_new.values()),
            num_lookahead_tokens=lookahead,
            num_in_flight_tokens=in_flight,
        )
        assert ours.num_granted == len(theirs)
        groups = [ids for got in theirs for ids in got.get_block_ids()]
        ends = [sum(map(len, groups[:at])) for at in range(len(groups) + 1)]
        assert ours.ids.tolist() == [id for ids in groups for id in ids]
        assert ours.offsets.tolist() == ends
        self.seen["steps of several"] += len(theirs) > 1
        self.seen["steps cut short"] += len(theirs) < len(ids)
        for id in ids[: len(theirs)]:
            self.end_step(id, num_new[id])

    def end_step(self, id: str, num_new: int) -> None:
        """Sample tokens once all known tokens are computed, and reject some of the drafts."""
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
        is_reset = self.vllm.reset_prefix_cache()
        assert is_reset == self.ledger.pool.reset()
        self.seen["resets"] += is_reset

    # -- comparison -----------------------------------------------------------------------------

    def tables(self, id: str) -> tuple[list[int], ...]:
        tables: tuple[list[int], ...] = self.vllm.get_block_ids(id)
        return tables

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
            groups = range(len(self.model.groups))
            ours = [self.ledger.block_table(id, group).tolist() for group in groups]
            assert ours == list(self.tables(id))
            assert self.ledger.num_granted_tokens(id) == request.num_computed_tokens
            found, num_tokens, _ = self.vllm.get_computed_blocks(request)
            hit = self.ledger.lookup(id, self.model.max_hit_tokens(request.num_tokens))
            assert hit.num_tokens == num_tokens
            assert [blocks.tolist() for blocks in hit.blocks] == list(found.get_block_ids())
