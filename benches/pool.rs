//! How long does an operation of the pool take per block, in a server that has run for long?
//!
//! Every operation handles the 8,192 blocks of a prompt of 131,072 tokens, in a pool of four times
//! as many. The free queue is shuffled, because after an hour neighbours in a block table are not
//! neighbours in memory. `build` measures the construction of a pool of a million blocks.
#![expect(clippy::unwrap_used, reason = "a bench that fails has nothing to measure")]

mod common;

use std::hint::black_box;

use criterion::{Criterion, Throughput};
use kvstow_core::ids::{BlockId, GroupId};
use kvstow_core::key::Hashes;
use kvstow_core::pool::BlockPool;

use common::{NUM_DEVICE_BLOCKS, NUM_PROMPT_BLOCKS, prompt, time};

const GROUP: GroupId = GroupId(0);

/// A pool, and the blocks of the current prompt.
struct State {
    pool: BlockPool,
    held: Vec<BlockId>,
}

impl State {
    /// A pool with all blocks free, without keys, and in random order.
    fn shuffled() -> Self {
        let mut pool = BlockPool::new(NUM_DEVICE_BLOCKS + 1, false).unwrap();
        let mut all = Vec::new();
        pool.allocate(NUM_DEVICE_BLOCKS, &mut all).unwrap();
        // An odd stride visits each of 2^n blocks once.
        let order: Vec<_> = (0..all.len()).map(|at| all[at * 20_011 % all.len()]).collect();
        pool.free(&order).unwrap();
        Self { pool, held: Vec::with_capacity(NUM_PROMPT_BLOCKS) }
    }

    fn allocate(&mut self) {
        self.held.clear();
        self.pool.allocate(NUM_PROMPT_BLOCKS, &mut self.held).unwrap();
    }

    fn cache(&mut self, hashes: &Hashes) {
        self.pool.cache(&self.held, hashes, GROUP).unwrap();
    }

    fn touch(&mut self) {
        self.pool.touch(&self.held).unwrap();
    }

    fn free(&mut self) {
        self.pool.free(&self.held).unwrap();
    }
}

fn bench_pool(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("pool");
    group.throughput(Throughput::Elements(NUM_PROMPT_BLOCKS as u64));
    // One prompt more than fits: by the time the first comes round again it has been evicted.
    let prompts: Vec<_> = (0..5).map(|which| prompt(which, NUM_PROMPT_BLOCKS)).collect();
    let mut turns = prompts.iter().cycle();

    let mut state = State::shuffled();
    state.allocate();
    group.bench_function("allocate, clean", |bencher| {
        time(bencher, &mut state, State::free, State::allocate);
    });
    group.bench_function("cache", |bencher| {
        let undo = |state: &mut State| {
            state.pool.evict(&state.held).unwrap();
            state.free();
            state.allocate();
        };
        time(bencher, &mut state, undo, |state| state.cache(&prompts[0]));
    });
    state.cache(&prompts[0]); // for whoever skips the bench before
    group.bench_function("lookup, all hit", |bencher| {
        bencher.iter(|| state.pool.lookup(black_box(&prompts[0]), GROUP).unwrap());
    });
    group.bench_function("touch", |bencher| {
        time(bencher, &mut state, State::free, State::touch);
    });
    group.bench_function("free, cached", |bencher| {
        state.free();
        time(bencher, &mut state, State::touch, State::free);
        state.touch();
    });
    state.free();
    for hashes in &prompts[1..] {
        state.allocate();
        state.cache(hashes);
        state.free();
    }
    state.allocate();
    group.bench_function("allocate, evicting", |bencher| {
        let publish_and_free = |state: &mut State| {
            state.cache(turns.next().unwrap());
            state.free();
        };
        time(bencher, &mut state, publish_and_free, State::allocate);
    });
    group.finish();

    let mut group = criterion.benchmark_group("build");
    group.sample_size(10);
    group.bench_function("a pool of 1,000,000", |bencher| {
        bencher.iter(|| BlockPool::new(black_box(1_000_000), false).unwrap());
    });
    group.finish();
}

fn main() {
    let mut criterion = common::criterion();
    bench_pool(&mut criterion);
    criterion.final_summary();
}
