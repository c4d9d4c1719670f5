//! The index of a warm disk: what a slot file held when it was opened.

use crate::error::{Error, Result};
use crate::ids::{BlockId, GroupId};
use crate::key::{BlockHash, BlockKey, Hashes};
use crate::offload::OffloadScheduler;
use crate::offload::tier::Filling;

use super::no_disk;

impl OffloadScheduler {
    /// Adds blocks that the disk holds already, the least recent first. `slots` count from 0. An
    /// empty list of `parents` means that none is known. A parent may come after its child.
    ///
    /// If all groups are full attention, a chain is as recent as its most recent block.
    ///
    /// Skips a record whose slot is in use, or whose key the disk has already. Returns the number of
    /// blocks that it added.
    ///
    /// # Errors
    /// [`Error::State`] without a disk tier; [`Error::Config`] for lists of different lengths, a
    /// slot outside the disk, an unknown group, and a parent in a group that skips blocks;
    /// [`Error::HashWidth`] for hashes of another width. Nothing has changed then.
    pub fn adopt_disk(
        &mut self,
        slots: &[usize],
        hashes: &Hashes,
        groups: &[GroupId],
        parents: &[Option<BlockHash>],
    ) -> Result<usize> {
        self.check_records(slots, hashes, groups, parents)?;
        self.host.slots.pool.agree_width(hashes.width())?;
        let is_full_attention = self.is_full_attention();
        let Self { disk: Some(disk), slot_model, .. } = self else { return Ok(0) };
        let (mut taken, mut filling) = (Vec::new(), Filling::default());
        // The most recent come first: a chain's first blocks, below which the others are put.
        for (at, (&slot, &hash)) in slots.iter().zip(hashes.as_slice()).enumerate().rev() {
            let slot = BlockId(u32::try_from(slot + 1).unwrap_or(u32::MAX));
            let key = BlockKey { hash, group: groups[at] };
            if disk.tier.resident_or_filling(&key).is_some() || !disk.tier.slots.take_at(slot)? {
                continue;
            }
            let parent = parents.get(at).copied().flatten();
            disk.tier.fill_below(slot, key, parent);
            taken.push(slot);
            filling.ends.push(0);
            filling.parents.push(parent);
        }
        let num_added = disk.tier.publish(&taken, &filling, slot_model)?;
        if is_full_attention {
            // A chain that was written in parts comes root first. Then the order would evict its
            // tail among the blocks that are less recent.
            taken.reverse();
            disk.tier.make_chains_recent(&taken);
        }
        Ok(num_added)
    }

    fn check_records(
        &self,
        slots: &[usize],
        hashes: &Hashes,
        groups: &[GroupId],
        parents: &[Option<BlockHash>],
    ) -> Result<()> {
        let Some(disk) = &self.disk else { return Err(no_disk("adopt blocks")) };
        let refuse = |why| Err(Error::Config(why));
        let num = slots.len();
        if hashes.len() != num
            || groups.len() != num
            || !(parents.is_empty() || parents.len() == num)
        {
            return refuse(format!(
                "{num} slots, {} hashes, {} groups and {} parents: give one of each per block, or \
                 no parents at all",
                hashes.len(),
                groups.len(),
                parents.len()
            ));
        }
        let num_slots = disk.tier.slots.len();
        if let Some(slot) = slots.iter().find(|&&slot| slot >= num_slots) {
            return refuse(format!(
                "slot {slot} is not on the disk: slots count from 0 to {}",
                num_slots - 1
            ));
        }
        self.check_groups(groups, parents)?;
        self.host.slots.pool.hash_width().check(hashes.width())
    }

    /// Refuses an unknown group, and a parent in a group that skips blocks.
    pub(super) fn check_groups(
        &self,
        groups: &[GroupId],
        parents: &[Option<BlockHash>],
    ) -> Result<()> {
        let refuse = |why| Err(Error::Config(why));
        let known = self.slot_model.groups();
        for (at, group) in groups.iter().enumerate() {
            let Some(attention) = known.get(usize::from(group.0)) else {
                return refuse(format!(
                    "group {} is unknown: groups count from 0 to {}",
                    group.0,
                    known.len() - 1
                ));
            };
            if !attention.is_full() && parents.get(at).is_some_and(Option::is_some) {
                return refuse(format!(
                    "record {at} has a parent in group {}, which skips blocks: give None for its \
                     parent",
                    group.0
                ));
            }
        }
        Ok(())
    }
}
