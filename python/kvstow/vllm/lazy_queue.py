"""Lazy mode's view of vLLM's queue of free blocks: the blocks that vLLM overwrites next.

```
vLLM's queue   head [p][a]   [c][d][e][f] ... tail
the view            [p][a][B][c][d]               p: freed to the head since the last step
                    |<- horizon ->|               B: held by a store, which keeps its place
```

A step looks at the blocks that entered the front of the queue or left it since the last step, and
at those that stores hold, never at the whole horizon. When so many have left its front that the
view ends before the horizon, it takes in others behind its end. Because each store has a cost of
its own, it then goes beyond the horizon by a batch.

vLLM takes blocks from the head, and out of the middle when a request hits them. It appends blocks
that have a key when it frees them, and puts those without one at the head.

Each block passes through the view, so the work on one must be small. The view is two flat lists,
and a block that leaves its middle leaves a gap there:

```
_blocks   [unused][p][a][B][gap][c][d]        _keys has the key that each had when it entered
             _start^                            _places[id] is a block's index, counted from _base
```

How a wrong block could be offered or put back, and what prevents it:

- vLLM has overwritten a block since it entered the view. vLLM makes a new key object for each block
  that it caches, so the view compares objects. It holds the old one, so no new one is the same.
- Only a granted block has a key whose KV is not written. `_computed` has the key objects of blocks
  that were computed.
- A request uses a block that a store holds. It is put back only if the store has the one reference.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

# The place of a block that was never in the view.
_NOWHERE = -sys.maxsize


class LazyQueue:
    """The first blocks of vLLM's free queue, and those of them that still need a store."""

    def __init__(self, pool: BlockPool, horizon_blocks: int, batch_blocks: int = 0) -> None:
        """View the first `horizon_blocks` of the pool's free queue, or `batch_blocks` more."""
        self._pool = pool
        self.horizon_blocks = horizon_blocks
        self.batch_blocks = batch_blocks
        self._blocks: list[KVCacheBlock | None] = []
        self._keys: list[bytes | None] = []
        self._places = [_NOWHERE] * len(pool.blocks)
        self._base = 0
        self._start = 0
        # The blocks before this index are held, or have left the queue.
        self._passed = 0
        # No block of the view behind this index is in the queue.
        self._last = -1
        self._num_gaps = 0
        # The ids of blocks that stores hold.
        self._held: set[int] = set()
        # By block id, the key under which a block was computed, until the block is offered.
        self._computed: list[bytes | None] = [None] * len(pool.blocks)
        # Blocks of the view that `evictable` has not looked at yet.
        self._unseen: list[KVCacheBlock] = []
        # Blocks that walks of the view have looked at so far, without the last of each.
        self.num_visited = 0

    def computed(self, ids: Sequence[int], blocks: Sequence[KVCacheBlock]) -> None:
        """Take blocks whose KV a request has computed: they may be offered once more.

        vLLM keys a block when it grants it, so the key alone does not prove that the KV is written.
        The view remembers the key object. vLLM makes another one when it caches the block again.

        Args:
            ids: the id of each block; 0 for those not to be offered.
            blocks: the blocks.
        """
        computed = self._computed
        for block_id, block in zip(ids, blocks, strict=True):
            computed[block_id] = block._block_hash
        self.used(blocks)

    def used(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Drop blocks that a request uses: vLLM took them out of the queue."""
        places, first = self._places, self._base + self._start
        for block in [block for block in blocks if places[block.block_id] >= first]:
            at = self._index(block)
            if at is not None:
                self._drop(at)

    def evictable(self) -> list[KVCacheBlock]:
        """Return the computed blocks within the horizon that were not offered before."""
        self._follow_head()
        found: list[KVCacheBlock] = []
        computed = self._computed
        if self._unseen:
            unseen, self._unseen = self._unseen, []
            for block in unseen:
                key = block._block_hash
                if key is not None and computed[block.block_id] is key and not block.ref_cnt:
                    computed[block.block_id] = None
                    found.append(block)
        num_left = self.horizon_blocks - self._num_viewed()
        if num_left > 0:
            self._enter_end(num_left + self.batch_blocks, found)
        return found

    def hold(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Take a reference to each block for a store. A free one leaves the queue, not the view.

        It does what `BlockPool.touch` does, but counts no access, because a copy is none.
        """
        queue, num_removed = self._pool.free_block_queue, 0
        try:
            for block in blocks:
                num_refs = block.ref_cnt
                if not num_refs:
                    before, after = block.prev_free_block, block.next_free_block
                    before.next_free_block, after.prev_free_block = after, before
                    block.prev_free_block = block.next_free_block = None
                    num_removed += 1
                block.ref_cnt = num_refs + 1
        except BaseException:
            queue.num_free_blocks -= num_removed
            self._pool.free_blocks(takewhile(lambda held: held is not block, blocks))
            raise
        queue.num_free_blocks -= num_removed
        self._held.update([block.block_id for block in blocks])

    def offer_again(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Offer blocks once more, because their store has failed."""
        for block in blocks:
            at = self._index(block)
            key = None if at is None else self._keys[at]
            if key is not None and key is block._block_hash:
                self._computed[block.block_id] = key
                self._unseen.append(block)

    def put_back(self, blocks: Sequence[KVCacheBlock]) -> list[KVCacheBlock]:
        """Put the blocks of a store back where they would be in the queue without the store.

        vLLM would append them. It would then overwrite them last, and blocks that were used later
        before them.

        Returns:
            The blocks that requests have used since. The caller drops the store's references to
            them.
        """
        self._follow_head()
        viewed, keys, held, places = self._blocks, self._keys, self._held, self._places
        base, start, end = self._base, self._start, len(viewed)
        unused: list[int] = []
        used: list[KVCacheBlock] = []
        for block in blocks:
            at = places[block.block_id] - base
            is_viewed = start <= at < end and viewed[at] is block
            if is_viewed and keys[at] is block._block_hash and block.ref_cnt == 1:
                unused.append(at)
                continue
            used.append(block)
            if is_viewed:
                self._drop(at)
        held.difference_update([block.block_id for block in blocks])
        if unused:
            unused.sort()
            self._insert(unused)
        return used

    def _insert(self, indexes: list[int]) -> None:
        """Insert blocks of the view into the queue. vLLM itself only appends and prepends."""
        last, viewed = -2, self._blocks
        before = self._queued(-1)
        following = before.next_free_block
        for at in indexes:
            if at != last + 1:
                before.next_free_block, following.prev_free_block = following, before
                before = self._queued(self._last_in_place(at))
                following = before.next_free_block
            block = viewed[at]
            assert block is not None
            block.ref_cnt = 0
            before.next_free_block, block.prev_free_block = block, before
            before, last = block, at
        before.next_free_block, following.prev_free_block = following, before
        self._passed = min(self._passed, indexes[0])
        self._last = max(self._last, last)
        self._pool.free_block_queue.num_free_blocks += len(indexes)

    # -- the view -------------------------------------------------------------------------------

    def _follow_head(self) -> None:
        """Drop blocks that have left the queue's head, and take in blocks that were put there."""
        queue = self._pool.free_block_queue
        block, passed = queue.fake_free_list_head.next_free_block, self._passed
        is_first = passed < len(self._blocks) and self._blocks[passed] is block
        if is_first and self._keys[passed] is block._block_hash:
            return  # most steps take no block
        first, num_put_there = len(self._blocks), 0
        new: list[KVCacheBlock] = []
        while block is not queue.fake_free_list_tail and len(new) < self.horizon_blocks:
            at = self._index(block)
            if at is not None and self._keys[at] is block._block_hash:
                first, num_put_there = at, len(new)
                break
            if block._block_hash is None and num_put_there == len(new):
                num_put_there += 1
            new.append(block)
            block = block.next_free_block
        self._leave_front(first)
        # If no block is in place, the new ones with a key come from beyond the end of the view.
        if num_put_there:
            self._enter_front(new[:num_put_there])
            self._unseen += new[:num_put_there]

    def _leave_front(self, first: int) -> None:
        """Drop what is before the first block in place: vLLM takes blocks from the head."""
        viewed, held = self._blocks, self._held
        passed = max(self._start, self._passed)
        self.num_visited += max(0, first - passed)
        self._passed = start = first
        left = [block.block_id for block in viewed[passed:first] if block is not None]
        if held and (self._start < passed or not held.isdisjoint(left)):
            num_gaps, keys = 0, self._keys
            for at in range(passed, first):
                block = viewed[at]
                if block is not None and block.block_id not in held:
                    viewed[at] = keys[at] = None
                    num_gaps += 1
            self._num_gaps += num_gaps
            start = self._start
            while start < first and viewed[start] is None:
                start += 1
        if self._num_gaps:
            self._num_gaps -= sum(block is None for block in viewed[self._start : start])
        self._start = start

    def _enter_front(self, new: list[KVCacheBlock]) -> None:
        """Take in blocks before the first one."""
        self.used(new)
        if self._start < len(new):
            unused = [None] * (len(new) + len(self._blocks))
            self._blocks[:0], self._keys[:0] = unused, unused
            self._shift(len(unused))
        end = self._start
        start = self._start = self._passed = end - len(new)
        self._blocks[start:end] = new
        self._keys[start:end] = [block._block_hash for block in new]
        self._note_places(new, start)
        self.num_visited += len(new)
        self._last = max(self._last, end - 1)

    def _enter_end(self, num_left: int, found: list[KVCacheBlock]) -> None:
        """Take in blocks behind the last one.

        All blocks pass here, so one loop does all. It adds those to `found` that may be stored.
        """
        viewed, keys, places, computed = self._blocks, self._keys, self._places, self._computed
        first, start = self._base + self._start, len(viewed)
        tail = self._pool.free_block_queue.fake_free_list_tail
        self._last = self._last_in_place(self._last + 1)
        block = self._queued(self._last).next_free_block
        for at in range(start, start + num_left):
            if block is tail:
                break
            block_id, key = block.block_id, block._block_hash
            if places[block_id] >= first:
                self.used((block,))
            places[block_id] = self._base + at
            viewed.append(block)
            keys.append(key)
            if key is not None and computed[block_id] is key and not block.ref_cnt:
                computed[block_id] = None
                found.append(block)
            block = block.next_free_block
        if len(viewed) > start:
            self.num_visited += len(viewed) - start
            self._last = len(viewed) - 1
            self._forget_unused()

    def _note_places(self, new: list[KVCacheBlock], start: int) -> None:
        places = self._places
        for place, block in enumerate(new, self._base + start):
            places[block.block_id] = place

    def _last_in_place(self, end: int) -> int:
        """Return the index of the last block before `end` that is in the queue; -1 for none.

        Forgets the blocks behind it that have left the queue without a call of `used`.
        """
        viewed, keys = self._blocks, self._keys
        for at in range(end - 1, self._start - 1, -1):
            block = viewed[at]
            if block is None:
                continue
            if block.next_free_block is not None and block._block_hash is keys[at]:
                return at
            self.num_visited += 1
            if block.block_id not in self._held:
                self._drop(at)
        return -1

    def _queued(self, at: int) -> KVCacheBlock:
        """Return the block at an index, or what stands before the queue's first one for -1."""
        block = None if at < 0 else self._blocks[at]
        return self._pool.free_block_queue.fake_free_list_head if block is None else block

    def _index(self, block: KVCacheBlock) -> int | None:
        """Return the index of a block in the lists, or None if it is not in the view."""
        at = self._places[block.block_id] - self._base
        is_viewed = self._start <= at < len(self._blocks) and self._blocks[at] is block
        return at if is_viewed else None

    def _num_viewed(self) -> int:
        return len(self._blocks) - self._start - self._num_gaps

    def _drop(self, at: int) -> None:
        self._blocks[at] = self._keys[at] = None
        self._num_gaps += 1

    def _shift(self, num_places: int) -> None:
        """Note that each block has moved this far towards the end of the lists."""
        self._base -= num_places
        self._start += num_places
        self._passed += num_places
        self._last += num_places

    def _forget_unused(self) -> None:
        """Shorten the lists if less than half of them is in use."""
        num_viewed = self._num_viewed()
        if self._num_gaps > num_viewed:
            all_pairs = zip(self._blocks[self._start :], self._keys[self._start :], strict=True)
            pairs = [(block, key) for block, key in all_pairs if block is not None]
            kept = [block for block, _ in pairs]
            self._blocks, self._keys = [*kept], [key for _, key in pairs]
            self._start = self._passed = self._num_gaps = 0
            self._last = len(kept) - 1
            self._note_places(kept, 0)
        elif self._start > len(self._blocks) // 2:
            num_unused = self._start
            del self._blocks[:num_unused], self._keys[:num_unused]
            self._shift(-num_unused)
