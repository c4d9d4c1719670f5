//! The locks of core objects.
//!
//! No thread waits for a core object while it holds the interpreter lock, because the thread that
//! holds the object may be waiting for the interpreter. A thread that needs two objects locks the
//! pool or ledger first, then the scheduler. Poison is ignored: the core does not panic, and
//! `check` can verify its state.
//!
//! A forked child has only the thread that forked. It would wait for ever for an object that another
//! thread held or awaited. So a fork waits until no thread does so without the interpreter lock.
//! Threads that begin to do so wait for the fork, but not for ever. Those that hold the lock do not
//! run meanwhile.
//!
//! Threads that wait get the object in the order in which they came. The standard `Mutex` alone
//! lets a thread that calls in a loop lock again and again before a waiting thread is awake.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{self, Condvar, MutexGuard, PoisonError, TryLockError};
use std::thread;
use std::time::Duration;

use pyo3::exceptions::PyAttributeError;
use pyo3::prelude::*;
use pyo3::sync::MutexExt;
use pyo3::types::{IntoPyDict, PyCFunction};

/// Threads that may hold or await a core object while they do not hold the interpreter lock.
static NUM_DETACHED: AtomicUsize = AtomicUsize::new(0);
/// Threads that fork, or wait to fork.
static NUM_FORKING: AtomicUsize = AtomicUsize::new(0);
const BETWEEN_LOOKS: Duration = Duration::from_micros(100);
/// A second or more. A thread that forks may wait, in another hook, for a lock of Python's that a
/// thread which waits for it holds.
const MOST_LOOKS: usize = 10_000;

thread_local! {
    /// How often this thread is in [`NUM_DETACHED`] or [`NUM_FORKING`], or in [`with`].
    static DEPTH: Cell<usize> = const { Cell::new(0) };
}

/// A thread in [`NUM_DETACHED`].
struct Detached;

impl Detached {
    /// Waits for forks, unless this thread is one that forks wait for, or that forks itself, or
    /// holds an object. A child would wait for that object for ever.
    fn begin(py: Python<'_>) -> Self {
        let depth = DEPTH.get();
        DEPTH.set(depth + 1);
        NUM_DETACHED.fetch_add(1, Ordering::SeqCst);
        let mut num_looks = if depth == 0 { 0 } else { MOST_LOOKS };
        while num_looks < MOST_LOOKS && NUM_FORKING.load(Ordering::SeqCst) > 0 {
            NUM_DETACHED.fetch_sub(1, Ordering::SeqCst);
            py.detach(|| thread::sleep(BETWEEN_LOOKS));
            NUM_DETACHED.fetch_add(1, Ordering::SeqCst);
            num_looks += 1;
        }
        Self
    }
}

impl Drop for Detached {
    fn drop(&mut self) {
        NUM_DETACHED.fetch_sub(1, Ordering::SeqCst);
        DEPTH.set(DEPTH.get() - 1);
    }
}

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
///
/// Use [`with`] for work that locks another object. Drop the guard before you make objects of
/// Python: that may run the garbage collector, and so any code, which may need the object.
pub(crate) fn lock<T: Send>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    let wait = |py: Python<'_>| {
        let _detached = Detached::begin(py);
        py.detach(|| shared.wait_in_line());
        let guard = unpoisoned(shared.data.lock_py_attached(py));
        shared.leave_line();
        guard
    };
    shared.try_lock().unwrap_or_else(|| Python::attach(wait))
}

/// Locks a core object for a short call, which may lock another one.
pub(crate) fn with<T: Send, R>(shared: &Mutex<T>, call: impl FnOnce(&mut T) -> R) -> R {
    let mut object = lock(shared);
    DEPTH.set(DEPTH.get() + 1);
    let result = call(&mut object);
    DEPTH.set(DEPTH.get() - 1);
    result
}

/// Calls without the interpreter lock what may lock core objects.
pub(crate) fn without_interpreter<R: Send>(py: Python<'_>, call: impl FnOnce() -> R + Send) -> R {
    let _detached = Detached::begin(py);
    py.detach(call)
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
    without_interpreter(py, || call(&mut shared.try_lock().unwrap_or_else(wait)))
}

/// Lets each later fork wait until no thread holds or awaits a core object.
pub(crate) fn hold_forks(py: Python<'_>) -> PyResult<()> {
    let register = match py.import("os")?.getattr("register_at_fork") {
        Err(error) if error.is_instance_of::<PyAttributeError>(py) => return Ok(()), // no forks here
        register => register?,
    };
    // Python stops daemon threads at its end, wherever they are.
    let is_ending = py.import("sys")?.getattr("is_finalizing")?.unbind();
    let begin = PyCFunction::new_closure(py, None, None, move |args, _| -> PyResult<()> {
        let py = args.py();
        DEPTH.set(DEPTH.get() + 1);
        NUM_FORKING.fetch_add(1, Ordering::SeqCst);
        while NUM_DETACHED.load(Ordering::SeqCst) > 0 && !is_ending.call0(py)?.is_truthy(py)? {
            py.detach(|| thread::sleep(BETWEEN_LOOKS));
        }
        Ok(())
    })?;
    // Programs that fork from C may call the hooks after a fork only.
    let end = PyCFunction::new_closure(py, None, None, |_, _| {
        let (set, load) = (Ordering::SeqCst, Ordering::SeqCst);
        let _ = NUM_FORKING.fetch_update(set, load, |num| num.checked_sub(1));
        DEPTH.set(DEPTH.get().saturating_sub(1));
    })?;
    // A child has one thread. Others may have waited to fork, too.
    let end_in_child = PyCFunction::new_closure(py, None, None, |_, _| {
        NUM_DETACHED.store(0, Ordering::SeqCst);
        NUM_FORKING.store(0, Ordering::SeqCst);
        DEPTH.set(DEPTH.get().saturating_sub(1));
    })?;
    let hooks = [("before", begin), ("after_in_parent", end), ("after_in_child", end_in_child)];
    register.call((), Some(&hooks.into_py_dict(py)?))?;
    Ok(())
}
