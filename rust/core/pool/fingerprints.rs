//! From a key's fingerprint to a block: an open-addressing hash table that holds no keys.
//!
//! An entry is a block id with 32 bits of its key's fingerprint, so a probe seldom reads a wrong
//! key. Removal shifts entries back (Knuth, TAOCP 3, 6.4, algorithm R). There are no tombstones
//! and no rebuilds, so years of evictions do not slow the table down.

use crate::ids::BlockId;
use crate::key::BlockHash;

/// One entry for each distinct key. 16 to 32 bytes a block.
#[derive(Clone, Debug)]
pub(super) struct FingerprintTable {
    /// Fingerprint in the upper half, block id in the lower. 0 (the null block) is an empty place.
    pub(super) entries: Vec<u64>,
}

impl FingerprintTable {
    /// An empty table for `num_blocks` blocks.
    pub(super) fn new(num_blocks: usize) -> Self {
        // At most half full: most probes end at their first place.
        Self { entries: vec![0; (2 * num_blocks).next_power_of_two()] }
    }

    /// The first place that a probe for a fingerprint reads.
    #[inline]
    pub(super) fn home(&self, fingerprint: u32) -> usize {
        fingerprint as usize & (self.entries.len() - 1)
    }

    /// The place of a key's entry, or the empty place where it would go. `has_key` says whether a
    /// block with this fingerprint holds the key.
    #[inline]
    pub(super) fn probe(&self, fingerprint: u32, has_key: impl Fn(BlockId) -> bool) -> usize {
        let mut place = self.home(fingerprint);
        loop {
            let entry = self.entries[place];
            if entry == 0 || (fingerprint_of(entry) == fingerprint && has_key(block_of(entry))) {
                return place;
            }
            place = self.after(place);
        }
    }

    /// The place of an entry, or the empty place that ends its probe. Reads no key.
    #[inline]
    pub(super) fn find(&self, entry: u64) -> usize {
        let mut place = self.home(fingerprint_of(entry));
        while self.entries[place] != entry && self.entries[place] != 0 {
            place = self.after(place);
        }
        place
    }

    /// Empties a place, and moves back every entry that no probe would reach across it.
    #[inline]
    pub(super) fn remove(&mut self, mut gap: usize) {
        let mask = self.entries.len() - 1;
        let mut place = gap;
        loop {
            place = self.after(place);
            let entry = self.entries[place];
            if entry == 0 {
                break;
            }
            let home = self.home(fingerprint_of(entry));
            if place.wrapping_sub(home) & mask >= place.wrapping_sub(gap) & mask {
                self.entries[gap] = entry;
                gap = place;
            }
        }
        self.entries[gap] = 0;
    }

    #[inline]
    fn after(&self, place: usize) -> usize {
        (place + 1) & (self.entries.len() - 1)
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the lower half of an entry")]
pub(super) const fn block_of(entry: u64) -> BlockId {
    BlockId(entry as u32)
}

pub(super) const fn fingerprint_of(entry: u64) -> u32 {
    (entry >> 32) as u32
}

pub(super) const fn entry_of(fingerprint: u32, id: BlockId) -> u64 {
    (fingerprint as u64) << 32 | id.0 as u64
}

/// 32 bits of a key, well mixed even if the caller's hashes are not (counters, short names). A
/// 64 x 64 -> 128 bit product folds both halves, as in wyhash and foldhash.
#[expect(clippy::cast_possible_truncation, reason = "a fold keeps the halves on purpose")]
#[inline]
pub(super) fn fingerprint(hash: &BlockHash, group_tag: u32) -> u32 {
    let (words, _) = hash.as_chunks::<8>();
    let word = |i: usize| u64::from_le_bytes(words[i]);
    let a = word(0) ^ word(2).rotate_left(32) ^ 0x243f_6a88_85a3_08d3;
    let b = word(1) ^ word(3).rotate_left(32) ^ u64::from(group_tag) ^ 0x1319_8a2e_0370_7344;
    let product = u128::from(a) * u128::from(b);
    let mixed = product as u64 ^ (product >> 64) as u64;
    mixed as u32 ^ (mixed >> 32) as u32
}
