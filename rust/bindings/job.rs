//! Jobs of a scheduler, and what happens to them.

use kvstow_core::ids::{BlockId, JobId};
use kvstow_core::key::{BlockHash, BlockKey, HashWidth};
use kvstow_core::offload::{self, Direction, TransferEvent};
use numpy::{IntoPyArray, PyArray1};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::convert::{offsets_to_array, to_array};

/// One store or load in flight: `block_ids[i]` and `host_slots[i]` are the two ends of a copy.
///
/// Pin `block_ids` in the device pool when the job begins. Unpin what `complete` returns.
#[pyclass(module = "kvstow", frozen, get_all)]
#[expect(clippy::struct_field_names, reason = "the public names")]
pub(crate) struct Job {
    /// Id of the job. Ids count up from 1 and are not reused. 0 means a sleep image.
    job_id: u64,
    /// Device block ids.
    block_ids: Py<PyArray1<i32>>,
    /// Places on the host, one per device block: 0 to `num_host_blocks * blocks_per_slot - 1`.
    ///
    /// The blocks of one slot are side by side.
    host_slots: Py<PyArray1<i32>>,
    /// Where each group's copies begin, and the end of the last: `num_groups + 1` values.
    offsets: Py<PyArray1<i32>>,
    /// Whether `block_ids` are all ids that the planning call got, in order or reversed.
    has_all_ids: bool,
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

/// One demote or promote in flight: `host_slots[i]` and `disk_slots[i]` are the ends of a copy.
///
/// The other columns say what each block is. Report the job to `OffloadScheduler.complete`.
#[pyclass(module = "kvstow", frozen, get_all)]
pub(crate) struct TierJob {
    /// Id of the job, of the same sequence as those of stores and loads.
    job_id: u64,
    /// The direction: "demote" copies to the disk, "promote" copies to the host.
    direction: &'static str,
    /// Slots of the host, whole: slot i holds the places from `i * blocks_per_slot`.
    host_slots: Py<PyArray1<i32>>,
    /// Slots of the disk, counted from 0.
    disk_slots: Py<PyArray1<i32>>,
    /// The hash of each block.
    hashes: Py<PyList>,
    /// The group of each block.
    groups: Py<PyArray1<i32>>,
    /// The hash before each block; None at a prompt's start, and in groups that skip blocks.
    parents: Py<PyList>,
}

#[pymethods]
impl TierJob {
    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        self.host_slots.bind(py).as_any().len()
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let Self { job_id, direction, .. } = self;
        Ok(format!(
            "TierJob(job_id={job_id}, direction={direction:?}, {} blocks)",
            self.__len__(py)?
        ))
    }
}

/// How a job ended.
#[pyclass(module = "kvstow", frozen)]
pub(crate) struct JobEnd {
    /// Id of the job.
    #[pyo3(get)]
    job_id: u64,
    // An array is made of them only for those who ask: who holds blocks as objects need not.
    /// Device block ids to unpin.
    block_ids: Vec<BlockId>,
    /// Whether the copies count. False if the job failed, was late, or was in flight at a reset.
    ///
    /// Recompute the blocks of a load that does not count. A successful store counts even if the
    /// tier dropped some of its slots, because the store of a block before them failed.
    #[pyo3(get)]
    ok: bool,
    /// Whether the job missed its deadline, so that `expire` has returned it.
    #[pyo3(get)]
    late: bool,
}

#[pymethods]
impl JobEnd {
    /// Device block ids to unpin.
    #[getter]
    fn block_ids<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        to_array(py, self.block_ids.iter().copied())
    }

    fn __repr__(&self) -> String {
        let how = match (self.ok, self.late) {
            (true, _) => "ok",
            (false, true) => "late",
            (false, false) => "failed",
        };
        format!("JobEnd(job_id={}, {how})", self.job_id)
    }
}

