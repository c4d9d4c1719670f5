//! Sliding window: a token reads itself and the `window - 1` tokens before it.

/// Number of tokens that no later token reads.
pub(super) fn num_skipped_tokens(window: usize, num_tokens: usize) -> usize {
    (num_tokens + 1).saturating_sub(window)
}

/// A window and the computed tokens. Both ends may lie inside a block.
pub(super) fn max_held_blocks(window: usize, block_size: usize, num_in_flight: usize) -> usize {
    (window - 1 + num_in_flight).div_ceil(block_size) + 1
}
