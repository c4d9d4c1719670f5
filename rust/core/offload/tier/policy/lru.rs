//! Least recent first.

use std::ops::Range;

use crate::error::{Error, Result};
use crate::ids::BlockId;
use crate::key::BlockKey;
use crate::pool::FreeQueue;

use super::Policy;
use super::order::EvictionOrder;
use super::parts::parts;

/// Resident slots in order of recency.
///
/// A chain becomes recent as a whole, tail before root, so a slot is always less recent than its
/// parent. The least recent slot that is not pinned is nearly always a leaf.
///
/// Chains that share a slot share their root. So the most recent of them is still contiguous in the
/// order, and moves as a whole without a look at each of its slots. This matters for a prompt that
/// is stored in many chunks, because it becomes recent after each. 17 bytes a slot.
#[derive(Clone, Debug)]
pub(in crate::offload::tier) struct Lru {
    pub(super) order: EvictionOrder,
    /// By root: the first slot, in this order, of its most recent chain. Null if the chain is not
    /// contiguous. Valid only while [`Lru::roots`] agrees.
    tails: Vec<u32>,
    /// By the first slot of a chain that became recent: its root.
    roots: Vec<u32>,
    has_chains: bool,
}

impl Lru {
    /// A policy for slots `1..num_blocks`, none of them resident yet.
    pub(super) fn new(num_blocks: u32) -> Self {
        let none = vec![0; num_blocks as usize];
        Self {
            order: EvictionOrder::new(num_blocks),
            tails: none.clone(),
            roots: none,
            has_chains: false,
        }
    }

    /// The end of the contiguous chain that begins at `slot`; `slot` if none is known.
    #[inline]
    fn end_of_chain(&self, slot: BlockId) -> BlockId {
        let root = BlockId(self.roots[slot.index()]);
        if !root.is_null() && self.tails[root.index()] == slot.0 { root } else { slot }
    }

    /// Whether a chain that may be contiguous begins at `slot`.
    #[inline]
    fn begins(&self, slot: BlockId) -> bool {
        self.roots[slot.index()] != 0
    }

    /// Notes that the most recent chain below `root` begins at `first`. It is contiguous if it is
    /// whole.
    fn note_chain(&mut self, first: BlockId, root: BlockId, is_whole: bool) {
        self.tails[root.index()] = if is_whole { first.0 } else { 0 };
        self.roots[first.index()] = root.0;
        self.has_chains = true;
    }

    /// Forgets which chains are contiguous, because slots become recent one by one.
    fn forget_chains(&mut self) {
        if std::mem::take(&mut self.has_chains) {
            self.tails.fill(0);
            self.roots.fill(0);
        }
    }
}

/// The first and the last of contiguous slots that move to the tail.
#[derive(Default)]
struct Run(Option<(BlockId, BlockId)>);

impl Run {
    /// Continues with the contiguous slots from `first` to `last`.
    #[inline]
    fn push(&mut self, order: &mut EvictionOrder, first: BlockId, last: BlockId) {
        self.0 = match self.0 {
            Some((begin, end)) if order.queue().next(end) == first => Some((begin, last)),
            Some((begin, end)) => {
                order.move_run_to_back(begin, end);
                Some((first, last))
            }
            None => Some((first, last)),
        };
    }

    fn end(self, order: &mut EvictionOrder) {
        if let Some((begin, end)) = self.0 {
            order.move_run_to_back(begin, end);
        }
    }
}

impl Policy for Lru {
    const SLOT_BYTES: usize = EvictionOrder::SLOT_BYTES + 2 * 4;

    fn stored(
        &mut self,
        slots: impl Iterator<Item = BlockId>,
        _: impl Fn(BlockId) -> Option<BlockKey>,
    ) {
        self.order.push_back_all(slots);
    }

    fn make_recent(&mut self, slots: impl Iterator<Item = (BlockId, bool)>) {
        self.forget_chains();
        let mut run = Run::default();
        for (slot, _) in slots {
            if self.order.queue().contains(slot) {
                run.push(&mut self.order, slot, slot);
            }
        }
        run.end(&mut self.order);
    }

