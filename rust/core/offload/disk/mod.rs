//! The tier below the host, called the disk here: what it holds, and the jobs between the two.
//! A shared store takes the place of the disk, or has what the disk lacks; `claim` says how.
//!
//! ```text
//!   [ device ] -- store --> [ host ] -- demote --> [ disk ]      a demoted block stays on the host
//!   [ device ] <-- load --- [ host ] <-- promote - [ disk ]      a promoted block stays on the disk
//! ```
//!
//! `queue` holds the host slots that are due for a demote, `demote` and `promote` plan the jobs,
//! `job` ends them, `adopt` fills the index of a warm disk, `claim` that of a shared store, `events`
//! leaves claims out of the events, and `union` searches both tiers. `unsaved` names what only the
//! host has.
//!
//! A wrong block could reach a request in these ways, and each has its guard:
//!
//! - The source changes during a copy: a job pins host slots that it reads, and disk slots.
//! - A target has two writers: a target slot is in use until every rank has reported.
//! - A block is served before its copy ends: its key is withheld until then.
//! - A late copy, or a copy from before a reset, counts: its blocks never become visible.
//! - One rank's part is missing: a block counts only if it succeeded on every rank.
//! - A damaged block is served again: it leaves the index that held it. A demote that reads a host
//!   slot that a load finds damaged fails for this block.
//! - A disk block survives a change of weights: `reset` drops the index and closes the disk.
//!
//! May import: error, event, group, ids, job, key, pool, sightings, tier, `transfer_event`.

mod adopt;
mod claim;
mod config;
mod demote;
mod events;
mod job;
mod promote;
mod queue;
#[cfg(test)]
mod recency_tests;
mod stats;
mod union;
mod unsaved;
#[cfg(test)]
mod view_tests;

pub use claim::Unclaimed;
pub use config::{Admit, DiskConfig, DiskMode};
pub use job::TierJob;
pub(super) use promote::Waiting;
pub use stats::DiskStats;
pub use unsaved::Unsaved;
#[cfg(test)]
pub(super) use view_tests::TierJobView;

use std::collections::{BTreeMap, VecDeque};

use crate::error::{Error, Result};
use crate::ids::{BlockId, JobId};

use super::OffloadScheduler;
use super::sightings::Sightings;
use super::tier::Tier;

use events::DiskEvents;
use job::TierInFlight;
use promote::Want;
use queue::DemoteQueue;

/// A disk tier and its jobs.
#[derive(Clone, Debug)]
pub(super) struct Disk {
    pub(super) tier: Tier,
    config: DiskConfig,
    mode: DiskMode,
    queue: DemoteQueue,
    /// Requests that wait for a promote, the first to be served first.
    wants: VecDeque<Want>,
    /// Number of wants ever.
    num_wants: u64,
    jobs: BTreeMap<JobId, TierInFlight>,
    /// The keys that the host has evicted. None if the disk takes every block.
    evicted: Option<Sightings>,
    /// Slots that demotes copy.
    num_demoting: usize,
    /// Slots that promotes copy.
    num_promoting: usize,
    /// Its gauges stay 0.
    pub(super) counters: DiskStats,
    events: DiskEvents,
}

impl Disk {
    /// An empty disk tier, which is off, below a host tier of `num_host_slots`.
    pub(super) fn new(config: DiskConfig, num_host_slots: usize, events: bool) -> Result<Self> {
        config.check()?;
        let keeps_evicted = config.admit == Admit::Returned;
        let num_evicted = num_host_slots.saturating_add(config.num_blocks);
        Ok(Self {
            tier: Tier::new("num_disk_blocks", config.num_blocks, config.policy, events)?,
            config,
            mode: DiskMode::Off,
            queue: DemoteQueue::new(num_host_slots)?,
            wants: VecDeque::new(),
            num_wants: 0,
            jobs: BTreeMap::new(),
            evicted: keeps_evicted.then(|| Sightings::of_any(num_evicted)).transpose()?,
            num_demoting: 0,
            num_promoting: 0,
            counters: DiskStats::default(),
            events: DiskEvents::default(),
        })
    }

