//! From a key to the blocks that hold it.
//!
//! Keys lie in flat arrays by block id. The table holds only the oldest holder of each key; a
//! circle links the holder to its duplicates.
//!
//! ```text
//!   table[ ]        (fingerprint, id of the oldest holder)
//!                                   |
//!   duplicates[id]  oldest -> next published -> ... -> newest -+    one circle per key
//!                      ^---------------------------------------+
//! ```

use crate::error::{Error, Result};
use crate::ids::{BlockId, GroupId};
use crate::key::{BlockHash, BlockKey, MAX_HASH_BYTES};

use super::fingerprints::{FingerprintTable, block_of, entry_of, fingerprint, fingerprint_of};

/// Key by block, and block by key. 44 bytes a block, and 16 to 32 for the table.
#[derive(Clone, Debug)]
pub(super) struct Index {
    /// One [`BlockHash`] after the other. Only a vector of plain integers gets its zeros from the
    /// system without a write to its pages.
    hashes: Vec<u8>,
    /// The [`tag_of`] the key's group; 0 for a block without a key.
    group_tags: Vec<u32>,
    /// Neighbours in the circle of blocks with the same key, in order of publication.
    duplicates: Vec<[u32; 2]>,
    table: FingerprintTable,
    /// Number of blocks that hold a key.
    pub(super) num_cached: usize,
}

/// Keys handled together: enough to keep the memory busy.
const BATCH: usize = 32;

/// So many blocks' keys fit into a core's own cache: reading them ahead costs more than it saves.
const NUM_NEAR: usize = 1 << 15;

const OLDER: usize = 0;
const NEWER: usize = 1;

impl Index {
    /// An index for blocks `1..num_blocks`, all without a key.
    pub(super) fn new(num_blocks: usize) -> Self {
        // Zeroed memory is the empty state of every array. So a large pool is built without a
        // write to its pages.
        Self {
            hashes: vec![0; num_blocks * MAX_HASH_BYTES],
            group_tags: vec![0; num_blocks],
            duplicates: vec![[0; 2]; num_blocks],
            table: FingerprintTable::new(num_blocks),
            num_cached: 0,
        }
    }

    /// The key that `id` holds.
    #[inline]
    pub(super) fn key(&self, id: BlockId) -> Option<BlockKey> {
        let group = GroupId(u16::try_from(self.group_tags[id.index()].checked_sub(1)?).ok()?);
        Some(BlockKey { hash: *self.hash(id), group })
    }

    /// Whether `id` holds a key.
    #[inline]
    pub(super) fn has_key(&self, id: BlockId) -> bool {
        self.group_tags[id.index()] != 0
    }

    /// Whether `id` holds exactly this key.
    #[inline]
    pub(super) fn holds(&self, id: BlockId, hash: &BlockHash, group: GroupId) -> bool {
        self.has_tagged_key(id, hash, tag_of(group))
    }

    /// The oldest holder of the key.
    #[inline]
    pub(super) fn get(&self, hash: &BlockHash, group: GroupId) -> Option<BlockId> {
        self.oldest(fingerprint(hash, tag_of(group)), hash, tag_of(group))
    }

    /// The oldest holders of the longest prefix of `hashes` whose keys are all held.
    pub(super) fn prefix(&self, hashes: &[BlockHash], group: GroupId) -> Vec<BlockId> {
        let tag = tag_of(group);
        let mut found = Vec::with_capacity(hashes.len());
        let mut rest = hashes;
        while !rest.is_empty() {
            rest = self.follow(rest, tag, &mut found);
            let (batch, later) = rest.split_at(rest.len().min(BATCH));
            let (fingerprints, homes) = self.fingerprints(batch.iter().map(|hash| (hash, tag)));
            for ((hash, fingerprint), entry) in batch.iter().zip(fingerprints).zip(homes) {
                // Most entries are at their first place, which was just read.
                let id = block_of(entry);
                if fingerprint_of(entry) == fingerprint && self.has_tagged_key(id, hash, tag) {
                    found.push(id);
                } else if let Some(id) = self.oldest(fingerprint, hash, tag) {
                    found.push(id);
                } else {
                    return found;
                }
            }
            rest = later;
        }
        found
    }

    /// How many of these keys are held.
    pub(super) fn num_held(&self, hashes: &[BlockHash], group: GroupId) -> usize {
        let tag = tag_of(group);
        let mut num_held = 0;
        for batch in hashes.chunks(BATCH) {
            let (fingerprints, _) = self.fingerprints(batch.iter().map(|hash| (hash, tag)));
            let is_held = |(hash, fingerprint)| self.oldest(fingerprint, hash, tag).is_some();
            num_held += batch.iter().zip(fingerprints).filter(|&pair| is_held(pair)).count();
        }
        num_held
    }

