//! What allocations, frees and touches need of a block, in a quarter of a cache line.

use crate::ids::BlockId;

use super::free_queue::{END, Link, OUTSIDE};

/// The upper bit of a word whose other bits hold a number below 2^31.
const FLAG: u32 = 1 << 31;

/// How many blocks later in the free queue a hint points.
pub(super) const HINT_AHEAD: usize = 32;

/// The most references that a block can have, and the most pins.
pub(super) const MAX_COUNT: u32 = FLAG - 1;

/// A block's references, its place in the free queue, and two flags.
#[derive(Clone, Copy, Debug)]
#[repr(align(16))] // no state lies in two cache lines
pub(super) struct BlockState {
    link: Link,
    /// Number of references. With [`FLAG`], the block holds a key.
    refs: u32,
    /// A block that entered the free queue about [`HINT_AHEAD`] blocks after this one. It may have
    /// left since, so the hint is only for a prefetch. With [`FLAG`], this block is pinned.
    hint: u32,
}

impl BlockState {
    #[inline]
    pub(super) fn num_refs(self) -> u32 {
        self.refs & !FLAG
    }

    /// Adds one reference. The caller has checked that the number stays below 2^31.
    #[inline]
    pub(super) fn add_ref(&mut self) {
        self.refs += 1;
    }

    /// Drops one reference. The caller has checked that there is one.
    #[inline]
    pub(super) fn drop_ref(&mut self) {
        self.refs -= 1;
    }

    /// Takes a free block out of the queue, with one reference. The caller links its neighbours.
    #[inline]
    pub(super) fn allocate(&mut self) {
        self.refs += 1;
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
    pub(super) fn prev(self) -> u32 {
        self.link.prev
    }

    /// The block after this one in the queue.
    #[inline]
    pub(super) fn next(self) -> u32 {
        self.link.next
    }

    /// Makes two blocks of the queue neighbours.
    #[inline]
    pub(super) fn join(states: &mut [Self], before: u32, after: u32) {
        states[before as usize].link.next = after;
        states[after as usize].link.prev = before;
    }

    /// Whether the index has a key for the block.
    #[inline]
    pub(super) fn has_key(self) -> bool {
        self.refs & FLAG != 0
    }

    #[inline]
    pub(super) fn set_key(&mut self, has_key: bool) {
        self.refs = with_flag(self.refs, has_key);
    }

    #[inline]
    pub(super) fn is_pinned(self) -> bool {
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
    pub(super) fn hint(self) -> BlockId {
        BlockId(self.hint & !FLAG)
    }
}

#[inline]
fn with_flag(word: u32, flag: bool) -> u32 {
    word & !FLAG | u32::from(flag) << FLAG.trailing_zeros()
}

/// A block of the queue of a new pool.
impl From<Link> for BlockState {
    fn from(link: Link) -> Self {
        // The blocks are in ascending order. A prefetch beyond the last one does nothing.
        let next = BlockId(link.next).index();
        let hint = u32::try_from(next + HINT_AHEAD - 1).unwrap_or(END);
        Self { link, refs: 0, hint: hint & !FLAG }
    }
}

impl AsRef<Link> for BlockState {
    #[inline]
    fn as_ref(&self) -> &Link {
        &self.link
    }
}

impl AsMut<Link> for BlockState {
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
    /// the block that will enter [`HINT_AHEAD`] blocks later, if it is known.
    #[inline]
    pub(super) fn enter(&mut self, id: BlockId, far: Option<BlockId>, states: &mut [BlockState]) {
        if let Some(far) = far {
            states[id.index()].set_hint(far);
            if self.len == 0 {
                return;
            }
        }
        self.enter_one(id, far.is_none(), states);
    }

    /// Hints at `id` from the oldest block without a hint, and adds `id` if it is one.
    fn enter_one(&mut self, id: BlockId, is_unhinted: bool, states: &mut [BlockState]) {
        if !is_unhinted || self.len == HINT_AHEAD {
            states[self.ids[self.first % HINT_AHEAD].index()].set_hint(id);
            self.first = self.first.wrapping_add(1);
            self.len -= 1;
        }
        if is_unhinted {
            self.ids[self.first.wrapping_add(self.len) % HINT_AHEAD] = id;
            self.len += 1;
        }
    }
}
