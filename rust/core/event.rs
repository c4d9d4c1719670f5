//! Events in vLLM's vocabulary. They report which keys lookups can find now, and which they can no
//! longer find. A duplicate of a key causes no event.

use std::ops::Range;

use crate::hash::ExtraKey;
use crate::ids::GroupId;
use crate::key::{BlockHash, BlockKey};

/// A change of the keys that lookups can find.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// Lookups can find these keys now.
    Stored(BlockStored),
    /// No block holds these keys any more.
    Removed {
        /// The hashes, in the order in which they were dropped.
        hashes: Vec<BlockHash>,
        /// The group of all of them.
        group: GroupId,
    },
    /// The pool dropped every key.
    Cleared,
}

/// Consecutive blocks of one prefix that lookups can find now.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockStored {
    /// The hashes, first block first.
    pub hashes: Vec<BlockHash>,
    /// The group of all of them.
    pub group: GroupId,
    /// Their place in the prompt.
    pub origin: Origin,
}

/// The place of stored blocks in their prompt, as far as the pool's owner knows it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Origin {
    /// The hash before the first.
    pub parent: Option<BlockHash>,
    /// The tokens of all the blocks.
    pub tokens: Option<Vec<u64>>,
    /// The extra keys of each block.
    pub extra_keys: Option<Vec<Option<Vec<ExtraKey>>>>,
    /// Tokens per block.
    pub block_size: Option<usize>,
}

/// A pool's events until the caller takes them.
#[derive(Clone, Debug, Default)]
pub struct EventLog {
    pending: Vec<Event>,
}

impl EventLog {
    /// The events since the last call, oldest first.
    pub fn take(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.pending)
    }

    /// Records that lookups can find `hashes[run]`.
    pub(crate) fn stored(
        &mut self,
        hashes: &[BlockHash],
        group: GroupId,
        run: Range<usize>,
        origin: Origin,
    ) {
        let hashes = hashes[run].to_vec();
        self.pending.push(Event::Stored(BlockStored { hashes, group, origin }));
    }

    /// Records that no block holds a key any more. Consecutive records share one event.
    pub(crate) fn removed(&mut self, key: &BlockKey) {
        match self.pending.last_mut() {
            Some(Event::Removed { hashes, group }) if *group == key.group => {
                hashes.push(key.hash);
            }
            _ => {
                self.pending.push(Event::Removed { hashes: vec![key.hash], group: key.group });
            }
        }
    }

    /// Records that the pool dropped every key.
    pub(crate) fn cleared(&mut self) {
        self.pending.push(Event::Cleared);
    }
}
