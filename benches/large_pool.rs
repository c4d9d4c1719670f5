//! How far is the pool from the speed of the memory, in a large pool that is full and shuffled?
//!
//! Each row handles whole prompts in a pool of one size. A prompt's blocks are not in any cache, as
//! in a server with many requests. The floor is what any hash table over blocks must do to memory:
//! it touches random cache lines in arrays of the pool's size, and nothing else. Its arrays are in
//! pages of 4 KiB. The pool asks for large pages.
//!
//! ```text
//!   lookup           reads an entry of a table and the block that it names
//!   evict, publish   writes block and old key's entry, then block and new key's entry
//!   clean, publish   writes the block, then block and key's entry
//!   free             writes the block
//!   admit a hit      a lookup and a free
//! ```
//!
//! Each of these is a line, and all lines are prefetched. "Then" separates two passes over all
//! blocks, because allocation and publication are two calls. The pool stays below the floor where it
//! packs several blocks into a line. Each figure is the fastest tenth of all rounds. The last row
//! is the construction of a pool of a million blocks.
//!
//! ```text
//!   cargo bench -p kvstow-benches --bench large_pool [-- ROUNDS [ROW...]]
//!   ROW: 8k 32k 32k-shuffled 256k 1M 1M-short
//! ```
#![expect(clippy::unwrap_used, reason = "a bench that fails has nothing to measure")]
#![expect(clippy::print_stdout, reason = "the table is the result")]
#![expect(clippy::cast_precision_loss, reason = "figures of a few digits")]

#[path = "common/floor.rs"]
mod floor;

use std::collections::VecDeque;
use std::hint::black_box;

use kvstow_core::hash::{HashOptions, hash_tokens};
use kvstow_core::ids::{BlockId, GroupId};
use kvstow_core::key::Hashes;
use kvstow_core::pool::BlockPool;

use floor::{Floor, NUM_ROUND_BLOCKS, shuffled, time};

const GROUP: GroupId = GroupId(0);
const MILLION: usize = 1_000_000;
const OPERATIONS: [&str; 5] = ["lookup", "evict, publish", "clean, publish", "free", "admit a hit"];

struct Row {
    name: &'static str,
    /// A power of two; the null block comes on top.
    num_blocks: usize,
    is_shuffled: bool,
    num_prompt_blocks: usize,
}

const ROWS: [Row; 6] = [
    Row { name: "8k", num_blocks: 1 << 13, is_shuffled: false, num_prompt_blocks: 8_192 },
    Row { name: "32k", num_blocks: 1 << 15, is_shuffled: false, num_prompt_blocks: 8_192 },
    Row { name: "32k-shuffled", num_blocks: 1 << 15, is_shuffled: true, num_prompt_blocks: 8_192 },
    Row { name: "256k", num_blocks: 1 << 18, is_shuffled: true, num_prompt_blocks: 8_192 },
    Row { name: "1M", num_blocks: 1 << 20, is_shuffled: true, num_prompt_blocks: 8_192 },
    Row { name: "1M-short", num_blocks: 1 << 20, is_shuffled: true, num_prompt_blocks: 64 },
];

/// Nanoseconds per block, one figure a round.
#[derive(Default)]
struct Samples(Vec<f64>);

impl Samples {
    fn add(&mut self, nanoseconds: f64) {
        self.0.push(nanoseconds / NUM_ROUND_BLOCKS as f64);
    }

    fn fastest_tenth(&self) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        sorted[sorted.len() / 10]
    }
}

fn measure_floor(num_blocks: usize, num_rounds: usize) -> [f64; 5] {
    let mut floor = Floor::new(num_blocks);
    let mut samples: [Samples; 5] = Default::default();
    for _ in 0..num_rounds {
        samples.iter_mut().zip(floor.round()).for_each(|(samples, it)| samples.add(it));
    }
    samples.map(|samples| samples.fastest_tenth())
}

// One function for each operation, so that a profiler counts its instructions.

#[inline(never)]
fn allocate_clean(pool: &mut BlockPool, n: usize, ids: &mut Vec<BlockId>) {
    pool.allocate(n, ids).unwrap();
}

#[inline(never)]
fn allocate_evicting(pool: &mut BlockPool, n: usize, ids: &mut Vec<BlockId>) {
    pool.allocate(n, ids).unwrap();
}

#[inline(never)]
fn publish(pool: &mut BlockPool, ids: &[BlockId], hashes: &Hashes) {
    pool.cache(ids, hashes, GROUP).unwrap();
}

#[inline(never)]
fn free(pool: &mut BlockPool, ids: &[BlockId]) {
    pool.free(ids).unwrap();
}

#[inline(never)]
fn look_up(pool: &BlockPool, hashes: &Hashes) -> Vec<BlockId> {
    pool.lookup(hashes, GROUP).unwrap()
}

#[inline(never)]
fn touch(pool: &mut BlockPool, ids: &[BlockId]) {
    pool.touch(ids).unwrap();
}

/// A pool, and prompts for twice its blocks, so that each prompt is evicted before its next turn.
struct State {
    pool: BlockPool,
    prompts: Vec<Hashes>,
    num_prompt_blocks: usize,
    /// Prompts that fit the pool.
    num_resident: usize,
    /// Prompts of a round.
    num_per_round: usize,
    samples: [Samples; 5],
}

