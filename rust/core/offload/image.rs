//! The sleep image: the device's blocks on the host while the device sleeps.
//!
//! A block whose key is resident stays in that slot, which is pinned. Every other block gets a place
//! in a slot that only the image has, and that no lookup finds. This includes the partial block at
//! a request's end. The image releases its slots when the device has its bytes back.

use std::collections::BTreeSet;

use minicbor::{Decode, Encode};

use crate::error::{Error, Result};
use crate::ids::BlockId;
use crate::key::BlockKey;
use crate::ledger::{BlockLedger, TableBlock, damaged};
use crate::pool::{MAX_BLOCKS, repeated};

use super::job::slot_at;
use super::request::HeldSlots;
use super::{Job, OffloadScheduler};

/// The blocks of a device that sleeps.
#[derive(Clone, Debug, Encode, Decode)]
pub(super) struct Image {
    /// Slots that hold only this image.
    #[n(0)]
    pub(super) own: Vec<BlockId>,
    /// Resident slots that hold blocks of the image. Each is pinned as often as it is listed here.
    #[n(1)]
    pub(super) shared: Vec<BlockId>,
    #[n(2)]
    pub(super) copies: Job,
    /// Whether a shared slot proved damaged. A snapshot keeps no such image.
    #[cbor(skip)]
    pub(super) is_damaged: bool,
}

/// A resident slot that holds a block of the image, and the block's place in it.
type Place = (BlockId, usize);

impl OffloadScheduler {
    /// Reserves slots for every block of `ledger` that holds granted tokens. Returns the copies to
    /// make: the tier has the other blocks. Evicts slots, and releases what lookups hold.
    /// [`release_image`](Self::release_image) gives the slots back.
    ///
    /// # Errors
    /// [`Error::NoRoomForImage`] if the tier cannot hold them all; [`Error::State`] while jobs
    /// are in flight or an image is held; [`Error::Config`] for a ledger of other groups.
    pub fn hold_image(&mut self, ledger: &BlockLedger) -> Result<Job> {
        let has_tier_jobs = self.disk.as_ref().is_some_and(|disk| disk.has_jobs());
        if self.image.is_some() || !self.jobs.is_empty() || has_tier_jobs {
            return Err(Error::State(format!(
                "a sleep image is held already, or {} jobs are in flight: wake first, or end them",
                self.stats().jobs_in_flight + self.stats().quarantined_jobs
            )));
        }
        if ledger.model().groups() != self.model.groups() {
            return Err(Error::Config(
                "the ledger has other groups than this scheduler: build both for one model"
                    .to_owned(),
            ));
        }
        let placed = self.placed(ledger);
        let shared: Vec<BlockId> =
            placed.iter().filter_map(|&(_, shared)| shared).map(|(slot, _)| slot).collect();
        let num_slots = (placed.len() - shared.len()).div_ceil(self.config.blocks_per_slot);
        // The slots that lookups hold may be evicted. If the room is still short, they stay.
        let held: Vec<BlockId> =
            self.requests.values().flat_map(|request| &request.held.slots).copied().collect();
        self.host.unpin(&held)?;
        self.host.pin(&shared)?;
        let own = match self.host.reserve_all(num_slots) {
            Ok(own) => own,
            Err(error) => {
                self.host.unpin(&shared)?;
                self.host.pin(&held)?;
                return Err(error);
            }
        };
        for request in self.requests.values_mut() {
            request.held = HeldSlots::default();
        }
        let (missing, copies) = self.image_copies_of(&placed, &own);
        self.image = Some(Image { own, shared, copies, is_damaged: false });
        Ok(missing)
    }

