//! A scheduler as plain data, for snapshots: what is kept of it, and how it is built anew.
//!
//! ```text
//!   kept      the tier: keys, chains, order of eviction, what its policy learned; requests and
//!             how far they are stored; the sleep image; counters
//!   not kept  jobs, in quarantine or not (as if they had failed), what lookups hold, and the
//!             device's blocks: whole tables are told again
//! ```

use std::borrow::Cow;
use std::fmt::Debug;

use minicbor::{Decode, Encode};

use crate::error::{Error, Result};
use crate::group::Group;
use crate::key::BlockHash;
use crate::ledger::damaged;

use super::image::Image;
use super::tier::TierRecord;
use super::{Counters, EvictionPolicy, MAX_READ_COUNT, Mode, OffloadScheduler, Table, Tracked};

/// What is kept of a scheduler.
#[derive(Clone, Debug, Encode, Decode)]
pub(crate) struct SchedulerRecord {
    #[n(0)]
    shape: Shape,
    #[n(1)]
    tier: TierRecord,
    #[n(2)]
    image: Option<Image>,
    #[n(3)]
    requests: Vec<(String, TrackedRecord)>,
    #[n(4)]
    num_jobs: u64,
    #[n(5)]
    counters: Counters,
}

/// What a scheduler was made for: only one made for the same can take its place.
#[derive(Clone, Debug, Encode, Decode)]
struct Shape {
    #[n(0)]
    num_host_blocks: usize,
    #[n(1)]
    groups: Vec<Group>,
    #[n(2)]
    blocks_per_slot: usize,
    #[n(3)]
    mode: Mode,
    #[n(4)]
    policy: EvictionPolicy,
    #[n(5)]
    world_size: usize,
}

#[derive(Clone, Debug, Encode, Decode)]
struct TrackedRecord {
    #[n(0)]
    #[cbor(with = "crate::key::flat")]
    hashes: Vec<BlockHash>,
    /// Per group, slots that need no store.
    #[n(1)]
    num_kept: Vec<usize>,
    #[n(2)]
    num_queried: usize,
    #[n(3)]
    num_hit_tokens: usize,
}

impl OffloadScheduler {
    /// What a snapshot keeps.
    pub(crate) fn to_record(&self) -> Result<SchedulerRecord> {
        let mut quiet = Cow::Borrowed(self);
        if !self.jobs.is_empty() {
            quiet.to_mut().end_all()?;
        }
        if self.image.as_ref().is_some_and(|image| image.is_damaged) {
            quiet.to_mut().release_image()?;
        }
        let kept = |(name, request): (&str, &Tracked)| {
            // Lazy, what was told of blocks goes with them.
            let is_eager = self.mode == Mode::Eager;
            let num_kept = |at| if is_eager { quiet.num_kept(request, at) } else { 0 };
            let record = TrackedRecord {
                hashes: request.hashes.clone(),
                num_kept: (0..request.tables.len()).map(num_kept).collect(),
                num_queried: request.num_queried,
                num_hit_tokens: request.num_hit_tokens,
            };
            (name.to_owned(), record)
        };
        Ok(SchedulerRecord {
            shape: self.shape(),
            tier: quiet.tier.to_record(),
            image: quiet.image.clone(),
            requests: quiet.requests.iter().map(kept).collect(),
            num_jobs: quiet.num_jobs,
            counters: quiet.counters,
        })
    }

    fn shape(&self) -> Shape {
        Shape {
            num_host_blocks: self.tier.num_slots(),
            groups: self.model.groups().to_vec(),
            blocks_per_slot: self.blocks_per_slot,
            mode: self.mode,
            policy: self.tier.policy(),
            world_size: self.world_size,
        }
    }

    /// Fills this scheduler, which must be new, with what was kept of another.
    pub(crate) fn fill(mut self, record: SchedulerRecord) -> Result<Self> {
        record.shape.check(&self.shape())?;
        if record.num_jobs >= MAX_READ_COUNT as u64 || !record.counters.is_sound() {
            return damaged("it counts more than can have happened");
        }
        let own = record.image.as_ref().map_or(&[][..], |image| &image.own);
        self.tier.fill_from(record.tier, own.len(), &self.model)?;
        for (name, request) in record.requests {
            self.requests.check_new(&name).or_else(|_| damaged("a request stands in it twice"))?;
            self.requests.insert(&name, request.build(&self)?);
        }
        if let Some(image) = record.image {
            self.check_image(&image)?;
            self.tier.pin(&image.shared)?;
            self.image = Some(image);
        }
        (self.num_jobs, self.num_ended_jobs) = (record.num_jobs, record.num_jobs);
        self.counters = record.counters;
        self.check().or_else(|error| damaged(&error.to_string()))?;
        Ok(self)
    }
}

impl Shape {
    /// Refuses another shape than is wanted, and names what differs.
    fn check(&self, wanted: &Self) -> Result<()> {
        fn differs(what: &str, given: &impl Debug, wanted: &impl Debug) -> Result<()> {
            let (given, wanted) = (format!("{given:?}"), format!("{wanted:?}"));
            if given == wanted {
                return Ok(());
            }
            Err(Error::Snapshot(format!(
                "the snapshot's {what} is {given}, not {wanted}: restore it with what it was made \
                 with"
            )))
        }
        differs("number of host blocks", &self.num_host_blocks, &wanted.num_host_blocks)?;
        differs("list of groups", &self.groups, &wanted.groups)?;
        differs("number of blocks per slot", &self.blocks_per_slot, &wanted.blocks_per_slot)?;
        differs("mode", &self.mode, &wanted.mode)?;
        differs("policy", &self.policy, &wanted.policy)?;
        differs("world size", &self.world_size, &wanted.world_size)
    }
}

impl TrackedRecord {
    fn build(self, scheduler: &OffloadScheduler) -> Result<Tracked> {
        let model = &scheduler.slot_model;
        let is_hashed = |(&num_kept, &group): (&usize, &Group)| {
            num_kept <= self.hashes.len() / model.hashes_per_block(group)
        };
        if self.num_kept.len() != model.groups().len()
            || !self.num_kept.iter().zip(model.groups()).all(is_hashed)
        {
            return damaged("a request has more on the host than it has hashes for");
        }
        let width = scheduler.tier.hash_width();
        if !self.hashes.iter().all(|hash| width.fits(hash)) {
            return damaged("a request's hash is of another width than the tier's");
        }
        if self.num_queried > self.hashes.len().saturating_mul(model.hash_block_size()) {
            return damaged("a request has asked for more tokens than it has hashes for");
        }
        let table = |num_kept| Table { num_kept, ..Table::default() };
        Ok(Tracked {
            hashes: self.hashes,
            tables: self.num_kept.into_iter().map(table).collect(),
            num_queried: self.num_queried,
            num_hit_tokens: self.num_hit_tokens,
            ..Tracked::default()
        })
    }
}
