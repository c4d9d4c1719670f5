//! Events as frozen Python objects, in vLLM's vocabulary.

use kvstow_core::event::{self, Event};
use kvstow_core::key::{BlockHash, HashWidth};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::hash::extra_keys_to_py;

fn digests<'py>(
    py: Python<'py>,
    hashes: &[BlockHash],
    width: HashWidth,
) -> PyResult<Bound<'py, PyList>> {
    PyList::new(py, hashes.iter().map(|hash| PyBytes::new(py, width.digest(hash))))
}

/// The `repr` of an event with blocks.
fn shown(class: &str, num_blocks: usize, group: u16, medium: &str) -> String {
    format!("{class}({num_blocks} blocks, group={group}, medium={medium:?})")
}

/// Blocks of one pool and one group that lookups can now find, consecutive in their prefix.
#[pyclass(module = "kvstow", frozen)]
pub(crate) struct BlockStored {
    stored: event::BlockStored,
    width: HashWidth,
    /// vLLM's name of the memory: "GPU" (device), "CPU" (host) or "STORAGE" (disk).
    #[pyo3(get)]
    medium: &'static str,
}

#[pymethods]
impl BlockStored {
    /// The hashes of the blocks, in the order of the prefix.
    #[getter]
    fn block_hashes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        digests(py, &self.stored.hashes, self.width)
    }

    /// The hash of the block before the first. None at the start of a prompt, or if unknown.
    #[getter]
    fn parent_block_hash<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        let parent = self.stored.origin.parent.as_ref()?;
        Some(PyBytes::new(py, self.width.digest(parent)))
    }

    /// The tokens of all the blocks; None if the caller gave none.
    #[getter]
    fn token_ids(&self) -> Option<&[u64]> {
        self.stored.origin.tokens.as_deref()
    }

    /// The extra keys of each block; None if the caller gave none.
    #[getter]
    fn extra_keys<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let keys = self.stored.origin.extra_keys.as_deref();
        keys.map(|keys| extra_keys_to_py(py, keys)).transpose()
    }

    /// Tokens per block; None for a bare `BlockPool`, which does not know it.
    #[getter]
    fn block_size(&self) -> Option<usize> {
        self.stored.origin.block_size
    }

    /// The index of the group.
    #[getter]
    fn group(&self) -> u16 {
        self.stored.group.0
    }

    fn __repr__(&self) -> String {
        shown("BlockStored", self.stored.hashes.len(), self.group(), self.medium)
    }
}

/// Keys of one pool and one group that no block holds any more.
#[pyclass(module = "kvstow", frozen)]
pub(crate) struct BlockRemoved {
    hashes: Vec<BlockHash>,
    width: HashWidth,
    /// The index of the group.
    #[pyo3(get)]
    group: u16,
    /// vLLM's name of the memory: "GPU" (device), "CPU" (host) or "STORAGE" (disk).
    #[pyo3(get)]
    medium: &'static str,
}

#[pymethods]
impl BlockRemoved {
    /// The hashes of the removed keys.
    #[getter]
    fn block_hashes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        digests(py, &self.hashes, self.width)
    }

    fn __repr__(&self) -> String {
        shown("BlockRemoved", self.hashes.len(), self.group, self.medium)
    }
}

/// A pool dropped all its keys at once.
#[pyclass(module = "kvstow", frozen)]
pub(crate) struct AllBlocksCleared {
    /// vLLM's name of the memory: "GPU" (device), "CPU" (host) or "STORAGE" (disk).
    #[pyo3(get)]
    medium: &'static str,
}

#[pymethods]
impl AllBlocksCleared {
    fn __repr__(&self) -> String {
        format!("AllBlocksCleared(medium={:?})", self.medium)
    }
}

/// Events of one pool as a list of Python objects. `medium` is vLLM's name of its memory.
pub(crate) fn events_to_py<'py>(
    py: Python<'py>,
    events: Vec<Event>,
    medium: &'static str,
    width: HashWidth,
) -> PyResult<Bound<'py, PyList>> {
    let to_object = |event| -> PyResult<Bound<'py, PyAny>> {
        Ok(match event {
            Event::Stored(stored) => {
                Bound::new(py, BlockStored { stored, width, medium })?.into_any()
            }
            Event::Removed { hashes, group } => {
                Bound::new(py, BlockRemoved { hashes, width, group: group.0, medium })?.into_any()
            }
            Event::Cleared => Bound::new(py, AllBlocksCleared { medium })?.into_any(),
        })
    };
    let objects = events.into_iter().map(to_object).collect::<PyResult<Vec<_>>>()?;
    PyList::new(py, objects)
}
