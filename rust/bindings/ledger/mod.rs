//! `BlockLedger`, what its methods take (`arguments`), and what they return (`allocation`).
//!
//! May import: convert, error, group, hash, hashes, lock, pool.

mod allocation;
mod arguments;

pub(crate) use allocation::{PrefixHit, StepAllocation};

use std::sync::Arc;

use kvstow_core::ledger::{self, AllocateArgs, MAX_TOKENS, NewIds};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};

use crate::convert::{Count, Int32Array, Name, RequestId, as_strs, named, request_ids, to_array};
use crate::error::to_py;
use crate::group::groups;
use crate::hash::extra_keys_to_py;
use crate::hashes::{Hashes, hashes_of_blocks};
use crate::lock::{self, Mutex, detached, lock};
use crate::pool::LedgerPool;

use allocation::per_group;
use arguments::{Known, context, counts_for, new_ids, publish_from_py};

/// The accounting of a device: requests, their block tables, and the prefixes they share.
///
/// Args:
///     num_blocks: number of blocks in the pool, the null block included. All groups take their
///         blocks from this pool.
///     groups: the model's groups of layers.
///     publish: when lookups can find the key of a full block. "granted": when `allocate` gives
///         the block its slots, as in vLLM. So requests of one step share what this step
///         computes. If a step is dropped, report it with `free(num_computed_tokens=...)`.
///         "computed": when `cache` or `cache_step` reports the block's tokens. So no lookup finds
///         a block that was never computed.
///     max_in_flight_tokens: the most in-flight tokens of a request. Pass the token budget of a
///         step, times the number of steps that overlap. With it, `must_fit_tokens` counts for a
///         window or a chunk only what a request holds at once. Without it, `must_fit_tokens`
///         counts all tokens.
///     events: whether the ledger records events for `LedgerPool.take_events`.
///
/// Raises:
///     ConfigError: no groups, block sizes whose common multiple exceeds 2**30, or a number of
///         blocks that `BlockPool` refuses.
#[pyclass(module = "kvstow", frozen)]
pub(crate) struct BlockLedger(Arc<Mutex<ledger::BlockLedger>>);

