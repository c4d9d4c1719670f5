//! Lookups and loads.

use kvstow_core::pool::MAX_BLOCKS;
use pyo3::prelude::*;

use crate::convert::{Count, RequestId, ids, listed, listed_or_none};
use crate::error::to_py;
use crate::job::{Job, to_job};
use crate::lock::lock;

use super::OffloadScheduler;
use super::values::check_time;

#[pymethods]
impl OffloadScheduler {
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
}
