//! What a disk tier counts.

use crate::offload::OffloadScheduler;

/// Defines [`DiskStats`] from the one list of its fields.
macro_rules! stats {
    ($($(#[$meta:meta])+ $name:ident,)+) => {
        /// Counters since construction, and gauges. All but the tokens are numbers of slots. A
        /// snapshot keeps none of them.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct DiskStats {
            $($(#[$meta])+ pub $name: usize,)+
        }

        impl DiskStats {
            /// Each name with its value.
            pub fn entries(&self) -> impl Iterator<Item = (&'static str, usize)> + Clone + use<> {
                [$((stringify!($name), self.$name)),+].into_iter()
            }
        }
    };
}

stats! {
    /// Demoted to the disk.
    demoted_blocks,
    /// Promoted to the host.
    promoted_blocks,
    /// Their demote failed or was late.
    failed_demotes,
    /// Their promote failed or was late.
    failed_promotes,
    /// Found no room: on the disk for a demote, or on the host for a promote.
    disk_dropped,
    /// Dropped from the disk because their promote failed or was late.
    disk_damaged_blocks,
    /// Evicted from the disk for room.
    disk_evicted_blocks,
    /// Added to the index because a shared store has them.
    claimed_blocks,
    /// Tokens that requests loaded, and that the host lacked when they began to wait for the disk.
    disk_hit_tokens,
    /// Gauge: on the disk.
    disk_resident_blocks,
    /// Gauge: in a demote, late ones included.
    demoting_blocks,
    /// Gauge: in a promote, late ones included.
    promoting_blocks,
}

impl OffloadScheduler {
    /// Counters of the disk tier since construction, and gauges. All 0 without a disk tier.
    pub fn disk_stats(&self) -> DiskStats {
        let Some(disk) = &self.disk else { return DiskStats::default() };
        DiskStats {
            disk_evicted_blocks: disk.tier.num_evicted,
            disk_resident_blocks: disk.tier.num_resident(),
            demoting_blocks: disk.num_demoting,
            promoting_blocks: disk.num_promoting,
            ..disk.counters
        }
    }
}
