//! An eviction order of resident slots.
//!
//! ```text
//!   head [s][s][s][ ][ ][ ] tail     s: skipped, because it was not evictable
//!              ^skipped
//! ```
//!
//! A search for a victim begins behind the skipped slots. So it looks only once at a slot that is
//! not evictable, however often the tier needs room. When a skipped slot is evictable again, the
//! next search begins at the head.

use crate::error::{Error, Result};
use crate::ids::BlockId;
use crate::pool::FreeQueue;

/// Slots in eviction order. 9 bytes a slot.
#[derive(Clone, Debug)]
pub(in crate::offload::tier) struct EvictionOrder {
    queue: FreeQueue,
    /// Whether a slot is between the head and `skipped`, both included.
    is_skipped: Vec<bool>,
    /// No slot up to this one is evictable. Null if no such run is known.
    skipped: BlockId,
}

impl EvictionOrder {
    pub(super) const SLOT_BYTES: usize = 9;

    /// An empty order for slots `1..num_blocks`.
    pub(super) fn new(num_blocks: u32) -> Self {
        Self {
            queue: FreeQueue::empty(num_blocks),
            is_skipped: vec![false; num_blocks as usize],
            skipped: BlockId::NULL,
        }
    }

    /// The slots, to read their order.
    #[inline]
    pub(super) fn queue(&self) -> &FreeQueue {
        &self.queue
    }

    /// The first slot that was not skipped; the null block if there is none.
    #[inline]
    pub(super) fn first(&self) -> BlockId {
        self.queue.next(self.skipped)
    }

    #[inline]
    pub(super) fn push_back_all(&mut self, slots: impl Iterator<Item = BlockId>) {
        self.queue.push_back_all(slots);
    }

    /// Removes `slot`, which must be in the order.
    #[inline]
    pub(super) fn remove(&mut self, slot: BlockId) {
        if std::mem::take(&mut self.is_skipped[slot.index()]) && slot == self.skipped {
            self.skipped = self.queue.prev(slot);
        }
        self.queue.remove(slot);
    }

    /// Moves a run of neighbours to the tail, from its first to its last.
    #[inline]
    pub(super) fn move_run_to_back(&mut self, first: BlockId, last: BlockId) {
        if self.is_skipped[first.index()] {
            self.leave_skipped(first, last);
        }
        self.queue.move_run_to_back(first, last);
    }

    /// Puts a slot that is not in the order at the head. The next search begins there.
    pub(super) fn push_front(&mut self, slot: BlockId) {
        self.look_again();
        self.queue.push_front(slot);
    }

    /// Ends the skipped state of a run that begins among skipped slots.
    fn leave_skipped(&mut self, first: BlockId, last: BlockId) {
        let before = self.queue.prev(first);
        let mut at = first;
        while !at.is_null() && std::mem::take(&mut self.is_skipped[at.index()]) {
            if at == self.skipped {
                self.skipped = before;
            }
            at = if at == last { BlockId::NULL } else { self.queue.next(at) };
        }
    }

    /// The first evictable slot. It stays in the order.
    #[inline]
    pub(super) fn first_evictable(
        &mut self,
        is_evictable: impl Fn(BlockId) -> bool,
    ) -> Option<BlockId> {
        let mut at = self.first();
        while !at.is_null() {
            if is_evictable(at) {
                return Some(at);
            }
            self.is_skipped[at.index()] = true;
            self.skipped = at;
            at = self.queue.next(at);
        }
        None
    }

    /// Whether `slot` was skipped.
    #[inline]
    pub(super) fn has_skipped(&self, slot: BlockId) -> bool {
        self.is_skipped[slot.index()]
    }

    /// Begins the next search at the head if one of these slots was skipped.
    #[inline]
    pub(super) fn retry(&mut self, mut slots: impl Iterator<Item = BlockId>) {
        if !self.skipped.is_null() && slots.any(|slot| self.is_skipped[slot.index()]) {
            self.look_again();
        }
    }

    /// Begins the next search at the head.
    fn look_again(&mut self) {
        let mut at = self.skipped;
        while !at.is_null() {
            self.is_skipped[at.index()] = false;
            at = self.queue.prev(at);
        }
        self.skipped = BlockId::NULL;
    }

    pub(super) fn clear(&mut self) {
        self.queue.clear();
        self.is_skipped.fill(false);
        self.skipped = BlockId::NULL;
    }

    /// Bytes on the heap.
    #[cfg(test)]
    pub(super) fn memory_bytes(&self) -> usize {
        self.queue.memory_bytes() + self.is_skipped.capacity()
    }

    /// Verifies that exactly the slots from the head to `skipped` are skipped, and that none of
    /// them is evictable.
    ///
    /// # Errors
    /// [`Error::Broken`].
    pub(super) fn check(&self, is_evictable: impl Fn(BlockId) -> bool) -> Result<()> {
        self.queue.check()?;
        let mut num_skipped = 0;
        let mut at = self.skipped;
        while !at.is_null() {
            if !self.queue.contains(at) || !self.is_skipped[at.index()] || is_evictable(at) {
                return Err(Error::Broken(format!(
                    "slot {at} is skipped although it is evictable"
                )));
            }
            num_skipped += 1;
            at = self.queue.prev(at);
        }
        if self.is_skipped.iter().filter(|&&is_skipped| is_skipped).count() != num_skipped {
            return Err(Error::Broken("skipped slots are miscounted".to_owned()));
        }
        Ok(())
    }
}
