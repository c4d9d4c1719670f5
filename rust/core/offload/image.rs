//! The sleep image: the device's blocks on the host while the device is away.
//!
//! A block whose key is resident stays in that slot, which is pinned; every other one, the part of
//! a block at a request's end included, takes a place in a slot of the image's own, which no lookup
//! finds. Both are let go when the device has its bytes back.

use std::collections::BTreeSet;

use minicbor::{Decode, Encode};

use crate::error::{Error, Result};
use crate::ids::BlockId;
use crate::key::BlockKey;
use crate::ledger::{BlockLedger, damaged};
use crate::pool::MAX_BLOCKS;

use super::job::slot_at;
use super::{Held, OffloadScheduler};

/// Copies between device blocks and places on the host: `block_ids[i]` and `host_slots[i]` are the
/// two ends of one, as in a [`Job`](super::Job).
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub struct ImageCopies {
    /// Device blocks.
    #[n(0)]
    pub block_ids: Vec<BlockId>,
    /// Places on the host.
    #[n(1)]
    pub host_slots: Vec<u32>,
    /// Where each group's copies begin, and the end of the last.
    #[n(2)]
    pub offsets: Vec<usize>,
}

/// What is kept of a device that sleeps.
#[derive(Clone, Debug, Encode, Decode)]
pub(super) struct Image {
    /// Slots that hold nothing else.
    #[n(0)]
    pub(super) own: Vec<BlockId>,
    /// Resident slots that hold blocks of it; each is pinned as often as it stands here.
    #[n(1)]
    pub(super) shared: Vec<BlockId>,
    #[n(2)]
    pub(super) copies: ImageCopies,
    /// Whether a shared slot proved damaged. A snapshot keeps no such image.
    #[cbor(skip)]
    pub(super) is_damaged: bool,
}

/// Where one block of the device is to lie.
struct Placed {
    group: usize,
    block: BlockId,
    /// The resident slot that holds it, and its place in there.
    shared: Option<(BlockId, usize)>,
}

impl OffloadScheduler {
    /// Sets slots aside for every block that stands in a table of `ledger`, and tells which ones
    /// are to be copied there: the tier has the others. Evicts for them; what lookups hold is
    /// released. [`release_image`](Self::release_image) lets them go.
    ///
    /// # Errors
    /// [`Error::NoRoomForImage`] where the tier cannot hold them all; [`Error::State`] while jobs
    /// are in flight or an image is held; [`Error::Config`] for a ledger of other groups.
    pub fn hold_image(&mut self, ledger: &BlockLedger) -> Result<ImageCopies> {
        if self.image.is_some() || !self.jobs.is_empty() {
            return Err(Error::State(format!(
                "a sleep image is held already, or {} jobs are in flight: wake first, or end them",
                self.jobs.len()
            )));
        }
        if ledger.model().groups() != self.model.groups() {
            return Err(Error::Config(
                "the ledger is of other groups than this scheduler: build both for one model"
                    .to_owned(),
            ));
        }
        let placed = self.placed(ledger);
        let shared: Vec<BlockId> =
            placed.iter().filter_map(|placed| placed.shared).map(|(slot, _)| slot).collect();
        let num_slots = (placed.len() - shared.len()).div_ceil(self.blocks_per_slot);
        // What lookups hold may go, unless there is no room all the same.
        let held: Vec<BlockId> =
            self.requests.values().flat_map(|request| &request.held.slots).copied().collect();
        self.tier.unpin(&held)?;
        self.tier.pin(&shared)?;
        let own = match self.tier.reserve_all(num_slots) {
            Ok(own) => own,
            Err(error) => {
                self.tier.unpin(&shared)?;
                self.tier.pin(&held)?;
                return Err(error);
            }
        };
        for request in self.requests.values_mut() {
            request.held = Held::default();
        }
        let (missing, copies) = self.image_copies_of(&placed, &own);
        self.image = Some(Image { own, shared, copies, is_damaged: false });
        Ok(missing)
    }

    /// Each block of the ledger's tables, and where the tier has it.
    fn placed(&self, ledger: &BlockLedger) -> Vec<Placed> {
        let per_slot = self.blocks_per_slot;
        let placed = ledger.table_blocks().map(|block| {
            let group = usize::from(block.group.0);
            let per_hash = self.slot_model.hashes_per_block(self.slot_model.groups()[group]);
            let last = (block.index / per_slot + 1) * per_hash - 1;
            let slot = block
                .hashes
                .get(last)
                .filter(|_| block.is_published)
                .and_then(|&hash| self.tier.resident(&BlockKey { hash, group: block.group }));
            let shared = slot.map(|slot| (slot, block.index % per_slot));
            Placed { group, block: block.id, shared }
        });
        placed.collect()
    }

