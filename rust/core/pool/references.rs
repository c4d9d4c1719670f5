//! References and pins: who holds a block, and when it may be allocated.

use crate::error::{Error, Result};
use crate::ids::BlockId;

use super::BlockPool;

/// Counts stay below this number, and no call names as many blocks, so no count can wrap.
const MAX_COUNT: u32 = u32::MAX / 2;

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
        allocated.reserve(n);
        let first = allocated.len();
        let mut run = first;
        let mut at = self.queue.next(self.pinned_head);
        for _ in 0..n {
            while self.pins[at.index()] > 0 {
                // Blocks leave the queue run by run, and a pinned block ends a run.
                self.queue.remove_run(&allocated[run..]);
                run = allocated.len();
                self.pinned_head = at;
                at = self.queue.next(at);
            }
            allocated.push(at);
            self.refs[at.index()] = 1;
            at = self.queue.next(at);
        }
        self.queue.remove_run(&allocated[run..]);
        let num_cached = self.num_cached();
        self.drop_keys(&allocated[first..]);
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
        check_room(&self.refs, ids)?;
        for &id in ids {
            if id.is_null() {
                continue;
            }
            if self.refs[id.index()] == 0 {
                self.queue.remove(id);
                self.num_free -= usize::from(self.pins[id.index()] == 0);
                if id == self.pinned_head {
                    self.pinned_head = BlockId::NULL;
                }
            }
            self.refs[id.index()] += 1;
        }
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
        decrement(&mut self.refs, ids, "is free already: free each reference once", |_| ())?;
        for id in ids.iter().filter(|id| !id.is_null()) {
            self.refs[id.index()] += 1; // `release` drops them again
        }
        self.release(ids.iter().copied());
        Ok(())
    }

    /// As [`BlockPool::free`] in one pass, for references that the caller holds.
    #[inline]
    pub(crate) fn release(&mut self, ids: impl Iterator<Item = BlockId>) {
        let Self { refs, pins, index, num_free, .. } = self;
        let mut unkeyed = Vec::new();
        let goes_last = |id: &BlockId| {
            if id.is_null() {
                return false;
            }
            let num_refs = &mut refs[id.index()];
            debug_assert!(*num_refs > 0, "the caller holds a reference");
            *num_refs = num_refs.saturating_sub(1);
            if *num_refs > 0 {
                return false;
            }
            *num_free += usize::from(pins[id.index()] == 0);
            if !index.has_key(*id) {
                unkeyed.push(*id);
                return false;
            }
            true
        };
        self.queue.push_back_all(ids.filter(goes_last));
        if !unkeyed.is_empty() {
            self.queue.push_front_all(unkeyed.into_iter());
            self.pinned_head = BlockId::NULL;
        }
    }

    /// Holds each block for a copy. Ignores the null block.
    ///
    /// # Errors
    /// [`Error::NoSuchBlock`] for an id outside the pool.
    pub fn pin(&mut self, ids: &[BlockId]) -> Result<()> {
        self.check_ids(ids)?;
        check_room(&self.pins, ids)?;
        for &id in ids.iter().filter(|id| !id.is_null()) {
            let is_first = self.pins[id.index()] == 0;
            self.num_free -= usize::from(is_first && self.queue.contains(id));
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
        let (queue, mut num_released) = (&self.queue, 0);
        decrement(&mut self.pins, ids, "is not pinned: unpin each pin once", |id| {
            num_released += usize::from(queue.contains(id));
        })?;
        self.num_free += num_released;
        if num_released > 0 {
            self.pinned_head = BlockId::NULL;
        }
        Ok(())
    }
}

/// Refuses blocks whose count is at its maximum.
fn check_room(counts: &[u32], ids: &[BlockId]) -> Result<()> {
    match ids.iter().find(|id| counts[id.index()] >= MAX_COUNT) {
        Some(&id) => Err(Error::InvalidBlock {
            id,
            why: "has 2**31 - 1 references or pins, the maximum: drop some first",
        }),
        None => Ok(()),
    }
}

/// Takes one from the count of each block in range, or changes nothing if a count would fall below
/// 0. Ignores the null block. Calls `on_zero` with each block whose count reaches 0, even if an
/// error follows.
#[inline]
fn decrement(
    counts: &mut [u32],
    ids: &[BlockId],
    why: &'static str,
    mut on_zero: impl FnMut(BlockId),
) -> Result<()> {
    for (at, &id) in ids.iter().enumerate().filter(|(_, id)| !id.is_null()) {
        let count = &mut counts[id.index()];
        if *count == 0 {
            for &id in ids[..at].iter().filter(|id| !id.is_null()) {
                counts[id.index()] += 1;
            }
            return Err(Error::InvalidBlock { id, why });
        }
        *count -= 1;
        if *count == 0 {
            on_zero(id);
        }
    }
    Ok(())
}
