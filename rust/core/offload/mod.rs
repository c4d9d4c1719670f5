//! The host tier, the disk tier below it, and the jobs that fill and read them.
//!
//! The scheduler names device blocks and never owns them. A [`Job`] says which device blocks to pin
//! while it is in flight, and [`OffloadScheduler::complete`] which ones to unpin. `tier` owns the
//! slots; `request`, `store`, `step`, `lazy`, `load` and `job` are the life of a request's blocks.
//! `disk` owns the tier below the host and its jobs: a disk, a shared store, or both.
//!
//! May import: error, event, group, ids, key, ledger, pool, requests.

mod config;
mod disk;
mod image;
mod job;
mod lazy;
mod load;
#[cfg(test)]
mod protocol_tests;
mod recency;
mod record;
mod request;
mod sightings;
mod stats;
mod step;
mod store;
mod tier;
mod transfer_event;

pub use config::{MAX_BLOCKS_PER_SLOT, MAX_WORLD_SIZE, Mode, OffloadConfig};
pub use disk::{Admit, DiskConfig, DiskMode, DiskStats, TierJob, Unclaimed, Unsaved};
pub use job::{Job, JobEnd, Outcome};
pub(crate) use record::SchedulerRecord;
pub use stats::OffloadStats;
pub use store::Progress;
pub use tier::EvictionPolicy;
pub use transfer_event::{Direction, TransferEvent};

use std::collections::BTreeMap;

use crate::error::{Error, Result};
use crate::event::Event;
use crate::group::{Attention, Model};
use crate::ids::JobId;
use crate::key::HashWidth;
use crate::requests::Requests;

use disk::Disk;
use image::Image;
use job::InFlight;
use lazy::ComputedBlocks;
use request::RequestState;
use sightings::Sightings;
use tier::Tier;

/// Plans stores and loads between a device's blocks and a host tier.
///
/// In eager mode a block is due for a store once a step has computed it; in lazy mode, once the
/// device is about to evict it. The [`EvictionPolicy`] chooses which block leaves the tier for
/// room. A block of a full-attention group stays while a child of it is in the tier.
#[derive(Clone, Debug)]
pub struct OffloadScheduler {
    host: Tier,
    /// The device's groups.
    model: Model,
    /// The groups in blocks as large as slots.
    slot_model: Model,
    config: OffloadConfig,
    requests: Requests<RequestState>,
    jobs: BTreeMap<JobId, InFlight>,
    /// Number of jobs ever begun: the id of the last one.
    num_jobs: u64,
    /// [`OffloadScheduler::end_all`] has ended all jobs up to this id.
    num_ended_jobs: u64,
    /// Lazy mode only.
    computed: ComputedBlocks,
    /// Its gauges stay 0.
    counters: OffloadStats,
    /// The blocks of a device that sleeps.
    image: Option<Image>,
    /// None if no events are recorded.
    transfers: Option<Vec<TransferEvent>>,
    /// None if every block is stored the first time that it is seen.
    sightings: Option<Sightings>,
    disk: Option<Box<Disk>>,
}

impl OffloadScheduler {
    /// A scheduler over an empty host tier.
    ///
    /// # Errors
    /// [`Error::Config`] for a tier of no slots or too many, for groups that [`Model::new`]
    /// refuses, and for a world of no ranks or more than [`MAX_WORLD_SIZE`].
    pub fn new(config: OffloadConfig) -> Result<Self> {
        config.check()?;
        let OffloadConfig { num_host_blocks, blocks_per_slot, policy, events, .. } = config;
        let threshold = config.store_threshold;
        let model = Model::new(config.groups.clone())?;
        let mut host = Tier::new("num_host_blocks", num_host_blocks, policy, events)?;
        let disk = config.disk.map(|disk| Disk::new(disk, num_host_blocks, events)).transpose()?;
        if config.disk.is_some_and(|disk| disk.admit == Admit::Returned) {
            host.evicted = Some(Vec::new());
        }
        Ok(Self {
            slot_model: model.in_tier(blocks_per_slot)?,
            model,
            host,
            config,
            requests: Requests::default(),
            jobs: BTreeMap::new(),
            num_jobs: 0,
            num_ended_jobs: 0,
            computed: ComputedBlocks::default(),
            counters: OffloadStats::default(),
            image: None,
            transfers: events.then(Vec::new),
            sightings: Sightings::new(num_host_blocks, threshold)?,
            disk: disk.map(Box::new),
        })
    }

