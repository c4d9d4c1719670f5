"""Lazy mode's view of vLLM's queue of free blocks: which ones vLLM overwrites next.

```
vLLM's queue   head [p][a]   [c][d][e][f] ... tail
the view            [p][a][B][c][d]               p: freed to the head since the last step
                    |<- horizon ->|               B: held by a store, which keeps its place
```

A step looks at the blocks that entered the front of the queue or left it since the last step, and
at those that stores hold, never at the whole horizon. The view stops at the horizon. When blocks
leave its front, it takes in as many behind its end.

vLLM takes blocks from the head, and out of the middle when a request hits them. It appends blocks
that have a key when it frees them, and puts those without one at the head.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class _Node:
    """A block's place in the view."""

    __slots__ = ("after", "before", "block", "is_held", "key", "place")

    before: _Node
    after: _Node

    def __init__(self, block: KVCacheBlock, place: int) -> None:
        self.block = block
        # vLLM makes a new object for each block that it caches, also where keys are equal.
        self.key = block.block_hash
        self.place = place
        self.is_held = False
        self.before = self.after = self


class LazyQueue:
    """The first blocks of vLLM's free queue, and which of them are still to be stored."""

    def __init__(self, pool: BlockPool, horizon_blocks: int) -> None:
        """View the first `horizon_blocks` of the pool's free queue."""
        self._pool = pool
        self.horizon_blocks = horizon_blocks
        self._nodes: dict[int, _Node] = {}
        # Before the first node and after the last one.
        self._ends = _Node(pool.null_block, 0)
        # Places are given downwards at the front, upwards at the end.
        self._lowest = self._highest = 0
        # By block id, the key under which it was computed and not offered since.
        self._computed: dict[int, bytes] = {}
        # Blocks of the view that were not looked at yet.
        self._unseen: list[KVCacheBlock] = []
        # Steps of all walks so far.
        self.num_visited = 0

    def computed(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Take blocks that a request uses and whose KV is computed: they may be offered once more.

        A block that is only granted has a key too, so the key's object is remembered: it is another
        one when vLLM has taken the block and cached it again.
        """
        for block in blocks:
            if block.block_hash is not None:
                self._computed[block.block_id] = block.block_hash
        self.used(blocks)

    def used(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Take blocks that a request uses: they have left the queue, also if a store holds them."""
        for block in blocks:
            node = self._nodes.get(block.block_id)
            if node is not None:
                self._drop(node)

    def evictable(self) -> list[KVCacheBlock]:
        """Return the computed blocks within the horizon that were not offered before."""
        self._follow_head()
        candidates, self._unseen = self._unseen, []
        queue = self._pool.free_block_queue
        block = self._after(self._in_place(self._ends.before, backwards=True))
        while len(self._nodes) < self.horizon_blocks and block is not queue.fake_free_list_tail:
            self._highest += 1
            self._link(block, self._highest, before=self._ends)
            candidates.append(block)
            block = block.next_free_block
        found = []
        for block in candidates:
            key = block.block_hash
            is_due = key is not None and self._computed.get(block.block_id) is key
            if is_due and not block.ref_cnt:
                del self._computed[block.block_id]
                found.append(block)
        return found

    def hold(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Keep the places of blocks that a store takes out of the queue."""
        for block in blocks:
            node = self._nodes.get(block.block_id)
            if node is not None:
                node.is_held = True

    def offer_again(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Offer blocks once more, because their store has failed."""
        for block in blocks:
            node = self._nodes.get(block.block_id)
            if node is not None and node.key is not None and node.key is block.block_hash:
                self._computed[block.block_id] = node.key
                self._unseen.append(block)

    def put_back(self, blocks: Iterable[KVCacheBlock]) -> list[KVCacheBlock]:
        """End what a store holds: blocks go back to where they would be in the queue without it.

        vLLM would append them: they would be the last to be overwritten, and what was used after
        them would go first. Returns the blocks that were used since they were taken: the store's
        reference to them is the caller's to give back.
        """
        self._follow_head()
        unused, used = [], []
        for block in blocks:
            node = self._nodes.get(block.block_id)
            if node is not None and node.is_held and node.key is block.block_hash:
                unused.append(node)
            else:
                used.append(block)
        # The last one first: then the next one's place is right before it.
        for node in sorted(unused, key=lambda node: node.place, reverse=True):
            after = self._in_place(node.after)
            if after is self._ends:
                before = self._in_place(node.before, backwards=True)
                self._insert(node.block, self._after(before))
            else:
                self._insert(node.block, after.block)
            node.is_held = False
        return used

    # -- the view -------------------------------------------------------------------------------

    def _follow_head(self) -> None:
        """Drop what has left the queue's head, and take in what was put there."""
        queue = self._pool.free_block_queue
        block = queue.fake_free_list_head.next_free_block
        first, num_put_there = self._ends, 0
        new: list[KVCacheBlock] = []
        while block is not queue.fake_free_list_tail and len(new) < self.horizon_blocks:
            node = self._nodes.get(block.block_id)
            if node is not None and self._is_in_place(node):
                first, num_put_there = node, len(new)
                break
            if block.block_hash is None and num_put_there == len(new):
                num_put_there += 1
            new.append(block)
            block = block.next_free_block
        # vLLM takes blocks from the head: what was before the first one is gone.
        node = self._ends.after
        while node is not first:
            after = node.after
            self.num_visited += 1
            if not node.is_held:
                self._drop(node)
            node = after
        # Where nothing of the view is left, blocks with a key lie beyond its end.
        following = self._ends.after
        for block in reversed(new[:num_put_there]):
            self._lowest -= 1
            following = self._link(block, self._lowest, before=following)
        self._unseen += new[:num_put_there]

    def _in_place(self, node: _Node, *, backwards: bool = False) -> _Node:
        """Return the nearest node, from this one on, whose block is in the queue, or the ends."""
        while node is not self._ends and not self._is_in_place(node):
            following = node.before if backwards else node.after
            self.num_visited += 1
            if not node.is_held:
                self._drop(node)  # it has left the queue, and nobody reported it
            node = following
        return node

    @staticmethod
    def _is_in_place(node: _Node) -> bool:
        block = node.block
        is_queued = block.next_free_block is not None
        return is_queued and not node.is_held and block.block_hash is node.key

    def _after(self, node: _Node) -> KVCacheBlock:
        """Return the block that follows in the queue; the queue's head follows the ends."""
        queue = self._pool.free_block_queue
        block = queue.fake_free_list_head if node is self._ends else node.block
        return block.next_free_block

    def _insert(self, block: KVCacheBlock, following: KVCacheBlock) -> None:
        """Put a block into the queue, in which vLLM itself only appends and prepends."""
        block.ref_cnt = 0
        before = following.prev_free_block
        before.next_free_block = following.prev_free_block = block
        block.prev_free_block, block.next_free_block = before, following
        self._pool.free_block_queue.num_free_blocks += 1

    def _link(self, block: KVCacheBlock, place: int, *, before: _Node) -> _Node:
        self.num_visited += 1
        stale = self._nodes.get(block.block_id)
        if stale is not None:
            before = before.after if stale is before else before
            self._drop(stale)
        node = self._nodes[block.block_id] = _Node(block, place)
        node.before, node.after = before.before, before
        node.before.after = before.before = node
        return node

    def _drop(self, node: _Node) -> None:
        del self._nodes[node.block.block_id]
        node.before.after, node.after.before = node.after, node.before
