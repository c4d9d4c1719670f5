//! `Hashes`: block hashes that Python, ledgers and schedulers share.
//!
//! It has no buffer protocol, because PyO3's `__getbuffer__` is unsafe code, which this crate
//! forbids. `__bytes__` and `__array__` copy instead.

use kvstow_core::key::{self, HashesBuilder};
use numpy::{PyArray1, PyArrayMethods};
use pyo3::exceptions::{PyIndexError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyIterator, PyList, PySequence, PySlice};

use crate::convert::{capacity_hint, sequence};
use crate::error::{ConfigError, to_py};

/// The hashes of consecutive blocks: a sequence of `bytes` that nothing changes.
///
/// Ledgers, schedulers and pools share it instead of copying it, so an `add` costs the same for any
/// number of hashes. Slices and sums are new `Hashes`. It equals another `Hashes`, or a list, with
/// the same hashes. `bytes(hashes)` joins them. `numpy.asarray(hashes)` has a row of uint8 for
/// each. Both copy.
///
/// Args:
///     hashes: a sequence of hashes, each 1 to 32 bytes, all of one width.
///
/// Raises:
///     ConfigError: hashes of different widths, or of a type other than bytes.
#[pyclass(module = "kvstow", frozen, sequence)]
pub(crate) struct Hashes(key::Hashes);

impl Hashes {
    /// As `hashes`, but as an object.
    pub(crate) fn of(hashes: key::Hashes) -> Self {
        Self(hashes)
    }

    fn list<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.0.digests().map(|digest| PyBytes::new(py, digest)))
    }
}

#[pymethods]
impl Hashes {
    #[new]
    fn new(hashes: &Bound<'_, PyAny>) -> PyResult<Self> {
        self::hashes(hashes).map(Self)
    }

    fn __len__(&self) -> usize {
        self.0.len()
    }

    fn __getitem__<'py>(&self, index: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let (py, width, all) = (index.py(), self.0.width(), self.0.as_slice());
        let Ok(slice) = index.cast::<PySlice>() else {
            let index: isize = index.extract()?;
            let from_end = if index < 0 { all.len() } else { 0 };
            let hash = from_end.checked_add_signed(index).and_then(|at| all.get(at));
            let hash = hash.ok_or_else(|| {
                PyIndexError::new_err(format!("index {index} of {} hashes", all.len()))
            })?;
            return Ok(PyBytes::new(py, width.digest(hash)).into_any());
        };
        let range = slice.indices(all.len().cast_signed())?;
        let mut part = HashesBuilder::with_capacity(range.slicelength);
        let places = (0..range.slicelength.cast_signed()).map(|nth| range.start + nth * range.step);
        for place in places {
            part.push(width.digest(&all[place.cast_unsigned()])).map_err(to_py)?;
        }
        Ok(Bound::new(py, Self(part.finish()))?.into_any())
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyIterator>> {
        self.list(py)?.try_iter()
    }

    fn __contains__(&self, hash: &Bound<'_, PyAny>) -> bool {
        self.place(hash, 0..self.0.len()).is_some()
    }

    /// Return the first place of a hash. Raises `ValueError` if it is not there.
    #[pyo3(
        signature = (value, start = 0, stop = isize::MAX),
        text_signature = "($self, value, start=0, stop=9223372036854775807)"
    )]
    fn index(&self, value: &Bound<'_, PyAny>, start: isize, stop: isize) -> PyResult<usize> {
        let bound = |at: isize| {
            let at =
                if at < 0 { self.0.len().saturating_add_signed(at) } else { at.cast_unsigned() };
            at.min(self.0.len())
        };
        self.place(value, bound(start)..bound(stop)).ok_or_else(|| {
            PyValueError::new_err(format!("no hash among {} equals the value", self.0.len()))
        })
    }

    /// Return how often a hash occurs.
    fn count(&self, value: &Bound<'_, PyAny>) -> usize {
        let Ok(value) = value.cast::<PyBytes>() else { return 0 };
        self.0.digests().filter(|digest| *digest == value.as_bytes()).count()
    }

    fn __concat__(&self, other: &Bound<'_, PyAny>) -> PyResult<Self> {
        let other = hashes(other)?;
        let mut sum = HashesBuilder::with_capacity(self.0.len() + other.len());
        self.0.digests().chain(other.digests()).try_for_each(|it| sum.push(it)).map_err(to_py)?;
        Ok(Self(sum.finish()))
    }

    fn __repeat__(&self, py: Python<'_>, times: isize) -> PyResult<Self> {
        hashes(&self.list(py)?.mul(times)?).map(Self)
    }

    fn __eq__<'py>(&self, other: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let py = other.py();
        if let Ok(other) = other.cast::<Self>() {
            return Ok((self.0 == other.get().0).into_pyobject(py)?.to_owned().into_any());
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
        let num_bytes = self.0.digests().next().map_or(0, <[u8]>::len);
        let rows = PyArray1::from_vec(py, self.joined()).reshape([self.0.len(), num_bytes])?;
        match dtype {
            Some(dtype) => rows.call_method1("astype", (dtype,)),
            None => Ok(rows.into_any()),
        }
    }

    /// What pickle and copy pass to the constructor.
    fn __getnewargs__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyList>,)> {
        Ok((self.list(py)?,))
    }

    fn __repr__(&self) -> String {
        let num_bytes = self.0.digests().next().map_or(0, <[u8]>::len);
        format!("<{} hashes of {num_bytes} bytes>", self.0.len())
    }
}

impl Hashes {
    fn joined(&self) -> Vec<u8> {
        let mut joined = Vec::with_capacity(self.0.len() * key::MAX_HASH_BYTES);
        self.0.digests().for_each(|digest| joined.extend_from_slice(digest));
        joined
    }

    /// The first place of a hash in a range.
    fn place(&self, hash: &Bound<'_, PyAny>, within: std::ops::Range<usize>) -> Option<usize> {
        let hash = hash.cast::<PyBytes>().ok()?.as_bytes();
        let mut digests = self.0.digests().enumerate().skip(within.start);
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
    if let Ok(shared) = obj.cast::<Hashes>() {
        return Ok(shared.get().0.clone());
    }
    let mut hashes = HashesBuilder::with_capacity(capacity_hint(obj));
    let mut push = |item: &Bound<'_, PyAny>| {
        // The exact type costs one comparison of pointers, a subclass a call.
        let digest = item.cast_exact::<PyBytes>().or_else(|_| item.cast::<PyBytes>());
        match digest {
            Ok(digest) => hashes.push(digest.as_bytes()).map_err(to_py),
            Err(_) => Err(ConfigError::new_err(format!(
                "a block hash is of type {}: pass bytes",
                item.get_type()
            ))),
        }
    };
    sequence(obj, "block hashes")?.try_iter()?.try_for_each(|item| push(&item?))?;
    Ok(hashes.finish())
}
