//! A set of small integers that knows its largest member.
//!
//! ```text
//!   level 1   word 0: bit w says whether word w below has a member
//!   level 0   word w: bit b says whether 64 w + b is a member
//! ```

use crate::error::Result;

use super::memory::zeroed;

/// Integers below a bound. A bit each, and each level above takes a 64th of the one below.
pub(super) struct BitSet {
    levels: Vec<Vec<u64>>,
    len: usize,
}

impl BitSet {
    /// An empty set of integers below `bound`.
    pub(super) fn new(bound: usize) -> Result<Self> {
        let mut levels = Vec::new();
        let mut num_words = bound.div_ceil(64).max(1);
        loop {
            levels.push(zeroed(num_words)?);
            if num_words == 1 {
                return Ok(Self { levels, len: 0 });
            }
            num_words = num_words.div_ceil(64);
        }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Adds `member`, which is not in the set.
    #[inline]
    pub(super) fn insert(&mut self, member: usize) {
        self.len += 1;
        let mut at = member;
        for level in &mut self.levels {
            let word = &mut level[at / 64];
            let was_empty = *word == 0;
            *word |= 1 << (at % 64);
            if !was_empty {
                return;
            }
            at /= 64;
        }
    }

    /// Takes `member` out, if it is in. Returns whether it was.
    #[inline]
    pub(super) fn remove(&mut self, member: usize) -> bool {
        if self.levels[0][member / 64] >> (member % 64) & 1 == 0 {
            return false;
        }
        self.len -= 1;
        let mut at = member;
        for level in &mut self.levels {
            let word = &mut level[at / 64];
            *word &= !(1 << (at % 64));
            if *word != 0 {
                break;
            }
            at /= 64;
        }
        true
    }

    /// Takes the largest member out. The set is not empty.
    #[inline]
    pub(super) fn remove_last(&mut self) {
        let last = self.levels.iter().rev().fold(0, |at, level| {
            64 * at + 63_usize.saturating_sub(level[at].leading_zeros() as usize)
        });
        self.remove(last);
    }
}
