//! What the disk tier of `OffloadScheduler` takes and returns.

use kvstow_core::ids::GroupId;
use kvstow_core::key::{BlockHash, HashWidth, HashesBuilder};
use kvstow_core::offload::{self, DiskConfig, EvictionPolicy};
use numpy::PyArray1;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::convert::{Count, counts, group_id};
use crate::error::{ConfigError, to_py};
use crate::hashes::hashes;
use crate::job::{KeyColumns, TierJob, key_columns, slots, to_tier_job};
use crate::lock::{Mutex, lock};

use super::values::check_time;

/// The options of a disk tier. None for 0 blocks.
pub(super) fn config(
    num_blocks: usize,
    policy: EvictionPolicy,
    admit: &str,
    max_in_flight_blocks: usize,
    min_promote_tokens: usize,
) -> PyResult<Option<DiskConfig>> {
    let admit = admit.parse().map_err(to_py)?;
    let new = DiskConfig::new(num_blocks);
    let config = DiskConfig { policy, admit, max_in_flight_blocks, min_promote_tokens, ..new };
    Ok((num_blocks > 0).then_some(config))
}

/// Which way to plan a job.
#[derive(Clone, Copy)]
pub(super) enum Way {
    Demote,
    Promote,
}

/// The next demote or promote.
pub(super) fn plan(
    py: Python<'_>,
    scheduler: &Mutex<offload::OffloadScheduler>,
    way: Way,
    max_blocks: Option<Count>,
    deadline: Option<f64>,
) -> PyResult<Option<TierJob>> {
    check_time("deadline", deadline)?;
    let max_blocks = max_blocks.map_or(usize::MAX, |count| count.0);
    let (job, width) = {
        let mut scheduler = lock(scheduler);
        let job = match way {
            Way::Demote => scheduler.demote(max_blocks, deadline),
            Way::Promote => scheduler.promote(max_blocks, deadline),
        };
        (job.map_err(to_py)?, scheduler.hash_width())
    };
    job.map(|job| to_tier_job(py, job, width)).transpose()
}

/// The host slots, disk slots, hashes, groups and parents of blocks.
pub(super) type UnsavedColumns =
    (Py<PyArray1<i32>>, Py<PyArray1<i32>>, Py<PyList>, Py<PyArray1<i32>>, Py<PyList>);

/// The blocks that only the host has.
pub(super) fn unsaved(
    py: Python<'_>,
    scheduler: &Mutex<offload::OffloadScheduler>,
    max_blocks: usize,
) -> PyResult<UnsavedColumns> {
    let (found, width) = {
        let scheduler = lock(scheduler);
        (scheduler.unsaved(max_blocks), scheduler.hash_width())
    };
    let (hashes, groups, parents) = key_columns(py, &found.keys, &found.parents, width)?;
    Ok((slots(py, found.host_slots), slots(py, found.disk_slots), hashes, groups, parents))
}

/// Adds records of a warm disk.
pub(super) fn adopt(
    scheduler: &Mutex<offload::OffloadScheduler>,
    slots: &Bound<'_, PyAny>,
    hashes: &Bound<'_, PyAny>,
    groups: &Bound<'_, PyAny>,
    parents: Option<&Bound<'_, PyAny>>,
) -> PyResult<usize> {
    let (slots, hashes) = (counts(slots, "slots")?, self::hashes(hashes)?);
    let groups = self::groups(groups)?;
    let parents = parents.map_or(Ok(Vec::new()), |given| self::parents(given, hashes.width()))?;
    lock(scheduler).adopt_disk(&slots, &hashes, &groups, &parents).map_err(to_py)
}

/// The blocks of a request to ask a shared store for.
pub(super) fn unclaimed(
    py: Python<'_>,
    scheduler: &Mutex<offload::OffloadScheduler>,
    request_id: &str,
    num_local_tokens: usize,
    max_tokens: usize,
    max_blocks: usize,
) -> PyResult<KeyColumns> {
    let (found, width) = {
        let scheduler = lock(scheduler);
        let found = scheduler.unclaimed(request_id, num_local_tokens, max_tokens, max_blocks);
        (found.map_err(to_py)?, scheduler.hash_width())
    };
    key_columns(py, &found.keys, &found.parents, width)
}

/// Adds blocks that a shared store has.
pub(super) fn claim(
    scheduler: &Mutex<offload::OffloadScheduler>,
    hashes: &Bound<'_, PyAny>,
    groups: &Bound<'_, PyAny>,
    parents: Option<&Bound<'_, PyAny>>,
) -> PyResult<usize> {
    let (hashes, groups) = (self::hashes(hashes)?, self::groups(groups)?);
    let parents = parents.map_or(Ok(Vec::new()), |given| self::parents(given, hashes.width()))?;
    lock(scheduler).claim(&hashes, &groups, &parents).map_err(to_py)
}

fn groups(given: &Bound<'_, PyAny>) -> PyResult<Vec<GroupId>> {
    counts(given, "groups")?.into_iter().map(|group| group_id(Count(group))).collect()
}

/// The hash before each block, all as wide as the blocks' own.
fn parents(given: &Bound<'_, PyAny>, width: HashWidth) -> PyResult<Vec<Option<BlockHash>>> {
    let mut known = HashesBuilder::default();
    let mut are_known = Vec::new();
    for item in crate::convert::sequence(given, "block hashes or None")?.try_iter()? {
        let item = item?;
        are_known.push(!item.is_none());
        if !item.is_none() {
            let digest = item.cast::<PyBytes>().map_err(|_| {
                ConfigError::new_err(format!(
                    "a parent is of type {}: pass bytes or None",
                    item.get_type()
                ))
            })?;
            known.push(digest.as_bytes()).map_err(to_py)?;
        }
    }
    let known = known.finish();
    width.check(known.width()).map_err(to_py)?;
    let mut known = known.as_slice().iter().copied();
    Ok(are_known.into_iter().map(|is_known| if is_known { known.next() } else { None }).collect())
}
