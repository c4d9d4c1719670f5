//! From a key to the blocks that hold it.
//!
//! A block's key lies in its record, by block id. The table holds only the oldest holder of each
//! key; a circle links the holder to its duplicates.
//!
//! ```text
//!   table[ ]     (fingerprint, id of the oldest holder)
//!                                |
//!   blocks[id]   oldest -> next published -> ... -> newest -+    one circle per key
//!                   ^---------------------------------------+
//! ```
//!
//! A block that holds its key alone needs no circle. It points to a block of the same publication,
//! so a lookup of a long prefix follows pointers and seldom reads the table.
//!
//! In a large pool each of these reads misses the caches. So every loop over blocks prefetches what
//! a later turn reads: the entry of a key, then the record of the block that the entry names.

use prefetch_index::prefetch_index;

use crate::error::{Error, Result};
use crate::event::EventLog;
use crate::ids::{BlockId, GroupId};
use crate::key::{BlockHash, BlockKey};

use super::AHEAD;
use super::block::{Block, tag_of};
use super::fingerprints::{Borrowed, FingerprintTable, Inserted, fingerprint};

/// A publication that met a block which cannot get its key.
pub(super) struct Refused {
    /// The place of that block.
    pub(super) at: usize,
    /// The places before it whose blocks did not get their keys from this publication.
    pub(super) skipped: Vec<usize>,
}

/// The entries of the keys that blocks hold.
#[derive(Clone, Debug)]
pub(super) struct Index {
    table: FingerprintTable,
    /// Number of blocks that hold a key.
    pub(super) num_cached: usize,
}

/// Keys of a prefix that are probed before the next attempt to follow pointers: few while pointers
/// lead on, twice as many after each failure.
const MIN_BATCH: usize = 16;
const MAX_BATCH: usize = 512;

/// Fingerprints that a loop keeps from the prefetch of an entry until it has used the entry.
const NUM_KEPT: usize = (2 * AHEAD + 1).next_power_of_two();

impl Index {
    /// Bytes of memory for each block.
    pub(super) const BLOCK_BYTES: usize = FingerprintTable::BLOCK_BYTES;

    /// An index for blocks `1..num_blocks`, all without a key.
    pub(super) fn new(num_blocks: usize) -> Self {
        Self { table: FingerprintTable::new(num_blocks), num_cached: 0 }
    }