    /// Whether it has neither jobs nor slots in use.
    pub(super) fn is_new(&self) -> bool {
        self.jobs.is_empty() && self.tier.num_referenced() == 0
    }

    /// Whether a job is in flight.
    pub(super) fn has_jobs(&self) -> bool {
        !self.jobs.is_empty()
    }

    /// Drops everything, and closes the disk.
    fn reset(&mut self) -> Result<()> {
        self.mode = DiskMode::Off;
        self.queue.clear();
        self.wants.clear();
        for job in self.jobs.values_mut() {
            job.is_fenced = true;
        }
        self.tier.reset()
    }
}

impl OffloadScheduler {
    /// What the disk tier may do. None without a disk tier.
    pub fn disk_mode(&self) -> Option<DiskMode> {
        self.disk.as_ref().map(|disk| disk.mode)
    }

    /// Number of slots of the disk tier, all of them usable. 0 without one.
    pub fn num_disk_blocks(&self) -> usize {
        self.disk.as_ref().map_or(0, |disk| disk.tier.slots.len())
    }

    /// Opens or closes the disk tier. A new scheduler's disk is off, and so is the disk after a
    /// [`reset`](Self::reset). Open it once every rank has made the reset durable. Jobs in flight
    /// continue. If the disk is off, lookups stop waiting for it.
    ///
    /// # Errors
    /// [`Error::State`] without a disk tier.
    pub fn set_disk(&mut self, mode: DiskMode) -> Result<()> {
        let Some(disk) = &mut self.disk else { return Err(no_disk("set a disk mode")) };
        disk.mode = mode;
        if mode == DiskMode::Off {
            self.stop_waiting();
        }
        Ok(())
    }

    /// Empties and closes the disk tier. Its jobs end without effect.
    pub(super) fn reset_disk(&mut self) -> Result<()> {
        self.stop_waiting();
        self.disk.as_mut().map_or(Ok(()), |disk| disk.reset())
    }

    /// Lets every request go on with what the host has.
    fn stop_waiting(&mut self) {
        if let Some(disk) = &mut self.disk {
            disk.wants.clear();
            for request in self.requests.values_mut() {
                if let Some(waiting) = &mut request.waiting {
                    waiting.leave();
                }
            }
        }
    }

    /// The jobs of the disk tier in flight, and how many of them are late.
    pub(super) fn num_tier_jobs(&self) -> (usize, usize) {
        let Some(disk) = &self.disk else { return (0, 0) };
        (disk.jobs.len(), disk.jobs.values().filter(|job| job.is_late).count())
    }

    /// The pins of tier jobs on host slots, and the host slots that tier jobs fill.
    pub(super) fn num_host_slots_of_tier_jobs(&self) -> (usize, usize) {
        self.disk.as_ref().map_or((0, 0), |disk| (disk.num_demoting, disk.num_promoting))
    }

    /// Verifies every invariant of the disk tier.
    ///
    /// # Errors
    /// [`Error::Broken`] names the first that does not hold.
    pub(super) fn check_disk(&self) -> Result<()> {
        let Some(disk) = &self.disk else { return Ok(()) };
        disk.tier.check()?;
        disk.check_jobs()?;
        let broken = |what: String| Err(Error::Broken(format!("disk: {what}")));
        let Disk { tier, num_demoting, num_promoting, .. } = &**disk;
        if tier.num_pins() != *num_promoting {
            return broken(format!("{} pins, {num_promoting} being promoted", tier.num_pins()));
        }
        if tier.num_referenced() != tier.num_resident() + num_demoting {
            return broken(format!(
                "{} slots in use, {} resident and {num_demoting} of demotes",
                tier.num_referenced(),
                tier.num_resident()
            ));
        }
        if !disk.queue.is_within_bound() {
            return broken("the queue of demotes exceeds its bound".to_owned());
        }
        self.check_wants(disk)
    }
}

/// The answer to a call that needs a disk tier.
fn no_disk(what: &str) -> Error {
    Error::State(format!(
        "cannot {what}: this scheduler has no disk tier, so build it with num_disk_blocks"
    ))
}

/// The places of slots, counted from 0.
fn places(slots: &[BlockId]) -> Vec<u32> {
    slots.iter().map(|slot| slot.0 - 1).collect()
}
