//! The kinds of attention: what a hit needs, which blocks a request skips, how many it holds. A
//! kind is one file and one arm of [`Attention`]. `search` finds a kind's longest hit, `model` the
//! longest hit of all groups.
//!
//! May import: error, ids, key, pool.
//!
//! ```text
//!   kind              a hit of n tokens needs                     skipped once n are computed
//!   full attention    every block of the prefix                   nothing
//!   sliding window w  the last ceil((w - 1) / block) blocks       max(0, n - w + 1) tokens
//!   chunked local c   the blocks from the start of n's chunk      n - n mod c tokens
//!   recurrent state   the one block whose state ends at n         n - 1 tokens
//! ```
//!
//! A hit needs the blocks that the next token reads. The table holds the null block in place of a
//! skipped block. A window may retain tokens below it ([`Group::retaining`]). A request keeps their
//! blocks longer and a tier loads them, but a hit on the device does not need them. A draft model's
//! group needs one block after the hit as well ([`Group::dropping_last_block`]). The reference is
//! vLLM 0.32's `single_type_kv_cache_manager.py`.

mod chunked_local;
mod model;
mod search;
mod sliding_window;
mod source;
mod state_space;

pub(crate) use model::Hit;
pub use model::Model;
pub(crate) use source::Source;

use std::fmt;

use minicbor::{Decode, Encode};

use crate::error::{Error, Result};

/// The most tokens in a block, a window or a chunk.
pub const MAX_GROUP_TOKENS: usize = 1 << 30;

/// The most groups that a model may have: as many as a [`GroupId`](crate::ids::GroupId) can name.
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
#[derive(Clone, Copy, PartialEq, Eq, Hash, Encode, Decode)]
pub struct Group {
    /// How they attend.
    #[n(0)]
    pub attention: Attention,
    /// Tokens per block.
    #[n(1)]
    pub block_size: usize,
    /// Tokens right below a window whose blocks a request keeps, although no token reads them.
    #[n(2)]
    #[cbor(default)]
    extra_retained_tokens: usize,
    /// Whether a hit ends one block before the blocks that are found.
    #[n(3)]
    #[cbor(default)]
    drops_last_block: bool,
}

/// As Python constructs it, because errors show it to users of Python.
impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let size = self.block_size;
        match self.attention {
            Attention::Full => write!(f, "FullAttention(block_size={size}"),
            Attention::SlidingWindow { window } => {
                write!(f, "SlidingWindow(block_size={size}, window={window}")
            }
            Attention::ChunkedLocal { chunk } => {
                write!(f, "ChunkedLocal(block_size={size}, chunk={chunk}")
            }
            Attention::StateSpace => write!(f, "StateSpace(block_size={size}"),
        }?;
        if self.extra_retained_tokens > 0 {
            write!(f, ", extra_retained_tokens={}", self.extra_retained_tokens)?;
        }
        f.write_str(if self.drops_last_block { ", drops_last_block=True)" } else { ")" })
    }
}

impl Group {
    /// A group of layers.
    ///
    /// # Errors
    /// [`Error::Config`] unless block size and window or chunk are 1 to [`MAX_GROUP_TOKENS`], and
    /// a chunk is a multiple of the block size.
    pub fn new(attention: Attention, block_size: usize) -> Result<Self> {
        check_tokens("block_size", block_size)?;
        match attention {
            Attention::Full | Attention::StateSpace => {}
            Attention::SlidingWindow { window } => check_tokens("window", window)?,
            Attention::ChunkedLocal { chunk } => {
                check_tokens("chunk", chunk)?;
                if !chunk.is_multiple_of(block_size) {
                    return Err(Error::Config(format!(
                        "chunk is {chunk}: it must be a multiple of the block size {block_size}, \
                         because no block lies in two chunks"
                    )));
                }
            }
        }
        Ok(Self { attention, block_size, extra_retained_tokens: 0, drops_last_block: false })
    }

    /// The same window that keeps the blocks of this many more tokens. Draft models of several
    /// modules compute the last tokens again, and then read below the window.
    ///
    /// # Errors
    /// [`Error::Config`] for a kind other than a window, and if window and extra tokens together
    /// exceed [`MAX_GROUP_TOKENS`].
    pub fn retaining(self, extra_retained_tokens: usize) -> Result<Self> {
        let Attention::SlidingWindow { window } = self.attention else {
            return Err(Error::Config(format!(
                "extra_retained_tokens is {extra_retained_tokens} for {:?}: only a window has any",
                self.attention
            )));
        };
        let num_tokens = window.saturating_add(extra_retained_tokens);
        check_tokens("window plus extra_retained_tokens", num_tokens)?;
        Ok(Self { extra_retained_tokens, ..self })
    }

