//! From a key to the blocks that hold it: one open-addressing table of block ids.
//!
//! Keys lie in flat arrays by block id; the table holds only ids, each with 32 bits of its key's
//! fingerprint so that a probe seldom looks at a key that is not the one. Removal shifts entries
//! back (Knuth, TAOCP 3, 6.4, algorithm R), so there are no tombstones and no rebuilds: a
//! cache that evicts one key per insertion for days stays as quick as on its first.
//!
//! ```text
//!   table[ ]  (fingerprint, id of the oldest holder)
//!                             |
//!   same[id]  oldest -> next published -> ... -> newest -+    one circle per key
//!                ^---------------------------------------+
//! ```

use crate::error::{Error, Result};
use crate::ids::{BlockId, GroupId};
use crate::key::{BlockHash, BlockKey, MAX_HASH_BYTES};

/// Key by block, and block by key. 44 bytes a block, and 8 to 22 for the table.
#[derive(Clone, Debug)]
pub struct Index {
    /// One [`BlockHash`] after the other. Flat, because only then does a vector of zeros come from
    /// the system as it is.
    hashes: Vec<u8>,
    /// The key's group + 1; 0 for a block without a key.
    groups: Vec<u32>,
    /// Neighbours in the circle of blocks with the same key, in order of publication.
    same: Vec<[u32; 2]>,
    /// Fingerprint in the upper half, block id in the lower; 0 (the null block) is an empty slot.
    table: Vec<u64>,
    num_cached: usize,
}

const OLDER: usize = 0;
const NEWER: usize = 1;

impl Index {
    /// An index for blocks `1..num_blocks`, all without a key.
    pub fn new(num_blocks: u32) -> Self {
        let n = num_blocks as usize;
        // At most three quarters full. Zeroed memory is the empty state of every array, so that
        // a large pool is built without touching its pages.
        let capacity = (n + n / 3 + 1).next_power_of_two();
        Self {
            hashes: vec![0; n * MAX_HASH_BYTES],
            groups: vec![0; n],
            same: vec![[0; 2]; n],
            table: vec![0; capacity],
            num_cached: 0,
        }
    }

    /// Blocks that hold a key.
    pub fn num_cached(&self) -> usize {
        self.num_cached
    }

    /// The key that `id` holds.
    #[inline]
    pub fn key(&self, id: BlockId) -> Option<BlockKey> {
        let group = GroupId(u16::try_from(self.groups[id.index()].checked_sub(1)?).ok()?);
        Some(BlockKey { hash: *self.hash(id), group })
    }

    /// Whether `id` holds exactly this key.
    #[inline]
    pub fn holds(&self, id: BlockId, hash: &BlockHash, group: GroupId) -> bool {
        self.groups[id.index()] == u32::from(group.0) + 1 && self.hash(id) == hash
    }

    /// The block that was published first among those that hold the key.
    #[inline]
    pub fn get(&self, hash: &BlockHash, group: GroupId) -> Option<BlockId> {
        let at = self.probe(fingerprint(hash, group), hash, group);
        let id = block_of(self.table[at]);
        (!id.is_null()).then_some(id)
    }

    /// Gives `id`, which must hold no key, this one. Returns whether no other block held it.
    #[inline]
    pub fn insert(&mut self, id: BlockId, hash: &BlockHash, group: GroupId) -> bool {
        let print = fingerprint(hash, group);
        let at = self.probe(print, hash, group);
        let oldest = block_of(self.table[at]);
        let is_first = oldest.is_null();
        if is_first {
            self.table[at] = entry_of(print, id);
            self.same[id.index()] = [id.0; 2];
        } else {
            let newest = self.same[oldest.index()][OLDER];
            self.same[id.index()] = [newest, oldest.0];
            self.same[newest as usize][NEWER] = id.0;
            self.same[oldest.index()][OLDER] = id.0;
        }
        self.hashes.as_chunks_mut().0[id.index()] = *hash;
        self.groups[id.index()] = u32::from(group.0) + 1;
        self.num_cached += 1;
        is_first
    }

    /// Takes the key from `id`. Returns it, and whether no other block holds it now.
    #[inline]
    pub fn remove(&mut self, id: BlockId) -> Option<(BlockKey, bool)> {
        let key = self.key(id)?;
        let [older, newer] = self.same[id.index()];
        let is_last = newer == id.0;
        // Only the oldest holder stands in the table: another one leaves it as it is.
        let print = fingerprint(&key.hash, key.group);
        let at = self.find(entry_of(print, id));
        if is_last {
            self.close_gap(at);
        } else {
            self.same[older as usize][NEWER] = newer;
            self.same[newer as usize][OLDER] = older;
            if block_of(self.table[at]) == id {
                self.table[at] = entry_of(print, BlockId(newer));
            }
        }
        self.groups[id.index()] = 0;
        self.num_cached -= 1;
        Some((key, is_last))
    }

    /// Takes every key from its block.
    pub fn clear(&mut self) {
        self.groups.fill(0);
        self.table.fill(0);
        self.num_cached = 0;
    }

