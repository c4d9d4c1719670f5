//! Jobs: a store or a load in flight, from its plan to its end.
//!
//! ```text
//!   begin --> [ in flight ] --- complete, all ranks ---> JobEnd, ok or failed
//!                  | expire                                  ^
//!                  +---> [ quarantine ] --- complete, all ---+  end_all ends both at once
//! ```

use minicbor::{Decode, Encode};

use crate::error::{Error, Result};
use crate::ids::{BlockId, JobId};

use super::tier::Filling;
use super::{OffloadScheduler, TransferEvent};

/// The copies of a store, of a load or of a sleep image: `block_ids[i]` and `host_slots[i]` are the
/// two ends of a copy.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Job {
    /// Id of the job. 0 until it begins, and for a sleep image, whose copies nobody reports.
    #[cbor(skip)]
    pub job_id: JobId,
    /// Device blocks to pin until the job ends.
    #[n(0)]
    pub block_ids: Vec<BlockId>,
    /// Places on the host, counted from 0. A slot of several blocks has several places.
    #[n(1)]
    pub host_slots: Vec<u32>,
    /// Where each group's copies begin, and the end of the last.
    #[n(2)]
    pub offsets: Vec<usize>,
}

impl Job {
    /// A job without copies.
    pub(super) fn empty() -> Self {
        let (block_ids, host_slots) = (Vec::new(), Vec::new());
        Self { job_id: JobId::default(), block_ids, host_slots, offsets: vec![0] }
    }

    /// Adds a copy between a device block and the place `at` of a slot.
    pub(super) fn push(&mut self, block: BlockId, slot: BlockId, at: usize, per_slot: usize) {
        self.block_ids.push(block);
        self.host_slots.push(place_of(slot, at, per_slot));
    }

    /// Adds the copies between a table's blocks from index `first` on and the slots that hold them.
    pub(super) fn extend(
        &mut self,
        first: usize,
        blocks: &[BlockId],
        slots: &[BlockId],
        per_slot: usize,
    ) {
        if per_slot == 1 {
            self.block_ids.extend_from_slice(blocks);
            self.host_slots.extend(slots.iter().map(|&slot| place_of(slot, 0, 1)));
            return;
        }
        for (at, &block) in (first % per_slot..).zip(blocks) {
            self.push(block, slots[at / per_slot], at % per_slot, per_slot);
        }
    }

    /// Ends the copies of a group.
    pub(super) fn end_group(&mut self) {
        self.offsets.push(self.block_ids.len());
    }
}

/// How one rank's part of a job went.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// The outcome of the whole part. A failure does not mean that the host's bytes are damaged.
    Whole(bool),
    /// Block by block, in the job's order. False for a block of a load means that its slot is
    /// damaged.
    Blocks(Vec<bool>),
}

impl From<bool> for Outcome {
    fn from(is_ok: bool) -> Self {
        Self::Whole(is_ok)
    }
}

impl Outcome {
    fn is_ok(&self) -> bool {
        match self {
            Self::Whole(is_ok) => *is_ok,
            Self::Blocks(are_ok) => !are_ok.contains(&false),
        }
    }
}

/// How a job ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobEnd {
    /// The job.
    pub job_id: JobId,
    /// Device blocks to unpin.
    pub block_ids: Vec<BlockId>,
    /// Whether the copies count. False for a job that failed, was late, or was in flight at a
    /// reset. Blocks of such a load must be recomputed.
    pub is_ok: bool,
    /// Whether the job missed its deadline, so that its request has failed already.
    pub is_late: bool,
}

#[derive(Clone, Debug)]
pub(super) struct InFlight {
    pub(super) block_ids: Vec<BlockId>,
    pub(super) slots: Vec<BlockId>,
    pub(super) kind: Kind,
    /// On the caller's clock.
    pub(super) deadline: Option<f64>,
    /// By rank: whether its worker has reported.
    pub(super) reported: Vec<bool>,
    /// Whether a rank has reported a failure.
    pub(super) has_failed: bool,
    /// Whether the tier was reset since, so that the result does not count.
    pub(super) is_fenced: bool,
    /// Whether the job missed its deadline and is in quarantine.
    pub(super) is_late: bool,
}

#[derive(Clone, Debug)]
pub(super) enum Kind {
    Load {
        /// The place of each block on the host.
        host_slots: Vec<u32>,
    },
    Store {
        /// What each slot will hold.
        filling: Filling,
        ranks: Ranks,
    },
}

/// Where the slots of a store go in the order of eviction.
#[derive(Clone, Debug, Default)]
pub(super) struct Ranks {
    /// The last slot of each chain's part, from which the whole chain becomes recent.
    pub(super) tails: Vec<BlockId>,
    /// Slots that are evicted before all others, the last of them first.
    pub(super) low_priority: Vec<BlockId>,
}

impl Ranks {
    /// With slots of low priority that end in their prompts at these places. The tail of a prompt
    /// is evicted first, whatever its group.
    pub(super) fn new(tails: Vec<BlockId>, mut low_priority: Vec<(usize, BlockId)>) -> Self {
        low_priority.sort_unstable();
        Self { tails, low_priority: low_priority.into_iter().map(|(_, slot)| slot).collect() }
    }
}

