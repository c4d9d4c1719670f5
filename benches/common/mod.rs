//! The benches' sizes and inputs, and a timer for operations that change state.

use std::time::{Duration, Instant};

use criterion::{Bencher, Criterion};
use kvstow_core::hash::{HashOptions, hash_tokens};
use kvstow_core::key::Hashes;

/// Tokens per block.
pub(crate) const BLOCK_SIZE: usize = 16;

/// The blocks of one long prompt: 131,072 tokens.
pub(crate) const NUM_PROMPT_BLOCKS: usize = 8_192;

/// Four such prompts fit a device (a power of two, without the null block).
pub(crate) const NUM_DEVICE_BLOCKS: usize = 4 * NUM_PROMPT_BLOCKS;

/// The block hashes of the `which`-th of several prompts that share no prefix.
pub(crate) fn prompt(which: usize, num_blocks: usize) -> Hashes {
    let first = which as u64 * 1_000_003;
    let tokens: Vec<u64> = (first..).take(num_blocks * BLOCK_SIZE).collect();
    hash_tokens(&tokens, BLOCK_SIZE, HashOptions::default()).unwrap()
}

/// Times `operation` alone. `prepare` restores the state in place, because a fresh copy would be
/// cold in the caches, unlike the state of a running server.
pub(crate) fn time<S>(
    bencher: &mut Bencher<'_>,
    state: &mut S,
    mut prepare: impl FnMut(&mut S),
    mut operation: impl FnMut(&mut S),
) {
    bencher.iter_custom(|num_iterations| {
        let mut total = Duration::ZERO;
        for _ in 0..num_iterations {
            prepare(state);
            let start = Instant::now();
            operation(state);
            total += start.elapsed();
        }
        total
    });
}

/// Settings with which `cargo bench` ends within a minute.
pub(crate) fn criterion() -> Criterion {
    Criterion::default()
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_millis(700))
        .sample_size(20)
        .configure_from_args()
}
