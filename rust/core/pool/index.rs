//! From a key to the blocks that hold it.
//!
//! A block's key lies in a cache line of its own, by block id. The table holds only the oldest
//! holder of each key; a circle links the holder to its duplicates.
//!
//! ```text
//!   table[ ]     (fingerprint, id of the oldest holder)
//!                                |
//!   lines[id]    oldest -> next published -> ... -> newest -+    one circle per key
//!                   ^---------------------------------------+
//! ```
//!
//! A block that holds its key alone needs no circle. It points to a block of the same publication,
//! so a lookup of a long prefix follows pointers and seldom reads the table.
//!
//! In a large pool each of these reads misses the caches. So every loop over blocks prefetches what
//! a later turn reads: the entry of a key, then the line of the block that the entry names.

use prefetch_index::prefetch_index;

use crate::error::{Error, Result};
use crate::event::EventLog;
use crate::ids::{BlockId, GroupId};
use crate::key::{BlockHash, BlockKey, MAX_HASH_BYTES};

use super::AHEAD;
use super::fingerprints::{FingerprintTable, fingerprint};

/// The key of a block: the words of its hash, then those that the constants name. Only a vector of
/// plain integers gets its zeros from the system without a write to its pages, so a large pool is
/// built fast. Such a vector begins 0 or 16 bytes behind a page's start. In both cases all words in
/// use lie in one cache line.
type Line = [u32; 16];

const NUM_HASH_WORDS: usize = MAX_HASH_BYTES / size_of::<u32>();
/// The [`tag_of`] the key's group; 0 for a block without a key.
const TAG: usize = 8;
const FINGERPRINT: usize = 9;
/// Neighbours in the circle of blocks with the same key, in order of publication. A block that is
/// alone has itself in `NEWER`, and in `OLDER` the block that got its key [`AHEAD`] places later, or
/// any other: a lookup compares what it finds there.
const OLDER: usize = 10;
const NEWER: usize = 11;

/// Key by block, and block by key.
#[derive(Clone, Debug)]
pub(super) struct Index {
    lines: Vec<Line>,
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
    /// Bytes on the heap for each block.
    pub(super) const BLOCK_BYTES: usize = size_of::<Line>() + FingerprintTable::BLOCK_BYTES;

    /// An index for blocks `1..num_blocks`, all without a key.
    pub(super) fn new(num_blocks: usize) -> Self {
        Self {
            lines: vec![[0; _]; num_blocks],
            table: FingerprintTable::new(num_blocks),
            num_cached: 0,
        }
    }

    /// The key that `id` holds.
    #[inline]
    pub(super) fn key(&self, id: BlockId) -> Option<BlockKey> {
        key_of(&self.lines[id.index()])
    }

    /// Whether `id` holds exactly this key.
    #[inline]
    pub(super) fn holds(&self, id: BlockId, hash: &BlockHash, group: GroupId) -> bool {
        holds(&self.lines[id.index()], hash, tag_of(group))
    }

    /// Begins to load the key of a block.
    #[inline]
    pub(super) fn prefetch(&self, id: BlockId) {
        prefetch_index(&self.lines, id.index());
    }

    /// Begins to load the entry of a block's key.
    #[inline]
    pub(super) fn prefetch_entry(&self, id: BlockId) {
        self.table.prefetch(self.lines[id.index()][FINGERPRINT]);
    }

    /// Begins to load where a lookup of a key looks first.
    #[inline]
    pub(super) fn prefetch_key(&self, hash: &BlockHash, group: GroupId) {
        self.table.prefetch(fingerprint(hash, tag_of(group)));
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
        let (mut rest, mut batch_len) = (hashes, MIN_BATCH);
        while !rest.is_empty() {
            let left = self.follow(rest, tag, &mut found);
            let has_followed = left.len() < rest.len();
            batch_len = if has_followed { MIN_BATCH } else { MAX_BATCH.min(2 * batch_len) };
            let (batch, later) = left.split_at(left.len().min(batch_len));
            let is_complete = self.oldest_of_each(batch, tag, |id| {
                found.extend(id);
                id.is_some()
            });
            rest = if is_complete { later } else { &[] };
        }
        found
    }

