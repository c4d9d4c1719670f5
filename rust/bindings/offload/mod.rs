//! `OffloadScheduler`.

use std::sync::Mutex;

use kvstow_core::ids::BlockId;
use kvstow_core::key::BlockKey;
use kvstow_core::offload::{self, Mode, OffloadConfig, Progress};
use kvstow_core::pool::MAX_BLOCKS;
use numpy::{IntoPyArray, PyArray1};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};

use crate::convert::{
    Count, Name, RequestId, as_strs, bools, counts, group_id, hashes, ids, job_id, request_ids,
};
use crate::error::{ConfigError, to_py};
use crate::event::Batch;
use crate::group::groups;
use crate::job::{Job, JobEnd, event_to_py, to_end, to_job, unnamed};
use crate::ledger::BlockLedger;
use crate::lock::{detached, lock};
use crate::pool::{BlockPool, LedgerPool, SharedPool};

/// The host tier's accounting: which blocks it holds, what to store, what to load, the jobs.
///
/// It names device blocks and never owns them. Recency is per request: a whole chain is ranked
/// when its store completes, when a lookup is accepted and when the request finishes, and of a
/// full-attention group no slot is evicted for room while a slot of its child is resident. A slot
/// holds one block of one group.
///
/// `num_host_blocks` slots, all usable.
///
/// Eager, `store` plans the stores of what was computed; lazy, it only takes note of it, and
/// `store_evictable` plans the stores of what the device is about to evict. Which slots go
/// first is the `policy`'s choice: "lru", or "hit-density", which learns from what comes back
/// and keeps 76 bytes more per slot for that. A slot holds `blocks_per_slot` consecutive blocks
/// of one prompt (1 in lazy mode, and unless all groups are full attention); only whole slots
/// are stored, so a shorter tail is not. A job ends when all `world_size` ranks have reported
/// it. Device ids of `num_device_blocks` or more are refused. Raises `ConfigError` as
/// `BlockLedger` does.
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
            num_device_blocks = None, events = false,
        ),
        text_signature = "(num_host_blocks, groups, *, mode='eager', policy='lru', \
            blocks_per_slot=1, world_size=1, num_device_blocks=None, events=False)"
    )]
    fn new(
        num_host_blocks: Count,
        groups: Vec<Bound<'_, PyAny>>,
        mode: Name,
        policy: Name,
        blocks_per_slot: Count,
        world_size: Count,
        num_device_blocks: Option<Count>,
        events: bool,
    ) -> PyResult<Self> {
        let mode = match mode.0.as_str() {
            "eager" => Mode::Eager,
            "lazy" => Mode::Lazy,
            other => {
                return Err(ConfigError::new_err(format!(
                    "mode {other:?}: it is \"eager\" or \"lazy\""
                )));
            }
        };
        let config = OffloadConfig {
            mode,
            policy: policy.0.parse().map_err(to_py)?,
            blocks_per_slot: blocks_per_slot.0,
            world_size: world_size.0,
            num_device_blocks: num_device_blocks.map_or(MAX_BLOCKS, |count| count.0),
            events,
            ..OffloadConfig::new(num_host_blocks.0, self::groups(&groups)?)
        };
        Ok(Self(Mutex::new(offload::OffloadScheduler::new(config).map_err(to_py)?)))
    }

    /// The scheduler as bytes, for `restore`: versioned, and with a checksum.
    ///
    /// In it are the tier with its order of eviction and what its policy learned, the requests, the
    /// sleep image and the counters. Jobs are not, in quarantine or not, as if they had failed; nor
    /// is what lookups hold.
    fn snapshot<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let snapshot = detached(py, &self.0, |scheduler| scheduler.snapshot()).map_err(to_py)?;
        Ok(PyBytes::new(py, &snapshot))
    }

    /// Fill this scheduler, which must be new, with what a snapshot of another holds.
    ///
    /// It knows no device blocks then: `store` is to be told whole tables again. Reports of jobs
    /// that were in flight are swallowed.
    ///
    /// Raises:
    ///     SnapshotError: damaged, cut off, of another version, of another number of slots, groups,
    ///         blocks per slot or ranks, mode or policy, or no snapshot.
    ///     StateError: this scheduler is not new.
    fn restore(&self, py: Python<'_>, snapshot: &[u8]) -> PyResult<()> {
        let restore = |scheduler: &mut offload::OffloadScheduler| {
            *scheduler = scheduler.clone().restore(snapshot)?;
            Ok(())
        };
        detached(py, &self.0, restore).map_err(to_py)
    }

    /// Set host slots aside for every block in a table of `ledger`: for the time it sleeps.
    ///
    /// A block whose key the tier has stays in that slot, which is pinned; each other one gets a
    /// place that no lookup finds. Evicts for them, and releases what lookups hold.
    ///
    /// Returns:
    ///     The copies to make, device to host, as a job whose id is 0 and that nobody reports.
    ///
    /// Raises:
    ///     OutOfBlocks: the tier cannot hold them. Nothing has changed.
    ///     StateError: jobs are in flight, or an image is held already.
    ///     ConfigError: a ledger of other groups.
    fn hold_image(&self, py: Python<'_>, ledger: &BlockLedger) -> PyResult<Job> {
        let copies = ledger.with(|ledger| lock(&self.0).hold_image(ledger)).map_err(to_py)?;
        Ok(to_job(py, unnamed(copies)))
    }

    /// All copies of the image that is held: each the other way brings its block back.
    ///
    /// Block ids are those that the ledger had. Raises `StateError` where none is held.
    #[getter]
    fn image(&self, py: Python<'_>) -> PyResult<Job> {
        let copies = lock(&self.0).image().cloned().map_err(to_py)?;
        Ok(to_job(py, unnamed(copies)))
    }

    /// The slots that hold anything, ascending: resident blocks, stores, a sleep image's own.
    ///
    /// 0 to `num_host_blocks - 1`; slot i is the places i * `blocks_per_slot` and on.
    fn used_slots<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        let slots: Vec<i32> = detached(py, &self.0, |scheduler| {
            scheduler.used_slots().map(u32::cast_signed).collect()
        });
        slots.into_pyarray(py)
    }

    /// Let the image go, if one is held: the device has its blocks, or will not need them.
    fn release_image(&self) -> PyResult<()> {
        lock(&self.0).release_image().map_err(to_py)
    }

    /// Number of slots.
    #[getter]
    fn num_host_blocks(&self) -> usize {
        lock(&self.0).num_host_blocks()
    }

    /// Slots that hold a block that `lookup` can find.
    #[getter]
    fn num_resident(&self) -> usize {
        lock(&self.0).num_resident()
    }

    /// Make a request known, with the hashes of its blocks known so far.
    fn add(&self, request_id: RequestId, hashes: &Bound<'_, PyAny>) -> PyResult<()> {
        let hashes = self::hashes(hashes)?;
        lock(&self.0).add(&request_id, &hashes).map_err(to_py)
    }

    /// Append hashes as generated tokens fill blocks.
    fn extend(&self, request_id: RequestId, hashes: &Bound<'_, PyAny>) -> PyResult<()> {
        let hashes = self::hashes(hashes)?;
        lock(&self.0).extend(&request_id, &hashes).map_err(to_py)
    }

    /// Keep the first `num_hashes` hashes of a request, because its last tokens were dropped.
    ///
    /// A streaming session drops its last token when its next chunk arrives: `truncate`, then
    /// `extend` with the new hashes. Blocks beyond are not stored any more. What was stored stays
    /// under its own hash. What the request's lookup holds is released. Raises `ConfigError` for
    /// more hashes than are known.
    fn truncate(&self, request_id: RequestId, num_hashes: Count) -> PyResult<()> {
        lock(&self.0).truncate(&request_id, num_hashes.0).map_err(to_py)
    }

    /// Lazy mode: forget what was computed into device blocks that are about to be overwritten.
    ///
    /// Name all blocks that an allocation took, before their request runs. A pool may publish a
    /// block's hash when it grants the block; without this call, a request that leaves before its
    /// step has run would have blocks stored that nobody has computed. In eager mode it does
    /// nothing. The targets of `load` need no call.
    fn invalidate(&self, block_ids: &Bound<'_, PyAny>) -> PyResult<()> {
        let block_ids = ids(block_ids, MAX_BLOCKS)?;
        lock(&self.0).invalidate(&block_ids).map_err(to_py)
    }

    /// How many tokens right after the local hit the host can serve, and pin them.
    ///
    /// At most up to `max_tokens` of the whole request. What is found stays pinned until `load`,
    /// `release`, `finish`, `reset` or the next `lookup` of this request.
    ///
    /// None means pending: some of it is just being loaded for another request and will be a
    /// local hit when that job has ended; nothing is pinned, ask again then.
    ///
    /// Raises `ConfigError` if `num_local_tokens` is not a multiple of the block size that all
    /// groups have in common.
    fn lookup(
        &self,
        request_id: RequestId,
        num_local_tokens: Count,
        max_tokens: Count,
    ) -> PyResult<Option<usize>> {
        lock(&self.0).lookup(&request_id, num_local_tokens.0, max_tokens.0).map_err(to_py)
    }

    /// Accept the first `num_tokens` of what `lookup` found; the rest is unpinned.
    ///
    /// `block_ids`: per group, the device blocks to fill, in order: what `BlockLedger.allocate`
    /// took for these external tokens. A group that skips blocks loads only those that the token
    /// after the load reads. Raises `StateError` without a lookup, and for fewer tokens than were
    /// found where the window before their end is not on the host; `ConfigError` for more tokens
    /// than were found, a number that is not a multiple of the block size or 0, or another number
    /// of blocks; `InvalidBlock` for a repeated or null block.
    #[pyo3(signature = (request_id, num_tokens, block_ids, *, deadline = None))]
    fn load(
        &self,
        py: Python<'_>,
        request_id: RequestId,
        num_tokens: Count,
        block_ids: Vec<Bound<'_, PyAny>>,
        deadline: Option<f64>,
    ) -> PyResult<Job> {
        check_time("deadline", deadline)?;
        let block_ids: Vec<_> =
            block_ids.iter().map(|group| ids(group, MAX_BLOCKS)).collect::<PyResult<_>>()?;
        let job = lock(&self.0).load(&request_id, num_tokens.0, &block_ids, deadline);
        Ok(to_job(py, job.map_err(to_py)?))
    }

    /// Give back what a request's lookup holds, when none of it is loaded.
    fn release(&self, request_id: RequestId) -> PyResult<()> {
        lock(&self.0).release(&request_id).map_err(to_py)
    }

    /// Plan the stores that a finished step has made due, all in one job.
    ///
    /// Name every request in which a block became full, before the ledger's next allocation: that
    /// frees what has fallen out of a window.
    ///
    /// Args:
    ///     num_computed_tokens: per request, tokens whose KV earlier steps have written.
    ///     block_ids: the device ids appended to each request's block table since it was last
    ///         named here, hits and loads included, 0 where a group skips; request by request,
    ///         group by group.
    ///     offsets: where each (request, group) begins in `block_ids`, as
    ///         `StepAllocation.offsets`: `len(request_ids) * num_groups + 1` entries.
    ///
    /// Returns:
    ///     The job, or None when there is nothing to store. Keys already on the host or in
    ///     flight are not stored again; where slots are short, what fits is stored (of a
    ///     full-attention group the first blocks, of a window the last), and the rest is counted
    ///     as dropped.
    #[pyo3(signature = (request_ids, num_computed_tokens, block_ids, offsets, *, deadline = None))]
    fn store(
        &self,
        request_ids: &Bound<'_, PyAny>,
        num_computed_tokens: &Bound<'_, PyAny>,
        block_ids: &Bound<'_, PyAny>,
        offsets: &Bound<'_, PyAny>,
        deadline: Option<f64>,
    ) -> PyResult<Option<Job>> {
        check_time("deadline", deadline)?;
        let py = request_ids.py();
        let request_ids = self::request_ids(request_ids)?;
        let (names, computed) = (as_strs(&request_ids)?, counts(num_computed_tokens)?);
        let (block_ids, offsets) = (ids(block_ids, MAX_BLOCKS)?, counts(offsets)?);
        let num_groups = lock(&self.0).model().groups().len();
        if names.len() != computed.len() || names.len() * num_groups + 1 != offsets.len() {
            return Err(ConfigError::new_err(format!(
                "{} requests, {} numbers of computed tokens and {} offsets: give one number per \
                 request, and one offset for each of its {num_groups} groups and one more",
                names.len(),
                computed.len(),
                offsets.len()
            )));
        }
        let parts = parts(&block_ids, &offsets)?;
        let progress = names.into_iter().zip(computed).zip(parts.chunks_exact(num_groups)).map(
            |((request_id, num_computed_tokens), new_blocks)| Progress {
                request_id,
                num_computed_tokens,
                new_blocks,
            },
        );
        let job = lock(&self.0).store(progress, deadline).map_err(to_py)?;
        Ok(job.map(|job| to_job(py, job)))
    }

    /// Lazy mode: plan the stores of what stands among the next blocks that `pool` will evict.
    ///
    /// `num_blocks`, the horizon, is how many of its free queue are looked at: what the next step
    /// may take, its tokens and the loads that may be admitted. Stored is what `store` was told of
    /// as computed and the host does not have; the queue stays as it is. Call it after each step.
    /// Raises `StateError` in eager mode.
    #[pyo3(signature = (pool, num_blocks, *, deadline = None))]
    fn store_evictable(
        &self,
        py: Python<'_>,
        pool: AnyPool<'_>,
        num_blocks: Count,
        deadline: Option<f64>,
    ) -> PyResult<Option<Job>> {
        check_time("deadline", deadline)?;
        let store = |pool: &mut kvstow_core::pool::BlockPool| {
            lock(&self.0).store_evictable(pool.evictable(num_blocks.0), deadline)
        };
        let job = match pool {
            AnyPool::Own(pool) => pool.with(store),
            AnyPool::Ledger(pool) => pool.with(store),
        };
        Ok(job.map_err(to_py)?.map(|job| to_job(py, job)))
    }

    /// As `store_evictable`, for a pool that is not kvstow's.
    ///
    /// `block_ids` are free blocks, next to be evicted first, and `hashes` what they hold.
    #[pyo3(
        signature = (block_ids, hashes, *, group = Count(0), deadline = None),
        text_signature = "($self, block_ids, hashes, *, group=0, deadline=None)"
    )]
    fn store_candidates(
        &self,
        block_ids: &Bound<'_, PyAny>,
        hashes: &Bound<'_, PyAny>,
        group: Count,
        deadline: Option<f64>,
    ) -> PyResult<Option<Job>> {
        check_time("deadline", deadline)?;
        let py = block_ids.py();
        let (block_ids, hashes) = (ids(block_ids, MAX_BLOCKS)?, self::hashes(hashes)?);
        if block_ids.len() != hashes.len() {
            return Err(ConfigError::new_err(format!(
                "{} blocks and {} hashes: give one hash per block",
                block_ids.len(),
                hashes.len()
            )));
        }
        let group = group_id(group)?;
        let keys = hashes.as_slice().iter().map(|&hash| BlockKey { hash, group });
        let candidates = block_ids.into_iter().zip(keys);
        let job = lock(&self.0).store_evictable(candidates, deadline);
        Ok(job.map_err(to_py)?.map(|job| to_job(py, job)))
    }

    /// Report that a rank's part of a job has ended, or that it never began.
    ///
    /// Args:
    ///     job_id: the job.
    ///     ok: how it went: one bool for the whole job, or one for each of its blocks, in the job's
    ///         order. A whole job that failed drops nothing from the host tier, because a timeout
    ///         or a device error says nothing about the host's bytes. Of a load, a block that is
    ///         False has its slot dropped: no lookup finds it from now on, its memory is empty when
    ///         its last pin ends, the slots of its children stay, and the next store of the block
    ///         brings it back. Of a store, one False fails it.
    ///     rank: whose part.
    ///
    /// Returns:
    ///     None until all ranks have reported, and for jobs that `end_all` has ended. Then how the
    ///     job ended: it failed if any part did. Of a store, the slots become visible to `lookup`,
    ///     or are given back.
    ///
    /// Raises:
    ///     StateError: the job is not in flight, or this rank has reported it.
    ///     ConfigError: a rank outside the world, or another number of outcomes than blocks.
    #[pyo3(
        signature = (job_id, *, ok = Outcome::Whole(true), rank = Count(0)),
        text_signature = "($self, job_id, *, ok=True, rank=0)"
    )]
    fn complete(
        &self,
        job_id: &Bound<'_, PyAny>,
        ok: Outcome,
        rank: Count,
    ) -> PyResult<Option<JobEnd>> {
        let job_id = self::job_id(job_id)?;
        let outcome = match &ok {
            Outcome::Whole(is_ok) => offload::Outcome::Whole(*is_ok),
            Outcome::Blocks(are_ok) => offload::Outcome::Blocks(are_ok),
        };
        let end = lock(&self.0).complete(job_id, rank.0, outcome).map_err(to_py)?;
        Ok(end.map(to_end))
    }

    /// The jobs whose `deadline` lies before `now`, on the caller's own clock, each told once.
    ///
    /// Fail their requests now. Slots and device blocks stay pinned, in quarantine, until every
    /// rank has reported: a late copy must not land in blocks that are someone else's. No lookup
    /// waits for a job in quarantine, and its result never counts.
    fn expire<'py>(&self, py: Python<'py>, now: f64) -> PyResult<Bound<'py, PyList>> {
        check_time("now", Some(now))?;
        let late = lock(&self.0).expire(now).map_err(to_py)?;
        PyList::new(py, late.into_iter().map(|job_id| job_id.0))
    }

    /// End every job as failed, in quarantine or not: call it when the movers have been stopped.
    ///
    /// What their workers report afterwards is swallowed.
    fn end_all<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let ends = lock(&self.0).end_all().map_err(to_py)?;
        let ends = ends.into_iter().map(|end| Py::new(py, to_end(end)));
        PyList::new(py, ends.collect::<PyResult<Vec<_>>>()?)
    }

    /// Forget a request that finished, was preempted or aborted; its jobs go on.
    fn finish(&self, request_id: RequestId) -> PyResult<()> {
        lock(&self.0).finish(&request_id).map_err(to_py)
    }

    /// Forget what a request computed, as `finish` does, and keep it added with its hashes.
    fn restart(&self, request_id: RequestId) -> PyResult<()> {
        lock(&self.0).restart(&request_id).map_err(to_py)
    }

    /// Empty the tier, at any moment, and release what lookups hold.
    ///
    /// Jobs in flight still end: stores without effect, loads with `JobEnd.ok` False.
    fn reset(&self, py: Python<'_>) -> PyResult<()> {
        detached(py, &self.0, offload::OffloadScheduler::reset).map_err(to_py)
    }

    /// Counters since construction, and gauges of the moment.
    ///
    /// Counters: stored_blocks, loaded_blocks, dropped_blocks (due when their request went, and
    /// the tier had no room), evicted_blocks (for room), failed_stores, failed_loads,
    /// damaged_blocks (dropped because a load found them damaged), late_jobs (jobs),
    /// pending_lookups, query_tokens (in whole blocks, that a request's last lookup before
    /// it loaded or computed asked for), hit_tokens (accepted by loads). Gauges: resident_blocks,
    /// storing_blocks, jobs_in_flight, and of late jobs quarantined_jobs and quarantined_blocks.
    /// And capacity_tokens: of prompts, where every group keeps all of its blocks.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = lock(&self.0).stats();
        let entries = [
            (intern!(py, "stored_blocks"), stats.stored_blocks),
            (intern!(py, "loaded_blocks"), stats.loaded_blocks),
            (intern!(py, "dropped_blocks"), stats.dropped_blocks),
            (intern!(py, "evicted_blocks"), stats.evicted_blocks),
            (intern!(py, "failed_stores"), stats.failed_stores),
            (intern!(py, "failed_loads"), stats.failed_loads),
            (intern!(py, "resident_blocks"), stats.resident_blocks),
            (intern!(py, "storing_blocks"), stats.storing_blocks),
            (intern!(py, "jobs_in_flight"), stats.jobs_in_flight),
            (intern!(py, "damaged_blocks"), stats.damaged_blocks),
            (intern!(py, "late_jobs"), stats.late_jobs),
            (intern!(py, "pending_lookups"), stats.pending_lookups),
            (intern!(py, "query_tokens"), stats.query_tokens),
            (intern!(py, "hit_tokens"), stats.hit_tokens),
            (intern!(py, "quarantined_jobs"), stats.quarantined_jobs),
            (intern!(py, "quarantined_blocks"), stats.quarantined_blocks),
            (intern!(py, "capacity_tokens"), stats.capacity_tokens),
        ];
        let dict = PyDict::new(py);
        entries.into_iter().try_for_each(|(name, value)| dict.set_item(name, value))?;
        Ok(dict)
    }

    /// The events since the last call, oldest first; always empty without `events=True`.
    fn take_events<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let batch = {
            let mut scheduler = lock(&self.0);
            Batch::of_host(scheduler.take_events(), scheduler.hash_width())
        };
        batch.into_list(py)
    }

    /// What has happened to jobs since the last call, oldest first; needs `events=True` too.
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

