//! References and pins: who holds a block, and when it may be allocated.

use prefetch_index::prefetch_index;

use crate::error::{Error, Result};
use crate::ids::BlockId;

use super::block::{Block, HINT_AHEAD, MAX_COUNT};
use super::free_queue::{END, Link};
use super::{AHEAD, BlockPool};

/// How many blocks ahead a free prefetches. Its loop is so short that [`AHEAD`] would not do.
const FREE_AHEAD: usize = 64;
/// Blocks that are freed together, from which on their hints point [`AHEAD`]. The memory needs that,
/// and of so many blocks few come after a hint that leads nowhere.
const MANY: usize = 512;

impl BlockPool {
    /// Takes `n` blocks from the head of the queue, each with one reference, and appends them to
    /// `allocated`. Cached blocks among them lose their key.
    ///
    /// O(n + pinned blocks ahead of them).
    ///
    /// # Errors
    /// [`Error::OutOfBlocks`] with fewer than `n` free.
    pub fn allocate(&mut self, n: usize, allocated: &mut Vec<BlockId>) -> Result<()> {
        if n > self.num_free {
            return Err(Error::OutOfBlocks { needed: n, free: self.num_free });
        }
        let num_cached = self.num_cached();
        let Self { queue, index, log, .. } = self;
        let (blocks, mut entries) = (&mut *queue.records, index.entries());
        let mut before = self.pinned_head.0;
        let mut at = blocks[before as usize].next();
        let start = allocated.len();
        allocated.resize(start + n, BlockId::NULL);
        let allocated = &mut allocated[start..];
        let lag = n.min(AHEAD); // turns from the prefetch of a key's entry to its removal
        for turn in 0..n + lag {
            if let Some(id) = allocated.get_mut(turn) {
                let mut block = &mut blocks[at as usize];
                while block.is_pinned() {
                    let next = block.next();
                    Block::join(blocks, before, at);
                    (before, at) = (at, next);
                    block = &mut blocks[at as usize];
                }
                let hint = block.hint();
                if block.has_key() {
                    entries.prefetch(block);
                }
                *id = BlockId(at);
                at = block.next();
                block.allocate();
                prefetch_index(&*blocks, hint.index());
            }
            if let Some(place) = turn.checked_sub(lag) {
                entries.remove(blocks, allocated[place], log);
            }
        }
        Block::join(blocks, before, at);
        self.pinned_head = BlockId(before);
        self.queue.len -= n;
        self.num_evicted += num_cached - self.num_cached();
        self.num_free -= n;
        Ok(())
    }

    /// Takes one reference on each block. A free block leaves the queue. Ignores the null block.
    ///
    /// # Errors
    /// [`Error::NoSuchBlock`] for an id outside the pool.
    pub fn touch(&mut self, ids: &[BlockId]) -> Result<()> {
        self.check_ids(ids)?;
        let blocks = &mut *self.queue.records;
        for (at, &id) in ids.iter().enumerate() {
            prefetch_block(blocks, ids.get(at + AHEAD));
            check_room(blocks[id.index()].num_refs(), id, ids)?;
        }
        let (mut num_left, mut num_pinned) = (0, 0);
        // Blocks often leave the queue together with their neighbours. So the neighbours of a gap
        // are joined when it grows no more.
        let (mut before, mut after) = (END, blocks[END as usize].next());
        for id in ids.iter().filter(|id| !id.is_null()) {
            let block = &mut blocks[id.index()];
            if block.num_refs() == 0 {
                let Link { prev, next } = block.leave();
                num_left += 1;
                num_pinned += usize::from(block.is_pinned());
                if *id == self.pinned_head {
                    self.pinned_head = BlockId::NULL;
                }
                if id.0 == before {
                    before = prev;
                } else if id.0 == after {
                    after = next;
                } else {
                    Block::join(blocks, before, after);
                    (before, after) = (prev, next);
                }
            }
            blocks[id.index()].add_ref();
        }
        Block::join(blocks, before, after);
        self.queue.len -= num_left;
        self.num_free -= num_left - num_pinned;
        Ok(())
    }

    /// Drops one reference on each block, ids given in eviction order. Blocks that reach 0 with a
    /// key go to the tail of the queue. Blocks that reach 0 without a key go to its head, because
    /// no lookup can find them. Both keep the order of `ids`. Ignores the null block.
    ///
    /// # Errors
    /// [`Error::NoSuchBlock`] for an id outside the pool, [`Error::InvalidBlock`] for a block
    /// that has fewer references than it is named times.
    pub fn free(&mut self, ids: &[BlockId]) -> Result<()> {
        self.check_ids(ids)?;
        self.drop_refs(ids.iter().copied()).or_else(|at| {
            self.touch(&ids[..at])?; // these have lost their references
            let why = "is free already: free each reference once";
            Err(Error::InvalidBlock { id: ids[at], why })
        })
    }

    /// As [`BlockPool::free`], for references that the caller holds.
    #[inline]
    pub(crate) fn release(&mut self, ids: impl Iterator<Item = BlockId> + Clone) {
        let dropped = self.drop_refs(ids);
        debug_assert!(dropped.is_ok(), "the caller holds a reference");
    }

