//! A row of bits that counts the set bits before any place in logarithmic time.
//!
//! ```text
//!   lines   [512 bits][512 bits][512 bits]...     a line of the processor's cache each
//!   sums    a Fenwick tree over the lines' counts
//! ```

use crate::error::Result;

use super::memory::zeroed;

const WORDS_PER_LINE: usize = 8;
const BITS_PER_LINE: usize = 64 * WORDS_PER_LINE;

/// Bits in lines of 512. Each bit takes about 1.07 bits of memory.
#[derive(Clone, Debug, Default)]
pub(super) struct CountedBits {
    lines: Vec<[u64; WORDS_PER_LINE]>,
    /// `sums[i - 1]` counts the bits of the `i & -i` lines that end with line `i - 1`.
    sums: Vec<u32>,
    num_set: u32,
}

impl CountedBits {
    /// Returns `num_bits` bits, none of them set.
    pub(super) fn new(num_bits: usize) -> Result<Self> {
        let num_lines = num_bits.div_ceil(BITS_PER_LINE);
        Ok(Self { lines: zeroed(num_lines)?, sums: zeroed(num_lines)?, num_set: 0 })
    }

    pub(super) fn num_set(&self) -> u64 {
        u64::from(self.num_set)
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.lines.capacity() * size_of::<[u64; WORDS_PER_LINE]>()
            + self.sums.capacity() * size_of::<u32>()
    }

    #[inline]
    pub(super) fn is_set(&self, at: u32) -> bool {
        let at = at as usize;
        self.lines[at / BITS_PER_LINE][at / 64 % WORDS_PER_LINE] >> (at % 64) & 1 == 1
    }

    /// Sets a bit that is not set.
    #[inline]
    pub(super) fn set(&mut self, at: u32) {
        self.flip(at);
        self.add(at, 1);
    }

    /// Clears a bit that is set.
    #[inline]
    pub(super) fn clear(&mut self, at: u32) {
        self.flip(at);
        self.add(at, u32::MAX);
    }

    /// Flips a bit without counting it. Call [`CountedBits::count`] after the last flip.
    #[inline]
    pub(super) fn flip(&mut self, at: u32) {
        let at = at as usize;
        self.lines[at / BITS_PER_LINE][at / 64 % WORDS_PER_LINE] ^= 1 << (at % 64);
    }

    /// Counts all bits anew.
    pub(super) fn count(&mut self) {
        for (sum, line) in self.sums.iter_mut().zip(&self.lines) {
            *sum = line.iter().map(|word| word.count_ones()).sum();
        }
        self.num_set = self.sums.iter().sum();
        for at in 1..=self.sums.len() {
            let above = at + (at & at.wrapping_neg());
            if above <= self.sums.len() {
                self.sums[above - 1] += self.sums[at - 1];
            }
        }
    }

    /// Returns the number of set bits before `at`.
    #[inline]
    pub(super) fn count_before(&self, at: u32) -> u64 {
        if self.num_set == 0 {
            return 0;
        }
        let at = at as usize;
        let (line, word) = (at / BITS_PER_LINE, at / 64 % WORDS_PER_LINE);
        let words = &self.lines[line];
        let mut count = (words[word] & ((1 << (at % 64)) - 1)).count_ones();
        for whole in &words[..word] {
            count += whole.count_ones();
        }
        let mut node = line;
        while node > 0 {
            count += self.sums[node - 1];
            node &= node - 1;
        }
        u64::from(count)
    }

    /// Adds to the counts of a bit's line, modulo 2^32.
    #[inline]
    fn add(&mut self, at: u32, change: u32) {
        self.num_set = self.num_set.wrapping_add(change);
        let mut node = at as usize / BITS_PER_LINE + 1;
        while node <= self.sums.len() {
            self.sums[node - 1] = self.sums[node - 1].wrapping_add(change);
            node += node & node.wrapping_neg();
        }
    }
}