/// How a rank's part of a job went: one bool for all of it, or one per block.
enum Outcome {
    Whole(bool),
    Blocks(Vec<bool>),
}

impl<'py> FromPyObject<'_, 'py> for Outcome {
    type Error = PyErr;

    fn extract(obj: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        // Also numpy's: its arrays are no sequences, and its bools are no `bool`.
        if let Ok(is_ok) = obj.extract::<bool>() {
            return Ok(Self::Whole(is_ok));
        }
        bools(&obj).map(Self::Blocks)
    }
}

/// A pool of either kind.
#[derive(FromPyObject)]
enum AnyPool<'py> {
    Own(PyRef<'py, BlockPool>),
    Ledger(PyRef<'py, LedgerPool>),
}

fn check_time(what: &str, time: Option<f64>) -> PyResult<()> {
    match time {
        Some(time) if time.is_nan() => {
            Err(ConfigError::new_err(format!("{what} is NaN, which is no time")))
        }
        _ => Ok(()),
    }
}

/// Cuts `block_ids` at `offsets`, which must cover all of it in order.
fn parts<'a>(block_ids: &'a [BlockId], offsets: &[usize]) -> PyResult<Vec<&'a [BlockId]>> {
    let covers = offsets.first() == Some(&0)
        && offsets.last() == Some(&block_ids.len())
        && offsets.is_sorted();
    if !covers {
        return Err(ConfigError::new_err(format!(
            "offsets must rise from 0 to the {} block ids",
            block_ids.len()
        )));
    }
    Ok(offsets.windows(2).map(|ends| &block_ids[ends[0]..ends[1]]).collect())
}
