//! Full attention (also MLA): a hit needs every block of the prefix, and nothing is ever skipped.

use crate::ids::BlockId;

use super::model::Cached;

/// Per group, the blocks of the longest hit of at most `max_blocks` blocks that ends at a multiple
/// of `step`.
pub(super) fn longest_hit(
    cached: &Cached<'_>,
    max_blocks: usize,
    step: usize,
) -> Vec<Vec<BlockId>> {
    let mut found = cached.prefix(max_blocks);
    for blocks in &mut found {
        blocks.truncate(blocks.len() - blocks.len() % step);
    }
    found
}
