//! From a key's fingerprint to a block: a hash table that holds no keys.
//!
//! An entry is a block id with 32 bits of its key's fingerprint, so a probe seldom reads a wrong
//! key. Eight entries share a bucket, which is one cache line. An operation compares all eight at
//! once and seldom leaves the bucket, so it neither waits for memory twice nor mispredicts branches.
//!
//! ```text
//!   bucket   [e][ ][e][e][ ][ ][e][ ]    in any order
//!   probe    home bucket, then the next one as long as a bucket is full
//! ```
//!
//! An entry keeps its place, so its block can note the place and be removed without a search. Only
//! removal from a full bucket moves an entry: it fills the gap with a later one that passed over it
//! (Knuth, TAOCP 3, 6.4, algorithm R). There are no tombstones and no rebuilds, so years of
//! evictions do not slow the table down.

use std::ops::{Deref, DerefMut};

use bytemuck::{Pod, Zeroable};
use prefetch_index::prefetch_index;

use crate::ids::BlockId;
use crate::key::BlockHash;

use super::records::Records;

/// Entries of a bucket.
const WIDTH: usize = 8;

/// Blocks for each bucket. At most 3 of 8 places are in use, and 1 bucket of 82 is full. With 4
/// blocks, 1 of 18 would be. An eviction from a full bucket waits for the next bucket, too.
const BLOCKS_PER_BUCKET: usize = 3;

#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C, align(64))] // one cache line
pub(super) struct Bucket {
    /// Id 0 (the null block) is an empty place. Its fingerprint is 0 as well.
    ids: [u32; WIDTH],
    fingerprints: [u32; WIDTH],
}

/// What became of an entry for a key.
pub(super) enum Inserted {
    /// It is new, at this place of a bucket.
    New { place: usize },
    /// The key has an entry, with this block.
    Held { oldest: BlockId },
}

/// One entry for each distinct key.
#[derive(Clone, Debug)]
pub(super) struct FingerprintTable<Buckets = Records<Bucket>> {
    buckets: Buckets,
}

/// A table that a loop borrows, so that it finds the buckets once.
pub(super) type Borrowed<'a> = FingerprintTable<&'a mut [Bucket]>;

impl FingerprintTable {
    /// Bytes of memory for each block.
    pub(super) const BLOCK_BYTES: usize = size_of::<Bucket>() / BLOCKS_PER_BUCKET;

    /// An empty table for `num_blocks` blocks.
    pub(super) fn new(num_blocks: usize) -> Self {
        Self { buckets: Records::zeroed((num_blocks / BLOCKS_PER_BUCKET).max(1)) }
    }

    /// The table for a loop.
    #[inline]
    pub(super) fn borrow(&mut self) -> Borrowed<'_> {
        FingerprintTable { buckets: &mut self.buckets }
    }

    /// Bytes of memory.
    pub(super) fn memory_bytes(&self) -> usize {
        self.buckets.len() * size_of::<Bucket>()
    }
}

impl<Buckets: Deref<Target = [Bucket]>> FingerprintTable<Buckets> {
    /// Begins to load the bucket where a probe begins.
    #[inline]
    pub(super) fn prefetch(&self, fingerprint: u32) {
        prefetch_index(&*self.buckets, self.home(fingerprint));
    }

    /// A block in the first bucket of a probe with this fingerprint, or the null block. Reads no
    /// key.
    #[inline]
    pub(super) fn candidate(&self, fingerprint: u32) -> BlockId {
        let bucket = &self.buckets[self.home(fingerprint)];
        bucket.places(fingerprint).next().map_or(BlockId::NULL, |place| bucket.id(place))
    }

    /// The block that holds a key. `has_key` says whether a block with this fingerprint holds it.
    #[inline]
    pub(super) fn get(
        &self,
        fingerprint: u32,
        has_key: impl Fn(BlockId) -> bool,
    ) -> Option<BlockId> {
        let mut at = self.home(fingerprint);
        loop {
            let bucket = &self.buckets[at];
            let mut ids = bucket.places(fingerprint).map(|place| bucket.id(place));
            if let Some(id) = ids.find(|&id| has_key(id)) {
                return Some(id);
            }
            if !bucket.is_full() {
                return None;
            }
            at = self.after(at);
        }
    }

