//! `OffloadScheduler`: its requests, its jobs' ends and its statistics. `store`, `load`, `disk` and
//! `image` have its other methods; `values` converts what only this class takes and returns.
//!
//! May import: convert, error, event, group, job, ledger, lock, pool.

mod disk;
mod image;
mod load;
mod store;
mod values;

use kvstow_core::ids::JobId;
use kvstow_core::key::Hashes;
use kvstow_core::offload::{self, OffloadConfig};
use kvstow_core::pool::MAX_BLOCKS;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::convert::{Count, Name, RequestId, counts, job_id, named};
use crate::error::to_py;
use crate::event::events_to_py;
use crate::group::groups;
use crate::hashes::hashes_of_blocks;
use crate::job::{JobEnd, event_to_py, to_end};
use crate::lock::{Mutex, detached, lock};

use values::{Outcome, check_time, stats_dict};

/// Accounting of the host tier, and of a disk tier below it: blocks, what to copy, jobs.
///
/// The scheduler names device blocks and never owns them. A slot holds one block of one group.
///
/// A request makes its whole chain recent when its store completes, when its load begins and when
/// it finishes. A slot of a full-attention group is not evicted for room while a child of it is
/// resident.
///
/// Args:
///     num_host_blocks: number of slots, all usable.
///     groups: the device's groups.
///     mode: "eager" stores blocks as soon as they are computed. In "lazy" mode, `store` only
///         records what was computed, and `store_evictable` plans the stores of blocks that the
///         device is about to evict.
///     policy: which slots are evicted first. "hit-density" learns from evicted blocks that come
///         back, and takes 76 bytes more per slot than "lru".
///     blocks_per_slot: consecutive blocks of one prompt in a slot. More than 1 requires eager mode
///         and full attention in all groups. Only whole slots are stored, so a shorter tail is not.
///     world_size: ranks that must report a job before it ends.
///     num_device_blocks: blocks of the device pool. The scheduler refuses ids outside it.
///     events: whether to record events for `take_events` and `take_transfer_events`.
///     store_threshold: a block is stored once this many requests have computed, hit or loaded it
///         and every block before it: 1 to 255. The counts take 32 bytes per slot, at least 512
///         KiB, and a count is lost when many other blocks were seen since.
///     num_disk_blocks: slots of the disk tier, as large as the host's. 0 for no disk tier. It is
///         off until `set_disk` opens it.
///     disk_policy: which disk slots are evicted first.
///     disk_admit: "all" demotes every block that a store publishes. "returned" demotes blocks that
///         were hit, or that are stored again after an eviction, and the blocks before them.
///     max_disk_blocks_in_flight: the most slots that demotes copy at a time, and the most that
///         promotes copy. Late jobs count until they end.
///     min_promote_tokens: `lookup` waits for the disk only if the disk adds this many tokens.
///
/// Raises:
///     ConfigError: a value outside its range, or the machine lacks the memory for the accounting.
#[pyclass(module = "kvstow", frozen)]
pub(crate) struct OffloadScheduler(Mutex<offload::OffloadScheduler>);

