//! `HitCurve` and `clairvoyant_hits`: hits of a cache against its capacity.

use kvstow_core::curve::{self, Clairvoyant, HitCurveConfig, Prompts, keys_of};
use kvstow_core::error::{Error, Result};
use kvstow_core::key::HashWidth;
use numpy::{IntoPyArray, PyArray1, PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyInt, PySequence, PyString};

use crate::convert::{Count, check_integer_array, counts, named, push};
use crate::error::{ConfigError, to_py};
use crate::hash::native_copy;
use crate::hashes::hashes;
use crate::lock::{Mutex, detached, lock};

/// Hits of an LRU cache at every capacity, from the requests added so far.
///
/// The cache holds one full-attention group, and a request hits the longest prefix that the cache
/// holds. As in `OffloadScheduler`, each request is looked up as a whole and then becomes the most
/// recent, tail before root. The curve is exact until it watches as many keys as its bounds allow.
/// Then it halves its rate. It keeps a sample of the keys, and `hits` are estimates.
///
/// A request is a list of keys, root first. A key stands for a block and all blocks before it.
/// Keys are block hashes (`bytes`, one width per curve) or integers from 0 to 2**64 - 1, for
/// example the chained ids of a trace. A curve takes hashes or integers, not both.
///
/// For traffic without an end, divide time into turns: see `turn`.
///
///     >>> curve = HitCurve()
///     >>> curve.add_all([1, 2, 3, 1, 2, 4, 1, 2, 3], [0, 3, 6, 9])
///     >>> curve.hits([1, 2, 3, 4]).tolist()
///     [2, 4, 4, 5]
///
/// Args:
///     max_keys: the most keys that the curve watches at a time, at least 64. None: no bound.
///     max_bytes: the most memory that the curve takes. None: no bound. With 32 MiB, a curve is
///         exact for 400,000 distinct blocks.
///     seed: chooses the sample. Equal seeds and requests give equal curves.
///
/// Raises:
///     ConfigError: a bound below 64 keys, or the machine lacks the memory.
#[pyclass(module = "kvstow", frozen)]
pub(crate) struct HitCurve(Mutex<KeyedCurve>);

#[pymethods]
impl HitCurve {
    #[new]
    #[pyo3(signature = (*, max_keys = None, max_bytes = None, seed = Count(0)))]
    #[pyo3(text_signature = "(*, max_keys=None, max_bytes=None, seed=0)")]
    fn new(
        #[pyo3(from_py_with = named::max_keys)] max_keys: Option<Count>,
        #[pyo3(from_py_with = named::max_bytes)] max_bytes: Option<Count>,
        #[pyo3(from_py_with = named::seed)] seed: Count,
    ) -> PyResult<Self> {
        let config = HitCurveConfig {
            max_keys: max_keys.map(|count| count.0),
            max_bytes: max_bytes.map(|count| count.0),
            seed: seed.0 as u64,
        };
        let curve = curve::HitCurve::new(config).map_err(to_py)?;
        Ok(Self(Mutex::new(KeyedCurve { curve, source: None })))
    }

    /// Serve a request: look up all its keys, then make them recent, tail before root.
    ///
    /// Args:
    ///     keys: keys of the request's blocks, root first.
    ///
    /// Raises:
    ///     ConfigError: a key that is no hash and no integer within the bounds, a key of another
    ///         kind than the curve's, or the machine lacks the memory.
    fn add(&self, keys: &Bound<'_, PyAny>) -> PyResult<()> {
        let keys = Keys::from_py(keys)?;
        let mut this = lock(&self.0);
        this.agree(keys.source).and_then(|()| this.curve.add(&keys.words)).map_err(to_py)
    }

    /// Serve all requests of a trace in turn. Releases the interpreter lock.
    ///
    /// Args:
    ///     keys: keys of all requests, one request after the other.
    ///     offsets: where each request begins in `keys`, and the number of keys at the end.
    ///
    /// Raises:
    ///     ConfigError: as `add`, or offsets that do not fit the keys. If the machine lacks the
    ///         memory for a request, the requests before it have been added.
    fn add_all(&self, keys: &Bound<'_, PyAny>, offsets: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = keys.py();
        let (keys, offsets) = (Keys::from_py(keys)?, counts(offsets, "offsets")?);
        let prompts = Prompts::new(&keys.words, &offsets).map_err(to_py)?;
        let added = detached(py, &self.0, |this| {
            this.agree(keys.source)?;
            this.curve.add_all(prompts)
        });
        added.map_err(to_py)
    }

