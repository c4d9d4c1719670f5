//! Conversion between Python's sequences and arrays and the core's lists.

use std::ops::RangeInclusive;

use kvstow_core::curve::MIN_KEYS;
use kvstow_core::error::Error;
use kvstow_core::group::MAX_GROUP_TOKENS;
use kvstow_core::ids::{BlockId, GroupId, JobId};
use kvstow_core::ledger::MAX_TOKENS;
use kvstow_core::offload::{MAX_BLOCKS_PER_SLOT, MAX_WORLD_SIZE};
use kvstow_core::pool::MAX_BLOCKS;
use numpy::{
    IntoPyArray, PyArray1, PyArrayDescrMethods, PyArrayMethods, PyUntypedArray,
    PyUntypedArrayMethods,
};
use pyo3::exceptions::{PyMemoryError, PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use pyo3::types::{PyBool, PyBytes, PyInt, PyList, PySequence, PyString, PyTuple};

use crate::error::{ConfigError, InvalidBlock, StateError, to_py};
use crate::hash::native_copy;

/// A count from Python: 0 or more.
#[derive(Clone, Copy)]
pub(crate) struct Count(pub(crate) usize);

impl<'py> FromPyObject<'_, 'py> for Count {
    type Error = PyErr;

    fn extract(obj: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        Self::named(&obj, "a count", 0..=usize::MAX)
    }
}

/// What Python passes as an argument, which errors name with its bounds. The core checks the bounds
/// of a number that fits into 64 bits.
pub(crate) trait Named: Sized {
    fn named(obj: &Bound<'_, PyAny>, name: &str, bounds: RangeInclusive<usize>) -> PyResult<Self>;
}

impl Named for Count {
    fn named(obj: &Bound<'_, PyAny>, name: &str, bounds: RangeInclusive<usize>) -> PyResult<Self> {
        obj.extract().map(Self).map_err(|error: PyErr| {
            let py = obj.py();
            if error.is_instance_of::<PyOverflowError>(py) {
                let given = shown(obj);
                let (least, most) = bounds.into_inner();
                return ConfigError::new_err(format!(
                    "{name} is {given}: it must be {least} to {most}"
                ));
            }
            if error.is_instance_of::<PyTypeError>(py) {
                return PyTypeError::new_err(format!("{name}: {}", error.value(py)));
            }
            error
        })
    }
}

impl Named for Option<Count> {
    fn named(obj: &Bound<'_, PyAny>, name: &str, bounds: RangeInclusive<usize>) -> PyResult<Self> {
        if obj.is_none() { Ok(None) } else { Count::named(obj, name, bounds).map(Some) }
    }
}

/// Defines the conversion of each argument with these bounds, for `from_py_with`.
macro_rules! named_counts {
    ($($bounds:expr => $($name:ident),+;)+) => {
        $($(pub(crate) fn $name<T: Named>(obj: &Bound<'_, PyAny>) -> PyResult<T> {
            T::named(obj, stringify!($name), $bounds)
        })+)+
    };
}

/// Conversions of counts, each with the name of its argument.
pub(crate) mod named {
    use pyo3::prelude::*;

    use super::{
        MAX_BLOCKS, MAX_BLOCKS_PER_SLOT, MAX_GROUP_TOKENS, MAX_TOKENS, MAX_WORLD_SIZE, MIN_KEYS,
        Named,
    };

