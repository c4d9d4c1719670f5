//! Jobs of a scheduler, and what happens to them.

use kvstow_core::ids::{BlockId, JobId};
use kvstow_core::offload::{self, Direction, TransferEvent};
use numpy::{IntoPyArray, PyArray1};
use pyo3::prelude::*;

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
}

/// The scheduler planned a job.
#[pyclass(module = "kvstow", frozen, get_all, eq)]
#[derive(PartialEq)]
pub(crate) struct TransferInitiated {
    /// Id of the job.
    job_id: u64,
    /// The direction: "store" copies to the host, "load" copies to the device.
    direction: &'static str,
    /// Number of device blocks.
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

/// Lookups can find the blocks of a store.
#[pyclass(module = "kvstow", frozen, get_all, eq)]
#[derive(PartialEq)]
pub(crate) struct CacheStoreCommitted {
    /// Id of the job.
    job_id: u64,
    /// Number of device blocks. Fewer than planned if some were dropped meanwhile.
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
    /// The direction: "store" copies to the host, "load" copies to the device.
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

pub(crate) fn event_to_py(py: Python<'_>, event: TransferEvent) -> PyResult<Py<PyAny>> {
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

pub(crate) fn to_job(py: Python<'_>, job: offload::Job) -> Job {
    // Slots are below 2^31: the tier has no more.
    let host_slots: Vec<i32> = job.host_slots.into_iter().map(u32::cast_signed).collect();
    Job {
        job_id: job.job_id.0,
        block_ids: to_array(py, job.block_ids).unbind(),
        host_slots: host_slots.into_pyarray(py).unbind(),
        offsets: offsets_to_array(py, job.offsets).unbind(),
    }
}

pub(crate) fn to_end(end: offload::JobEnd) -> JobEnd {
    let offload::JobEnd { job_id, block_ids, is_ok: ok, is_late: late } = end;
    JobEnd { job_id: job_id.0, block_ids, ok, late }
}
