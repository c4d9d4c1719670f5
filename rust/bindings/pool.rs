//! `BlockPool` and `LedgerPool`, and the methods that both have.

use std::sync::Arc;

use kvstow_core::error::Result;
use kvstow_core::ids::BlockId;
use kvstow_core::ledger::BlockLedger;
use kvstow_core::pool;
use numpy::IntoPyArray;
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::convert::{Count, Int32Array, group_id, ids, named, to_array};
use crate::error::to_py;
use crate::event::events_to_py;
use crate::hashes::hashes;
use crate::lock::{self, Mutex, without_interpreter};

/// A pool behind a lock: its own, or that of a ledger.
pub(crate) trait SharedPool {
    /// Locks the pool, and calls.
    fn with<R>(&self, call: impl FnOnce(&mut pool::BlockPool) -> R) -> R;

    /// Converts ids, locks the pool, and calls.
    fn with_ids<R>(
        &self,
        given: &Bound<'_, PyAny>,
        call: impl FnOnce(&mut pool::BlockPool, &[BlockId]) -> Result<R>,
    ) -> PyResult<R> {
        let ids = ids(given, self.with(|pool| pool.num_blocks()))?;
        self.with(|pool| call(pool, &ids)).map_err(to_py)
    }

    /// A count of each block.
    fn counts<'py>(
        &self,
        given: &Bound<'py, PyAny>,
        count: fn(&pool::BlockPool, BlockId) -> u32,
    ) -> PyResult<Int32Array<'py>> {
        let counts: Vec<i32> = self.with_ids(given, |pool, ids| {
            pool.check_ids(ids)?;
            Ok(ids.iter().map(|&id| count(pool, id).cast_signed()).collect())
        })?;
        Ok(counts.into_pyarray(given.py()))
    }
}

/// Python's methods of a [`SharedPool`]: those that every pool has, and the class's own.
macro_rules! pool_methods {
    ($class:ident { $($own:tt)* }) => {
        #[pymethods]
        impl $class {
            $($own)*

            /// Number of blocks, the null block included.
            #[getter]
            fn num_blocks(&self) -> usize {
                self.with(|pool| pool.num_blocks())
            }

            /// Blocks that `allocate` can take: neither referenced nor pinned.
            #[getter]
            fn num_free(&self) -> usize {
                self.with(|pool| pool.num_free())
            }

            /// Blocks that hold a key, referenced or not.
            #[getter]
            fn num_cached(&self) -> usize {
                self.with(|pool| pool.num_cached())
            }

            /// Blocks that have lost their key to an `allocate`, since construction.
            #[getter]
            fn num_evicted(&self) -> usize {
                self.with(|pool| pool.num_evicted())
            }

            /// Hold each block for a copy. It keeps its place in the queue; `allocate` skips it.
            fn pin(&self, ids: &Bound<'_, PyAny>) -> PyResult<()> {
                self.with_ids(ids, pool::BlockPool::pin)
            }

            /// Drop one pin on each block. Raises `InvalidBlock` for a block that has none.
            fn unpin(&self, ids: &Bound<'_, PyAny>) -> PyResult<()> {
                self.with_ids(ids, pool::BlockPool::unpin)
            }

            /// Drop the keys of these blocks, referenced or not. A free block keeps its place.
            fn evict(&self, ids: &Bound<'_, PyAny>) -> PyResult<()> {
                self.with_ids(ids, pool::BlockPool::evict)
            }

            /// Drop every key. Return False and change nothing if a block is referenced or pinned.
            fn reset(&self, py: Python<'_>) -> bool {
                without_interpreter(py, || self.with(pool::BlockPool::reset))
            }

            /// Return the number of references on each block.
            fn ref_counts<'py>(&self, ids: &Bound<'py, PyAny>) -> PyResult<Int32Array<'py>> {
                self.counts(ids, pool::BlockPool::num_refs)
            }

            /// Return the number of pins on each block.
            fn pin_counts<'py>(&self, ids: &Bound<'py, PyAny>) -> PyResult<Int32Array<'py>> {
                self.counts(ids, pool::BlockPool::num_pins)
            }

            /// Return the free queue, the next block to take first, pinned blocks included.
            fn free_order<'py>(&self, py: Python<'py>) -> Int32Array<'py> {
                let order: Vec<_> = self.with(|pool| pool.free_order().collect());
                to_array(py, order)
            }

            /// Return the events since the last call, oldest first. Empty without `events=True`.
            fn take_events<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
                let (events, width) = self.with(|pool| (pool.take_events(), pool.hash_width()));
                events_to_py(py, events, "GPU", width)
            }
        }
    };
}

