//! A scheduler as plain data, for snapshots.
//!
//! ```text
//!   kept      the tier: keys, chains, eviction order, what its policy learned; requests and
//!             how far they are stored; the sleep image; counters
//!   not kept  jobs (as if they had failed), what lookups hold, the disk tier, and the device's
//!             blocks, so the caller reports whole tables again
//! ```

use std::borrow::Cow;
use std::fmt::Debug;

use minicbor::{Decode, Encode};

use crate::error::{Error, Result};
use crate::group::Group;
use crate::key::SharedHashes;
use crate::ledger::damaged;

use super::image::Image;
use super::request::{ReportedTable, RequestState};
use super::tier::{MAX_READ_COUNT, TierRecord};
use super::{Mode, OffloadConfig, OffloadScheduler, OffloadStats};

/// The parts of a scheduler that a snapshot keeps.
#[derive(Clone, Debug, Encode, Decode)]
pub(crate) struct SchedulerRecord {
    #[n(0)]
    config: OffloadConfig,
    #[n(1)]
    tier: TierRecord,
    #[n(2)]
    image: Option<Image>,
    #[n(3)]
    requests: Vec<(String, RequestRecord)>,
    #[n(4)]
    num_jobs: u64,
    #[n(5)]
    counters: OffloadStats,
}

#[derive(Clone, Debug, Encode, Decode)]
struct RequestRecord {
    #[n(0)]
    #[cbor(with = "crate::key::flat")]
    hashes: SharedHashes,
    /// Per group, slots that need no store.
    #[n(1)]
    num_kept: Vec<usize>,
    #[n(2)]
    num_queried: usize,
    #[n(3)]
    num_hit_tokens: usize,
    #[n(4)]
    #[cbor(default)]
    is_low_priority: bool,
    #[n(5)]
    #[cbor(default)]
    num_used_tokens: usize,
    #[n(6)]
    #[cbor(default)]
    num_used_before: usize,
}

impl OffloadScheduler {
    /// What a snapshot keeps.
    pub(crate) fn to_record(&self) -> Result<SchedulerRecord> {
        let mut quiet = Cow::Borrowed(self);
        if !self.jobs.is_empty() || self.disk.as_ref().is_some_and(|disk| disk.has_jobs()) {
            quiet.to_mut().end_all()?;
        }
        if self.image.as_ref().is_some_and(|image| image.is_damaged) {
            quiet.to_mut().release_image()?;
        }
        let kept = |(name, request): (&str, &RequestState)| {
            // In lazy mode the records of device blocks go with the blocks.
            let is_eager = self.config.mode == Mode::Eager;
            let num_kept = |at| if is_eager { quiet.num_kept(request, at) } else { 0 };
            let record = RequestRecord {
                hashes: SharedHashes::clone(&request.hashes),
                num_kept: (0..request.tables.len()).map(num_kept).collect(),
                num_queried: request.num_queried,
                num_hit_tokens: request.num_hit_tokens,
                is_low_priority: request.is_low_priority,
                num_used_tokens: request.num_used_tokens,
                num_used_before: request.num_used_before,
            };
            (name.to_owned(), record)
        };
        Ok(SchedulerRecord {
            config: self.config.clone(),
            tier: quiet.host.to_record(),
            image: quiet.image.clone(),
            requests: quiet.requests.iter().map(kept).collect(),
            num_jobs: quiet.num_jobs,
            counters: quiet.counters,
        })
    }

    /// Fills this new scheduler from the record of another.
    pub(crate) fn fill(mut self, record: SchedulerRecord) -> Result<Self> {
        record.config.check_matches(&self.config)?;
        if record.num_jobs >= MAX_READ_COUNT as u64 || !record.counters.is_sound() {
            return damaged("it counts more than can have happened");
        }
        let own = record.image.as_ref().map_or(&[][..], |image| &image.own);
        self.host.fill_from(record.tier, own.len(), &self.model)?;
        for (name, request) in record.requests {
            self.requests.check_new(&name).or_else(|_| damaged("a request stands in it twice"))?;
            self.requests.insert(&name, request.build(&self)?);
        }
        if let Some(image) = record.image {
            self.check_image(&image)?;
            self.host.pin(&image.shared)?;
            self.image = Some(image);
        }
        (self.num_jobs, self.num_ended_jobs) = (record.num_jobs, record.num_jobs);
        self.counters = record.counters;
        self.check().or_else(|error| damaged(&error.to_string()))?;
        Ok(self)
    }
}

impl OffloadConfig {
    /// Refuses a snapshot of a configuration other than `wanted`, and names the difference.
    fn check_matches(&self, wanted: &Self) -> Result<()> {
        fn differs(what: &str, given: &impl Debug, wanted: &impl Debug) -> Result<()> {
            let (given, wanted) = (format!("{given:?}"), format!("{wanted:?}"));
            if given == wanted {
                return Ok(());
            }
            Err(Error::Snapshot(format!(
                "the snapshot's {what} is {given}, not {wanted}: restore it with the \
                 configuration that it was made with"
            )))
        }
        differs("number of host blocks", &self.num_host_blocks, &wanted.num_host_blocks)?;
        differs("list of groups", &self.groups, &wanted.groups)?;
        differs("number of blocks per slot", &self.blocks_per_slot, &wanted.blocks_per_slot)?;
        differs("mode", &self.mode.name(), &wanted.mode.name())?;
        differs("policy", &self.policy.name(), &wanted.policy.name())?;
        differs("world size", &self.world_size, &wanted.world_size)
    }
}

impl RequestRecord {
    fn build(self, scheduler: &OffloadScheduler) -> Result<RequestState> {
        let model = &scheduler.slot_model;
        let is_hashed = |(&num_kept, &group): (&usize, &Group)| {
            num_kept <= self.hashes.len() / model.hashes_per_block(group)
        };
        if self.num_kept.len() != model.groups().len()
            || !self.num_kept.iter().zip(model.groups()).all(is_hashed)
        {
            return damaged("a request has more on the host than it has hashes for");
        }
        let width = scheduler.host.slots.pool.hash_width();
        if !self.hashes.iter().all(|hash| width.fits(hash)) {
            return damaged("a request's hash is of another width than the tier's");
        }
        if self.num_queried > self.hashes.len().saturating_mul(model.hash_block_size()) {
            return damaged("a request has asked for more tokens than it has hashes for");
        }
        let table = |num_kept| ReportedTable { num_kept, ..ReportedTable::default() };
        Ok(RequestState {
            hashes: self.hashes,
            tables: self.num_kept.into_iter().map(table).collect(),
            num_queried: self.num_queried,
            num_hit_tokens: self.num_hit_tokens,
            is_low_priority: self.is_low_priority,
            num_used_tokens: self.num_used_tokens,
            num_used_before: self.num_used_before,
            ..RequestState::default()
        })
    }
}
