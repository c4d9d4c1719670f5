//! A disk tier as tests see it. No field is left out by oversight: a new one does not compile here.

use crate::offload::RequestState;
use crate::offload::transfer_event::Direction;

use super::job::TierInFlight;
use super::promote::{Waiting, Want};
use super::*;

/// A job of the disk tier, its deadline aside.
pub(in crate::offload) struct TierJobView<'a> {
    pub(in crate::offload) direction: Direction,
    pub(in crate::offload) host_slots: &'a [BlockId],
    pub(in crate::offload) disk_slots: &'a [BlockId],
    pub(in crate::offload) ends: &'a [usize],
    pub(in crate::offload) has_parent: Vec<bool>,
    pub(in crate::offload) are_ok: &'a [bool],
    pub(in crate::offload) reported: &'a [bool],
    pub(in crate::offload) is_fenced: bool,
    pub(in crate::offload) is_late: bool,
}

fn view<'a>((&job_id, job): (&JobId, &'a TierInFlight)) -> (JobId, TierJobView<'a>) {
    let TierInFlight {
        direction,
        host_slots,
        disk_slots,
        filling,
        are_ok,
        reported,
        deadline: _,
        is_fenced,
        is_late,
    } = job;
    let view = TierJobView {
        direction: *direction,
        host_slots,
        disk_slots,
        ends: &filling.ends,
        has_parent: filling.parents.iter().map(Option::is_some).collect(),
        are_ok,
        reported,
        is_fenced: *is_fenced,
        is_late: *is_late,
    };
    (job_id, view)
}

impl Disk {
    /// The jobs in flight, by their ids.
    pub(in crate::offload) fn view_jobs(&self) -> BTreeMap<JobId, TierJobView<'_>> {
        self.jobs.iter().map(view).collect()
    }

    /// The mode, and the host slots that are due for a demote, each with part of its key's
    /// fingerprint.
    pub(in crate::offload) fn view_due(&self) -> (DiskMode, Vec<(BlockId, u32)>) {
        let Self {
            tier: _,
            config: _,
            mode,
            queue,
            wants: _,
            num_wants: _,
            jobs: _,
            evicted,
            num_demoting: _,  // sums over the jobs, which `check` compares
            num_promoting: _, // likewise
            counters: _,
            events: _,
        } = self;
        assert!(evicted.is_none(), "the test admits all blocks");
        (*mode, queue.due().collect())
    }

    /// The place of a request among those that want a promote, and what it asked for. The counter
    /// of hits is left out.
    pub(in crate::offload) fn view_waiting(&self, request: &RequestState) -> [usize; 4] {
        let Some(waiting) = request.waiting.as_deref() else { return [0; 4] };
        let Waiting { number, num_local_tokens, max_tokens, has_promoted, num_host_tokens: _ } =
            waiting;
        let is_its_own = |want: &Want| want.number == *number;
        let place = self.wants.iter().position(is_its_own).map_or(0, |place| place + 1);
        [place, *num_local_tokens, *max_tokens, usize::from(*has_promoted) + 1]
    }
}
