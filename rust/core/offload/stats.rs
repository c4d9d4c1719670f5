//! What a scheduler counts.

use minicbor::{Decode, Encode};

use super::OffloadScheduler;
use super::tier::MAX_READ_COUNT;

/// Counters since construction.
#[derive(Clone, Copy, Debug, Default, Encode, Decode)]
pub(super) struct Counters {
    #[n(0)]
    pub(super) stored: usize,
    #[n(1)]
    pub(super) loaded: usize,
    #[n(2)]
    pub(super) dropped: usize,
    #[n(3)]
    pub(super) failed_stores: usize,
    #[n(4)]
    pub(super) failed_loads: usize,
    #[n(5)]
    pub(super) late_jobs: usize,
    #[n(6)]
    pub(super) pending_lookups: usize,
    #[n(7)]
    pub(super) query_tokens: usize,
    #[n(8)]
    pub(super) hit_tokens: usize,
    #[n(9)]
    #[cbor(default)]
    pub(super) damaged: usize,
}

impl Counters {
    /// Whether no count of a snapshot can overflow later.
    pub(super) fn is_sound(&self) -> bool {
        let Self { stored, loaded, dropped, failed_stores, failed_loads, late_jobs, .. } = *self;
        let Self { pending_lookups, query_tokens, hit_tokens, damaged, .. } = *self;
        let jobs = [stored, loaded, dropped, failed_stores, failed_loads, late_jobs, damaged];
        let lookups = [pending_lookups, query_tokens, hit_tokens];
        jobs.iter().chain(&lookups).all(|&count| count < MAX_READ_COUNT)
    }
}

/// Counters since construction, and gauges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OffloadStats {
    /// Blocks that were stored.
    pub stored_blocks: usize,
    /// Blocks that were loaded.
    pub loaded_blocks: usize,
    /// Blocks that were due for a store when their request left, and for which the tier had no
    /// room.
    pub dropped_blocks: usize,
    /// Slots that were evicted for room.
    pub evicted_blocks: usize,
    /// Stores that failed.
    pub failed_stores: usize,
    /// Loads that failed or did not end before a reset.
    pub failed_loads: usize,
    /// Gauge: slots that lookup can find.
    pub resident_blocks: usize,
    /// Gauge: slots that stores fill.
    pub storing_blocks: usize,
    /// Blocks that the tier dropped because a load found them damaged.
    pub damaged_blocks: usize,
    /// Jobs that missed their deadline.
    pub late_jobs: usize,
    /// Lookups deferred because another request is loading the same blocks.
    pub pending_lookups: usize,
    /// Tokens, in whole blocks, that lookups asked for. Of each request, only its last lookup
    /// before it was loaded or computed counts.
    pub query_tokens: usize,
    /// Tokens that requests loaded from host memory instead of recomputing them.
    pub hit_tokens: usize,
    /// Gauge: jobs in flight, jobs in quarantine excluded.
    pub jobs_in_flight: usize,
    /// Gauge: late jobs that not every rank has reported.
    pub quarantined_jobs: usize,
    /// Gauge: device blocks that these jobs pin.
    pub quarantined_blocks: usize,
    /// Prompt tokens that fit into the tier if every group keeps all of its blocks.
    pub capacity_tokens: usize,
}

impl OffloadScheduler {
    /// Counters since construction, and gauges.
    pub fn stats(&self) -> OffloadStats {
        let late = || self.jobs.values().filter(|job| job.is_late);
        let slots = self.host.slots();
        OffloadStats {
            stored_blocks: self.counters.stored,
            loaded_blocks: self.counters.loaded,
            dropped_blocks: self.counters.dropped,
            evicted_blocks: self.host.num_evicted(),
            failed_stores: self.counters.failed_stores,
            failed_loads: self.counters.failed_loads,
            resident_blocks: self.host.num_resident(),
            storing_blocks: slots.num_filling(),
            damaged_blocks: self.counters.damaged,
            late_jobs: self.counters.late_jobs,
            pending_lookups: self.counters.pending_lookups,
            query_tokens: self.counters.query_tokens,
            hit_tokens: self.counters.hit_tokens,
            jobs_in_flight: self.jobs.len() - late().count(),
            quarantined_jobs: late().count(),
            quarantined_blocks: late().map(|job| job.block_ids.len()).sum(),
            capacity_tokens: self.slot_model.capacity_tokens(slots.len()),
        }
    }
}
