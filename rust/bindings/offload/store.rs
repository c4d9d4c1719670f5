//! Stores, eager and lazy.

use kvstow_core::key::BlockKey;
use kvstow_core::offload::Progress;
use kvstow_core::pool::MAX_BLOCKS;
use pyo3::prelude::*;

use crate::convert::{Count, as_strs, counts, group_id, ids, listed_or_none, request_ids};
use crate::error::{ConfigError, to_py};
use crate::hashes::hashes_before;
use crate::job::{Job, to_job};
use crate::ledger::BlockLedger;
use crate::lock::lock;
use crate::pool::SharedPool;

use super::OffloadScheduler;
use super::values::{AnyPool, check_time, new_hashes, parts};

#[pymethods]
impl OffloadScheduler {
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
    ///     StateError: a request has other hashes in the ledger, or has started over only there.
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
}
