//! The most hits that a cache of a given capacity can have.
//!
//! Keep the blocks with the nearest next uses, bypass the others, and at a tie keep the shallower
//! block. A block's next use is a position in the trace, so position orders both: next request
//! first, depth second.
//!
//! ```text
//!   request 0   request 1   request 2        positions of the trace
//!   0  1  2     3  4        5  6  7
//!   a  b  c     a  d        a  b  e          after request 0: a is used next at 3, b at 6, c never
//! ```
//!
//! Where each block may be kept alone, this is Belady's choice, which nothing beats. A request uses a
//! parent whenever it uses its child, so a parent's next use is never later. What is kept is closed
//! under prefixes, and each block that is kept is a hit.

use std::collections::HashMap;

use crate::error::{Error, Result};

use super::bit_set::BitSet;
use super::keys::MixedKeys;
use super::memory::{no_memory, zeroed};
use super::prompts::Prompts;

const NEVER: u32 = u32::MAX;

/// A trace whose future is known.
pub struct Clairvoyant {
    /// By position: where the block is asked for next.
    next_uses: Vec<u32>,
    offsets: Vec<usize>,
}

impl Clairvoyant {
    /// Finds the next use of each block.
    ///
    /// # Errors
    /// [`Error::Config`] if a key follows different keys in two places, if there are more than
    /// 2^32 - 1 keys, or if the machine lacks the memory.
    pub fn new(prompts: Prompts<'_>) -> Result<Self> {
        let (keys, offsets) = (prompts.keys(), prompts.offsets());
        let num_keys = u32::try_from(keys.len()).map_err(|_| {
            Error::Config(format!(
                "{} keys; a clairvoyant bound takes at most 2^32 - 1: shorten the trace",
                keys.len()
            ))
        })?;
        let mut next_uses = zeroed::<u32>(keys.len())?;
        let mut is_root = zeroed::<bool>(keys.len() + 1)?;
        for &offset in offsets {
            is_root[offset] = true;
        }
        let mut later: HashMap<u64, u32, MixedKeys> = HashMap::default();
        let mut position = num_keys;
        for &key in keys.iter().rev() {
            position -= 1;
            later.try_reserve(1).map_err(|_| no_memory())?;
            let next = later.insert(key, position).unwrap_or(NEVER);
            let at = position as usize;
            next_uses[at] = next;
            let parent = |at: usize| (!is_root[at]).then(|| keys[at - 1]);
            if next != NEVER && parent(at) != parent(next as usize) {
                return Err(Error::Config(format!(
                    "key {key} at positions {at} and {next} follows different keys: chain the \
                     keys, so that each stands for a block and all blocks before it"
                )));
            }
        }
        Ok(Self { next_uses, offsets: offsets.to_vec() })
    }

    /// The most blocks that a cache of `capacity` blocks can hit, from empty, over the whole trace.
    ///
    /// # Errors
    /// [`Error::Config`] if the machine lacks the memory: a bit a key.
    pub fn hits(&self, capacity: u64) -> Result<u64> {
        let mut kept = BitSet::new(self.next_uses.len())?;
        let mut num_hits = 0;
        for request in self.offsets.windows(2) {
            let positions = request[0]..request[1];
            for at in positions.clone() {
                num_hits += u64::from(kept.remove(at));
            }
            for &next in &self.next_uses[positions] {
                if next != NEVER {
                    kept.insert(next as usize);
                }
            }
            while kept.len() as u64 > capacity {
                kept.remove_last();
            }
        }
        Ok(num_hits)
    }
}
