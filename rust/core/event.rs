//! What changed in a pool's index, in vLLM's vocabulary: an event tells what a lookup can find
//! now and could not before, or the other way round. A second block under a key tells nothing.

use std::ops::Range;

use crate::hash::ExtraKey;
use crate::ids::GroupId;
use crate::key::{BlockHash, BlockKey};

/// Which memory a pool's blocks lie in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Medium {
    /// The GPU's own memory; vLLM calls it "GPU".
    Device,
    /// The host's memory; vLLM calls it "CPU".
    Host,
}

/// One change of what a pool's lookup can find.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// Keys became findable.
    Stored(BlockStored),
    /// Keys are held by no block any more.
    Removed {
        /// The hashes, in the order they went.
        hashes: Vec<BlockHash>,
        /// The group of all of them.
        group: GroupId,
    },
    /// Every key was dropped at once.
    Cleared,
}

/// Keys that became findable: consecutive blocks of one prefix.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockStored {
    /// The hashes, first block first.
    pub hashes: Vec<BlockHash>,
    /// The group of all of them.
    pub group: GroupId,
    /// What is known besides.
    pub origin: Origin,
}

/// Where stored blocks stand in their prompt, as far as the pool's owner knows.
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

/// A pool's events until somebody takes them.
#[derive(Clone, Debug)]
pub struct EventLog {
    /// The memory that the events speak of.
    pub medium: Medium,
    pending: Vec<Event>,
}

impl EventLog {
    /// An empty log.
    pub fn new(medium: Medium) -> Self {
        Self { medium, pending: Vec::new() }
    }

    /// The events since the last call, oldest first.
    pub fn take(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.pending)
    }

    /// `hashes[run]` became findable.
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

    /// A key is held by no block any more. Neighbours in time share one event.
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

    /// Every key was dropped.
    pub(crate) fn cleared(&mut self) {
        self.pending.push(Event::Cleared);
    }
}
