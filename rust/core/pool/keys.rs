//! What blocks hold: publication, lookup, eviction of keys, and the events that report them.

use std::ops::Range;

use crate::error::{Error, Result};
use crate::event::{Event, EventLog, Origin};
use crate::ids::{BlockId, GroupId};
use crate::key::{BlockHash, BlockKey, HashWidth, Hashes};

use super::BlockPool;
use super::block::tag_of;
use super::index::Refused;

impl BlockPool {
    /// Number of blocks that hold a key.
    pub fn num_cached(&self) -> usize {
        self.index.num_cached
    }

    /// Number of blocks that have lost their key to an allocation, since construction.
    pub fn num_evicted(&self) -> usize {
        self.num_evicted
    }

    /// The key that `id` holds.
    pub fn key(&self, id: BlockId) -> Option<BlockKey> {
        self.block(id).key()
    }

    /// The width of this pool's hashes.
    pub fn hash_width(&self) -> HashWidth {
        self.width
    }

    /// The blocks that hold a key; of duplicates, the oldest first.
    pub(crate) fn cached(&self) -> impl Iterator<Item = (BlockId, BlockKey)> + '_ {
        self.index.cached(&self.queue.records)
    }

    /// The first `num_blocks` of the free queue with their keys. Leaves out blocks that are pinned
    /// or hold no key.
    pub fn evictable(&self, num_blocks: usize) -> impl Iterator<Item = (BlockId, BlockKey)> + '_ {
        let free = self.queue.iter().take(num_blocks).filter(|&id| !self.block(id).is_pinned());
        free.filter_map(|id| Some((id, self.key(id)?)))
    }

    /// Publishes full blocks: `ids[i]` holds the KV that `hashes[i]` names. A block that already
    /// holds this key stays as it is.
    ///
    /// # Errors
    /// [`Error::Config`] for lists of different lengths, [`Error::HashWidth`] for hashes of
    /// another width than this pool's, [`Error::NoSuchBlock`] for an id outside the pool, and
    /// [`Error::InvalidBlock`] for the null block, a free block or one that holds another key.
    pub fn cache(&mut self, ids: &[BlockId], hashes: &Hashes, group: GroupId) -> Result<()> {
        if ids.len() != hashes.len() {
            return Err(Error::Config(format!(
                "{} blocks and {} hashes: give one hash per block",
                ids.len(),
                hashes.len()
            )));
        }
        self.check_ids(ids)?;
        let width = hashes.width();
        self.width.check(width)?;
        let hashes = hashes.as_slice();
        if ids.iter().any(|id| id.is_null()) {
            return Err(self.refusal(ids, hashes, group));
        }
        match self.insert_keys(ids, hashes, group) {
            Ok(is_new) => {
                self.width.agree(width)?;
                self.log_stored(hashes, group, &is_new, |run| Origin {
                    parent: run.start.checked_sub(1).map(|before| hashes[before]),
                    ..Origin::default()
                });
                Ok(())
            }
            Err(Refused { at, skipped }) => {
                let inserted = (0..at).filter(|place| skipped.binary_search(place).is_err());
                let inserted: Vec<_> = inserted.map(|place| ids[place]).collect();
                self.remove_unreported(&inserted);
                Err(self.refusal(ids, hashes, group))
            }
        }
    }

    /// Why [`BlockPool::cache`] refuses these blocks, of which one is at fault.
    #[cold]
    fn refusal(&self, ids: &[BlockId], hashes: &[BlockHash], group: GroupId) -> Error {
        let fault = |(&id, hash): (&BlockId, &BlockHash)| {
            let block = self.block(id);
            let why = if id.is_null() {
                "is the null block, which holds nothing to publish"
            } else if block.num_refs() == 0 {
                "is free: take a reference before you publish it"
            } else if block.has_key() && !self.holds(id, hash, group) {
                "holds another key: evict it first"
            } else {
                return None;
            };
            Some(Error::InvalidBlock { id, why })
        };
        ids.iter().zip(hashes).find_map(fault).unwrap_or_else(|| {
            // Sorted by id, so that equal ids are neighbours, each with its first place first.
            let mut places: Vec<(BlockId, usize)> = ids.iter().copied().zip(0..).collect();
            places.sort_unstable();
            let second = |named: &[(BlockId, usize)]| {
                let (_, first) = *named.first()?;
                named.iter().map(|&(_, at)| at).find(|&at| hashes[at] != hashes[first])
            };
            let at = places.chunk_by(|a, b| a.0 == b.0).filter_map(second).min();
            let twice = at.map_or(BlockId::NULL, |at| ids[at]);
            let why = "is named twice, with two keys: publish each block once";
            Error::InvalidBlock { id: twice, why }
        })
    }

    /// Publishes blocks that the caller references and that hold no key. Skips null blocks.
    /// `origin` describes a run of them for events. It is called only if events are recorded.
    pub(crate) fn publish(
        &mut self,
        ids: &[BlockId],
        hashes: &[BlockHash],
        group: GroupId,
        origin: impl Fn(Range<usize>) -> Origin,
    ) {
        let inserted = self.insert_keys(ids, hashes, group);
        debug_assert!(inserted.is_ok(), "a published block held no key before");
        if let Ok(is_new) = inserted {
            self.log_stored(hashes, group, &is_new, origin);
        }
    }

    /// Gives referenced blocks without a key one each, and records no event. Returns whether every key is new.
    pub(crate) fn insert_unreported(
        &mut self,
        ids: &[BlockId],
        hashes: &[BlockHash],
        group: GroupId,
    ) -> bool {
        let mut num_new = 0;
        let inserted =
            self.index.insert_all(&mut self.queue.records, ids, hashes, group, |_| num_new += 1);
        debug_assert!(inserted.is_ok(), "a block that gets a key holds none");
        num_new == ids.len()
    }

    /// Number of `hashes` that blocks hold.
    pub(crate) fn num_held(&self, hashes: &[BlockHash], group: GroupId) -> usize {
        self.index.num_held(&self.queue.records, hashes, group)
    }

    /// Records the events of keys that were inserted without.
    pub(crate) fn report_stored(
        &mut self,
        hashes: &[BlockHash],
        group: GroupId,
        origin: impl Fn(Range<usize>) -> Origin,
    ) {
        if self.log.is_some() {
            self.log_stored(hashes, group, &vec![true; hashes.len()], origin);
        }
    }

    /// Drops keys of which no event reports, and records none.
    pub(crate) fn remove_unreported(&mut self, ids: &[BlockId]) {
        self.index.remove_all(&mut self.queue.records, ids, &mut None);
    }

    /// Adopts a width of hashes, or refuses one that differs from this pool's.
    ///
    /// # Errors
    /// [`Error::HashWidth`].
    pub(crate) fn agree_width(&mut self, width: HashWidth) -> Result<()> {
        self.width.agree(width)
    }

    /// The oldest block that holds a key.
    #[inline]
    pub fn get(&self, hash: &BlockHash, group: GroupId) -> Option<BlockId> {
        self.index.get(&self.queue.records, hash, group)
    }

    /// Whether `id` holds exactly this key.
    #[inline]
    pub fn holds(&self, id: BlockId, hash: &BlockHash, group: GroupId) -> bool {
        self.block(id).holds(hash, tag_of(group))
    }

    /// The blocks of the longest cached prefix of `hashes`.
    ///
    /// # Errors
    /// [`Error::HashWidth`] for hashes of another width than this pool's.
    pub fn lookup(&self, hashes: &Hashes, group: GroupId) -> Result<Vec<BlockId>> {
        self.width.check(hashes.width())?;
        Ok(self.prefix(hashes.as_slice(), group))
    }

    /// As [`BlockPool::lookup`], for hashes whose width was checked before.
    pub(crate) fn prefix(&self, hashes: &[BlockHash], group: GroupId) -> Vec<BlockId> {
        self.index.prefix(&self.queue.records, hashes, group)
    }

    /// Begins to load where a lookup of a key looks first.
    #[inline]
    pub(crate) fn prefetch_key(&self, hash: &BlockHash, group: GroupId) {
        self.index.prefetch_key(hash, group);
    }

    /// Begins to load the block that most likely holds a key. It reads what
    /// [`BlockPool::prefetch_key`] loads.
    #[inline]
    pub(crate) fn prefetch_holder(&self, hash: &BlockHash, group: GroupId) {
        self.index.prefetch_holder(&self.queue.records, hash, group);
    }

    /// Drops the keys of these blocks, referenced or not. A free block keeps its place.
    ///
    /// # Errors
    /// [`Error::NoSuchBlock`] for an id outside the pool.
    pub fn evict(&mut self, ids: &[BlockId]) -> Result<()> {
        self.check_ids(ids)?;
        self.index.remove_all(&mut self.queue.records, ids, &mut self.log);
        Ok(())
    }

    /// Drops every key. Returns false and changes nothing while a block is referenced or pinned.
    pub fn reset(&mut self) -> bool {
        let is_idle = self.num_free == self.num_usable();
        if is_idle {
            self.index.clear(&mut self.queue.records);
            if let Some(log) = &mut self.log {
                log.cleared();
            }
        }
        is_idle
    }

    /// Whether the pool records events.
    pub(crate) fn has_events(&self) -> bool {
        self.log.is_some()
    }

    /// The events since the last call, oldest first.
    pub fn take_events(&mut self) -> Vec<Event> {
        self.log.as_mut().map(EventLog::take).unwrap_or_default()
    }

    /// Gives blocks their keys. If events are recorded, returns which keys lookups can now find.
    ///
    /// # Errors
    /// As `Index::insert_all`.
    fn insert_keys(
        &mut self,
        ids: &[BlockId],
        hashes: &[BlockHash],
        group: GroupId,
    ) -> std::result::Result<Vec<bool>, Refused> {
        let Self { index, queue, log, .. } = self;
        let blocks = &mut *queue.records;
        if log.is_none() {
            return index.insert_all(blocks, ids, hashes, group, |_| ()).map(|()| Vec::new());
        }
        let mut is_new = vec![false; ids.len()];
        index.insert_all(blocks, ids, hashes, group, |at| is_new[at] = true).map(|()| is_new)
    }

    /// Records one event for each run of neighbours whose keys are new.
    fn log_stored(
        &mut self,
        hashes: &[BlockHash],
        group: GroupId,
        is_new: &[bool],
        origin: impl Fn(Range<usize>) -> Origin,
    ) {
        let Some(log) = &mut self.log else { return };
        let mut start = 0;
        for run in is_new.chunk_by(|a, b| a == b) {
            let range = start..start + run.len();
            start = range.end;
            if run[0] {
                log.stored(hashes, group, range.clone(), origin(range));
            }
        }
    }
}
