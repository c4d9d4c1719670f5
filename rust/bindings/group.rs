//! Groups as Python names them.

use kvstow_core::group::Group;
use pyo3::prelude::*;

use crate::convert::Count;
use crate::error::to_py;

/// Layers that attend to the whole prefix: a hit needs every block of it (also MLA).
#[pyclass(module = "kvstow", frozen, eq)]
#[derive(Clone, Copy, PartialEq)]
pub(crate) struct FullAttention(Group);

#[pymethods]
impl FullAttention {
    #[new]
    fn new(block_size: Count) -> PyResult<Self> {
        Group::full_attention(block_size.0).map(Self).map_err(to_py)
    }

    #[getter]
    fn block_size(&self) -> usize {
        self.0.block_size
    }

    fn __repr__(&self) -> String {
        format!("FullAttention(block_size={})", self.0.block_size)
    }
}

/// A model's groups.
pub(crate) fn groups(given: &[PyRef<'_, FullAttention>]) -> Vec<Group> {
    given.iter().map(|group| group.0).collect()
}
