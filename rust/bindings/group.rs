//! Groups of layers as Python classes.

use kvstow_core::error::Result;
use kvstow_core::group::{Attention, Group};
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyDict};

use crate::convert::{Count, named, sequence};
use crate::error::{ConfigError, to_py};

/// Layers that attend to the whole prefix, MLA included. A hit needs every block of the prefix.
///
/// Args:
///     block_size: tokens per block.
///     drops_last_block: a hit ends one block before the blocks that are found. The attention
///         layers of a draft model that reads hidden states (EAGLE, MTP) need this, because they
///         compute a token from the token after it.
///
/// Raises:
///     ConfigError: a block size that is not 1 to 2**30.
#[pyclass(module = "kvstow", frozen, eq, hash)]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct FullAttention(Group);

#[pymethods]
impl FullAttention {
    #[new]
    #[pyo3(signature = (block_size, *, drops_last_block = false))]
    fn new(
        #[pyo3(from_py_with = named::block_size)] block_size: Count,
        drops_last_block: bool,
    ) -> PyResult<Self> {
        let group = Group::new(Attention::Full, block_size.0);
        group.and_then(|group| dropping(group, drops_last_block)).map(Self).map_err(to_py)
    }

    /// Whether a hit ends one block before the blocks that are found.
    #[getter]
    fn drops_last_block(&self) -> bool {
        self.0.drops_last_block()
    }

    /// Tokens per block.
    #[getter]
    fn block_size(&self) -> usize {
        self.0.block_size
    }

    /// What pickle and copy pass to the constructor.
    fn __getnewargs_ex__<'py>(&self, py: Python<'py>) -> PyResult<((usize,), Bound<'py, PyDict>)> {
        let options = [("drops_last_block", self.drops_last_block())];
        Ok(((self.block_size(),), options.into_py_dict(py)?))
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.0)
    }
}

/// Layers in which a token attends to itself and the `window - 1` tokens before it.
///
/// Args:
///     block_size: tokens per block.
///     window: tokens in the window, the attending token included.
///     extra_retained_tokens: tokens right below the window that no token attends to. A request
///         keeps their blocks, and a load brings them. Speculative decoding with several MTP
///         modules needs them (vLLM's `SlidingWindowSpec.extra_retained_tokens`). A hit on the
///         device does not need them.
///     drops_last_block: a hit ends one block before the blocks that are found. The attention
///         layers of a draft model that reads hidden states (EAGLE, MTP) need this, because they
///         compute a token from the token after it.
///
/// Raises:
///     ConfigError: a block size or window that is not 1 to 2**30, or a window that exceeds
///         2**30 together with its extra tokens.
#[pyclass(module = "kvstow", frozen, eq, hash)]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct SlidingWindow {
    group: Group,
    /// Tokens in the window, the attending token included.
    #[pyo3(get)]
    window: usize,
}

#[pymethods]
impl SlidingWindow {
    #[new]
    #[pyo3(
        signature = (
            block_size, window, *, extra_retained_tokens = Count(0), drops_last_block = false
        ),
        text_signature =
            "(block_size, window, *, extra_retained_tokens=0, drops_last_block=False)"
    )]
    fn new(
        #[pyo3(from_py_with = named::block_size)] block_size: Count,
        #[pyo3(from_py_with = named::window)] window: Count,
        #[pyo3(from_py_with = named::extra_retained_tokens)] extra_retained_tokens: Count,
        drops_last_block: bool,
    ) -> PyResult<Self> {
        let window = window.0;
        let group = Group::new(Attention::SlidingWindow { window }, block_size.0)
            .and_then(|group| group.retaining(extra_retained_tokens.0))
            .and_then(|group| dropping(group, drops_last_block))
            .map_err(to_py)?;
        Ok(Self { group, window })
    }

    /// Tokens right below the window whose blocks a request keeps.
    #[getter]
    fn extra_retained_tokens(&self) -> usize {
        self.group.extra_retained_tokens()
    }

    /// Whether a hit ends one block before the blocks that are found.
    #[getter]
    fn drops_last_block(&self) -> bool {
        self.group.drops_last_block()
    }

    /// Tokens per block.
    #[getter]
    fn block_size(&self) -> usize {
        self.group.block_size
    }

    /// What pickle and copy pass to the constructor.
    fn __getnewargs_ex__<'py>(
        &self,
        py: Python<'py>,
    ) -> PyResult<((usize, usize), Bound<'py, PyDict>)> {
        let options = [("drops_last_block", self.drops_last_block())].into_py_dict(py)?;
        options.set_item("extra_retained_tokens", self.extra_retained_tokens())?;
        Ok(((self.block_size(), self.window), options))
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.group)
    }
}

