//! What any hash table over blocks must do to memory, and nothing else.

use std::hint::black_box;
use std::time::Instant;

use prefetch_index::prefetch_index;

/// Blocks of a round: one prompt of 131,072 tokens, or many short ones.
pub(crate) const NUM_ROUND_BLOCKS: usize = 8_192;

/// Runs an operation. Returns its result, and the nanoseconds that it took.
pub(crate) fn time<T>(operation: impl FnOnce() -> T) -> (T, f64) {
    let start = Instant::now();
    let result = operation();
    (result, start.elapsed().as_nanos() as f64)
}

/// The numbers below `num`, which is a power of two, in random order (xorshift, Fisher-Yates).
pub(crate) fn shuffled(num: usize) -> Vec<u32> {
    let mut all: Vec<u32> = (0..).take(num).collect();
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for last in (1..num).rev() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        all.swap(last, usize::try_from(state % (last as u64 + 1)).unwrap());
    }
    all
}

/// Arrays of the pool's size, and the order in which the floor visits them.
pub(crate) struct Floor {
    lines: Vec<[u64; 8]>,
    /// At most half of its entries are in use, as in any open-addressing table.
    table: Vec<u64>,
    order: Vec<u32>,
    at: usize,
}

impl Floor {
    /// Lines that are prefetched at a time.
    const AHEAD: usize = 16;

    pub(crate) fn new(num_blocks: usize) -> Self {
        let order = shuffled(num_blocks);
        let mut table = vec![0; 2 * num_blocks];
        for (home, block) in order.iter().zip(shuffled(num_blocks).iter().rev()) {
            table[2 * *home as usize] = u64::from(*block);
        }
        Self { lines: vec![[1; 8]; num_blocks], table, order, at: 0 }
    }

    /// Nanoseconds of a round: a lookup, an eviction and a publication, a clean allocation and a
    /// publication, a free, and the admission of a hit.
    pub(crate) fn round(&mut self) -> [f64; 5] {
        let lookup = self.read();
        let blocks = self.next();
        let evict = self.write(blocks, true) + self.write(blocks, true);
        let blocks = self.next();
        let clean = self.write(blocks, false) + self.write(blocks, true);
        let blocks = self.next();
        let free = self.write(blocks, false);
        [lookup, evict, clean, free, lookup + free]
    }

    /// The blocks of the next round.
    fn next(&mut self) -> usize {
        let start = self.at;
        self.at = (self.at + NUM_ROUND_BLOCKS) % self.order.len();
        start
    }

    fn read(&mut self) -> f64 {
        let start = self.next();
        let order = &self.order[start..start + NUM_ROUND_BLOCKS];
        let entry = |at: usize| 2 * order[at.min(NUM_ROUND_BLOCKS - 1)] as usize;
        let block = |at| usize::try_from(self.table[entry(at)]).unwrap();
        time(|| {
            let mut sum = 0;
            for at in 0..NUM_ROUND_BLOCKS {
                prefetch_index(&self.table, entry(at + 2 * Self::AHEAD));
                prefetch_index(&self.lines, block(at + Self::AHEAD));
                sum += self.lines[block(at)][0];
            }
            black_box(sum);
        })
        .1
    }

    /// Writes the lines of some blocks; with `has_entry`, also as many entries of the table.
    fn write(&mut self, blocks: usize, has_entry: bool) -> f64 {
        let entries = self.next();
        let Self { lines, table, order, .. } = self;
        let [blocks, entries] = [blocks, entries].map(|at| &order[at..at + NUM_ROUND_BLOCKS]);
        let place = |of: &[u32], at: usize| of[at.min(NUM_ROUND_BLOCKS - 1)] as usize;
        time(|| {
            for at in 0..NUM_ROUND_BLOCKS {
                let ahead = at + Self::AHEAD;
                prefetch_index(&*lines, place(blocks, ahead));
                lines[place(blocks, at)][0] += 1;
                if has_entry {
                    prefetch_index(&*table, 2 * place(entries, ahead));
                    table[2 * place(entries, at) + 1] += 1;
                }
            }
            black_box((lines, table));
        })
        .1
    }
}
