"""The lazy queue compared with a naive model, on vLLM's real block pool."""

from __future__ import annotations

import random

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from kvstow.vllm.lazy_queue import LazyQueue

NUM_BLOCKS = 60


def with_ids(blocks: list[KVCacheBlock]) -> tuple[list[int], list[KVCacheBlock]]:
    return [block.block_id for block in blocks], blocks


def offered(
    num_blocks: int, horizon_blocks: int = NUM_BLOCKS
) -> tuple[BlockPool, LazyQueue, list[KVCacheBlock]]:
    """Return a pool of computed free blocks, and those that the view has offered."""
    pool = BlockPool(num_blocks + 1, enable_caching=True, hash_block_size=16)
    lazy = LazyQueue(pool, horizon_blocks)
    blocks = pool.get_new_blocks(num_blocks)
    for block in blocks:
        block.set_block_hash(bytes([block.block_id]) * 32 + bytes(4), num_tokens=16)
    lazy.computed(*with_ids(blocks))
    pool.free_blocks(blocks)
    return pool, lazy, lazy.evictable()


class Pool:
    """vLLM's pool with a lazy queue, and the order that vLLM's queue must have."""

    def __init__(self, seed: int, horizon_blocks: int, num_blocks: int = NUM_BLOCKS) -> None:
        self.dice = random.Random(seed)
        self.pool = BlockPool(num_blocks, enable_caching=True, hash_block_size=16)
        self.lazy = LazyQueue(self.pool, horizon_blocks)
        self.used: list[list[KVCacheBlock]] = []
        self.stores: list[list[KVCacheBlock]] = []
        self.num_keys = 0
        # Free blocks in the order without stores, with the blocks that stores hold.
        self.order = list(self.pool.free_block_queue.get_all_free_blocks())
        self.held: set[int] = set()
        # The computed blocks that were not offered since.
        self.due: set[int] = set()
        self.num_changed = horizon_blocks
        self.num_taken = 0

    def allocate(self) -> None:
        """A request takes new blocks, and computes and keys some of them."""
        num_blocks = self.dice.randrange(1, 6)
        self._take(num_blocks)
        blocks = self.pool.get_new_blocks(min(num_blocks, self.pool.get_num_free_blocks()))
        for block in blocks:
            self.order.remove(block)
            self.due.discard(block.block_id)
        num_keyed = self.dice.randrange(len(blocks) + 1)
        for block in blocks[:num_keyed]:
            self.num_keys += 1
            block.set_block_hash(b"%031d0000" % self.num_keys, num_tokens=16)
        self.lazy.computed(*with_ids(blocks[: num_keyed - self.dice.randrange(num_keyed + 1)]))
        self.due |= {b for b, key in enumerate(self.lazy._computed) if self._is(b, key)}
        self.used.append(blocks)
        self.num_changed += len(blocks)

    def _take(self, num_blocks: int) -> None:
        """Offer before the allocated blocks exceed the horizon, as steps do."""
        self.num_taken += num_blocks
        if self.num_taken >= self.lazy.horizon_blocks:
            self.offer()
            self.num_taken = num_blocks

    def _is(self, block_id: int, key: bytes | None) -> bool:
        return key is not None and self.pool.blocks[block_id].block_hash is key

    def free(self) -> None:
        if not self.used:
            return
        blocks = self.used.pop(self.dice.randrange(len(self.used)))[::-1]
        unused = [b for b in blocks if b.ref_cnt == 1]
        self.pool.free_blocks(blocks)
        unkeyed = [b for b in unused if b.block_hash is None]
        self.order[:0] = unkeyed
        self.order += [b for b in unused if b.block_hash is not None]
        self.num_changed += len(blocks)

    def hit(self) -> None:
        """A request hits cached blocks, those that stores hold included."""
        cached = [b for b in self.pool.blocks[1:] if b.block_hash is not None]
        if not cached:
            return
        self._take(3)
        blocks = self.dice.sample(cached, min(len(cached), 3))
        self.pool.touch(blocks)
        self.lazy.used(blocks)
        for block in blocks:
            if block in self.order:
                self.order.remove(block)
            self.held.discard(block.block_id)
        self.used.append(blocks)
        self.num_changed += len(blocks)

    def offer(self) -> None:
        """A step ends, and some of the offered blocks are stored."""
        before = self.lazy.num_visited
        found = self.lazy.evictable()
        num_visited = self.lazy.num_visited - before
        assert num_visited <= 2 * (self.num_changed + len(self.held) + 1), "it walked the horizon"
        self.num_changed = self.num_taken = 0
        offered = {block.block_id for block in found}
        assert len(offered) == len(found) and offered <= self.due
        assert not any(block.ref_cnt for block in found)
        self.due -= offered
        within = {block.block_id for block in self.order[: self.lazy.horizon_blocks]}
        assert not within & self.due - self.held, "blocks due within the horizon were not offered"
        store = [block for block in found if self.dice.random() < 0.8]
        if store:
            self.lazy.hold(store)
            self.held |= {block.block_id for block in store}
            self.stores.append(store)
            self.num_changed += len(store)

    def end_store(self) -> None:
        if not self.stores:
            return
        store = self.stores.pop(self.dice.randrange(len(self.stores)))
        fails = self.dice.random() < 0.3
        unused = [b for b in store if b.ref_cnt == 1 and b.block_id not in self.held]
        back = [b for b in store if b.block_id in self.held]
        self.pool.free_blocks(reversed(self.lazy.put_back(store)))
        # A block that was hit and freed while a store held it comes free with the store's end.
        self.order += unused[::-1]
        self.held -= {b.block_id for b in back}
        if fails:
            self.lazy.offer_again(store)
            self.due |= {b.block_id for b in back}
        self.num_changed += len(store)

    def evict(self) -> None:
        """vLLM drops the key of a block in use, because its load has failed."""
        block = self.dice.choice(self.pool.blocks[1:])
        if block.ref_cnt and block.block_id not in self.held:
            self.pool.evict_blocks({block.block_id})
            self.due.discard(block.block_id)

    def check(self) -> None:
        queue = self.pool.free_block_queue.get_all_free_blocks()
        expected = [b.block_id for b in self.order if b.block_id not in self.held]
        assert [block.block_id for block in queue] == expected
        assert self.pool.get_num_free_blocks() == len(expected)


