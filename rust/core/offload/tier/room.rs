//! Room for stores: which slots may be evicted, and their eviction.

use std::collections::BTreeSet;
use std::iter::successors;

use crate::error::{Error, Result};
use crate::ids::BlockId;
use crate::pool::FreeQueue;

use super::Tier;
use super::chains::Chains;
use super::policy::{AnyPolicy, Policy, with_policy};
use super::slots::Slots;

/// Whether a resident slot may be evicted for room.
#[inline]
pub(super) fn is_unpinned_leaf(chains: &Chains, slots: &Slots, slot: BlockId) -> bool {
    chains.is_leaf(slot) && slots.pool.num_pins(slot) == 0
}

impl Tier {
    /// Lets the policy consider slots again that have lost a pin or a child.
    pub(super) fn retry(&mut self, candidates: &[BlockId]) {
        let Self { policy, chains, slots, .. } = self;
        let is_evictable = |slot: &BlockId| is_unpinned_leaf(chains, slots, *slot);
        let evictable = candidates.iter().copied().filter(is_evictable);
        with_policy!(policy, policy => policy.retry(evictable));
    }

    /// Reserves exactly `num_slots` slots, evicting for them.
    ///
    /// # Errors
    /// [`Error::NoRoomForImage`], and nothing changed, where there are too few.
    pub(in crate::offload) fn reserve_all(&mut self, num_slots: usize) -> Result<Vec<BlockId>> {
        let available = self.slots.pool.num_free() + self.num_evictable();
        if num_slots > available {
            return Err(Error::NoRoomForImage { needed: num_slots, available });
        }
        self.reserve(num_slots)
    }

    /// Number of resident slots that can be evicted one after the other: all but those that are
    /// pinned, and those above such a slot or one that a store fills.
    fn num_evictable(&self) -> usize {
        let mut stays = vec![false; self.slots.len() + 1];
        stays[0] = true;
        let must_stay =
            |&slot: &BlockId| self.slots.pool.num_pins(slot) > 0 || self.slots.is_filling(slot);
        for slot in self.slots.iter().filter(must_stay) {
            let mut at = slot;
            while !std::mem::replace(&mut stays[at.index()], true) {
                at = self.chains.parent(at);
            }
        }
        let is_evictable = |slot: &BlockId| self.policy.contains(*slot) && !stays[slot.index()];
        self.slots.iter().filter(is_evictable).count()
    }

    /// The most recent resident slots, at most `max_slots` of them.
    pub(in crate::offload) fn most_recent(&self, max_slots: usize) -> Vec<BlockId> {
        with_policy!(&self.policy, policy => {
            let queues: Vec<&FreeQueue> = policy.queues().collect();
            let newest = queues.iter().rev().flat_map(|queue| {
                let before = |&slot: &BlockId| Some(queue.prev(slot));
                successors(before(&BlockId::NULL), before).take_while(|slot| !slot.is_null())
            });
            newest.take(max_slots).collect()
        })
    }

    /// Slots that [`reserve`](Self::reserve) could give, at most `num_slots`: the empty ones, then
    /// those to evict first. Leaves out pinned slots, and `kept` and all slots above them.
    pub(in crate::offload) fn first_places(
        &self,
        num_slots: usize,
        kept: &[BlockId],
    ) -> Vec<BlockId> {
        let mut stays = vec![false; self.slots.len() + 1];
        stays[0] = true;
        for &slot in kept {
            let mut at = slot;
            while !std::mem::replace(&mut stays[at.index()], true) {
                at = self.chains.parent(at);
            }
        }
        let may_go = |slot: &BlockId| !stays[slot.index()] && self.slots.pool.num_pins(*slot) == 0;
        with_policy!(&self.policy, policy => {
            let oldest = policy.queues().flat_map(FreeQueue::iter);
            self.slots.pool.free_order().chain(oldest).filter(may_go).take(num_slots).collect()
        })
    }

    /// Reserves at most `num_slots` slots, evicting for them. The caller fills each, or gives it
    /// back.
    pub(in crate::offload) fn reserve(&mut self, num_slots: usize) -> Result<Vec<BlockId>> {
        self.make_room(num_slots)?;
        self.slots.take(num_slots)
    }

    /// Evicts until `num_slots` are empty, or no slot can be evicted.
    ///
    /// A parent that becomes a leaf is evicted in turn if the search has not passed it yet. Else it
    /// waits until the search has come to the end, or for the next call. So which slots go depends
    /// on the policy's order and the chains alone, not on what earlier searches have skipped.
    fn make_room(&mut self, num_slots: usize) -> Result<()> {
        let num_missing = num_slots.saturating_sub(self.slots.pool.num_free());
        let mut victims = Vec::with_capacity(num_missing.min(self.num_resident()));
        let mut waiting = BTreeSet::new();
        while victims.len() < num_missing {
            let Self { policy, chains, slots, .. } = self;
            let is_evictable =
                |slot| is_unpinned_leaf(chains, slots, slot) && !waiting.contains(&slot);
            let victim = with_policy!(policy, policy => policy.victim(is_evictable));
            let Some(slot) = victim else {
                if waiting.is_empty() {
                    break;
                }
                self.retry(&Vec::from_iter(std::mem::take(&mut waiting)));
                continue;
            };
            let parent = self.chains.parent(slot);
            if with_policy!(&self.policy, policy => policy.has_passed(parent, slot)) {
                waiting.insert(parent);
            }
            self.forget(slot);
            victims.push(slot);
        }
        self.retry(&Vec::from_iter(waiting));
        debug_assert!(
            victims.len() == num_missing || self.num_evictable() == 0,
            "the search ends when nothing can be evicted"
        );
        // Empty slots are reserved in the order in which they became empty: ascending order makes
        // long runs.
        victims.sort_unstable();
        if let Some(evicted) = &mut self.evicted {
            evicted.extend(victims.iter().filter_map(|&slot| self.slots.key(slot)));
        }
        self.slots.pool.evict(&victims)?;
        self.slots.pool.release(victims.iter().copied());
        self.num_evicted += victims.len();
        Ok(())
    }
}