impl InFlight {
    /// The slots of the blocks that an outcome reports as damaged.
    fn damaged(&self, job_id: JobId, outcome: &Outcome, per_slot: usize) -> Result<Vec<BlockId>> {
        let Outcome::Blocks(are_ok) = outcome else { return Ok(Vec::new()) };
        check_num_outcomes(job_id, are_ok.len(), self.block_ids.len())?;
        let Kind::Load { host_slots } = &self.kind else { return Ok(Vec::new()) };
        let damaged = host_slots.iter().zip(are_ok).filter(|&(_, is_ok)| !is_ok);
        Ok(damaged.map(|(&place, _)| slot_at(place, per_slot)).collect())
    }

    /// Number of slots that this job pins.
    pub(super) fn num_loading(&self) -> usize {
        match self.kind {
            Kind::Load { .. } => self.slots.len(),
            Kind::Store { .. } => 0,
        }
    }
}

/// Refuses another number of outcomes than the job has blocks.
pub(super) fn check_num_outcomes(job_id: JobId, given: usize, num_blocks: usize) -> Result<()> {
    if given == num_blocks {
        return Ok(());
    }
    Err(Error::Config(format!(
        "{given} outcomes for the {num_blocks} blocks of job {}: give one per block, in the job's \
         order",
        job_id.0
    )))
}

pub(super) fn reported_twice(job_id: JobId, rank: usize) -> Error {
    Error::State(format!(
        "rank {rank} has reported job {} already: each rank reports once",
        job_id.0
    ))
}

/// The place `at` of a slot on the host. The inverse of [`slot_at`].
#[inline]
pub(super) fn place_of(slot: BlockId, at: usize, per_slot: usize) -> u32 {
    u32::try_from((slot.index() - 1) * per_slot + at).unwrap_or(u32::MAX)
}

/// The slot that contains a place on the host. Slot i is block i + 1 of the tier's pool, because
/// block 0 is the null block.
pub(super) fn slot_at(place: u32, per_slot: usize) -> BlockId {
    BlockId(u32::try_from(place as usize / per_slot + 1).unwrap_or(u32::MAX))
}

impl OffloadScheduler {
    pub(super) fn next_job_id(&mut self) -> JobId {
        self.num_jobs += 1;
        JobId(self.num_jobs)
    }

    /// Begins a job, which gets its id.
    pub(super) fn begin(
        &mut self,
        mut job: Job,
        slots: Vec<BlockId>,
        kind: Kind,
        deadline: Option<f64>,
    ) -> Job {
        let job_id = self.next_job_id();
        job.job_id = job_id;
        let (direction, num_blocks) = (kind.direction(), job.block_ids.len());
        self.report(TransferEvent::Initiated { job_id, direction, num_blocks });
        let reported = vec![false; self.config.world_size];
        let in_flight = InFlight {
            block_ids: job.block_ids.clone(),
            slots,
            kind,
            deadline,
            reported,
            has_failed: false,
            is_fenced: false,
            is_late: false,
        };
        self.jobs.insert(job_id, in_flight);
        job
    }

    /// Reports that a rank's part of a job has ended, or never began. Returns None until all ranks
    /// have reported. Then the job ends, and it failed if any part did. The slots of a store become
    /// visible to lookup and their chains recent, or they become empty.
    ///
    /// The slot of each damaged block of a load leaves the tier at once, also if the job is late.
    /// Its memory is empty when its last pin ends. The slots below it stay, and the next store of
    /// that block brings it back.
    ///
    /// Reports of jobs that [`end_all`](Self::end_all) has ended are ignored.
    ///
    /// # Errors
    /// [`Error::UnknownJob`] for a job that is not in flight; [`Error::Config`] for a rank outside
    /// the world, and for another number of outcomes than the job has blocks; [`Error::State`] for
    /// a rank that has reported this job already.
    pub fn complete(
        &mut self,
        job_id: JobId,
        rank: usize,
        outcome: impl Into<Outcome>,
    ) -> Result<Option<JobEnd>> {
        let outcome = outcome.into();
        if rank >= self.config.world_size {
            return Err(Error::Config(format!(
                "rank {rank} of {}: ranks count from 0, so pass a lower one",
                self.config.world_size
            )));
        }
        let Some(job) = self.jobs.get_mut(&job_id) else {
            if let Some(completed) = self.complete_tier(job_id, rank, &outcome) {
                return completed;
            }
            let is_ignored = (1..=self.num_ended_jobs).contains(&job_id.0);
            return if is_ignored { Ok(None) } else { Err(Error::UnknownJob { job_id }) };
        };
        if job.reported[rank] {
            return Err(reported_twice(job_id, rank));
        }
        let damaged = job.damaged(job_id, &outcome, self.config.blocks_per_slot)?;
        job.reported[rank] = true;
        job.has_failed |= !outcome.is_ok();
        let is_ended = !job.reported.contains(&false);
        self.drop_damaged(&damaged)?;
        let ended = if is_ended { self.jobs.remove(&job_id) } else { None };
        ended.map(|job| self.end(job_id, job)).transpose()
    }

