//! `hash_tokens`, and the conversion of tokens and extra keys between Python and the core.

use std::fmt::Display;

use kvstow_core::hash::{
    self, Algorithm, BlockExtraKeys, DEFAULT_SEED, ExtraKey, HashOptions, MAX_EXTRA_KEY_DEPTH,
    extra_keys_too_deep, token_out_of_bounds,
};
use numpy::{
    Element, PyArray1, PyArrayDescrMethods, PyArrayMethods, PyReadonlyArray1, PyUntypedArray,
    PyUntypedArrayMethods,
};
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyByteArray, PyBytes, PyInt, PyList, PySequence, PyString, PyTuple};

use crate::convert::{Name, check_integer_array, push};
use crate::error::{ConfigError, to_py};
use crate::hashes::Hashes;
use crate::pickled::{Pickled, is_protocol_of_core};

/// Return one digest per full block of `tokens`. Each digest covers the whole prefix.
///
/// The digests are bit-identical to those of vLLM's `hash_block_tokens` with the same algorithm.
///
/// Args:
///     tokens: token ids, 0 to 2**63. A partial last block gets no digest.
///     block_size: tokens per block, at least 1.
///     algorithm: vLLM's default is "sha256" (32-byte digests of Python's pickle). "sha256_cbor"
///         (32-byte digests) and "xxhash_cbor" (16-byte digests) do not depend on Python.
///     parent: the digest of the block before the first; None or empty at the start of a prompt.
///     extra_keys: one entry per full block, None or a sequence of keys (nested tuples of ints,
///         strings, bytes). vLLM derives keys from LoRA, multimodal inputs and cache salts. With
///         "sha256", lists and tuples differ, and so do one object twice and two equal objects.
///     seed: the string that determines the parent digest of a prompt's first block. vLLM takes
///         `PYTHONHASHSEED` if it is set. Otherwise vLLM takes "vllm-none-hash" for SHA-256 and a
///         random string per process for xxhash_cbor. This function takes "vllm-none-hash" for all
///         by default. It does not read the environment.
///
/// Returns:
///     One digest per full block, as a sequence that ledgers and schedulers share.
///
/// Raises:
///     ConfigError: a token outside its bounds, a block size of 0, an unknown algorithm, a
///         number of extra keys other than the number of full blocks, or a key of another type.
#[pyfunction]
#[pyo3(signature = (
    tokens, block_size, *, algorithm = Name("sha256_cbor".to_owned()), parent = None,
    extra_keys = None, seed = None
), text_signature = "(tokens, block_size, *, algorithm='sha256_cbor', parent=None, \
    extra_keys=None, seed=None)")]
pub(crate) fn hash_tokens<'py>(
    tokens: &Bound<'py, PyAny>,
    block_size: &Bound<'py, PyAny>,
    algorithm: Name,
    parent: Option<&Bound<'py, PyAny>>,
    extra_keys: Option<&Bound<'py, PyAny>>,
    seed: Option<Name>,
) -> PyResult<Hashes> {
    let py = tokens.py();
    let parent = parent.map(digest_from_py).transpose()?;
    let algorithm: Algorithm = algorithm.0.parse().map_err(to_py)?;
    let block_size = block_size_from_py(block_size)?;
    let (ids, are_ints) = ids_from_py(tokens)?;
    let keys = extra_keys.map(extra_keys_from_py).transpose()?;
    let seed = seed.as_ref().map(|seed| seed.0.as_str());
    let digest = parent.map(PyBytesMethods::as_bytes);
    let options = HashOptions { algorithm, parent: digest, extra_keys: keys.as_deref(), seed };
    if algorithm == Algorithm::Sha256 {
        let is_bytes = parent.is_none_or(|digest| digest.is_exact_instance_of::<PyBytes>());
        let is_plain = are_ints && is_bytes && is_protocol_of_core(py)?;
        if !is_plain || !options.is_native(block_size) {
            let num_blocks = hash::check(&ids, block_size, options).map_err(to_py)?;
            let seed = seed.unwrap_or(DEFAULT_SEED);
            return Pickled { tokens, block_size, parent, extra_keys, seed }.digests(num_blocks);
        }
    }
    let hashes = py.detach(|| hash::hash_tokens(&ids, block_size, options)).map_err(to_py)?;
    Ok(Hashes::chained(hashes, block_size))
}

/// Stands for a negative id. It is above the largest id.
const NEGATIVE: u64 = u64::MAX;

fn digest_from_py<'a, 'py>(parent: &'a Bound<'py, PyAny>) -> PyResult<&'a Bound<'py, PyBytes>> {
    parent.cast::<PyBytes>().map_err(|_| {
        let kind = type_name(parent);
        ConfigError::new_err(format!(
            "parent is of type {kind}: pass the digest of one block, such as hashes[-1]"
        ))
    })
}

