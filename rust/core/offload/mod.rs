//! The host tier and the jobs that fill and read it.
//!
//! The scheduler names device blocks and never owns them: a [`Job`] says which ones to pin while
//! it is in flight, and [`OffloadScheduler::complete`] which ones to unpin.

mod image;
mod job;
mod lazy;
mod load;
mod recency;
mod record;
mod request;
mod store;
mod tier;
mod transfer;

pub use image::ImageCopies;
pub use job::{Job, JobEnd, Outcome};
pub(crate) use record::SchedulerRecord;
pub use store::Progress;
pub use tier::EvictionPolicy;
pub use transfer::{Direction, TransferEvent};

use std::collections::BTreeMap;

use minicbor::{Decode, Encode};

use crate::error::{Error, Result};
use crate::event::Event;
use crate::group::{Attention, Group, Model};
use crate::ids::JobId;
use crate::key::HashWidth;
use crate::pool::MAX_BLOCKS;
use crate::requests::Requests;

use image::Image;
use job::InFlight;
use lazy::ComputedBlocks;
use request::{Held, Table, Tracked};
use tier::HostTier;

/// The most device blocks that a slot holds.
pub const MAX_BLOCKS_PER_SLOT: usize = 1 << 10;

/// The most ranks that copy their parts of one job.
pub const MAX_WORLD_SIZE: usize = 1 << 16;

/// Plans stores and loads between a device's blocks and a host tier of its own.
///
/// Eager, a block is due for a store once earlier steps have computed it; lazy, once the device is
/// about to evict it. Which block goes for room is the [`EvictionPolicy`]'s choice, but of a
/// full-attention group never one whose child is on the host.
#[derive(Clone, Debug)]
pub struct OffloadScheduler {
    tier: HostTier,
    /// The device's groups.
    model: Model,
    /// The same in blocks as large as slots.
    slot_model: Model,
    blocks_per_slot: usize,
    requests: Requests<Tracked>,
    jobs: BTreeMap<JobId, InFlight>,
    /// Jobs ever begun: the last one's id.
    num_jobs: u64,
    /// Up to this id [`OffloadScheduler::end_all`] has ended all.
    num_ended_jobs: u64,
    mode: Mode,
    /// Lazy only.
    computed: ComputedBlocks,
    world_size: usize,
    num_device_blocks: usize,
    counters: Counters,
    /// What is kept of a device that sleeps.
    image: Option<Image>,
    /// What happened to jobs; none where no events are kept.
    transfers: Option<Vec<TransferEvent>>,
}

/// What has happened since construction.
#[derive(Clone, Copy, Debug, Default, Encode, Decode)]
struct Counters {
    #[n(0)]
    stored: usize,
    #[n(1)]
    loaded: usize,
    #[n(2)]
    dropped: usize,
    #[n(3)]
    failed_stores: usize,
    #[n(4)]
    failed_loads: usize,
    #[n(5)]
    late_jobs: usize,
    #[n(6)]
    pending_lookups: usize,
    #[n(7)]
    query_tokens: usize,
    #[n(8)]
    hit_tokens: usize,
    #[n(9)]
    #[cbor(default)]
    damaged: usize,
}

/// Counts that were read from somewhere stay below this, so that they cannot wrap.
const MAX_READ_COUNT: usize = 1 << 62;

impl Counters {
    /// Refuses counts that could wrap: those that were read from somewhere.
    fn is_sound(&self) -> bool {
        let Self { stored, loaded, dropped, failed_stores, failed_loads, late_jobs, .. } = *self;
        let Self { pending_lookups, query_tokens, hit_tokens, damaged, .. } = *self;
        let jobs = [stored, loaded, dropped, failed_stores, failed_loads, late_jobs, damaged];
        let lookups = [pending_lookups, query_tokens, hit_tokens];
        jobs.iter().chain(&lookups).all(|&count| count < MAX_READ_COUNT)
    }
}

/// When blocks are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub enum Mode {
    /// As soon as they are computed.
    #[default]
    #[n(0)]
    Eager,
    /// When the device is about to evict them.
    #[n(1)]
    Lazy,
}

/// What a scheduler is made for.
#[derive(Clone, Debug)]
pub struct OffloadConfig {
    /// Slots of the host tier, all of them usable.
    pub num_host_blocks: usize,
    /// The device's groups.
    pub groups: Vec<Group>,
    /// Device blocks that a slot holds: consecutive ones of one prompt, under the key of the last.
    /// More than 1 is for full attention only.
    pub blocks_per_slot: usize,
    /// When blocks are stored.
    pub mode: Mode,
    /// Which slots go first.
    pub policy: EvictionPolicy,
    /// Workers that each copy their part of every job.
    pub world_size: usize,
    /// Blocks of the device pool, the null block included; ids outside it are refused.
    pub num_device_blocks: usize,
    /// Whether events are kept.
    pub events: bool,
}

