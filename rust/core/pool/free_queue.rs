//! A list of block ids in eviction order. Its links lie in the records of the blocks.
//!
//! ```text
//!   records[0] is both ends (id 0 is the null block, which is never a member):
//!
//!        +--> [0] --next--> head --next--> ... --next--> tail --next--+
//!        +------------------------------------------------------------+
//!
//!   The head is allocated first. A block outside the list has next == OUTSIDE.
//! ```

use bytemuck::{Pod, Zeroable};

use crate::error::{Error, Result};
use crate::ids::BlockId;

use super::records::Records;

pub(super) const END: u32 = 0;
pub(super) const OUTSIDE: u32 = u32::MAX;

/// A block's neighbours in a list.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct Link {
    pub(super) prev: u32,
    pub(super) next: u32,
}

impl AsRef<Link> for Link {
    #[inline]
    fn as_ref(&self) -> &Link {
        self
    }
}

impl AsMut<Link> for Link {
    #[inline]
    fn as_mut(&mut self) -> &mut Link {
        self
    }
}

/// A doubly linked list over ids `1..num_blocks`; every operation but [`FreeQueue::iter`] and
/// [`FreeQueue::clear`] is O(1). One record a block, of 8 bytes if it has nothing but the links.
#[derive(Clone, Debug)]
pub(crate) struct FreeQueue<R: Pod = Link> {
    pub(super) records: Records<R>,
    pub(super) len: usize,
}

impl<R: From<Link> + Pod> FreeQueue<R> {
    /// A queue that holds `1..num_blocks` in ascending order.
    pub(crate) fn full(num_blocks: u32) -> Self {
        let last = num_blocks - 1;
        let link = |id| Link {
            prev: if id == END { last } else { id - 1 },
            next: if id == last { END } else { id + 1 },
        };
        Self {
            records: Records::new((0..num_blocks).map(|id| link(id).into())),
            len: last as usize,
        }
    }
}

impl FreeQueue {
    /// An empty queue for ids `1..num_blocks`.
    pub(crate) fn empty(num_blocks: u32) -> Self {
        let outside = Link { prev: OUTSIDE, next: OUTSIDE };
        let mut records = Records::new((0..num_blocks).map(|_| outside));
        records[END as usize] = Link { prev: END, next: END };
        Self { records, len: 0 }
    }
}

impl<R: AsRef<Link> + AsMut<Link> + Pod> FreeQueue<R> {
    /// Number of ids in the queue.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Whether `id` is in the queue.
    #[inline]
    pub(crate) fn contains(&self, id: BlockId) -> bool {
        !id.is_null() && self.link(id.0).next != OUTSIDE
    }

    /// The id after `id`, or the head for the null block; the null block at the end.
    #[inline]
    pub(crate) fn next(&self, id: BlockId) -> BlockId {
        BlockId(self.link(id.0).next)
    }

    /// The id before `id`, which must be in the queue, or the tail for the null block; the null
    /// block at the head.
    #[inline]
    pub(crate) fn prev(&self, id: BlockId) -> BlockId {
        BlockId(self.link(id.0).prev)
    }

    /// Removes `id`, which must be in the queue.
    #[inline]
    pub(crate) fn remove(&mut self, id: BlockId) {
        let link = self.link_mut(id.0);
        let Link { prev, next } = *link;
        link.next = OUTSIDE;
        self.link_mut(prev).next = next;
        self.link_mut(next).prev = prev;
        self.len -= 1;
    }

    /// Moves a run of neighbours, given by its ends, to the tail. O(1) for any length.
    #[inline]
    pub(crate) fn move_run_to_back(&mut self, first: BlockId, last: BlockId) {
        let (prev, next) = (self.link(first.0).prev, self.link(last.0).next);
        if next == END {
            return;
        }
        self.link_mut(prev).next = next;
        self.link_mut(next).prev = prev;
        let tail = self.link(END).prev;
        self.link_mut(tail).next = first.0;
        self.link_mut(first.0).prev = tail;
        self.link_mut(last.0).next = END;
        self.link_mut(END).prev = last.0;
    }

    /// Puts an id that is not in the queue behind `before`, which is in it or null for the head.
    #[inline]
    fn insert_after(&mut self, before: u32, id: BlockId) {
        let next = std::mem::replace(&mut self.link_mut(before).next, id.0);
        self.link_mut(next).prev = id.0;
        *self.link_mut(id.0) = Link { prev: before, next };
        self.len += 1;
    }

    /// Puts an id that is not in the queue at the head.
    #[inline]
    pub(crate) fn push_front(&mut self, id: BlockId) {
        self.insert_after(END, id);
    }

    /// Puts ids that are not in the queue at the tail, in this order.
    #[inline]
    pub(crate) fn push_back_all(&mut self, ids: impl Iterator<Item = BlockId>) {
        let mut tail = self.link(END).prev;
        for id in ids {
            self.insert_after(tail, id);
            tail = id.0;
        }
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
        for record in self.records.iter_mut() {
            *record.as_mut() = Link { prev: OUTSIDE, next: OUTSIDE };
        }
        *self.link_mut(END) = Link { prev: END, next: END };
        self.len = 0;
    }

    /// Bytes of memory.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.records.len() * size_of::<R>()
    }

    #[inline]
    fn link(&self, id: u32) -> &Link {
        self.records[id as usize].as_ref()
    }

    #[inline]
    fn link_mut(&mut self, id: u32) -> &mut Link {
        self.records[id as usize].as_mut()
    }

    /// Walks the list and compares links and length with one another.
    ///
    /// # Errors
    /// [`Error::Broken`] if links or length disagree.
    pub(crate) fn check(&self) -> Result<()> {
        let broken = |what: String| Err(Error::Broken(format!("free queue: {what}")));
        let mut prev = END;
        for count in 0..=self.len {
            let at = self.link(prev).next;
            let Some(record) = self.records.get(at as usize) else {
                return broken(format!("{at} follows {prev}, but is outside the pool"));
            };
            if record.as_ref().prev != prev {
                let named = record.as_ref().prev;
                return broken(format!("{at} follows {prev}, but names {named} before it"));
            }
            if at == END && count != self.len {
                return broken(format!("{count} members, {} are counted", self.len));
            }
            prev = at;
        }
        if prev != END {
            return broken(format!("more members than the {} that are counted", self.len));
        }
        let members = self.records.iter().skip(1).filter(|it| it.as_ref().next != OUTSIDE);
        let num_in = members.count();
        if num_in != self.len {
            return broken(format!("{num_in} blocks have links, {} are members", self.len));
        }
        Ok(())
    }
}
