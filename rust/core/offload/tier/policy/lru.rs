//! Least recently ranked first.

use crate::error::{Error, Result};
use crate::ids::BlockId;
use crate::key::BlockKey;

use super::Policy;
use super::order::EvictionOrder;

/// Resident slots in the order of their last rank.
///
/// A chain is ranked as a whole, tail before root, so a slot is always less recent than its
/// parent: the least recent slot that is not pinned is nearly always a leaf.
///
/// Chains that have any slot in common have their root in common. So the one of them that was ranked
/// last still stands together, and moves as a whole without a look at each of its slots: a prompt
/// that is stored in many chunks is ranked after each. 17 bytes a slot.
#[derive(Clone, Debug)]
pub(in crate::offload::tier) struct Lru {
    pub(super) order: EvictionOrder,
    /// By root: the first slot, in this order, of the chain that was ranked last; null where parts of
    /// it stand elsewhere. It counts while [`Lru::roots`] agrees.
    tails: Vec<u32>,
    /// By the first slot of a chain that was ranked: its root.
    roots: Vec<u32>,
    has_chains: bool,
}

impl Lru {
    /// For slots `1..num_blocks`, none of them resident yet.
    pub(super) fn new(num_blocks: u32) -> Self {
        let none = vec![0; num_blocks as usize];
        Self {
            order: EvictionOrder::new(num_blocks),
            tails: none.clone(),
            roots: none,
            has_chains: false,
        }
    }

    /// Where the chain ends that begins at `slot` and stands together; `slot` if none is known.
    #[inline]
    fn end_of_chain(&self, slot: BlockId) -> BlockId {
        let root = BlockId(self.roots[slot.index()]);
        if !root.is_null() && self.tails[root.index()] == slot.0 { root } else { slot }
    }

    /// Whether a chain begins at `slot` that may stand together.
    #[inline]
    fn begins(&self, slot: BlockId) -> bool {
        self.roots[slot.index()] != 0
    }

    /// Slots are ranked one by one, whatever chains they stand in.
    fn forget_chains(&mut self) {
        if std::mem::take(&mut self.has_chains) {
            self.tails.fill(0);
            self.roots.fill(0);
        }
    }
}

/// Slots that stand together, the first and the last of them, on their way to the back.
#[derive(Default)]
struct Run(Option<(BlockId, BlockId)>);

impl Run {
    /// Goes on with the slots from `first` to `last`, which stand together.
    #[inline]
    fn push(&mut self, order: &mut EvictionOrder, first: BlockId, last: BlockId) {
        self.0 = match self.0 {
            Some((begin, end)) if order.next(end) == first => Some((begin, last)),
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

    fn stored<'a>(&mut self, slots: impl Iterator<Item = (BlockId, &'a BlockKey)>) {
        self.order.push_back_all(slots.map(|(slot, _)| slot));
    }

    fn ranked(&mut self, slots: impl Iterator<Item = (BlockId, bool)>) {
        self.forget_chains();
        let mut run = Run::default();
        for (slot, _) in slots {
            if self.order.contains(slot) {
                run.push(&mut self.order, slot, slot);
            }
        }
        run.end(&mut self.order);
    }

    fn ranked_chain(&mut self, tail: BlockId, parent: impl Fn(BlockId) -> BlockId, _: usize) {
        let mut run = Run::default();
        let (mut first, mut root, mut is_whole) = (BlockId::NULL, BlockId::NULL, true);
        let mut at = tail;
        while !at.is_null() {
            let mut end = at;
            if self.order.contains(at) {
                end = self.end_of_chain(at);
                let mut above = parent(end);
                // One after the other as long as each parent stands right behind its child.
                while self.order.next(end) == above && !above.is_null() && !self.begins(above) {
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
        self.tails[root.index()] = if is_whole { first.0 } else { 0 };
        self.roots[first.index()] = root.0;
        self.has_chains = true;
    }

    fn split(&mut self, root: BlockId) {
        self.tails[root.index()] = 0;
    }

    #[inline]
    fn removed(&mut self, slot: BlockId) {
        if self.order.contains(slot) {
            self.order.remove(slot);
            self.roots[slot.index()] = 0;
            self.tails[slot.index()] = 0;
        }
    }

    #[inline]
    fn victim(&mut self, may_go: impl Fn(BlockId) -> bool) -> Option<BlockId> {
        self.order.first_that_may_go(may_go)
    }

    #[inline]
    fn has_passed(&self, slot: BlockId) -> bool {
        self.order.has_passed(slot)
    }

    #[inline]
    fn may_go_again(&mut self, slots: impl Iterator<Item = BlockId> + Clone) {
        self.order.may_go_again(slots);
    }

    fn clear(&mut self) {
        self.order.clear();
        self.forget_chains();
    }

    fn len(&self) -> usize {
        self.order.len()
    }

    fn contains(&self, slot: BlockId) -> bool {
        self.order.contains(slot)
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
        may_go: impl Fn(BlockId) -> bool,
    ) -> Result<()> {
        self.order.check(may_go)?;
        for slot in self.order.iter() {
            let mut at = slot;
            let end = self.end_of_chain(slot);
            while at != end {
                let next = self.order.next(at);
                if next.is_null() || parent(at) != next {
                    return Err(Error::Broken(format!(
                        "lru: {slot} to {end} is no chain that stands together: {at} is followed \
                         by {next}"
                    )));
                }
                at = next;
            }
            if end != slot && !parent(end).is_null() {
                return Err(Error::Broken(format!("lru: {end} ends a chain and is no root")));
            }
        }
        Ok(())
    }
}
