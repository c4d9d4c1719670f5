//! The disk tier, or the shared store in its place.

use kvstow_core::error;
use kvstow_core::ids::GroupId;
use kvstow_core::key::{BlockHash, HashWidth, HashesBuilder};
use kvstow_core::offload::{self, DiskConfig, DiskMode, EvictionPolicy};
use numpy::PyArray1;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};

use crate::convert::{Count, Name, RequestId, counts, group_id};
use crate::error::{ConfigError, to_py};
use crate::event::events_to_py;
use crate::hashes::hashes;
use crate::job::{KeyColumns, TierJob, key_columns, slots, to_tier_job};
use crate::lock::lock;

use super::OffloadScheduler;
use super::values::{check_time, disk_stats_dict};

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

/// The host slots, disk slots, hashes, groups and parents of blocks.
type UnsavedColumns =
    (Py<PyArray1<i32>>, Py<PyArray1<i32>>, Py<PyList>, Py<PyArray1<i32>>, Py<PyList>);

#[pymethods]
impl OffloadScheduler {
    /// Plan the demote of the blocks that have been due longest.
    ///
    /// Copy each host slot to its disk slot. The job pins the host slots. It reserves the disk
    /// slots, whose blocks `lookup` finds once all ranks have reported the job. Evicts disk slots
    /// for room. A block that the host has lost since, or that the disk has, is left out.
    ///
    /// Args:
    ///     max_blocks: the most slots that the job may have; None for no limit besides
    ///         `max_disk_blocks_in_flight`.
    ///     deadline: when `expire` fails the job, on the caller's clock.
    ///
    /// Returns:
    ///     The job, or None if no block is due, if as many are in flight as may be, and unless the
    ///     disk is "on".
    #[pyo3(signature = (*, max_blocks = None, deadline = None))]
    fn demote(
        &self,
        py: Python<'_>,
        max_blocks: Option<Count>,
        deadline: Option<f64>,
    ) -> PyResult<Option<TierJob>> {
        self.plan(py, offload::OffloadScheduler::demote, max_blocks, deadline)
    }

    /// Plan the promote of blocks for which lookups wait, longest waiting request first.
    ///
    /// Copy each disk slot to its host slot. The job pins the disk slots. It reserves the host
    /// slots, whose blocks `lookup` finds once all ranks have reported the job. Evicts host slots
    /// for room. A block is promoted once for all requests that need it. A block that failed leaves
    /// the disk tier.
    ///
    /// Args:
    ///     max_blocks: the most slots that the job may have; None for no limit besides
    ///         `max_disk_blocks_in_flight`. A request that needs more is served in parts.
    ///     deadline: when `expire` fails the job, on the caller's clock.
    ///
    /// Returns:
    ///     The job, or None if no lookup waits, if as many are in flight as may be, and if the disk
    ///     is "off".
    #[pyo3(signature = (*, max_blocks = None, deadline = None))]
    fn promote(
        &self,
        py: Python<'_>,
        max_blocks: Option<Count>,
        deadline: Option<f64>,
    ) -> PyResult<Option<TierJob>> {
        self.plan(py, offload::OffloadScheduler::promote, max_blocks, deadline)
    }

    /// Open or close the disk tier.
    ///
    /// The disk is off at first, and after each `reset`. Open it once every rank has made the reset
    /// durable. Jobs in flight continue, and the index stays.
    ///
    /// Args:
    ///     mode: "on"; "read_only" demotes nothing; "off" promotes nothing either, and `lookup`
    ///         sees the host only.
    ///
    /// Raises:
    ///     StateError: the scheduler has no disk tier.
    fn set_disk(&self, mode: Name) -> PyResult<()> {
        let mode = mode.0.parse().map_err(to_py)?;
        lock(&self.0).set_disk(mode).map_err(to_py)
    }

