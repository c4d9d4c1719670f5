//! `OffloadScheduler` and its jobs.

use std::sync::Mutex;

use kvstow_core::ids::{BlockId, JobId};
use kvstow_core::key::BlockKey;
use kvstow_core::offload::{
    self, Direction, ImageCopies, Mode, OffloadConfig, Progress, TransferEvent,
};
use kvstow_core::pool::MAX_BLOCKS;
use numpy::{IntoPyArray, PyArray1};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};

use crate::convert::{
    Count, Name, RequestId, as_strs, bools, counts, group_id, hashes, ids, job_id, request_ids,
    to_array,
};
use crate::error::{ConfigError, to_py};
use crate::event::Batch;
use crate::group::groups;
use crate::ledger::{BlockLedger, LedgerPool};
use crate::pool::{BlockPool, SharedPool};
use crate::{detached, lock};

/// One store or load in flight: `block_ids[i]` and `host_slots[i]` are the two ends of a copy.
#[pyclass(module = "kvstow", frozen, get_all)]
#[expect(clippy::struct_field_names, reason = "the public names")]
pub(crate) struct Job {
    job_id: u64,
    block_ids: Py<PyArray1<i32>>,
    host_slots: Py<PyArray1<i32>>,
    offsets: Py<PyArray1<i32>>,
}

#[pymethods]
impl Job {
    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        self.block_ids.bind(py).as_any().len()
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!("Job(job_id={}, {} blocks)", self.job_id, self.__len__(py)?))
    }
}

/// How a job ended.
#[pyclass(module = "kvstow", frozen)]
pub(crate) struct JobEnd {
    #[pyo3(get)]
    job_id: u64,
    block_ids: Vec<BlockId>,
    #[pyo3(get)]
    ok: bool,
    #[pyo3(get)]
    late: bool,
}

#[pymethods]
impl JobEnd {
    /// An array only for those who ask: who holds blocks as objects need not.
    #[getter]
    fn block_ids<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        to_array(py, self.block_ids.iter().copied())
    }
}

/// A job was planned.
#[pyclass(module = "kvstow", frozen, get_all, eq)]
#[derive(PartialEq)]
pub(crate) struct TransferInitiated {
    job_id: u64,
    direction: &'static str,
    num_blocks: usize,
}

#[pymethods]
impl TransferInitiated {
    fn __repr__(&self) -> String {
        let Self { job_id, direction, num_blocks } = self;
        format!(
            "TransferInitiated(job_id={job_id}, direction={direction:?}, num_blocks={num_blocks})"
        )
    }
}

/// What a store brought can be found.
#[pyclass(module = "kvstow", frozen, get_all, eq)]
#[derive(PartialEq)]
pub(crate) struct CacheStoreCommitted {
    job_id: u64,
    num_blocks: usize,
}

#[pymethods]
impl CacheStoreCommitted {
    fn __repr__(&self) -> String {
        format!("CacheStoreCommitted(job_id={}, num_blocks={})", self.job_id, self.num_blocks)
    }
}

/// A job has ended, well or not: every one that was initiated once.
#[pyclass(module = "kvstow", frozen, get_all, eq)]
#[derive(PartialEq)]
pub(crate) struct TransferCompleted {
    job_id: u64,
    direction: &'static str,
    ok: bool,
}

#[pymethods]
impl TransferCompleted {
    fn __repr__(&self) -> String {
        let Self { job_id, direction, ok } = self;
        format!("TransferCompleted(job_id={job_id}, direction={direction:?}, ok={ok})")
    }
}

fn transfer_to_py(py: Python<'_>, event: TransferEvent) -> PyResult<Py<PyAny>> {
    let name = |direction| match direction {
        Direction::Store => "store",
        Direction::Load => "load",
    };
    Ok(match event {
        TransferEvent::Initiated { job_id: JobId(job_id), direction, num_blocks } => {
            let direction = name(direction);
            Py::new(py, TransferInitiated { job_id, direction, num_blocks })?.into_any()
        }
        TransferEvent::Committed { job_id: JobId(job_id), num_blocks } => {
            Py::new(py, CacheStoreCommitted { job_id, num_blocks })?.into_any()
        }
        TransferEvent::Completed { job_id: JobId(job_id), direction, is_ok: ok } => {
            let direction = name(direction);
            Py::new(py, TransferCompleted { job_id, direction, ok })?.into_any()
        }
    })
}

