//! Events of jobs. Every initiated transfer has exactly one completed event, successful or not.

use crate::ids::JobId;

use super::job::Kind;

/// Which way a job copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the device to the host.
    Store,
    /// From the host to the device.
    Load,
    /// From the host to the disk.
    Demote,
    /// From the disk to the host.
    Promote,
}

/// One event of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransferEvent {
    /// The scheduler planned the job.
    Initiated {
        /// The job.
        job_id: JobId,
        /// Which way the job copies.
        direction: Direction,
        /// Number of device blocks; of slots for a demote or a promote.
        num_blocks: usize,
    },
    /// Lookups can find the blocks of a store, a demote or a promote.
    Committed {
        /// The job.
        job_id: JobId,
        /// Number of device blocks; of slots for a demote or a promote. Fewer than planned if some were dropped meanwhile.
        num_blocks: usize,
    },
    /// The job has ended.
    Completed {
        /// The job.
        job_id: JobId,
        /// Which way the job copied.
        direction: Direction,
        /// Whether the copies count.
        is_ok: bool,
    },
}

impl Kind {
    pub(super) fn direction(&self) -> Direction {
        match self {
            Self::Load { .. } => Direction::Load,
            Self::Store { .. } => Direction::Store,
        }
    }
}
