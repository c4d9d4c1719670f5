//! Sliding window: a token reads itself and the `window - 1` tokens before it.

use std::ops::Range;

use super::model::Cached;

/// Blocks that the token after a hit reads: the hit may end anywhere in the last of them, or right
/// after it.
fn num_needed(window: usize, block_size: usize) -> usize {
    (window - 1).div_ceil(block_size)
}

/// The longest hit of at most `max_blocks` blocks that ends at a multiple of `step`, as the blocks
/// it needs. Searched from the right: a short window is found at once, however long the prefix.
pub(super) fn longest_hit(
    cached: &Cached<'_>,
    window: usize,
    block_size: usize,
    max_blocks: usize,
    step: usize,
) -> Range<usize> {
    let num_needed = num_needed(window, block_size);
    let mut end = max_blocks - max_blocks % step;
    while end > 0 {
        let start = end.saturating_sub(num_needed);
        let Some(missing) = (start..end).rev().find(|&index| !cached.has(index)) else {
            return start..end;
        };
        // No hit that ends behind the missing block and begins before it can do.
        end = missing - missing % step;
    }
    0..0
}

/// Tokens that no later token reads.
pub(super) fn num_skipped_tokens(window: usize, num_tokens: usize) -> usize {
    (num_tokens + 1).saturating_sub(window)
}

/// A window and what is computed may begin and end inside a block.
pub(super) fn max_held_blocks(window: usize, block_size: usize, num_in_flight: usize) -> usize {
    (window - 1 + num_in_flight).div_ceil(block_size) + 1
}

/// Only the last blocks before a multiple of `step` can be needed.
pub(super) fn is_reachable(window: usize, block_size: usize, index: usize, step: usize) -> bool {
    index % step + num_needed(window, block_size) >= step
}
