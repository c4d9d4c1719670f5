//! How often blocks were seen, for stores that wait until a block comes back (`store_threshold`).
//!
//! ```text
//!   set 0   [ c | a | - | - | - | - | - | - ]     eight counts, the one seen last comes first
//!   set 1   [ e | d | f | .. ]                    a new count replaces the last of its set
//! ```
//!
//! A request sees each of its blocks once, when the block is computed, hit or loaded. A request that
//! starts over does not count again. A block is stored once enough requests have seen it and every
//! block before it. The table decides only whether a block is stored, never under which key.
//!
//! A count has 56 bits of its block's fingerprint. Two blocks with equal bits share a count, so one
//! of them may be stored early. A reset keeps the counts, and a snapshot leaves them out.

use xxhash_rust::xxh3::xxh3_64;

use crate::error::Result;
use crate::key::{BlockHash, BlockKey};
use crate::pool::check_memory;

use super::OffloadScheduler;
use super::request::{ReportedTable, RequestState};

/// Counts in a set: one cache line.
const WAYS: usize = 8;
/// The table has as many counts as four times the tier's slots, and at least these.
const MIN_COUNTS: usize = 1 << 16;

/// Counts of the blocks that were seen last. 8 bytes a count, allocated at construction.
#[derive(Clone, Debug)]
pub(super) struct Sightings {
    /// The fingerprint in the upper 56 bits, the count in the lower 8. 0 is an empty place.
    sets: Vec<[u64; WAYS]>,
    threshold: u8,
}

impl Sightings {
    /// An empty table. None if every block is stored the first time that it is seen.
    pub(super) fn new(num_slots: usize, threshold: u8) -> Result<Option<Self>> {
        if threshold <= 1 {
            return Ok(None);
        }
        let num_counts = num_slots.saturating_mul(4).max(MIN_COUNTS);
        check_memory("num_host_blocks", num_slots, num_counts, size_of::<u64>())?;
        Ok(Some(Self { sets: vec![[0; WAYS]; num_counts.div_ceil(WAYS)], threshold }))
    }

    /// A table that counts no further than 1: whether a block was seen.
    pub(super) fn of_any(num_blocks: usize) -> Result<Self> {
        let num_counts = num_blocks.max(MIN_COUNTS);
        let name = "num_host_blocks + num_disk_blocks";
        check_memory(name, num_blocks, num_counts, size_of::<u64>())?;
        Ok(Self { sets: vec![[0; WAYS]; num_counts.div_ceil(WAYS)], threshold: 1 })
    }

    /// Counts that a request sees a block, unless it has seen it before. Returns whether enough
    /// requests have seen it.
    pub(super) fn see(&mut self, hash: &BlockHash, is_first: bool) -> bool {
        let fingerprint = xxh3_64(hash);
        let num_sets = self.sets.len() as u64;
        let at = usize::try_from(((fingerprint & 0xffff_ffff) * num_sets) >> 32).unwrap_or(0);
        let Some(set) = self.sets.get_mut(at) else { return false };
        let tag = fingerprint >> 8;
        let found = set.iter().position(|&entry| entry >> 8 == tag);
        let mut count = found.map_or(0, |place| set[place] & 0xff);
        if is_first {
            count = (count + 1).min(0xff);
            set[..=found.unwrap_or(WAYS - 1)].rotate_right(1);
            set[0] = tag << 8 | count;
        }
        count >= u64::from(self.threshold)
    }
}

impl OffloadScheduler {
    /// Counts the computed blocks that a request has not seen yet. From the first block that too
    /// few requests have seen, and that the tier does not have, nothing of this request is stored.
    pub(super) fn see(&mut self, place: usize, num_computed_tokens: usize) {
        let Some(sightings) = &mut self.sightings else { return };
        let request = self.requests.at_mut(place);
        let num_hashes = request.hashes.len();
        let end = num_hashes.min(num_computed_tokens / self.slot_model.hash_block_size());
        for at in request.num_seen..end {
            let is_frequent = sightings.see(&request.hashes[at], at >= request.num_counted);
            let is_kept = || {
                self.slot_model.enumerate().any(|(group, attention)| {
                    // The slot that covers this hash has the key of the slot's last one.
                    let per_slot = self.slot_model.hashes_per_block(attention);
                    let hash = request.hashes.get((at / per_slot + 1) * per_slot - 1);
                    hash.is_some_and(|&hash| {
                        self.host.resident_or_filling(&BlockKey { hash, group }).is_some()
                    })
                })
            };
            if request.num_wanted == at && (is_frequent || is_kept()) {
                request.num_wanted = at + 1;
            }
        }
        request.num_seen = request.num_seen.max(end);
        request.num_counted = request.num_counted.max(end);
    }

    /// Blocks of a request that are not stored because too few requests have seen them.
    pub(super) fn num_rare(&self, request: &RequestState) -> usize {
        if self.sightings.is_none() {
            return 0;
        }
        let count = |(table, &group): (&ReportedTable, _)| {
            let num_seen = request.num_seen / self.slot_model.hashes_per_block(group);
            let slots = table.blocks.chunks_exact(self.config.blocks_per_slot).take(num_seen);
            slots.skip(table.num_confirmed).filter(|slot| !slot[0].is_null()).count()
        };
        request.tables.iter().zip(self.slot_model.groups()).map(count).sum()
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use std::collections::HashMap;

    use super::*;

    fn hash(number: u32) -> BlockHash {
        let mut hash = [0; 32];
        hash[..4].copy_from_slice(&number.to_le_bytes());
        hash
    }

    /// A small generator, so that the test needs no dependency: its numbers are the same each time.
    fn next(state: &mut u64) -> u32 {
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        u32::try_from(*state >> 40).unwrap()
    }

    #[test]
    fn counts_are_exact_while_the_blocks_fit() {
        for threshold in [2_u8, 3, 255] {
            let mut table = Sightings::new(1, threshold).unwrap().unwrap();
            let mut model: HashMap<u32, u32> = HashMap::new();
            let mut state = u64::from(threshold);
            for _ in 0..100_000 {
                let name = next(&mut state) % 3_000;
                let count = model.entry(name).or_default();
                *count += 1;
                let is_frequent = *count >= u32::from(threshold);
                assert_eq!(table.see(&hash(name), true), is_frequent, "{name}");
                assert_eq!(table.see(&hash(name), false), is_frequent, "{name} once more");
            }
        }
    }

    #[test]
    fn a_set_forgets_the_block_that_was_seen_least_recently() {
        let mut table = Sightings { sets: vec![[0; WAYS]; 1], threshold: 2 };
        let mut model: Vec<(u32, u32)> = Vec::new();
        let mut state = 7;
        for _ in 0..10_000 {
            let name = next(&mut state) % 12;
            let at = model.iter().position(|&(known, _)| known == name);
            let count = at.map_or(0, |at| model.remove(at).1) + 1;
            model.insert(0, (name, count));
            model.truncate(WAYS);
            assert_eq!(table.see(&hash(name), true), count >= 2, "{name} of {model:?}");
        }
    }

    #[test]
    fn the_table_has_its_stated_size() {
        assert!(Sightings::new(10, 1).unwrap().is_none());
        let bytes = |slots| {
            let table = Sightings::new(slots, 2).unwrap().unwrap();
            table.sets.capacity() * size_of::<[u64; WAYS]>()
        };
        assert_eq!(bytes(1), 8 * MIN_COUNTS);
        assert_eq!(bytes(100_000), 32 * 100_000);
    }
}