#[pymethods]
impl OffloadScheduler {
    #[new]
    #[expect(clippy::too_many_arguments, reason = "options, each with a name and a default")]
    #[pyo3(
        signature = (
            num_host_blocks, groups, *, mode = Name("eager".to_owned()),
            policy = Name("lru".to_owned()), blocks_per_slot = Count(1), world_size = Count(1),
            num_device_blocks = None, events = false, store_threshold = Count(1),
            num_disk_blocks = Count(0), disk_policy = Name("lru".to_owned()),
            disk_admit = Name("all".to_owned()), max_disk_blocks_in_flight = Count(64),
            min_promote_tokens = Count(0),
        ),
        text_signature = "(num_host_blocks, groups, *, mode='eager', policy='lru', \
            blocks_per_slot=1, world_size=1, num_device_blocks=None, events=False, \
            store_threshold=1, num_disk_blocks=0, disk_policy='lru', disk_admit='all', \
            max_disk_blocks_in_flight=64, min_promote_tokens=0)"
    )]
    fn new(
        #[pyo3(from_py_with = named::num_host_blocks)] num_host_blocks: Count,
        groups: &Bound<'_, PyAny>,
        mode: Name,
        policy: Name,
        #[pyo3(from_py_with = named::blocks_per_slot)] blocks_per_slot: Count,
        #[pyo3(from_py_with = named::world_size)] world_size: Count,
        #[pyo3(from_py_with = named::num_device_blocks)] num_device_blocks: Option<Count>,
        events: bool,
        #[pyo3(from_py_with = named::store_threshold)] store_threshold: Count,
        #[pyo3(from_py_with = named::num_disk_blocks)] num_disk_blocks: Count,
        disk_policy: Name,
        disk_admit: Name,
        #[pyo3(from_py_with = named::max_disk_blocks_in_flight)] max_disk_blocks_in_flight: Count,
        #[pyo3(from_py_with = named::min_promote_tokens)] min_promote_tokens: Count,
    ) -> PyResult<Self> {
        let disk = disk::config(
            num_disk_blocks.0,
            disk_policy.0.parse().map_err(to_py)?,
            &disk_admit.0,
            max_disk_blocks_in_flight.0,
            min_promote_tokens.0,
        )?;
        let config = OffloadConfig {
            mode: values::mode(&mode.0)?,
            policy: policy.0.parse().map_err(to_py)?,
            blocks_per_slot: blocks_per_slot.0,
            world_size: world_size.0,
            num_device_blocks: num_device_blocks.map_or(MAX_BLOCKS, |count| count.0),
            events,
            store_threshold: values::threshold(store_threshold.0)?,
            disk,
            ..OffloadConfig::new(num_host_blocks.0, self::groups(groups)?)
        };
        Ok(Self(Mutex::new(offload::OffloadScheduler::new(config).map_err(to_py)?)))
    }

    /// Number of slots.
    #[getter]
    fn num_host_blocks(&self) -> usize {
        lock(&self.0).num_host_blocks()
    }

    /// Number of host slots that `lookup` can find.
    #[getter]
    fn num_resident(&self) -> usize {
        lock(&self.0).num_resident()
    }

    /// Add a request with the hashes of its blocks known so far.
    fn add(&self, request_id: RequestId, hashes: &Bound<'_, PyAny>) -> PyResult<()> {
        let hashes = self.hashes(hashes)?;
        lock(&self.0).add(&request_id, &hashes).map_err(to_py)
    }

    /// Append hashes as generated tokens fill blocks.
    ///
    /// They continue the request's last hash, which `hash_tokens` takes as `parent`.
    ///
    /// Raises:
    ///     ConfigError: hashes that are known to continue another block, or none.
    fn extend(&self, request_id: RequestId, hashes: &Bound<'_, PyAny>) -> PyResult<()> {
        let hashes = self.hashes(hashes)?;
        lock(&self.0).extend(&request_id, &hashes).map_err(to_py)
    }

    /// Keep the first `num_hashes` hashes of a request, because its last tokens were dropped.
    ///
    /// A streaming session drops its last token when its next chunk arrives. Call `truncate` then,
    /// and `extend` with the new hashes. The scheduler no longer stores dropped blocks. Stored
    /// blocks stay under their own hash. A group that skips blocks stores no dropped block again,
    /// whatever its new hash. Releases what the request's lookup holds.
    ///
    /// Raises:
    ///     ConfigError: more hashes than are known.
    fn truncate(&self, request_id: RequestId, num_hashes: Count) -> PyResult<()> {
        lock(&self.0).truncate(&request_id, num_hashes.0).map_err(to_py)
    }

    /// Give a request low priority, until it finishes.
    ///
    /// The tier evicts the blocks that it stores from now on before all others, until a request of
    /// normal priority uses them. Its own loads and its end make no block recent.
    fn lower_priority(&self, request_id: RequestId) -> PyResult<()> {
        lock(&self.0).lower_priority(&request_id).map_err(to_py)
    }

    /// Report that a rank's part of a job has ended, or that it never began.
    ///
    /// Args:
    ///     job_id: the job.
    ///     ok: one bool for the whole job, or one per block in the job's order, of a demote or a
    ///         promote one per slot. Of these two, each block counts that no rank reports as False,
    ///         and a block whose promote failed leaves the disk tier. A failed load drops
    ///         the slot of each block that is False. No lookup finds a dropped slot, and it is
    ///         empty when its last pin ends. Its children stay, and the next store of the block
    ///         brings it back. False for a whole load drops no slot, because a timeout or a device
    ///         error does not damage the host's bytes. A store fails if any of its blocks fails.
    ///     rank: the rank that reports.
    ///
    /// Returns:
    ///     None until all ranks have reported, and for jobs that `end_all` has ended. The last
    ///     report returns how the job ended. A job fails if any part fails. `lookup` then finds the
    ///     slots of a successful store. The slots of a failed one are empty.
    ///
    /// Raises:
    ///     StateError: the job is not in flight, or this rank has reported it.
    ///     ConfigError: a rank outside the world, or a number of outcomes other than the blocks'.
    #[pyo3(
        signature = (job_id, *, ok = Outcome(true.into()), rank = Count(0)),
        text_signature = "($self, job_id, *, ok=True, rank=0)"
    )]
    fn complete(
        &self,
        job_id: &Bound<'_, PyAny>,
        ok: Outcome,
        rank: Count,
    ) -> PyResult<Option<JobEnd>> {
        let job_id = self::job_id(job_id)?;
        let end = lock(&self.0).complete(job_id, rank.0, ok.0).map_err(to_py)?;
        Ok(end.map(to_end))
    }

    /// Return the ids of jobs whose `deadline` is before `now`, each of them once.
    ///
    /// Fail their requests now. Device blocks, and the slots of a load, stay pinned in quarantine
    /// until every rank has reported, because a late copy must not overwrite blocks of another
    /// request. A late store loses its keys at once, and its slots are empty when every rank has
    /// reported. No lookup waits for a job in quarantine, and its result never counts.
    fn expire<'py>(&self, py: Python<'py>, now: f64) -> PyResult<Bound<'py, PyList>> {
        check_time("now", Some(now))?;
        let late = lock(&self.0).expire(now).map_err(to_py)?;
        PyList::new(py, late.into_iter().map(|job_id| job_id.0))
    }

    /// End every job as failed, those in quarantine too. Call it once the movers have stopped.
    ///
    /// The scheduler ignores later reports of these jobs.
    ///
    /// Args:
    ///     running: demotes and promotes that a tier still carries out. They stay in flight, with
    ///         all that they pin, until `complete`.
    #[pyo3(signature = (running = None), text_signature = "($self, running=())")]
    fn end_all<'py>(
        &self,
        py: Python<'py>,
        running: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyList>> {
        let running = running.map(|jobs| counts(jobs, "running")).transpose()?;
        let running = running.unwrap_or_default();
        let running: Vec<JobId> = running.into_iter().map(|job_id| JobId(job_id as u64)).collect();
        let ends = lock(&self.0).end_all_but(&running).map_err(to_py)?;
        let ends = ends.into_iter().map(|end| Py::new(py, to_end(end)));
        PyList::new(py, ends.collect::<PyResult<Vec<_>>>()?)
    }

    /// Forget a request that finished, was preempted or was aborted. Its jobs continue.
    fn finish(&self, request_id: RequestId) -> PyResult<()> {
        lock(&self.0).finish(&request_id).map_err(to_py)
    }

    /// Forget what a request computed, as `finish` does, and keep it added with its hashes.
    ///
    /// `store_threshold` still counts the request once.
    fn restart(&self, request_id: RequestId) -> PyResult<()> {
        lock(&self.0).restart(&request_id).map_err(to_py)
    }

    /// Empty the tiers at any moment, and release what lookups hold.
    ///
    /// Jobs in flight still end: stores, demotes and promotes without effect, loads with
    /// `JobEnd.ok` False. A disk tier is "off" until `set_disk` opens it.
    ///
    /// The next store of a request brings all its full-attention blocks back, also those of before.
    /// If they must not come back, because the weights have changed, name the request in no store
    /// before you `restart` it.
    fn reset(&self, py: Python<'_>) -> PyResult<()> {
        detached(py, &self.0, offload::OffloadScheduler::reset).map_err(to_py)
    }

    /// Return counters since construction, and gauges.
    ///
    /// Counters:
    ///     stored_blocks, loaded_blocks: blocks that were copied.
    ///     dropped_blocks: blocks that had found no room when their request left.
    ///     rare_blocks: blocks that fewer requests than `store_threshold` had seen.
    ///     throttled_blocks: blocks that `max_blocks` of `store` left out.
    ///     evicted_blocks: slots that were evicted for room.
    ///     failed_stores, failed_loads: jobs that have ended, late ones included.
    ///     late_jobs: jobs that missed their deadline. Each counts at once.
    ///     damaged_blocks: blocks that were dropped because a load found them damaged.
    ///     pending_lookups: lookups deferred because another request is loading the same blocks, or
    ///         because they wait for the disk tier.
    ///     query_tokens: tokens, in whole blocks, that lookups asked for. Of each request, only the
    ///         last lookup before it was loaded or computed counts.
    ///     hit_tokens: tokens that loads accepted.
    ///
    /// Gauges:
    ///     resident_blocks, storing_blocks: slots.
    ///     jobs_in_flight: jobs, those in quarantine excluded.
    ///     quarantined_jobs, quarantined_blocks: late jobs, and the device blocks that they pin.
    ///     capacity_tokens: prompt tokens that fit if every group keeps all of its blocks.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = lock(&self.0).stats();
        stats_dict(py, stats)
    }

    /// Return the events since the last call, oldest first. Empty without `events=True`.
    fn take_events<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let (events, width) = {
            let mut scheduler = lock(&self.0);
            (scheduler.take_events(), scheduler.hash_width())
        };
        events_to_py(py, events, "CPU", width)
    }

    /// Return job events since the last call, oldest first; none without `events=True`.
    fn take_transfer_events<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let events = lock(&self.0).take_transfer_events().into_iter();
        let events: Vec<_> = events.map(|event| event_to_py(py, event)).collect::<PyResult<_>>()?;
        PyList::new(py, events)
    }

    /// Verify every invariant. Raises `StateError` if one is broken.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        detached(py, &self.0, |scheduler| scheduler.check()).map_err(to_py)
    }
}

impl OffloadScheduler {
    /// The tokens that each hash adds to the one before.
    fn hash_block_size(&self) -> usize {
        lock(&self.0).model().hash_block_size()
    }

    /// Hashes from Python, of this scheduler's block size as far as they know theirs.
    fn hashes(&self, hashes: &Bound<'_, PyAny>) -> PyResult<Hashes> {
        hashes_of_blocks(hashes, || self.hash_block_size())
    }
}
