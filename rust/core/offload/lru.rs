//! Least recently ranked first.

use crate::free_queue::FreeQueue;
use crate::ids::BlockId;

/// Resident slots in the order of their last rank.
///
/// A chain is ranked as a whole, tail before root, so a slot is always less recent than its
/// parent: the least recent slot that is not pinned is nearly always a leaf. 8 bytes a slot.
#[derive(Clone, Debug)]
pub(super) struct Lru {
    order: FreeQueue,
}

impl Lru {
    /// For slots `1..num_blocks`, none of them resident yet.
    pub(super) fn new(num_blocks: u32) -> Self {
        Self { order: FreeQueue::empty(num_blocks) }
    }

    /// A slot became resident.
    pub(super) fn stored(&mut self, slot: BlockId) {
        self.order.push_back(slot);
    }

    /// A slot was used; the last one ranked is the last to go. Slots that are not resident are
    /// passed over.
    pub(super) fn ranked(&mut self, slot: BlockId) {
        if self.order.contains(slot) {
            self.order.remove(slot);
            self.order.push_back(slot);
        }
    }

    /// A slot is no longer resident.
    pub(super) fn removed(&mut self, slot: BlockId) {
        if self.order.contains(slot) {
            self.order.remove(slot);
        }
    }

    /// The slot ranked next after `slot`, or the least recent one after the null block; the null
    /// block at the end.
    pub(super) fn after(&self, slot: BlockId) -> BlockId {
        self.order.next(slot)
    }

    /// Nothing is resident any more.
    pub(super) fn clear(&mut self) {
        self.order.clear();
    }

    /// How many slots are resident.
    pub(super) fn len(&self) -> usize {
        self.order.len()
    }

    /// Whether `slot` is resident.
    pub(super) fn contains(&self, slot: BlockId) -> bool {
        self.order.contains(slot)
    }
}