    /// The same group in which a hit ends one block before the blocks that are found. A draft model
    /// that reads the target's hidden states (EAGLE, MTP) computes a token from the token after it.
    /// So the last block before a hit's end has the right draft KV only if the next block is found.
    ///
    /// # Errors
    /// [`Error::Config`] for kinds other than full attention and windows: no draft model has them.
    pub fn dropping_last_block(self) -> Result<Self> {
        if matches!(self.attention, Attention::Full | Attention::SlidingWindow { .. }) {
            return Ok(Self { drops_last_block: true, ..self });
        }
        Err(Error::Config(format!(
            "drops_last_block is true for {:?}: only full attention and windows can have it",
            self.attention
        )))
    }

    /// The group as a tier holds it, with blocks `factor` times as large. A load fills all blocks
    /// that a request keeps, so a hit in the tier needs retained tokens too.
    pub(crate) fn in_tier(self, factor: usize) -> Result<Self> {
        let attention = match self.attention {
            Attention::SlidingWindow { window } => {
                Attention::SlidingWindow { window: window + self.extra_retained_tokens }
            }
            other => other,
        };
        let group = Self::new(attention, self.block_size.saturating_mul(factor))?;
        Ok(Self { drops_last_block: self.drops_last_block, ..group })
    }

    /// Tokens right below a window whose blocks a request keeps.
    pub fn extra_retained_tokens(self) -> usize {
        self.extra_retained_tokens
    }

    /// Whether a hit ends one block before the blocks that are found.
    pub fn drops_last_block(self) -> bool {
        self.drops_last_block
    }

    /// Whether a hit needs every block of the prefix.
    pub(crate) fn is_full(self) -> bool {
        self.attention == Attention::Full
    }

    /// Number of blocks, from the first, among which are all that a hit of `num_blocks` needs.
    #[inline]
    fn num_searched_blocks(self, num_blocks: usize) -> usize {
        num_blocks + usize::from(self.drops_last_block && num_blocks > 0)
    }

    /// Number of blocks for `num_tokens` tokens. The last may be partial.
    #[inline]
    pub fn num_blocks(self, num_tokens: usize) -> usize {
        num_tokens.div_ceil(self.block_size)
    }

    /// Number of blocks at its start that a request skips once `num_tokens` are computed: no later
    /// token reads them, and no window retains them.
    #[inline]
    pub fn num_skipped_blocks(self, num_tokens: usize) -> usize {
        self.num_unread_blocks(num_tokens.saturating_sub(self.extra_retained_tokens))
    }

    /// Number of blocks at the start of a request that no token after `num_tokens` reads. A hit of
    /// `num_tokens` needs all other blocks.
    #[inline]
    pub fn num_unread_blocks(self, num_tokens: usize) -> usize {
        let num_unread_tokens = match self.attention {
            Attention::Full => 0,
            Attention::SlidingWindow { window } => {
                sliding_window::num_skipped_tokens(window, num_tokens)
            }
            Attention::ChunkedLocal { chunk } => {
                chunked_local::num_skipped_tokens(chunk, num_tokens)
            }
            Attention::StateSpace => state_space::num_skipped_tokens(num_tokens),
        };
        num_unread_tokens / self.block_size
    }

    /// The most blocks that a request of `num_tokens` tokens holds while it computes at most
    /// `max_in_flight` of them at a time. None means no such limit.
    #[inline]
    pub(crate) fn max_held_blocks(self, num_tokens: usize, max_in_flight: Option<usize>) -> usize {
        let held_at_once = |num_in_flight| match self.attention {
            Attention::Full | Attention::StateSpace => usize::MAX,
            Attention::SlidingWindow { window } => {
                let window = window + self.extra_retained_tokens;
                sliding_window::max_held_blocks(window, self.block_size, num_in_flight)
            }
            Attention::ChunkedLocal { chunk } => {
                chunked_local::max_held_blocks(chunk, self.block_size, num_in_flight)
            }
        };
        self.num_blocks(num_tokens).min(max_in_flight.map_or(usize::MAX, held_at_once))
    }

    /// Whether some hit needs block `index`, if all hits end at multiples of `step` blocks. Only a
    /// window, as in the reference, can have a block that none needs: it lies in the middle of a
    /// step, before every window. Of all hits that end after the block, the first skips least.
    #[inline]
    fn is_reachable(self, index: usize, step: usize) -> bool {
        let end = (index / step + 1) * step;
        !matches!(self.attention, Attention::SlidingWindow { .. })
            || index >= self.num_unread_blocks(end * self.block_size)
            || (self.drops_last_block && index > 0 && index.is_multiple_of(step))
    }
}

fn check_tokens(what: &str, num_tokens: usize) -> Result<()> {
    if (1..=MAX_GROUP_TOKENS).contains(&num_tokens) {
        return Ok(());
    }
    Err(Error::Config(format!("{what} is {num_tokens}: it must be 1 to {MAX_GROUP_TOKENS} tokens")))
}
