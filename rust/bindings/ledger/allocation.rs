//! `PrefixHit` and `StepAllocation`: what lookups and allocations return.

use kvstow_core::ledger::{self, Allocation};
use numpy::PyArray1;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::convert::{offsets_to_array, to_array};

/// The prefix that `BlockLedger.lookup` found.
///
/// A hit holds no references. `BlockLedger.allocate` takes them when you pass it the hit.
#[pyclass(module = "kvstow", frozen)]
pub(crate) struct PrefixHit(pub(super) ledger::PrefixHit);

#[pymethods]
impl PrefixHit {
    /// Tokens in the prefix.
    #[getter]
    fn num_tokens(&self) -> usize {
        self.0.num_tokens
    }

    /// One array of block ids per group. 0 stands where the group needs no block.
    #[getter]
    fn blocks<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.0.blocks.iter().map(|ids| to_array(py, ids.iter().copied())))
    }

    fn __repr__(&self) -> String {
        format!("PrefixHit(num_tokens={})", self.0.num_tokens)
    }
}

/// The blocks that `BlockLedger.allocate_step` allocated.
#[pyclass(module = "kvstow", frozen, get_all)]
pub(crate) struct StepAllocation {
    /// Number of requests, from the first, that got their slots.
    num_granted: usize,
    /// The newly allocated block ids of these requests, request by request, group by group.
    ids: Py<PyArray1<i32>>,
    /// Where each (request, group) begins in `ids`: `num_granted * num_groups + 1` entries.
    offsets: Py<PyArray1<i32>>,
}

impl StepAllocation {
    pub(super) fn new(py: Python<'_>, allocated: Allocation) -> Self {
        Self {
            num_granted: allocated.num_granted,
            ids: to_array(py, allocated.ids).unbind(),
            offsets: offsets_to_array(py, allocated.offsets).unbind(),
        }
    }
}

#[pymethods]
impl StepAllocation {
    fn __repr__(&self) -> String {
        format!("StepAllocation(num_granted={})", self.num_granted)
    }
}

/// One request's newly allocated ids, an array per group.
pub(super) fn per_group<'py>(
    py: Python<'py>,
    allocated: &Allocation,
) -> PyResult<Bound<'py, PyTuple>> {
    let ranges = allocated.offsets.windows(2).map(|ends| &allocated.ids[ends[0]..ends[1]]);
    PyTuple::new(py, ranges.map(|ids| to_array(py, ids.iter().copied())).collect::<Vec<_>>())
}
