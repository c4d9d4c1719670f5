//! What a search for a hit reads.

use crate::ids::{BlockId, GroupId};
use crate::key::BlockHash;
use crate::pool::BlockPool;

/// Blocks that are found by their key: a device pool, or the host tier.
pub(crate) trait Source {
    /// The block that holds a key.
    fn get(&self, hash: &BlockHash, group: GroupId) -> Option<BlockId>;

    /// The blocks of the longest prefix of `hashes` whose keys are all held.
    fn prefix(&self, hashes: &[BlockHash], group: GroupId) -> Vec<BlockId>;
}

impl Source for BlockPool {
    fn get(&self, hash: &BlockHash, group: GroupId) -> Option<BlockId> {
        self.get(hash, group)
    }

    fn prefix(&self, hashes: &[BlockHash], group: GroupId) -> Vec<BlockId> {
        self.prefix(hashes, group)
    }
}