    /// The copies into `own` slots, and all copies.
    fn image_copies_of(&self, placed: &[Placed], own: &[BlockId]) -> (ImageCopies, ImageCopies) {
        let per_slot = self.blocks_per_slot;
        let mut free = own.iter().flat_map(|&slot| (0..per_slot).map(move |at| (slot, at)));
        let (mut missing, mut all) = (ImageCopies::default(), ImageCopies::default());
        for group in 0..self.model.groups().len() {
            for copies in [&mut missing, &mut all] {
                copies.offsets.push(copies.block_ids.len());
            }
            for placed in placed.iter().filter(|placed| placed.group == group) {
                let Some((slot, at)) = placed.shared.or_else(|| free.next()) else { continue };
                let place = u32::try_from((slot.index() - 1) * per_slot + at).unwrap_or(u32::MAX);
                let stored = placed.shared.is_none().then_some(&mut missing);
                for copies in stored.into_iter().chain([&mut all]) {
                    copies.block_ids.push(placed.block);
                    copies.host_slots.push(place);
                }
            }
        }
        for copies in [&mut missing, &mut all] {
            copies.offsets.push(copies.block_ids.len());
        }
        (missing, all)
    }

    /// All copies of the image that is held: each the other way brings its block back.
    ///
    /// # Errors
    /// [`Error::State`] where none is held, or a block of it proved damaged in the tier.
    pub fn image(&self) -> Result<&ImageCopies> {
        match &self.image {
            Some(image) if image.is_damaged => Err(Error::State(
                "the sleep image shares a host slot that proved damaged: release the image, and \
                 wake without it"
                    .to_owned(),
            )),
            Some(image) => Ok(&image.copies),
            None => Err(Error::State("no sleep image is held: nothing is to be woken".to_owned())),
        }
    }

    /// The slots that hold anything, counted from 0, ascending: what lookup finds, what stores fill,
    /// and what the image holds, also where a reset has emptied the tier since.
    pub fn used_slots(&self) -> impl Iterator<Item = u32> {
        let mut shared = self.image.as_ref().map_or(Vec::new(), |image| image.shared.clone());
        shared.sort_unstable();
        let is_used = move |slot: &BlockId| {
            self.tier.is_referenced(*slot) || shared.binary_search(slot).is_ok()
        };
        self.tier.slots().filter(is_used).map(|slot| slot.0 - 1)
    }

    /// Lets the image go, if one is held: the device has its blocks, or will never need them.
    ///
    /// # Errors
    /// None that a caller can cause.
    pub fn release_image(&mut self) -> Result<()> {
        let Some(image) = self.image.take() else { return Ok(()) };
        self.tier.unpin(&image.shared)?;
        self.tier.give_back(&image.own)
    }

    /// Refuses an image that does not fit this scheduler: one that was read from somewhere.
    pub(super) fn check_image(&self, image: &Image) -> Result<()> {
        let ImageCopies { block_ids, host_slots, offsets } = &image.copies;
        let is_covered = offsets.first() == Some(&0)
            && offsets.last() == Some(&block_ids.len())
            && offsets.is_sorted()
            && offsets.len() == self.model.groups().len() + 1
            && block_ids.len() == host_slots.len();
        let mut sorted = block_ids.clone();
        sorted.sort_unstable();
        let is_distinct = sorted.windows(2).all(|pair| pair[0] != pair[1])
            && sorted.first().is_none_or(|id| !id.is_null());
        let is_distinct = is_distinct && sorted.last().is_none_or(|id| id.index() < MAX_BLOCKS);
        if !is_covered || !is_distinct {
            return damaged("a sleep image names no blocks, or blocks that cannot be");
        }
        let own: BTreeSet<BlockId> = image.own.iter().copied().collect();
        let (mut places, mut shared) = (BTreeSet::new(), Vec::new());
        let mut is_held =
            own.len() == image.own.len() && own.iter().all(|&slot| self.tier.is_unfindable(slot));
        for (group, ends) in offsets.windows(2).enumerate() {
            for &place in &host_slots[ends[0]..ends[1]] {
                let slot = slot_at(place, self.blocks_per_slot);
                if own.contains(&slot) {
                    is_held &= places.insert(place);
                } else {
                    is_held &= self.tier.holds_group(slot, group);
                    shared.push(slot);
                }
            }
        }
        let mut named = image.shared.clone();
        named.sort_unstable();
        shared.sort_unstable();
        is_held &= named == shared;
        if !is_held {
            return damaged("a sleep image names blocks or slots that it does not hold");
        }
        Ok(())
    }
}