    named_counts! {
        0..=usize::MAX => max_bytes, min_promote_tokens, n, num_kept, num_local, seed;
        MIN_KEYS..=usize::MAX => max_keys;
        1..=usize::MAX => max_disk_blocks_in_flight;
        0..=u16::MAX.into() => group;
        1..=u8::MAX.into() => store_threshold;
        1..=MAX_GROUP_TOKENS => block_size, chunk, window;
        0..=MAX_GROUP_TOKENS => extra_retained_tokens;
        0..=MAX_TOKENS => max_in_flight_tokens, must_fit_tokens, num_external_tokens,
            num_in_flight_tokens, num_lookahead_tokens, num_new_tokens, reserve;
        1..=MAX_BLOCKS - 1 => num_host_blocks;
        0..=MAX_BLOCKS - 1 => num_disk_blocks;
        0..=MAX_BLOCKS => num_device_blocks;
        2..=MAX_BLOCKS => num_blocks;
        1..=MAX_BLOCKS_PER_SLOT => blocks_per_slot;
        1..=MAX_WORLD_SIZE => world_size;
    }
}

/// The most items in a call. A pool has no more blocks.
const MAX_ITEMS: usize = MAX_BLOCKS;

/// The capacity to reserve for a caller's sequence, whose `__len__` may be wrong.
pub(crate) fn capacity_hint(obj: &Bound<'_, PyAny>) -> usize {
    obj.len().unwrap_or(0).min(1 << 20)
}

/// Number of items after which a long loop over a caller's sequence lets Python handle signals.
const BETWEEN_SIGNALS: usize = 1 << 20;

/// Appends an item of a caller's sequence, of which only the end tells the length. If the machine
/// lacks the memory, it raises `MemoryError`, as a list does: a failed allocation of `push` would
/// end the process.
#[inline]
pub(crate) fn push<T>(py: Python<'_>, items: &mut Vec<T>, item: T) -> PyResult<()> {
    let num_items = items.len();
    if num_items == items.capacity() {
        items.try_reserve(1).map_err(|_| {
            PyMemoryError::new_err(format!("no memory for more than {num_items} items"))
        })?;
    }
    items.push(item);
    if items.len().is_multiple_of(BETWEEN_SIGNALS) { py.check_signals() } else { Ok(()) }
}

/// Integers from any sequence of ints or any one-dimensional integer array. `name` is what the
/// caller's argument has in errors. `too_large` makes the error for an int that exceeds 64 bits.
fn ints(
    obj: &Bound<'_, PyAny>,
    name: &str,
    too_large: impl Fn(&Bound<'_, PyAny>) -> PyErr,
) -> PyResult<Vec<i64>> {
    if let Ok(array) = obj.cast::<PyUntypedArray>() {
        check_integer_array(array, name)?;
        let dtype = array.dtype();
        if dtype.kind() == b'u' && dtype.itemsize() == size_of::<u64>() {
            return ints(&obj.call_method0("tolist")?, name, too_large);
        }
        return native_copy(array);
    }
    let what = format!("integers for {name}");
    let items = sequence(obj, &what)?;
    let num_items = items.len().unwrap_or(usize::MAX);
    if num_items > MAX_ITEMS {
        return Err(ConfigError::new_err(format!(
            "{num_items} integers in one call: pass at most {MAX_ITEMS}"
        )));
    }
    let mut numbers = Vec::with_capacity(capacity_hint(obj));
    let tuple = self::items(obj, &what)?;
    // Most requests of a step have equal counts, and Python has one object for a small int.
    let mut last: Option<(Borrowed<'_, '_, PyAny>, i64)> = None;
    for item in tuple.iter_borrowed() {
        let number = match last {
            Some((same, number)) if item.is(same) => number,
            _ => int(&item, name, &too_large)?,
        };
        numbers.push(number);
        last = Some((item, number));
    }
    Ok(numbers)
}

fn int(
    item: &Bound<'_, PyAny>,
    name: &str,
    too_large: impl Fn(&Bound<'_, PyAny>) -> PyErr,
) -> PyResult<i64> {
    if item.is_exact_instance_of::<PyBool>() {
        return Err(ConfigError::new_err(format!(
            "{name} has {item}, which is not an integer: pass ids, not a mask"
        )));
    }
    item.extract::<i64>().map_err(|_| {
        if item.is_instance_of::<PyInt>() {
            return too_large(item);
        }
        let item = shown(item);
        ConfigError::new_err(format!("{name} has {item}, which is not an integer"))
    })
}

/// Python's `repr` of an object, or its type if `repr` fails.
fn shown(obj: &Bound<'_, PyAny>) -> String {
    obj.repr().map_or_else(|_| obj.get_type().to_string(), |text| text.to_string())
}

/// Refuses arrays that are not one-dimensional or hold no integers. `name` is what the caller's
/// argument has in errors.
pub(crate) fn check_integer_array(array: &Bound<'_, PyUntypedArray>, name: &str) -> PyResult<()> {
    let wrong = if array.ndim() != 1 {
        format!("shape {:?}", array.shape())
    } else if !matches!(array.dtype().kind(), b'i' | b'u') {
        format!("dtype {}", array.dtype())
    } else {
        return Ok(());
    };
    Err(ConfigError::new_err(format!(
        "{name} is an array of {wrong}: pass a one-dimensional array of integers"
    )))
}

pub(crate) fn sequence<'a, 'py>(
    obj: &'a Bound<'py, PyAny>,
    what: &str,
) -> PyResult<&'a Bound<'py, PySequence>> {
    let is_text = obj.is_instance_of::<PyString>() || obj.is_instance_of::<PyBytes>();
    obj.cast::<PySequence>().ok().filter(|_| !is_text).ok_or_else(|| {
        let kind = obj.get_type();
        ConfigError::new_err(format!("got {kind}, not a sequence of {what}: pass a list"))
    })
}

/// The items of a sequence of `what`. To borrow them saves two calls an item.
fn items<'py>(obj: &Bound<'py, PyAny>, what: &str) -> PyResult<Bound<'py, PyTuple>> {
    if let Ok(list) = obj.cast_exact::<PyList>() {
        return Ok(list.to_tuple());
    }
    // Not `to_tuple`, which reserves memory for what `__len__` says.
    let items = sequence(obj, what)?.try_iter()?.collect::<PyResult<Vec<_>>>()?;
    PyTuple::new(obj.py(), items)
}

/// The items of a sequence. To take them as a `Vec`, PyO3 would reserve memory for what `__len__`
/// says.
pub(crate) fn listed<'py>(obj: &Bound<'py, PyAny>) -> PyResult<Vec<Bound<'py, PyAny>>> {
    Ok(items(obj, "items")?.iter().collect())
}