    /// How many of these keys are held.
    pub(super) fn num_held(&self, hashes: &[BlockHash], group: GroupId) -> usize {
        let mut num_held = 0;
        self.oldest_of_each(hashes, tag_of(group), |id| {
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
                self.prefetch(id);
            }
            if let Some(at) = turn.checked_sub(2 * ahead) {
                let (hash, id) = (&hashes[at], candidates[at % NUM_KEPT]);
                let id = if holds(&self.lines[id.index()], hash, tag) {
                    Some(id)
                } else {
                    self.oldest(fingerprints[at % NUM_KEPT], hash, tag)
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
        &self,
        hashes: &'a [BlockHash],
        tag: u32,
        found: &mut Vec<BlockId>,
    ) -> &'a [BlockHash] {
        let Some(first) = found.len().checked_sub(AHEAD) else { return hashes };
        // A ring: each block replaces the one that pointed to it.
        let mut next: [BlockId; AHEAD] =
            std::array::from_fn(|at| BlockId(self.lines[found[first + at].index()][OLDER]));
        for &id in &next {
            self.prefetch(id);
        }
        for (at, hash) in hashes.iter().enumerate() {
            let next = &mut next[at % AHEAD];
            let line = &self.lines[next.index()];
            if line[NEWER] != next.0 || !holds(line, hash, tag) {
                return &hashes[at..];
            }
            found.push(*next);
            *next = BlockId(line[OLDER]);
            self.prefetch(*next);
        }
        &[]
    }

    /// Gives each block the key of its place in `hashes`. Skips null blocks and blocks that hold
    /// this very key. Calls `on_insert` with each place whose block got its key, and whether no
    /// block held the key before.
    ///
    /// # Errors
    /// The first place whose block holds another key. The blocks before it have theirs.
    pub(super) fn insert_all(
        &mut self,
        ids: &[BlockId],
        hashes: &[BlockHash],
        group: GroupId,
        mut on_insert: impl FnMut(usize, bool),
    ) -> std::result::Result<(), usize> {
        let tag = tag_of(group);
        let ahead = ids.len().min(AHEAD);
        let mut fingerprints = [0; NUM_KEPT];
        for turn in 0..ids.len() + ahead {
            if let Some((&id, hash)) = ids.get(turn).zip(hashes.get(turn)) {
                let fingerprint = fingerprint(hash, tag);
                fingerprints[turn % NUM_KEPT] = fingerprint;
                self.table.prefetch(fingerprint);
                self.prefetch(id);
            }
            if let Some(at) = turn.checked_sub(ahead) {
                let (id, hash) = (ids[at], &hashes[at]);
                let line = &self.lines[id.index()];
                if line[TAG] == 0 && !id.is_null() {
                    let later = ids.get(at + AHEAD).copied().unwrap_or_default();
                    let fingerprint = fingerprints[at % NUM_KEPT];
                    on_insert(at, self.insert(id, fingerprint, hash, tag, later));
                } else if !id.is_null() && !holds(line, hash, tag) {
                    return Err(at);
                }
            }
        }
        Ok(())
    }

    /// Takes their keys from the blocks that hold one.
    pub(super) fn remove_all(&mut self, ids: &[BlockId], log: &mut Option<EventLog>) {
        for &id in ids.iter().take(2 * AHEAD) {
            self.prefetch(id);
        }
        for &id in ids.iter().take(AHEAD) {
            self.prefetch_entry(id);
        }
        for (at, &id) in ids.iter().enumerate() {
            if let Some(&far) = ids.get(at + 2 * AHEAD) {
                self.prefetch(far);
            }
            if let Some(&near) = ids.get(at + AHEAD) {
                self.prefetch_entry(near);
            }
            if self.lines[id.index()][TAG] != 0 {
                self.remove(id, log);
            }
        }
    }

    /// The blocks that hold a key; of duplicates, the oldest first.
    pub(super) fn cached(&self) -> impl Iterator<Item = (BlockId, BlockKey)> + '_ {
        let keyed = (0..).map(BlockId).take(self.lines.len());
        let keyed = keyed.filter_map(|id| Some((id, self.key(id)?)));
        let oldest = keyed.filter(|(id, key)| self.get(&key.hash, key.group) == Some(*id));
        oldest.flat_map(move |(oldest, key)| {
            let newer = move |id: &BlockId| {
                let newer = BlockId(self.lines[id.index()][NEWER]);
                (newer != oldest).then_some(newer)
            };
            std::iter::successors(Some(oldest), newer).map(move |id| (id, key))
        })
    }

    /// Takes every key from its block.
    pub(super) fn clear(&mut self) {
        for line in &mut self.lines {
            line[TAG] = 0;
        }
        self.table.clear();
        self.num_cached = 0;
    }

    /// Bytes on the heap.
    pub(super) fn memory_bytes(&self) -> usize {
        self.lines.capacity() * size_of::<Line>() + self.table.memory_bytes()
    }

    #[inline]
    fn oldest(&self, fingerprint: u32, hash: &BlockHash, tag: u32) -> Option<BlockId> {
        self.table.get(fingerprint, |id| holds(&self.lines[id.index()], hash, tag))
    }

    /// Gives `id`, which must hold no key, this one. Lets it point to `later` if no other block
    /// holds the key. Returns whether none does.
    #[expect(clippy::inline_always, reason = "the caller's loop is the only one")]
    #[inline(always)]
    fn insert(
        &mut self,
        id: BlockId,
        fingerprint: u32,
        hash: &BlockHash,
        tag: u32,
        later: BlockId,
    ) -> bool {
        let lines = &mut self.lines;
        let has_key = |id: BlockId| holds(&lines[id.index()], hash, tag);
        let oldest = self.table.insert(fingerprint, id, has_key);
        let (mut older, mut newer) = (later.0, id.0);
        if let Some(oldest) = oldest {
            (older, newer) = (newest(lines, oldest), oldest.0);
            lines[older as usize][NEWER] = id.0;
            lines[oldest.index()][OLDER] = id.0;
        }
        let line = &mut lines[id.index()];
        line[..NUM_HASH_WORDS].copy_from_slice(&words(hash));
        line[TAG..=NEWER].copy_from_slice(&[tag, fingerprint, older, newer]);
        self.num_cached += 1;
        oldest.is_none()
    }

    /// Takes from `id` the key it holds. Records an event if no other block holds it now.
    #[inline]
    pub(super) fn remove(&mut self, id: BlockId, log: &mut Option<EventLog>) {
        let line = &mut self.lines[id.index()];
        let (fingerprint, older, newer) = (line[FINGERPRINT], line[OLDER], line[NEWER]);
        let is_last = newer == id.0;
        if is_last
            && let Some(log) = log
            && let Some(key) = key_of(line)
        {
            log.removed(&key);
        }
        line[TAG] = 0;
        if is_last {
            self.table.remove(fingerprint, id);
        } else {
            self.lines[older as usize][NEWER] = newer;
            self.lines[newer as usize][OLDER] = older;
            // Only the oldest holder has an entry.
            self.table.replace(fingerprint, id, BlockId(newer));
        }
        self.num_cached -= 1;
    }

    /// Compares keys, circles and table with one another.
    ///
    /// # Errors
    /// [`Error::Broken`] where they disagree.
    pub(super) fn check(&self) -> Result<()> {
        let broken = |what: String| Err(Error::Broken(format!("index: {what}")));
        if !self.table.is_packed() {
            return broken("a bucket has an empty place before a used one".to_owned());
        }
        let mut num_reached = 0;
        for oldest in self.table.ids() {
            let Some(key) = self.lines.get(oldest.index()).and_then(|_| self.key(oldest)) else {
                return broken(format!("an entry names block {oldest}, which holds no key"));
            };
            if self.get(&key.hash, key.group) != Some(oldest) {
                return broken(format!("no probe for the key of block {oldest} ends at its entry"));
            }
            let tag = tag_of(key.group);
            let fingerprint = fingerprint(&key.hash, tag);
            let mut id = oldest;
            loop {
                let newer = BlockId(self.lines[id.index()][NEWER]);
                let line = &self.lines[newer.index()];
                let is_alone = newer == id;
                if !holds(line, &key.hash, tag)
                    || (line[OLDER] != id.0 && !is_alone)
                    || line[FINGERPRINT] != fingerprint
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
        let num_keyed = self.lines.iter().filter(|line| line[TAG] != 0).count();
        if num_reached != self.num_cached || num_keyed != self.num_cached {
            return broken(format!(
                "{num_keyed} blocks hold keys, lookups reach {num_reached}, {} are counted",
                self.num_cached
            ));
        }
        Ok(())
    }
}

#[inline]
fn words(hash: &BlockHash) -> [u32; NUM_HASH_WORDS] {
    let (bytes, _) = hash.as_chunks();
    std::array::from_fn(|at| u32::from_ne_bytes(bytes[at]))
}

/// The newest holder of the key that `oldest` holds.
#[inline]
fn newest(lines: &[Line], oldest: BlockId) -> u32 {
    let line = &lines[oldest.index()];
    if line[NEWER] == oldest.0 { oldest.0 } else { line[OLDER] }
}

/// Whether a line has exactly this key.
#[inline]
fn holds(line: &Line, hash: &BlockHash, tag: u32) -> bool {
    line[TAG] == tag && line.first_chunk() == Some(&words(hash))
}

#[inline]
fn key_of(line: &Line) -> Option<BlockKey> {
    let group = group_of(line[TAG])?;
    let mut hash = [0; MAX_HASH_BYTES];
    let (bytes, _) = hash.as_chunks_mut();
    for (bytes, word) in bytes.iter_mut().zip(line) {
        *bytes = word.to_ne_bytes();
    }
    Some(BlockKey { hash, group })
}

/// A number for the group that leaves 0 for "no key".
#[inline]
fn tag_of(group: GroupId) -> u32 {
    u32::from(group.0) + 1
}

/// The group of a tag; None for "no key".
#[inline]
fn group_of(tag: u32) -> Option<GroupId> {
    u16::try_from(tag.checked_sub(1)?).ok().map(GroupId)
}
