//! References and pins: who holds a block, and when it may be allocated.

use prefetch_index::prefetch_index;

use crate::error::{Error, Result};
use crate::ids::BlockId;

use super::free_queue::{END, Link};
use super::state::{BlockState, HINT_AHEAD, MAX_COUNT};
use super::{AHEAD, BlockPool};

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
        let states = queue.records.as_mut_slice();
        let mut before = self.pinned_head.0;
        let mut at = states[before as usize].next();
        let start = allocated.len();
        allocated.reserve(n);
        let lag = n.min(AHEAD); // turns from the prefetch of a key's entry to its removal
        for turn in 0..n + lag {
            if turn < n {
                while states[at as usize].is_pinned() {
                    BlockState::join(states, before, at);
                    before = at;
                    at = states[at as usize].next();
                }
                let state = states[at as usize];
                prefetch_index(&*states, state.hint().index());
                if state.has_key() {
                    index.prefetch(state.hint()); // most likely, it has a key as well
                    index.prefetch_entry(BlockId(at));
                }
                states[at as usize].allocate();
                allocated.push(BlockId(std::mem::replace(&mut at, state.next())));
            }
            if let Some(place) = turn.checked_sub(lag) {
                let id = allocated[start + place];
                let state = &mut states[id.index()];
                if state.has_key() {
                    state.set_key(false);
                    index.remove(id, log);
                }
            }
        }
        BlockState::join(states, before, at);
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
        for (at, &id) in ids.iter().enumerate() {
            self.prefetch_state(ids.get(at + AHEAD));
            check_room(self.state(id).num_refs(), id, ids)?;
        }
        let states = self.queue.records.as_mut_slice();
        let (mut num_left, mut num_pinned) = (0, 0);
        // Blocks often leave the queue together with their neighbours. So the neighbours of a gap
        // are joined when it grows no more.
        let (mut before, mut after) = (END, states[END as usize].next());
        for id in ids.iter().filter(|id| !id.is_null()) {
            let state = &mut states[id.index()];
            if state.num_refs() == 0 {
                let Link { prev, next } = state.leave();
                num_left += 1;
                num_pinned += usize::from(state.is_pinned());
                if *id == self.pinned_head {
                    self.pinned_head = BlockId::NULL;
                }
                if id.0 == before {
                    before = prev;
                } else if id.0 == after {
                    after = next;
                } else {
                    BlockState::join(states, before, after);
                    (before, after) = (prev, next);
                }
            }
            states[id.index()].add_ref();
        }
        BlockState::join(states, before, after);
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
        let states = queue.records.as_mut_slice();
        let mut far = ids.clone().skip(HINT_AHEAD);
        let (mut head, mut tail) = (END, states[END as usize].prev());
        let (mut num_entered, mut num_pinned) = (0, 0);
        let mut dropped = Ok(());
        for (at, id) in ids.enumerate() {
            let far = far.next();
            if let Some(far) = far {
                prefetch_index(&*states, far.index());
            }
            if id.is_null() {
                continue;
            }
            let state = &mut states[id.index()];
            if state.num_refs() == 0 {
                dropped = Err(at);
                break;
            }
            state.drop_ref();
            if state.num_refs() > 0 {
                continue;
            }
            num_entered += 1;
            num_pinned += usize::from(state.is_pinned());
            if state.has_key() {
                BlockState::join(states, tail, id.0);
                tail = id.0;
            } else {
                let next = states[head as usize].next();
                BlockState::join(states, head, id.0);
                BlockState::join(states, id.0, next);
                tail = if tail == head { id.0 } else { tail };
                head = id.0;
            }
            unhinted.enter(id, far, states);
        }
        BlockState::join(states, tail, END);
        queue.len += num_entered;
        *num_free += num_entered - num_pinned;
        if head != END {
            self.pinned_head = BlockId::NULL;
        }
        dropped
    }

    /// How many of these blocks `allocate` could take. Ignores the null block.
    pub(crate) fn num_free_of(&self, ids: &[BlockId]) -> usize {
        let is_free = |(at, &id): (usize, &BlockId)| {
            self.prefetch_state(ids.get(at + AHEAD));
            let state = self.state(id);
            !id.is_null() && state.num_refs() == 0 && !state.is_pinned()
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
            self.prefetch_state(ids.get(at + AHEAD));
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
            self.prefetch_state(ids.get(at + AHEAD));
            // A block that is named twice is unpinned once.
            if self.pins[id.index()] == 0 && self.state(id).is_pinned() {
                self.queue.records[id.index()].set_pinned(false);
                if self.queue.contains(id) {
                    self.num_free += 1;
                    self.pinned_head = BlockId::NULL;
                }
            }
        }
        Ok(())
    }

    /// Begins to load what is read of a block that comes later.
    #[inline]
    fn prefetch_state(&self, id: Option<&BlockId>) {
        if let Some(id) = id {
            prefetch_index(&self.queue.records, id.index());
        }
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