/// Layers in which a token attends to the tokens of its own chunk, up to itself.
///
/// Args:
///     block_size: tokens per block.
///     chunk: tokens per chunk, a multiple of `block_size`.
///
/// Raises:
///     ConfigError: a block size or chunk that is not 1 to 2**30, or a chunk that is not a
///         multiple of the block size.
#[pyclass(module = "kvstow", frozen, eq, hash)]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct ChunkedLocal {
    group: Group,
    /// Tokens per chunk. Chunks begin at the multiples of this number.
    #[pyo3(get)]
    chunk: usize,
}

#[pymethods]
impl ChunkedLocal {
    #[new]
    fn new(
        #[pyo3(from_py_with = named::block_size)] block_size: Count,
        #[pyo3(from_py_with = named::chunk)] chunk: Count,
    ) -> PyResult<Self> {
        let chunk = chunk.0;
        let group = Group::new(Attention::ChunkedLocal { chunk }, block_size.0).map_err(to_py)?;
        Ok(Self { group, chunk })
    }

    /// Tokens per block.
    #[getter]
    fn block_size(&self) -> usize {
        self.group.block_size
    }

    /// What pickle and copy pass to the constructor.
    fn __getnewargs__(&self) -> (usize, usize) {
        (self.block_size(), self.chunk)
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.group)
    }
}

/// Layers with a recurrent state (Mamba). A block holds the state after its last token.
///
/// A step reads the state of the block that holds the token before its first one. It writes the
/// state after the last token of each block that it fills, and after its own last token.
/// Lookups find every full block. If your kernel returns only the last state, let no step
/// compute past the next block end. `rewind` brings no earlier state back: before you compute
/// drafts, copy the state.
///
/// Args:
///     block_size: tokens per block.
///
/// Raises:
///     ConfigError: a block size that is not 1 to 2**30.
#[pyclass(module = "kvstow", frozen, eq, hash)]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct StateSpace(Group);

#[pymethods]
impl StateSpace {
    #[new]
    fn new(#[pyo3(from_py_with = named::block_size)] block_size: Count) -> PyResult<Self> {
        Group::new(Attention::StateSpace, block_size.0).map(Self).map_err(to_py)
    }

    /// Tokens per block.
    #[getter]
    fn block_size(&self) -> usize {
        self.0.block_size
    }

    /// What pickle and copy pass to the constructor.
    fn __getnewargs__(&self) -> (usize,) {
        (self.block_size(),)
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.0)
    }
}

fn dropping(group: Group, drops_last_block: bool) -> Result<Group> {
    if drops_last_block { group.dropping_last_block() } else { Ok(group) }
}

/// A group of any kind, as Python passes it to the core.
#[derive(FromPyObject)]
pub(crate) enum AnyGroup<'py> {
    Full(PyRef<'py, FullAttention>),
    Sliding(PyRef<'py, SlidingWindow>),
    Chunked(PyRef<'py, ChunkedLocal>),
    State(PyRef<'py, StateSpace>),
}

/// Converts a model's groups from Python to the core's.
pub(crate) fn groups(given: &Bound<'_, PyAny>) -> PyResult<Vec<Group>> {
    let group = |given: Bound<'_, PyAny>| match given.extract() {
        Ok(AnyGroup::Full(group)) => Ok(group.0),
        Ok(AnyGroup::Sliding(group)) => Ok(group.group),
        Ok(AnyGroup::Chunked(group)) => Ok(group.group),
        Ok(AnyGroup::State(group)) => Ok(group.0),
        Err(_) => Err(ConfigError::new_err(format!(
            "a group is of type {}: pass FullAttention, SlidingWindow, ChunkedLocal or StateSpace",
            given.get_type()
        ))),
    };
    sequence(given, "groups")?.try_iter()?.map(|given| group(given?)).collect()
}