impl OffloadConfig {
    /// Eager, LRU, one worker, any device block, no events.
    pub fn new(num_host_blocks: usize, groups: Vec<Group>) -> Self {
        Self {
            num_host_blocks,
            groups,
            blocks_per_slot: 1,
            mode: Mode::Eager,
            policy: EvictionPolicy::Lru,
            world_size: 1,
            num_device_blocks: MAX_BLOCKS,
            events: false,
        }
    }
}

/// Counters since construction, and gauges of the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OffloadStats {
    /// Blocks whose store is done.
    pub stored_blocks: usize,
    /// Blocks whose load is done.
    pub loaded_blocks: usize,
    /// Blocks that were due and that the tier had no room for when their request went.
    pub dropped_blocks: usize,
    /// Slots evicted for room.
    pub evicted_blocks: usize,
    /// Stores that failed.
    pub failed_stores: usize,
    /// Loads that failed, or that a reset overtook.
    pub failed_loads: usize,
    /// Now: slots that lookup can find.
    pub resident_blocks: usize,
    /// Now: slots that stores are filling.
    pub storing_blocks: usize,
    /// Blocks that the tier dropped because a load found them damaged.
    pub damaged_blocks: usize,
    /// Jobs that were past their deadline.
    pub late_jobs: usize,
    /// Lookups that were told to ask again.
    pub pending_lookups: usize,
    /// Tokens, in whole blocks, that lookups asked for; of each request its last lookup before it
    /// was loaded or computed.
    pub query_tokens: usize,
    /// Tokens that requests were spared to compute: accepted by loads.
    pub hit_tokens: usize,
    /// Now: jobs in flight, those in quarantine not counted.
    pub jobs_in_flight: usize,
    /// Now: late jobs that not every rank has reported.
    pub quarantined_jobs: usize,
    /// Now: device blocks that these jobs pin.
    pub quarantined_blocks: usize,
    /// Tokens of prompts that the tier holds, where every group keeps all of its blocks.
    pub capacity_tokens: usize,
}

impl OffloadScheduler {
    /// A scheduler over an empty host tier.
    ///
    /// # Errors
    /// [`Error::Config`] for a tier of no slots or too many, for groups that [`Model::new`]
    /// refuses, and for a world of no ranks or more than [`MAX_WORLD_SIZE`].
    pub fn new(config: OffloadConfig) -> Result<Self> {
        let OffloadConfig {
            num_host_blocks,
            groups,
            blocks_per_slot,
            mode,
            policy,
            world_size,
            num_device_blocks,
            events,
        } = config;
        if !(1..=MAX_WORLD_SIZE).contains(&world_size) {
            return Err(Error::Config(format!(
                "a world of {world_size} ranks: it must be 1 to {MAX_WORLD_SIZE}"
            )));
        }
        if !(1..=MAX_BLOCKS_PER_SLOT).contains(&blocks_per_slot) {
            return Err(Error::Config(format!(
                "{blocks_per_slot} blocks per slot: it must be 1 to {MAX_BLOCKS_PER_SLOT}"
            )));
        }
        if num_host_blocks.saturating_mul(blocks_per_slot) > MAX_BLOCKS {
            return Err(Error::Config(format!(
                "{num_host_blocks} host blocks of {blocks_per_slot} device blocks each: at most \
                 {MAX_BLOCKS} device blocks are counted"
            )));
        }
        if mode == Mode::Lazy && blocks_per_slot > 1 {
            return Err(Error::Config(format!(
                "{blocks_per_slot} blocks per slot in lazy mode: blocks are evicted one by one, so \
                 take 1, or the eager mode"
            )));
        }
        let model = Model::new(groups)?;
        let skips = |group: &Group| group.attention != Attention::Full;
        if blocks_per_slot > 1 && model.groups().iter().any(skips) {
            return Err(Error::Config(format!(
                "{blocks_per_slot} blocks per slot with a group that skips blocks: of a slot some \
                 would be gone before the last is computed, so take 1"
            )));
        }
        Ok(Self {
            slot_model: model.in_tier(blocks_per_slot)?,
            model,
            blocks_per_slot,
            tier: HostTier::new(num_host_blocks, policy, events)?,
            requests: Requests::default(),
            jobs: BTreeMap::new(),
            num_jobs: 0,
            num_ended_jobs: 0,
            mode,
            computed: ComputedBlocks::default(),
            world_size,
            num_device_blocks,
            counters: Counters::default(),
            image: None,
            transfers: events.then(Vec::new),
        })
    }