/// As [`listed`], or None.
pub(crate) fn listed_or_none<'py>(
    obj: &Bound<'py, PyAny>,
) -> PyResult<Option<Vec<Bound<'py, PyAny>>>> {
    if obj.is_none() { Ok(None) } else { listed(obj).map(Some) }
}

/// Block ids in a pool of `num_blocks`.
pub(crate) fn ids(obj: &Bound<'_, PyAny>, num_blocks: usize) -> PyResult<Vec<BlockId>> {
    let no_such_block = |id| to_py(Error::NoSuchBlock { id, num_blocks });
    let to_id = |id: i64| match u32::try_from(id) {
        Ok(small) if (small as usize) < num_blocks => Ok(BlockId(small)),
        _ => Err(no_such_block(id.to_string())),
    };
    let int32 = obj.cast::<PyArray1<i32>>().ok().and_then(|array| array.try_readonly().ok());
    if let Some(Ok(items)) = int32.map(|array| array.to_vec()) {
        return items.into_iter().map(|id| to_id(id.into())).collect();
    }
    ints(obj, "block ids", |item| no_such_block(shown(item)))?.into_iter().map(to_id).collect()
}

/// Counts of 0 or more from the argument `name`.
pub(crate) fn counts(obj: &Bound<'_, PyAny>, name: &str) -> PyResult<Vec<usize>> {
    counts_within(obj, name, 0..=isize::MAX.cast_unsigned())
}

/// As [`counts`]. The caller checks the bounds of each that fits into 64 bits.
pub(crate) fn counts_within(
    obj: &Bound<'_, PyAny>,
    name: &str,
    bounds: RangeInclusive<usize>,
) -> PyResult<Vec<usize>> {
    let (least, most) = bounds.into_inner();
    let refused = |count: String| {
        ConfigError::new_err(format!("{name} has {count}: each must be {least} to {most}"))
    };
    let to_count = |count: i64| usize::try_from(count).map_err(|_| refused(count.to_string()));
    ints(obj, name, |item| refused(shown(item)))?.into_iter().map(to_count).collect()
}

/// Ids of blocks or slots from the argument `name`. The caller checks them against its own number.
pub(crate) fn places(obj: &Bound<'_, PyAny>, name: &str) -> PyResult<Vec<usize>> {
    let refused = |id: String| {
        InvalidBlock::new_err(format!("{name} has {id}, which is in no pool: pass ids from 0 on"))
    };
    let to_place = |id: i64| usize::try_from(id).map_err(|_| refused(id.to_string()));
    ints(obj, name, |item| refused(shown(item)))?.into_iter().map(to_place).collect()
}

/// Bools from any sequence of them, or any one-dimensional array.
pub(crate) fn bools(obj: &Bound<'_, PyAny>) -> PyResult<Vec<bool>> {
    if let Ok(array) = obj.cast::<PyUntypedArray>() {
        return bools(&array.call_method0("tolist")?);
    }
    let mut items = Vec::with_capacity(capacity_hint(obj));
    for item in self::items(obj, "bools")?.iter_borrowed() {
        let is_true = item.extract::<bool>();
        items.push(is_true.map_err(|_| {
            ConfigError::new_err(format!("{} is not a bool: pass True or False", shown(&item)))
        })?);
    }
    Ok(items)
}