    /// Extends `found` without a lookup as long as the next block lies where the last two point:
    /// neighbours in a prefix were often allocated side by side. Returns the hashes left.
    #[inline(never)] // or its loop would share the registers of `prefix`, and spill
    fn follow<'a>(
        &self,
        hashes: &'a [BlockHash],
        tag: u32,
        found: &mut Vec<BlockId>,
    ) -> &'a [BlockHash] {
        let [.., before, last] = found.as_slice() else { return hashes };
        let (last, step) = (last.0, last.0.wrapping_sub(before.0));
        let ids = (1..).map(|n: u32| BlockId(last.wrapping_add(step.wrapping_mul(n))));
        let is_next = |&(hash, id): &(&BlockHash, BlockId)| {
            let is_only_holder = self.duplicates.get(id.index()) == Some(&[id.0; 2]);
            is_only_holder && self.has_tagged_key(id, hash, tag)
        };
        let num_found = hashes.iter().zip(ids.clone()).take_while(is_next).count();
        found.extend(ids.take(num_found));
        &hashes[num_found..]
    }

    /// Gives each block the key of its place in `hashes`. Skips null blocks and blocks that hold
    /// this very key. Calls `on_new` with each place whose key no block held.
    ///
    /// # Errors
    /// The first place whose block holds another key. The blocks before it have theirs.
    pub(super) fn insert_all(
        &mut self,
        ids: &[BlockId],
        hashes: &[BlockHash],
        group: GroupId,
        mut on_new: impl FnMut(usize),
    ) -> std::result::Result<(), usize> {
        let tag = tag_of(group);
        let mut place = 0;
        for (ids, hashes) in ids.chunks(BATCH).zip(hashes.chunks(BATCH)) {
            let (fingerprints, _) = self.fingerprints(hashes.iter().map(|hash| (hash, tag)));
            for ((&id, hash), fingerprint) in ids.iter().zip(hashes).zip(fingerprints) {
                if !id.is_null() && !self.has_key(id) {
                    if self.insert(id, fingerprint, hash, tag) {
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

    /// Takes their keys from the blocks that hold one. Calls `on_gone` with each key that no block
    /// holds any more.
    pub(super) fn remove_all(&mut self, ids: &[BlockId], mut on_gone: impl FnMut(&BlockKey)) {
        for batch in ids.chunks(BATCH) {
            if !batch.iter().any(|&id| self.has_key(id)) {
                continue;
            }
            let keys = batch.iter().map(|&id| (self.hash(id), self.group_tags[id.index()]));
            let (fingerprints, _) = self.fingerprints(keys);
            for (&id, fingerprint) in batch.iter().zip(fingerprints) {
                if let Some(key) = self.key(id)
                    && self.remove(id, fingerprint)
                {
                    on_gone(&key);
                }
            }
        }
    }

    /// The blocks that hold a key; of duplicates, the oldest first.
    pub(super) fn cached(&self) -> impl Iterator<Item = (BlockId, BlockKey)> + '_ {
        let keyed = (0..).map(BlockId).take(self.group_tags.len());
        let keyed = keyed.filter_map(|id| Some((id, self.key(id)?)));
        let oldest = keyed.filter(|(id, key)| self.get(&key.hash, key.group) == Some(*id));
        oldest.flat_map(move |(oldest, key)| {
            let newer = move |id: &BlockId| {
                let newer = BlockId(self.duplicates[id.index()][NEWER]);
                (newer != oldest).then_some(newer)
            };
            std::iter::successors(Some(oldest), newer).map(move |id| (id, key))
        })
    }

    /// Takes every key from its block.
    pub(super) fn clear(&mut self) {
        self.group_tags.fill(0);
        self.table.entries.fill(0);
        self.num_cached = 0;
    }

    /// Bytes on the heap.
    pub(super) fn memory_bytes(&self) -> usize {
        self.hashes.capacity()
            + self.group_tags.capacity() * size_of::<u32>()
            + self.duplicates.capacity() * size_of::<[u32; 2]>()
            + self.table.entries.capacity() * size_of::<u64>()
    }

    #[inline]
    fn hash(&self, id: BlockId) -> &BlockHash {
        &self.hashes.as_chunks().0[id.index()]
    }

    #[inline]
    fn has_tagged_key(&self, id: BlockId, hash: &BlockHash, tag: u32) -> bool {
        self.group_tags[id.index()] == tag && self.hash(id) == hash
    }

    /// The fingerprints of at most [`BATCH`] keys, each a hash and its group's tag, and the
    /// entries at their first places. Also reads ahead the keys that their probes compare. Here
    /// the reads overlap; in a probe each read waits for the one before it.
    #[inline]
    fn fingerprints<'a>(
        &self,
        keys: impl ExactSizeIterator<Item = (&'a BlockHash, u32)>,
    ) -> ([u32; BATCH], [u64; BATCH]) {
        let num_keys = keys.len();
        let (mut fingerprints, mut homes) = ([0; BATCH], [0; BATCH]);
        for (found, (hash, tag)) in fingerprints.iter_mut().zip(keys) {
            *found = fingerprint(hash, tag);
        }
        if num_keys > 1 {
            for (entry, &fingerprint) in homes.iter_mut().zip(&fingerprints[..num_keys]) {
                *entry = self.table.entries[self.table.home(fingerprint)];
            }
            if self.group_tags.len() > NUM_NEAR {
                let read = |sum, &entry: &u64| {
                    let id = block_of(entry);
                    sum ^ self.group_tags[id.index()] ^ u32::from(self.hash(id)[0])
                };
                std::hint::black_box(homes[..num_keys].iter().fold(0, read));
            }
        }
        (fingerprints, homes)
    }

    #[inline]
    fn oldest(&self, fingerprint: u32, hash: &BlockHash, tag: u32) -> Option<BlockId> {
        let id = block_of(self.table.entries[self.probe(fingerprint, hash, tag)]);
        (!id.is_null()).then_some(id)
    }

    /// Gives `id`, which must hold no key, this one. Returns whether no other block held it.
    #[inline]
    fn insert(&mut self, id: BlockId, fingerprint: u32, hash: &BlockHash, tag: u32) -> bool {
        let place = self.probe(fingerprint, hash, tag);
        let oldest = block_of(self.table.entries[place]);
        let is_first = oldest.is_null();
        if is_first {
            self.table.entries[place] = entry_of(fingerprint, id);
            self.duplicates[id.index()] = [id.0; 2];
        } else {
            let newest = self.duplicates[oldest.index()][OLDER];
            self.duplicates[id.index()] = [newest, oldest.0];
            self.duplicates[newest as usize][NEWER] = id.0;
            self.duplicates[oldest.index()][OLDER] = id.0;
        }
        self.hashes.as_chunks_mut().0[id.index()] = *hash;
        self.group_tags[id.index()] = tag;
        self.num_cached += 1;
        is_first
    }

    /// Takes from `id` the key it holds. Returns whether no other block holds it now.
    #[inline]
    fn remove(&mut self, id: BlockId, fingerprint: u32) -> bool {
        let [older, newer] = self.duplicates[id.index()];
        let is_last = newer == id.0;
        // Only the oldest holder has an entry. For a newer one the search ends without it.
        let place = self.table.find(entry_of(fingerprint, id));
        if is_last {
            self.table.remove(place);
        } else {
            self.duplicates[older as usize][NEWER] = newer;
            self.duplicates[newer as usize][OLDER] = older;
            if block_of(self.table.entries[place]) == id {
                self.table.entries[place] = entry_of(fingerprint, BlockId(newer));
            }
        }
        self.group_tags[id.index()] = 0;
        self.num_cached -= 1;
        is_last
    }

    /// The place of the key's entry, or the empty place where it would go.
    #[inline]
    fn probe(&self, fingerprint: u32, hash: &BlockHash, tag: u32) -> usize {
        self.table.probe(fingerprint, |id| self.has_tagged_key(id, hash, tag))
    }

    /// Compares keys, circles and table with one another.
    ///
    /// # Errors
    /// [`Error::Broken`] where they disagree.
    pub(super) fn check(&self) -> Result<()> {
        let broken = |what: String| Err(Error::Broken(format!("index: {what}")));
        let mut num_reached = 0;
        let entries = self.table.entries.iter().enumerate().filter(|&(_, &entry)| entry != 0);
        for (place, &entry) in entries {
            let oldest = block_of(entry);
            let Some(key) = self.group_tags.get(oldest.index()).and_then(|_| self.key(oldest))
            else {
                return broken(format!("an entry names block {oldest}, which holds no key"));
            };
            let tag = tag_of(key.group);
            if self.probe(fingerprint(&key.hash, tag), &key.hash, tag) != place {
                return broken(format!("no probe for the key of block {oldest} ends at its entry"));
            }
            let mut id = oldest;
            loop {
                let newer = BlockId(self.duplicates[id.index()][NEWER]);
                if !self.holds(newer, &key.hash, key.group)
                    || self.duplicates[newer.index()][OLDER] != id.0
                {
                    return broken(format!(
                        "block {newer} follows duplicate {id} with another key"
                    ));
                }
                num_reached += 1;
                if num_reached > self.num_cached {
                    return broken(format!("lookups reach more than {} keys", self.num_cached));
                }
                id = newer;
                if id == oldest {
                    break;
                }
            }
        }
        let num_keyed = self.group_tags.iter().filter(|&&tag| tag != 0).count();
        if num_reached != self.num_cached || num_keyed != self.num_cached {
            return broken(format!(
                "{num_keyed} blocks hold keys, lookups reach {num_reached}, {} are counted",
                self.num_cached
            ));
        }
        Ok(())
    }
}

/// A number for the group that leaves 0 for "no key".
#[inline]
fn tag_of(group: GroupId) -> u32 {
    u32::from(group.0) + 1
}
