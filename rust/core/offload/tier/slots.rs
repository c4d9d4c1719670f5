//! The slots of a tier: their keys, references, pins, loads, and which of them a store fills.
//!
//! ```text
//!             take + withhold            publish
//!   [ empty ] -------------> [ filling ] -------> [ resident ]
//!       ^                        | withdraw            | evict
//!       +------------------------+---------------------+
//! ```
//!
//! A slot that a store fills holds its key already, so that no second store fills another slot with
//! it. The key is withheld from lookups and events until the store is complete.

use crate::error::{Error, Result};
use crate::ids::{BlockId, GroupId};
use crate::key::{BlockHash, BlockKey};
use crate::pool::BlockPool;

/// Slots `1..=num_slots`. 5 bytes a slot besides the pool.
#[derive(Clone, Debug)]
pub(in crate::offload) struct Slots {
    /// An empty slot is a free block. A slot in use has one reference, the tier's own. It is empty
    /// again once it is free and its last pin ends.
    pub(in crate::offload) pool: BlockPool,
    /// Number of loads that read the slot.
    num_loads: Vec<u32>,
    /// Whether a store fills the slot and its key is withheld.
    is_filling: Vec<bool>,
    /// Number of slots whose keys are withheld.
    pub(in crate::offload) num_filling: usize,
}

impl Slots {
    pub(super) const SLOT_BYTES: usize = 5;

    /// `num_slots` empty slots. With `events`, the pool records them.
    pub(super) fn new(num_slots: usize, events: bool) -> Result<Self> {
        Ok(Self {
            pool: BlockPool::new(num_slots + 1, events)?,
            num_loads: vec![0; num_slots + 1],
            is_filling: vec![false; num_slots + 1],
            num_filling: 0,
        })
    }

    /// All slots, ascending.
    pub(in crate::offload) fn iter(&self) -> impl Iterator<Item = BlockId> + use<> {
        let slots = (1..=u32::try_from(self.len()).unwrap_or(0)).map(BlockId);
        #[cfg(test)]
        let slots = slots.inspect(|_| super::chains::looks::count());
        slots
    }

    pub(in crate::offload) fn len(&self) -> usize {
        self.pool.num_usable()
    }

    #[inline]
    pub(super) fn is_filling(&self, slot: BlockId) -> bool {
        self.is_filling[slot.index()]
    }

    /// Whether a slot is in use: resident, filling, or part of a sleep image.
    pub(in crate::offload) fn is_referenced(&self, slot: BlockId) -> bool {
        self.pool.num_refs(slot) > 0
    }

    /// Whether `slot` is one of these slots.
    pub(in crate::offload) fn contains(&self, slot: BlockId) -> bool {
        (1..=self.len()).contains(&slot.index())
    }

    /// Whether a slot is in use without a key.
    pub(in crate::offload) fn is_unkeyed(&self, slot: BlockId) -> bool {
        self.contains(slot) && self.is_referenced(slot) && self.pool.key(slot).is_none()
    }

    /// The key of a slot, withheld or not. None also outside the tier.
    pub(in crate::offload) fn key(&self, slot: BlockId) -> Option<BlockKey> {
        if self.contains(slot) { self.pool.key(slot) } else { None }
    }

    /// The slots of the longest prefix of `hashes` that is held, up to the first key that is withheld.
    pub(super) fn published_prefix(&self, hashes: &[BlockHash], group: GroupId) -> Vec<BlockId> {
        let mut found = self.pool.prefix(hashes, group);
        if self.num_filling > 0 {
            let num_published = found.iter().take_while(|&&slot| !self.is_filling(slot)).count();
            found.truncate(num_published);
        }
        found
    }

    /// Whether a load reads the slot.
    pub(in crate::offload) fn is_loading(&self, slot: BlockId) -> bool {
        self.num_loads[slot.index()] > 0
    }

    pub(in crate::offload) fn begin_loads(&mut self, slots: &[BlockId]) {
        for slot in slots {
            self.num_loads[slot.index()] += 1;
        }
    }

