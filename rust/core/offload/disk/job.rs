//! Jobs between the host and the disk, from their plan to their end.
//!
//! ```text
//!             source                target, until every rank has reported
//!   demote    host slots, pinned    disk slots, keys withheld
//!   promote   disk slots, pinned    host slots, keys withheld
//!   late      stays pinned          keys withdrawn, slots stay in use
//! ```

use std::collections::BTreeMap;

use crate::error::{Error, Result};
use crate::ids::{BlockId, JobId};
use crate::key::{BlockHash, BlockKey};
use crate::offload::OffloadScheduler;
use crate::offload::job::{JobEnd, Outcome, check_num_outcomes, reported_twice};
use crate::offload::tier::{Filling, Tier};
use crate::offload::transfer_event::{Direction, TransferEvent};

use super::{Disk, DiskStats, places};

/// The copies of a demote or a promote: `host_slots[i]` and `disk_slots[i]` are the two ends of the
/// copy of block `keys[i]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TierJob {
    /// Id of the job, of the same sequence as those of stores and loads.
    pub job_id: JobId,
    /// Demote or promote.
    pub direction: Direction,
    /// Slots of the host, whole, counted from 0.
    pub host_slots: Vec<u32>,
    /// Slots of the disk, counted from 0.
    pub disk_slots: Vec<u32>,
    /// What each block is.
    pub keys: Vec<BlockKey>,
    /// The hash before each; None at the start of a prompt, and in groups that skip blocks.
    pub parents: Vec<Option<BlockHash>>,
}

#[derive(Clone, Debug)]
pub(super) struct TierInFlight {
    pub(super) direction: Direction,
    pub(super) host_slots: Vec<BlockId>,
    pub(super) disk_slots: Vec<BlockId>,
    pub(super) filling: Filling,
    /// Whether each block is sound on every rank that has reported.
    pub(super) are_ok: Vec<bool>,
    /// By rank: whether its worker has reported.
    pub(super) reported: Vec<bool>,
    pub(super) deadline: Option<f64>,
    /// Whether the tiers were reset since, so that the result does not count.
    pub(super) is_fenced: bool,
    /// Whether the job missed its deadline and is in quarantine.
    pub(super) is_late: bool,
}

impl TierInFlight {
    pub(super) fn new(
        direction: Direction,
        host_slots: Vec<BlockId>,
        disk_slots: Vec<BlockId>,
        filling: Filling,
        deadline: Option<f64>,
    ) -> Self {
        Self {
            direction,
            are_ok: vec![true; host_slots.len()],
            host_slots,
            disk_slots,
            filling,
            reported: Vec::new(),
            deadline,
            is_fenced: false,
            is_late: false,
        }
    }

    /// The slots that the job fills, if they are sound or if they are not, with what fills them.
    fn targets(&self, are_sound: bool) -> (Vec<BlockId>, Filling) {
        let targets = match self.direction {
            Direction::Promote => &self.host_slots,
            _ => &self.disk_slots,
        };
        let of = (0..targets.len()).filter(|&at| self.are_ok[at] == are_sound);
        let filling = Filling {
            ends: of.clone().map(|at| self.filling.ends[at]).collect(),
            parents: of.clone().map(|at| self.filling.parents[at]).collect(),
        };
        (of.map(|at| targets[at]).collect(), filling)
    }
}

impl Disk {
    /// Fails the blocks of demotes that read host slots which proved damaged.
    pub(in crate::offload) fn fail_sources(&mut self, damaged: &[BlockId]) {
        for job in self.jobs.values_mut().filter(|job| job.direction == Direction::Demote) {
            for (slot, is_ok) in job.host_slots.iter().zip(&mut job.are_ok) {
                *is_ok &= !damaged.contains(slot);
            }
        }
    }

    /// Drops disk slots whose content failed a promote.
    fn drop_failed(&mut self, slots: &[BlockId]) -> Result<()> {
        let dropped = self.tier.drop_damaged(slots)?;
        self.counters.disk_damaged_blocks += dropped.len();
        self.tier.slots.pool.free(&dropped)
    }

