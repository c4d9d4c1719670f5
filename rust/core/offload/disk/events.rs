//! The events of the disk tier. They leave out claims, because the blocks lie in a shared store.
//!
//! The pool records each key that the index gains or loses. So a claim's key is remembered until its
//! removal was taken from the record.

use std::collections::BTreeSet;

use crate::event::Event;
use crate::key::BlockKey;
use crate::offload::OffloadScheduler;
use crate::offload::tier::Tier;

/// What is left out, and the events that are not taken yet.
#[derive(Clone, Debug, Default)]
pub(super) struct DiskEvents {
    pending: Vec<Event>,
    claims: BTreeSet<BlockKey>,
}

impl DiskEvents {
    /// Takes what the pool has recorded.
    fn collect(&mut self, tier: &mut Tier) {
        for event in tier.slots.pool.take_events() {
            match event {
                Event::Removed { mut hashes, group } => {
                    hashes.retain(|&hash| !self.claims.remove(&BlockKey { hash, group }));
                    if !hashes.is_empty() {
                        self.pending.push(Event::Removed { hashes, group });
                    }
                }
                other => self.pending.push(other),
            }
        }
    }

    /// Leaves out the blocks of these keys, which `publish` makes findable.
    pub(super) fn without<T>(
        &mut self,
        tier: &mut Tier,
        keys: impl Iterator<Item = BlockKey>,
        publish: impl FnOnce(&mut Tier) -> T,
    ) -> T {
        if !tier.slots.pool.has_events() {
            return publish(tier);
        }
        self.collect(tier);
        let published = publish(tier);
        tier.slots.pool.take_events();
        self.claims.extend(keys);
        published
    }
}

impl OffloadScheduler {
    /// The events of the disk tier since the last call, oldest first. Claims have none.
    pub fn take_disk_events(&mut self) -> Vec<Event> {
        let Some(disk) = &mut self.disk else { return Vec::new() };
        disk.events.collect(&mut disk.tier);
        std::mem::take(&mut disk.events.pending)
    }

    /// Reports that the disk tier is empty. What it has is adopted anew, and may be less than what
    /// the scheduler of the snapshot has reported.
    pub(crate) fn report_empty_disk(&mut self) {
        if let Some(disk) = &mut self.disk
            && disk.tier.slots.pool.has_events()
        {
            disk.events.pending.push(Event::Cleared);
        }
    }

    /// The claims in the index, if events are recorded and all are taken.
    pub fn num_claims(&self) -> usize {
        self.disk.as_ref().map_or(0, |disk| disk.events.claims.len())
    }
}