    /// Bytes of heap it holds.
    pub fn memory_bytes(&self) -> usize {
        self.hashes.capacity()
            + self.groups.capacity() * size_of::<u32>()
            + self.same.capacity() * size_of::<[u32; 2]>()
            + self.table.capacity() * size_of::<u64>()
    }

    #[inline]
    fn hash(&self, id: BlockId) -> &BlockHash {
        &self.hashes.as_chunks().0[id.index()]
    }

    /// Where the key's entry is, or the empty slot where it would go.
    #[inline]
    fn probe(&self, print: u32, hash: &BlockHash, group: GroupId) -> usize {
        let mask = self.table.len() - 1;
        let mut at = print as usize & mask;
        loop {
            let entry = self.table[at];
            if entry == 0 || (print_of(entry) == print && self.holds(block_of(entry), hash, group))
            {
                return at;
            }
            at = (at + 1) & mask;
        }
    }

    /// Where an entry is, or the empty slot that ends its probe. Looks at no key.
    #[inline]
    fn find(&self, entry: u64) -> usize {
        let mask = self.table.len() - 1;
        let mut at = print_of(entry) as usize & mask;
        while self.table[at] != entry && self.table[at] != 0 {
            at = (at + 1) & mask;
        }
        at
    }

    /// Empties slot `gap`, moving back whatever could no longer be reached over it.
    #[inline]
    fn close_gap(&mut self, mut gap: usize) {
        let mask = self.table.len() - 1;
        let mut at = gap;
        loop {
            at = (at + 1) & mask;
            let entry = self.table[at];
            if entry == 0 {
                break;
            }
            let home = print_of(entry) as usize & mask;
            if at.wrapping_sub(home) & mask >= at.wrapping_sub(gap) & mask {
                self.table[gap] = entry;
                gap = at;
            }
        }
        self.table[gap] = 0;
    }

    /// Compares keys, circles and table with one another.
    ///
    /// # Errors
    /// [`Error::Broken`] where they disagree.
    pub fn check(&self) -> Result<()> {
        let broken = |what: String| Err(Error::Broken(format!("index: {what}")));
        let mut num_reached = 0;
        for (at, &entry) in self.table.iter().enumerate().filter(|&(_, &entry)| entry != 0) {
            let oldest = block_of(entry);
            let Some(key) = self.groups.get(oldest.index()).and_then(|_| self.key(oldest)) else {
                return broken(format!("an entry names block {oldest}, which holds no key"));
            };
            if self.probe(fingerprint(&key.hash, key.group), &key.hash, key.group) != at {
                return broken(format!("the key of block {oldest} is not found where it stands"));
            }
            let mut id = oldest;
            loop {
                let newer = BlockId(self.same[id.index()][NEWER]);
                if !self.holds(newer, &key.hash, key.group)
                    || self.same[newer.index()][OLDER] != id.0
                {
                    return broken(format!("block {newer} stands after {id} under another key"));
                }
                num_reached += 1;
                if num_reached > self.num_cached {
                    return broken(format!("more than the {} keys counted", self.num_cached));
                }
                id = newer;
                if id == oldest {
                    break;
                }
            }
        }
        let num_keyed = self.groups.iter().filter(|&&group| group != 0).count();
        if num_reached != self.num_cached || num_keyed != self.num_cached {
            return broken(format!(
                "{num_keyed} blocks hold keys, {num_reached} can be found, {} counted",
                self.num_cached
            ));
        }
        Ok(())
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the two halves of an entry")]
const fn block_of(entry: u64) -> BlockId {
    BlockId(entry as u32)
}

const fn entry_of(print: u32, id: BlockId) -> u64 {
    (print as u64) << 32 | id.0 as u64
}

const fn print_of(entry: u64) -> u32 {
    (entry >> 32) as u32
}

/// 32 bits of a key, well mixed even where the caller's hashes are not (counters, short names):
/// each pair of words is folded through a 64 x 64 -> 128 bit product (as wyhash and foldhash do).
#[expect(clippy::cast_possible_truncation, reason = "a fold keeps the halves on purpose")]
#[inline]
fn fingerprint(hash: &BlockHash, group: GroupId) -> u32 {
    const fn fold(a: u64, b: u64) -> u64 {
        let product = a as u128 * b as u128;
        product as u64 ^ (product >> 64) as u64
    }
    let (words, _) = hash.as_chunks::<8>();
    let word = |i: usize| u64::from_le_bytes(words[i]);
    let low = fold(word(0) ^ 0x243f_6a88_85a3_08d3, word(1) ^ 0x1319_8a2e_0370_7344);
    let high = fold(word(2) ^ 0xa409_3822_299f_31d0, word(3) ^ 0x082e_fa98_ec4e_6c89);
    let mixed =
        fold(low ^ u64::from(group.0) ^ 0x4528_21e6_38d0_1377, high ^ 0xbe54_66cf_34e9_0c6c);
    mixed as u32 ^ (mixed >> 32) as u32
}