    /// Verifies that the counts of slots in flight are those of the jobs.
    pub(super) fn check_jobs(&self) -> Result<()> {
        let num_slots = |direction| -> usize {
            let jobs = self.jobs.values().filter(|job| job.direction == direction);
            jobs.map(|job| job.host_slots.len()).sum()
        };
        let bound = self.config.max_in_flight_blocks;
        for (direction, counted) in
            [(Direction::Demote, self.num_demoting), (Direction::Promote, self.num_promoting)]
        {
            if num_slots(direction) != counted || counted > bound {
                return Err(Error::Broken(format!(
                    "disk: {} slots of {direction:?} jobs, {counted} are counted, at most {bound}",
                    num_slots(direction)
                )));
            }
        }
        Ok(())
    }
}

impl OffloadScheduler {
    /// Begins a job of the disk tier, which gets its id.
    pub(super) fn begin_tier(&mut self, mut job: TierInFlight, keys: Vec<BlockKey>) -> TierJob {
        let job_id = self.next_job_id();
        job.reported = vec![false; self.config.world_size];
        let (direction, num_blocks) = (job.direction, job.host_slots.len());
        self.report(TransferEvent::Initiated { job_id, direction, num_blocks });
        let planned = TierJob {
            job_id,
            direction,
            host_slots: places(&job.host_slots),
            disk_slots: places(&job.disk_slots),
            keys,
            parents: job.filling.parents.clone(),
        };
        if let Some(disk) = &mut self.disk {
            match direction {
                Direction::Promote => disk.num_promoting += num_blocks,
                _ => disk.num_demoting += num_blocks,
            }
            disk.jobs.insert(job_id, job);
        }
        planned
    }

    /// As [`complete`](Self::complete), for a job of the disk tier. Returns None if there is no such
    /// job.
    pub(in crate::offload) fn complete_tier(
        &mut self,
        job_id: JobId,
        rank: usize,
        outcome: &Outcome,
    ) -> Option<Result<Option<JobEnd>>> {
        let job = self.disk.as_mut()?.jobs.get_mut(&job_id)?;
        if job.reported.get(rank).is_none_or(|&has_reported| has_reported) {
            return Some(Err(reported_twice(job_id, rank)));
        }
        match outcome {
            Outcome::Whole(is_ok) => job.are_ok.iter_mut().for_each(|all| *all &= is_ok),
            Outcome::Blocks(are_ok) => {
                if let Err(error) = check_num_outcomes(job_id, are_ok.len(), job.are_ok.len()) {
                    return Some(Err(error));
                }
                job.are_ok.iter_mut().zip(are_ok).for_each(|(all, is_ok)| *all &= is_ok);
            }
        }
        job.reported[rank] = true;
        if job.reported.contains(&false) {
            return Some(Ok(None));
        }
        let job = self.disk.as_mut()?.jobs.remove(&job_id)?;
        Some(self.end_tier(job_id, job, false).map(Some))
    }

    /// As [`expire`](Self::expire), for jobs of the disk tier. Their targets lose their keys at
    /// once. The disk slots of a late promote leave the index too, because the disk is slow there.
    pub(in crate::offload) fn expire_tier(&mut self, now: f64) -> Result<Vec<JobId>> {
        let Self { host, disk: Some(disk), .. } = self else { return Ok(Vec::new()) };
        let is_late = |(_, job): &(&JobId, &TierInFlight)| {
            !job.is_late && job.deadline.is_some_and(|deadline| deadline < now)
        };
        let late: Vec<JobId> = disk.jobs.iter().filter(is_late).map(|(&id, _)| id).collect();
        for job_id in &late {
            let Some(job) = disk.jobs.get_mut(job_id) else { continue };
            job.is_late = true;
            match job.direction {
                Direction::Promote => {
                    let disk_slots = job.disk_slots.clone();
                    host.discard(&job.host_slots);
                    disk.tier.slots.end_loads(&disk_slots);
                    disk.drop_failed(&disk_slots)?;
                }
                _ => disk.tier.discard(&job.disk_slots),
            }
        }
        Ok(late)
    }

    /// Ends the jobs of the disk tier that no tier carries out any more: all but those in `running`.
    pub(in crate::offload) fn end_all_tier(&mut self, running: &[JobId]) -> Result<Vec<JobEnd>> {
        let Some(disk) = &mut self.disk else { return Ok(Vec::new()) };
        let jobs = std::mem::take(&mut disk.jobs);
        let (running, jobs): (BTreeMap<_, _>, BTreeMap<_, _>) =
            jobs.into_iter().partition(|(job_id, _)| running.contains(job_id));
        disk.jobs = running;
        jobs.into_iter().map(|(job_id, job)| self.end_tier(job_id, job, true)).collect()
    }

