//! One memory's blocks: who references them, in which order they go, what they hold.
//!
//! ```text
//!                 allocate (evicts the key)
//!        +------------------------------------------+
//!        |                                          v
//!   [ free: in the queue ] <-- free --- [ referenced, no key ]
//!     no key: at the head                        | cache
//!        ^                                       v
//!        +---- evict ---- [ free ] <-- free --- [ referenced, cached ] -- evict --> no key
//!                      cached: at the tail --- touch --^
//! ```
//!
//! A pin is a second count, for copies under way: the block keeps its place in the queue, but
//! [`BlockPool::allocate`] passes over it.

pub mod free_queue;
pub mod index;

use std::ops::Range;

use crate::error::{Error, Result};
use crate::event::{Event, EventLog, Medium, Origin};
use crate::ids::{BlockId, GroupId};
use crate::key::{BlockHash, BlockKey, HashWidth, Hashes};

use free_queue::FreeQueue;
use index::Index;

/// The most blocks a pool may have: ids cross the boundary as `int32`.
pub const MAX_BLOCKS: usize = i32::MAX as usize;

/// Counts stay below this, and no call names as many blocks: so they cannot wrap.
const MAX_COUNT: u32 = u32::MAX / 2;

/// What a block costs at most, in bytes.
pub(crate) const BLOCK_BYTES: usize = 92;

/// Refuses a size for which the machine has no memory: failing later would end the process.
pub(crate) fn check_memory(num_blocks: usize, block_bytes: usize) -> Result<()> {
    let bytes = num_blocks.saturating_mul(block_bytes);
    let mut probe: Vec<u8> = Vec::new();
    let is_refused = probe.try_reserve_exact(bytes).is_err();
    // The reservation must not be optimised away: that it was possible is what is asked.
    std::hint::black_box(&probe);
    if is_refused {
        return Err(Error::Config(format!(
            "{num_blocks} blocks need {bytes} bytes for their accounting, and this machine does \
             not give them: take fewer blocks"
        )));
    }
    Ok(())
}

/// All blocks of one memory. At most 92 bytes a block, taken at construction.
#[derive(Clone, Debug)]
pub struct BlockPool {
    refs: Vec<u32>,
    pins: Vec<u32>,
    queue: FreeQueue,
    index: Index,
    /// Members of the queue that are not pinned.
    num_free: usize,
    /// Every member from the head up to this one is pinned; null: none is known to be.
    passed: BlockId,
    num_evicted: usize,
    width: HashWidth,
    log: Option<EventLog>,
}

impl BlockPool {
    /// A pool of `num_blocks` blocks, the null block included, all free and without keys. With a
    /// medium it keeps events until [`BlockPool::take_events`].
    ///
    /// # Errors
    /// [`Error::Config`] unless `num_blocks` is 2 to [`MAX_BLOCKS`].
    pub fn new(num_blocks: usize, events: Option<Medium>) -> Result<Self> {
        let count =
            u32::try_from(num_blocks).ok().filter(|_| (2..=MAX_BLOCKS).contains(&num_blocks));
        let Some(count) = count else {
            return Err(Error::Config(format!(
                "a pool of {num_blocks} blocks: the null block and at least one more are needed, \
                 and at most {MAX_BLOCKS}"
            )));
        };
        check_memory(num_blocks, BLOCK_BYTES)?;
        Ok(Self {
            refs: vec![0; num_blocks],
            pins: vec![0; num_blocks],
            queue: FreeQueue::full(count),
            index: Index::new(count),
            num_free: num_blocks - 1,
            passed: BlockId::NULL,
            num_evicted: 0,
            width: HashWidth::default(),
            log: events.map(EventLog::new),
        })
    }

    /// All blocks, the null block included.
    pub fn num_blocks(&self) -> usize {
        self.refs.len()
    }

    /// Blocks that can be allocated: neither referenced nor pinned.
    pub fn num_free(&self) -> usize {
        self.num_free
    }

