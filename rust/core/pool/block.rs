//! What the pool knows of a block, in one cache line: its key, its references, its place in the
//! free queue.
//!
//! In a large pool each block that an operation visits is a miss of the caches. One line a block
//! lets an allocation that evicts, a publication, and a lookup with the touch after it pay once.

use bytemuck::{Pod, Zeroable};

use crate::ids::{BlockId, GroupId};
use crate::key::{BlockHash, BlockKey, MAX_HASH_BYTES};

use super::free_queue::{END, Link, OUTSIDE};

/// The upper bit of a word whose other bits hold a number below 2^31.
const FLAG: u32 = 1 << 31;

/// How many blocks later in the free queue a hint points, at the least. When a hit takes blocks out
/// of the queue, hints at them lead nowhere. Then a walk waits for so many of the blocks behind them.
pub(super) const HINT_AHEAD: usize = 8;

/// The most references that a block can have, and the most pins.
pub(super) const MAX_COUNT: u32 = FLAG - 1;

/// The lowest bit of the place in [`Block::tag`].
const PLACE_BIT: u32 = 29;

/// A block's key, its references, its place in the free queue, and a flag.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C, align(64))] // one cache line
pub(super) struct Block {
    hash: BlockHash,
    /// The [`tag_of`] the key's group; 0 for a block without a key. The upper bits note the place
    /// of the key's entry in its bucket of the table, if the block has an entry.
    tag: u32,
    pub(super) fingerprint: u32,
    /// Neighbours in the circle of blocks with the same key, in order of publication. A block that
    /// is alone has itself in `newer`, and in `older` the block that got its key
    /// [`AHEAD`](super::AHEAD) places later, or any other: a lookup compares what it finds there.
    pub(super) older: BlockId,
    pub(super) newer: BlockId,
    link: Link,
    num_refs: u32,
    /// A block that entered the free queue [`HINT_AHEAD`] or more blocks after this one. It may have
    /// left since, so the hint is only for a prefetch. With [`FLAG`], this block is pinned.
    hint: u32,
}

const _: () = assert!(size_of::<Block>() == 64);

impl Block {
    #[inline]
    pub(super) fn num_refs(&self) -> u32 {
        self.num_refs
    }

    /// Adds one reference. The caller has checked that the number stays below 2^31.
    #[inline]
    pub(super) fn add_ref(&mut self) {
        self.num_refs += 1;
    }

    /// Drops one reference. The caller has checked that there is one.
    #[inline]
    pub(super) fn drop_ref(&mut self) {
        self.num_refs -= 1;
    }

    /// Takes a free block out of the queue, with one reference. The caller links its neighbours.
    #[inline]
    pub(super) fn allocate(&mut self) {
        self.num_refs = 1;
        self.link.next = OUTSIDE;
    }

    /// Takes a block out of the queue, and returns its neighbours for the caller to link.
    #[inline]
    pub(super) fn leave(&mut self) -> Link {
        let link = self.link;
        self.link.next = OUTSIDE;
        link
    }

    /// The block before this one in the queue.
    #[inline]
    pub(super) fn prev(&self) -> u32 {
        self.link.prev
    }

    /// The block after this one in the queue.
    #[inline]
    pub(super) fn next(&self) -> u32 {
        self.link.next
    }

    /// Makes two blocks of the queue neighbours.
    #[inline]
    pub(super) fn join(blocks: &mut [Self], before: u32, after: u32) {
        blocks[before as usize].link.next = after;
        blocks[after as usize].link.prev = before;
    }

    /// Whether the block holds a key.
    #[inline]
    pub(super) fn has_key(&self) -> bool {
        self.tag != 0
    }

    /// Whether the block is referenced and holds no key.
    #[inline]
    pub(super) fn is_ready(&self) -> bool {
        self.tag == 0 && self.num_refs != 0
    }

    /// The key that the block holds.
    #[inline]
    pub(super) fn key(&self) -> Option<BlockKey> {
        let tag = self.tag & ((1 << PLACE_BIT) - 1);
        let group = u16::try_from(tag.checked_sub(1)?).ok().map(GroupId)?;
        Some(BlockKey { hash: self.hash, group })
    }

