//! What would be lost if the host ended now: the blocks that only the host has.

use crate::ids::BlockId;
use crate::key::{BlockHash, BlockKey};
use crate::offload::{DiskMode, OffloadScheduler};

use super::places;

/// Blocks that only the host has, the most recent first, each with a slot that the disk can give it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Unsaved {
    /// Slots of the host, whole, counted from 0.
    pub host_slots: Vec<u32>,
    /// Slots of the disk, counted from 0.
    pub disk_slots: Vec<u32>,
    /// What each block is.
    pub keys: Vec<BlockKey>,
    /// The hash before each; None at the start of a prompt, and in groups that skip blocks.
    pub parents: Vec<Option<BlockHash>>,
}

impl OffloadScheduler {
    /// Those of the `max_blocks` most recent host blocks that the disk neither has nor is about to
    /// get. Nothing changes: the disk slots are those that a demote could take now, empty ones first,
    /// and no job reserves them. So copy the blocks only after the last job, and leave out each slot
    /// that a job has used since. None unless the disk is on.
    ///
    /// A slot is not offered if it holds a block before one of these.
    pub fn unsaved(&self, max_blocks: usize) -> Unsaved {
        let Self { host, disk: Some(disk), slot_model, .. } = self else {
            return Unsaved::default();
        };
        if disk.mode != DiskMode::On {
            return Unsaved::default();
        }
        let keyed = |slot| Some((slot, host.slots.key(slot)?));
        let is_new = |(_, key): &(BlockId, BlockKey)| disk.tier.resident_or_filling(key).is_none();
        let recent = host.most_recent(max_blocks).into_iter().filter_map(keyed).filter(is_new);
        let (host_slots, keys): (Vec<BlockId>, Vec<BlockKey>) = recent.unzip();
        let groups = slot_model.groups();
        let is_chained = |key: &BlockKey| groups[usize::from(key.group.0)].is_full();
        let parent = |(&slot, key)| host.parent_hash(slot).filter(|_| is_chained(key));
        let parents: Vec<Option<BlockHash>> = host_slots.iter().zip(&keys).map(parent).collect();
        let above = |(key, hash): (&BlockKey, &Option<BlockHash>)| {
            disk.tier.resident_or_filling(&BlockKey { hash: (*hash)?, group: key.group })
        };
        let above: Vec<BlockId> = keys.iter().zip(&parents).filter_map(above).collect();
        let disk_slots = disk.tier.first_places(keys.len(), &above);
        let num = disk_slots.len();
        Unsaved {
            host_slots: places(&host_slots[..num]),
            disk_slots: places(&disk_slots),
            keys: keys[..num].to_vec(),
            parents: parents[..num].to_vec(),
        }
    }
}
