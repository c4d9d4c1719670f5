//! An order in which resident slots go.
//!
//! ```text
//!   head [p][p][p][ ][ ][ ] tail     p: passed over, because it could not go when it was looked at
//!              ^passed
//! ```
//!
//! A search for a victim begins behind what was passed over, so it looks at a slot that may not go
//! once, however often room is asked for. When one of them may go again, the search begins anew.

use crate::error::{Error, Result};
use crate::ids::BlockId;
use crate::pool::FreeQueue;

/// Slots in the order in which they go. 9 bytes a slot.
#[derive(Clone, Debug)]
pub(in crate::offload::tier) struct EvictionOrder {
    queue: FreeQueue,
    /// Whether a slot stands between the head and `passed`, both included.
    is_passed: Vec<bool>,
    /// No slot up to this one may go; null: none is known to be such.
    passed: BlockId,
}

impl EvictionOrder {
    pub(super) const SLOT_BYTES: usize = 9;

    /// For slots `1..num_blocks`, none of them in it.
    pub(super) fn new(num_blocks: u32) -> Self {
        Self {
            queue: FreeQueue::empty(num_blocks),
            is_passed: vec![false; num_blocks as usize],
            passed: BlockId::NULL,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.queue.len()
    }

    #[inline]
    pub(super) fn contains(&self, slot: BlockId) -> bool {
        self.queue.contains(slot)
    }

    /// The slot after `slot`; the null block at the end.
    #[inline]
    pub(super) fn next(&self, slot: BlockId) -> BlockId {
        self.queue.next(slot)
    }

    /// The first slot that was not passed over; the null block if there is none.
    #[inline]
    pub(super) fn first(&self) -> BlockId {
        self.queue.next(self.passed)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.queue.iter()
    }

    #[inline]
    pub(super) fn push_back(&mut self, slot: BlockId) {
        self.queue.push_back(slot);
    }

    #[inline]
    pub(super) fn push_back_all(&mut self, slots: impl Iterator<Item = BlockId>) {
        self.queue.push_back_all(slots);
    }

    /// Takes `slot` out. It must be in.
    #[inline]
    pub(super) fn remove(&mut self, slot: BlockId) {
        if std::mem::take(&mut self.is_passed[slot.index()]) && slot == self.passed {
            self.passed = self.queue.prev(slot);
        }
        self.queue.remove(slot);
    }

    /// Moves a run of neighbours to the tail, from its first to its last.
    #[inline]
    pub(super) fn move_run_to_back(&mut self, first: BlockId, last: BlockId) {
        if self.is_passed[first.index()] {
            self.leave_passed(first, last);
        }
        self.queue.move_run_to_back(first, last);
    }

    /// A run that begins among those passed over leaves them.
    fn leave_passed(&mut self, first: BlockId, last: BlockId) {
        let before = self.queue.prev(first);
        let mut at = first;
        while !at.is_null() && std::mem::take(&mut self.is_passed[at.index()]) {
            if at == self.passed {
                self.passed = before;
            }
            at = if at == last { BlockId::NULL } else { self.queue.next(at) };
        }
    }

    /// The first slot that may go. It stays.
    #[inline]
    pub(super) fn first_that_may_go(
        &mut self,
        may_go: impl Fn(BlockId) -> bool,
    ) -> Option<BlockId> {
        let mut at = self.first();
        while !at.is_null() {
            if may_go(at) {
                return Some(at);
            }
            self.is_passed[at.index()] = true;
            self.passed = at;
            at = self.queue.next(at);
        }
        None
    }

    /// Whether `slot` was passed over.
    #[inline]
    pub(super) fn has_passed(&self, slot: BlockId) -> bool {
        self.is_passed[slot.index()]
    }

    /// These slots may go again, perhaps.
    #[inline]
    pub(super) fn may_go_again(&mut self, mut slots: impl Iterator<Item = BlockId>) {
        if !self.passed.is_null() && slots.any(|slot| self.is_passed[slot.index()]) {
            let mut at = self.passed;
            while !at.is_null() {
                self.is_passed[at.index()] = false;
                at = self.queue.prev(at);
            }
            self.passed = BlockId::NULL;
        }
    }

    pub(super) fn clear(&mut self) {
        self.queue.clear();
        self.is_passed.fill(false);
        self.passed = BlockId::NULL;
    }

    /// Bytes of heap it holds.
    #[cfg(test)]
    pub(super) fn memory_bytes(&self) -> usize {
        self.queue.memory_bytes() + self.is_passed.capacity()
    }

    /// Verifies that exactly the slots from the head to `passed` were passed over, and that none of
    /// them may go.
    ///
    /// # Errors
    /// [`Error::Broken`].
    pub(super) fn check(&self, may_go: impl Fn(BlockId) -> bool) -> Result<()> {
        self.queue.check()?;
        let mut num_passed = 0;
        let mut at = self.passed;
        while !at.is_null() {
            if !self.queue.contains(at) || !self.is_passed[at.index()] || may_go(at) {
                return Err(Error::Broken(format!("slot {at} was passed over and may go")));
            }
            num_passed += 1;
            at = self.queue.prev(at);
        }
        if self.is_passed.iter().filter(|&&is_passed| is_passed).count() != num_passed {
            return Err(Error::Broken("slots passed over are miscounted".to_owned()));
        }
        Ok(())
    }
}
