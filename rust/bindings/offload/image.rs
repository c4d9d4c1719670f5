//! Snapshots, and the sleep image.

use kvstow_core::offload;
use numpy::{IntoPyArray, PyArray1};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::to_py;
use crate::job::{Job, to_job};
use crate::ledger::BlockLedger;
use crate::lock::{detached, lock};

use super::OffloadScheduler;

#[pymethods]
impl OffloadScheduler {
    /// Return the scheduler as bytes for `restore`, with a version and a checksum.
    ///
    /// The bytes hold the host tier, its eviction order, what its policy learned, the requests, the
    /// sleep image and the counters. They hold no jobs, as if all had failed, no pins of lookups,
    /// and nothing of the disk tier.
    fn snapshot<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let snapshot = detached(py, &self.0, |scheduler| scheduler.snapshot()).map_err(to_py)?;
        Ok(PyBytes::new(py, &snapshot))
    }

    /// Fill this new scheduler from a snapshot.
    ///
    /// The restored scheduler knows no device blocks, so report whole tables to `store` again. It
    /// ignores reports of jobs that were in flight.
    ///
    /// Raises:
    ///     SnapshotError: not a snapshot, damaged, cut off, of another version, or of another
    ///         number of slots, groups, blocks per slot, ranks, mode or policy.
    ///     StateError: this scheduler is not new.
    fn restore(&self, py: Python<'_>, snapshot: &[u8]) -> PyResult<()> {
        let restore = |scheduler: &mut offload::OffloadScheduler| {
            *scheduler = scheduler.clone().restore(snapshot)?;
            Ok(())
        };
        detached(py, &self.0, restore).map_err(to_py)
    }

    /// Reserve host slots for every block that holds granted tokens, while the device sleeps.
    ///
    /// A block whose key is resident stays in that slot, which is pinned. Each other block gets a
    /// place that no lookup finds. The tier evicts slots for them. Lookups lose their pins.
    ///
    /// Returns:
    ///     The copies to make from device to host, as a job with id 0. Do not report this job.
    ///
    /// Raises:
    ///     OutOfBlocks: the tier cannot hold them. Nothing has changed.
    ///     StateError: jobs are in flight, or the scheduler holds an image already.
    ///     ConfigError: a ledger of other groups.
    fn hold_image(&self, py: Python<'_>, ledger: &BlockLedger) -> PyResult<Job> {
        let copies = ledger.with(|ledger| lock(&self.0).hold_image(ledger)).map_err(to_py)?;
        Ok(to_job(py, copies, &[]))
    }

    /// All copies of the held image. The reverse of each brings its block back.
    ///
    /// The block ids are those that the ledger had. Raises `StateError` if no image is held.
    #[getter]
    fn image(&self, py: Python<'_>) -> PyResult<Job> {
        let copies = lock(&self.0).image().cloned().map_err(to_py)?;
        Ok(to_job(py, copies, &[]))
    }

    /// Return the slots in use, ascending: resident, in a store, or part of a sleep image.
    ///
    /// Slots count from 0. Slot i holds the places from `i * blocks_per_slot`.
    fn used_slots<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        let slots: Vec<i32> = detached(py, &self.0, |scheduler| {
            scheduler.used_slots().map(u32::cast_signed).collect()
        });
        slots.into_pyarray(py)
    }

    /// Release the image, if any, because the device has its blocks or never needs them.
    fn release_image(&self) -> PyResult<()> {
        lock(&self.0).release_image().map_err(to_py)
    }
}
