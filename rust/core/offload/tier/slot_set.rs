//! A set of slots, one bit a slot.

use crate::ids::BlockId;

/// Slots that a walk has visited. So walks that meet look at what they share only once.
#[derive(Debug)]
pub(in crate::offload) struct SlotSet(Vec<u64>);

impl SlotSet {
    /// An empty set for slots below `num_blocks`.
    pub(in crate::offload) fn new(num_blocks: usize) -> Self {
        Self(vec![0; num_blocks.div_ceil(64)])
    }

    /// Adds a slot. Returns whether it is new.
    #[inline]
    pub(in crate::offload) fn insert(&mut self, slot: BlockId) -> bool {
        let (word, bit) = (&mut self.0[slot.index() / 64], 1 << (slot.index() % 64));
        let is_new = *word & bit == 0;
        *word |= bit;
        is_new
    }
}