    /// Each block of the ledger's tables, and where the tier has it.
    fn placed<'a>(&self, ledger: &'a BlockLedger) -> Vec<(TableBlock<'a>, Option<Place>)> {
        let per_slot = self.config.blocks_per_slot;
        let placed = ledger.table_blocks().map(|block| {
            let group = self.slot_model.groups()[usize::from(block.group.0)];
            let last = (block.index / per_slot + 1) * self.slot_model.hashes_per_block(group) - 1;
            let hash = block.hashes.get(last).filter(|_| block.is_published);
            let key = hash.map(|&hash| BlockKey { hash, group: block.group });
            let slot = key.and_then(|key| self.host.resident(&key));
            let shared = slot.map(|slot| (slot, block.index % per_slot));
            (block, shared)
        });
        placed.collect()
    }

    /// Returns the copies into `own` slots, and all copies.
    fn image_copies_of(
        &self,
        placed: &[(TableBlock<'_>, Option<Place>)],
        own: &[BlockId],
    ) -> (Job, Job) {
        let per_slot = self.config.blocks_per_slot;
        let mut free = own.iter().flat_map(|&slot| (0..per_slot).map(move |at| (slot, at)));
        let (mut missing, mut all) = (Job::empty(), Job::empty());
        for (id, _) in self.model.enumerate() {
            for (block, shared) in placed.iter().filter(|(block, _)| block.group == id) {
                let Some((slot, at)) = shared.or_else(|| free.next()) else { continue };
                let stored = shared.is_none().then_some(&mut missing);
                for copies in stored.into_iter().chain([&mut all]) {
                    copies.push(block.id, slot, at, per_slot);
                }
            }
            missing.end_group();
            all.end_group();
        }
        (missing, all)
    }

    /// All copies of the held image. The reverse of each brings its block back.
    ///
    /// # Errors
    /// [`Error::State`] if no image is held, or a block of it proved damaged in the tier.
    pub fn image(&self) -> Result<&Job> {
        match &self.image {
            Some(image) if image.is_damaged => Err(Error::State(
                "the sleep image shares a host slot that proved damaged: release the image, and \
                 wake without it"
                    .to_owned(),
            )),
            Some(image) => Ok(&image.copies),
            None => {
                Err(Error::State("no sleep image is held: hold one before you wake".to_owned()))
            }
        }
    }

    /// The slots in use, counted from 0, ascending: those that lookup finds, that stores fill, and
    /// that the image holds. A reset of the tier does not change the last.
    pub fn used_slots(&self) -> impl Iterator<Item = u32> {
        let mut shared = self.image.as_ref().map_or(Vec::new(), |image| image.shared.clone());
        shared.sort_unstable();
        let is_used = move |slot: &BlockId| {
            self.host.slots.is_referenced(*slot) || shared.binary_search(slot).is_ok()
        };
        self.host.slots.iter().filter(is_used).map(|slot| slot.0 - 1)
    }

    /// Releases the image, if any, because the device has its blocks or never needs them.
    ///
    /// # Errors
    /// None that a caller can cause.
    pub fn release_image(&mut self) -> Result<()> {
        let Some(image) = self.image.take() else { return Ok(()) };
        self.host.unpin(&image.shared)?;
        self.host.slots.pool.free(&image.own)
    }

    /// Whether a slot holds a block of a group, or is empty.
    fn holds_group(&self, slot: BlockId, group: usize) -> bool {
        let slots = &self.host.slots;
        let is_of_group = |key: BlockKey| usize::from(key.group.0) == group;
        slots.contains(slot) && slots.key(slot).is_none_or(is_of_group)
    }

    /// Refuses an image of a snapshot that does not fit this scheduler.
    pub(super) fn check_image(&self, image: &Image) -> Result<()> {
        let Job { block_ids, host_slots, offsets, .. } = &image.copies;
        let is_covered = offsets.first() == Some(&0)
            && offsets.last() == Some(&block_ids.len())
            && offsets.is_sorted()
            && offsets.len() == self.model.groups().len() + 1
            && block_ids.len() == host_slots.len();
        let mut sorted = block_ids.clone();
        sorted.sort_unstable();
        let is_block = |id: &BlockId| (1..MAX_BLOCKS).contains(&id.index());
        if !is_covered || !sorted.iter().all(is_block) || repeated(&sorted).is_some() {
            return damaged("a sleep image names no blocks, or blocks that cannot be");
        }
        let own: BTreeSet<BlockId> = image.own.iter().copied().collect();
        let (mut places, mut shared) = (BTreeSet::new(), Vec::new());
        let mut is_held = own.len() == image.own.len()
            && own.iter().all(|&slot| self.host.slots.is_unkeyed(slot));
        for (group, ends) in offsets.windows(2).enumerate() {
            for &place in &host_slots[ends[0]..ends[1]] {
                let slot = slot_at(place, self.config.blocks_per_slot);
                if own.contains(&slot) {
                    is_held &= places.insert(place);
                } else {
                    is_held &= self.holds_group(slot, group);
                    shared.push(slot);
                }
            }
        }
        let mut named = image.shared.clone();
        named.sort_unstable();
        shared.sort_unstable();
        if !is_held || named != shared {
            return damaged("a sleep image names blocks or slots that it does not hold");
        }
        Ok(())
    }
}
