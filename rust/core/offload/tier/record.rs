//! A tier as plain data, for snapshots.

use minicbor::{Decode, Encode};

use crate::error::Result;
use crate::group::{Attention, Model};
use crate::ids::BlockId;
use crate::key::{BlockKey, HashWidth};
use crate::ledger::damaged;

use super::HostTier;
use super::policy::PolicyRecord;
use crate::offload::MAX_READ_COUNT;

/// What is kept of a tier.
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

impl HostTier {
    pub(in crate::offload) fn to_record(&self) -> TierRecord {
        let resident = |slot: BlockId| {
            let key = self.pool.key(slot).filter(|_| self.policy.contains(slot))?;
            Some((slot, key, self.chains.parent(slot)))
        };
        TierRecord {
            width: self.hash_width(),
            residents: self.slots().filter_map(resident).collect(),
            awaited: self.chains.waiting(),
            empty: self.pool.free_order().collect(),
            policy: self.policy.to_record(),
            num_evicted: self.num_evicted,
        }
    }

    /// Whether a slot is in use and cannot be found.
    pub(in crate::offload) fn is_unfindable(&self, slot: BlockId) -> bool {
        slot.index() < self.pool.num_blocks()
            && self.pool.num_refs(slot) > 0
            && self.pool.key(slot).is_none()
    }

    /// Fills this tier, which must be new; all slots but `num_own` are resident or empty.
    pub(in crate::offload) fn fill_from(
        &mut self,
        record: TierRecord,
        num_own: usize,
        model: &Model,
    ) -> Result<()> {
        let TierRecord { width, residents, awaited, empty, policy, num_evicted } = record;
        let num_slots = self.num_slots();
        let is_slot = |slot: BlockId| (1..=num_slots).contains(&slot.index());
        let num_named = residents.len().saturating_add(empty.len()).saturating_add(num_own);
        if !width.is_sound() || num_named != num_slots || num_evicted >= MAX_READ_COUNT {
            return damaged("its host slots are not those of the tier");
        }
        let is_known = |key: &BlockKey| {
            width.fits(&key.hash) && usize::from(key.group.0) < model.groups().len()
        };
        if !residents
            .iter()
            .map(|(_, key, _)| key)
            .chain(awaited.iter().map(|(_, key)| key))
            .all(is_known)
        {
            return damaged("a host slot holds a hash of another width, or of no group");
        }
        // A block stands below another, or waits for one, in its own group.
        let is_above = |key: &BlockKey, slot_key: Option<BlockKey>| {
            let group = model.groups()[usize::from(key.group.0)];
            group.attention == Attention::Full
                && slot_key.is_some_and(|slot_key| slot_key.group == key.group)
        };
        self.pool.agree_width(width)?;
        self.pool.allocate(num_slots, &mut Vec::with_capacity(num_slots))?;
        for &(slot, key, _) in &residents {
            if !is_slot(slot)
                || self.pool.key(slot).is_some()
                || self.resident_or_in_flight(&key).is_some()
            {
                return damaged("a host slot holds two keys, or a key lies in two");
            }
            self.pool.hide(slot, &key);
        }
        for &(slot, key, parent) in &residents {
            let is_kept = is_slot(parent) && is_above(&key, self.pool.key(parent));
            if !parent.is_null() && !is_kept {
                return damaged("a host slot stands below an empty one, or one of another group");
            }
            self.chains.attach(slot, parent);
        }
        if self.chains.has_loop() {
            return damaged("host slots stand below one another");
        }
        if empty.iter().any(|&slot| !is_slot(slot) || self.pool.key(slot).is_some()) {
            return damaged("an empty host slot holds a key");
        }
        self.pool.free(&empty).or_else(|_| damaged("a host slot is empty twice"))?;
        let pool = &self.pool;
        let key_of = |slot| if is_slot(slot) { pool.key(slot) } else { None };
        self.policy.restore(policy, key_of)?;
        for (slot, parent) in awaited {
            if !is_above(&parent, key_of(slot)) || !self.chains.wait(slot, parent) {
                return damaged("an empty host slot waits for its parent, or one of another group");
            }
        }
        self.num_evicted = num_evicted;
        self.check().or_else(|error| damaged(&error.to_string()))
    }
}