    /// Look up all keys of a request, and leave their recency as it is.
    ///
    /// Args:
    ///     keys: keys of the request's blocks, root first.
    ///     num_local: the first blocks that a cache in front of this one has. They are hits at
    ///         every capacity, 0 included, and this cache is not asked for them.
    ///     ends: the numbers of blocks at which a hit may end, ascending. Models with sliding
    ///         windows or recurrent states have few. None: a hit may end at each block.
    ///
    /// Returns:
    ///     The first blocks that the curve knows: an estimate once `rate` is below 1.
    ///
    /// Raises:
    ///     ConfigError: as `add`, or ends that descend.
    #[pyo3(signature = (keys, num_local = Count(0), *, ends = None))]
    #[pyo3(text_signature = "($self, keys, num_local=0, *, ends=None)")]
    fn lookup(
        &self,
        keys: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = named::num_local)] num_local: Count,
        ends: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<usize> {
        let (keys, ends) =
            (Keys::from_py(keys)?, ends.map(|ends| counts(ends, "ends")).transpose()?);
        if ends.as_ref().is_some_and(|ends| !ends.is_sorted()) {
            return Err(ConfigError::new_err("ends descend: pass them in ascending order"));
        }
        let mut this = lock(&self.0);
        this.agree(keys.source).map_err(to_py)?;
        Ok(this.curve.lookup(&keys.words, num_local.0, ends.as_deref()))
    }

    /// Make the keys of a request recent, tail before root, without a lookup.
    ///
    /// Args:
    ///     keys: keys of the request's blocks, root first.
    ///
    /// Raises:
    ///     ConfigError: as `add`.
    fn insert(&self, keys: &Bound<'_, PyAny>) -> PyResult<()> {
        let keys = Keys::from_py(keys)?;
        let mut this = lock(&self.0);
        this.agree(keys.source).and_then(|()| this.curve.insert(&keys.words)).map_err(to_py)
    }

    /// Begin a turn: halve the weight of all lookups so far, and forget unused keys.
    ///
    /// Lookups of the present turn weigh 1, those of the turn before weigh 1/2, and so on. `hits`,
    /// `hit_ratios` and `errors` use these weights. A forgotten key is a miss at its next lookup.
    ///
    /// Args:
    ///     num_kept: the last turns. Keys that no request has used during them are forgotten.
    fn turn(&self, #[pyo3(from_py_with = named::num_kept)] num_kept: Count) {
        lock(&self.0).curve.turn(num_kept.0);
    }

    /// Forget all keys, as a cache that is emptied. Past hits and lookups stay.
    fn clear(&self) {
        lock(&self.0).curve.clear();
    }

    /// Return the hit blocks of an LRU cache at each of these capacities, over all requests.
    ///
    /// Args:
    ///     capacities: numbers of blocks that a cache can hold.
    ///
    /// Returns:
    ///     Hit blocks, one int64 per capacity. They are exact while `rate` is 1 and no turn has
    ///     ended. Otherwise they are rounded.
    fn hits<'py>(&self, capacities: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let (py, capacities) = (capacities.py(), capacities_from_py(capacities)?);
        let hits = detached(py, &self.0, |this| this.curve.hits(&capacities));
        Ok(to_int64(py, hits))
    }

    /// Return the share of looked-up blocks that are hits, at each of these capacities.
    ///
    /// Args:
    ///     capacities: numbers of blocks that a cache can hold.
    ///
    /// Returns:
    ///     Hit ratios as fractions, one float64 per capacity; 0 without lookups.
    fn hit_ratios<'py>(
        &self,
        capacities: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyArray1<f64>>> {
        let (py, capacities) = (capacities.py(), capacities_from_py(capacities)?);
        let ratios = detached(py, &self.0, |this| this.curve.hit_ratios(&capacities));
        Ok(ratios.into_pyarray(py))
    }

    /// Return the standard error of the hit ratio at each of these capacities.
    ///
    /// The estimate comes from the differences between 16 parts of the sample. It leaves out the
    /// keys with many uses, whose capacities are estimates, too. Where these keys make most of the
    /// hits, the error can be several times as large: compare curves of several seeds.
    ///
    /// Args:
    ///     capacities: numbers of blocks that a cache can hold.
    ///
    /// Returns:
    ///     Standard errors as fractions, one float64 per capacity: 0.01 is one point. They are 0
    ///     while `rate` is 1.
    fn errors<'py>(&self, capacities: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyArray1<f64>>> {
        let (py, capacities) = (capacities.py(), capacities_from_py(capacities)?);
        let errors = detached(py, &self.0, |this| this.curve.errors(&capacities));
        Ok(errors.into_pyarray(py))
    }

    /// The capacity, in blocks, from which on a larger cache has no more hits.
    #[getter]
    fn largest_capacity(&self) -> u64 {
        lock(&self.0).curve.largest_capacity()
    }

    /// Requests looked up.
    #[getter]
    fn num_requests(&self) -> u64 {
        lock(&self.0).curve.num_requests()
    }

    /// Blocks looked up: the keys of all requests, those of earlier turns in full.
    #[getter]
    fn num_lookups(&self) -> u64 {
        lock(&self.0).curve.num_lookups()
    }

    /// Distinct blocks that the curve remembers. It is an estimate once `rate` is below 1.
    #[getter]
    fn num_unique(&self) -> u64 {
        lock(&self.0).curve.num_unique()
    }

    /// Keys that the curve watches.
    #[getter]
    fn num_keys(&self) -> usize {
        lock(&self.0).curve.num_keys()
    }

    /// The share of new keys that the curve watches: 1.0 while it is exact.
    #[getter]
    fn rate(&self) -> f64 {
        lock(&self.0).curve.rate()
    }

    /// Bytes of memory that the curve takes.
    #[getter]
    fn memory_bytes(&self) -> usize {
        lock(&self.0).curve.memory_bytes()
    }
}

