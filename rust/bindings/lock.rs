//! The locks of core objects.
//!
//! No thread waits for a core object while it holds the interpreter lock, because the thread that
//! holds the object may be waiting for the interpreter. A thread that needs two objects locks the
//! pool or ledger first, then the scheduler. Poison is ignored: the core does not panic, and
//! `check` can verify its state.

use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use pyo3::prelude::*;
use pyo3::sync::MutexExt;

/// Locks a core object for short work. Releases the interpreter lock only to wait.
pub(crate) fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    match shared.try_lock() {
        Ok(guard) => guard,
        Err(TryLockError::Poisoned(error)) => error.into_inner(),
        Err(TryLockError::WouldBlock) => {
            Python::attach(|py| shared.lock_py_attached(py)).unwrap_or_else(PoisonError::into_inner)
        }
    }
}

/// Locks a core object, and calls without the interpreter lock, for work on all of its blocks.
pub(crate) fn detached<T: Send, R: Send>(
    py: Python<'_>,
    shared: &Mutex<T>,
    call: impl FnOnce(&mut T) -> R + Send,
) -> R {
    py.detach(|| call(&mut shared.lock().unwrap_or_else(PoisonError::into_inner)))
}
