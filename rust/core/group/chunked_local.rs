//! Chunked local attention: a token reads its own chunk, up to itself.

/// Number of tokens that no later token reads: all chunks before the current one.
pub(super) fn num_skipped_tokens(chunk: usize, num_tokens: usize) -> usize {
    num_tokens - num_tokens % chunk
}

/// The computed tokens may begin in one chunk and end in the next.
pub(super) fn max_held_blocks(chunk: usize, block_size: usize, num_in_flight: usize) -> usize {
    (chunk + num_in_flight).div_ceil(block_size)
}