/// Return an id for each block hash, which only those who have the salt can compute.
///
/// Equal hashes have equal ids under one salt. Ids under two salts have nothing in common.
///
///     >>> salted_ids([b"one", b"two", b"one"], b"salt").tolist()
///     [3556238144577063906, 1513496506158520935, 3556238144577063906]
///
/// Args:
///     hashes: block hashes, of one width.
///     salt: random bytes, 16 or more to keep guesses out.
///
/// Returns:
///     Ids from 0 to 2**63 - 1, one uint64 per hash.
///
/// Raises:
///     ConfigError: a hash that is no `bytes`, is empty or longer than 32, or of another width.
#[pyfunction]
pub(crate) fn salted_ids<'py>(
    hashes: &Bound<'py, PyAny>,
    salt: &[u8],
) -> PyResult<Bound<'py, PyArray1<u64>>> {
    let (py, hashes) = (hashes.py(), self::hashes(hashes)?);
    Ok(py.detach(|| curve::salted_ids(&hashes, salt)).into_pyarray(py))
}

/// Return the most blocks that any cache can hit, at each of these capacities.
///
/// The bound knows the future. It keeps the blocks with the nearest next uses, and it may bypass
/// the cache. It holds for every eviction policy of a cache with one full-attention group that
/// looks up each request as a whole. Releases the interpreter lock.
///
///     >>> clairvoyant_hits([1, 2, 3, 1, 2, 4, 1, 2, 3], [0, 3, 6, 9], [1, 2, 3]).tolist()
///     [2, 4, 5]
///
/// Args:
///     keys: keys of all requests, one request after the other, as `HitCurve` takes them.
///     offsets: where each request begins in `keys`, and the number of keys at the end.
///     capacities: numbers of blocks that the cache can hold.
///
/// Returns:
///     Hit blocks over all requests, one int64 per capacity.
///
/// Raises:
///     ConfigError: a key that is no hash and no integer within the bounds, keys that are not
///         chained, offsets that do not fit the keys, more than 2**32 - 1 keys, or the machine
///         lacks the memory.
#[pyfunction]
pub(crate) fn clairvoyant_hits<'py>(
    keys: &Bound<'py, PyAny>,
    offsets: &Bound<'py, PyAny>,
    capacities: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyArray1<i64>>> {
    let (py, capacities) = (keys.py(), capacities_from_py(capacities)?);
    let (keys, offsets) = (Keys::from_py(keys)?, counts(offsets, "offsets")?);
    let prompts = Prompts::new(&keys.words, &offsets).map_err(to_py)?;
    let hits = py.detach(|| {
        let future = Clairvoyant::new(prompts)?;
        capacities.iter().map(|&capacity| future.hits(capacity)).collect::<Result<Vec<_>>>()
    });
    Ok(to_int64(py, hits.map_err(to_py)?))
}

