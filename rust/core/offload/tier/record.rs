//! A tier as plain data, for snapshots.

use minicbor::{Decode, Encode};

use crate::error::Result;
use crate::group::{Attention, Model};
use crate::ids::BlockId;
use crate::key::{BlockKey, HashWidth};
use crate::ledger::damaged;

use super::Tier;
use super::policy::PolicyRecord;

/// Counts of a snapshot stay below this, so that they cannot overflow later.
pub(in crate::offload) const MAX_READ_COUNT: usize = 1 << 62;

/// A tier as plain data.
#[derive(Clone, Debug, Encode, Decode)]
pub(in crate::offload) struct TierRecord {
    #[n(0)]
    width: HashWidth,
    /// Each slot, what it holds, and the slot above it.
    #[n(1)]
    residents: Vec<(BlockId, BlockKey, BlockId)>,
    #[n(2)]
    awaited: Vec<(BlockId, BlockKey)>,
    /// Empty slots, next to be given out first.
    #[n(3)]
    empty: Vec<BlockId>,
    #[n(4)]
    policy: PolicyRecord,
    #[n(5)]
    num_evicted: usize,
}

impl Tier {
    pub(in crate::offload) fn to_record(&self) -> TierRecord {
        let resident = |slot: BlockId| {
            let key = self.slots.key(slot).filter(|_| self.policy.contains(slot))?;
            Some((slot, key, self.chains.parent(slot)))
        };
        TierRecord {
            width: self.slots.pool.hash_width(),
            residents: self.slots.iter().filter_map(resident).collect(),
            awaited: self.chains.awaited(),
            empty: self.slots.pool.free_order().collect(),
            policy: self.policy.to_record(),
            num_evicted: self.num_evicted,
        }
    }

    /// Fills this new tier. All slots but `num_own` are resident or empty.
    pub(in crate::offload) fn fill_from(
        &mut self,
        record: TierRecord,
        num_own: usize,
        model: &Model,
    ) -> Result<()> {
        let TierRecord { width, residents, awaited, empty, policy, num_evicted } = record;
        let num_slots = self.slots.len();
        let num_named = residents.len().saturating_add(empty.len()).saturating_add(num_own);
        if !width.is_sound() || num_named != num_slots || num_evicted >= MAX_READ_COUNT {
            return damaged("its host slots are not those of the tier");
        }
        let is_known = |key: &BlockKey| {
            width.fits(&key.hash) && usize::from(key.group.0) < model.groups().len()
        };
        let awaited_keys = awaited.iter().map(|(_, key)| key);
        if !residents.iter().map(|(_, key, _)| key).chain(awaited_keys).all(is_known) {
            return damaged("a host slot holds a hash of another width, or of no group");
        }
        // A block's parent is of its own group, in the tier or awaited.
        let is_above = |key: &BlockKey, slot_key: Option<BlockKey>| {
            let group = model.groups()[usize::from(key.group.0)];
            group.attention == Attention::Full
                && slot_key.is_some_and(|slot_key| slot_key.group == key.group)
        };
        self.slots.pool.agree_width(width)?;
        self.slots.take(num_slots)?;
        for &(slot, key, _) in &residents {
            if !self.slots.restore(slot, &key) {
                return damaged("a host slot holds two keys, or a key lies in two");
            }
        }
        for &(slot, key, parent) in &residents {
            let is_kept = is_above(&key, self.slots.key(parent));
            if !parent.is_null() && !is_kept {
                return damaged("the parent of a host slot is empty, or of another group");
            }
            self.chains.attach(slot, parent);
        }
        if self.chains.has_loop() {
            return damaged("host slots are parents of one another");
        }
        let slots = &self.slots;
        if empty.iter().any(|&slot| !slots.contains(slot) || slots.key(slot).is_some()) {
            return damaged("an empty host slot holds a key");
        }
        self.slots.pool.free(&empty).or_else(|_| damaged("a host slot is empty twice"))?;
        let slots = &self.slots;
        self.policy.restore(policy, |slot| slots.key(slot))?;
        for (slot, parent) in awaited {
            if !is_above(&parent, self.slots.key(slot)) || !self.chains.await_key(slot, parent) {
                return damaged(
                    "an empty host slot awaits its parent, or the parent is of another group",
                );
            }
        }
        self.num_evicted = num_evicted;
        self.check().or_else(|error| damaged(&error.to_string()))
    }
}
