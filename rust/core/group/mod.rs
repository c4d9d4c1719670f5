//! The kinds of attention: what a hit needs, and what is no longer read. A kind is one file and
//! one arm here.

mod full_attention;

use crate::error::{Error, Result};
use crate::ids::{BlockId, GroupId};
use crate::key::BlockHash;
use crate::pool::BlockPool;

/// The most tokens a block may hold.
pub const MAX_BLOCK_SIZE: usize = 1 << 20;

/// The most groups a model may have: what a [`GroupId`] can name.
pub const MAX_GROUPS: usize = 1 << 16;

/// How a group's layers attend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Attention {
    /// Every token attends to the whole prefix.
    Full,
}

/// Layers that share a block table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group {
    /// How they attend.
    pub attention: Attention,
    /// Tokens per block.
    pub block_size: usize,
}

impl Group {
    /// A group of full-attention layers.
    ///
    /// # Errors
    /// [`Error::Config`] unless `block_size` is 1 to [`MAX_BLOCK_SIZE`].
    pub fn full_attention(block_size: usize) -> Result<Self> {
        if !(1..=MAX_BLOCK_SIZE).contains(&block_size) {
            return Err(Error::Config(format!(
                "a block size of {block_size} tokens: it must be 1 to {MAX_BLOCK_SIZE}"
            )));
        }
        Ok(Self { attention: Attention::Full, block_size })
    }

    /// Blocks that `num_tokens` tokens need, the last one perhaps in part.
    #[inline]
    pub fn num_blocks(self, num_tokens: usize) -> usize {
        num_tokens.div_ceil(self.block_size)
    }

    /// The blocks of the longest hit within `hashes`, null where none is needed.
    pub(crate) fn find_hit(
        self,
        pool: &BlockPool,
        hashes: &[BlockHash],
        group: GroupId,
    ) -> Vec<BlockId> {
        match self.attention {
            Attention::Full => full_attention::find_hit(pool, hashes, group),
        }
    }

    /// Tokens at the start of a request that no later token reads, `num_tokens` being computed.
    #[inline]
    pub(crate) fn num_skipped_tokens(self, _num_tokens: usize) -> usize {
        match self.attention {
            Attention::Full => 0,
        }
    }
}

/// The block size that all groups share.
///
/// # Errors
/// [`Error::Config`] for no groups, too many, or groups of different block sizes.
pub fn common_block_size(groups: &[Group]) -> Result<usize> {
    let [first, rest @ ..] = groups else {
        return Err(Error::Config("no groups: a model has at least one".to_owned()));
    };
    if groups.len() > MAX_GROUPS {
        return Err(Error::Config(format!(
            "{} groups: at most {MAX_GROUPS} are counted",
            groups.len()
        )));
    }
    match rest.iter().find(|group| group.block_size != first.block_size) {
        Some(other) => Err(Error::Config(format!(
            "groups of {} and {} tokens a block: block sizes that differ are not supported yet",
            first.block_size, other.block_size
        ))),
        None => Ok(first.block_size),
    }
}
