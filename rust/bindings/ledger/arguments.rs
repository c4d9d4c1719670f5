//! The arguments of `BlockLedger`'s methods, and what they return.

use std::ops::RangeInclusive;

use kvstow_core::ledger::{Context, NewIds, Publish};
use kvstow_core::pool::MAX_BLOCKS;
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::convert::{Name, counts_within, ids};
use crate::error::ConfigError;
use crate::hash::{extra_keys_from_py, tokens_from_py};
use crate::hashes::Hashes;

/// A request's hashes, tokens and extra keys.
pub(super) type Known<'py> = (Hashes, Option<Vec<u64>>, Option<Bound<'py, PyAny>>);

pub(super) fn publish_from_py(given: Option<Name>) -> PyResult<Publish> {
    match given.as_ref().map_or("granted", |name| name.0.as_str()) {
        "granted" => Ok(Publish::Granted),
        "computed" => Ok(Publish::Computed),
        other => Err(ConfigError::new_err(format!(
            "publish is {other:?}: it is \"granted\" or \"computed\""
        ))),
    }
}

/// One count per request, from the argument `name`.
pub(super) fn counts_for(
    names: &[&str],
    given: &Bound<'_, PyAny>,
    name: &str,
    bounds: RangeInclusive<usize>,
) -> PyResult<Vec<usize>> {
    let tokens = counts_within(given, name, bounds)?;
    if names.len() != tokens.len() {
        return Err(ConfigError::new_err(format!(
            "{} request_ids and {} {name}: pass one number for each request",
            names.len(),
            tokens.len()
        )));
    }
    Ok(tokens)
}

pub(super) fn new_ids(given: &Bound<'_, PyAny>) -> PyResult<NewIds> {
    let Ok(name) = given.cast::<PyString>() else {
        return Ok(NewIds::Given(ids(given, MAX_BLOCKS)?));
    };
    match name.to_str() {
        Ok("same") => Ok(NewIds::Same),
        Ok("packed") => Ok(NewIds::Packed),
        _ => Err(ConfigError::new_err(format!(
            "block_ids is {}: it is \"same\", \"packed\" or the ids to take",
            name.repr()?
        ))),
    }
}

pub(super) fn context(
    tokens: Option<&Bound<'_, PyAny>>,
    extra_keys: Option<&Bound<'_, PyAny>>,
) -> PyResult<Context> {
    Ok(Context {
        tokens: tokens.map(tokens_from_py).transpose()?,
        extra_keys: extra_keys.map(extra_keys_from_py).transpose()?,
    })
}