    /// Ends a job. If the movers have stopped, no block counts, but none is damaged.
    fn end_tier(
        &mut self,
        job_id: JobId,
        mut job: TierInFlight,
        has_stopped: bool,
    ) -> Result<JobEnd> {
        let counts = !job.is_late && !job.is_fenced && !has_stopped;
        let is_fault = !job.is_fenced && !has_stopped;
        let num_failed = job.are_ok.iter().filter(|&&is_ok| !is_ok || job.is_late).count();
        if !counts {
            job.are_ok.fill(false);
        }
        let direction = job.direction;
        let num_blocks = match direction {
            Direction::Promote => self.end_promote(&job, counts)?,
            _ => self.end_demote(&job)?,
        };
        if let Some(disk) = &mut self.disk {
            let DiskStats {
                demoted_blocks, promoted_blocks, failed_demotes, failed_promotes, ..
            } = &mut disk.counters;
            let (moved, failed) = match direction {
                Direction::Promote => (promoted_blocks, failed_promotes),
                _ => (demoted_blocks, failed_demotes),
            };
            *moved += num_blocks;
            *failed += if is_fault { num_failed } else { 0 };
        }
        let is_ok = !job.are_ok.contains(&false);
        if num_blocks > 0 {
            self.report(TransferEvent::Committed { job_id, num_blocks });
        }
        self.report(TransferEvent::Completed { job_id, direction, is_ok });
        Ok(JobEnd { job_id, block_ids: Vec::new(), is_ok, is_late: job.is_late })
    }

    /// Publishes the blocks of a demote that count. Returns their number.
    fn end_demote(&mut self, job: &TierInFlight) -> Result<usize> {
        let is_full_attention = self.is_full_attention();
        let Self { host, disk: Some(disk), slot_model, .. } = self else { return Ok(0) };
        disk.num_demoting -= job.host_slots.len();
        host.unpin(&job.host_slots)?;
        let (failed, _) = job.targets(false);
        disk.tier.discard(&failed);
        disk.tier.slots.pool.free(&failed)?;
        let (sound, filling) = job.targets(true);
        let num_blocks = disk.tier.publish(&sound, &filling, slot_model)?;
        if is_full_attention {
            disk.tier.make_chains_recent(&tails(&disk.tier, &sound));
        }
        Ok(num_blocks)
    }

    /// Publishes the blocks of a promote that count. Returns their number. If the job `counts`, the
    /// disk drops the others.
    fn end_promote(&mut self, job: &TierInFlight, counts: bool) -> Result<usize> {
        let is_full_attention = self.is_full_attention();
        let Self { host, disk: Some(disk), slot_model, .. } = self else { return Ok(0) };
        disk.num_promoting -= job.host_slots.len();
        if !job.is_late {
            disk.tier.slots.end_loads(&job.disk_slots);
        }
        disk.tier.unpin(&job.disk_slots)?;
        let (failed, _) = job.targets(false);
        host.discard(&failed);
        host.slots.pool.free(&failed)?;
        let (sound, filling) = job.targets(true);
        let num_blocks = host.publish(&sound, &filling, slot_model)?;
        let of = |are_sound| {
            let slots = job.disk_slots.iter().zip(&job.are_ok);
            slots.filter(move |&(_, &is_ok)| is_ok == are_sound).map(|(&slot, _)| slot)
        };
        if counts {
            disk.drop_failed(&of(false).collect::<Vec<_>>())?;
        }
        if is_full_attention {
            for (tier, slots) in [(host, sound), (&mut disk.tier, of(true).collect())] {
                tier.make_chains_recent(&tails(tier, &slots));
            }
        } else {
            // The first block of a prompt becomes the most recent.
            let slots: Vec<BlockId> = of(true).collect();
            disk.tier.make_recent(slots.into_iter().rev().map(|slot| (slot, false)));
        }
        Ok(num_blocks)
    }
}

/// Those of `slots` that no slot below them follows.
fn tails(tier: &Tier, slots: &[BlockId]) -> Vec<BlockId> {
    let is_tail = |&(at, &slot): &(usize, &BlockId)| {
        slots.get(at + 1).is_none_or(|&next| tier.parent(next) != slot)
    };
    slots.iter().enumerate().filter(is_tail).map(|(_, &slot)| slot).collect()
}
