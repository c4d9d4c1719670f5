//! Demotes: copies of host blocks to the disk, ahead of their eviction from the host.

use std::iter::successors;

use crate::error::Result;
use crate::ids::BlockId;
use crate::key::BlockKey;
use crate::offload::OffloadScheduler;
use crate::offload::tier::{Filling, SlotSet, Tier};
use crate::offload::transfer_event::Direction;

use super::job::{TierInFlight, TierJob};
use super::{Admit, Disk, DiskMode};

/// A host slot to demote, with what it holds.
type Due = (BlockId, BlockKey);

impl Disk {
    /// Remembers the keys that the host has evicted.
    fn note_evicted(&mut self, host: &mut Tier) {
        if let (Some(evicted), Some(keys)) = (&mut self.evicted, &mut host.evicted) {
            keys.drain(..).for_each(|key| _ = evicted.see(&key.hash, true));
        }
    }

    /// Whether a block that a store has published is due.
    fn is_admitted(&mut self, key: &BlockKey) -> bool {
        self.evicted.as_mut().is_none_or(|evicted| evicted.see(&key.hash, false))
    }

    /// Whether the disk has a block, or will have it.
    fn has(&self, slot: BlockId, key: &BlockKey) -> bool {
        self.tier.resident_or_filling(key).is_some() || self.queue.contains(slot, key)
    }

    /// Lets a resident host slot become due, after those above it: a chain without its first blocks
    /// serves no request.
    fn push(&mut self, host: &Tier, slot: BlockId) {
        let above = |slot: &BlockId| Some(host.parent(*slot)).filter(|parent| !parent.is_null());
        let is_due =
            |slot: &BlockId| host.slots.key(*slot).is_some_and(|key| !self.has(*slot, &key));
        let chain: Vec<BlockId> = successors(Some(slot), above).take_while(is_due).collect();
        for &slot in chain.iter().rev().filter(|&&slot| host.is_resident(slot)) {
            if let Some(key) = host.slots.key(slot) {
                self.queue.push(slot, &key);
            }
        }
    }
}

impl OffloadScheduler {
    /// Notes that a store has published those of `slots` that are resident. `tails` are the last
    /// slots of the chains that have become recent.
    pub(in crate::offload) fn after_store(&mut self, slots: &[BlockId], tails: &[BlockId]) {
        let Self { host, disk: Some(disk), .. } = self else { return };
        disk.note_evicted(host);
        if disk.mode == DiskMode::On {
            for &slot in slots.iter().filter(|&&slot| host.is_resident(slot)) {
                if host.slots.key(slot).is_some_and(|key| disk.is_admitted(&key)) {
                    disk.push(host, slot);
                }
            }
        }
        // The disk has nothing of this store yet. A look at the block before it is enough. The last
        // tail comes first: a tail that meets its walk would only repeat what it has found.
        let mut visited = (tails.len() > 1).then(|| SlotSet::new(host.slots.len() + 1));
        let mut visit =
            |&slot: &BlockId| visited.as_mut().is_none_or(|visited| visited.insert(slot));
        let known = tails.iter().rev().filter_map(|&tail| {
            let above = |slot: &BlockId| Some(host.parent(*slot)).filter(|slot| !slot.is_null());
            let unvisited = successors(Some(tail), above).take_while(&mut visit);
            unvisited.take(slots.len() + 1).find_map(|slot| {
                host.slots.key(slot).and_then(|key| disk.tier.resident_or_filling(&key))
            })
        });
        let mut known: Vec<BlockId> = known.collect();
        known.reverse();
        disk.tier.make_chains_recent(&known);
    }

    /// Notes that a load has begun to read these slots.
    pub(in crate::offload) fn after_hit(&mut self, slots: &[BlockId]) {
        let Self { host, disk: Some(disk), .. } = self else { return };
        if disk.mode == DiskMode::On && disk.config.admit == Admit::Returned {
            for &slot in slots {
                disk.push(host, slot);
            }
        }
    }

    /// Plans the demote of the blocks that have been due longest, at most `max_blocks` of them.
    /// Returns None if none is due, if as many are in flight as may be, and unless the disk is on.
    ///
    /// A block that the host has lost since is not demoted. Evicts from the disk for room, never a
    /// block before one of the job's. A block without room is dropped and counted.
    ///
    /// # Errors
    /// None that a caller can cause.
    pub fn demote(&mut self, max_blocks: usize, deadline: Option<f64>) -> Result<Option<TierJob>> {
        let chained: Vec<bool> = self.slot_model.groups().iter().map(|it| it.is_full()).collect();
        let Self { host, disk: Some(disk), .. } = self else { return Ok(None) };
        if disk.mode != DiskMode::On {
            return Ok(None);
        }
        let max_blocks =
            max_blocks.min(disk.config.max_in_flight_blocks.saturating_sub(disk.num_demoting));
        let mut due: Vec<Due> = Vec::new();
        while due.len() < max_blocks {
            let key = |slot| host.slots.key(slot).filter(|_| host.is_resident(slot));
            let Some((slot, key)) = disk.queue.pop(key) else { break };
            if disk.tier.resident_or_filling(&key).is_none() {
                due.push((slot, key));
            }
        }
        let parent = |&(slot, key): &Due| {
            host.parent_hash(slot).filter(|_| chained[usize::from(key.group.0)])
        };
        let mut parents: Vec<_> = due.iter().map(parent).collect();
        let on_disk = |(&hash, group)| disk.tier.resident_or_filling(&BlockKey { hash, group });
        let groups = due.iter().map(|(_, key)| key.group);
        let above: Vec<BlockId> = parents
            .iter()
            .zip(groups)
            .filter_map(|(parent, group)| Some((parent.as_ref()?, group)))
            .filter_map(on_disk)
            .collect();
        disk.tier.pin(&above)?;
        let disk_slots = disk.tier.reserve(due.len());
        disk.tier.unpin(&above)?;
        let disk_slots = disk_slots?;
        disk.counters.disk_dropped += due.len() - disk_slots.len();
        due.truncate(disk_slots.len());
        parents.truncate(disk_slots.len());
        if due.is_empty() {
            return Ok(None);
        }
        for ((&slot, &(_, key)), &parent) in disk_slots.iter().zip(&due).zip(&parents) {
            disk.tier.fill_below(slot, key, parent);
        }
        let (host_slots, keys): (Vec<BlockId>, Vec<BlockKey>) = due.into_iter().unzip();
        host.pin(&host_slots)?;
        let filling = Filling { ends: vec![0; keys.len()], parents };
        let job = TierInFlight::new(Direction::Demote, host_slots, disk_slots, filling, deadline);
        Ok(Some(self.begin_tier(job, keys)))
    }
}
