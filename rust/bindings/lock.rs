//! The locks of core objects, beside the interpreter's own.
//!
//! No thread waits for a core object while it holds the interpreter lock: the thread that holds the
//! object may be waiting for the interpreter. One that needs two objects locks the pool or ledger
//! first, then the scheduler. A poisoned lock is taken all the same: the core does not panic, and if
//! it ever did, `check` says whether its state is sound.

use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use pyo3::prelude::*;
use pyo3::sync::MutexExt;

/// Locks a core object for work that is short. Gives up the interpreter lock only to wait.
pub(crate) fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    match shared.try_lock() {
        Ok(guard) => guard,
        Err(TryLockError::Poisoned(error)) => error.into_inner(),
        Err(TryLockError::WouldBlock) => {
            Python::attach(|py| shared.lock_py_attached(py)).unwrap_or_else(PoisonError::into_inner)
        }
    }
}

/// Locks a core object, and calls it without the interpreter lock: for work on all of its blocks.
pub(crate) fn detached<T: Send, R: Send>(
    py: Python<'_>,
    shared: &Mutex<T>,
    call: impl FnOnce(&mut T) -> R + Send,
) -> R {
    py.detach(|| call(&mut shared.lock().unwrap_or_else(PoisonError::into_inner)))
}