fn block_size_from_py(block_size: &Bound<'_, PyAny>) -> PyResult<usize> {
    block_size.extract().map_err(|error: PyErr| {
        if error.is_instance_of::<PyOverflowError>(block_size.py()) {
            let given = int_text(block_size);
            return ConfigError::new_err(format!(
                "block_size is {given}: a block has 1 to 2**64 - 1 tokens"
            ));
        }
        if error.is_instance_of::<PyTypeError>(block_size.py()) {
            return PyTypeError::new_err(format!("block_size: {}", error.value(block_size.py())));
        }
        error
    })
}

/// Reads token ids from a sequence of ints or a one-dimensional integer array.
pub(crate) fn tokens_from_py(tokens: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
    ids_from_py(tokens).map(|(ids, _)| ids)
}

/// Also returns whether all are numbers of an array, or ints and of no subclass of int.
fn ids_from_py(tokens: &Bound<'_, PyAny>) -> PyResult<(Vec<u64>, bool)> {
    if let Ok(array) = tokens.cast::<PyUntypedArray>() {
        return Ok((tokens_from_array(array)?, true));
    }
    if tokens.cast::<PySequence>().is_err() {
        let kind = type_name(tokens);
        return Err(ConfigError::new_err(format!(
            "tokens is of type {kind}: pass a sequence of ints or an integer array"
        )));
    }
    // Any other `__len__` may be wrong.
    let mut ids = Vec::with_capacity(tokens.cast_exact::<PyList>().map_or(0, PyListMethods::len));
    let mut are_ints = true;
    for (position, token) in tokens.try_iter()?.enumerate() {
        let token = token?;
        are_ints &= token.is_exact_instance_of::<PyInt>();
        let id = id_from_py(&token).map_err(|error| bad_token(position, &token, error))?;
        push(tokens.py(), &mut ids, id)?;
    }
    Ok((ids, are_ints))
}

/// PyO3 reads an i64 from an int with one call of Python, and a u64 with three.
#[inline]
fn id_from_py(token: &Bound<'_, PyAny>) -> PyResult<u64> {
    match token.extract::<i64>() {
        Ok(id @ 0..) => Ok(id.cast_unsigned()),
        Err(error) if !error.is_instance_of::<PyOverflowError>(token.py()) => Err(error),
        _ => token.extract(), // 2^63, or too large, or negative
    }
}

fn tokens_from_array(array: &Bound<'_, PyUntypedArray>) -> PyResult<Vec<u64>> {
    check_integer_array(array, "tokens")?;
    let direct = direct_ids::<i64>(array).or_else(|| direct_ids::<i32>(array));
    let direct = direct.or_else(|| direct_ids::<u32>(array));
    if let Some(ids) = direct {
        return ids;
    }
    if array.dtype().kind() == b'u' {
        return native_copy::<u64>(array);
    }
    ids_of(&native_copy::<i64>(array)?)
}

