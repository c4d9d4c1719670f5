//! `BlockLedger`, its view of its pool, and what its methods return.

use std::sync::{Arc, Mutex};

use kvstow_core::ids::BlockId;
use kvstow_core::ledger::{self, AllocateArgs, Context, NewIds, Publish, Taken};
use kvstow_core::pool::{self, MAX_BLOCKS};
use numpy::{IntoPyArray, PyArray1};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyString, PyTuple};

use crate::convert::{Count, Name, RequestId, as_strs, counts, hashes, ids, request_ids, to_array};
use crate::error::{ConfigError, to_py};
use crate::group::groups;
use crate::hash::{extra_keys_from_py, extra_keys_to_py, tokens_from_py};
use crate::pool::SharedPool;
use crate::{detached, lock};

type Shared = Arc<Mutex<ledger::BlockLedger>>;
type Ids<'py> = Bound<'py, PyArray1<i32>>;

/// What `BlockLedger.lookup` found. Using it in `allocate` is what takes references.
#[pyclass(module = "kvstow", frozen)]
pub(crate) struct PrefixHit(ledger::PrefixHit);

#[pymethods]
impl PrefixHit {
    #[getter]
    fn num_tokens(&self) -> usize {
        self.0.num_tokens
    }

    #[getter]
    fn blocks<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.0.blocks.iter().map(|ids| to_array(py, ids.iter().copied())))
    }

    fn __repr__(&self) -> String {
        format!("PrefixHit(num_tokens={})", self.0.num_tokens)
    }
}

/// What `BlockLedger.allocate_step` took.
#[pyclass(module = "kvstow", frozen, get_all)]
pub(crate) struct StepAllocation {
    num_granted: usize,
    ids: Py<PyArray1<i32>>,
    offsets: Py<PyArray1<i32>>,
}

/// A view of a ledger's pool: what a caller may do besides what the ledger does.
#[pyclass(module = "kvstow", frozen)]
pub(crate) struct LedgerPool(Shared);

impl SharedPool for LedgerPool {
    fn with<R>(&self, call: impl FnOnce(&mut pool::BlockPool) -> R) -> R {
        call(lock(&self.0).pool_mut())
    }

    fn with_detached<R: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut pool::BlockPool) -> R + Send,
    ) -> R {
        detached(py, &self.0, |ledger| call(ledger.pool_mut()))
    }
}

#[pymethods]
impl LedgerPool {
    #[getter]
    fn num_blocks(&self) -> usize {
        self.with(|pool| pool.num_blocks())
    }

    #[getter]
    fn num_free(&self) -> usize {
        self.with(|pool| pool.num_free())
    }

    #[getter]
    fn num_cached(&self) -> usize {
        self.with(|pool| pool.num_cached())
    }

    #[getter]
    fn num_evicted(&self) -> usize {
        self.with(|pool| pool.num_evicted())
    }

    /// As `BlockPool.pin`.
    fn pin(&self, ids: &Bound<'_, PyAny>) -> PyResult<()> {
        self.with_ids(ids, pool::BlockPool::pin)
    }

    /// As `BlockPool.unpin`.
    fn unpin(&self, ids: &Bound<'_, PyAny>) -> PyResult<()> {
        self.with_ids(ids, pool::BlockPool::unpin)
    }

    /// As `BlockPool.evict`.
    fn evict(&self, ids: &Bound<'_, PyAny>) -> PyResult<()> {
        self.with_ids(ids, pool::BlockPool::evict)
    }

    /// As `BlockPool.reset`.
    fn reset(&self, py: Python<'_>) -> bool {
        self.with_detached(py, pool::BlockPool::reset)
    }

    /// As `BlockPool.ref_counts`.
    fn ref_counts<'py>(&self, ids: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyArray1<i32>>> {
        self.ref_counts_of(ids)
    }

    /// As `BlockPool.pin_counts`.
    fn pin_counts<'py>(&self, ids: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyArray1<i32>>> {
        self.pin_counts_of(ids)
    }

    /// As `BlockPool.free_order`.
    fn free_order<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        self.free_order_in(py)
    }

    /// As `BlockPool.take_events`.
    fn take_events<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        self.events_in(py)
    }
}