@pytest.mark.parametrize("seed", range(60))
def test_stores_do_not_change_the_order_of_the_queue(seed: int) -> None:
    pool = Pool(seed, horizon_blocks=(8, 25, NUM_BLOCKS)[seed % 3])
    kinds = [pool.allocate, pool.free, pool.hit, pool.offer, pool.offer, pool.end_store, pool.evict]
    for _ in range(400):
        pool.dice.choice(kinds)()
        pool.check()


def test_a_step_visits_only_blocks_that_changed() -> None:
    """All 40,000 blocks of the pool were offered, and each step takes 16 and frees 16."""
    pool = BlockPool(40_000, enable_caching=True, hash_block_size=16)
    blocks = pool.get_new_blocks(39_999)
    for block in blocks:
        block.set_block_hash(b"%031d0000" % block.block_id, num_tokens=16)
    lazy = LazyQueue(pool, horizon_blocks=9_000)
    lazy.computed(*with_ids(blocks))
    pool.free_blocks(blocks)
    assert len(lazy.evictable()) == 9_000
    for _ in range(20):
        before = lazy.num_visited
        taken = pool.get_new_blocks(16)
        for block in taken:
            block.set_block_hash(b"%031d0000" % block.block_id, num_tokens=16)
        lazy.computed(*with_ids(taken))
        pool.free_blocks(taken)
        assert len(lazy.evictable()) == 16
        assert lazy.num_visited - before <= 2 * 16


def test_many_blocks_are_offered_at_once_when_the_horizon_comes_near() -> None:
    """Each store has a cost of its own."""
    pool = BlockPool(200, enable_caching=True, hash_block_size=16)
    blocks = pool.get_new_blocks(199)
    for block in blocks:
        block.set_block_hash(b"%031d0000" % block.block_id, num_tokens=16)
    lazy = LazyQueue(pool, horizon_blocks=40, batch_blocks=16)
    lazy.computed(*with_ids(blocks))
    pool.free_blocks(blocks)
    offered = lazy.evictable()
    assert offered == blocks[: 40 + 16]
    sizes = []
    for at in range(17):
        pool.get_new_blocks(1)
        found = lazy.evictable()
        offered += found
        sizes.append(len(found))
        assert len(offered) >= at + 1 + 40, "a block within the horizon was not offered"
    assert sizes == [0] * 16 + [1 + 16]