    /// The groups.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The slots of the host tier, all of them usable.
    pub fn num_host_blocks(&self) -> usize {
        self.tier.num_slots()
    }

    /// Slots that lookup can find.
    pub fn num_resident(&self) -> usize {
        self.tier.num_resident()
    }

    /// The width of the tier's hashes.
    pub fn hash_width(&self) -> HashWidth {
        self.tier.hash_width()
    }

    /// Whether nothing has happened to it yet.
    pub(crate) fn is_new(&self) -> bool {
        self.num_jobs == 0
            && self.requests.len() == 0
            && self.image.is_none()
            && self.tier.num_referenced() == 0
    }

    /// Empties the tier, at any moment. What lookups hold is released; jobs in flight still end,
    /// stores without effect and loads as failed.
    ///
    /// # Errors
    /// None that a caller can cause.
    pub fn reset(&mut self) -> Result<()> {
        for request in self.requests.values_mut() {
            self.tier.unpin(&std::mem::take(&mut request.held).slots)?;
            for (table, group) in request.tables.iter_mut().zip(self.model.groups()) {
                // Blocks of a window may be gone from the device: they are not due again.
                if group.attention == Attention::Full {
                    (table.num_kept, table.num_confirmed) = (0, 0);
                }
            }
        }
        for job in self.jobs.values_mut() {
            job.is_fenced = true;
        }
        self.tier.reset()
    }

    /// Counters and gauges.
    pub fn stats(&self) -> OffloadStats {
        let late = || self.jobs.values().filter(|job| job.is_late);
        OffloadStats {
            stored_blocks: self.counters.stored,
            loaded_blocks: self.counters.loaded,
            dropped_blocks: self.counters.dropped,
            evicted_blocks: self.tier.num_evicted,
            failed_stores: self.counters.failed_stores,
            failed_loads: self.counters.failed_loads,
            resident_blocks: self.tier.num_resident(),
            storing_blocks: self.tier.num_in_flight(),
            damaged_blocks: self.counters.damaged,
            late_jobs: self.counters.late_jobs,
            pending_lookups: self.counters.pending_lookups,
            query_tokens: self.counters.query_tokens,
            hit_tokens: self.counters.hit_tokens,
            jobs_in_flight: self.jobs.len() - late().count(),
            quarantined_jobs: late().count(),
            quarantined_blocks: late().map(|job| job.block_ids.len()).sum(),
            capacity_tokens: self.slot_model.capacity_tokens(self.tier.num_slots()),
        }
    }

    /// The events of the host tier since the last call, oldest first.
    pub fn take_events(&mut self) -> Vec<Event> {
        self.tier.take_events()
    }

    /// What has happened to jobs since the last call, oldest first; empty where no events are kept.
    pub fn take_transfer_events(&mut self) -> Vec<TransferEvent> {
        self.transfers.as_mut().map(std::mem::take).unwrap_or_default()
    }

    fn tell(&mut self, event: TransferEvent) {
        if let Some(transfers) = &mut self.transfers {
            transfers.push(event);
        }
    }

    /// Verifies every invariant of tier, jobs and lookups.
    ///
    /// # Errors
    /// [`Error::Broken`] names the first that does not hold.
    pub fn check(&self) -> Result<()> {
        self.tier.check()?;
        let broken = |what: String| Err(Error::Broken(format!("offload: {what}")));
        let num_held: usize = self.requests.values().map(|request| request.held.slots.len()).sum();
        let num_loading: usize = self.jobs.values().map(InFlight::num_loading).sum();
        let image = self.image.as_ref();
        let num_shared = image.map_or(0, |image| image.shared.len());
        if self.tier.num_pins() != num_held + num_loading + num_shared {
            return broken(format!(
                "{} pins for {num_held} slots held, {num_loading} being loaded and {num_shared} of \
                 a sleep image",
                self.tier.num_pins()
            ));
        }
        let num_storing: usize = self.jobs.values().map(InFlight::num_storing).sum();
        let num_own = image.map_or(0, |image| image.own.len());
        if self.tier.num_referenced() != self.tier.num_resident() + num_storing + num_own {
            return broken(format!(
                "{} slots in use, {} resident, {num_storing} of stores and {num_own} of a sleep image",
                self.tier.num_referenced(),
                self.tier.num_resident()
            ));
        }
        for request in self.requests.values() {
            for (table, &group) in request.tables.iter().zip(self.slot_model.groups()) {
                let num_hashed = request.hashes.len() / self.slot_model.hashes_per_block(group);
                let num_allocated = table.blocks.len() / self.blocks_per_slot;
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
