//! Checksums of rows of host memory, without the interpreter lock.
//!
//! CRC-32 is what other tools compute, too: files that a user inspects have it, and host slots. The
//! blocks of a tier below have XXH3 with 64 bits. Of the damage that is random, 32 bits let one block in four thousand
//! million pass, which a fleet may meet. A CRC needs carry-less multiplication in registers of 512
//! bits to keep up with memory, and many servers have none. XXH3 keeps up with those of 256 bits.
//! twox-hash looks for them when it runs; the library of the core would need a build of its own.

use std::hash::Hasher as _;

use crc_fast::crc32_iso_hdlc;
use numpy::{Element, IntoPyArray, PyArray1, PyReadonlyArray2, PyUntypedArrayMethods};
use prefetch_index::prefetch_index;
use pyo3::prelude::*;
use twox_hash::XxHash3_64;

use crate::convert::counts;
use crate::error::ConfigError;

/// Bytes between two looks at pending signals: a few milliseconds.
const BYTES_PER_BATCH: usize = 64 << 20;
/// Fewer bytes are summed before another thread could take the interpreter lock and give it back.
const MIN_BYTES_WITHOUT_LOCK: usize = 16 << 10;
/// A row of blocks comes from memory. There, an EPYC sums 2 to 23 % more bytes a second if each piece
/// asks for the cache lines ahead. A Zen 5 sums 20 % more with those 8 KiB ahead than with 2 KiB, and
/// as many of a row in a cache.
const PIECE_BYTES: usize = 2 << 10;
const AHEAD_BYTES: usize = 8 << 10;
const CACHE_LINE_BYTES: usize = 64;

/// Return the CRC-32 of each of these rows. The values equal those of `zlib.crc32`.
///
/// The work runs without the interpreter lock, unless it is short.
///
/// Args:
///     rows: a two-dimensional array. The bytes of each row are contiguous; rows may be apart.
///     row_ids: the rows to read, in any order.
///
/// Raises:
///     ConfigError: an array of another shape or dtype, rows that are not contiguous, or a row id
///         outside the array.
#[pyfunction]
pub(crate) fn row_checksums<'py>(
    rows: &Bound<'py, PyAny>,
    row_ids: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyArray1<u32>>> {
    of_rows(rows, row_ids, crc32_iso_hdlc)
}

/// Return the XXH3 digest of 64 bits, without a seed, of each of these rows.
///
/// The work runs without the interpreter lock, unless it is short.
///
/// Args:
///     rows: a two-dimensional array. The bytes of each row are contiguous; rows may be apart.
///     row_ids: the rows to read, in any order.
///
/// Raises:
///     ConfigError: an array of another shape or dtype, rows that are not contiguous, or a row id
///         outside the array.
#[pyfunction]
pub(crate) fn row_digests<'py>(
    rows: &Bound<'py, PyAny>,
    row_ids: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyArray1<u64>>> {
    of_rows(rows, row_ids, digest)
}

fn digest(row: &[u8]) -> u64 {
    let mut sum = XxHash3_64::new();
    for (piece, begin) in row.chunks(PIECE_BYTES).zip((AHEAD_BYTES..).step_by(PIECE_BYTES)) {
        for at in (begin..begin + piece.len()).step_by(CACHE_LINE_BYTES) {
            prefetch_index(row, at);
        }
        sum.write(piece);
    }
    sum.finish()
}

fn of_rows<'py, T: Element + Send>(
    rows: &Bound<'py, PyAny>,
    row_ids: &Bound<'py, PyAny>,
    sum: impl Fn(&[u8]) -> T + Sync,
) -> PyResult<Bound<'py, PyArray1<T>>> {
    let py = rows.py();
    let row_ids = counts(row_ids, "row_ids")?;
    let Ok(rows) = rows.extract::<PyReadonlyArray2<'py, u8>>() else {
        let kind = rows.get_type();
        return Err(ConfigError::new_err(format!(
            "rows is of type {kind}: pass a two-dimensional uint8 array"
        )));
    };
    let [num_rows, row_bytes] = [rows.shape()[0], rows.shape()[1]];
    if let Some(id) = row_ids.iter().find(|&&id| id >= num_rows) {
        return Err(ConfigError::new_err(format!(
            "row {id} is not in an array of {num_rows} rows: pass ids from 0 to {}",
            num_rows.saturating_sub(1)
        )));
    }
    let rows = rows.as_array();
    let mut checksums = Vec::with_capacity(row_ids.len());
    for batch in row_ids.chunks((BYTES_PER_BATCH / row_bytes.max(1)).max(1)) {
        let sums = || batch.iter().map(|&id| Some(sum(rows.row(id).to_slice()?))).collect();
        let is_short = batch.len() * row_bytes < MIN_BYTES_WITHOUT_LOCK;
        let found: Option<Vec<T>> = if is_short { sums() } else { py.detach(sums) };
        let Some(found) = found else {
            return Err(ConfigError::new_err(
                "the bytes of a row are not contiguous: pass a copy of the array".to_owned(),
            ));
        };
        checksums.extend(found);
        py.check_signals()?;
    }
    Ok(checksums.into_pyarray(py))
}
