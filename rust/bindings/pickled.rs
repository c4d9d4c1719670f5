//! Block hashes with Python's own pickle, for blocks that the core does not encode.

use kvstow_core::hash::parent_of;
use kvstow_core::key::HashesBuilder;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyTuple};

use crate::error::to_py;
use crate::hashes::Hashes;

/// What the digests depend on, as the caller's own objects: pickle writes an object that it meets
/// twice as a reference, so copies of these have other digests.
pub(crate) struct Pickled<'a, 'py> {
    pub(crate) tokens: &'a Bound<'py, PyAny>,
    pub(crate) block_size: usize,
    pub(crate) parent: Option<&'a Bound<'py, PyBytes>>,
    pub(crate) extra_keys: Option<&'a Bound<'py, PyAny>>,
    pub(crate) seed: &'a str,
}

/// Whether the core's pickles are those of this Python, which may have a newer protocol.
pub(crate) fn is_protocol_of_core(py: Python<'_>) -> PyResult<bool> {
    static PROTOCOL: PyOnceLock<u32> = PyOnceLock::new();
    let highest = || py.import("pickle")?.getattr("HIGHEST_PROTOCOL")?.extract();
    Ok(*PROTOCOL.get_or_try_init(py, highest)? == 5)
}

impl<'py> Pickled<'_, 'py> {
    /// Returns the digests of `num_blocks` blocks.
    pub(crate) fn digests(&self, num_blocks: usize) -> PyResult<Hashes> {
        let py = self.tokens.py();
        let pickle = py.import("pickle")?;
        let (dumps, protocol) = (pickle.getattr("dumps")?, pickle.getattr("HIGHEST_PROTOCOL")?);
        let sha256 = py.import("hashlib")?.getattr("sha256")?;
        let digest = |value: Bound<'py, PyAny>| {
            sha256.call1((dumps.call1((value, &protocol))?,))?.call_method0("digest")
        };
        let mut previous = match self.parent {
            Some(parent) if !parent.as_bytes().is_empty() => parent.clone().into_any(),
            _ => digest(self.seed.into_pyobject(py)?.into_any())?,
        };
        let mut tokens = match self.tokens.getattr("tolist") {
            Ok(tolist) => tolist.call0()?, // of an array: its numbers as ints
            Err(_) => self.tokens.clone(),
        }
        .try_iter()?;
        let mut keys = self.extra_keys.map(PyAnyMethods::try_iter).transpose()?;
        let mut digests = HashesBuilder::default();
        for _ in 0..num_blocks {
            let block = tokens.by_ref().take(self.block_size).collect::<PyResult<Vec<_>>>()?;
            let block_keys = match keys.as_mut().and_then(Iterator::next) {
                Some(block_keys) => block_keys?,
                None => py.None().into_bound(py),
            };
            let value = (previous, PyTuple::new(py, block)?, block_keys).into_pyobject(py)?;
            previous = digest(value.into_any())?;
            digests.push(previous.cast::<PyBytes>()?.as_bytes()).map_err(to_py)?;
        }
        let parent = parent_of(self.parent.map(PyBytesMethods::as_bytes));
        Ok(Hashes::chained(digests.finish().behind(parent), self.block_size))
    }
}