#[pymethods]
impl BlockLedger {
    #[new]
    #[pyo3(
        signature = (
            num_blocks, groups, *, publish = None, max_in_flight_tokens = None, events = false,
        ),
        text_signature = "(num_blocks, groups, *, publish='granted', max_in_flight_tokens=None, \
            events=False)"
    )]
    fn new(
        #[pyo3(from_py_with = named::num_blocks)] num_blocks: Count,
        groups: &Bound<'_, PyAny>,
        publish: Option<Name>,
        #[pyo3(from_py_with = named::max_in_flight_tokens)] max_in_flight_tokens: Option<Count>,
        events: bool,
    ) -> PyResult<Self> {
        let (groups, max_in_flight) = (self::groups(groups)?, max_in_flight_tokens.map(|n| n.0));
        let ledger = ledger::BlockLedger::new(num_blocks.0, groups, max_in_flight, events);
        let ledger = ledger.map_err(to_py)?.with_publish(publish_from_py(publish)?);
        Ok(Self(Arc::new(Mutex::new(ledger))))
    }

    /// The pool that all groups take their blocks from.
    #[getter]
    fn pool(&self) -> LedgerPool {
        LedgerPool(Arc::clone(&self.0))
    }

    /// Number of groups.
    #[getter]
    fn num_groups(&self) -> usize {
        lock(&self.0).model().groups().len()
    }

    /// Tokens per hash: the greatest common divisor of the groups' block sizes.
    #[getter]
    fn hash_block_size(&self) -> usize {
        lock(&self.0).model().hash_block_size()
    }

    /// Hits end at its multiples: the least common multiple of the groups' block sizes.
    #[getter]
    fn hit_block_size(&self) -> usize {
        lock(&self.0).model().hit_block_size()
    }

    /// Number of requests that were added and not freed.
    #[getter]
    fn num_requests(&self) -> usize {
        lock(&self.0).num_requests()
    }

    /// Add a request.
    ///
    /// Args:
    ///     request_id: a new id.
    ///     hashes: the hashes of its full blocks so far.
    ///     tokens: token ids for events: those of the hashed blocks. Those of a last block that is
    ///         not full may follow, and are dropped. They need `events=True`.
    ///     extra_keys: extra keys for events, one entry per hash. They need `events=True`.
    ///
    /// Raises:
    ///     StateError: the ledger has a request of this id.
    #[pyo3(signature = (request_id, hashes, *, tokens = None, extra_keys = None))]
    fn add(
        &self,
        request_id: RequestId,
        hashes: &Bound<'_, PyAny>,
        tokens: Option<&Bound<'_, PyAny>>,
        extra_keys: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let hashes = hashes_of_blocks(hashes, || self.hash_block_size())?;
        let context = context(tokens, extra_keys)?;
        lock(&self.0).add(&request_id, &hashes, context).map_err(to_py)
    }

    /// Append the hashes of blocks that generated tokens have filled.
    ///
    /// They continue the request's last hash, which `hash_tokens` takes as `parent`.
    ///
    /// Args:
    ///     request_id: a request that was added.
    ///     hashes: the hashes of the new blocks.
    ///     tokens: the tokens of these blocks alone, if the request was added with tokens.
    ///     extra_keys: the extra keys of these blocks, for events.
    ///
    /// Raises:
    ///     ConfigError: hashes that are known to continue another block, or none, or tokens of
    ///         other blocks than these.
    #[pyo3(signature = (request_id, hashes, *, tokens = None, extra_keys = None))]
    fn extend(
        &self,
        request_id: RequestId,
        hashes: &Bound<'_, PyAny>,
        tokens: Option<&Bound<'_, PyAny>>,
        extra_keys: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let hashes = hashes_of_blocks(hashes, || self.hash_block_size())?;
        let context = context(tokens, extra_keys)?;
        lock(&self.0).extend(&request_id, &hashes, context).map_err(to_py)
    }

    /// Return the longest cached prefix of at most `max_tokens` tokens. Changes nothing.
    ///
    /// Pass `num_tokens - 1`, so that one token is left to compute.
    fn lookup(&self, request_id: RequestId, max_tokens: Count) -> PyResult<PrefixHit> {
        lock(&self.0).lookup(&request_id, max_tokens.0).map(PrefixHit).map_err(to_py)
    }

    /// Grant slots for a hit, external tokens and new tokens, in all groups or in none.
    ///
    /// Args:
    ///     request_id: a request that was added.
    ///     num_new_tokens: tokens to compute in this step, drafts included.
    ///     hit: what `lookup` of this request returned. Only the first allocation takes one.
    ///     num_external_tokens: tokens right after the hit that a tier fills: a multiple of the
    ///         block size within the known hashes. Only the first allocation takes them.
    ///     num_lookahead_tokens: tokens that get slots, but are neither granted nor published.
    ///     delay_caching: publish nothing until `cache`. Until then another `allocate` of this
    ///         request raises `StateError`.
    ///     reserve: refuse unless this many blocks stay free.
    ///     num_in_flight_tokens: granted tokens whose step is not finished.
    ///     must_fit_tokens: refuse unless slots for that many tokens would fit as well.
    ///
    /// Returns:
    ///     The newly allocated block ids per group, without the blocks of the hit. None if the pool
    ///     cannot serve the request. Then the request keeps what it held, except blocks that their
    ///     group no longer reads.
    ///
    /// Raises:
    ///     UnknownRequest: the request was never added, or was freed.
    ///     ConfigError: nothing to grant, or external tokens that are not a multiple of the block
    ///         size or exceed the known hashes.
    ///     StateError: a hit of another request, a hit with a block that has lost its key, a hit
    ///         or external tokens after the first allocation, or a load that has not ended.
    #[pyo3(signature = (
        request_id, num_new_tokens, *, hit = None, num_external_tokens = Count(0),
        num_lookahead_tokens = Count(0), delay_caching = false, reserve = Count(0),
        num_in_flight_tokens = Count(0), must_fit_tokens = None,
    ), text_signature = "($self, request_id, num_new_tokens, *, hit=None, num_external_tokens=0, \
        num_lookahead_tokens=0, delay_caching=False, reserve=0, num_in_flight_tokens=0, \
        must_fit_tokens=None)")]
    #[expect(clippy::too_many_arguments, reason = "the signature that the public names fix")]
    fn allocate<'py>(
        &self,
        py: Python<'py>,
        request_id: RequestId,
        #[pyo3(from_py_with = named::num_new_tokens)] num_new_tokens: Count,
        hit: Option<&Bound<'py, PrefixHit>>,
        #[pyo3(from_py_with = named::num_external_tokens)] num_external_tokens: Count,
        #[pyo3(from_py_with = named::num_lookahead_tokens)] num_lookahead_tokens: Count,
        delay_caching: bool,
        #[pyo3(from_py_with = named::reserve)] reserve: Count,
        #[pyo3(from_py_with = named::num_in_flight_tokens)] num_in_flight_tokens: Count,
        #[pyo3(from_py_with = named::must_fit_tokens)] must_fit_tokens: Option<Count>,
    ) -> PyResult<Option<Bound<'py, PyTuple>>> {
        let args = AllocateArgs {
            num_new_tokens: num_new_tokens.0,
            hit: hit.map(|hit| &hit.get().0),
            num_external_tokens: num_external_tokens.0,
            num_lookahead_tokens: num_lookahead_tokens.0,
            delay_caching,
            reserve: reserve.0,
            num_in_flight_tokens: num_in_flight_tokens.0,
            must_fit_tokens: must_fit_tokens.map(|count| count.0),
        };
        let allocated = lock(&self.0).allocate(&request_id, &args).map_err(to_py)?;
        allocated.map(|allocated| per_group(py, &allocated)).transpose()
    }

    /// Call `allocate` for each request in turn, and stop at the first that does not fit.
    ///
    /// Raises what `allocate` raises, and `ConfigError` for lists of different lengths. Then no
    /// request has got slots.
    #[pyo3(signature = (
        request_ids, num_new_tokens, *, num_lookahead_tokens = Count(0),
        num_in_flight_tokens = Count(0),
    ), text_signature = "($self, request_ids, num_new_tokens, *, num_lookahead_tokens=0, \
        num_in_flight_tokens=0)")]
    fn allocate_step(
        &self,
        request_ids: &Bound<'_, PyAny>,
        num_new_tokens: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = named::num_lookahead_tokens)] num_lookahead_tokens: Count,
        #[pyo3(from_py_with = named::num_in_flight_tokens)] num_in_flight_tokens: Count,
    ) -> PyResult<StepAllocation> {
        let py = request_ids.py();
        let request_ids = self::request_ids(request_ids)?;
        let names = as_strs(&request_ids)?;
        let tokens = counts_for(&names, num_new_tokens, "num_new_tokens", 1..=MAX_TOKENS)?;
        let wants = names.iter().copied().zip(tokens.iter().copied());
        let allocated = lock(&self.0)
            .allocate_step(wants, num_lookahead_tokens.0, num_in_flight_tokens.0)
            .map_err(to_py)?;
        Ok(StepAllocation::new(py, allocated))
    }

    /// Publish the request's blocks up to `num_tokens` computed tokens.
    ///
    /// This ends a delay that `allocate(delay_caching=True)` began.
    ///
    /// Raises:
    ///     ConfigError: more tokens than were granted.
    fn cache(&self, request_id: RequestId, num_tokens: Count) -> PyResult<()> {
        lock(&self.0).cache(&request_id, num_tokens.0).map_err(to_py)
    }

    /// Publish each request's blocks up to its computed tokens, as `cache` does.
    ///
    /// Call it once for a whole step.
    ///
    /// Raises what `cache` raises, and `ConfigError` for lists of different lengths. Then no
    /// request has published anything.
    fn cache_step(
        &self,
        request_ids: &Bound<'_, PyAny>,
        num_computed_tokens: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let request_ids = self::request_ids(request_ids)?;
        let names = as_strs(&request_ids)?;
        let tokens =
            counts_for(&names, num_computed_tokens, "num_computed_tokens", 0..=MAX_TOKENS)?;
        let computed = names.iter().copied().zip(tokens.iter().copied());
        lock(&self.0).cache_step(computed).map_err(to_py)
    }

    /// Reduce the granted tokens to `num_tokens`, because drafts were rejected. Frees nothing.
    ///
    /// Raises:
    ///     ConfigError: more tokens than were granted.
    ///     StateError: fewer tokens than are published, or blocks that are already freed and
    ///         would be read again.
    fn rewind(&self, request_id: RequestId, num_tokens: Count) -> PyResult<()> {
        lock(&self.0).rewind(&request_id, num_tokens.0).map_err(to_py)
    }

    /// Return the request's block ids. Raises `ConfigError` if the group does not exist.
    #[pyo3(signature = (request_id, group = Count(0)), text_signature = "($self, request_id, group=0)")]
    fn block_table<'py>(
        &self,
        py: Python<'py>,
        request_id: RequestId,
        group: Count,
    ) -> PyResult<Int32Array<'py>> {
        let table = lock(&self.0).block_table(&request_id, group.0).map(<[_]>::to_vec);
        Ok(to_array(py, table.map_err(to_py)?))
    }

    /// Return the fewest blocks that slots for `num_tokens` tokens take.
    ///
    /// Blocks that their group no longer reads after `num_computed_tokens` computed tokens do not
    /// count. A pool with fewer usable blocks can never grant these slots, even if it is empty.
    fn min_blocks(&self, num_tokens: Count, num_computed_tokens: Count) -> usize {
        lock(&self.0).min_blocks(num_tokens.0, num_computed_tokens.0)
    }

    /// Return the number of blocks that `must_fit_tokens=num_tokens` counts.
    fn blocks_to_fit(&self, num_tokens: Count) -> usize {
        lock(&self.0).blocks_to_fit(num_tokens.0)
    }

    /// Return the number of tokens with slots: hit, external and new ones, less rewound ones.
    fn num_granted_tokens(&self, request_id: RequestId) -> PyResult<usize> {
        lock(&self.0).num_granted_tokens(&request_id).map_err(to_py)
    }

    /// Return the number of hashes that `add` and `extend` gave for the request.
    fn num_hashes(&self, request_id: RequestId) -> PyResult<usize> {
        lock(&self.0).num_hashes(&request_id).map_err(to_py)
    }

    /// Drop the request and its references, in each group from the tail on.
    ///
    /// Args:
    ///     request_id: a request that finished, was preempted or was aborted.
    ///     num_computed_tokens: the tokens whose KV exists, if a step was never computed. The
    ///         request's own blocks beyond them lose their keys. Blocks that it hit keep theirs.
    ///         None: all granted tokens were computed.
    ///
    /// Returns:
    ///     The other requests whose tables hold one of these uncomputed blocks. Free them too, and
    ///     recompute them. The list is empty with `publish="computed"`, because no request can hit
    ///     such a block.
    ///
    /// Raises:
    ///     UnknownRequest: the request was never added, or was freed.
    ///     ConfigError: more computed tokens than were granted.
    #[pyo3(signature = (request_id, *, num_computed_tokens = None))]
    fn free(
        &self,
        request_id: RequestId,
        num_computed_tokens: Option<Count>,
    ) -> PyResult<Vec<String>> {
        let num_computed = num_computed_tokens.map(|count| count.0);
        lock(&self.0).free(&request_id, num_computed).map_err(to_py)
    }

    /// Free the request's blocks, as `free` does, and keep it added with its hashes.
    ///
    /// Call it when you preempt a request, or when its load failed. It takes and returns what
    /// `free` takes and returns. A hit from before is stale.
    #[pyo3(signature = (request_id, *, num_computed_tokens = None))]
    fn restart(
        &self,
        request_id: RequestId,
        num_computed_tokens: Option<Count>,
    ) -> PyResult<Vec<String>> {
        let num_computed = num_computed_tokens.map(|count| count.0);
        lock(&self.0).restart(&request_id, num_computed).map_err(to_py)
    }

    /// Return the ids of all requests that were added and not freed, in no order.
    fn request_ids(&self) -> Vec<String> {
        lock(&self.0).request_ids().map(str::to_owned).collect()
    }

    /// Return the request's hashes.
    fn hashes(&self, request_id: RequestId) -> PyResult<Hashes> {
        let hashes = lock(&self.0).hashes(&request_id).map_err(to_py)?;
        Ok(Hashes::of(hashes, Some(self.hash_block_size())))
    }

    /// Return the request's hashes, and its tokens and extra keys if they were given for events.
    ///
    /// The extra keys of a block are a tuple, whatever sequence `add` or `extend` got.
    fn known<'py>(&self, py: Python<'py>, request_id: RequestId) -> PyResult<Known<'py>> {
        let (hashes, context) = lock(&self.0).known(&request_id).map_err(to_py)?;
        let keys = context.extra_keys.map(|keys| extra_keys_to_py(py, &keys)).transpose()?;
        Ok((Hashes::of(hashes, Some(self.hash_block_size())), context.tokens, keys))
    }

    /// Return the ledger as bytes for `restore`, with a version and a checksum.
    ///
    /// The bytes hold the requests, their tables up to the granted tokens, and the keys of the
    /// blocks in these tables. They do not hold lookahead slots, pins, events, or the keys of
    /// blocks without references.
    ///
    /// Args:
    ///     blocks: False leaves out tables and keys, as if no request had got slots.
    #[pyo3(signature = (*, blocks = true))]
    fn snapshot<'py>(&self, py: Python<'py>, blocks: bool) -> Bound<'py, PyBytes> {
        let snapshot = detached(py, &self.0, |ledger| ledger.snapshot(blocks));
        PyBytes::new(py, &snapshot)
    }

    /// Fill this new ledger from a snapshot of another ledger.
    ///
    /// Args:
    ///     snapshot: what `snapshot` of a ledger with equal groups returned. A ledger without
    ///         events ignores tokens and extra keys.
    ///     block_ids: "same", or "packed": 1, 2, 3 and so on, in the order in which the tables name
    ///         the blocks, request by request. Or the ids to take in that order, at least one for
    ///         each block.
    ///
    /// Returns:
    ///     The old ids of the restored blocks, ascending, and their new ids.
    ///
    /// Raises:
    ///     SnapshotError: not a kvstow snapshot, or one that is damaged, truncated, of another
    ///         version or of other groups.
    ///     OutOfBlocks: the pool has fewer blocks than the snapshot holds.
    ///     ConfigError: the pool lacks the ids of "same", although "packed" would fit; or too few
    ///         ids were given.
    ///     InvalidBlock: an id outside the pool, the null block, or an id that was given twice.
    ///     StateError: this ledger is not new.
    #[pyo3(
        signature = (snapshot, *, block_ids = None),
        text_signature = "($self, snapshot, *, block_ids='same')"
    )]
    fn restore<'py>(
        &self,
        py: Python<'py>,
        snapshot: &[u8],
        block_ids: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<(Int32Array<'py>, Int32Array<'py>)> {
        let ids = block_ids.map_or(Ok(NewIds::Same), new_ids)?;
        let moves = detached(py, &self.0, |ledger| {
            let restored = ledger.clone().restore(snapshot, ids)?;
            *ledger = restored.ledger;
            Ok(restored.moves)
        });
        let (old, new): (Vec<_>, Vec<_>) = moves.map_err(to_py)?.into_iter().unzip();
        Ok((to_array(py, old), to_array(py, new)))
    }

    /// Verify every invariant of ledger and pool. Raises `StateError` if one is broken.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        detached(py, &self.0, |ledger| ledger.check()).map_err(to_py)
    }
}

impl BlockLedger {
    /// Locks, and lets `call` read.
    pub(crate) fn with<R>(&self, call: impl FnOnce(&ledger::BlockLedger) -> R) -> R {
        lock::with(&self.0, |ledger| call(ledger))
    }
}