    /// The blocks of all entries.
    pub(super) fn ids(&self) -> impl Iterator<Item = BlockId> + '_ {
        let buckets = self.buckets.iter();
        buckets.flat_map(|bucket| bucket.ids).filter(|&id| id != 0).map(BlockId)
    }

    /// Whether every empty place has the fingerprint 0.
    pub(super) fn is_tidy(&self) -> bool {
        let is_tidy = |(&id, &fingerprint): (&u32, &u32)| id != 0 || fingerprint == 0;
        self.buckets.iter().all(|it| it.ids.iter().zip(&it.fingerprints).all(is_tidy))
    }

    /// The bucket where a probe begins: the fingerprint, as a fraction of 2^32, of all buckets.
    #[inline]
    fn home(&self, fingerprint: u32) -> usize {
        ((u64::from(fingerprint) * self.buckets.len() as u64) >> 32) as usize
    }

    #[inline]
    fn after(&self, at: usize) -> usize {
        if at + 1 < self.buckets.len() { at + 1 } else { 0 }
    }

    /// Number of steps from one bucket forward to another.
    #[inline]
    fn distance(&self, from: usize, to: usize) -> usize {
        if from <= to { to - from } else { to + self.buckets.len() - from }
    }

    /// The bucket and the place of a block's entry. Reads no key.
    #[inline]
    fn find(&self, fingerprint: u32, id: BlockId) -> Option<(usize, usize)> {
        let mut at = self.home(fingerprint);
        loop {
            let bucket = &self.buckets[at];
            if let Some(place) = places(equal(&bucket.ids, id.0)).next() {
                return Some((at, place));
            }
            if !bucket.is_full() {
                return None;
            }
            at = self.after(at);
        }
    }
}

impl<Buckets: DerefMut<Target = [Bucket]>> FingerprintTable<Buckets> {
    /// Adds an entry for a key, unless it has one. `has_key` as for [`FingerprintTable::get`].
    #[expect(clippy::inline_always, reason = "the caller's loop is the only one")]
    #[inline(always)]
    pub(super) fn insert(
        &mut self,
        fingerprint: u32,
        id: BlockId,
        has_key: impl Fn(BlockId) -> bool,
    ) -> Inserted {
        let home = self.home(fingerprint);
        let bucket = &mut self.buckets[home];
        match bucket.empty_place() {
            Some(place) if equal(&bucket.fingerprints, fingerprint) == 0 => {
                bucket.put(place, fingerprint, id);
                Inserted::New { place }
            }
            _ => self.find_or_insert(fingerprint, id, has_key),
        }
    }

    /// As [`FingerprintTable::insert`], for any state of the home bucket.
    #[inline(never)]
    fn find_or_insert(
        &mut self,
        fingerprint: u32,
        id: BlockId,
        has_key: impl Fn(BlockId) -> bool,
    ) -> Inserted {
        if let Some(oldest) = self.get(fingerprint, has_key) {
            return Inserted::Held { oldest };
        }
        let mut at = self.home(fingerprint);
        loop {
            let bucket = &mut self.buckets[at];
            if let Some(place) = bucket.empty_place() {
                bucket.put(place, fingerprint, id);
                return Inserted::New { place };
            }
            at = self.after(at);
        }
    }

    /// Puts another block into the entry of `id`, if there is one.
    #[inline]
    pub(super) fn replace(&mut self, fingerprint: u32, id: BlockId, by: BlockId) {
        if let Some((at, place)) = self.find(fingerprint, id) {
            self.buckets[at].put(place, fingerprint, by);
        }
    }

    /// Removes the entry of `id`, which most likely has this place in its home bucket.
    #[inline]
    pub(super) fn remove(&mut self, fingerprint: u32, id: BlockId, place: usize) {
        let home = self.home(fingerprint);
        let bucket = &mut self.buckets[home];
        if bucket.ids[place % WIDTH] == id.0 && !bucket.is_full() {
            bucket.put(place % WIDTH, 0, BlockId::NULL);
        } else {
            self.find_and_remove(fingerprint, id);
        }
    }

    /// As [`FingerprintTable::remove`], wherever the entry is.
    #[cold]
    fn find_and_remove(&mut self, fingerprint: u32, id: BlockId) {
        let Some((at, place)) = self.find(fingerprint, id) else { return };
        let was_full = self.buckets[at].is_full();
        self.buckets[at].put(place, 0, BlockId::NULL);
        if was_full {
            self.close_gap(at, place);
        }
    }

    /// Removes every entry.
    pub(super) fn clear(&mut self) {
        self.buckets.fill(Bucket::zeroed());
    }

    /// Moves entries back that no probe would reach, because a bucket that was full has a gap.
    fn close_gap(&mut self, mut gap: usize, mut gap_place: usize) {
        let mut at = gap;
        loop {
            at = self.after(at);
            let bucket = self.buckets[at];
            let passed_gap = |&place: &usize| {
                let home = self.home(bucket.fingerprints[place]);
                bucket.ids[place] != 0 && self.distance(home, at) >= self.distance(gap, at)
            };
            if let Some(place) = (0..WIDTH).find(passed_gap) {
                self.buckets[gap].put(gap_place, bucket.fingerprints[place], bucket.id(place));
                self.buckets[at].put(place, 0, BlockId::NULL);
                (gap, gap_place) = (at, place);
            }
            if !bucket.is_full() {
                return;
            }
        }
    }
}

