//! `Hashes`: block hashes that Python, ledgers and schedulers share.
//!
//! It has no buffer protocol, because PyO3's `__getbuffer__` is unsafe code, which this crate
//! forbids. `__bytes__` and `__array__` copy instead.

use std::fmt::Display;

use kvstow_core::key::{self, HashesBuilder, Parent};
use numpy::{PyArray1, PyArrayMethods};
use pyo3::exceptions::{PyIndexError, PyOverflowError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyIterator, PyList, PySequence, PySlice};

use crate::convert::{Count, capacity_hint, sequence};
use crate::error::{ConfigError, to_py};

/// The hashes of consecutive blocks: a sequence of `bytes` that nothing changes.
///
/// Ledgers, schedulers and pools share it instead of copying it, so an `add` costs the same for any
/// number of hashes. Slices and sums are new `Hashes`. It equals another `Hashes`, or a list, with
/// the same hashes. `bytes(hashes)` joins them. `numpy.asarray(hashes)` has a row of uint8 for
/// each. Both copy.
///
/// It remembers the hash before its first one if `hash_tokens` made it. So `add` and `extend` can
/// refuse hashes that do not continue those of a request, and a sum refuses hashes that do not
/// continue its first part. A list of `bytes` remembers nothing.
///
/// Args:
///     hashes: a sequence of hashes, each 1 to 32 bytes, all of one width.
///     block_size: the tokens that each hash adds to the one before, if known. Those of another
///         `Hashes` are kept.
///
/// Raises:
///     ConfigError: hashes of different widths, or of a type other than bytes.
#[pyclass(module = "kvstow", frozen, sequence)]
pub(crate) struct Hashes {
    shared: key::Hashes,
    block_size: Option<usize>,
    /// Whether each is chained with the one before, so that no two are equal.
    is_chained: bool,
}

/// An end of a slice. One that exceeds 64 bits is the nearest that does not, as in a list.
struct SliceEnd(isize);

impl<'py> FromPyObject<'_, 'py> for SliceEnd {
    type Error = PyErr;

    fn extract(obj: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        match obj.extract() {
            Err(error) if PyErr::is_instance_of::<PyOverflowError>(&error, obj.py()) => {
                Ok(Self(if obj.lt(0)? { isize::MIN } else { isize::MAX }))
            }
            extracted => extracted.map(Self),
        }
    }
}

impl Hashes {
    /// As `hashes`, but as an object.
    pub(crate) fn of(hashes: key::Hashes, block_size: Option<usize>) -> Self {
        Self { shared: hashes, block_size, is_chained: false }
    }

    /// As [`of`](Self::of), for hashes that kvstow has chained.
    pub(crate) fn chained(hashes: key::Hashes, block_size: usize) -> Self {
        Self { shared: hashes, block_size: Some(block_size), is_chained: true }
    }

    fn list<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.shared.digests().map(|digest| PyBytes::new(py, digest)))
    }
}

#[pymethods]
impl Hashes {
    #[new]
    #[pyo3(signature = (hashes, block_size = None))]
    fn new(hashes: &Bound<'_, PyAny>, block_size: Option<Count>) -> PyResult<Self> {
        let block_size = block_size.map(|given| given.0).or_else(|| block_size_of(hashes));
        Ok(Self { shared: self::hashes(hashes)?, block_size, is_chained: is_chained(hashes) })
    }

    /// The tokens that each hash adds to the one before; None if unknown.
    ///
    /// `hash_tokens` sets it. Ledgers and schedulers refuse hashes of another block size than
    /// theirs.
    #[getter]
    fn block_size(&self) -> Option<usize> {
        self.block_size
    }

    /// Whether `hash_tokens` has chained each hash with the one before it.
    ///
    /// No two of them are equal then. A list of `bytes` may be chained too, but it is not known.
    #[getter]
    fn is_chained(&self) -> bool {
        self.is_chained
    }

    fn __len__(&self) -> usize {
        self.shared.len()
    }