/// The scheduler planned a job.
#[pyclass(module = "kvstow", frozen, get_all, eq)]
#[derive(PartialEq)]
pub(crate) struct TransferInitiated {
    /// Id of the job.
    job_id: u64,
    /// The direction: "store" or "load", or "demote" or "promote" for the disk tier.
    direction: &'static str,
    /// Number of device blocks; of slots for a demote or a promote.
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

/// Lookups can find the blocks of a store, a demote or a promote.
#[pyclass(module = "kvstow", frozen, get_all, eq)]
#[derive(PartialEq)]
pub(crate) struct CacheStoreCommitted {
    /// Id of the job.
    job_id: u64,
    /// Number of device blocks; of slots for a demote or a promote.
    ///
    /// Fewer than planned if some were dropped meanwhile.
    num_blocks: usize,
}

#[pymethods]
impl CacheStoreCommitted {
    fn __repr__(&self) -> String {
        format!("CacheStoreCommitted(job_id={}, num_blocks={})", self.job_id, self.num_blocks)
    }
}

/// A job has ended, successfully or not. Each initiated job has exactly one such event.
#[pyclass(module = "kvstow", frozen, get_all, eq)]
#[derive(PartialEq)]
pub(crate) struct TransferCompleted {
    /// Id of the job.
    job_id: u64,
    /// The direction: "store" or "load", or "demote" or "promote" for the disk tier.
    direction: &'static str,
    /// Whether the copies count, as in `JobEnd.ok`.
    ok: bool,
}

#[pymethods]
impl TransferCompleted {
    fn __repr__(&self) -> String {
        let Self { job_id, direction, ok } = self;
        format!("TransferCompleted(job_id={job_id}, direction={direction:?}, ok={ok})")
    }
}

/// The name of a direction.
fn name(direction: Direction) -> &'static str {
    match direction {
        Direction::Store => "store",
        Direction::Load => "load",
        Direction::Demote => "demote",
        Direction::Promote => "promote",
    }
}

pub(crate) fn event_to_py(py: Python<'_>, event: TransferEvent) -> PyResult<Py<PyAny>> {
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

/// The job for Python, which gave these ids to the call that planned it.
pub(crate) fn to_job(py: Python<'_>, job: offload::Job, given_ids: &[BlockId]) -> Job {
    let has_all_ids = job.block_ids == given_ids || job.block_ids.iter().eq(given_ids.iter().rev());
    // Slots are below 2^31: the tier has no more.
    let host_slots: Vec<i32> = job.host_slots.into_iter().map(u32::cast_signed).collect();
    Job {
        job_id: job.job_id.0,
        block_ids: to_array(py, job.block_ids).unbind(),
        host_slots: host_slots.into_pyarray(py).unbind(),
        offsets: offsets_to_array(py, job.offsets).unbind(),
        has_all_ids,
    }
}

pub(crate) fn to_tier_job(
    py: Python<'_>,
    job: offload::TierJob,
    width: HashWidth,
) -> PyResult<TierJob> {
    let offload::TierJob { job_id, direction, host_slots, disk_slots, keys, parents } = job;
    let (hashes, groups, parents) = key_columns(py, &keys, &parents, width)?;
    Ok(TierJob {
        job_id: job_id.0,
        direction: name(direction),
        host_slots: slots(py, host_slots),
        disk_slots: slots(py, disk_slots),
        hashes,
        groups,
        parents,
    })
}

/// Slots of a tier, which are below 2^31: a tier has no more.
pub(crate) fn slots(py: Python<'_>, slots: Vec<u32>) -> Py<PyArray1<i32>> {
    slots.into_iter().map(u32::cast_signed).collect::<Vec<i32>>().into_pyarray(py).unbind()
}

/// The hashes, groups and parents of blocks.
pub(crate) type KeyColumns = (Py<PyList>, Py<PyArray1<i32>>, Py<PyList>);

/// What blocks are, in columns.
pub(crate) fn key_columns(
    py: Python<'_>,
    keys: &[BlockKey],
    parents: &[Option<BlockHash>],
    width: HashWidth,
) -> PyResult<KeyColumns> {
    let hashes = keys.iter().map(|key| PyBytes::new(py, width.digest(&key.hash)));
    let parents = parents.iter().map(|parent| {
        let parent = parent.as_ref()?;
        Some(PyBytes::new(py, width.digest(parent)))
    });
    let groups: Vec<i32> = keys.iter().map(|key| key.group.0.into()).collect();
    Ok((
        PyList::new(py, hashes)?.unbind(),
        groups.into_pyarray(py).unbind(),
        PyList::new(py, parents)?.unbind(),
    ))
}

pub(crate) fn to_end(end: offload::JobEnd) -> JobEnd {
    let offload::JobEnd { job_id, block_ids, is_ok: ok, is_late: late } = end;
    JobEnd { job_id: job_id.0, block_ids, ok, late }
}