    /// Blocks that hold a key.
    pub fn num_cached(&self) -> usize {
        self.index.num_cached()
    }

    /// Blocks that have lost their key to an allocation, since construction.
    pub fn num_evicted(&self) -> usize {
        self.num_evicted
    }

    /// Blocks that can never be all taken at once: all but the null block.
    pub fn num_usable(&self) -> usize {
        self.num_blocks() - 1
    }

    /// References held on `id`.
    pub fn num_refs(&self, id: BlockId) -> u32 {
        self.refs[id.index()]
    }

    /// Pins held on `id`.
    pub fn num_pins(&self, id: BlockId) -> u32 {
        self.pins[id.index()]
    }

    /// The key `id` holds.
    pub fn key(&self, id: BlockId) -> Option<BlockKey> {
        self.index.key(id)
    }

    /// The width of this pool's hashes.
    pub fn hash_width(&self) -> HashWidth {
        self.width
    }

    /// The blocks that hold a key; of those that hold the same one, the oldest first.
    pub(crate) fn cached(&self) -> impl Iterator<Item = (BlockId, BlockKey)> + '_ {
        self.index.cached()
    }

    /// The free queue, next to be taken first, pinned blocks included.
    pub fn free_order(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.queue.iter()
    }

    /// Of the first `num_blocks` of the free queue, those that hold a key and are not pinned, with
    /// their keys.
    pub fn evictable(&self, num_blocks: usize) -> impl Iterator<Item = (BlockId, BlockKey)> + '_ {
        let free = self.queue.iter().take(num_blocks).filter(|id| self.pins[id.index()] == 0);
        free.filter_map(|id| Some((id, self.key(id)?)))
    }

    /// Bytes of heap it holds.
    pub fn memory_bytes(&self) -> usize {
        (self.refs.capacity() + self.pins.capacity()) * size_of::<u32>()
            + self.queue.memory_bytes()
            + self.index.memory_bytes()
    }

    /// Takes `n` blocks from the head of the queue, each with one reference, and appends them to
    /// `taken`. Cached ones among them lose their key.
    ///
    /// O(n + pinned blocks ahead of them).
    ///
    /// # Errors
    /// [`Error::OutOfBlocks`] with fewer than `n` free.
    pub fn allocate(&mut self, n: usize, taken: &mut Vec<BlockId>) -> Result<()> {
        if n > self.num_free {
            return Err(Error::OutOfBlocks { needed: n, free: self.num_free });
        }
        taken.reserve(n);
        let first = taken.len();
        let mut run = first;
        let mut at = self.queue.next(self.passed);
        for _ in 0..n {
            while self.pins[at.index()] > 0 {
                // What is taken leaves the queue run by run, and a pinned block ends one.
                self.queue.remove_run(&taken[run..]);
                run = taken.len();
                self.passed = at;
                at = self.queue.next(at);
            }
            taken.push(at);
            self.refs[at.index()] = 1;
            at = self.queue.next(at);
        }
        self.queue.remove_run(&taken[run..]);
        let num_cached = self.num_cached();
        self.drop_keys(&taken[first..]);
        self.num_evicted += num_cached - self.num_cached();
        self.num_free -= n;
        Ok(())
    }

    /// Takes one reference on each; a free block leaves the queue. The null block is ignored.
    ///
    /// # Errors
    /// [`Error::NoSuchBlock`] for an id outside the pool.
    pub fn touch(&mut self, ids: &[BlockId]) -> Result<()> {
        self.check_ids(ids)?;
        check_room(&self.refs, ids)?;
        for &id in ids {
            if id.is_null() {
                continue;
            }
            if self.refs[id.index()] == 0 {
                self.queue.remove(id);
                self.num_free -= usize::from(self.pins[id.index()] == 0);
                if id == self.passed {
                    self.passed = BlockId::NULL;
                }
            }
            self.refs[id.index()] += 1;
        }
        Ok(())
    }

    /// Drops one reference on each, ids given in eviction order. Those that reach 0 go, in that
    /// order, to the tail of the queue if they hold a key, and to its head if they do not: they
    /// can serve nobody. The null block is ignored.
    ///
    /// # Errors
    /// [`Error::NoSuchBlock`] for an id outside the pool, [`Error::InvalidBlock`] for a block
    /// that has fewer references than it is named times.
    pub fn free(&mut self, ids: &[BlockId]) -> Result<()> {
        self.check_ids(ids)?;
        decrement(&mut self.refs, ids, "is free already: free each reference once", |_| ())?;
        for id in ids.iter().filter(|id| !id.is_null()) {
            self.refs[id.index()] += 1; // all are there: now let them go one by one
        }
        self.release(ids.iter().copied());
        Ok(())
    }

    /// As [`BlockPool::free`], of references that the caller is known to hold: in one pass.
    #[inline]
    pub(crate) fn release(&mut self, ids: impl Iterator<Item = BlockId>) {
        let Self { refs, pins, index, num_free, .. } = self;
        let mut unkeyed = Vec::new();
        let goes_last = |id: &BlockId| {
            if id.is_null() {
                return false;
            }
            let num_refs = &mut refs[id.index()];
            debug_assert!(*num_refs > 0, "a reference that the caller holds");
            *num_refs = num_refs.saturating_sub(1);
            if *num_refs > 0 {
                return false;
            }
            *num_free += usize::from(pins[id.index()] == 0);
            if !index.has_key(*id) {
                unkeyed.push(*id);
                return false;
            }
            true
        };
        self.queue.push_back_all(ids.filter(goes_last));
        if !unkeyed.is_empty() {
            self.queue.push_front_all(unkeyed.into_iter());
            self.passed = BlockId::NULL;
        }
    }

    /// Holds each for a copy under way. The null block is ignored.
    ///
    /// # Errors
    /// [`Error::NoSuchBlock`] for an id outside the pool.
    pub fn pin(&mut self, ids: &[BlockId]) -> Result<()> {
        self.check_ids(ids)?;
        check_room(&self.pins, ids)?;
        for &id in ids.iter().filter(|id| !id.is_null()) {
            let is_first = self.pins[id.index()] == 0;
            self.num_free -= usize::from(is_first && self.queue.contains(id));
            self.pins[id.index()] += 1;
        }
        Ok(())
    }

    /// Drops one pin on each. The null block is ignored.
    ///
    /// # Errors
    /// [`Error::NoSuchBlock`] for an id outside the pool, [`Error::InvalidBlock`] for a block
    /// that has fewer pins than it is named times.
    pub fn unpin(&mut self, ids: &[BlockId]) -> Result<()> {
        self.check_ids(ids)?;
        let (queue, mut num_released) = (&self.queue, 0);
        decrement(&mut self.pins, ids, "is not pinned: unpin each pin once", |id| {
            num_released += usize::from(queue.contains(id));
        })?;
        self.num_free += num_released;
        if num_released > 0 {
            self.passed = BlockId::NULL;
        }
        Ok(())
    }

    /// Publishes full blocks: `ids[i]` holds the KV that `hashes[i]` names. The key that a block
    /// already holds changes nothing.
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
        for (&id, hash) in ids.iter().zip(hashes.as_slice()) {
            if id.is_null() {
                return refuse(id, "is the null block, which holds nothing to publish");
            }
            if self.refs[id.index()] == 0 {
                return refuse(id, "is free: take a reference before you publish it");
            }
            if self.index.has_key(id) && !self.index.holds(id, hash, group) {
                return refuse(id, "holds another key: evict it first");
            }
        }
        // What is left to go wrong is one block under two keys in this very call.
        let unkeyed: Vec<_> = ids.iter().copied().filter(|&id| !self.index.has_key(id)).collect();
        match self.insert_keys(ids, hashes.as_slice(), group) {
            Ok(is_new) => {
                self.width.agree(hashes.width())?;
                self.log_stored(hashes.as_slice(), group, &is_new, |run| Origin {
                    parent: run.start.checked_sub(1).map(|before| hashes.as_slice()[before]),
                    ..Origin::default()
                });
                Ok(())
            }
            Err(at) => {
                self.index.remove_all(&unkeyed, |_| ());
                refuse(ids[at], "is named twice, under two keys")
            }
        }
    }

    /// Publishes blocks that the caller holds and knows to be without a key, null ones skipped.
    /// `origin` tells where a run of them stands; it is asked only while events are kept.
    pub(crate) fn publish(
        &mut self,
        ids: &[BlockId],
        hashes: &[BlockHash],
        group: GroupId,
        origin: impl Fn(Range<usize>) -> Origin,
    ) {
        let inserted = self.insert_keys(ids, hashes, group);
        debug_assert!(inserted.is_ok(), "a block that is published anew holds no key");
        if let Ok(is_new) = inserted {
            self.log_stored(hashes, group, &is_new, origin);
        }
    }

    /// Gives a block that holds none a key of which no event tells: it is not to be served yet.
    pub(crate) fn hide(&mut self, id: BlockId, key: &BlockKey) {
        let inserted = self.index.insert_all(&[id], &[key.hash], key.group, |_| ());
        debug_assert!(inserted.is_ok(), "a slot that is filled anew holds no key");
    }

    /// As [`BlockPool::hide`] for many. False, and nothing changed, unless each key is new.
    pub(crate) fn hide_all(
        &mut self,
        ids: &[BlockId],
        hashes: &[BlockHash],
        group: GroupId,
    ) -> bool {
        let mut num_new = 0;
        let inserted = self.index.insert_all(ids, hashes, group, |_| num_new += 1);
        debug_assert!(inserted.is_ok(), "a slot that is filled anew holds no key");
        let is_all_new = num_new == ids.len();
        if !is_all_new {
            self.index.remove_all(ids, |_| ());
        }
        is_all_new
    }

    /// How many of `hashes` are held, hidden or not.
    pub(crate) fn num_held(&self, hashes: &[BlockHash], group: GroupId) -> usize {
        self.index.num_held(hashes, group)
    }

    /// Tells of keys that were hidden until now.
    pub(crate) fn reveal(
        &mut self,
        hashes: &[BlockHash],
        group: GroupId,
        origin: impl Fn(Range<usize>) -> Origin,
    ) {
        if self.log.is_some() {
            self.log_stored(hashes, group, &vec![true; hashes.len()], origin);
        }
    }

    /// Takes away keys that were hidden.
    pub(crate) fn forget_hidden(&mut self, ids: &[BlockId]) {
        self.index.remove_all(ids, |_| ());
    }

    /// Takes on the width of `hashes`' digests, or refuses another than is known.
    ///
    /// # Errors
    /// [`Error::HashWidth`].
    pub(crate) fn agree_width(&mut self, width: HashWidth) -> Result<()> {
        self.width.agree(width)
    }

    /// The block that holds a key; of several, the one published first.
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

    /// As [`BlockPool::lookup`], for hashes whose width is known to be right.
    pub(crate) fn prefix(&self, hashes: &[BlockHash], group: GroupId) -> Vec<BlockId> {
        self.index.prefix(hashes, group)
    }

    /// Drops the keys of these blocks, referenced or not; a free one keeps its place.
    ///
    /// # Errors
    /// [`Error::NoSuchBlock`] for an id outside the pool.
    pub fn evict(&mut self, ids: &[BlockId]) -> Result<()> {
        self.check_ids(ids)?;
        self.drop_keys(ids);
        Ok(())
    }

    /// Drops every key. False, and nothing changed, while a block is referenced or pinned.
    pub fn reset(&mut self) -> bool {
        let is_idle = self.num_free == self.num_usable();
        if is_idle {
            self.index.clear();
            if let Some(log) = &mut self.log {
                log.cleared();
            }
        }
        is_idle
    }

    /// The memory the events speak of; none where no events are kept.
    pub fn medium(&self) -> Option<Medium> {
        self.log.as_ref().map(|log| log.medium)
    }

    /// The events since the last call, oldest first.
    pub fn take_events(&mut self) -> Vec<Event> {
        self.log.as_mut().map(EventLog::take).unwrap_or_default()
    }

    /// Refuses ids outside the pool.
    ///
    /// # Errors
    /// [`Error::NoSuchBlock`].
    pub fn check_ids(&self, ids: &[BlockId]) -> Result<()> {
        let num_blocks = self.num_blocks();
        match ids.iter().find(|id| id.index() >= num_blocks) {
            Some(id) => Err(Error::NoSuchBlock { id: id.to_string(), num_blocks }),
            None => Ok(()),
        }
    }

    /// Verifies every invariant in O(`num_blocks`).
    ///
    /// # Errors
    /// [`Error::Broken`] names the first that does not hold.
    pub fn check(&self) -> Result<()> {
        self.queue.check()?;
        self.index.check()?;
        let broken = |what: String| Err(Error::Broken(format!("pool: {what}")));
        let null = BlockId::NULL.index();
        if self.refs[null] != 0 || self.pins[null] != 0 || self.key(BlockId::NULL).is_some() {
            return broken("the null block is referenced, pinned or cached".to_owned());
        }
        if !self.passed.is_null()
            && (!self.queue.contains(self.passed)
                || self
                    .queue
                    .iter()
                    .take_while(|&id| self.queue.next(self.passed) != id)
                    .any(|id| self.pins[id.index()] == 0))
        {
            return broken("a block passed over is not pinned".to_owned());
        }
        let mut num_free = 0;
        for (id, (&refs, &pins)) in (0..).map(BlockId).zip(self.refs.iter().zip(&self.pins)).skip(1)
        {
            if self.queue.contains(id) != (refs == 0) {
                return broken(format!("block {id} has {refs} references and a wrong place"));
            }
            num_free += usize::from(refs == 0 && pins == 0);
        }
        if num_free != self.num_free {
            return broken(format!("{num_free} blocks are free, {} counted", self.num_free));
        }
        Ok(())
    }

    fn drop_keys(&mut self, ids: &[BlockId]) {
        let log = &mut self.log;
        self.index.remove_all(ids, |key| {
            if let Some(log) = log {
                log.removed(key);
            }
        });
    }

    /// As [`Index::insert_all`]; tells which keys became findable if events are kept.
    fn insert_keys(
        &mut self,
        ids: &[BlockId],
        hashes: &[BlockHash],
        group: GroupId,
    ) -> std::result::Result<Vec<bool>, usize> {
        if self.log.is_none() {
            return self.index.insert_all(ids, hashes, group, |_| ()).map(|()| Vec::new());
        }
        let mut is_new = vec![false; ids.len()];
        self.index.insert_all(ids, hashes, group, |at| is_new[at] = true).map(|()| is_new)
    }

    /// One event per run of neighbours that became findable.
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

/// Refuses to count further where a count could wrap.
fn check_room(counts: &[u32], ids: &[BlockId]) -> Result<()> {
    match ids.iter().find(|id| counts[id.index()] >= MAX_COUNT) {
        Some(&id) => Err(Error::InvalidBlock { id, why: "is held two thousand million times" }),
        None => Ok(()),
    }
}

/// Takes one from each count, ids in range, null ignored, or changes nothing if one would fall
/// below 0. Tells `on_zero` of each count that came to 0, also where it ends in an error.
#[inline]
fn decrement(
    counts: &mut [u32],
    ids: &[BlockId],
    why: &'static str,
    mut on_zero: impl FnMut(BlockId),
) -> Result<()> {
    for (at, &id) in ids.iter().enumerate().filter(|(_, id)| !id.is_null()) {
        let count = &mut counts[id.index()];
        if *count == 0 {
            for &id in ids[..at].iter().filter(|id| !id.is_null()) {
                counts[id.index()] += 1;
            }
            return Err(Error::InvalidBlock { id, why });
        }
        *count -= 1;
        if *count == 0 {
            on_zero(id);
        }
    }
    Ok(())
}
