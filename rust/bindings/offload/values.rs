//! What crosses the boundary of `OffloadScheduler`: modes, outcomes, pools, times, statistics.

use kvstow_core::ids::BlockId;
use kvstow_core::key::Hashes;
use kvstow_core::offload::{self, DiskStats, Mode, OffloadStats};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyString};

use crate::convert::bools;
use crate::error::ConfigError;
use crate::hashes::hashes_of_blocks;
use crate::pool::{BlockPool, LedgerPool};

/// The mode of this name.
pub(super) fn mode(name: &str) -> PyResult<Mode> {
    match name {
        "eager" => Ok(Mode::Eager),
        "lazy" => Ok(Mode::Lazy),
        other => Err(ConfigError::new_err(format!(
            "mode is {other:?}: it must be \"eager\" or \"lazy\""
        ))),
    }
}

/// The number of requests that must have seen a block.
pub(super) fn threshold(number: usize) -> PyResult<u8> {
    u8::try_from(number).ok().filter(|&threshold| threshold > 0).ok_or_else(|| {
        ConfigError::new_err(format!("store_threshold is {number}: it must be 1 to 255"))
    })
}

/// How a rank's part of a job went: one bool for all of it, or one per block.
pub(super) struct Outcome(pub(super) offload::Outcome);

impl<'py> FromPyObject<'_, 'py> for Outcome {
    type Error = PyErr;

    fn extract(obj: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        // numpy's arrays are not sequences, and its bools are not `bool`.
        if let Ok(is_ok) = obj.extract::<bool>() {
            return Ok(Self(is_ok.into()));
        }
        Ok(Self(offload::Outcome::Blocks(bools(&obj)?)))
    }
}

/// A pool of either kind.
pub(super) enum AnyPool<'py> {
    Own(PyRef<'py, BlockPool>),
    Ledger(PyRef<'py, LedgerPool>),
}

impl<'py> FromPyObject<'_, 'py> for AnyPool<'py> {
    type Error = PyErr;

    // Not derived: that makes a Python error for each kind that the pool is not, and releases the
    // interpreter lock four times. A loop of polls can so keep the lock from the copying threads.
    fn extract(obj: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(pool) = obj.cast::<LedgerPool>() {
            return Ok(Self::Ledger(pool.try_borrow()?));
        }
        Ok(Self::Own(obj.cast::<BlockPool>()?.try_borrow()?))
    }
}

/// Refuses NaN, which compares with no time.
pub(super) fn check_time(what: &str, time: Option<f64>) -> PyResult<()> {
    match time {
        Some(time) if time.is_nan() => {
            Err(ConfigError::new_err(format!("{what} is NaN: give a time on your clock")))
        }
        _ => Ok(()),
    }
}

/// Cuts `block_ids` at `offsets`, which must cover all of it in order.
pub(super) fn parts<'a>(
    block_ids: &'a [BlockId],
    offsets: &[usize],
) -> PyResult<Vec<&'a [BlockId]>> {
    let covers = offsets.first() == Some(&0)
        && offsets.last() == Some(&block_ids.len())
        && offsets.is_sorted();
    if !covers {
        let num_ids = block_ids.len();
        return Err(ConfigError::new_err(format!(
            "offsets must rise from 0 to {num_ids}, because {num_ids} block ids are given"
        )));
    }
    Ok(offsets.windows(2).map(|ends| &block_ids[ends[0]..ends[1]]).collect())
}

/// The new hashes of each of a step's requests.
pub(super) fn new_hashes(
    given: Option<Vec<Bound<'_, PyAny>>>,
    num_requests: usize,
    hash_block_size: impl Fn() -> usize,
) -> PyResult<Vec<Hashes>> {
    let Some(given) = given else { return Ok(Vec::new()) };
    if given.len() != num_requests {
        return Err(ConfigError::new_err(format!(
            "{} lists of new hashes for {num_requests} requests: give one per request",
            given.len()
        )));
    }
    given.iter().map(|hashes| hashes_of_blocks(hashes, &hash_block_size)).collect()
}

/// Statistics by name.
pub(super) fn stats_dict(py: Python<'_>, stats: OffloadStats) -> PyResult<Bound<'_, PyDict>> {
    static NAMES: PyOnceLock<Vec<Py<PyString>>> = PyOnceLock::new();
    dict(py, &NAMES, stats.entries())
}

/// Statistics of the disk tier by name.
pub(super) fn disk_stats_dict(py: Python<'_>, stats: DiskStats) -> PyResult<Bound<'_, PyDict>> {
    static NAMES: PyOnceLock<Vec<Py<PyString>>> = PyOnceLock::new();
    dict(py, &NAMES, stats.entries())
}

/// Values by name, with the names of the first call.
fn dict<'py>(
    py: Python<'py>,
    names: &PyOnceLock<Vec<Py<PyString>>>,
    entries: impl Iterator<Item = (&'static str, usize)> + Clone,
) -> PyResult<Bound<'py, PyDict>> {
    let intern = |(name, _)| PyString::intern(py, name).unbind();
    let names = names.get_or_init(py, || entries.clone().map(intern).collect());
    let dict = PyDict::new(py);
    names.iter().zip(entries).try_for_each(|(name, (_, value))| dict.set_item(name, value))?;
    Ok(dict)
}
