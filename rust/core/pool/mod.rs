//! One memory's blocks: who references them, their eviction order, and the keys they hold.
//!
//! Each file owns one of these: `block` one block's record, `records` the memory of all of them,
//! `references` the counts, `free_queue` the order, `keys` and `index` the keys, `fingerprints` the
//! hash table of the index.
//!
//! May import: error, event, ids, key.
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
//! A pin is a second count, for copies in flight. A pinned block keeps its place in the queue, and
//! [`BlockPool::allocate`] skips it.

mod block;
mod fingerprints;
mod free_queue;
mod index;
mod keys;
mod records;
mod references;

pub(crate) use free_queue::FreeQueue;

use crate::error::{Error, Result};
use crate::event::EventLog;
use crate::ids::BlockId;
use crate::key::HashWidth;

use block::{Block, Unhinted};
use index::Index;

/// The largest number of blocks in a pool: ids cross the boundary as `int32`.
pub const MAX_BLOCKS: usize = i32::MAX as usize;

/// The bytes that the accounting of a block takes.
pub(crate) const BLOCK_BYTES: usize = size_of::<Block>() + PIN_BYTES + Index::BLOCK_BYTES;

const PIN_BYTES: usize = size_of::<u32>();

const _: () = assert!(BLOCK_BYTES <= 90);

/// How many blocks ahead a loop prefetches: enough to keep the memory busy.
const AHEAD: usize = 32;

/// Refuses the argument `name` if the machine lacks the memory for `num_entries`, the accounting
/// that it asks for. Without this check the failed allocation would end the process.
pub(crate) fn check_memory(
    name: &str,
    given: usize,
    num_entries: usize,
    entry_bytes: usize,
) -> Result<()> {
    let bytes = num_entries.saturating_mul(entry_bytes);
    let mut probe: Vec<u8> = Vec::new();
    let is_refused = probe.try_reserve_exact(bytes).is_err();
    // Without it the compiler removes the reservation.
    std::hint::black_box(&probe);
    if is_refused {
        return Err(Error::Config(format!(
            "{name} is {given}, whose accounting takes {bytes} bytes, more memory than the machine \
             has: use fewer blocks"
        )));
    }
    Ok(())
}

/// Refuses ids outside a pool of `num_blocks`.
#[inline]
pub(crate) fn check_ids(ids: &[BlockId], num_blocks: usize) -> Result<()> {
    // Without a branch, the compiler compares several ids at once.
    let is_outside = |id: &&BlockId| id.index() >= num_blocks;
    if !ids.iter().fold(false, |any, id| any | is_outside(&id)) {
        return Ok(());
    }
    let id = ids.iter().find(is_outside).copied().unwrap_or_default();
    Err(Error::NoSuchBlock { id: id.to_string(), num_blocks })
}

/// The first id that stands twice in an ascending list.
pub(crate) fn repeated(sorted: &[BlockId]) -> Option<BlockId> {
    sorted.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| pair[0])
}

/// All blocks of one memory. About 90 bytes a block, allocated at construction.
#[derive(Clone, Debug)]
pub struct BlockPool {
    queue: FreeQueue<Block>,
    unhinted: Unhinted,
    pins: Vec<u32>,
    index: Index,
    /// Members of the queue that are not pinned.
    num_free: usize,
    /// The queue's head, up to this block, is all pinned. Null if no such run is known.
    pinned_head: BlockId,
    num_evicted: usize,
    width: HashWidth,
    log: Option<EventLog>,
}

impl BlockPool {
    /// A pool of `num_blocks` blocks, the null block included. All are free and without a key. With
    /// `events`, the pool records events for [`BlockPool::take_events`].
    ///
    /// # Errors
    /// [`Error::Config`] unless `num_blocks` is 2 to [`MAX_BLOCKS`].
    pub fn new(num_blocks: usize, events: bool) -> Result<Self> {
        let count =
            u32::try_from(num_blocks).ok().filter(|_| (2..=MAX_BLOCKS).contains(&num_blocks));
        let Some(count) = count else {
            return Err(Error::Config(format!(
                "num_blocks is {num_blocks}: it must be 2 to {MAX_BLOCKS}, the null block included"
            )));
        };
        check_memory("num_blocks", num_blocks, num_blocks, BLOCK_BYTES)?;
        Ok(Self {
            queue: FreeQueue::full(count),
            unhinted: Unhinted::default(),
            pins: vec![0; num_blocks],
            index: Index::new(num_blocks),
            num_free: num_blocks - 1,
            pinned_head: BlockId::NULL,
            num_evicted: 0,
            width: HashWidth::default(),
            log: events.then(EventLog::default),
        })
    }

    /// Number of blocks, the null block included.
    pub fn num_blocks(&self) -> usize {
        self.pins.len()
    }

    /// Blocks that `allocate` can take: neither referenced nor pinned.
    pub fn num_free(&self) -> usize {
        self.num_free
    }

    /// Number of blocks, the null block excluded.
    pub fn num_usable(&self) -> usize {
        self.num_blocks() - 1
    }

    /// Number of references on `id`.
    pub fn num_refs(&self, id: BlockId) -> u32 {
        self.block(id).num_refs()
    }

    /// Number of pins on `id`.
    pub fn num_pins(&self, id: BlockId) -> u32 {
        self.pins[id.index()]
    }

    /// The free queue, the next block to allocate first, pinned blocks included.
    pub fn free_order(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.queue.iter()
    }

    /// Bytes of memory.
    pub fn memory_bytes(&self) -> usize {
        self.queue.memory_bytes() + self.pins.capacity() * PIN_BYTES + self.index.memory_bytes()
    }

    #[inline]
    fn block(&self, id: BlockId) -> &Block {
        &self.queue.records[id.index()]
    }

    /// Refuses ids outside the pool.
    ///
    /// # Errors
    /// [`Error::NoSuchBlock`].
    pub fn check_ids(&self, ids: &[BlockId]) -> Result<()> {
        check_ids(ids, self.num_blocks())
    }

    /// Verifies every invariant in O(`num_blocks`).
    ///
    /// # Errors
    /// [`Error::Broken`] names the first that does not hold.
    pub fn check(&self) -> Result<()> {
        self.queue.check()?;
        self.index.check(&self.queue.records)?;
        let broken = |what: String| Err(Error::Broken(format!("pool: {what}")));
        let null = self.block(BlockId::NULL);
        if null.num_refs() != 0 || null.is_pinned() || null.has_key() {
            return broken("the null block is referenced, pinned or cached".to_owned());
        }
        let head = self.pinned_head;
        let mut skipped = self.queue.iter().take_while(|&id| self.queue.next(head) != id);
        if !head.is_null()
            && (!self.queue.contains(head) || skipped.any(|id| !self.block(id).is_pinned()))
        {
            return broken("allocate skips a block that is not pinned".to_owned());
        }
        let mut num_free = 0;
        for (id, (block, &pins)) in
            (0..).map(BlockId).zip(self.queue.records.iter().zip(&self.pins))
        {
            if block.is_pinned() != (pins > 0) {
                return broken(format!("the flag of block {id} differs from its pins"));
            }
            if id.is_null() {
                continue;
            }
            let refs = block.num_refs();
            if self.queue.contains(id) != (refs == 0) {
                return broken(format!(
                    "block {id} has {refs} references: it is free exactly at 0"
                ));
            }
            num_free += usize::from(refs == 0 && pins == 0);
        }
        if num_free != self.num_free {
            return broken(format!("{num_free} blocks are free, {} are counted", self.num_free));
        }
        Ok(())
    }
}
