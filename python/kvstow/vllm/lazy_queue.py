"""Lazy mode's view of vLLM's queue of free blocks: the blocks that vLLM overwrites next.

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
        # vLLM makes a new key object for each block that it caches, even if the keys are equal.
        self.key = block.block_hash
        self.place = place
        self.is_held = False
        self.before = self.after = self


class LazyQueue:
    """The first blocks of vLLM's free queue, and those of them that still need a store."""

    def __init__(self, pool: BlockPool, horizon_blocks: int) -> None:
        """View the first `horizon_blocks` of the pool's free queue."""
        self._pool = pool
        self.horizon_blocks = horizon_blocks
        self._nodes: dict[int, _Node] = {}
        # Stands before the first node and after the last one.
        self._ends = _Node(pool.null_block, 0)
        # Nodes at the front get ever lower places, nodes at the end ever higher ones.
        self._lowest = self._highest = 0
        # By block id, the key under which a block was computed, until the block is offered.
        self._computed: dict[int, bytes] = {}
        # Blocks of the view that `evictable` has not looked at yet.
        self._unseen: list[KVCacheBlock] = []
        # Nodes that all walks have passed so far.
        self.num_visited = 0

    def computed(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Take blocks whose KV a request has computed: they may be offered once more.

        vLLM keys a block when it grants it, so the key alone does not prove that the KV is written.
        The view remembers the key object. vLLM makes another one when it caches the block again.
        """
        for block in blocks:
            if block.block_hash is not None:
                self._computed[block.block_id] = block.block_hash
        self.used(blocks)

    def used(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Drop blocks that a request uses: vLLM took them out of the queue."""
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
        """Put the blocks of a store back where they would be in the queue without the store.

        vLLM would append them. It would then overwrite them last, and blocks that were used later
        before them.

        Returns:
            The blocks that requests have used since. The caller drops the store's references to
            them.
        """
        self._follow_head()
        unused, used = [], []
        for block in blocks:
            node = self._nodes.get(block.block_id)
            if node is not None and node.is_held and node.key is block.block_hash:
                unused.append(node)
            else:
                used.append(block)
        # From the last block to the first, so that each goes right before the one put back.
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
        """Drop blocks that have left the queue's head, and take in blocks that were put there."""
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
        # vLLM takes blocks from the head, so the nodes before the first one in place are gone.
        node = self._ends.after
        while node is not first:
            after = node.after
            self.num_visited += 1
            if not node.is_held:
                self._drop(node)
            node = after
        # If no node is in place, the new blocks with a key come from beyond the end of the view.
        following = self._ends.after
        for block in reversed(new[:num_put_there]):
            self._lowest -= 1
            following = self._link(block, self._lowest, before=following)
        self._unseen += new[:num_put_there]

    def _in_place(self, node: _Node, *, backwards: bool = False) -> _Node:
        """Return the nearest node, from `node` on, whose block is in the queue, or the ends."""
        while node is not self._ends and not self._is_in_place(node):
            following = node.before if backwards else node.after
            self.num_visited += 1
            if not node.is_held:
                self._drop(node)  # it has left the queue without a call of `used`
            node = following
        return node

    @staticmethod
    def _is_in_place(node: _Node) -> bool:
        block = node.block
        is_queued = block.next_free_block is not None
        return is_queued and not node.is_held and block.block_hash is node.key

    def _after(self, node: _Node) -> KVCacheBlock:
        """Return the block after a node in the queue, or the queue's first block after the ends."""
        queue = self._pool.free_block_queue
        block = queue.fake_free_list_head if node is self._ends else node.block
        return block.next_free_block

    def _insert(self, block: KVCacheBlock, following: KVCacheBlock) -> None:
        """Insert a block into the queue. vLLM itself only appends and prepends."""
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