/// All blocks of one memory: reference counts, eviction order, and the prefixes they hold.
///
/// Block 0 is the null block, a placeholder that the pool never hands out. So `num_blocks - 1`
/// blocks are usable.
///
/// Args:
///     num_blocks: number of blocks, the null block included.
///     events: whether the pool records events for `take_events`.
///
/// Raises:
///     ConfigError: `num_blocks` is not 2 to 2**31 - 1, or the machine lacks the memory for the
///         accounting.
#[pyclass(module = "kvstow", frozen)]
pub(crate) struct BlockPool(Mutex<pool::BlockPool>);

impl SharedPool for BlockPool {
    fn with<R>(&self, call: impl FnOnce(&mut pool::BlockPool) -> R) -> R {
        lock::with(&self.0, call)
    }
}

pool_methods!(BlockPool {
    #[new]
    #[pyo3(signature = (num_blocks, *, events = false))]
    fn new(#[pyo3(from_py_with = named::num_blocks)] num_blocks: Count, events: bool) -> PyResult<Self> {
        Ok(Self(Mutex::new(pool::BlockPool::new(num_blocks.0, events).map_err(to_py)?)))
    }

    /// Bytes of memory that the accounting itself takes.
    #[getter]
    fn memory_bytes(&self) -> usize {
        self.with(|pool| pool.memory_bytes())
    }

    /// Take `n` blocks from the head of the free queue, each with one reference.
    ///
    /// Cached blocks among them lose their key.
    ///
    /// Returns:
    ///     The ids of the blocks.
    ///
    /// Raises:
    ///     OutOfBlocks: fewer than `n` blocks are free.
    fn allocate<'py>(&self, py: Python<'py>, #[pyo3(from_py_with = named::n)] n: Count) -> PyResult<Int32Array<'py>> {
        let mut allocated = Vec::new();
        self.with(|pool| pool.allocate(n.0, &mut allocated)).map_err(to_py)?;
        Ok(to_array(py, allocated))
    }

    /// Take one reference on each block. A free block leaves the free queue.
    fn touch(&self, ids: &Bound<'_, PyAny>) -> PyResult<()> {
        self.with_ids(ids, pool::BlockPool::touch)
    }

    /// Drop one reference on each block.
    ///
    /// Blocks that reach 0 with a key go to the tail of the free queue. Blocks that reach 0
    /// without a key go to its head. Both keep the order of `ids`.
    ///
    /// Args:
    ///     ids: block ids in eviction order.
    ///
    /// Raises:
    ///     InvalidBlock: a block that is already free, or an id outside the pool.
    fn free(&self, ids: &Bound<'_, PyAny>) -> PyResult<()> {
        self.with_ids(ids, pool::BlockPool::free)
    }

    /// Publish full blocks: `ids[i]` holds the KV that `hashes[i]` names.
    ///
    /// A block that already holds this key stays as it is.
    ///
    /// Raises:
    ///     InvalidBlock: the null block, a free block, or a block that holds another key.
    ///     ConfigError: lists of different lengths, or hashes of another width than the pool's.
    #[pyo3(
        signature = (ids, hashes, *, group = Count(0)),
        text_signature = "($self, ids, hashes, *, group=0)"
    )]
    fn cache(
        &self,
        ids: &Bound<'_, PyAny>,
        hashes: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = named::group)] group: Count,
    ) -> PyResult<()> {
        let (hashes, group) = (self::hashes(hashes)?, group_id(group)?);
        self.with_ids(ids, |pool, ids| pool.cache(ids, &hashes, group))
    }

    /// Return the block ids of the longest cached prefix of `hashes`.
    ///
    /// If several blocks hold a key, the result has the oldest one.
    #[pyo3(
        name = "lookup",
        signature = (hashes, *, group = Count(0)),
        text_signature = "($self, hashes, *, group=0)"
    )]
    fn look_up<'py>(
        &self,
        hashes: &Bound<'py, PyAny>,
        #[pyo3(from_py_with = named::group)] group: Count,
    ) -> PyResult<Int32Array<'py>> {
        let (py, hashes, group) = (hashes.py(), self::hashes(hashes)?, group_id(group)?);
        let found = self.with(|pool| pool.lookup(&hashes, group)).map_err(to_py)?;
        Ok(to_array(py, found))
    }

    /// Verify every invariant in O(num_blocks). Raises `StateError` if one is broken.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        without_interpreter(py, || self.with(|pool| pool.check())).map_err(to_py)
    }
});

/// The pool of a ledger. The ledger alone takes and drops references in it.
#[pyclass(module = "kvstow", frozen)]
pub(crate) struct LedgerPool(pub(crate) Arc<Mutex<BlockLedger>>);

impl SharedPool for LedgerPool {
    fn with<R>(&self, call: impl FnOnce(&mut pool::BlockPool) -> R) -> R {
        lock::with(&self.0, |ledger| call(ledger.pool_mut()))
    }
}

pool_methods!(LedgerPool {});