impl State {
    fn new(row: &Row) -> Self {
        let num_resident = row.num_blocks / row.num_prompt_blocks;
        let num_per_round = NUM_ROUND_BLOCKS / row.num_prompt_blocks;
        let prompts = (0..2 * num_resident + 2 * num_per_round).map(|which| {
            let first = which as u64 * 1_000_003;
            let tokens: Vec<u64> = (first..).take(row.num_prompt_blocks).collect();
            hash_tokens(&tokens, 1, HashOptions::default()).unwrap()
        });
        let mut state = Self {
            pool: BlockPool::new(row.num_blocks + 1, false).unwrap(),
            prompts: prompts.collect(),
            num_prompt_blocks: row.num_prompt_blocks,
            num_resident,
            num_per_round,
            samples: Default::default(),
        };
        if row.is_shuffled {
            state.shuffle();
        }
        state
    }

    /// Makes all blocks free, without keys, in random order. Before, each is free or has one
    /// reference.
    fn shuffle(&mut self) {
        self.pool.allocate(self.pool.num_free(), &mut Vec::new()).unwrap();
        let all = shuffled(self.pool.num_usable());
        let all: Vec<_> = all.iter().map(|&id| BlockId(id + 1)).collect();
        self.pool.evict(&all).unwrap();
        self.pool.free(&all).unwrap();
    }

    /// Fills the pool with prompts from a pool without keys.
    fn fill(&mut self, is_shuffled: bool) {
        let mut which = 0;
        while self.pool.num_free() > 0 {
            let mut nanoseconds = 0.;
            for _ in 0..self.num_per_round {
                let mut ids = Vec::with_capacity(self.num_prompt_blocks);
                let hashes = &self.prompts[which];
                let pool = &mut self.pool;
                nanoseconds += time(|| {
                    allocate_clean(pool, hashes.len(), &mut ids);
                    publish(pool, &ids, hashes);
                })
                .1;
                which += 1;
            }
            self.samples[2].add(nanoseconds);
        }
        if is_shuffled {
            self.shuffle();
        } else {
            let all: Vec<_> = (1..).take(self.pool.num_usable()).map(BlockId).collect();
            self.pool.evict(&all).unwrap();
            self.pool.free(&all).unwrap();
        }
    }

    /// Requests come and go in a full pool.
    fn serve(&mut self, num_rounds: usize) {
        let num_held = self.num_resident / 4;
        let mut held: VecDeque<Vec<BlockId>> = VecDeque::new();
        let num_warm_up = 3 * self.num_resident;
        let mut which = 0;
        for round in 0..num_warm_up / self.num_per_round + num_rounds {
            let is_warm = round * self.num_per_round >= num_warm_up;
            let mut total = [0.; 5];
            for _ in 0..self.num_per_round {
                let pool = &mut self.pool;
                let hashes = &self.prompts[which % self.prompts.len()];
                let num_cached = pool.num_cached();
                let mut ids = Vec::with_capacity(hashes.len());
                total[1] += time(|| {
                    allocate_evicting(pool, hashes.len(), &mut ids);
                    publish(pool, &ids, hashes);
                })
                .1;
                assert!(!is_warm || pool.num_cached() == num_cached, "the pool is full");
                ids.reverse(); // a request frees its tail first
                held.push_back(ids);
                if held.len() > num_held {
                    let oldest = held.pop_front().unwrap();
                    total[3] += time(|| free(pool, &oldest)).1;
                }
                let num_prompts = self.prompts.len();
                let cached = &self.prompts[(which + num_prompts - 2 * num_held) % num_prompts];
                let (mut hit, nanoseconds) = time(|| look_up(pool, cached));
                assert!(!is_warm || hit.len() == cached.len(), "{} of {}", hit.len(), cached.len());
                total[0] += nanoseconds;
                total[4] += nanoseconds + time(|| touch(pool, &hit)).1;
                hit.reverse();
                pool.free(&hit).unwrap();
                which += 1;
            }
            if is_warm {
                for at in [0, 1, 3, 4] {
                    self.samples[at].add(total[at]);
                }
            }
        }
    }
}

fn measure(row: &Row, num_rounds: usize) {
    let mut floors = measure_floor(row.num_blocks, num_rounds);
    let mut state = State::new(row);
    for _ in 0..(num_rounds * NUM_ROUND_BLOCKS / row.num_blocks).clamp(3, 32) {
        state.fill(row.is_shuffled);
    }
    state.serve(num_rounds);
    state.pool.check().unwrap();
    for (floor, again) in floors.iter_mut().zip(measure_floor(row.num_blocks, num_rounds)) {
        *floor = floor.min(again);
    }
    for ((operation, samples), floor) in OPERATIONS.iter().zip(&state.samples).zip(floors) {
        let nanoseconds = samples.fastest_tenth();
        println!(
            "{:13} {operation:15} {nanoseconds:7.1} {floor:7.1} {:7.2}",
            row.name,
            nanoseconds / floor
        );
    }
}

fn main() {
    let arguments: Vec<_> = std::env::args().skip(1).filter(|it| !it.starts_with("--")).collect();
    let num_rounds = arguments.iter().find_map(|it| it.parse().ok()).unwrap_or(400);
    let names: Vec<_> = arguments.iter().filter(|it| it.parse::<usize>().is_err()).collect();
    println!("{:13} {:15} ns/block   floor  multiple", "pool", "operation");
    for row in ROWS.iter().filter(|row| names.is_empty() || names.iter().any(|it| *it == row.name))
    {
        measure(row, num_rounds);
    }
    let build = || time(|| BlockPool::new(black_box(MILLION), false).unwrap());
    let times = (0..10).map(|_| build().1 / 1e6).fold(f64::INFINITY, f64::min);
    let bytes = build().0.memory_bytes() as f64 / MILLION as f64;
    println!("a pool of 1,000,000: built in {times:.1} ms, {bytes:.1} bytes a block");
}
