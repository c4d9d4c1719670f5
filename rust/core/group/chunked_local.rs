//! Chunked local attention: a token reads its own chunk, up to itself.

use std::ops::Range;

use super::model::Cached;

/// The longest hit of at most `max_blocks` blocks that ends at a multiple of `step`, as the blocks
/// it needs: those of the chunk in which the next token stands.
pub(super) fn longest_hit(
    cached: &Cached<'_>,
    chunk: usize,
    block_size: usize,
    max_blocks: usize,
    step: usize,
) -> Range<usize> {
    let chunk_blocks = chunk / block_size;
    let mut end = max_blocks - max_blocks % step;
    loop {
        let start = end - end % chunk_blocks;
        let Some(missing) = (start..end).find(|&index| !cached.has(index)) else {
            return start..end;
        };
        // Where chunks and steps do not meet, this may fall into the chunk before.
        end = missing - missing % step;
    }
}

/// Tokens that no later token reads: all chunks before the current one.
pub(super) fn num_skipped_tokens(chunk: usize, num_tokens: usize) -> usize {
    num_tokens - num_tokens % chunk
}

/// What is computed may begin in one chunk and go on into the next.
pub(super) fn max_held_blocks(chunk: usize, block_size: usize, num_in_flight: usize) -> usize {
    (chunk + num_in_flight).div_ceil(block_size)
}
