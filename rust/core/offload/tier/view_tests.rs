//! A tier as tests see it.

use super::policy::PolicyRecord;
use super::*;

/// All that decides what happens to a slot, the eviction order aside.
#[derive(Clone, Copy, Debug)]
pub(in crate::offload) struct SlotView {
    pub(in crate::offload) key: Option<BlockKey>,
    pub(in crate::offload) parent: BlockId,
    pub(in crate::offload) awaited: Option<BlockKey>,
    pub(in crate::offload) is_filling: bool,
    pub(in crate::offload) is_loading: bool,
    pub(in crate::offload) num_refs: u32,
    pub(in crate::offload) num_pins: u32,
}

impl Tier {
    /// What holds for a slot.
    pub(in crate::offload) fn view(&self, slot: BlockId) -> SlotView {
        SlotView {
            key: self.slots.key(slot),
            parent: self.chains.parent(slot),
            awaited: self.chains.awaited_by(slot),
            is_filling: self.slots.is_filling(slot),
            is_loading: self.slots.is_loading(slot),
            num_refs: self.slots.pool.num_refs(slot),
            num_pins: self.slots.pool.num_pins(slot),
        }
    }

    /// The empty slots, the next to be filled first.
    pub(in crate::offload) fn empty_order(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.slots.pool.free_order()
    }

    /// The resident slots, the first victim first. Requires LRU.
    pub(in crate::offload) fn eviction_order(&self) -> Vec<BlockId> {
        match self.policy.to_record() {
            PolicyRecord::Lru { order } => order,
            PolicyRecord::HitDensity { .. } => unreachable!("the test builds LRU tiers"),
        }
    }
}