    fn __getitem__<'py>(&self, index: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let (py, width, all) = (index.py(), self.shared.width(), self.shared.as_slice());
        let Ok(slice) = index.cast::<PySlice>() else {
            let outside = |index: &dyn Display| {
                PyIndexError::new_err(format!("index {index} of {} hashes", all.len()))
            };
            let index = match index.extract::<isize>() {
                Err(error) if error.is_instance_of::<PyOverflowError>(py) => {
                    return Err(outside(index));
                }
                extracted => extracted?,
            };
            let from_end = if index < 0 { all.len() } else { 0 };
            let hash = from_end.checked_add_signed(index).and_then(|at| all.get(at));
            let hash = hash.ok_or_else(|| outside(&index))?;
            return Ok(PyBytes::new(py, width.digest(hash)).into_any());
        };
        let range = slice.indices(all.len().cast_signed())?;
        let parent = match usize::try_from(range.start) {
            _ if range.step != 1 => Parent::Unknown,
            Ok(0) => self.shared.parent(),
            Ok(start) => Parent::Block(all[start - 1]),
            Err(_) => Parent::Unknown,
        };
        let mut part = HashesBuilder::with_capacity(range.slicelength);
        let places = (0..range.slicelength.cast_signed()).map(|nth| range.start + nth * range.step);
        for place in places {
            part.push(width.digest(&all[place.cast_unsigned()])).map_err(to_py)?;
        }
        let block_size = self.block_size.filter(|_| range.step == 1);
        let is_chained = self.is_chained && range.step == 1;
        let hashes = part.finish().behind(parent);
        Ok(Bound::new(py, Self { shared: hashes, block_size, is_chained })?.into_any())
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyIterator>> {
        self.list(py)?.try_iter()
    }

    fn __contains__(&self, hash: &Bound<'_, PyAny>) -> bool {
        self.place(hash, 0..self.shared.len()).is_some()
    }

    /// Return the first place of a hash. Raises `ValueError` if it is not there.
    #[pyo3(
        signature = (value, start = SliceEnd(0), stop = SliceEnd(isize::MAX)),
        text_signature = "($self, value, start=0, stop=9223372036854775807)"
    )]
    fn index(&self, value: &Bound<'_, PyAny>, start: SliceEnd, stop: SliceEnd) -> PyResult<usize> {
        let bound = |SliceEnd(at): SliceEnd| {
            let at = if at < 0 {
                self.shared.len().saturating_add_signed(at)
            } else {
                at.cast_unsigned()
            };
            at.min(self.shared.len())
        };
        self.place(value, bound(start)..bound(stop)).ok_or_else(|| {
            PyValueError::new_err(format!("no hash among {} equals the value", self.shared.len()))
        })
    }

    /// Return how often a hash occurs.
    fn count(&self, value: &Bound<'_, PyAny>) -> usize {
        let Ok(value) = value.cast::<PyBytes>() else { return 0 };
        self.shared.digests().filter(|digest| *digest == value.as_bytes()).count()
    }

    fn __concat__(&self, other: &Bound<'_, PyAny>) -> PyResult<Self> {
        let same = |it: &usize| block_size_of(other).is_none_or(|size| size == *it);
        let block_size = self.block_size.filter(same);
        // Chained hashes know what they follow, which is compared below.
        let is_chained = self.is_chained && is_chained(other);
        let other = hashes(other)?;
        other.check_follows(&self.shared).map_err(to_py)?;
        let parent = match (other.parent(), self.shared.is_empty()) {
            (parent, true) => parent,
            (Parent::Unknown, false) if !other.is_empty() => Parent::Unknown,
            _ => self.shared.parent(),
        };
        let mut sum = HashesBuilder::with_capacity(self.shared.len() + other.len());
        self.shared
            .digests()
            .chain(other.digests())
            .try_for_each(|it| sum.push(it))
            .map_err(to_py)?;
        Ok(Self { shared: sum.finish().behind(parent), block_size, is_chained })
    }

    fn __repeat__(&self, py: Python<'_>, times: isize) -> PyResult<Self> {
        Ok(Self::of(hashes(&self.list(py)?.mul(times)?)?, None))
    }

    fn __eq__<'py>(&self, other: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let py = other.py();
        if let Ok(other) = other.cast::<Self>() {
            return Ok((self.shared == other.get().shared)
                .into_pyobject(py)?
                .to_owned()
                .into_any());
        }
        if other.is_instance_of::<PyList>() {
            return Ok(self.list(py)?.eq(other)?.into_pyobject(py)?.to_owned().into_any());
        }
        Ok(py.NotImplemented().into_bound(py))
    }

    fn __bytes__<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.joined())
    }

    /// Return an array of uint8 with one row per hash, always a copy.
    ///
    /// Without this method, numpy would make an array of `bytes`, which drops the zeros at the end
    /// of a hash.
    #[pyo3(signature = (dtype = None, *, copy = None))]
    fn __array__<'py>(
        &self,
        py: Python<'py>,
        dtype: Option<&Bound<'py, PyAny>>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        if copy == Some(false) {
            return Err(PyValueError::new_err(
                "copy is False, and hashes have no array without a copy: pass copy=None",
            ));
        }
        let num_bytes = self.shared.digests().next().map_or(0, <[u8]>::len);
        let rows = PyArray1::from_vec(py, self.joined()).reshape([self.shared.len(), num_bytes])?;
        match dtype {
            Some(dtype) => rows.call_method1("astype", (dtype,)),
            None => Ok(rows.into_any()),
        }
    }

    /// What pickle and copy pass to the constructor.
    fn __getnewargs__<'py>(
        &self,
        py: Python<'py>,
    ) -> PyResult<(Bound<'py, PyList>, Option<usize>)> {
        Ok((self.list(py)?, self.block_size))
    }

    fn __repr__(&self) -> String {
        let num_bytes = self.shared.digests().next().map_or(0, <[u8]>::len);
        format!("<{} hashes of {num_bytes} bytes>", self.shared.len())
    }
}