/// The host tier's accounting: which blocks it holds, what to store, what to load, the jobs.
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

    /// The scheduler as bytes, for `restore`.
    fn snapshot<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let snapshot = detached(py, &self.0, |scheduler| scheduler.snapshot()).map_err(to_py)?;
        Ok(PyBytes::new(py, &snapshot))
    }

    /// Fill this scheduler, which must be new, from a snapshot.
    fn restore(&self, py: Python<'_>, snapshot: &[u8]) -> PyResult<()> {
        let restore = |scheduler: &mut offload::OffloadScheduler| {
            *scheduler = scheduler.clone().restore(snapshot)?;
            Ok(())
        };
        detached(py, &self.0, restore).map_err(to_py)
    }

    /// Set host slots aside for every block in a table of `ledger`.
    fn hold_image(&self, py: Python<'_>, ledger: &BlockLedger) -> PyResult<Job> {
        let copies = ledger.with(|ledger| lock(&self.0).hold_image(ledger)).map_err(to_py)?;
        Ok(to_job(py, unnamed(copies)))
    }

    /// All copies of the image that is held.
    #[getter]
    fn image(&self, py: Python<'_>) -> PyResult<Job> {
        let copies = lock(&self.0).image().cloned().map_err(to_py)?;
        Ok(to_job(py, unnamed(copies)))
    }

    /// The slots that hold anything.
    fn used_slots<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        let slots: Vec<i32> = detached(py, &self.0, |scheduler| {
            scheduler.used_slots().map(u32::cast_signed).collect()
        });
        slots.into_pyarray(py)
    }

    /// Let the image go, if one is held.
    fn release_image(&self) -> PyResult<()> {
        lock(&self.0).release_image().map_err(to_py)
    }

    #[getter]
    fn num_host_blocks(&self) -> usize {
        lock(&self.0).num_host_blocks()
    }

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
    fn truncate(&self, request_id: RequestId, num_hashes: Count) -> PyResult<()> {
        lock(&self.0).truncate(&request_id, num_hashes.0).map_err(to_py)
    }

    /// Lazy mode: forget what was computed into device blocks that are about to be overwritten.
    fn invalidate(&self, block_ids: &Bound<'_, PyAny>) -> PyResult<()> {
        let block_ids = ids(block_ids, MAX_BLOCKS)?;
        lock(&self.0).invalidate(&block_ids).map_err(to_py)
    }

    /// How many tokens right after the local hit the host can serve; None means pending.
    fn lookup(
        &self,
        request_id: RequestId,
        num_local_tokens: Count,
        max_tokens: Count,
    ) -> PyResult<Option<usize>> {
        lock(&self.0).lookup(&request_id, num_local_tokens.0, max_tokens.0).map_err(to_py)
    }

    /// Accept the first `num_tokens` of what `lookup` found; the rest is unpinned.
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

    /// As `store_evictable`, for blocks of a pool that is not kvstow's.
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

    /// A rank's part of a job has ended; when all have, how the job ended.
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

    /// The jobs whose deadline lies before `now`, each told once.
    fn expire<'py>(&self, py: Python<'py>, now: f64) -> PyResult<Bound<'py, PyList>> {
        check_time("now", Some(now))?;
        let late = lock(&self.0).expire(now).map_err(to_py)?;
        PyList::new(py, late.into_iter().map(|job_id| job_id.0))
    }

    /// End every job as failed: for movers that have been stopped.
    fn end_all<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let ends = lock(&self.0).end_all().map_err(to_py)?;
        let ends = ends.into_iter().map(|end| Py::new(py, to_end(end)));
        PyList::new(py, ends.collect::<PyResult<Vec<_>>>()?)
    }

    /// Forget a request that finished, was preempted or aborted; its jobs go on.
    fn finish(&self, request_id: RequestId) -> PyResult<()> {
        lock(&self.0).finish(&request_id).map_err(to_py)
    }

    /// Empty the tier, at any moment; jobs in flight still end, their result is dropped.
    fn reset(&self, py: Python<'_>) -> PyResult<()> {
        detached(py, &self.0, offload::OffloadScheduler::reset).map_err(to_py)
    }

    /// Counters since construction, and gauges of the moment.
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

    /// The events since the last call, oldest first.
    fn take_events<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let batch = {
            let mut scheduler = lock(&self.0);
            Batch::of_host(scheduler.take_events(), scheduler.hash_width())
        };
        batch.into_list(py)
    }

    /// What has happened to jobs since the last call, oldest first.
    fn take_transfer_events<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let events = lock(&self.0).take_transfer_events().into_iter();
        let events: Vec<_> =
            events.map(|event| transfer_to_py(py, event)).collect::<PyResult<_>>()?;
        PyList::new(py, events)
    }

    /// Verify every invariant.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        detached(py, &self.0, |scheduler| scheduler.check()).map_err(to_py)
    }
}

/// Copies as a job of no id: nobody reports them.
fn unnamed(copies: ImageCopies) -> offload::Job {
    let ImageCopies { block_ids, host_slots, offsets } = copies;
    offload::Job { job_id: JobId(0), block_ids, host_slots, offsets }
}

fn to_job(py: Python<'_>, job: offload::Job) -> Job {
    // Slots are below 2^31: the tier has no more. So are the copies of a job.
    let host_slots: Vec<i32> = job.host_slots.into_iter().map(u32::cast_signed).collect();
    let to_i32 = |offset| i32::try_from(offset).unwrap_or(i32::MAX);
    let offsets: Vec<i32> = job.offsets.into_iter().map(to_i32).collect();
    Job {
        job_id: job.job_id.0,
        block_ids: to_array(py, job.block_ids).unbind(),
        host_slots: host_slots.into_pyarray(py).unbind(),
        offsets: offsets.into_pyarray(py).unbind(),
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

fn to_end(end: offload::JobEnd) -> JobEnd {
    let offload::JobEnd { job_id, block_ids, is_ok: ok, is_late: late } = end;
    JobEnd { job_id: job_id.0, block_ids, ok, late }
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
