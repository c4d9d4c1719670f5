//! What a scheduler counts.

use minicbor::{Decode, Encode};

use super::OffloadScheduler;
use super::tier::MAX_READ_COUNT;

/// Defines [`OffloadStats`] from the one list of its fields.
macro_rules! stats {
    ($($(#[$meta:meta])+ $name:ident,)+) => {
        /// Counters since construction, and gauges. A snapshot keeps the counters.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
        pub struct OffloadStats {
            $($(#[$meta])+ pub $name: usize,)+
        }

        impl OffloadStats {
            /// Each name with its value.
            pub fn entries(&self) -> impl Iterator<Item = (&'static str, usize)> + Clone + use<> {
                [$((stringify!($name), self.$name)),+].into_iter()
            }
        }
    };
}

stats! {
    /// Blocks that were stored.
    #[n(0)]
    stored_blocks,
    /// Blocks that were loaded.
    #[n(1)]
    loaded_blocks,
    /// Blocks that were due for a store when their request left, and for which the tier had no
    /// room.
    #[n(2)]
    dropped_blocks,
    /// Slots that were evicted for room.
    #[cbor(skip)]
    evicted_blocks,
    /// Stores that failed.
    #[n(3)]
    failed_stores,
    /// Loads that failed or did not end before a reset.
    #[n(4)]
    failed_loads,
    /// Gauge: slots that lookup can find.
    #[cbor(skip)]
    resident_blocks,
    /// Gauge: slots that stores and promotes fill.
    #[cbor(skip)]
    storing_blocks,
    /// Gauge: jobs in flight, jobs in quarantine excluded.
    #[cbor(skip)]
    jobs_in_flight,
    /// Blocks that the tier dropped because a load found them damaged.
    #[n(9)]
    #[cbor(default)]
    damaged_blocks,
    /// Blocks that were not stored because too few requests had seen them.
    #[n(10)]
    #[cbor(default)]
    rare_blocks,
    /// Blocks that were not stored because the caller allowed too few when they were due.
    #[n(11)]
    #[cbor(default)]
    throttled_blocks,
    /// Jobs that missed their deadline.
    #[n(5)]
    late_jobs,
    /// Lookups deferred because another request is loading the same blocks, or because the disk tier
    /// brings them.
    #[n(6)]
    pending_lookups,
    /// Tokens, in whole blocks, that lookups asked for. Of each request, only its last lookup
    /// before it was loaded or computed counts.
    #[n(7)]
    query_tokens,
    /// Tokens that requests loaded from host memory instead of recomputing them.
    #[n(8)]
    hit_tokens,
    /// Gauge: late jobs that not every rank has reported.
    #[cbor(skip)]
    quarantined_jobs,
    /// Gauge: device blocks that these jobs pin.
    #[cbor(skip)]
    quarantined_blocks,
    /// Prompt tokens that fit into the tier if every group keeps all of its blocks.
    #[cbor(skip)]
    capacity_tokens,
}

impl OffloadStats {
    /// Whether no count of a snapshot can overflow later.
    pub(super) fn is_sound(&self) -> bool {
        self.entries().all(|(_, count)| count < MAX_READ_COUNT)
    }
}

impl OffloadScheduler {
    /// Counters since construction, and gauges.
    pub fn stats(&self) -> OffloadStats {
        let late = || self.jobs.values().filter(|job| job.is_late);
        let (num_tier_jobs, num_late_tier_jobs) = self.num_tier_jobs();
        let num_late = late().count() + num_late_tier_jobs;
        OffloadStats {
            evicted_blocks: self.host.num_evicted,
            resident_blocks: self.host.num_resident(),
            storing_blocks: self.host.slots.num_filling,
            jobs_in_flight: self.jobs.len() + num_tier_jobs - num_late,
            quarantined_jobs: num_late,
            quarantined_blocks: late().map(|job| job.block_ids.len()).sum(),
            capacity_tokens: self.slot_model.capacity_tokens(self.host.slots.len()),
            ..self.counters
        }
    }
}