    /// The entries for a loop over blocks.
    #[inline]
    pub(super) fn entries(&mut self) -> Entries<'_> {
        Entries { table: self.table.borrow(), num_cached: &mut self.num_cached }
    }

    /// Begins to load where a lookup of a key looks first.
    #[inline]
    pub(super) fn prefetch_key(&self, hash: &BlockHash, group: GroupId) {
        self.table.prefetch(fingerprint(hash, tag_of(group)));
    }

    /// Begins to load the block that most likely holds a key.
    #[inline]
    pub(super) fn prefetch_holder(&self, blocks: &[Block], hash: &BlockHash, group: GroupId) {
        let candidate = self.table.candidate(fingerprint(hash, tag_of(group)));
        prefetch_index(blocks, candidate.index());
    }

    /// The oldest holder of the key.
    #[inline]
    pub(super) fn get(
        &self,
        blocks: &[Block],
        hash: &BlockHash,
        group: GroupId,
    ) -> Option<BlockId> {
        self.oldest(blocks, fingerprint(hash, tag_of(group)), hash, tag_of(group))
    }

    /// The oldest holders of the longest prefix of `hashes` whose keys are all held.
    pub(super) fn prefix(
        &self,
        blocks: &[Block],
        hashes: &[BlockHash],
        group: GroupId,
    ) -> Vec<BlockId> {
        let tag = tag_of(group);
        let mut found = Vec::with_capacity(hashes.len());
        let (mut rest, mut batch_len) = (hashes, MIN_BATCH);
        while !rest.is_empty() {
            let left = Self::follow(blocks, rest, tag, &mut found);
            let has_followed = left.len() < rest.len();
            batch_len = if has_followed { MIN_BATCH } else { MAX_BATCH.min(2 * batch_len) };
            let (batch, later) = left.split_at(left.len().min(batch_len));
            let is_complete = self.oldest_of_each(blocks, batch, tag, |id| {
                found.extend(id);
                id.is_some()
            });
            rest = if is_complete { later } else { &[] };
        }
        found
    }

    /// How many of these keys are held.
    pub(super) fn num_held(&self, blocks: &[Block], hashes: &[BlockHash], group: GroupId) -> usize {
        let mut num_held = 0;
        self.oldest_of_each(blocks, hashes, tag_of(group), |id| {
            num_held += usize::from(id.is_some());
            true
        });
        num_held
    }

    /// Calls `next` with the oldest holder of each key, until it returns false. Returns whether it
    /// never did.
    #[inline]
    fn oldest_of_each(
        &self,
        blocks: &[Block],
        hashes: &[BlockHash],
        tag: u32,
        mut next: impl FnMut(Option<BlockId>) -> bool,
    ) -> bool {
        let ahead = hashes.len().min(AHEAD);
        let (mut fingerprints, mut candidates) = ([0; NUM_KEPT], [BlockId::NULL; NUM_KEPT]);
        for turn in 0..hashes.len() + 2 * ahead {
            if let Some(hash) = hashes.get(turn) {
                let fingerprint = fingerprint(hash, tag);
                fingerprints[turn % NUM_KEPT] = fingerprint;
                self.table.prefetch(fingerprint);
            }
            if let Some(at) = turn.checked_sub(ahead) {
                let id = self.table.candidate(fingerprints[at % NUM_KEPT]);
                candidates[at % NUM_KEPT] = id;
                prefetch_index(blocks, id.index());
            }
            if let Some(at) = turn.checked_sub(2 * ahead) {
                let (hash, id) = (&hashes[at], candidates[at % NUM_KEPT]);
                let id = if blocks[id.index()].holds(hash, tag) {
                    Some(id)
                } else {
                    self.oldest(blocks, fingerprints[at % NUM_KEPT], hash, tag)
                };
                if !next(id) {
                    return false;
                }
            }
        }
        true
    }

    /// Extends `found` without a lookup as long as the next block is where the block [`AHEAD`] places
    /// before it points. Returns the hashes left.
    #[inline(never)] // or its loop would share the registers of `prefix`, and spill
    fn follow<'a>(
        blocks: &[Block],
        hashes: &'a [BlockHash],
        tag: u32,
        found: &mut Vec<BlockId>,
    ) -> &'a [BlockHash] {
        let Some(first) = found.len().checked_sub(AHEAD) else { return hashes };
        // A ring: each block replaces the one that pointed to it.
        let mut next: [BlockId; AHEAD] =
            std::array::from_fn(|at| blocks[found[first + at].index()].older);
        for &id in &next {
            prefetch_index(blocks, id.index());
        }
        for (at, hash) in hashes.iter().enumerate() {
            let next = &mut next[at % AHEAD];
            let block = &blocks[next.index()];
            if block.newer != *next || !block.holds(hash, tag) {
                return &hashes[at..];
            }
            found.push(*next);
            *next = block.older;
            prefetch_index(blocks, next.index());
        }
        &[]
    }

    /// Gives each block the key of its place in `hashes`. Skips null blocks and blocks that hold
    /// this very key. Calls `on_new` with each place whose key no block held.
    ///
    /// # Errors
    /// The first place whose block has no reference or holds another key. The blocks before it have
    /// their keys.
    #[inline(never)] // or its loop would share the registers of the caller, and spill
    pub(super) fn insert_all(
        &mut self,
        blocks: &mut [Block],
        ids: &[BlockId],
        hashes: &[BlockHash],
        group: GroupId,
        mut on_new: impl FnMut(usize),
    ) -> std::result::Result<(), Refused> {
        let tag = tag_of(group);
        let mut entries = self.entries();
        let prepare = |table: &Borrowed<'_>, blocks: &[Block], id: BlockId, hash| {
            let fingerprint = fingerprint(hash, tag);
            table.prefetch(fingerprint);
            prefetch_index(blocks, id.index());
            fingerprint
        };
        let mut far = ids.iter().zip(hashes);
        let mut fingerprints = [0; AHEAD]; // a ring: each replaces the one that was used
        for (fingerprint, (&id, hash)) in fingerprints.iter_mut().zip(far.by_ref()) {
            *fingerprint = prepare(&entries.table, blocks, id, hash);
        }
        let mut skipped = Vec::new();
        for (at, (&id, hash)) in ids.iter().zip(hashes).enumerate() {
            let place = &mut fingerprints[at % AHEAD];
            let fingerprint = *place;
            if let Some((&id, hash)) = far.next() {
                *place = prepare(&entries.table, blocks, id, hash);
            }
            let block = &blocks[id.index()];
            if block.is_ready() {
                let later = ids.get(at + AHEAD).copied().unwrap_or_default();
                if entries.insert(blocks, id, fingerprint, hash, tag, later) {
                    on_new(at);
                }
            } else if id.is_null() || (block.num_refs() != 0 && block.holds(hash, tag)) {
                skipped.push(at);
            } else {
                return Err(Refused { at, skipped });
            }
        }
        Ok(())
    }

    /// Takes their keys from the blocks that hold one.
    pub(super) fn remove_all(
        &mut self,
        blocks: &mut [Block],
        ids: &[BlockId],
        log: &mut Option<EventLog>,
    ) {
        let mut entries = self.entries();
        for id in ids.iter().take(2 * AHEAD) {
            prefetch_index(&*blocks, id.index());
        }
        for &id in ids.iter().take(AHEAD) {
            entries.prefetch(&blocks[id.index()]);
        }
        for (at, &id) in ids.iter().enumerate() {
            if let Some(&far) = ids.get(at + 2 * AHEAD) {
                prefetch_index(&*blocks, far.index());
            }
            if let Some(&near) = ids.get(at + AHEAD) {
                entries.prefetch(&blocks[near.index()]);
            }
            entries.remove(blocks, id, log);
        }
    }

    /// The blocks that hold a key; of duplicates, the oldest first.
    pub(super) fn cached<'a>(
        &'a self,
        blocks: &'a [Block],
    ) -> impl Iterator<Item = (BlockId, BlockKey)> + 'a {
        let keyed = (0..).map(BlockId).zip(blocks);
        let keyed = keyed.filter_map(|(id, block)| Some((id, block.key()?)));
        let oldest = keyed.filter(|(id, key)| self.get(blocks, &key.hash, key.group) == Some(*id));
        oldest.flat_map(move |(oldest, key)| {
            let newer = move |id: &BlockId| {
                let newer = blocks[id.index()].newer;
                (newer != oldest).then_some(newer)
            };
            std::iter::successors(Some(oldest), newer).map(move |id| (id, key))
        })
    }

    /// Takes every key from its block.
    pub(super) fn clear(&mut self, blocks: &mut [Block]) {
        blocks.iter_mut().for_each(Block::clear_key);
        self.table.clear();
        self.num_cached = 0;
    }

    /// Bytes of memory.
    pub(super) fn memory_bytes(&self) -> usize {
        self.table.memory_bytes()
    }

    #[inline]
    fn oldest(
        &self,
        blocks: &[Block],
        fingerprint: u32,
        hash: &BlockHash,
        tag: u32,
    ) -> Option<BlockId> {
        self.table.get(fingerprint, |id| blocks[id.index()].holds(hash, tag))
    }

    /// Compares keys, circles and table with one another.
    ///
    /// # Errors
    /// [`Error::Broken`] where they disagree.
    pub(super) fn check(&self, blocks: &[Block]) -> Result<()> {
        let broken = |what: String| Err(Error::Broken(format!("index: {what}")));
        if !self.table.is_tidy() {
            return broken("an empty place of a bucket has a fingerprint".to_owned());
        }
        let mut num_reached = 0;
        for oldest in self.table.ids() {
            let Some(key) = blocks.get(oldest.index()).and_then(Block::key) else {
                return broken(format!("an entry names block {oldest}, which holds no key"));
            };
            if self.get(blocks, &key.hash, key.group) != Some(oldest) {
                return broken(format!("no probe for the key of block {oldest} ends at its entry"));
            }
            let tag = tag_of(key.group);
            let fingerprint = fingerprint(&key.hash, tag);
            let mut id = oldest;
            loop {
                let newer = blocks[id.index()].newer;
                let block = &blocks[newer.index()];
                let is_alone = newer == id;
                if !block.holds(&key.hash, tag)
                    || (block.older != id && !is_alone)
                    || block.fingerprint != fingerprint
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
        let num_keyed = blocks.iter().filter(|block| block.has_key()).count();
        if num_reached != self.num_cached || num_keyed != self.num_cached {
            return broken(format!(
                "{num_keyed} blocks hold keys, lookups reach {num_reached}, {} are counted",
                self.num_cached
            ));
        }
        Ok(())
    }
}

/// The entries of the index, borrowed for a loop over blocks.
pub(super) struct Entries<'a> {
    table: Borrowed<'a>,
    num_cached: &'a mut usize,
}