/// Reads the ids of an array of `T` without a copy between. A copy of many ids costs more than their
/// hashes, because the system gives its pages anew each time. None for an array of another form.
fn direct_ids<T>(array: &Bound<'_, PyUntypedArray>) -> Option<PyResult<Vec<u64>>>
where
    T: Element + Copy + Display + TryInto<u64>,
{
    let array = array.extract::<PyReadonlyArray1<'_, T>>().ok()?;
    Some(ids_of(array.as_slice().ok()?))
}

fn ids_of<T: Copy + Display + TryInto<u64>>(tokens: &[T]) -> PyResult<Vec<u64>> {
    // Without a branch for each token, the compiler converts several at once.
    let ids: Vec<u64> = tokens.iter().map(|&token| token.try_into().unwrap_or(NEGATIVE)).collect();
    if ids.contains(&NEGATIVE)
        && let Some(position) = ids.iter().position(|&id| id == NEGATIVE)
    {
        return Err(to_py(token_out_of_bounds(position, &tokens[position])));
    }
    Ok(ids)
}

/// Copies the array's numbers as `T`, from any stride, alignment, width and byte order.
pub(crate) fn native_copy<T: Element + Copy>(
    array: &Bound<'_, PyUntypedArray>,
) -> PyResult<Vec<T>> {
    if let Ok(plain) = array.extract::<PyReadonlyArray1<'_, T>>()
        && let Ok(numbers) = plain.as_slice()
    {
        return Ok(numbers.to_vec());
    }
    // It always copies, and returns a contiguous array in native byte order.
    let plain = array.call_method1("astype", (numpy::dtype::<T>(array.py()),))?;
    Ok(plain.cast_into::<PyArray1<T>>()?.to_vec()?)
}

fn bad_token(position: usize, token: &Bound<'_, PyAny>, error: PyErr) -> PyErr {
    let py = token.py();
    if error.is_instance_of::<PyOverflowError>(py) {
        to_py(token_out_of_bounds(position, &int_text(token)))
    } else if error.is_instance_of::<PyTypeError>(py) {
        let kind = type_name(token);
        ConfigError::new_err(format!(
            "token {position} is of type {kind}: token ids are ints from 0 to 2**63"
        ))
    } else {
        error // raised by the object itself
    }
}

/// Reads extra keys from a sequence with one entry per block: None, or a sequence of keys.
pub(crate) fn extra_keys_from_py(blocks: &Bound<'_, PyAny>) -> PyResult<Vec<BlockExtraKeys>> {
    if blocks.cast::<PySequence>().is_err() {
        let kind = type_name(blocks);
        return Err(ConfigError::new_err(format!(
            "extra_keys is of type {kind}: pass a sequence with one entry per full block"
        )));
    }
    let mut converted = Vec::new();
    for (block, keys) in blocks.try_iter()?.enumerate() {
        let keys = keys?;
        converted.push(if keys.is_none() { None } else { Some(block_keys(block, &keys)?) });
    }
    Ok(converted)
}

fn block_keys(block: usize, keys: &Bound<'_, PyAny>) -> PyResult<Vec<ExtraKey>> {
    let one_key = keys.is_instance_of::<PyString>()
        || keys.is_instance_of::<PyBytes>()
        || keys.is_instance_of::<PyByteArray>();
    if one_key || keys.cast::<PySequence>().is_err() {
        let kind = type_name(keys);
        return Err(ConfigError::new_err(format!(
            "the extra keys of block {block} are of type {kind}: pass None or a tuple of keys for \
             each block"
        )));
    }
    keys.try_iter()?.map(|key| key_from_py(block, &key?, MAX_EXTRA_KEY_DEPTH)).collect()
}

fn key_from_py(block: usize, key: &Bound<'_, PyAny>, levels: usize) -> PyResult<ExtraKey> {
    if key.is_none() {
        Ok(ExtraKey::Null)
    } else if let Ok(value) = key.cast::<PyBool>() {
        Ok(ExtraKey::Bool(value.is_true())) // checked before int, because a bool is an int
    } else if key.is_instance_of::<PyInt>() {
        let value = key.extract().map_err(|_| {
            ConfigError::new_err(format!(
                "an extra key of block {block} is an int wider than 128 bits"
            ))
        });
        Ok(ExtraKey::Int(value?))
    } else if let Ok(value) = key.cast::<PyBytes>() {
        Ok(ExtraKey::Bytes(value.as_bytes().to_vec()))
    } else if let Ok(value) = key.cast::<PyString>() {
        let text = value.to_str().map_err(|_| {
            ConfigError::new_err(format!(
                "an extra key of block {block} is a str with a lone surrogate"
            ))
        });
        Ok(ExtraKey::Text(text?.to_owned()))
    } else if key.is_instance_of::<PyTuple>() || key.is_instance_of::<PyList>() {
        let levels = levels.checked_sub(1).ok_or_else(|| to_py(extra_keys_too_deep(block)))?;
        let keys = key.try_iter()?.map(|key| key_from_py(block, &key?, levels));
        Ok(ExtraKey::Sequence(keys.collect::<PyResult<_>>()?))
    } else {
        let kind = type_name(key);
        Err(ConfigError::new_err(format!(
            "an extra key of block {block} is of type {kind}: keys are None, bools, ints, strings, \
             bytes, and tuples or lists of them"
        )))
    }
}

/// Returns extra keys as events report them: a list of tuples and None.
pub(crate) fn extra_keys_to_py<'py>(
    py: Python<'py>,
    blocks: &[BlockExtraKeys],
) -> PyResult<Bound<'py, PyAny>> {
    let list = PyList::empty(py);
    for keys in blocks {
        list.append(keys.as_deref().map(|keys| keys_to_py(py, keys)).transpose()?)?;
    }
    Ok(list.into_any())
}

fn keys_to_py<'py>(py: Python<'py>, keys: &[ExtraKey]) -> PyResult<Bound<'py, PyTuple>> {
    let keys = keys.iter().map(|key| key_to_py(py, key));
    PyTuple::new(py, keys.collect::<PyResult<Vec<_>>>()?)
}

fn key_to_py<'py>(py: Python<'py>, key: &ExtraKey) -> PyResult<Bound<'py, PyAny>> {
    Ok(match key {
        ExtraKey::Null => py.None().into_bound(py),
        ExtraKey::Bool(value) => PyBool::new(py, *value).to_owned().into_any(),
        ExtraKey::Int(value) => value.into_pyobject(py)?.into_any(),
        ExtraKey::Bytes(value) => PyBytes::new(py, value).into_any(),
        ExtraKey::Text(value) => PyString::new(py, value).into_any(),
        ExtraKey::Sequence(keys) => keys_to_py(py, keys)?.into_any(),
    })
}

fn type_name(value: &Bound<'_, PyAny>) -> String {
    value.get_type().qualname().map_or_else(|_| "unknown".to_owned(), |name| name.to_string())
}

/// Returns an int's text for a message. Python refuses to print thousands of digits.
fn int_text(value: &Bound<'_, PyAny>) -> String {
    match value.str() {
        Ok(text) if text.len().is_ok_and(|num_chars| num_chars <= 80) => text.to_string(),
        _ => "an int of more than 80 digits".to_owned(),
    }
}
