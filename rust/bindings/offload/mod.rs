//! `OffloadScheduler`: one class, whose docstrings are most of this file. `values` and `disk` convert
//! what only this class takes and returns.
//!
//! May import: convert, error, event, group, job, ledger, lock, pool.

mod disk;
mod values;

use kvstow_core::ids::JobId;
use kvstow_core::key::{BlockKey, Hashes};
use kvstow_core::offload::{self, DiskMode, OffloadConfig, Progress};
use kvstow_core::pool::MAX_BLOCKS;
use numpy::{IntoPyArray, PyArray1};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};

use crate::convert::{
    Count, Name, RequestId, as_strs, counts, group_id, ids, job_id, listed, listed_or_none, named,
    request_ids,
};
use crate::error::{ConfigError, to_py};
use crate::event::events_to_py;
use crate::group::groups;
use crate::hashes::{hashes_before, hashes_of_blocks};
use crate::job::{Job, JobEnd, KeyColumns, TierJob, event_to_py, to_end, to_job};
use crate::ledger::BlockLedger;
use crate::lock::{Mutex, detached, lock};
use crate::pool::SharedPool;

use disk::Way;
use values::{AnyPool, Outcome, check_time, disk_stats_dict, new_hashes, parts, stats_dict};

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

    /// Lazy mode: forget what was computed into device blocks that will be overwritten.
    ///
    /// Name all blocks of an allocation before their request runs. A pool may publish a block's
    /// hash when it grants the block. If the request then leaves before its step has run, the
    /// scheduler would store a block that was never computed. In eager mode this does nothing.
    /// The targets of `load` need no call.
    fn invalidate(&self, block_ids: &Bound<'_, PyAny>) -> PyResult<()> {
        let block_ids = ids(block_ids, MAX_BLOCKS)?;
        lock(&self.0).invalidate(&block_ids).map_err(to_py)
    }

    /// Return the number of tokens after the local hit that the host can serve, and pin them.
    ///
    /// The slots stay pinned until `load`, `release`, `finish`, `reset` or the next `lookup` of
    /// this request.
    ///
    /// Args:
    ///     request_id: the request.
    ///     num_local_tokens: tokens of the local hit.
    ///     max_tokens: upper bound for the whole request, the local hit included.
    ///     promote: whether to wait for blocks that only the disk tier has. Pass False once the
    ///         request has waited long enough: it goes on with what the host has.
    ///
    /// Returns:
    ///     The number of tokens. None means pending. Either another request is loading some of the
    ///     blocks, and they are a local hit once that job has ended. Or the disk tier has blocks
    ///     that the host lacks: call `promote`, and ask again after its job has ended. A request
    ///     has blocks promoted once, until `finish` or `restart`. Nothing is pinned while a request
    ///     waits.
    ///
    /// Raises:
    ///     ConfigError: `num_local_tokens` is not a multiple of the block size that all groups have
    ///         in common.
    #[pyo3(signature = (request_id, num_local_tokens, max_tokens, *, promote = true))]
    fn lookup(
        &self,
        request_id: RequestId,
        num_local_tokens: Count,
        max_tokens: Count,
        promote: bool,
    ) -> PyResult<Option<usize>> {
        let mut scheduler = lock(&self.0);
        let (num_local_tokens, max_tokens) = (num_local_tokens.0, max_tokens.0);
        let num_tokens = if promote {
            scheduler.lookup_below(&request_id, num_local_tokens, max_tokens)
        } else {
            scheduler.lookup(&request_id, num_local_tokens, max_tokens)
        };
        num_tokens.map_err(to_py)
    }

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
        disk::plan(py, &self.0, Way::Demote, max_blocks, deadline)
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
        disk::plan(py, &self.0, Way::Promote, max_blocks, deadline)
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
        disk::adopt(&self.0, slots, hashes, groups, parents)
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
    fn unsaved(&self, py: Python<'_>, max_blocks: Count) -> PyResult<disk::UnsavedColumns> {
        disk::unsaved(py, &self.0, max_blocks.0)
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
        disk::unclaimed(py, &self.0, &request_id, local, most, max_blocks.0)
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
        disk::claim(&self.0, hashes, groups, parents)
    }

    /// Return the tokens of the prefix whose full-attention blocks the last `lookup` found.
    ///
    /// The local hit is part of it. Where it is longer than the hit, a window or a state that the
    /// host lacks has shortened the hit. It is 0 without full attention.
    ///
    /// Args:
    ///     request_id: the request.
    fn full_attention_hit(&self, request_id: RequestId) -> PyResult<usize> {
        lock(&self.0).full_attention_hit(&request_id).map_err(to_py)
    }

    /// Load the first `num_tokens` of what `lookup` found, and unpin the rest.
    ///
    /// Args:
    ///     request_id: the request.
    ///     num_tokens: tokens to load, a multiple of the common block size.
    ///     block_ids: per group, the device blocks to fill, in order. Pass what
    ///         `BlockLedger.allocate` took for these external tokens. A group that skips blocks
    ///         loads only those that the token after the load reads.
    ///     local_ids: per group, the device blocks of the local hit. With them all blocks of the
    ///         hit count as reported, and the next `store` takes those after them. So call
    ///         `restart` if the load fails. For models of full attention alone. None: the next
    ///         `store` takes all.
    ///     deadline: when `expire` fails the job, on the caller's clock.
    ///
    /// Raises:
    ///     StateError: `lookup` has found nothing to load. Or the load is shorter than what was
    ///         found, and the host lacks the window before its end. Or the request has reported
    ///         other blocks for these tokens. With `local_ids`, also if blocks were reported
    ///         before, or in a model with windows or states.
    ///     ConfigError: 0 tokens, more than were found, a number that is not a multiple of the
    ///         block size, or another number of blocks.
    ///     InvalidBlock: a repeated or null block.
    #[pyo3(signature = (request_id, num_tokens, block_ids, *, local_ids = None, deadline = None))]
    fn load(
        &self,
        py: Python<'_>,
        request_id: RequestId,
        num_tokens: Count,
        #[pyo3(from_py_with = listed)] block_ids: Vec<Bound<'_, PyAny>>,
        #[pyo3(from_py_with = listed_or_none)] local_ids: Option<Vec<Bound<'_, PyAny>>>,
        deadline: Option<f64>,
    ) -> PyResult<Job> {
        check_time("deadline", deadline)?;
        let ids_of = |groups: Vec<Bound<'_, PyAny>>| {
            groups.iter().map(|group| ids(group, MAX_BLOCKS)).collect::<PyResult<Vec<_>>>()
        };
        let (block_ids, local_ids) = (ids_of(block_ids)?, local_ids.map(ids_of).transpose()?);
        let (mut scheduler, num_tokens) = (lock(&self.0), num_tokens.0);
        let job = match local_ids {
            None => scheduler.load(&request_id, num_tokens, &block_ids, deadline),
            Some(local_ids) => {
                scheduler.load_reported(&request_id, num_tokens, &local_ids, &block_ids, deadline)
            }
        };
        drop(scheduler);
        Ok(to_job(py, job.map_err(to_py)?, &block_ids.concat()))
    }

    /// Unpin what a request's lookup holds, because none of it is loaded.
    fn release(&self, request_id: RequestId) -> PyResult<()> {
        lock(&self.0).release(&request_id).map_err(to_py)
    }

    /// Plan the stores that a finished step has made due, all in one job.
    ///
    /// Name every request in which a block became full. Call this before the ledger's next
    /// allocation, because that allocation frees blocks that have left a window.
    ///
    /// Args:
    ///     request_ids: the requests.
    ///     num_computed_tokens: per request, tokens whose KV earlier steps have written.
    ///     block_ids: the device ids appended to each request's block table since you last named it
    ///         here, request by request and group by group. Include the blocks of hits and loads,
    ///         and 0 where a group skips a block.
    ///     offsets: where each (request, group) begins in `block_ids`, as in
    ///         `StepAllocation.offsets`: `len(request_ids) * num_groups + 1` entries.
    ///     new_hashes: per request, hashes to append first, as `extend` does; None for no hashes.
    ///     max_blocks: the most blocks that the job may have; None for no limit.
    ///     deadline: when `expire` fails the job, on the caller's clock.
    ///
    /// Returns:
    ///     The job, or None if there is nothing to store. Keys on the host or in flight are not
    ///     stored again. If slots are short, the first blocks of a full-attention group are stored
    ///     and the last blocks of a window. The others count as dropped. `max_blocks` leaves out
    ///     the same blocks, and they count as throttled. A full-attention block that was left out
    ///     is due again when its request is next named.
    #[pyo3(signature = (
        request_ids, num_computed_tokens, block_ids, offsets, *, new_hashes = None,
        max_blocks = None, deadline = None
    ))]
    #[expect(clippy::too_many_arguments, reason = "columns of one table")]
    fn store(
        &self,
        request_ids: &Bound<'_, PyAny>,
        num_computed_tokens: &Bound<'_, PyAny>,
        block_ids: &Bound<'_, PyAny>,
        offsets: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = listed_or_none)] new_hashes: Option<Vec<Bound<'_, PyAny>>>,
        max_blocks: Option<Count>,
        deadline: Option<f64>,
    ) -> PyResult<Option<Job>> {
        check_time("deadline", deadline)?;
        let py = request_ids.py();
        let request_ids = self::request_ids(request_ids)?;
        let (names, computed) =
            (as_strs(&request_ids)?, counts(num_computed_tokens, "num_computed_tokens")?);
        let (block_ids, offsets) = (ids(block_ids, MAX_BLOCKS)?, counts(offsets, "offsets")?);
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
        let new_hashes = self::new_hashes(new_hashes, names.len(), || self.hash_block_size())?;
        let parts = parts(&block_ids, &offsets)?;
        let progress = names.into_iter().zip(computed).zip(parts.chunks_exact(num_groups)).map(
            |((request_id, num_computed_tokens), new_blocks)| Progress {
                request_id,
                num_computed_tokens,
                new_blocks,
            },
        );
        let max_blocks = max_blocks.map_or(usize::MAX, |count| count.0);
        let job = lock(&self.0).extend_and_store(&new_hashes, max_blocks, progress, deadline);
        Ok(job.map_err(to_py)?.map(|job| to_job(py, job, &block_ids)))
    }

    /// Plan the stores that a finished step has made due, with the block tables of `ledger`.
    ///
    /// As `store`, but the scheduler reads the tables, and the hashes that the requests have got
    /// since, from the ledger. It looks further only at requests in which a block became full, so
    /// you may name all requests of the step. Call this before the ledger's next allocation.
    ///
    /// Args:
    ///     ledger: the device's ledger, of the same groups, with the same requests and hashes.
    ///     request_ids: the requests.
    ///     num_computed_tokens: per request, tokens whose KV earlier steps have written.
    ///     max_blocks: as for `store`.
    ///     deadline: when `expire` fails the job, on the caller's clock.
    ///
    /// Raises:
    ///     ConfigError: a ledger of other groups, lists of unequal length, a request that is named
    ///         twice, or more tokens than were granted.
    ///     StateError: a request has other hashes in the ledger.
    #[pyo3(
        signature = (
            ledger, request_ids, num_computed_tokens, *, max_blocks = None, deadline = None
        )
    )]
    fn store_step(
        &self,
        ledger: &BlockLedger,
        request_ids: &Bound<'_, PyAny>,
        num_computed_tokens: &Bound<'_, PyAny>,
        max_blocks: Option<Count>,
        deadline: Option<f64>,
    ) -> PyResult<Option<Job>> {
        check_time("deadline", deadline)?;
        let py = request_ids.py();
        let request_ids = self::request_ids(request_ids)?;
        let (names, computed) =
            (as_strs(&request_ids)?, counts(num_computed_tokens, "num_computed_tokens")?);
        if names.len() != computed.len() {
            return Err(ConfigError::new_err(format!(
                "{} requests and {} numbers of computed tokens: give one number per request",
                names.len(),
                computed.len()
            )));
        }
        let max_blocks = max_blocks.map_or(usize::MAX, |count| count.0);
        let computed = names.into_iter().zip(computed);
        let job =
            ledger.with(|ledger| lock(&self.0).store_step(max_blocks, ledger, computed, deadline));
        Ok(job.map_err(to_py)?.map(|job| to_job(py, job, &[])))
    }

    /// Lazy mode: plan the stores of blocks that `pool` will evict next.
    ///
    /// Stores what was reported to `store` as computed and is not on the host. The pool's queue
    /// stays as it is. Call it after each step.
    ///
    /// Args:
    ///     pool: the device's pool.
    ///     num_blocks: how many blocks of its free queue to look at. Cover what the next step may
    ///         take: its tokens, and loads that may begin.
    ///     deadline: when `expire` fails the job, on the caller's clock.
    ///
    /// Raises:
    ///     StateError: the scheduler is in eager mode.
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
        Ok(job.map_err(to_py)?.map(|job| to_job(py, job, &[])))
    }

    /// As `store_evictable`, for a pool of another library.
    ///
    /// Args:
    ///     block_ids: free blocks, the next to be evicted first.
    ///     hashes: the hash of each block.
    ///     group: the group of these blocks.
    ///     suffix_bytes: bytes at the end of each of `hashes` that are not part of it.
    ///     deadline: when `expire` fails the job, on the caller's clock.
    #[pyo3(
        signature = (
            block_ids, hashes, *, group = Count(0), suffix_bytes = Count(0), deadline = None
        ),
        text_signature = "($self, block_ids, hashes, *, group=0, suffix_bytes=0, deadline=None)"
    )]
    fn store_candidates(
        &self,
        block_ids: &Bound<'_, PyAny>,
        hashes: &Bound<'_, PyAny>,
        group: Count,
        suffix_bytes: Count,
        deadline: Option<f64>,
    ) -> PyResult<Option<Job>> {
        check_time("deadline", deadline)?;
        let py = block_ids.py();
        let block_ids = ids(block_ids, MAX_BLOCKS)?;
        let hashes = hashes_before(hashes, suffix_bytes.0)?;
        if block_ids.len() != hashes.len() {
            return Err(ConfigError::new_err(format!(
                "{} blocks and {} hashes: give one hash per block",
                block_ids.len(),
                hashes.len()
            )));
        }
        let group = group_id(group)?;
        let keys = hashes.as_slice().iter().map(|&hash| BlockKey { hash, group });
        let candidates = block_ids.iter().copied().zip(keys);
        let job = lock(&self.0).store_evictable(candidates, deadline);
        Ok(job.map_err(to_py)?.map(|job| to_job(py, job, &block_ids)))
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
        stats_dict(py, lock(&self.0).stats())
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
        disk_stats_dict(py, lock(&self.0).disk_stats())
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
