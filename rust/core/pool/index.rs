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

/// Key by block, and block by key. 44 bytes a block, and 16 to 32 for the table.
#[derive(Clone, Debug)]
pub struct Index {
    /// One [`BlockHash`] after the other. Flat, because only then does a vector of zeros come from
    /// the system as it is.
    hashes: Vec<u8>,
    /// The [`mark`] of the key's group; 0 for a block without a key.
    marks: Vec<u32>,
    /// Neighbours in the circle of blocks with the same key, in order of publication.
    same: Vec<[u32; 2]>,
    /// Fingerprint in the upper half, block id in the lower; 0 (the null block) is an empty slot.
    table: Vec<u64>,
    num_cached: usize,
}

/// Keys handled at a time: enough to keep the memory busy.
const BATCH: usize = 32;

/// So many blocks' keys stay in a core's own cache: reading them ahead would cost more than it
/// saves.
const NUM_NEAR: usize = 1 << 15;

const OLDER: usize = 0;
const NEWER: usize = 1;

impl Index {
    /// An index for blocks `1..num_blocks`, all without a key.
    pub fn new(num_blocks: u32) -> Self {
        let n = num_blocks as usize;
        // At most half full: most probes end at their first slot. Zeroed memory is the empty state
        // of every array, so that a large pool is built without touching its pages.
        let capacity = (2 * n).next_power_of_two();
        Self {
            hashes: vec![0; n * MAX_HASH_BYTES],
            marks: vec![0; n],
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
        let group = GroupId(u16::try_from(self.marks[id.index()].checked_sub(1)?).ok()?);
        Some(BlockKey { hash: *self.hash(id), group })
    }

    /// Whether `id` holds a key.
    #[inline]
    pub fn has_key(&self, id: BlockId) -> bool {
        self.marks[id.index()] != 0
    }

    /// Whether `id` holds exactly this key.
    #[inline]
    pub fn holds(&self, id: BlockId, hash: &BlockHash, group: GroupId) -> bool {
        self.is_marked(id, hash, mark(group))
    }

    /// The block that was published first among those that hold the key.
    #[inline]
    pub fn get(&self, hash: &BlockHash, group: GroupId) -> Option<BlockId> {
        self.oldest(fingerprint(hash, mark(group)), hash, mark(group))
    }

    /// The blocks of the longest prefix of `hashes` that is held, each the oldest of its key.
    pub fn prefix(&self, hashes: &[BlockHash], group: GroupId) -> Vec<BlockId> {
        let mark = mark(group);
        let mut found = Vec::with_capacity(hashes.len());
        for batch in hashes.chunks(BATCH) {
            let rest = self.follow(batch, mark, &mut found);
            let (prints, homes) = self.prints(rest.iter().map(|hash| (hash, mark)));
            for ((hash, print), entry) in rest.iter().zip(prints).zip(homes) {
                // Most stand at their first slot, which has just been read.
                let id = block_of(entry);
                if print_of(entry) == print && self.is_marked(id, hash, mark) {
                    found.push(id);
                } else if let Some(id) = self.oldest(print, hash, mark) {
                    found.push(id);
                } else {
                    return found;
                }
            }
        }
        found
    }

    /// How many of `hashes` are held.
    pub fn num_held(&self, hashes: &[BlockHash], group: GroupId) -> usize {
        let mark = mark(group);
        let mut num_held = 0;
        for batch in hashes.chunks(BATCH) {
            let (prints, _) = self.prints(batch.iter().map(|hash| (hash, mark)));
            let is_held = |(hash, print)| self.oldest(print, hash, mark).is_some();
            num_held += batch.iter().zip(prints).filter(|&pair| is_held(pair)).count();
        }
        num_held
    }

    /// Blocks that were free side by side are taken side by side: while the last two found tell
    /// right where the next one stands, nothing is looked up. Returns the hashes left.
    #[inline]
    fn follow<'a>(
        &self,
        hashes: &'a [BlockHash],
        mark: u32,
        found: &mut Vec<BlockId>,
    ) -> &'a [BlockHash] {
        let [.., before, last] = found.as_slice() else { return hashes };
        let (mut at, step) = (last.0, last.0.wrapping_sub(before.0));
        for (place, hash) in hashes.iter().enumerate() {
            at = at.wrapping_add(step);
            let is_only_holder = self.same.get(at as usize) == Some(&[at; 2])
                && self.is_marked(BlockId(at), hash, mark);
            if !is_only_holder {
                return &hashes[place..];
            }
            found.push(BlockId(at));
        }
        &[]
    }

    /// Gives each block the key of its place in `hashes`. Null blocks, and those that hold that
    /// very key, are passed over. Tells `on_new` of each place whose key no block held.
    ///
    /// # Errors
    /// The first place whose block holds another key; those before it have theirs.
    pub fn insert_all(
        &mut self,
        ids: &[BlockId],
        hashes: &[BlockHash],
        group: GroupId,
        mut on_new: impl FnMut(usize),
    ) -> std::result::Result<(), usize> {
        let mut place = 0;
        for (ids, hashes) in ids.chunks(BATCH).zip(hashes.chunks(BATCH)) {
            let (prints, _) = self.prints(hashes.iter().map(|hash| (hash, mark(group))));
            for ((&id, hash), print) in ids.iter().zip(hashes).zip(prints) {
                if !id.is_null() && !self.has_key(id) {
                    if self.insert(id, print, hash, mark(group)) {
                        on_new(place);
                    }
                } else if !id.is_null() && !self.holds(id, hash, group) {
                    return Err(place);
                }
                place += 1;
            }
        }
        Ok(())
    }

    /// Takes their keys from the blocks that hold one. Tells `on_gone` of each key that no block
    /// holds any more.
    pub fn remove_all(&mut self, ids: &[BlockId], mut on_gone: impl FnMut(&BlockKey)) {
        for batch in ids.chunks(BATCH) {
            if !batch.iter().any(|&id| self.has_key(id)) {
                continue;
            }
            let keys = batch.iter().map(|&id| (self.hash(id), self.marks[id.index()]));
            let (prints, _) = self.prints(keys);
            for (&id, print) in batch.iter().zip(prints) {
                if let Some(key) = self.key(id)
                    && self.remove(id, print)
                {
                    on_gone(&key);
                }
            }
        }
    }

    /// The blocks that hold a key; of those that hold the same one, the oldest first.
    pub fn cached(&self) -> impl Iterator<Item = (BlockId, BlockKey)> + '_ {
        let keyed = (0..).map(BlockId).take(self.marks.len());
        let keyed = keyed.filter_map(|id| Some((id, self.key(id)?)));
        let oldest = keyed.filter(|(id, key)| self.get(&key.hash, key.group) == Some(*id));
        oldest.flat_map(move |(oldest, key)| {
            let newer = move |id: &BlockId| {
                let newer = BlockId(self.same[id.index()][NEWER]);
                (newer != oldest).then_some(newer)
            };
            std::iter::successors(Some(oldest), newer).map(move |id| (id, key))
        })
    }

    /// Takes every key from its block.
    pub fn clear(&mut self) {
        self.marks.fill(0);
        self.table.fill(0);
        self.num_cached = 0;
    }

    /// Bytes of heap it holds.
    pub fn memory_bytes(&self) -> usize {
        self.hashes.capacity()
            + self.marks.capacity() * size_of::<u32>()
            + self.same.capacity() * size_of::<[u32; 2]>()
            + self.table.capacity() * size_of::<u64>()
    }

    #[inline]
    fn hash(&self, id: BlockId) -> &BlockHash {
        &self.hashes.as_chunks().0[id.index()]
    }

    #[inline]
    fn is_marked(&self, id: BlockId, hash: &BlockHash, mark: u32) -> bool {
        self.marks[id.index()] == mark && self.hash(id) == hash
    }

    /// The fingerprints of at most [`BATCH`] keys, each a hash and the mark of its group, and the
    /// entries at their first slots. Reads ahead what their probes will look at: here the reads
    /// overlap, while in a probe each waits for the one before it.
    #[inline]
    fn prints<'a>(
        &self,
        keys: impl ExactSizeIterator<Item = (&'a BlockHash, u32)>,
    ) -> ([u32; BATCH], [u64; BATCH]) {
        let num_keys = keys.len();
        let (mut prints, mut homes) = ([0; BATCH], [0; BATCH]);
        for (print, (hash, mark)) in prints.iter_mut().zip(keys) {
            *print = fingerprint(hash, mark);
        }
        if num_keys > 1 {
            let table = self.table.as_slice();
            let mask = table.len() - 1;
            for (entry, &print) in homes.iter_mut().zip(&prints[..num_keys]) {
                *entry = table[print as usize & mask];
            }
            if self.marks.len() > NUM_NEAR {
                let read = |sum, &entry: &u64| {
                    let id = block_of(entry);
                    sum ^ self.marks[id.index()] ^ u32::from(self.hash(id)[0])
                };
                std::hint::black_box(homes[..num_keys].iter().fold(0, read));
            }
        }
        (prints, homes)
    }

    #[inline]
    fn oldest(&self, print: u32, hash: &BlockHash, mark: u32) -> Option<BlockId> {
        let id = block_of(self.table[self.probe(print, hash, mark)]);
        (!id.is_null()).then_some(id)
    }

    /// Gives `id`, which must hold no key, this one. Returns whether no other block held it.
    #[inline]
    fn insert(&mut self, id: BlockId, print: u32, hash: &BlockHash, mark: u32) -> bool {
        let at = self.probe(print, hash, mark);
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
        self.marks[id.index()] = mark;
        self.num_cached += 1;
        is_first
    }

    /// Takes from `id` the key it holds. Returns whether no other block holds it now.
    #[inline]
    fn remove(&mut self, id: BlockId, print: u32) -> bool {
        let [older, newer] = self.same[id.index()];
        let is_last = newer == id.0;
        // Only the oldest holder stands in the table: another one leaves it as it is.
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
        self.marks[id.index()] = 0;
        self.num_cached -= 1;
        is_last
    }

    #[inline]
    fn home(&self, print: u32) -> usize {
        print as usize & (self.table.len() - 1)
    }

    /// Where the key's entry is, or the empty slot where it would go.
    #[inline]
    fn probe(&self, print: u32, hash: &BlockHash, mark: u32) -> usize {
        let mut at = self.home(print);
        loop {
            let entry = self.table[at];
            if entry == 0
                || (print_of(entry) == print && self.is_marked(block_of(entry), hash, mark))
            {
                return at;
            }
            at = self.after(at);
        }
    }

    #[inline]
    fn after(&self, at: usize) -> usize {
        (at + 1) & (self.table.len() - 1)
    }

    /// Where an entry is, or the empty slot that ends its probe. Looks at no key.
    #[inline]
    fn find(&self, entry: u64) -> usize {
        let mut at = self.home(print_of(entry));
        while self.table[at] != entry && self.table[at] != 0 {
            at = self.after(at);
        }
        at
    }

    /// Empties slot `gap`, moving back whatever could no longer be reached over it.
    #[inline]
    fn close_gap(&mut self, mut gap: usize) {
        let mask = self.table.len() - 1;
        let mut at = gap;
        loop {
            at = self.after(at);
            let entry = self.table[at];
            if entry == 0 {
                break;
            }
            let home = self.home(print_of(entry));
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
            let Some(key) = self.marks.get(oldest.index()).and_then(|_| self.key(oldest)) else {
                return broken(format!("an entry names block {oldest}, which holds no key"));
            };
            if self.probe(fingerprint(&key.hash, mark(key.group)), &key.hash, mark(key.group)) != at
            {
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
        let num_keyed = self.marks.iter().filter(|&&group| group != 0).count();
        if num_reached != self.num_cached || num_keyed != self.num_cached {
            return broken(format!(
                "{num_keyed} blocks hold keys, {num_reached} can be found, {} counted",
                self.num_cached
            ));
        }
        Ok(())
    }
}

/// Stands for a group where 0 stands for no key.
#[inline]
fn mark(group: GroupId) -> u32 {
    u32::from(group.0) + 1
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
/// both halves are folded through a 64 x 64 -> 128 bit product (as wyhash and foldhash do).
#[expect(clippy::cast_possible_truncation, reason = "a fold keeps the halves on purpose")]
#[inline]
fn fingerprint(hash: &BlockHash, mark: u32) -> u32 {
    let (words, _) = hash.as_chunks::<8>();
    let word = |i: usize| u64::from_le_bytes(words[i]);
    let a = word(0) ^ word(2).rotate_left(32) ^ 0x243f_6a88_85a3_08d3;
    let b = word(1) ^ word(3).rotate_left(32) ^ u64::from(mark) ^ 0x1319_8a2e_0370_7344;
    let product = u128::from(a) * u128::from(b);
    let mixed = product as u64 ^ (product >> 64) as u64;
    mixed as u32 ^ (mixed >> 32) as u32
}
