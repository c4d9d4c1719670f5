//! Recurrent state (Mamba): a block holds the state after its last token, which stands for all
//! tokens before it.

use std::ops::Range;

use super::model::Cached;

/// The longest hit of at most `max_blocks` blocks that ends at a multiple of `step`, as the one
/// block it needs.
pub(super) fn longest_hit(cached: &Cached<'_>, max_blocks: usize, step: usize) -> Range<usize> {
    let mut end = max_blocks - max_blocks % step;
    while end > 0 {
        if cached.has(end - 1) {
            return end - 1..end;
        }
        end -= step;
    }
    0..0
}

/// Tokens that no later token reads: all but the last.
pub(super) fn num_skipped_tokens(num_tokens: usize) -> usize {
    num_tokens.saturating_sub(1)
}
