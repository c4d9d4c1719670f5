//! A list of block ids in eviction order. Its links lie in one array, indexed by id.
//!
//! ```text
//!   links[0] is both ends (id 0 is the null block, which is never a member):
//!
//!        +--> [0] --next--> head --next--> ... --next--> tail --next--+
//!        +------------------------------------------------------------+
//!
//!   The head is allocated first. A block outside the list has next == OUTSIDE.
//! ```

use crate::error::{Error, Result};
use crate::ids::BlockId;

const END: u32 = 0;
const OUTSIDE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Link {
    prev: u32,
    next: u32,
}

/// A doubly linked list over ids `1..num_blocks`; every operation but [`FreeQueue::iter`] and
/// [`FreeQueue::clear`] is O(1). 8 bytes a block.
#[derive(Clone, Debug)]
pub(crate) struct FreeQueue {
    links: Vec<Link>,
    len: usize,
}

impl FreeQueue {
    /// A queue that holds `1..num_blocks` in ascending order.
    pub(crate) fn full(num_blocks: u32) -> Self {
        let last = num_blocks - 1;
        let links = (0..num_blocks)
            .map(|id| Link {
                prev: if id == END { last } else { id - 1 },
                next: if id == last { END } else { id + 1 },
            })
            .collect();
        Self { links, len: last as usize }
    }

    /// An empty queue for ids `1..num_blocks`.
    pub(crate) fn empty(num_blocks: u32) -> Self {
        let mut links = vec![Link { prev: OUTSIDE, next: OUTSIDE }; num_blocks as usize];
        links[END as usize] = Link { prev: END, next: END };
        Self { links, len: 0 }
    }

    /// Number of ids in the queue.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Whether `id` is in the queue.
    #[inline]
    pub(crate) fn contains(&self, id: BlockId) -> bool {
        !id.is_null() && self.links[id.index()].next != OUTSIDE
    }

    /// The id after `id`, or the head for the null block; the null block at the end.
    #[inline]
    pub(crate) fn next(&self, id: BlockId) -> BlockId {
        BlockId(self.links[id.index()].next)
    }

    /// The id before `id`, which must be in the queue, or the tail for the null block; the null
    /// block at the head.
    #[inline]
    pub(crate) fn prev(&self, id: BlockId) -> BlockId {
        BlockId(self.links[id.index()].prev)
    }

    /// Removes `id`, which must be in the queue.
    #[inline]
    pub(crate) fn remove(&mut self, id: BlockId) {
        let Link { prev, next } = self.links[id.index()];
        self.links[prev as usize].next = next;
        self.links[next as usize].prev = prev;
        self.links[id.index()].next = OUTSIDE;
        self.len -= 1;
    }

    /// Removes a run of neighbours, given in their order.
    #[inline]
    pub(crate) fn remove_run(&mut self, run: &[BlockId]) {
        if let [first, .., last] | [first @ last] = run {
            let (prev, next) = (self.links[first.index()].prev, self.links[last.index()].next);
            self.links[prev as usize].next = next;
            self.links[next as usize].prev = prev;
            for id in run {
                self.links[id.index()].next = OUTSIDE;
            }
            self.len -= run.len();
        }
    }

    /// Moves a run of neighbours, given by its ends, to the tail. O(1) for any length.
    #[inline]
    pub(crate) fn move_run_to_back(&mut self, first: BlockId, last: BlockId) {
        let (prev, next) = (self.links[first.index()].prev, self.links[last.index()].next);
        if next == END {
            return;
        }
        self.links[prev as usize].next = next;
        self.links[next as usize].prev = prev;
        let tail = self.links[END as usize].prev;
        self.links[tail as usize].next = first.0;
        self.links[first.index()].prev = tail;
        self.links[last.index()].next = END;
        self.links[END as usize].prev = last.0;
    }

    /// Puts ids that are not in the queue at the tail, in this order.
    #[inline]
    pub(crate) fn push_back_all(&mut self, ids: impl Iterator<Item = BlockId>) {
        self.insert_all_after(self.links[END as usize].prev, ids);
    }

    /// Puts ids that are not in the queue at the head, in this order.
    #[inline]
    pub(crate) fn push_front_all(&mut self, ids: impl Iterator<Item = BlockId>) {
        self.insert_all_after(END, ids);
    }

    #[inline]
    fn insert_all_after(&mut self, before: u32, ids: impl Iterator<Item = BlockId>) {
        let next = self.links[before as usize].next;
        let (mut last, mut num_ids) = (before, 0);
        for id in ids {
            self.links[last as usize].next = id.0;
            self.links[id.index()] = Link { prev: last, next };
            last = id.0;
            num_ids += 1;
        }
        self.links[next as usize].prev = last;
        self.len += num_ids;
    }

    /// The ids, the head first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = BlockId> + '_ {
        let mut at = BlockId::NULL;
        std::iter::from_fn(move || {
            at = self.next(at);
            (!at.is_null()).then_some(at)
        })
    }

    /// Removes every id.
    pub(crate) fn clear(&mut self) {
        self.links.fill(Link { prev: OUTSIDE, next: OUTSIDE });
        self.links[END as usize] = Link { prev: END, next: END };
        self.len = 0;
    }

    /// Bytes on the heap.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.links.capacity() * size_of::<Link>()
    }

    /// Walks the list and compares links and length with one another.
    ///
    /// # Errors
    /// [`Error::Broken`] if links or length disagree.
    pub(crate) fn check(&self) -> Result<()> {
        let broken = |what: String| Err(Error::Broken(format!("free queue: {what}")));
        let mut prev = END;
        for count in 0..=self.len {
            let at = self.links[prev as usize].next;
            let Some(link) = self.links.get(at as usize) else {
                return broken(format!("{at} follows {prev}, but is outside the pool"));
            };
            if link.prev != prev {
                return broken(format!("{at} follows {prev}, but names {} before it", link.prev));
            }
            if at == END && count != self.len {
                return broken(format!("{count} members, {} are counted", self.len));
            }
            prev = at;
        }
        if prev != END {
            return broken(format!("more members than the {} that are counted", self.len));
        }
        let num_in = self.links.iter().skip(1).filter(|link| link.next != OUTSIDE).count();
        if num_in != self.len {
            return broken(format!("{num_in} blocks have links, {} are members", self.len));
        }
        Ok(())
    }
}
