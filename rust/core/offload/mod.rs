//! The host tier and the jobs that fill and read it.
//!
//! The scheduler names device blocks and never owns them: a [`Job`] says which ones to pin while
//! it is in flight, and [`OffloadScheduler::complete`] which ones to unpin.

mod job;
mod load;
mod lru;
mod store;
mod tier;

pub use job::{Job, JobEnd};
pub use store::Progress;

use std::collections::BTreeMap;

use crate::error::{Error, Result};
use crate::event::Event;
use crate::group::{Attention, Group};
use crate::ids::{BlockId, JobId};
use crate::key::{BlockHash, HashWidth, Hashes};
use crate::requests::Requests;

use job::InFlight;
use tier::HostTier;

/// Plans stores and loads between a device's blocks and a host tier of its own.
///
/// Stores are eager: a block is due once earlier steps have computed it. Eviction takes the least
/// recently ranked chain's tail first and never a block whose child is on the host.
#[derive(Clone, Debug)]
pub struct OffloadScheduler {
    tier: HostTier,
    block_size: usize,
    requests: Requests<Tracked>,
    jobs: BTreeMap<JobId, InFlight>,
    num_jobs: u64,
    counters: Counters,
}

/// What is kept of a live request.
#[derive(Clone, Debug, Default)]
struct Tracked {
    hashes: Vec<BlockHash>,
    /// Its block table on the device, as far as it was told.
    table: Vec<BlockId>,
    /// Blocks, from the first, that are computed, hashed and allocated.
    num_confirmed: usize,
    /// Blocks, from the first, that the tier had or was given when it was last looked at.
    num_kept: usize,
    /// What its last lookup found, pinned.
    held: Vec<BlockId>,
}

/// What has happened since construction.
#[derive(Clone, Copy, Debug, Default)]
struct Counters {
    stored: usize,
    loaded: usize,
    dropped: usize,
    failed_stores: usize,
    failed_loads: usize,
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
    /// Now: jobs in flight.
    pub jobs_in_flight: usize,
}

impl OffloadScheduler {
    /// A scheduler over an empty host tier of `num_host_blocks` slots.
    ///
    /// # Errors
    /// [`Error::Config`] for a tier of no slots or too many, or for other than one group.
    pub fn new(num_host_blocks: usize, groups: &[Group], events: bool) -> Result<Self> {
        let [Group { attention: Attention::Full, block_size }] = *groups else {
            return Err(Error::Config(format!(
                "{} groups: one full-attention group is supported so far",
                groups.len()
            )));
        };
        Ok(Self {
            tier: HostTier::new(num_host_blocks, events)?,
            block_size,
            requests: Requests::default(),
            jobs: BTreeMap::new(),
            num_jobs: 0,
            counters: Counters::default(),
        })
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

    /// Makes a request known, with the hashes of its blocks known so far.
    ///
    /// # Errors
    /// [`Error::State`] for a known request, [`Error::HashWidth`] for hashes of another width.
    pub fn add(&mut self, request_id: &str, hashes: &Hashes) -> Result<()> {
        self.requests.check_new(request_id)?;
        self.tier.agree_width(hashes.width())?;
        let hashes = hashes.as_slice().to_vec();
        self.requests.insert(request_id, Tracked { hashes, ..Tracked::default() });
        Ok(())
    }

    /// Appends hashes as generated tokens fill blocks.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`], [`Error::HashWidth`].
    pub fn extend(&mut self, request_id: &str, hashes: &Hashes) -> Result<()> {
        let request = self.requests.get_mut(request_id)?;
        self.tier.agree_width(hashes.width())?;
        request.hashes.extend_from_slice(hashes.as_slice());
        Ok(())
    }

    /// Forgets a request that finished, was preempted or aborted, and ranks its chain. What its
    /// lookup holds is released; its jobs go on.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`].
    pub fn finish(&mut self, request_id: &str) -> Result<()> {
        let request = self.requests.remove(request_id)?;
        self.tier.unpin(&request.held)?;
        self.counters.dropped +=
            request.num_confirmed - request.num_kept.min(request.num_confirmed);
        let is_kept = |hash: &BlockHash| self.tier.resident_or_in_flight(hash).is_some();
        let num_kept = request.hashes.partition_point(is_kept);
        let tail = num_kept
            .checked_sub(1)
            .and_then(|at| self.tier.resident_or_in_flight(&request.hashes[at]));
        if let Some(tail) = tail {
            self.tier.rank(tail);
        }
        Ok(())
    }

    /// Empties the tier, at any moment. What lookups hold is released; jobs in flight still end,
    /// stores without effect and loads as failed.
    ///
    /// # Errors
    /// None that a caller can cause.
    pub fn reset(&mut self) -> Result<()> {
        for request in self.requests.values_mut() {
            self.tier.unpin(&std::mem::take(&mut request.held))?;
            (request.num_kept, request.num_confirmed) = (0, 0);
        }
        for job in self.jobs.values_mut() {
            job.is_fenced = true;
        }
        self.tier.reset()
    }

    /// Counters and gauges.
    pub fn stats(&self) -> OffloadStats {
        OffloadStats {
            stored_blocks: self.counters.stored,
            loaded_blocks: self.counters.loaded,
            dropped_blocks: self.counters.dropped,
            evicted_blocks: self.tier.num_evicted,
            failed_stores: self.counters.failed_stores,
            failed_loads: self.counters.failed_loads,
            resident_blocks: self.tier.num_resident(),
            storing_blocks: self.tier.num_in_flight(),
            jobs_in_flight: self.jobs.len(),
        }
    }

    /// The events of the host tier since the last call, oldest first.
    pub fn take_events(&mut self) -> Vec<Event> {
        self.tier.take_events()
    }

    /// Verifies every invariant of tier, jobs and lookups.
    ///
    /// # Errors
    /// [`Error::Broken`] names the first that does not hold.
    pub fn check(&self) -> Result<()> {
        self.tier.check()?;
        let broken = |what: String| Err(Error::Broken(format!("offload: {what}")));
        let num_held: usize = self.requests.values().map(|request| request.held.len()).sum();
        let num_loading: usize = self.jobs.values().map(InFlight::num_loading).sum();
        if self.tier.num_pins() != num_held + num_loading {
            return broken(format!(
                "{} pins for {num_held} slots held and {num_loading} being loaded",
                self.tier.num_pins()
            ));
        }
        let num_storing: usize = self.jobs.values().map(InFlight::num_storing).sum();
        if self.tier.num_referenced() != self.tier.num_resident() + num_storing {
            return broken(format!(
                "{} slots in use, {} resident and {num_storing} of stores",
                self.tier.num_referenced(),
                self.tier.num_resident()
            ));
        }
        for request in self.requests.values() {
            if request.num_confirmed > request.hashes.len().min(request.table.len()) {
                return broken(format!(
                    "{} blocks confirmed of {} hashed and {} allocated",
                    request.num_confirmed,
                    request.hashes.len(),
                    request.table.len()
                ));
            }
        }
        Ok(())
    }
}
