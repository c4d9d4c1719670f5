//! What happens to jobs, for whoever watches them: every transfer that is initiated is completed
//! once, well or not.

use crate::ids::JobId;

use super::job::Kind;

/// Which way a job copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the device to the host.
    Store,
    /// From the host to the device.
    Load,
}

/// One event of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransferEvent {
    /// It was planned.
    Initiated {
        /// The job.
        job_id: JobId,
        /// Which way it copies.
        direction: Direction,
        /// How many device blocks.
        num_blocks: usize,
    },
    /// What a store brought can be found.
    Committed {
        /// The job.
        job_id: JobId,
        /// How many device blocks; less than were planned where some were dropped meanwhile.
        num_blocks: usize,
    },
    /// It has ended.
    Completed {
        /// The job.
        job_id: JobId,
        /// Which way it copied.
        direction: Direction,
        /// Whether its copies count.
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