    /// What the disk tier does: "on", "read_only" or "off"; None without a disk tier.
    #[getter]
    fn disk_mode(&self) -> Option<&'static str> {
        lock(&self.0).disk_mode().map(DiskMode::name)
    }

    /// Number of slots of the disk tier; 0 without one.
    #[getter]
    fn num_disk_blocks(&self) -> usize {
        lock(&self.0).num_disk_blocks()
    }

    /// Add blocks that the disk holds already, and return how many were added.
    ///
    /// Call it in as many parts as you like, the least recent blocks first. It leaves out records
    /// whose slot is in use, or whose key the disk has. A parent may come after its child.
    ///
    /// Args:
    ///     slots: the disk slots, counted from 0.
    ///     hashes: the hash of each block.
    ///     groups: the group of each block.
    ///     parents: the hash before each block, or None; None for no parents at all. Groups that
    ///         skip blocks have no parents.
    ///
    /// Raises:
    ///     StateError: the scheduler has no disk tier.
    ///     ConfigError: a slot outside the disk, an unknown group, a parent in a group that skips
    ///         blocks, hashes of another width, or lists of different lengths.
    #[pyo3(signature = (slots, hashes, groups, parents = None))]
    fn adopt_disk(
        &self,
        slots: &Bound<'_, PyAny>,
        hashes: &Bound<'_, PyAny>,
        groups: &Bound<'_, PyAny>,
        parents: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<usize> {
        let (slots, hashes) = (counts(slots, "slots")?, self::hashes(hashes)?);
        let (groups, parents) = (self::groups(groups)?, self::parents(parents, hashes.width())?);
        lock(&self.0).adopt_disk(&slots, &hashes, &groups, &parents).map_err(to_py)
    }

    /// Return the blocks that only the host has, the most recent first, each with a disk slot.
    ///
    /// They are lost when the host memory goes. Nothing changes, and no job reserves the slots:
    /// they are the empty ones, then those that the disk evicts first. So copy the blocks only when
    /// no other job begins any more, and leave out each slot that a job has used since this call.
    ///
    /// Args:
    ///     max_blocks: how many of the most recent blocks of the host to look at.
    ///
    /// Returns:
    ///     The host slot of each block, its disk slot, its hash, its group, and the hash before it
    ///     or None. No blocks unless the disk is "on".
    #[pyo3(
        signature = (*, max_blocks = Count(16384)),
        text_signature = "($self, *, max_blocks=16384)"
    )]
    fn unsaved(&self, py: Python<'_>, max_blocks: Count) -> PyResult<UnsavedColumns> {
        let (found, width) = {
            let scheduler = lock(&self.0);
            (scheduler.unsaved(max_blocks.0), scheduler.hash_width())
        };
        let (hashes, groups, parents) = key_columns(py, &found.keys, &found.parents, width)?;
        Ok((slots(py, found.host_slots), slots(py, found.disk_slots), hashes, groups, parents))
    }

    /// Return the tokens of the hit on the host, and of the hit on host and disk together.
    ///
    /// Both include the local hit. They are equal if `lookup` would begin no promote: the disk tier
    /// adds less than `min_promote_tokens`, it is "off" or missing, or the request has waited for a
    /// promote already. Changes nothing.
    ///
    /// Args:
    ///     request_id: the request.
    ///     num_local_tokens: tokens of the local hit.
    ///     max_tokens: upper bound for the whole request, the local hit included.
    ///
    /// Raises:
    ///     ConfigError: `num_local_tokens` is not a multiple of the block size that all groups have
    ///         in common.
    fn tier_hits(
        &self,
        request_id: RequestId,
        num_local_tokens: Count,
        max_tokens: Count,
    ) -> PyResult<(usize, usize)> {
        lock(&self.0).tier_hits(&request_id, num_local_tokens.0, max_tokens.0).map_err(to_py)
    }

    /// Return the blocks of a request to ask a shared store for, in the order of their prompt.
    ///
    /// Neither the host nor the disk tier has them, and they could lengthen the request's hit. Pass
    /// those that the store has to `claim`, and then call `lookup`.
    ///
    /// Args:
    ///     request_id: the request.
    ///     num_local_tokens: tokens of the local hit.
    ///     max_tokens: upper bound for the whole request, the local hit included.
    ///     max_blocks: the most blocks to return.
    ///
    /// Returns:
    ///     The hash of each block, its group, and the hash before it or None. No blocks if the
    ///     request has waited for a promote already, if they would add less than
    ///     `min_promote_tokens`, and if the disk tier is "off" or missing.
    ///
    /// Raises:
    ///     ConfigError: `num_local_tokens` is not a multiple of the block size that all groups have
    ///         in common.
    #[pyo3(
        signature = (request_id, num_local_tokens, max_tokens, *, max_blocks = Count(8192)),
        text_signature = "($self, request_id, num_local_tokens, max_tokens, *, max_blocks=8192)"
    )]
    fn unclaimed(
        &self,
        py: Python<'_>,
        request_id: RequestId,
        num_local_tokens: Count,
        max_tokens: Count,
        max_blocks: Count,
    ) -> PyResult<KeyColumns> {
        let (local, most) = (num_local_tokens.0, max_tokens.0);
        let (found, width) = {
            let scheduler = lock(&self.0);
            let found = scheduler.unclaimed(&request_id, local, most, max_blocks.0);
            (found.map_err(to_py)?, scheduler.hash_width())
        };
        key_columns(py, &found.keys, &found.parents, width)
    }

    /// Add blocks that a shared store has, and return how many were added.
    ///
    /// They take slots of the disk tier's index, evicting others for room. The slots name no place:
    /// a shared store finds a block by its key. A block whose promote fails leaves the index.
    ///
    /// Args:
    ///     hashes: the hash of each block, the first of a prompt first.
    ///     groups: the group of each block.
    ///     parents: the hash before each block, or None; None for no parents at all. Groups that
    ///         skip blocks have no parents.
    ///
    /// Returns:
    ///     The number of blocks that the disk tier did not have. 0 if it is "off".
    ///
    /// Raises:
    ///     StateError: the scheduler has no disk tier.
    ///     ConfigError: an unknown group, a parent in a group that skips blocks, hashes of another
    ///         width, or lists of different lengths.
    #[pyo3(signature = (hashes, groups, parents = None))]
    fn claim(
        &self,
        hashes: &Bound<'_, PyAny>,
        groups: &Bound<'_, PyAny>,
        parents: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<usize> {
        let (hashes, groups) = (self::hashes(hashes)?, self::groups(groups)?);
        let parents = self::parents(parents, hashes.width())?;
        lock(&self.0).claim(&hashes, &groups, &parents).map_err(to_py)
    }

    /// Return counters of the disk tier, and gauges; all 0 without a disk tier.
    ///
    /// Counters, in slots:
    ///     demoted_blocks, promoted_blocks: copied.
    ///     failed_demotes, failed_promotes: their copy failed or was late.
    ///     disk_dropped: no room on the disk for a demote, or on the host for a promote.
    ///     disk_damaged_blocks: dropped from the disk because their promote failed or was late.
    ///     disk_evicted_blocks: evicted from the disk for room.
    ///     claimed_blocks: added because a shared store has them.
    ///
    /// Counter, in tokens:
    ///     disk_hit_tokens: of loads, what the host lacked when the request began to wait.
    ///
    /// Gauges, in slots:
    ///     disk_resident_blocks: on the disk.
    ///     demoting_blocks, promoting_blocks: in jobs, late ones included.
    fn disk_stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = lock(&self.0).disk_stats();
        disk_stats_dict(py, stats)
    }

    /// Return the disk tier's events since the last call; none without `events=True`.
    ///
    /// Blocks of `claim` have none, because another server may have put them into the store.
    fn take_disk_events<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let (events, width) = {
            let mut scheduler = lock(&self.0);
            (scheduler.take_disk_events(), scheduler.hash_width())
        };
        events_to_py(py, events, "STORAGE", width)
    }
}