    pub(in crate::offload) fn end_loads(&mut self, slots: &[BlockId]) {
        for slot in slots {
            self.num_loads[slot.index()] -= 1;
        }
    }

    /// At most `num_slots` empty slots, in use from now on and without a key.
    pub(super) fn take(&mut self, num_slots: usize) -> Result<Vec<BlockId>> {
        let mut slots = Vec::new();
        self.pool.allocate(num_slots.min(self.pool.num_free()), &mut slots)?;
        Ok(slots)
    }

    /// Takes this slot if it is empty and unpinned. Returns whether it was.
    pub(in crate::offload) fn take_at(&mut self, slot: BlockId) -> Result<bool> {
        let is_free = !self.is_referenced(slot) && self.pool.num_pins(slot) == 0;
        if is_free {
            self.pool.touch(&[slot])?;
        }
        Ok(is_free)
    }

    /// Gives slots without a key one each, withheld from lookups and events. Returns false and
    /// changes nothing unless every key is new.
    pub(super) fn withhold(
        &mut self,
        slots: &[BlockId],
        hashes: &[BlockHash],
        group: GroupId,
    ) -> bool {
        let is_new = self.insert_new(slots, hashes, group);
        if is_new {
            for slot in slots {
                self.is_filling[slot.index()] = true;
            }
            self.num_filling += slots.len();
        }
        is_new
    }

    fn insert_new(&mut self, slots: &[BlockId], hashes: &[BlockHash], group: GroupId) -> bool {
        let is_new = self.pool.insert_unreported(slots, hashes, group);
        if !is_new {
            self.pool.remove_unreported(slots);
        }
        is_new
    }

    /// Lookups find these slots from now on. Returns the positions of those whose keys were
    /// withheld: the others were withdrawn before.
    pub(super) fn publish(&mut self, slots: &[BlockId]) -> Vec<usize> {
        let mut published = Vec::with_capacity(slots.len());
        for (at, slot) in slots.iter().enumerate() {
            if std::mem::take(&mut self.is_filling[slot.index()]) {
                published.push(at);
            }
        }
        self.num_filling -= published.len();
        published
    }

    /// Drops withheld keys. The slots stay in use.
    pub(super) fn withdraw(&mut self, slots: &[BlockId]) {
        self.pool.remove_unreported(slots);
        for slot in slots {
            self.num_filling -= usize::from(self.is_filling(*slot));
            self.is_filling[slot.index()] = false;
        }
    }

    /// Gives a slot in use the key that a snapshot has for it. Returns false unless the key is new
    /// and the slot has none.
    pub(super) fn restore(&mut self, slot: BlockId, key: &BlockKey) -> bool {
        self.contains(slot)
            && self.key(slot).is_none()
            && self.insert_new(&[slot], &[key.hash], key.group)
    }

    /// Verifies that counts and states agree. `is_resident` says which slots the policy holds.
    ///
    /// # Errors
    /// [`Error::Broken`] names the first invariant that does not hold.
    pub(super) fn check(&self, is_resident: impl Fn(BlockId) -> bool) -> Result<()> {
        self.pool.check()?;
        let broken = |what: String| Err(Error::Broken(format!("tier: {what}")));
        let mut num_filling = 0;
        for slot in self.iter() {
            let (is_resident, is_filling) = (is_resident(slot), self.is_filling(slot));
            num_filling += usize::from(is_filling);
            if is_filling && is_resident {
                return broken(format!("slot {slot} is resident while a store fills it"));
            }
            if self.key(slot).is_some() != (is_resident || is_filling) {
                return broken(format!(
                    "slot {slot} must hold a key exactly if it is resident or a store fills it"
                ));
            }
            if (is_resident || is_filling) && self.pool.num_refs(slot) != 1 {
                return broken(format!("slot {slot} has {} references", self.pool.num_refs(slot)));
            }
            if self.num_loads[slot.index()] > self.pool.num_pins(slot) {
                return broken(format!("a load reads slot {slot} without a pin"));
            }
        }
        if num_filling != self.num_filling {
            return broken(format!(
                "stores fill {num_filling} slots, {} are counted",
                self.num_filling
            ));
        }
        Ok(())
    }
}