/// A device's accounting: requests, their block tables, and the prefixes they share.
#[pyclass(module = "kvstow", frozen)]
pub(crate) struct BlockLedger(Shared);

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
        num_blocks: Count,
        groups: Vec<Bound<'_, PyAny>>,
        publish: Option<Name>,
        max_in_flight_tokens: Option<Count>,
        events: bool,
    ) -> PyResult<Self> {
        let (groups, max_in_flight) = (self::groups(&groups)?, max_in_flight_tokens.map(|n| n.0));
        let ledger = ledger::BlockLedger::new(num_blocks.0, groups, max_in_flight, events);
        let ledger = ledger.map_err(to_py)?.with_publish(publish_from_py(publish)?);
        Ok(Self(Arc::new(Mutex::new(ledger))))
    }

    #[getter]
    fn pool(&self) -> LedgerPool {
        LedgerPool(Arc::clone(&self.0))
    }

    #[getter]
    fn num_groups(&self) -> usize {
        lock(&self.0).model().groups().len()
    }

    #[getter]
    fn hash_block_size(&self) -> usize {
        lock(&self.0).model().hash_block_size()
    }

    #[getter]
    fn hit_block_size(&self) -> usize {
        lock(&self.0).model().hit_block_size()
    }

    #[getter]
    fn num_requests(&self) -> usize {
        lock(&self.0).num_requests()
    }

    /// Make a request known, with the hashes of its blocks known so far.
    #[pyo3(signature = (request_id, hashes, *, tokens = None, extra_keys = None))]
    fn add(
        &self,
        request_id: RequestId,
        hashes: &Bound<'_, PyAny>,
        tokens: Option<&Bound<'_, PyAny>>,
        extra_keys: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let (hashes, context) = (self::hashes(hashes)?, context(tokens, extra_keys)?);
        lock(&self.0).add(&request_id, &hashes, context).map_err(to_py)
    }

    /// Append hashes as generated tokens fill blocks.
    #[pyo3(signature = (request_id, hashes, *, tokens = None, extra_keys = None))]
    fn extend(
        &self,
        request_id: RequestId,
        hashes: &Bound<'_, PyAny>,
        tokens: Option<&Bound<'_, PyAny>>,
        extra_keys: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let (hashes, context) = (self::hashes(hashes)?, context(tokens, extra_keys)?);
        lock(&self.0).extend(&request_id, &hashes, context).map_err(to_py)
    }

    /// The longest cached prefix of at most `max_tokens` tokens; changes nothing.
    fn lookup(&self, request_id: RequestId, max_tokens: Count) -> PyResult<PrefixHit> {
        lock(&self.0).lookup(&request_id, max_tokens.0).map(PrefixHit).map_err(to_py)
    }

    /// Grant slots for a hit, external tokens and new tokens, for every group or for none.
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
        num_new_tokens: Count,
        hit: Option<&Bound<'py, PrefixHit>>,
        num_external_tokens: Count,
        num_lookahead_tokens: Count,
        delay_caching: bool,
        reserve: Count,
        num_in_flight_tokens: Count,
        must_fit_tokens: Option<Count>,
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
        let taken = lock(&self.0).allocate(&request_id, &args).map_err(to_py)?;
        taken.map(|taken| per_group(py, &taken)).transpose()
    }

    /// As if `allocate` were called for each in turn; stops at the first that does not fit.
    #[pyo3(signature = (
        request_ids, num_new_tokens, *, num_lookahead_tokens = Count(0),
        num_in_flight_tokens = Count(0),
    ), text_signature = "($self, request_ids, num_new_tokens, *, num_lookahead_tokens=0, \
        num_in_flight_tokens=0)")]
    fn allocate_step(
        &self,
        request_ids: &Bound<'_, PyAny>,
        num_new_tokens: &Bound<'_, PyAny>,
        num_lookahead_tokens: Count,
        num_in_flight_tokens: Count,
    ) -> PyResult<StepAllocation> {
        let py = request_ids.py();
        let request_ids = self::request_ids(request_ids)?;
        let names = as_strs(&request_ids)?;
        let tokens = counts_for(&names, num_new_tokens, "new")?;
        let wants = names.iter().copied().zip(tokens.iter().copied());
        let taken = lock(&self.0)
            .allocate_step(wants, num_lookahead_tokens.0, num_in_flight_tokens.0)
            .map_err(to_py)?;
        // Taken blocks are each in one table, and so fewer than the pool has: below 2^31.
        let offsets: Vec<i32> =
            taken.offsets.iter().map(|&offset| i32::try_from(offset).unwrap_or(i32::MAX)).collect();
        Ok(StepAllocation {
            num_granted: taken.num_granted,
            ids: to_array(py, taken.ids).unbind(),
            offsets: offsets.into_pyarray(py).unbind(),
        })
    }

    /// Publish this request's blocks up to `num_tokens` computed tokens; ends a delay.
    fn cache(&self, request_id: RequestId, num_tokens: Count) -> PyResult<()> {
        lock(&self.0).cache(&request_id, num_tokens.0).map_err(to_py)
    }

    /// Publish each request's blocks up to its computed tokens, as `cache` does.
    fn cache_step(
        &self,
        request_ids: &Bound<'_, PyAny>,
        num_computed_tokens: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let request_ids = self::request_ids(request_ids)?;
        let names = as_strs(&request_ids)?;
        let tokens = counts_for(&names, num_computed_tokens, "computed")?;
        let computed = names.iter().copied().zip(tokens.iter().copied());
        lock(&self.0).cache_step(computed).map_err(to_py)
    }

    /// Take granted tokens back to this many (rejected drafts); frees nothing.
    fn rewind(&self, request_id: RequestId, num_tokens: Count) -> PyResult<()> {
        lock(&self.0).rewind(&request_id, num_tokens.0).map_err(to_py)
    }

    #[pyo3(signature = (request_id, group = Count(0)), text_signature = "($self, request_id, group=0)")]
    fn block_table<'py>(
        &self,
        py: Python<'py>,
        request_id: RequestId,
        group: Count,
    ) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let table = lock(&self.0).block_table(&request_id, group.0).map(<[_]>::to_vec);
        Ok(to_array(py, table.map_err(to_py)?))
    }

    /// The fewest blocks that slots for `num_tokens` take, `num_computed_tokens` of them computed.
    fn min_blocks(&self, num_tokens: Count, num_computed_tokens: Count) -> usize {
        lock(&self.0).min_blocks(num_tokens.0, num_computed_tokens.0)
    }

    /// The blocks that `must_fit_tokens` counts for so many tokens.
    fn blocks_to_fit(&self, num_tokens: Count) -> usize {
        lock(&self.0).blocks_to_fit(num_tokens.0)
    }

    fn num_granted_tokens(&self, request_id: RequestId) -> PyResult<usize> {
        lock(&self.0).num_granted_tokens(&request_id).map_err(to_py)
    }

    /// Drop the request: its references, each group's tail first, then the request itself.
    #[pyo3(signature = (request_id, *, num_computed_tokens = None))]
    fn free(
        &self,
        request_id: RequestId,
        num_computed_tokens: Option<Count>,
    ) -> PyResult<Vec<String>> {
        let mut ledger = lock(&self.0);
        match num_computed_tokens {
            None => ledger.free(&request_id).map(|()| Vec::new()),
            Some(count) => ledger.free_computed(&request_id, count.0),
        }
        .map_err(to_py)
    }

    /// The ids of the requests that are known.
    fn request_ids(&self) -> Vec<String> {
        lock(&self.0).request_ids().map(str::to_owned).collect()
    }

    /// What a request was made known with: hashes, and for events tokens and extra keys.
    #[expect(clippy::type_complexity, reason = "a tuple, as Python sees it")]
    fn known<'py>(
        &self,
        py: Python<'py>,
        request_id: RequestId,
    ) -> PyResult<(Bound<'py, PyList>, Option<Vec<u64>>, Option<Bound<'py, PyAny>>)> {
        let (hashes, context, width) = {
            let ledger = lock(&self.0);
            let (hashes, context) = ledger.known(&request_id).map_err(to_py)?;
            (hashes.to_vec(), context, ledger.pool().hash_width())
        };
        let hashes =
            PyList::new(py, hashes.iter().map(|hash| PyBytes::new(py, width.digest(hash))))?;
        let keys = context.extra_keys.map(|keys| extra_keys_to_py(py, &keys)).transpose()?;
        Ok((hashes, context.tokens, keys))
    }

    /// The ledger as bytes, for `restore`.
    #[pyo3(signature = (*, blocks = true))]
    fn snapshot<'py>(&self, py: Python<'py>, blocks: bool) -> Bound<'py, PyBytes> {
        let snapshot = detached(py, &self.0, |ledger| ledger.snapshot(blocks));
        PyBytes::new(py, &snapshot)
    }

    /// Fill this ledger, which must be new, from a snapshot; returns its blocks' old and new ids.
    #[pyo3(
        signature = (snapshot, *, block_ids = None),
        text_signature = "($self, snapshot, *, block_ids='same')"
    )]
    fn restore<'py>(
        &self,
        py: Python<'py>,
        snapshot: &[u8],
        block_ids: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<(Ids<'py>, Ids<'py>)> {
        let choice = block_ids.map(new_ids).transpose()?.unwrap_or(IdChoice::Same);
        let ids = match &choice {
            IdChoice::Same => NewIds::Same,
            IdChoice::Packed => NewIds::Packed,
            IdChoice::Given(given) => NewIds::Given(given),
        };
        let moves = detached(py, &self.0, |ledger| {
            let restored = ledger.clone().restore(snapshot, ids)?;
            *ledger = restored.ledger;
            Ok(restored.moves)
        });
        let (old, new): (Vec<_>, Vec<_>) = moves.map_err(to_py)?.into_iter().unzip();
        Ok((to_array(py, old), to_array(py, new)))
    }

    /// Verify every invariant of ledger and pool.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        detached(py, &self.0, |ledger| ledger.check()).map_err(to_py)
    }
}