impl Hashes {
    fn joined(&self) -> Vec<u8> {
        let mut joined = Vec::with_capacity(self.shared.len() * key::MAX_HASH_BYTES);
        self.shared.digests().for_each(|digest| joined.extend_from_slice(digest));
        joined
    }

    /// The first place of a hash in a range.
    fn place(&self, hash: &Bound<'_, PyAny>, within: std::ops::Range<usize>) -> Option<usize> {
        let hash = hash.cast::<PyBytes>().ok()?.as_bytes();
        let mut digests = self.shared.digests().enumerate().skip(within.start);
        let found = digests.find(|(_, digest)| *digest == hash).map(|(place, _)| place);
        found.filter(|place| *place < within.end)
    }
}

/// Makes `Hashes` a `collections.abc.Sequence`.
pub(crate) fn register(py: Python<'_>) -> PyResult<()> {
    PySequence::register::<Hashes>(py)
}

/// Block hashes from Python. All of a list have one width. A `Hashes` is shared.
pub(crate) fn hashes(obj: &Bound<'_, PyAny>) -> PyResult<key::Hashes> {
    hashes_before(obj, 0)
}

/// As [`hashes`], without the last bytes of each item.
pub(crate) fn hashes_before(obj: &Bound<'_, PyAny>, suffix_bytes: usize) -> PyResult<key::Hashes> {
    if let (Ok(shared), 0) = (obj.cast::<Hashes>(), suffix_bytes) {
        return Ok(shared.get().shared.clone());
    }
    let mut hashes = HashesBuilder::with_capacity(capacity_hint(obj));
    let mut push = |item: &Bound<'_, PyAny>| {
        // The exact type costs one comparison of pointers, a subclass a call.
        let digest = item.cast_exact::<PyBytes>().or_else(|_| item.cast::<PyBytes>());
        match digest {
            Ok(digest) => {
                let digest = digest.as_bytes();
                let num_bytes = digest.len().saturating_sub(suffix_bytes);
                hashes.push(&digest[..num_bytes]).map_err(to_py)
            }
            Err(_) => Err(ConfigError::new_err(format!(
                "a block hash is of type {}: pass bytes, as hash_tokens returns them",
                item.get_type()
            ))),
        }
    };
    sequence(obj, "block hashes")?.try_iter()?.try_for_each(|item| push(&item?))?;
    Ok(hashes.finish())
}

/// As [`hashes`], for accounting in which each hash adds `hash_block_size` tokens to the one before.
/// Refuses those of another block size: a block would get the hash of other tokens than it holds.
pub(crate) fn hashes_of_blocks(
    obj: &Bound<'_, PyAny>,
    hash_block_size: impl FnOnce() -> usize,
) -> PyResult<key::Hashes> {
    if let Some(given) = block_size_of(obj) {
        let expected = hash_block_size();
        if given != expected {
            return Err(ConfigError::new_err(format!(
                "the hashes are of {given} tokens each, those of these groups of {expected}: pass \
                 {expected} to hash_tokens as block_size"
            )));
        }
    }
    hashes(obj)
}

/// The tokens of each hash, if `obj` is a `Hashes` that knows them.
fn block_size_of(obj: &Bound<'_, PyAny>) -> Option<usize> {
    obj.cast::<Hashes>().ok()?.get().block_size
}

/// Whether `obj` is a `Hashes` that kvstow has chained.
fn is_chained(obj: &Bound<'_, PyAny>) -> bool {
    obj.cast::<Hashes>().is_ok_and(|hashes| hashes.get().is_chained)
}
