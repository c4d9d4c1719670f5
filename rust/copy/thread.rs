//! A value that stays on one thread, inside a type that need not.

use std::thread::{self, ThreadId};

/// Carries a value through a closure that must be `Send` but runs on the same thread.
///
/// To release Python's interpreter lock takes such a closure.
pub struct ThisThread<T: Copy> {
    value: T,
    thread: ThreadId,
}

// SAFETY: `get` returns the value to its own thread only. A `Copy` type has no destructor that could
// run on another, and this type has no `Clone`, which could run code of `T`.
unsafe impl<T: Copy> Send for ThisThread<T> {}

impl<T: Copy> ThisThread<T> {
    /// Ties a value to the calling thread.
    pub fn new(value: T) -> Self {
        Self { value, thread: thread::current().id() }
    }

    /// Returns the value, or `None` on another thread.
    pub fn get(&self) -> Option<T> {
        (self.thread == thread::current().id()).then_some(self.value)
    }
}