/// The id of a job. An int that no job id can be is not in flight.
pub(crate) fn job_id(obj: &Bound<'_, PyAny>) -> PyResult<JobId> {
    obj.extract().map(JobId).map_err(|error: PyErr| {
        if error.is_instance_of::<PyOverflowError>(obj.py()) {
            let id = shown(obj);
            return StateError::new_err(format!("job {id} is not in flight: every job ends once"));
        }
        error
    })
}

/// A name from Python, for example an option's value.
pub(crate) struct Name(pub(crate) String);

impl<'py> FromPyObject<'_, 'py> for Name {
    type Error = PyErr;

    fn extract(obj: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let text = obj.cast::<PyString>()?;
        text.to_str().map(|text| Self(text.to_owned())).map_err(|_| not_unicode(&obj))
    }
}

/// A request id.
pub(crate) struct RequestId(PyBackedStr);

impl std::ops::Deref for RequestId {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl<'py> FromPyObject<'_, 'py> for RequestId {
    type Error = PyErr;

    fn extract(obj: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let text = obj.cast::<PyString>().map_err(|_| {
            PyTypeError::new_err(format!("request_id is of type {}: pass a str", obj.get_type()))
        })?;
        PyBackedStr::try_from(text.to_owned()).map(Self).map_err(|_| not_unicode(&obj))
    }
}

fn not_text(obj: &Bound<'_, PyAny>) -> PyErr {
    ConfigError::new_err(format!("a request id is of type {}: pass a str", obj.get_type()))
}

fn not_unicode(obj: &Bound<'_, PyAny>) -> PyErr {
    ConfigError::new_err(format!("{} holds a lone surrogate: pass valid Unicode", shown(obj)))
}

/// The id of a group: its position in the model's list of groups.
pub(crate) fn group_id(group: Count) -> PyResult<GroupId> {
    u16::try_from(group.0).map(GroupId).map_err(|_| {
        ConfigError::new_err(format!(
            "group {} is too large: groups count from 0 to {}",
            group.0,
            u16::MAX
        ))
    })
}

/// Request ids. [`as_strs`] borrows them.
pub(crate) fn request_ids<'py>(obj: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyTuple>> {
    if let Ok(list) = obj.cast_exact::<PyList>() {
        return Ok(list.to_tuple());
    }
    let to_text = |item: PyResult<Bound<'py, PyAny>>| {
        item?.cast_into::<PyString>().map_err(|error| not_text(&error.into_inner()))
    };
    let texts = sequence(obj, "request ids")?.try_iter()?.map(to_text);
    PyTuple::new(obj.py(), texts.collect::<PyResult<Vec<_>>>()?)
}

/// The text of request ids.
pub(crate) fn as_strs<'a>(request_ids: &'a Bound<'_, PyTuple>) -> PyResult<Vec<&'a str>> {
    let mut texts = Vec::with_capacity(request_ids.len());
    for item in request_ids.iter_borrowed() {
        texts.push(item.extract::<&str>().map_err(|_| match item.cast::<PyString>() {
            Ok(_) => not_unicode(&item),
            Err(_) => not_text(&item),
        })?);
    }
    Ok(texts)
}

/// Block ids, or counts of blocks, as Python gets them.
pub(crate) type Int32Array<'py> = Bound<'py, PyArray1<i32>>;

/// Ids as an `int32` array.
pub(crate) fn to_array(py: Python<'_>, ids: impl IntoIterator<Item = BlockId>) -> Int32Array<'_> {
    // Ids are below 2^31: a pool has no more blocks.
    ids.into_iter().map(|id| id.0.cast_signed()).collect::<Vec<_>>().into_pyarray(py)
}

/// Offsets into an array of ids.
pub(crate) fn offsets_to_array(py: Python<'_>, offsets: Vec<usize>) -> Int32Array<'_> {
    // Each block is there once, so there are fewer than 2^31.
    let to_i32 = |offset| i32::try_from(offset).unwrap_or(i32::MAX);
    offsets.into_iter().map(to_i32).collect::<Vec<_>>().into_pyarray(py)
}
