//! The kinds of attention: what a hit needs, what is no longer read, what a request holds at once.
//! A kind is one file and one arm of [`Attention`].
//!
//! ```text
//!   kind              a hit of n tokens needs                     skipped once n are computed
//!   full attention    every block of the prefix                   nothing
//!   sliding window w  the last ceil((w - 1) / block) blocks       max(0, n - w + 1) tokens
//!   chunked local c   the blocks from the start of n's chunk      n - n mod c tokens
//!   recurrent state   the one block whose state ends at n         n - 1 tokens
//! ```
//!
//! What a hit needs is what is not skipped: the next token reads it. A skipped block stands in the
//! table as the null block. The reference is vLLM 0.32's
//! `single_type_kv_cache_manager.py`.

mod chunked_local;
mod full_attention;
mod model;
mod sliding_window;
mod state_space;

pub use model::Model;
pub(crate) use model::Source;

use minicbor::{Decode, Encode};

use crate::error::{Error, Result};
use crate::ids::BlockId;

use model::Cached;

/// The most tokens a block, a window or a chunk may hold.
pub const MAX_GROUP_TOKENS: usize = 1 << 30;

/// The most groups a model may have: what a [`GroupId`](crate::ids::GroupId) can name.
pub const MAX_GROUPS: usize = 1 << 16;

/// How a group's layers attend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Encode, Decode)]
#[non_exhaustive]
pub enum Attention {
    /// Every token attends to the whole prefix.
    #[n(0)]
    Full,
    /// A token attends to itself and the `window - 1` tokens before it.
    #[n(1)]
    SlidingWindow {
        /// In tokens.
        #[n(0)]
        window: usize,
    },
    /// A token attends to its own chunk, up to itself.
    #[n(2)]
    ChunkedLocal {
        /// In tokens; chunks begin at its multiples.
        #[n(0)]
        chunk: usize,
    },
    /// The state after the last token stands for all before it (Mamba).
    #[n(3)]
    StateSpace,
}

/// Layers that share a block table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Encode, Decode)]
pub struct Group {
    /// How they attend.
    #[n(0)]
    pub attention: Attention,
    /// Tokens per block.
    #[n(1)]
    pub block_size: usize,
}

impl Group {
    /// A group of layers.
    ///
    /// # Errors
    /// [`Error::Config`] unless block size and window or chunk are 1 to [`MAX_GROUP_TOKENS`], and
    /// a chunk is a multiple of the block size.
    pub fn new(attention: Attention, block_size: usize) -> Result<Self> {
        check_tokens("a block size", block_size)?;
        match attention {
            Attention::Full | Attention::StateSpace => {}
            Attention::SlidingWindow { window } => check_tokens("a window", window)?,
            Attention::ChunkedLocal { chunk } => {
                check_tokens("a chunk", chunk)?;
                if !chunk.is_multiple_of(block_size) {
                    return Err(Error::Config(format!(
                        "a chunk of {chunk} tokens is no multiple of the block size {block_size}: \
                         a block would stand in two chunks"
                    )));
                }
            }
        }
        Ok(Self { attention, block_size })
    }

    /// Blocks that `num_tokens` tokens need, the last one perhaps in part.
    #[inline]
    pub fn num_blocks(self, num_tokens: usize) -> usize {
        num_tokens.div_ceil(self.block_size)
    }

    /// Blocks at the start of a request that no later token reads, `num_tokens` being computed. A
    /// hit of that many tokens needs all blocks but these.
    #[inline]
    pub fn num_skipped_blocks(self, num_tokens: usize) -> usize {
        let num_skipped_tokens = match self.attention {
            Attention::Full => 0,
            Attention::SlidingWindow { window } => {
                sliding_window::num_skipped_tokens(window, num_tokens)
            }
            Attention::ChunkedLocal { chunk } => {
                chunked_local::num_skipped_tokens(chunk, num_tokens)
            }
            Attention::StateSpace => state_space::num_skipped_tokens(num_tokens),
        };
        num_skipped_tokens / self.block_size
    }

    /// The most blocks that a request holds at once while it computes `num_in_flight` tokens at a
    /// time, if that has a bound.
    #[inline]
    pub(crate) fn max_held_blocks(self, num_in_flight: usize) -> Option<usize> {
        match self.attention {
            Attention::Full | Attention::StateSpace => None,
            Attention::SlidingWindow { window } => {
                Some(sliding_window::max_held_blocks(window, self.block_size, num_in_flight))
            }
            Attention::ChunkedLocal { chunk } => {
                Some(chunked_local::max_held_blocks(chunk, self.block_size, num_in_flight))
            }
        }
    }

    /// Per group that is looked up, the blocks of the longest hit of at most `max_blocks` blocks
    /// that ends at a multiple of `step`; null where none is needed.
    fn longest_hit(self, cached: &Cached<'_>, max_blocks: usize, step: usize) -> Vec<Vec<BlockId>> {
        if self.attention == Attention::Full {
            return full_attention::longest_hit(cached, max_blocks, step);
        }
        // From the right: a short window is found at once, however long the prefix.
        let mut end = max_blocks - max_blocks % step;
        loop {
            let needed = self.num_skipped_blocks(end * self.block_size)..end;
            // Most often all is there, and a range is found quicker than its blocks one by one.
            let found = cached.range(&needed);
            if found.iter().all(|blocks| blocks.len() == end) {
                return found;
            }
            // No hit that ends behind a missing block and needs it can do.
            let missing = needed.rev().find(|&index| !cached.has(index)).unwrap_or(0);
            end = missing - missing % step;
        }
    }

    /// Whether block `index` is worth keeping, where all hits end at multiples of `step` blocks.
    /// As in the reference this is asked of windows only: a block in the middle of a step may lie
    /// before every window that a hit needs. Of all hits that end behind it the first skips least.
    #[inline]
    fn is_reachable(self, index: usize, step: usize) -> bool {
        let end = (index / step + 1) * step;
        !matches!(self.attention, Attention::SlidingWindow { .. })
            || index >= self.num_skipped_blocks(end * self.block_size)
    }
}

fn check_tokens(what: &str, num_tokens: usize) -> Result<()> {
    if (1..=MAX_GROUP_TOKENS).contains(&num_tokens) {
        return Ok(());
    }
    Err(Error::Config(format!("{what} of {num_tokens} tokens: it must be 1 to {MAX_GROUP_TOKENS}")))
}