impl Bucket {
    #[inline]
    fn id(&self, place: usize) -> BlockId {
        BlockId(self.ids[place])
    }

    #[inline]
    fn is_full(&self) -> bool {
        equal(&self.ids, 0) == 0
    }

    #[inline]
    fn empty_place(&self) -> Option<usize> {
        places(equal(&self.ids, 0)).next()
    }

    /// The places with a fingerprint. Empty places may be among them.
    #[inline]
    fn places(&self, fingerprint: u32) -> impl Iterator<Item = usize> + use<> {
        places(equal(&self.fingerprints, fingerprint))
    }

    #[inline]
    fn put(&mut self, place: usize, fingerprint: u32, id: BlockId) {
        (self.ids[place], self.fingerprints[place]) = (id.0, fingerprint);
    }
}

/// Bit `place + 1` is set for each word that equals `word`. In this form the compiler compares four
/// words at once.
#[inline]
fn equal(words: &[u32; WIDTH], word: u32) -> u32 {
    const BITS: [u32; WIDTH] = [2, 4, 8, 16, 32, 64, 128, 256];
    words.iter().zip(BITS).fold(0, |all, (&it, bit)| all | if it == word { bit } else { 0 })
}

/// The places of [`equal`]'s bits.
#[inline]
fn places(mut bits: u32) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let place = bits.trailing_zeros().checked_sub(1)? as usize;
        bits &= bits.wrapping_sub(1);
        (place < WIDTH).then_some(place)
    })
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

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    const NUM_BLOCKS: usize = 41;
    const NUM_BUCKETS: u32 = 13;
    const _: () = assert!(NUM_BUCKETS as usize == NUM_BLOCKS / BLOCKS_PER_BUCKET);
    /// A fingerprint whose home is the last bucket but one.
    const LAST_BUT_ONE: u32 = u32::MAX / NUM_BUCKETS * (NUM_BUCKETS - 1);

    /// Fingerprints of three homes: the first bucket, the last two.
    fn fingerprint() -> impl Strategy<Value = u32> {
        prop_oneof![0..3_u32, u32::MAX - 2..=u32::MAX, LAST_BUT_ONE - 2..LAST_BUT_ONE]
    }

    proptest! {
        /// Probes run over full buckets, and from the last bucket to the first.
        #[test]
        fn table_equals_a_list(ops in vec((1..NUM_BLOCKS, fingerprint(), 0..4_u8), 1..400)) {
            let mut table = FingerprintTable::new(NUM_BLOCKS);
            // The key in each block's entry: its fingerprint, and a number.
            let mut keys: Vec<Option<(u32, u8)>> = vec![None; NUM_BLOCKS];
            // Where the entry was inserted. It may have moved since.
            let mut places = vec![0; NUM_BLOCKS];
            for (place, fingerprint, number) in ops {
                let id = BlockId(u32::try_from(place).unwrap());
                let key = (fingerprint, number);
                let holder = keys.iter().position(|it| *it == Some(key));
                let has_key = |id: BlockId| keys[id.index()] == Some(key);
                match keys[place] {
                    None => {
                        match table.insert(fingerprint, id, has_key) {
                            Inserted::Held { oldest } => {
                                prop_assert_eq!(Some(oldest.index()), holder);
                            }
                            Inserted::New { place: noted } => {
                                prop_assert_eq!(holder, None);
                                keys[place] = Some(key);
                                places[place] = noted;
                            }
                        }
                    }
                    Some((known, _)) if number == 0 => {
                        let to = keys.iter().skip(1).position(Option::is_none);
                        if let Some(to) = to {
                            let by = BlockId(u32::try_from(to + 1).unwrap());
                            table.replace(known, id, by);
                            keys.swap(place, to + 1);
                            places[to + 1] = places[place];
                        }
                    }
                    Some((known, _)) => {
                        table.remove(known, id, places[place]);
                        keys[place] = None;
                    }
                }
                prop_assert!(table.is_tidy());
                prop_assert_eq!(table.ids().count(), keys.iter().flatten().count());
                for (at, &(fingerprint, number)) in
                    keys.iter().enumerate().filter_map(|(at, key)| Some((at, key.as_ref()?)))
                {
                    let found = table.get(fingerprint, |id| {
                        keys[id.index()] == Some((fingerprint, number))
                    });
                    prop_assert_eq!(found.map(BlockId::index), Some(at));
                }
            }
        }
    }
}
