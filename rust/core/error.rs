//! One error enum. A message names the value, the bound and the way out; "does not fit now" is a
//! return value, not an error.

use crate::ids::{BlockId, JobId};

/// The result of every operation that can be refused.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an operation was refused. A refused operation has changed nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A size, option or argument that can never be right.
    #[error("{0}")]
    Config(String),
    /// Hashes that are empty, too wide, or of another width than the object's.
    #[error("a block hash of {got} bytes; {}", expected_width(*expected))]
    HashWidth {
        /// The width the object already uses, in bytes.
        expected: Option<u8>,
        /// The width that was given, in bytes.
        got: usize,
    },
    /// An allocation that the pool cannot serve.
    #[error("{needed} blocks are needed and {free} are free: free some, or ask for fewer")]
    OutOfBlocks {
        /// Blocks asked for.
        needed: usize,
        /// Blocks that are neither referenced nor pinned.
        free: usize,
    },
    /// An id outside the pool.
    #[error("block {id} is not in this pool: ids go from 0 to {}", num_blocks - 1)]
    NoSuchBlock {
        /// The id as it was given.
        id: String,
        /// Blocks in the pool, the null block included.
        num_blocks: usize,
    },
    /// An operation on a block that the block's state does not allow.
    #[error("block {id} {why}")]
    InvalidBlock {
        /// The block.
        id: BlockId,
        /// What is wrong and what to do.
        why: &'static str,
    },
    /// A request that was never added, or that was freed.
    #[error("request {request_id:?} is not known: add it first")]
    UnknownRequest {
        /// The id as it was given.
        request_id: String,
    },
    /// A job that was never issued, or that has ended.
    #[error("job {} is not in flight: every job ends once", .job_id.0)]
    UnknownJob {
        /// The id as it was given.
        job_id: JobId,
    },
    /// A sleep image that the host tier cannot hold.
    #[error(
        "the sleep image needs {needed} host slots and at most {available} can be had: give the \
         host tier more, preempt requests first, or sleep without preserving them"
    )]
    NoRoomForImage {
        /// Slots that the image takes.
        needed: usize,
        /// Slots that are empty or may be evicted.
        available: usize,
    },
    /// A snapshot that is damaged or truncated, or that something else has written.
    #[error("{0}")]
    Snapshot(String),
    /// An operation that comes at the wrong moment.
    #[error("{0}")]
    State(String),
    /// [`check`](crate::pool::BlockPool::check) found a broken invariant: a defect in this library.
    #[error("broken invariant: {0}; please report it")]
    Broken(String),
}

fn expected_width(expected: Option<u8>) -> String {
    match expected {
        Some(width) => format!("this object's hashes have {width}: use one algorithm per object"),
        None => "a hash has 1 to 32".to_owned(),
    }
}
