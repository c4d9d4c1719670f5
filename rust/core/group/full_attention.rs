//! Full attention (also MLA): a hit needs every block of the prefix, and nothing is ever skipped.

use crate::ids::{BlockId, GroupId};
use crate::key::BlockHash;
use crate::pool::BlockPool;

/// The cached blocks from the first up to the first miss.
pub(super) fn find_hit(pool: &BlockPool, hashes: &[BlockHash], group: GroupId) -> Vec<BlockId> {
    pool.prefix(hashes, group)
}