def test_a_block_that_was_only_granted_is_not_offered() -> None:
    """vLLM keys blocks when it grants them, so an equal key does not prove that KV is written."""
    pool = BlockPool(4, enable_caching=True, hash_block_size=16)
    lazy = LazyQueue(pool, horizon_blocks=4)
    for is_computed in (True, False):
        blocks = pool.get_new_blocks(3)
        for block in blocks:
            # The keys are equal, but are other objects, as in vLLM.
            block.set_block_hash(bytes([block.block_id]) * 32 + bytes(4), num_tokens=16)
        if is_computed:
            lazy.computed(*with_ids(blocks))
        pool.free_blocks(blocks)
        if not is_computed:
            assert lazy.evictable() == []


def test_a_block_that_was_computed_is_offered_once() -> None:
    pool = BlockPool(4, enable_caching=True, hash_block_size=16)
    lazy = LazyQueue(pool, horizon_blocks=4)
    blocks = pool.get_new_blocks(3)
    for block in blocks:
        block.set_block_hash(bytes([block.block_id]) * 32 + bytes(4), num_tokens=16)
    lazy.computed(*with_ids(blocks))
    pool.free_blocks(blocks)
    assert lazy.evictable() == blocks
    assert lazy.evictable() == []
    pool.touch(blocks[:1])
    lazy.computed(*with_ids(blocks[:1]))
    pool.free_blocks(blocks[:1])
    assert lazy.evictable() == blocks[:1], "offered again, because the host may have evicted it"


def test_a_block_that_lost_its_key_is_not_put_back() -> None:
    """vLLM drops the key of a block whose load has failed, and wants it at the queue's head."""
    pool, lazy, blocks = offered(3)
    lazy.hold(blocks)
    pool.evict_blocks({blocks[1].block_id})
    assert lazy.put_back(blocks) == blocks[1:2]
    assert pool.free_block_queue.get_all_free_blocks() == [blocks[0], blocks[2]]


def test_blocks_put_back_leave_the_view_with_the_queue() -> None:
    """Even if another store holds blocks all the time."""
    pool, lazy, blocks = offered(20, horizon_blocks=8)
    lazy.hold(blocks[:4])
    lazy.hold(blocks[4:])
    pool.get_new_blocks(2)
    lazy.evictable()
    assert lazy.put_back(blocks[:4]) == []
    assert pool.get_new_blocks(4) == blocks[:4]
    lazy.evictable()
    queue = pool.free_block_queue.get_all_free_blocks()
    viewed = [block for block in lazy._blocks[lazy._start :] if block is not None]
    assert viewed == blocks[4:] + queue[:4]


def test_a_block_that_a_request_uses_is_not_put_back() -> None:
    """Nor if the view was not told: vLLM would give the block to another request."""
    pool, lazy, blocks = offered(3)
    lazy.hold(blocks)
    pool.touch(blocks[1:2])
    assert lazy.put_back(blocks) == blocks[1:2]
    assert pool.free_block_queue.get_all_free_blocks() == [blocks[0], blocks[2]]
    assert blocks[1].ref_cnt == 2, "the caller drops the reference of the store"


def test_the_view_keeps_no_place_for_blocks_that_left_it() -> None:
    """Requests hit one block after the other, and vLLM never takes one from the head."""
    pool, lazy, _ = offered(39, horizon_blocks=8)
    blocks = pool.blocks[1:]
    for at in range(1, 200):
        hit = blocks[1 + at % 38]
        pool.touch([hit])
        lazy.used([hit])
        pool.free_blocks([hit])
        lazy.evictable()
        assert len(lazy._blocks) <= 4 * lazy.horizon_blocks
    queue = pool.free_block_queue.get_all_free_blocks()
    assert [block for block in lazy._blocks if block is not None] == queue[:8]


def test_an_interrupted_store_gives_its_blocks_back() -> None:
    pool = BlockPool(5, enable_caching=True, hash_block_size=16)
    lazy = LazyQueue(pool, horizon_blocks=4)
    blocks = pool.free_block_queue.get_all_free_blocks()
    outside = KVCacheBlock(block_id=4)  # it is in no queue, so that its removal raises
    with pytest.raises(AttributeError):
        lazy.hold([*blocks[:2], outside])
    assert [block.ref_cnt for block in blocks] == [0] * 4
    free = pool.free_block_queue.get_all_free_blocks()
    assert len(free) == pool.get_num_free_blocks() == 4
    assert set(map(id, free)) == set(map(id, blocks))