    fn make_chain_recent(
        &mut self,
        tail: BlockId,
        parent: impl Fn(BlockId) -> BlockId,
        _: &Range<usize>,
    ) {
        let mut run = Run::default();
        let (mut first, mut root, mut is_whole) = (BlockId::NULL, BlockId::NULL, true);
        let mut at = tail;
        while !at.is_null() {
            let mut end = at;
            if self.order.queue().contains(at) {
                end = self.end_of_chain(at);
                let mut above = parent(end);
                // As long as each parent is right behind its child.
                while self.order.queue().next(end) == above
                    && !above.is_null()
                    && !self.begins(above)
                {
                    end = above;
                    above = parent(end);
                }
                run.push(&mut self.order, at, end);
                first = if first.is_null() { at } else { first };
                root = end;
            } else {
                is_whole &= first.is_null();
            }
            at = parent(end);
        }
        run.end(&mut self.order);
        self.note_chain(first, root, is_whole);
    }

    fn make_chains_recent(&mut self, tails: &[BlockId], parent: impl Fn(BlockId) -> BlockId) {
        let parts = parts(tails, self.roots.len(), &parent, |slot| self.end_of_chain(slot));
        let mut run = Run::default();
        for part in parts {
            let (mut first, mut root, mut is_whole) = (BlockId::NULL, BlockId::NULL, true);
            for &(at, end) in &part {
                if self.order.queue().contains(at) {
                    run.push(&mut self.order, at, end);
                    first = if first.is_null() { at } else { first };
                    root = end;
                } else {
                    is_whole &= first.is_null();
                }
            }
            // Of the chains that share a root, only the last one has it in its part.
            if part.last().is_some_and(|&(_, end)| parent(end).is_null()) {
                self.note_chain(first, root, is_whole);
            }
        }
        run.end(&mut self.order);
    }

    fn make_least_recent(&mut self, slot: BlockId) {
        if self.order.queue().contains(slot) {
            self.order.remove(slot);
            self.order.push_front(slot);
        }
    }

    fn split(&mut self, root: BlockId) {
        self.tails[root.index()] = 0;
    }

    #[inline]
    fn removed(&mut self, slot: BlockId) {
        if self.order.queue().contains(slot) {
            self.order.remove(slot);
            self.roots[slot.index()] = 0;
            self.tails[slot.index()] = 0;
        }
    }

    #[inline]
    fn victim(&mut self, is_evictable: impl Fn(BlockId) -> bool) -> Option<BlockId> {
        self.order.first_evictable(is_evictable)
    }

    #[inline]
    fn has_passed(&self, slot: BlockId, _: BlockId) -> bool {
        self.order.has_skipped(slot)
    }

    #[inline]
    fn retry(&mut self, slots: impl Iterator<Item = BlockId> + Clone) {
        self.order.retry(slots);
    }

    fn clear(&mut self) {
        self.order.clear();
        self.forget_chains();
    }

    fn len(&self) -> usize {
        self.order.queue().len()
    }

    fn queues(&self) -> impl Iterator<Item = &FreeQueue> {
        std::iter::once(self.order.queue())
    }

    fn contains(&self, slot: BlockId) -> bool {
        self.order.queue().contains(slot)
    }

    #[cfg(test)]
    fn memory_bytes(&self) -> usize {
        self.order.memory_bytes()
            + (self.tails.capacity() + self.roots.capacity()) * size_of::<u32>()
    }

    fn check(
        &self,
        _: impl Fn(BlockId) -> Option<BlockKey>,
        parent: impl Fn(BlockId) -> BlockId,
        is_evictable: impl Fn(BlockId) -> bool,
    ) -> Result<()> {
        self.order.check(is_evictable)?;
        for slot in self.order.queue().iter() {
            let mut at = slot;
            let end = self.end_of_chain(slot);
            while at != end {
                let next = self.order.queue().next(at);
                if next.is_null() || parent(at) != next {
                    return Err(Error::Broken(format!(
                        "lru: {slot} to {end} is not a contiguous chain: {next} follows {at}"
                    )));
                }
                at = next;
            }
            if end != slot && !parent(end).is_null() {
                return Err(Error::Broken(format!("lru: {end} ends a chain but is not a root")));
            }
        }
        Ok(())
    }
}
