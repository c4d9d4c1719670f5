//! One error enum. A message names the value, the rule and the fix. "Does not fit now" is a return
//! value, not an error.

use crate::ids::{BlockId, JobId};

/// The result of an operation that can be refused.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The reason to refuse an operation. A refused operation has changed nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A size, option or argument that can never be right.
    #[error("{0}")]
    Config(String),
    /// Hashes that are empty, too wide, or of another width than the object's.
    #[error("a block hash has {got} bytes: {}", expected_width(*expected))]
    HashWidth {
        /// The width of the object's hashes, in bytes.
        expected: Option<u8>,
        /// The refused width, in bytes.
        got: usize,
    },
    /// An allocation that the pool cannot serve.
    #[error("{needed} blocks are needed and {free} are free: free some, or allocate fewer")]
    OutOfBlocks {
        /// Number of blocks to allocate.
        needed: usize,
        /// Number of blocks that are neither referenced nor pinned.
        free: usize,
    },
    /// A pool that is too small for the blocks of a snapshot.
    #[error(
        "the snapshot has {needed} blocks, and the pool has {num_blocks}, the null block included: \
         take a pool of {} blocks or more", needed + 1
    )]
    SmallPool {
        /// Number of blocks in the snapshot's tables.
        needed: usize,
        /// Number of blocks in the pool.
        num_blocks: usize,
    },
    /// An id outside the pool.
    #[error("block {id} is not in this pool: ids go from 0 to {}", num_blocks - 1)]
    NoSuchBlock {
        /// The id as the caller passed it.
        id: String,
        /// Number of blocks in the pool, the null block included.
        num_blocks: usize,
    },
    /// An operation that the block's state forbids.
    #[error("block {id} {why}")]
    InvalidBlock {
        /// The block.
        id: BlockId,
        /// The state and the fix.
        why: &'static str,
    },
    /// A request that was never added, or that was freed.
    #[error("request {request_id:?} is not known: add it first")]
    UnknownRequest {
        /// The request's id.
        request_id: String,
    },
    /// A job that was never issued, or that has ended.
    #[error("job {} is not in flight: every job ends once", .job_id.0)]
    UnknownJob {
        /// The job's id.
        job_id: JobId,
    },
    /// A sleep image that the host tier cannot hold.
    #[error(
        "the sleep image needs {needed} host slots and {available} are available: enlarge the \
         host tier, preempt requests first, or sleep without preserving them"
    )]
    NoRoomForImage {
        /// Number of slots that the image takes.
        needed: usize,
        /// Number of slots that are empty or may be evicted.
        available: usize,
    },
    /// A snapshot that is damaged, truncated or foreign.
    #[error("{0}")]
    Snapshot(String),
    /// An operation at the wrong moment.
    #[error("{0}")]
    State(String),
    /// A broken invariant, which [`check`](crate::pool::BlockPool::check) found: a defect of
    /// kvstow.
    #[error("broken invariant: {0}; please report it")]
    Broken(String),
}

fn expected_width(expected: Option<u8>) -> String {
    match expected {
        Some(width) => format!("this object's hashes have {width}, use one algorithm per object"),
        None => "use hashes of 1 to 32".to_owned(),
    }
}