    /// Drops slots that a load found damaged. A sleep image that shares one cannot be used any
    /// more.
    fn drop_damaged(&mut self, slots: &[BlockId]) -> Result<()> {
        if slots.is_empty() {
            return Ok(());
        }
        let dropped = self.host.drop_damaged(slots)?;
        if let Some(disk) = &mut self.disk {
            disk.fail_sources(slots);
        }
        if let Some(image) = &mut self.image {
            // Not only those that were dropped: a reset keeps the slots of an image.
            image.is_damaged |= slots.iter().any(|slot| image.shared.contains(slot));
        }
        self.counters.damaged_blocks += dropped.len() * self.config.blocks_per_slot;
        self.host.slots.pool.free(&dropped)
    }

    /// Returns the jobs whose deadline is before `now`, on the caller's clock, each of them once.
    /// Their requests fail. Device blocks, and the slots of a load, stay pinned in quarantine until
    /// every rank has reported, because a late copy must not overwrite blocks of another request. A
    /// late store loses its keys at once, and its slots are empty when every rank has reported. No
    /// lookup waits for these jobs.
    ///
    /// # Errors
    /// None that a caller can cause.
    pub fn expire(&mut self, now: f64) -> Result<Vec<JobId>> {
        let mut late = Vec::new();
        for (&job_id, job) in &mut self.jobs {
            if job.is_late || job.deadline.is_none_or(|deadline| deadline >= now) {
                continue;
            }
            job.is_late = true;
            late.push(job_id);
            match &job.kind {
                Kind::Load { .. } => self.host.slots.end_loads(&job.slots),
                Kind::Store { .. } => self.host.fence(&job.slots)?,
            }
        }
        if self.disk.is_some() {
            late.append(&mut self.expire_tier(now)?);
            late.sort_unstable();
        }
        self.counters.late_jobs += late.len();
        Ok(late)
    }

    /// Ends every job as failed, also in quarantine, after the movers have stopped. Later reports
    /// of these jobs are ignored.
    ///
    /// # Errors
    /// None that a caller can cause.
    pub fn end_all(&mut self) -> Result<Vec<JobEnd>> {
        self.end_all_but(&[])
    }

    /// As [`end_all`](Self::end_all), but the jobs of the disk tier in `running` stay in flight, with
    /// all that they pin. The movers have stopped, and the disk tier has not.
    ///
    /// # Errors
    /// None that a caller can cause.
    pub fn end_all_but(&mut self, running: &[JobId]) -> Result<Vec<JobEnd>> {
        self.num_ended_jobs = self.num_jobs;
        let jobs = std::mem::take(&mut self.jobs);
        let end = |(job_id, job)| self.end(job_id, InFlight { has_failed: true, ..job });
        let mut ends = jobs.into_iter().map(end).collect::<Result<Vec<_>>>()?;
        ends.append(&mut self.end_all_tier(running)?);
        ends.sort_unstable_by_key(|end| end.job_id);
        Ok(ends)
    }

    fn end(&mut self, job_id: JobId, job: InFlight) -> Result<JobEnd> {
        let is_ok = !job.has_failed && !job.is_fenced && !job.is_late;
        match &job.kind {
            Kind::Load { .. } => {
                if !job.is_late {
                    self.host.slots.end_loads(&job.slots);
                }
                self.host.unpin(&job.slots)?;
                if is_ok {
                    self.counters.loaded_blocks += job.block_ids.len();
                } else {
                    self.counters.failed_loads += 1;
                }
            }
            Kind::Store { filling, ranks } if is_ok => {
                let num_slots = self.host.publish(&job.slots, filling, &self.slot_model)?;
                let num_blocks = num_slots * self.config.blocks_per_slot;
                self.counters.stored_blocks += num_blocks;
                self.report(TransferEvent::Committed { job_id, num_blocks });
                // First these: a chain of normal priority may go through them.
                self.host.make_least_recent(&ranks.low_priority);
                // No hits here: the policy learns of the request's own lookup, once. If groups skip
                // blocks, this would make one group's chain more recent than all others.
                if self.is_full_attention() {
                    self.host.make_chains_recent(&ranks.tails);
                }
                if self.disk.is_some() {
                    self.after_store(&job.slots, &ranks.tails);
                }
            }
            Kind::Store { .. } => {
                self.host.fence(&job.slots)?;
                self.host.slots.pool.free(&job.slots)?;
                for &id in &job.block_ids {
                    self.forget_seen(id);
                }
                self.counters.failed_stores += usize::from(job.has_failed || job.is_late);
            }
        }
        let direction = job.kind.direction();
        self.report(TransferEvent::Completed { job_id, direction, is_ok });
        let InFlight { block_ids, is_late, .. } = job;
        Ok(JobEnd { job_id, block_ids, is_ok, is_late })
    }
}
