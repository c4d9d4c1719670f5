//! What blocks hold: publication, lookup, eviction of keys, and the events that report them.

use std::ops::Range;

use crate::error::{Error, Result};
use crate::event::{Event, EventLog, Origin};
use crate::ids::{BlockId, GroupId};
use crate::key::{BlockHash, BlockKey, HashWidth, Hashes};

use super::BlockPool;

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
        self.index.key(id)
    }

    /// The width of this pool's hashes.
    pub fn hash_width(&self) -> HashWidth {
        self.width
    }

    /// The blocks that hold a key; of duplicates, the oldest first.
    pub(crate) fn cached(&self) -> impl Iterator<Item = (BlockId, BlockKey)> + '_ {
        self.index.cached()
    }

    /// The first `num_blocks` of the free queue with their keys. Leaves out blocks that are pinned
    /// or hold no key.
    pub fn evictable(&self, num_blocks: usize) -> impl Iterator<Item = (BlockId, BlockKey)> + '_ {
        let free = self.queue.iter().take(num_blocks).filter(|&id| !self.state(id).is_pinned());
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
        self.width.check(hashes.width())?;
        let refuse = |id, why| Err(Error::InvalidBlock { id, why });
        let mut keyed = Vec::new();
        for (&id, hash) in ids.iter().zip(hashes.as_slice()) {
            if id.is_null() {
                return refuse(id, "is the null block, which holds nothing to publish");
            }
            let state = self.state(id);
            if state.num_refs() == 0 {
                return refuse(id, "is free: take a reference before you publish it");
            }
            if state.has_key() {
                if !self.index.holds(id, hash, group) {
                    return refuse(id, "holds another key: evict it first");
                }
                keyed.push(id);
            }
        }
        match self.insert_keys(ids, hashes.as_slice(), group) {
            Ok(is_new) => {
                self.width.agree(hashes.width())?;
                self.log_stored(hashes.as_slice(), group, &is_new, |run| Origin {
                    parent: run.start.checked_sub(1).map(|before| hashes.as_slice()[before]),
                    ..Origin::default()
                });
                Ok(())
            }
            // Still possible: this call names one block twice, with two keys.
            Err(at) => {
                keyed.sort_unstable();
                let inserted = ids.iter().filter(|id| keyed.binary_search(id).is_err());
                let inserted: Vec<_> = inserted.copied().collect();
                self.remove_unreported(&inserted);
                refuse(ids[at], "is named twice, with two keys: publish each block once")
            }
        }
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

    /// Gives blocks without a key one each, and records no event. Returns whether every key is new.
    pub(crate) fn insert_unreported(
        &mut self,
        ids: &[BlockId],
        hashes: &[BlockHash],
        group: GroupId,
    ) -> bool {
        let mut num_new = 0;
        let inserted = self.insert(ids, hashes, group, |_| num_new += 1);
        debug_assert!(inserted.is_ok(), "a block that gets a key holds none");
        num_new == ids.len()
    }

    /// Number of `hashes` that blocks hold.
    pub(crate) fn num_held(&self, hashes: &[BlockHash], group: GroupId) -> usize {
        self.index.num_held(hashes, group)
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
        self.index.remove_all(ids, &mut None);
        self.clear_flags(ids);
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
        self.index.get(hash, group)
    }

    /// Whether `id` holds exactly this key.
    #[inline]
    pub fn holds(&self, id: BlockId, hash: &BlockHash, group: GroupId) -> bool {
        self.index.holds(id, hash, group)
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
        self.index.prefix(hashes, group)
    }

    /// Begins to load where a lookup of a key looks first.
    #[inline]
    pub(crate) fn prefetch_key(&self, hash: &BlockHash, group: GroupId) {
        self.index.prefetch_key(hash, group);
    }

    /// Drops the keys of these blocks, referenced or not. A free block keeps its place.
    ///
    /// # Errors
    /// [`Error::NoSuchBlock`] for an id outside the pool.
    pub fn evict(&mut self, ids: &[BlockId]) -> Result<()> {
        self.check_ids(ids)?;
        self.index.remove_all(ids, &mut self.log);
        self.clear_flags(ids);
        Ok(())
    }

    /// Drops every key. Returns false and changes nothing while a block is referenced or pinned.
    pub fn reset(&mut self) -> bool {
        let is_idle = self.num_free == self.num_usable();
        if is_idle {
            self.index.clear();
            for state in &mut self.queue.records {
                state.set_key(false);
            }
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

    /// Notes of blocks that the index has no key for them.
    fn clear_flags(&mut self, ids: &[BlockId]) {
        for id in ids {
            self.queue.records[id.index()].set_key(false);
        }
    }

    /// As `Index::insert_all`. Calls `on_new` with each place whose key no block held.
    fn insert(
        &mut self,
        ids: &[BlockId],
        hashes: &[BlockHash],
        group: GroupId,
        mut on_new: impl FnMut(usize),
    ) -> std::result::Result<(), usize> {
        let states = &mut self.queue.records;
        self.index.insert_all(ids, hashes, group, |at, is_new| {
            states[ids[at].index()].set_key(true);
            if is_new {
                on_new(at);
            }
        })
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
    ) -> std::result::Result<Vec<bool>, usize> {
        if self.log.is_none() {
            return self.insert(ids, hashes, group, |_| ()).map(|()| Vec::new());
        }
        let mut is_new = vec![false; ids.len()];
        self.insert(ids, hashes, group, |at| is_new[at] = true).map(|()| is_new)
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