    /// Drops one reference on each block. Blocks that reach 0 enter the queue: those with a key at
    /// the tail, the others at the head.
    ///
    /// # Errors
    /// The first place whose block has no reference. The blocks before it have lost theirs.
    #[inline]
    fn drop_refs(
        &mut self,
        ids: impl Iterator<Item = BlockId> + Clone,
    ) -> std::result::Result<(), usize> {
        let Self { queue, unhinted, num_free, .. } = self;
        let blocks = &mut *queue.records;
        let mut far = ids.clone();
        for id in far.by_ref().take(FREE_AHEAD) {
            prefetch_index(&*blocks, id.index());
        }
        let are_many = ids.size_hint().0 >= MANY;
        let mut hints = ids.clone().skip(if are_many { AHEAD } else { HINT_AHEAD });
        let (mut head, mut tail) = (END, blocks[END as usize].prev());
        let (mut num_entered, mut num_pinned) = (0, 0);
        let mut dropped = Ok(());
        for (at, id) in ids.enumerate() {
            if let Some(far) = far.next() {
                prefetch_index(&*blocks, far.index());
            }
            let hint = hints.next();
            let block = &mut blocks[id.index()];
            if block.num_refs() == 0 {
                if id.is_null() {
                    continue;
                }
                dropped = Err(at);
                break;
            }
            block.drop_ref();
            if block.num_refs() > 0 {
                continue;
            }
            num_entered += 1;
            num_pinned += usize::from(block.is_pinned());
            if block.has_key() {
                Block::join(blocks, tail, id.0);
                tail = id.0;
            } else {
                let next = blocks[head as usize].next();
                Block::join(blocks, head, id.0);
                Block::join(blocks, id.0, next);
                tail = if tail == head { id.0 } else { tail };
                head = id.0;
            }
            unhinted.enter(id, hint, blocks);
        }
        Block::join(blocks, tail, END);
        queue.len += num_entered;
        *num_free += num_entered - num_pinned;
        if head != END {
            self.pinned_head = BlockId::NULL;
        }
        dropped
    }

    /// How many of these blocks `allocate` could take. Ignores the null block.
    pub(crate) fn num_free_of(&self, ids: &[BlockId]) -> usize {
        let blocks = &*self.queue.records;
        let is_free = |(at, &id): (usize, &BlockId)| {
            prefetch_block(blocks, ids.get(at + AHEAD));
            let block = &blocks[id.index()];
            !id.is_null() && block.num_refs() == 0 && !block.is_pinned()
        };
        ids.iter().enumerate().filter(|&block| is_free(block)).count()
    }

    /// Holds each block for a copy. Ignores the null block.
    ///
    /// # Errors
    /// [`Error::NoSuchBlock`] for an id outside the pool.
    pub fn pin(&mut self, ids: &[BlockId]) -> Result<()> {
        self.check_ids(ids)?;
        for &id in ids {
            check_room(self.pins[id.index()], id, ids)?;
        }
        for (at, &id) in ids.iter().enumerate() {
            prefetch_block(&self.queue.records, ids.get(at + AHEAD));
            if id.is_null() {
                continue;
            }
            if self.pins[id.index()] == 0 {
                self.num_free -= usize::from(self.queue.contains(id));
                self.queue.records[id.index()].set_pinned(true);
            }
            self.pins[id.index()] += 1;
        }
        Ok(())
    }

    /// Drops one pin on each block. Ignores the null block.
    ///
    /// # Errors
    /// [`Error::NoSuchBlock`] for an id outside the pool, [`Error::InvalidBlock`] for a block
    /// that has fewer pins than it is named times.
    pub fn unpin(&mut self, ids: &[BlockId]) -> Result<()> {
        self.check_ids(ids)?;
        for (at, &id) in ids.iter().enumerate().filter(|(_, id)| !id.is_null()) {
            if self.pins[id.index()] == 0 {
                for &id in ids[..at].iter().filter(|id| !id.is_null()) {
                    self.pins[id.index()] += 1;
                }
                let why = "is not pinned: unpin each pin once";
                return Err(Error::InvalidBlock { id, why });
            }
            self.pins[id.index()] -= 1;
        }
        for (at, &id) in ids.iter().enumerate() {
            prefetch_block(&self.queue.records, ids.get(at + AHEAD));
            // A block that is named twice is unpinned once.
            if self.pins[id.index()] == 0 && self.block(id).is_pinned() {
                self.queue.records[id.index()].set_pinned(false);
                if self.queue.contains(id) {
                    self.num_free += 1;
                    self.pinned_head = BlockId::NULL;
                }
            }
        }
        Ok(())
    }
}

/// Begins to load a block that comes later.
#[inline]
fn prefetch_block(blocks: &[Block], id: Option<&BlockId>) {
    if let Some(id) = id {
        prefetch_index(blocks, id.index());
    }
}

/// Refuses to raise a count by the number of times that `ids` names the block, if it would exceed
/// [`MAX_COUNT`].
#[inline]
fn check_room(count: u32, id: BlockId, ids: &[BlockId]) -> Result<()> {
    if count as usize + ids.len() <= MAX_COUNT as usize {
        return Ok(());
    }
    let num_named = ids.iter().filter(|&&other| other == id).count();
    if id.is_null() || count as usize + num_named <= MAX_COUNT as usize {
        return Ok(());
    }
    let why = "would have more than 2**31 - 1 references or pins, the maximum: drop some first";
    Err(Error::InvalidBlock { id, why })
}