    /// Whether the block has exactly this key.
    #[inline]
    pub(super) fn holds(&self, hash: &BlockHash, tag: u32) -> bool {
        self.tag & ((1 << PLACE_BIT) - 1) == tag && self.hash == *hash
    }

    /// Notes a key, and the place of its entry.
    #[inline]
    pub(super) fn set_key(&mut self, hash: &BlockHash, tag: u32, place: usize) {
        self.hash = *hash;
        self.tag = tag | u32::try_from(place).unwrap_or_default() << PLACE_BIT;
    }

    #[inline]
    pub(super) fn clear_key(&mut self) {
        self.tag = 0;
    }

    /// Where the key's entry most likely is in its bucket of the table.
    #[inline]
    pub(super) fn place(&self) -> usize {
        (self.tag >> PLACE_BIT) as usize
    }

    #[inline]
    pub(super) fn is_pinned(&self) -> bool {
        self.hint & FLAG != 0
    }

    #[inline]
    pub(super) fn set_pinned(&mut self, is_pinned: bool) {
        self.hint = with_flag(self.hint, is_pinned);
    }

    #[inline]
    fn set_hint(&mut self, id: BlockId) {
        self.hint = self.hint & FLAG | id.0;
    }

    /// A block to prefetch when the queue's walk is here.
    #[inline]
    pub(super) fn hint(&self) -> BlockId {
        BlockId(self.hint & !FLAG)
    }
}

#[inline]
fn with_flag(word: u32, flag: bool) -> u32 {
    word & !FLAG | u32::from(flag) << FLAG.trailing_zeros()
}

/// A number for the group that leaves 0 for "no key".
#[inline]
pub(super) fn tag_of(group: GroupId) -> u32 {
    u32::from(group.0) + 1
}

/// A block of the queue of a new pool.
impl From<Link> for Block {
    fn from(link: Link) -> Self {
        // The blocks are in ascending order. A prefetch beyond the last one does nothing.
        let next = BlockId(link.next).index();
        let hint = u32::try_from(next + HINT_AHEAD - 1).unwrap_or(END);
        Self {
            hash: [0; MAX_HASH_BYTES],
            tag: 0,
            fingerprint: 0,
            older: BlockId::NULL,
            newer: BlockId::NULL,
            link,
            num_refs: 0,
            hint: hint & !FLAG,
        }
    }
}

impl AsRef<Link> for Block {
    #[inline]
    fn as_ref(&self) -> &Link {
        &self.link
    }
}

impl AsMut<Link> for Block {
    #[inline]
    fn as_mut(&mut self) -> &mut Link {
        &mut self.link
    }
}

/// The last blocks that entered the free queue and have no hint yet.
///
/// A walk of the queue reads one link after the other, and each read waits for the one before it. A
/// hint lets the walk prefetch.
#[derive(Clone, Debug)]
pub(super) struct Unhinted {
    ids: [BlockId; HINT_AHEAD],
    len: usize,
    first: usize,
}

impl Default for Unhinted {
    fn default() -> Self {
        Self { ids: [BlockId::NULL; HINT_AHEAD], len: 0, first: 0 }
    }
}

impl Unhinted {
    /// Sets the hint of `id`, which enters the queue, and of a block that entered before. `far` is
    /// the block that will enter [`HINT_AHEAD`] or more blocks later, if it is known.
    #[inline]
    pub(super) fn enter(&mut self, id: BlockId, far: Option<BlockId>, blocks: &mut [Block]) {
        if let Some(far) = far {
            blocks[id.index()].set_hint(far);
            if self.len == 0 {
                return;
            }
        }
        self.enter_one(id, far.is_none(), blocks);
    }

    /// Hints at `id` from the oldest block without a hint, and adds `id` if it is one.
    fn enter_one(&mut self, id: BlockId, is_unhinted: bool, blocks: &mut [Block]) {
        if !is_unhinted || self.len == HINT_AHEAD {
            blocks[self.ids[self.first].index()].set_hint(id);
            self.first = (self.first + 1) % HINT_AHEAD;
            self.len -= 1;
        }
        if is_unhinted {
            self.ids[(self.first + self.len) % HINT_AHEAD] = id;
            self.len += 1;
        }
    }
}
