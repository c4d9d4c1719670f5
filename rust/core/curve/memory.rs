//! Lists that a machine may be too small for.

use crate::error::{Error, Result};

/// A list of zeros, or an error where the machine lacks the memory.
pub(super) fn zeroed<T: Clone + Default>(len: usize) -> Result<Vec<T>> {
    let mut list = Vec::new();
    list.try_reserve_exact(len).map_err(|_| no_memory())?;
    list.resize(len, T::default());
    Ok(list)
}

pub(super) fn no_memory() -> Error {
    Error::Config(
        "the machine lacks the memory for a curve of so many blocks: bound it with max_keys"
            .to_owned(),
    )
}