/// A curve, and what its keys are made from.
struct KeyedCurve {
    curve: curve::HitCurve,
    source: Option<KeySource>,
}

impl KeyedCurve {
    /// Takes on `source`, or refuses one that differs.
    fn agree(&mut self, source: Option<KeySource>) -> Result<()> {
        match (self.source, source) {
            (Some(KeySource::Hashes(known)), Some(KeySource::Hashes(given))) => known.check(given),
            (Some(known), Some(given)) if known != given => Err(Error::Config(
                "hashes and integers in one curve: use one kind of key per curve".to_owned(),
            )),
            (known, given) => {
                self.source = known.or(given);
                Ok(())
            }
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum KeySource {
    Hashes(HashWidth),
    Integers,
}

/// Keys as the core takes them; no source where there are none.
struct Keys {
    words: Vec<u64>,
    source: Option<KeySource>,
}

impl Keys {
    /// From a sequence of hashes, a sequence of ints, or an array of integers.
    fn from_py(keys: &Bound<'_, PyAny>) -> PyResult<Self> {
        let is_array = keys.cast::<PyUntypedArray>().is_ok();
        let first = (!is_array).then(|| keys.get_item(0).ok()).flatten();
        if first.is_some_and(|first| first.is_instance_of::<PyBytes>()) {
            let hashes = hashes(keys)?;
            let source = Some(KeySource::Hashes(hashes.width()));
            return Ok(Self { words: keys_of(&hashes), source });
        }
        let words = integers(keys)?;
        Ok(Self { source: (!words.is_empty()).then_some(KeySource::Integers), words })
    }
}

fn integers(keys: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
    if let Ok(array) = keys.cast::<PyUntypedArray>() {
        check_integer_array(array, "keys")?;
        if array.dtype().kind() == b'u' {
            return native_copy(array);
        }
        let unsigned = native_copy::<i64>(array)?.into_iter().map(u64::try_from);
        return unsigned.collect::<Result<_, _>>().map_err(|_| {
            ConfigError::new_err("a negative key: keys are integers from 0 to 2**64 - 1")
        });
    }
    if keys.is_instance_of::<PyBytes>() || keys.cast::<PySequence>().is_err() {
        return Err(ConfigError::new_err(format!(
            "keys is of type {}: give a sequence of hashes or of integers, or an integer array",
            keys.get_type()
        )));
    }
    let mut words = Vec::new(); // not as long as `__len__` says: a sequence may lie
    for (position, key) in keys.try_iter()?.enumerate() {
        let key = key?;
        let word = key.extract().map_err(|_: PyErr| {
            let hint = if key.is_instance_of::<PyString>() {
                ": bytes.fromhex(text) of a hash as text"
            } else {
                ""
            };
            let wrong = if key.is_instance_of::<PyInt>() {
                "an integer out of range".to_owned()
            } else {
                format!("of type {}", key.get_type())
            };
            ConfigError::new_err(format!(
                "key {position} is {wrong}: keys are all hashes, or all integers from 0 to \
                 2**64 - 1{hint}"
            ))
        })?;
        push(keys.py(), &mut words, word)?;
    }
    Ok(words)
}

fn capacities_from_py(capacities: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
    Ok(counts(capacities, "capacities")?.into_iter().map(|capacity| capacity as u64).collect())
}

fn to_int64(py: Python<'_>, numbers: Vec<u64>) -> Bound<'_, PyArray1<i64>> {
    numbers.into_iter().map(u64::cast_signed).collect::<Vec<_>>().into_pyarray(py)
}