    /// The groups.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Number of slots of the host tier, all of them usable.
    pub fn num_host_blocks(&self) -> usize {
        self.host.slots.len()
    }

    /// Number of slots that lookup can find.
    pub fn num_resident(&self) -> usize {
        self.host.num_resident()
    }

    /// The width of the tier's hashes.
    pub fn hash_width(&self) -> HashWidth {
        self.host.slots.pool.hash_width()
    }

    /// Whether it has neither requests, jobs, an image nor slots in use.
    pub(crate) fn is_new(&self) -> bool {
        self.num_jobs == 0
            && self.requests.len() == 0
            && self.image.is_none()
            && self.host.num_referenced() == 0
            && self.disk.as_ref().is_none_or(|disk| disk.is_new())
    }

    /// Empties the tiers at any moment, and releases what lookups hold. Jobs in flight still end:
    /// stores, demotes and promotes without effect, loads as failed. A disk tier is off until
    /// [`set_disk`](Self::set_disk) opens it.
    ///
    /// The next store of a request brings all its full-attention blocks back, also those of before.
    /// If they must not come back, because the weights have changed, name the request in no store
    /// before you [`restart`](Self::restart) it.
    ///
    /// # Errors
    /// None that a caller can cause.
    pub fn reset(&mut self) -> Result<()> {
        for request in self.requests.values_mut() {
            self.host.unpin(&std::mem::take(&mut request.held).slots)?;
            for (table, group) in request.tables.iter_mut().zip(self.model.groups()) {
                // Blocks of a window are not due again, because they may have left the device.
                if group.attention == Attention::Full {
                    (table.num_kept, table.num_confirmed) = (0, 0);
                }
            }
        }
        for job in self.jobs.values_mut() {
            job.is_fenced = true;
        }
        self.reset_disk()?;
        self.host.reset()
    }

    /// The events of the host tier since the last call, oldest first.
    pub fn take_events(&mut self) -> Vec<Event> {
        self.host.slots.pool.take_events()
    }

    /// The events of jobs since the last call, oldest first. Empty if no events are recorded.
    pub fn take_transfer_events(&mut self) -> Vec<TransferEvent> {
        self.transfers.as_mut().map(std::mem::take).unwrap_or_default()
    }

    fn report(&mut self, event: TransferEvent) {
        if let Some(transfers) = &mut self.transfers {
            transfers.push(event);
        }
    }

    /// Verifies every invariant of tier, jobs and lookups.
    ///
    /// # Errors
    /// [`Error::Broken`] names the first that does not hold.
    pub fn check(&self) -> Result<()> {
        self.host.check()?;
        self.check_disk()?;
        let broken = |what: String| Err(Error::Broken(format!("offload: {what}")));
        let num_held: usize = self.requests.values().map(|request| request.held.slots.len()).sum();
        let num_loading: usize = self.jobs.values().map(InFlight::num_loading).sum();
        let image = self.image.as_ref();
        let num_shared = image.map_or(0, |image| image.shared.len());
        let (num_demoting, num_promoting) = self.num_host_slots_of_tier_jobs();
        if self.host.num_pins() != num_held + num_loading + num_shared + num_demoting {
            return broken(format!(
                "{} pins for {num_held} slots held, {num_loading} being loaded, {num_shared} of a \
                 sleep image and {num_demoting} being demoted",
                self.host.num_pins()
            ));
        }
        // Stores fill the other slots of jobs, dropped ones included.
        let num_slots: usize = self.jobs.values().map(|job| job.slots.len()).sum();
        let num_storing = num_slots - num_loading;
        let num_own = image.map_or(0, |image| image.own.len());
        let num_filled = num_storing + num_promoting;
        if self.host.num_referenced() != self.host.num_resident() + num_filled + num_own {
            return broken(format!(
                "{} slots in use, {} resident, {num_filled} of stores and promotes and {num_own} \
                 of a sleep image",
                self.host.num_referenced(),
                self.host.num_resident()
            ));
        }
        for request in self.requests.values() {
            for (table, &group) in request.tables.iter().zip(self.slot_model.groups()) {
                let num_hashed = request.hashes.len() / self.slot_model.hashes_per_block(group);
                let num_allocated = table.blocks.len() / self.config.blocks_per_slot;
                if table.num_confirmed > num_hashed.min(num_allocated) {
                    return broken(format!(
                        "{} slots confirmed of {num_hashed} hashed and {num_allocated} allocated",
                        table.num_confirmed
                    ));
                }
            }
        }
        Ok(())
    }
}