impl BlockLedger {
    /// Locks, and lets `call` read.
    pub(crate) fn with<R>(&self, call: impl FnOnce(&ledger::BlockLedger) -> R) -> R {
        call(&lock(&self.0))
    }
}

/// As [`NewIds`], owned.
enum IdChoice {
    Same,
    Packed,
    Given(Vec<BlockId>),
}

fn publish_from_py(given: Option<Name>) -> PyResult<Publish> {
    match given.as_ref().map_or("granted", |name| name.0.as_str()) {
        "granted" => Ok(Publish::Granted),
        "computed" => Ok(Publish::Computed),
        other => Err(ConfigError::new_err(format!(
            "publish is {other:?}: it is \"granted\" or \"computed\""
        ))),
    }
}

/// One count per request.
fn counts_for(names: &[&str], given: &Bound<'_, PyAny>, what: &str) -> PyResult<Vec<usize>> {
    let tokens = counts(given)?;
    if names.len() != tokens.len() {
        return Err(ConfigError::new_err(format!(
            "{} requests and {} numbers of {what} tokens: give one number per request",
            names.len(),
            tokens.len()
        )));
    }
    Ok(tokens)
}

fn new_ids(given: &Bound<'_, PyAny>) -> PyResult<IdChoice> {
    let Ok(name) = given.cast::<PyString>() else {
        return Ok(IdChoice::Given(ids(given, MAX_BLOCKS)?));
    };
    match name.to_str() {
        Ok("same") => Ok(IdChoice::Same),
        Ok("packed") => Ok(IdChoice::Packed),
        _ => Err(ConfigError::new_err(format!(
            "block_ids is {}: it is \"same\", \"packed\" or the ids to take",
            name.repr()?
        ))),
    }
}

fn context(
    tokens: Option<&Bound<'_, PyAny>>,
    extra_keys: Option<&Bound<'_, PyAny>>,
) -> PyResult<Context> {
    Ok(Context {
        tokens: tokens.map(tokens_from_py).transpose()?,
        extra_keys: extra_keys.map(extra_keys_from_py).transpose()?,
    })
}

/// One request's newly taken ids, an array per group.
fn per_group<'py>(py: Python<'py>, taken: &Taken) -> PyResult<Bound<'py, PyTuple>> {
    let ranges = taken.offsets.windows(2).map(|ends| &taken.ids[ends[0]..ends[1]]);
    PyTuple::new(py, ranges.map(|ids| to_array(py, ids.iter().copied())).collect::<Vec<_>>())
}