impl Entries<'_> {
    /// Begins to load the entry of a block's key.
    #[inline]
    pub(super) fn prefetch(&self, block: &Block) {
        self.table.prefetch(block.fingerprint);
    }

    /// Gives `id`, which must hold no key, this one. Lets it point to `later` if no other block
    /// holds the key. Returns whether none does.
    #[expect(clippy::inline_always, reason = "the caller's loop is the only one")]
    #[inline(always)]
    fn insert(
        &mut self,
        blocks: &mut [Block],
        id: BlockId,
        fingerprint: u32,
        hash: &BlockHash,
        tag: u32,
        later: BlockId,
    ) -> bool {
        let has_key = |id: BlockId| blocks[id.index()].holds(hash, tag);
        let (place, older, newer) = match self.table.insert(fingerprint, id, has_key) {
            Inserted::New { place } => (place, later, id),
            Inserted::Held { oldest } => {
                let older = newest(blocks, oldest);
                blocks[older.index()].newer = id;
                blocks[oldest.index()].older = id;
                (0, older, oldest)
            }
        };
        let block = &mut blocks[id.index()];
        block.set_key(hash, tag, place);
        (block.fingerprint, block.older, block.newer) = (fingerprint, older, newer);
        *self.num_cached += 1;
        newer == id
    }

    /// Takes from `id` the key it holds, if any. Records an event if no other block holds it now.
    #[inline]
    pub(super) fn remove(&mut self, blocks: &mut [Block], id: BlockId, log: &mut Option<EventLog>) {
        let block = &mut blocks[id.index()];
        if !block.has_key() {
            return;
        }
        let (fingerprint, older, newer) = (block.fingerprint, block.older, block.newer);
        let place = block.place();
        *self.num_cached -= 1;
        if newer == id {
            if let Some(log) = log {
                log_removed(log, block);
            }
            block.clear_key();
            self.table.remove(fingerprint, id, place);
        } else {
            block.clear_key();
            blocks[older.index()].newer = newer;
            blocks[newer.index()].older = older;
            // Only the oldest holder has an entry.
            self.table.replace(fingerprint, id, newer);
        }
    }
}

/// The newest holder of the key that `oldest` holds.
#[inline]
fn newest(blocks: &[Block], oldest: BlockId) -> BlockId {
    let block = &blocks[oldest.index()];
    if block.newer == oldest { oldest } else { block.older }
}

#[inline(never)] // or its registers would cost a removal without events as well
fn log_removed(log: &mut EventLog, block: &Block) {
    if let Some(key) = block.key() {
        log.removed(&key);
    }
}
