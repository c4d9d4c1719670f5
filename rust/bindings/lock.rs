//! The locks of core objects.
//!
//! No thread waits for a core object while it holds the interpreter lock, because the thread that
//! holds the object may be waiting for the interpreter. A thread that needs two objects locks the
//! pool or ledger first, then the scheduler. Poison is ignored: the core does not panic, and
//! `check` can verify its state.
//!
//! Threads that wait get the object in the order in which they came. The standard `Mutex` alone
//! lets a thread that calls in a loop lock again and again before a waiting thread is awake.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{self, Condvar, MutexGuard, PoisonError, TryLockError};

use pyo3::prelude::*;
use pyo3::sync::MutexExt;

/// A mutex that serves waiting threads in turn. Without any it costs one more load.
pub(crate) struct Mutex<T> {
    data: sync::Mutex<T>,
    /// As in `line`, but read without its lock.
    num_waiting: AtomicU64,
    line: sync::Mutex<Line>,
    moved: Condvar,
}

/// Threads that wait draw numbers.
#[derive(Default)]
struct Line {
    num_drawn: u64,
    num_served: u64,
}

impl<T> Mutex<T> {
    pub(crate) fn new(data: T) -> Self {
        let (data, line) = (sync::Mutex::new(data), sync::Mutex::default());
        Self { data, num_waiting: AtomicU64::new(0), line, moved: Condvar::new() }
    }

    /// Returns None if a thread holds the object or waits for it.
    fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        if self.num_waiting.load(Ordering::Relaxed) > 0 {
            return None;
        }
        match self.data.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(error)) => Some(error.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Waits for the threads that came before. End with [`Self::leave_line`].
    fn wait_in_line(&self) {
        let mut line = unpoisoned(self.line.lock());
        let number = line.num_drawn;
        line.num_drawn += 1;
        self.num_waiting.store(line.num_drawn - line.num_served, Ordering::Relaxed);
        let is_behind = |line: &mut Line| line.num_served != number;
        drop(unpoisoned(self.moved.wait_while(line, is_behind)));
    }

    /// Lets the next thread of the line wait for the object, which the caller has locked.
    fn leave_line(&self) {
        let mut line = unpoisoned(self.line.lock());
        line.num_served += 1;
        self.num_waiting.store(line.num_drawn - line.num_served, Ordering::Relaxed);
        self.moved.notify_all();
    }
}

fn unpoisoned<G>(locked: Result<G, PoisonError<G>>) -> G {
    locked.unwrap_or_else(PoisonError::into_inner)
}

/// Locks a core object for short work. Releases the interpreter lock only to wait.
pub(crate) fn lock<T: Send>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    let wait = |py: Python<'_>| {
        py.detach(|| shared.wait_in_line());
        let guard = unpoisoned(shared.data.lock_py_attached(py));
        shared.leave_line();
        guard
    };
    shared.try_lock().unwrap_or_else(|| Python::attach(wait))
}

/// Locks a core object, and calls without the interpreter lock, for work on all of its blocks.
pub(crate) fn detached<T: Send, R: Send>(
    py: Python<'_>,
    shared: &Mutex<T>,
    call: impl FnOnce(&mut T) -> R + Send,
) -> R {
    let wait = || {
        shared.wait_in_line();
        let guard = unpoisoned(shared.data.lock());
        shared.leave_line();
        guard
    };
    py.detach(|| call(&mut shared.try_lock().unwrap_or_else(wait)))
}
