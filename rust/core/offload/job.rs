//! Jobs: one store or one load in flight, from its plan to its end.

use crate::error::{Error, Result};
use crate::ids::{BlockId, JobId};

use super::OffloadScheduler;
use super::tier::Filling;

/// The copies that one job asks for: `block_ids[i]` and `host_slots[i]` are the two ends of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// Names the job when it ends.
    pub job_id: JobId,
    /// Device blocks: to be pinned until the job ends.
    pub block_ids: Vec<BlockId>,
    /// Host slots, counted from 0.
    pub host_slots: Vec<u32>,
    /// Where each group's copies begin, and the end of the last.
    pub offsets: Vec<usize>,
}

/// How a job ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobEnd {
    /// Device blocks to unpin.
    pub block_ids: Vec<BlockId>,
    /// Whether its copies count: false for a job that failed or that a reset overtook. Blocks of
    /// such a load must be recomputed.
    pub is_ok: bool,
}

#[derive(Clone, Debug)]
pub(super) struct InFlight {
    pub(super) block_ids: Vec<BlockId>,
    pub(super) slots: Vec<BlockId>,
    pub(super) kind: Kind,
    /// Whether the tier was reset since: the result no longer counts.
    pub(super) is_fenced: bool,
}

#[derive(Clone, Debug)]
pub(super) enum Kind {
    Load,
    Store {
        /// What each slot is to hold.
        filling: Filling,
        /// The last slot of each chain's part: whole chains are ranked from there.
        tails: Vec<BlockId>,
    },
}

impl InFlight {
    /// Slots that this job was given to fill, fenced or not.
    pub(super) fn num_storing(&self) -> usize {
        self.slots.len() - self.num_loading()
    }

    /// Slots that this job pins.
    pub(super) fn num_loading(&self) -> usize {
        match self.kind {
            Kind::Load => self.slots.len(),
            Kind::Store { .. } => 0,
        }
    }
}

impl OffloadScheduler {
    /// Enters a job into the books.
    pub(super) fn begin(
        &mut self,
        block_ids: Vec<BlockId>,
        slots: Vec<BlockId>,
        offsets: Vec<usize>,
        kind: Kind,
    ) -> Job {
        self.num_jobs += 1;
        let job_id = JobId(self.num_jobs);
        // Slot i lies in block i + 1 of the tier's pool, whose block 0 is its null block.
        let host_slots = slots.iter().map(|slot| slot.0 - 1).collect();
        let job = Job { job_id, block_ids: block_ids.clone(), host_slots, offsets };
        self.jobs.insert(job_id, InFlight { block_ids, slots, kind, is_fenced: false });
        job
    }

    /// Ends a job. Of a store, the slots become visible to lookup and their chains are ranked, or
    /// they are given back if it failed.
    ///
    /// # Errors
    /// [`Error::UnknownJob`] for a job that is not in flight.
    pub fn complete(&mut self, job_id: JobId, is_ok: bool) -> Result<JobEnd> {
        let Some(job) = self.jobs.remove(&job_id) else {
            return Err(Error::UnknownJob { job_id });
        };
        let counts = is_ok && !job.is_fenced;
        match &job.kind {
            Kind::Load => {
                self.tier.end_loads(&job.slots);
                self.tier.unpin(&job.slots)?;
                if counts {
                    self.counters.loaded += job.slots.len();
                } else {
                    self.counters.failed_loads += 1;
                }
            }
            Kind::Store { filling, tails } if is_ok => {
                self.counters.stored += self.tier.publish(&job.slots, filling, &self.model)?;
                for &tail in tails {
                    self.tier.rank_chain(tail);
                }
            }
            Kind::Store { filling, .. } => {
                self.tier.abandon(&job.slots, &filling.keys)?;
                self.counters.failed_stores += 1;
            }
        }
        Ok(JobEnd { block_ids: job.block_ids, is_ok: counts })
    }
}
