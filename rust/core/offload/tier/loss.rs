//! Slots that a tier drops although there is room: their content did not come, or is damaged.

use crate::error::Result;
use crate::ids::BlockId;

use super::Tier;
use super::policy::{AnyPolicy, Policy, with_policy};

impl Tier {
    /// Drops the slots of a store that nobody waits for any more, and all slots below them. Without
    /// their prefix these could not be evicted in order.
    pub(in crate::offload) fn fence(&mut self, slots: &[BlockId]) -> Result<()> {
        let is_filling = |slot: &BlockId| self.slots.is_filling(*slot);
        let lost: Vec<BlockId> = slots.iter().copied().filter(is_filling).collect();
        if lost.is_empty() { Ok(()) } else { self.drop_below(&lost) }
    }

    /// Drops the keys of those of `slots` that a job fills, because their content did not come. They
    /// stay in use. Their children await them.
    pub(in crate::offload) fn discard(&mut self, slots: &[BlockId]) {
        let is_filling = |slot: &BlockId| self.slots.is_filling(*slot);
        let lost: Vec<BlockId> = slots.iter().copied().filter(is_filling).collect();
        self.cut(&lost);
        self.slots.withdraw(&lost);
        self.num_losses += lost.len() as u64;
    }

    /// Takes slots that still hold their keys out of their chains and out of the eviction order.
    /// Their children await them.
    pub(super) fn cut(&mut self, lost: &[BlockId]) {
        for root in self.chains.roots(lost) {
            with_policy!(&mut self.policy, policy => policy.split(root));
        }
        let mut parents = Vec::with_capacity(lost.len());
        for &slot in lost {
            if let Some(key) = self.slots.key(slot) {
                self.chains.abandon(slot, key);
                parents.push(self.forget(slot));
            }
        }
        self.retry(&parents);
    }

    /// Drops `lost` and all slots below them. Those of jobs in flight stay in use until their jobs
    /// end.
    fn drop_below(&mut self, lost: &[BlockId]) -> Result<()> {
        let all = self.chains.below(lost);
        let (filling, residents): (Vec<BlockId>, Vec<BlockId>) =
            all.iter().partition(|&&slot| self.slots.is_filling(slot));
        self.slots.withdraw(&filling);
        let parents: Vec<BlockId> = all.into_iter().map(|slot| self.forget(slot)).collect();
        self.retry(&parents);
        self.num_losses += u64::from(!residents.is_empty());
        self.slots.pool.evict(&residents)?;
        self.slots.pool.free(&residents)
    }

    /// Drops those of `slots` that are resident, because their content is damaged. Their children
    /// await them. Returns the dropped slots, sorted, for the caller to free.
    pub(in crate::offload) fn drop_damaged(&mut self, slots: &[BlockId]) -> Result<Vec<BlockId>> {
        let mut lost = slots.to_vec();
        lost.sort_unstable();
        lost.dedup();
        lost.retain(|&slot| self.policy.contains(slot));
        self.cut(&lost);
        self.slots.pool.evict(&lost)?;
        self.num_losses += u64::from(!lost.is_empty());
        Ok(lost)
    }
}
