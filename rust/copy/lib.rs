//! Copies of blocks between the regions of a layout and the slots of an arena, in host memory.
//!
//! ```text
//! region 0   |block 0|pad|block 1|pad| ...         one memory per region
//! region 1   |block 0|pad|block 1|pad| ...
//! slots      |region 0|region 1|rest|pad| ...      one memory; a slot holds one block of all regions
//! ```
//!
//! This is the only crate of the workspace with unsafe code. Its API is safe: no call reads or
//! writes outside the slices that it gets. Three facts make that so.
//!
//! - Memory comes in as `&[Cell<u8>]`, whose lifetime is that of the memory. There are no addresses.
//! - A [`Region`], a [`Slots`] and each pair of a job are checked against the slices' lengths before
//!   the first byte moves. A region that shares memory with the slots is refused, too.
//! - A `Cell` stays on its thread. [`ThisThread`] carries a job through a closure that must be
//!   `Send`, and gives it back only to the thread that made it.
//!
//! Other languages write this memory, too: an engine computes in it, Python holds views of it. Rust
//! has no rule for that, and Rust cannot check it. The bytes have no invariant, so such a race can
//! only tear the copy. The mover's order prevents it: a job begins after its event, and the caller
//! keeps its blocks and slots pinned until the ticket ends.
//!
//! How a copy could give wrong bytes, and what prevents it:
//!
//! - An id or a size reaches outside the memory: the checks above.
//! - Source and target share bytes: the check above. Two regions may share bytes, because every copy
//!   is between a region and the slots.
//! - The memory is freed, or shrinks, during the copy: the lifetime. In Python a buffer keeps it.
//! - Another thread reads a slot before the streamed bytes are in memory: a fence ends every job.
//! - A failed job has copied a part: all checks come first, and nothing fails after them.

mod job;
mod memory;
mod stream;
mod thread;

#[cfg(test)]
mod tests;

pub use job::{Pair, Stores, load, store, store_with_checksums};
pub use memory::{Error, Region, Slots};
pub use thread::ThisThread;
