//! Chunked local attention: a token reads its own chunk, up to itself.

/// Tokens that no later token reads: all chunks before the current one.
pub(super) fn num_skipped_tokens(chunk: usize, num_tokens: usize) -> usize {
    num_tokens - num_tokens % chunk
}

/// What is computed may begin in one chunk and go on into the next.
pub(super) fn max_held_blocks(chunk: usize, block_size: usize, num_in_flight: usize) -> usize {
    (chunk + num_in_flight).div_ceil(block_size)
}