/// Plans a job of the core: `demote` or `promote`.
type Plan = fn(
    &mut offload::OffloadScheduler,
    usize,
    Option<f64>,
) -> error::Result<Option<offload::TierJob>>;

impl OffloadScheduler {
    fn plan(
        &self,
        py: Python<'_>,
        plan: Plan,
        max_blocks: Option<Count>,
        deadline: Option<f64>,
    ) -> PyResult<Option<TierJob>> {
        check_time("deadline", deadline)?;
        let max_blocks = max_blocks.map_or(usize::MAX, |count| count.0);
        let (job, width) = {
            let mut scheduler = lock(&self.0);
            let job = plan(&mut scheduler, max_blocks, deadline);
            (job.map_err(to_py)?, scheduler.hash_width())
        };
        job.map(|job| to_tier_job(py, job, width)).transpose()
    }
}

fn groups(given: &Bound<'_, PyAny>) -> PyResult<Vec<GroupId>> {
    counts(given, "groups")?.into_iter().map(|group| group_id(Count(group))).collect()
}

/// The hash before each block, all as wide as the blocks' own; nothing for no parents at all.
fn parents(given: Option<&Bound<'_, PyAny>>, width: HashWidth) -> PyResult<Vec<Option<BlockHash>>> {
    let Some(given) = given else { return Ok(Vec::new()) };
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
