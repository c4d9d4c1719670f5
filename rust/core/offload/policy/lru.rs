//! Least recently ranked first.

use crate::error::Result;
use crate::free_queue::FreeQueue;
use crate::ids::BlockId;
use crate::key::BlockKey;

use super::{Pass, Policy, first_that_may_go};

/// Resident slots in the order of their last rank.
///
/// A chain is ranked as a whole, tail before root, so a slot is always less recent than its
/// parent: the least recent slot that is not pinned is nearly always a leaf. 8 bytes a slot.
#[derive(Clone, Debug)]
pub(in crate::offload) struct Lru {
    pub(super) order: FreeQueue,
}

impl Lru {
    /// For slots `1..num_blocks`, none of them resident yet.
    pub(super) fn new(num_blocks: u32) -> Self {
        Self { order: FreeQueue::empty(num_blocks) }
    }
}

impl Policy for Lru {
    const SLOT_BYTES: usize = 8;

    fn stored<'a>(&mut self, slots: impl Iterator<Item = (BlockId, &'a BlockKey)>) {
        slots.for_each(|(slot, _)| self.order.push_back(slot));
    }

    fn ranked(&mut self, slots: impl Iterator<Item = (BlockId, bool)>) {
        // A chain that was last ranked as a whole still stands together: it moves as a whole.
        let mut run: Option<(BlockId, BlockId)> = None;
        for (slot, _) in slots {
            if !self.order.contains(slot) {
                continue;
            }
            run = match run {
                Some((first, last)) if self.order.next(last) == slot => Some((first, slot)),
                Some((first, last)) => {
                    self.order.move_run_to_back(first, last);
                    Some((slot, slot))
                }
                None => Some((slot, slot)),
            };
        }
        if let Some((first, last)) = run {
            self.order.move_run_to_back(first, last);
        }
    }

    #[inline]
    fn removed(&mut self, slot: BlockId) {
        if self.order.contains(slot) {
            self.order.remove(slot);
        }
    }

    #[inline]
    fn victim(&self, pass: &mut Pass, may_go: impl Fn(BlockId) -> bool) -> Option<BlockId> {
        first_that_may_go(&self.order, &mut pass[0], may_go)
    }

    fn clear(&mut self) {
        self.order.clear();
    }

    fn len(&self) -> usize {
        self.order.len()
    }

    fn contains(&self, slot: BlockId) -> bool {
        self.order.contains(slot)
    }

    #[cfg(test)]
    fn memory_bytes(&self) -> usize {
        self.order.memory_bytes()
    }

    fn check(&self, _: impl Fn(BlockId) -> Option<BlockKey>) -> Result<()> {
        self.order.check()
    }
}
