//! The slot with the fewest expected hits per unit of time first.
//!
//! ```text
//!                  a hit                          each order: least recent ... most recent
//!   [ new order ] -------> [ used order ]
//!      ^   |                  ^     |             victim: of the first evictable slots of the two
//!   stored | evicted          |     | evicted       orders, the new one if it is as old, else the
//!      |   v                  |     v               one whose density at its age is lower
//!   nothing   [ ghosts ] ------ stored again
//! ```
//!
//! Each order keeps two histograms over age: hits (returns from the ghosts included) and ends
//! (ghosts that became too old). They give the density of an age, as in LHD (Beckmann, Chen, Cidon:
//! LHD, NSDI 2018): future hits divided by future time, over all slots that reached the age. The
//! orders and their ghosts are those of 2Q (Johnson, Shasha, VLDB 1994) and ARC (Megiddo, Modha,
//! FAST 2003).
//!
//! Differences from LHD: it samples nothing, because the victim of an order is its least recent
//! slot. A ghost counts as if it had stayed, so what is learned does not depend on evictions. A
//! used slot is never evicted before a new slot of its age, which bounds the cost of a wrong
//! density. Difference from 2Q and ARC: the orders have no target sizes. Time is counted in stored
//! blocks.

use minicbor::{Decode, Encode};

use crate::error::{Error, Result};
use crate::ids::BlockId;
use crate::key::BlockKey;
use crate::pool::FreeQueue;

use super::Policy;
use super::ghosts::{Ghost, Ghosts, fingerprint};
use super::order::EvictionOrder;
use super::parts::parts;

/// The order of slots that were not hit since their store.
const NEW: usize = 0;
/// The order of slots that were hit, or that were stored again.
const USED: usize = 1;

// These values were chosen on the Mooncake traces; benches/results/policies.txt has the figures.
// Neighbouring values do nearly as well: 2.5 to 4 ghosts, 1 to 4 lessons, a decay of 0.9 to 0.97.

/// Bins of age: up to 8 times the tier's size, in eighths of it.
pub(super) const NUM_BINS: usize = 64;
const BINS_PER_SIZE: u64 = 8;
/// Number of evictions per slot whose ghosts are kept.
const GHOSTS_PER_SLOT: u32 = 3;
/// How often densities are computed in the time that fills the tier.
const LESSONS_PER_SIZE: u32 = 2;
/// The factor on all histograms after each lesson.
const DECAY: f64 = 0.95;

/// The two orders of resident slots, the ghosts of evicted blocks, and the learned densities. 93
/// bytes a slot. All is O(1), except that the search for a victim skips slots that are not
/// evictable.
#[derive(Clone, Debug)]
pub(in crate::offload::tier) struct HitDensity {
    /// [`NEW`] and [`USED`], least recent first.
    pub(super) orders: [EvictionOrder; 2],
    pub(super) densities: [Density; 2],
    pub(super) ghosts: Ghosts,
    /// Fingerprints of the resident slots' keys.
    pub(super) fingerprints: Vec<u64>,
    /// When a slot last became recent.
    pub(super) times: Vec<u32>,
    /// Number of blocks ever stored. It may wrap, because ages are differences.
    pub(super) clock: u32,
}

impl HitDensity {
    /// A policy for slots `1..num_blocks`, none of them resident yet.
    pub(super) fn new(num_blocks: u32) -> Self {
        let num_ghosts = (num_blocks - 1).saturating_mul(GHOSTS_PER_SLOT).clamp(1, u32::MAX - 1);
        Self {
            orders: [EvictionOrder::new(num_blocks), EvictionOrder::new(num_blocks)],
            densities: [Density::NOTHING, Density::NOTHING],
            ghosts: Ghosts::new(num_ghosts),
            fingerprints: vec![0; num_blocks as usize],
            times: vec![0; num_blocks as usize],
            clock: 0,
        }
    }

    fn num_slots(&self) -> u32 {
        u32::try_from(self.times.len() - 1).unwrap_or(u32::MAX)
    }

    /// The order that contains `slot`.
    #[inline]
    fn order(&self, slot: BlockId) -> Option<usize> {
        [NEW, USED].into_iter().find(|&order| self.orders[order].queue().contains(slot))
    }

    /// Number of blocks stored since `time`.
    fn age(&self, time: u32) -> u32 {
        self.clock.wrapping_sub(time)
    }

    fn bin(&self, time: u32) -> usize {
        let bin = u64::from(self.age(time)) * BINS_PER_SIZE / u64::from(self.num_slots().max(1));
        usize::try_from(bin).map_or(NUM_BINS - 1, |bin| bin.min(NUM_BINS - 1))
    }

    /// Whether `slot` is no more recent than `other`.
    fn is_as_old(&self, slot: BlockId, other: BlockId) -> bool {
        self.age(self.times[slot.index()]) >= self.age(self.times[other.index()])
    }

    /// Expected hits of a slot per unit of time from now on.
    fn density(&self, order: usize, slot: BlockId) -> f64 {
        self.densities[order].at[self.bin(self.times[slot.index()])]
    }

    #[inline]
    fn append(&mut self, order: usize, slot: BlockId) {
        self.orders[order].push_back_all(std::iter::once(slot));
        self.times[slot.index()] = self.clock;
    }
}

impl Policy for HitDensity {
    const SLOT_BYTES: usize =
        2 * EvictionOrder::SLOT_BYTES + 8 + 4 + GHOSTS_PER_SLOT as usize * Ghosts::GHOST_BYTES;

    fn stored(
        &mut self,
        slots: impl Iterator<Item = BlockId>,
        key: impl Fn(BlockId) -> Option<BlockKey>,
    ) {
        for slot in slots {
            let Some(key) = key(slot) else { continue };
            self.clock = self.clock.wrapping_add(1);
            let fingerprint = fingerprint(&key);
            let ghost = self.ghosts.take(fingerprint);
            if let Some(Ghost { time, order }) = ghost {
                let bin = self.bin(time);
                self.densities[usize::from(order)].hits[bin] += 1.0;
            }
            self.fingerprints[slot.index()] = fingerprint;
            self.append(if ghost.is_some() { USED } else { NEW }, slot);
            if self.clock.is_multiple_of((self.num_slots() / LESSONS_PER_SIZE).max(1)) {
                self.densities.iter_mut().for_each(Density::learn);
            }
        }
    }

    fn make_recent(&mut self, slots: impl Iterator<Item = (BlockId, bool)>) {
        for (slot, is_hit) in slots {
            let Some(order) = self.order(slot) else { continue };
            if is_hit {
                let bin = self.bin(self.times[slot.index()]);
                self.densities[order].hits[bin] += 1.0;
            }
            self.orders[order].remove(slot);
            self.append(if is_hit { USED } else { order }, slot);
        }
    }

    fn make_chains_recent(&mut self, tails: &[BlockId], parent: impl Fn(BlockId) -> BlockId) {
        let parts = parts(tails, self.times.len(), parent, |slot| slot);
        self.make_recent(parts.into_iter().flatten().map(|(slot, _)| (slot, false)));
    }

    fn make_least_recent(&mut self, slot: BlockId) {
        let Some(order) = self.order(slot) else { return };
        let heads = self.orders.iter().map(|order| order.queue().next(BlockId::NULL));
        let times = heads.filter(|head| !head.is_null()).map(|head| self.times[head.index()]);
        self.times[slot.index()] = times.max_by_key(|&time| self.age(time)).unwrap_or(self.clock);
        self.orders[order].remove(slot);
        self.orders[NEW].push_front(slot);
    }

    fn removed(&mut self, slot: BlockId) {
        let Some(order) = self.order(slot) else { return };
        self.orders[order].remove(slot);
        let ghost = Ghost { time: self.times[slot.index()], order: u8::from(order == USED) };
        let oldest = self.ghosts.push(self.fingerprints[slot.index()], ghost);
        if let Some(Ghost { time, order }) = oldest {
            let bin = self.bin(time);
            self.densities[usize::from(order)].ends[bin] += 1.0;
        }
    }

    fn victim(&mut self, is_evictable: impl Fn(BlockId) -> bool) -> Option<BlockId> {
        let new = self.orders[NEW].first_evictable(&is_evictable);
        if let Some(new) = new {
            // If it is as old as the first used slot, it is as old as every used slot. Then a
            // search in that order, past slots whose children are in the other order, is needless.
            let first_used = self.orders[USED].first();
            if first_used.is_null() || self.is_as_old(new, first_used) {
                return Some(new);
            }
        }
        let used = self.orders[USED].first_evictable(&is_evictable);
        let (Some(new), Some(used)) = (new, used) else { return new.or(used) };
        let is_new_to_go =
            self.is_as_old(new, used) || self.density(NEW, new) < self.density(USED, used);
        Some(if is_new_to_go { new } else { used })
    }

    #[inline]
    fn has_passed(&self, slot: BlockId, victim: BlockId) -> bool {
        // A search in one order need not have looked at the other, so what was skipped there tells
        // nothing.
        self.order(slot).is_some_and(|order| {
            self.order(victim) != Some(order) || self.orders[order].has_skipped(slot)
        })
    }

    #[inline]
    fn retry(&mut self, slots: impl Iterator<Item = BlockId> + Clone) {
        for order in &mut self.orders {
            order.retry(slots.clone());
        }
    }

    fn clear(&mut self) {
        self.orders.iter_mut().for_each(EvictionOrder::clear);
        self.densities = [Density::NOTHING, Density::NOTHING];
        self.ghosts.clear();
        self.clock = 0;
    }

    fn len(&self) -> usize {
        self.orders.iter().map(|order| order.queue().len()).sum()
    }

    fn queues(&self) -> impl Iterator<Item = &FreeQueue> {
        self.orders.iter().map(EvictionOrder::queue)
    }

    fn contains(&self, slot: BlockId) -> bool {
        self.order(slot).is_some()
    }

    #[cfg(test)]
    fn memory_bytes(&self) -> usize {
        self.orders.iter().map(EvictionOrder::memory_bytes).sum::<usize>()
            + self.ghosts.memory_bytes()
            + self.fingerprints.capacity() * size_of::<u64>()
            + self.times.capacity() * size_of::<u32>()
    }

    fn check(
        &self,
        key: impl Fn(BlockId) -> Option<BlockKey>,
        _: impl Fn(BlockId) -> BlockId,
        is_evictable: impl Fn(BlockId) -> bool,
    ) -> Result<()> {
        let broken = |what: String| Err(Error::Broken(format!("hit density: {what}")));
        self.ghosts.check()?;
        let max_ghosts = self.num_slots() as usize * GHOSTS_PER_SLOT as usize;
        if self.ghosts.len() > max_ghosts {
            return broken(format!("{} ghosts, at most {max_ghosts}", self.ghosts.len()));
        }
        for order in &self.orders {
            order.check(&is_evictable)?;
            let mut age = u32::MAX;
            for slot in order.queue().iter() {
                if self.orders.iter().filter(|order| order.queue().contains(slot)).count() != 1 {
                    return broken(format!("slot {slot} is in both orders"));
                }
                if self.age(self.times[slot.index()]) > age {
                    return broken(format!("slot {slot} is older than the one before it"));
                }
                age = self.age(self.times[slot.index()]);
                let print = self.fingerprints[slot.index()];
                if key(slot).is_none_or(|key| fingerprint(&key) != print) {
                    return broken(format!("slot {slot} is resident with another key"));
                }
                if self.ghosts.find(print).is_some() {
                    return broken(format!("slot {slot} is resident, but its key is a ghost"));
                }
            }
        }
        Ok(())
    }
}

/// What was learned about the slots in one order, by the age at which they were hit or ended.
#[derive(Clone, Debug, Encode, Decode)]
pub(in crate::offload) struct Density {
    #[n(0)]
    pub(super) hits: [f64; NUM_BINS],
    #[n(1)]
    pub(super) ends: [f64; NUM_BINS],
    /// Future hits per bin of future time.
    #[n(2)]
    pub(super) at: [f64; NUM_BINS],
}

impl Density {
    const NOTHING: Self =
        Self { hits: [0.0; NUM_BINS], ends: [0.0; NUM_BINS], at: [0.0; NUM_BINS] };

    fn learn(&mut self) {
        let (mut hits, mut reached, mut spent) = (0.0, 0.0, 0.0);
        for bin in (0..NUM_BINS).rev() {
            hits += self.hits[bin];
            reached += self.hits[bin] + self.ends[bin];
            spent += reached;
            self.at[bin] = if spent > 0.0 { hits / spent } else { 0.0 };
        }
        for count in self.hits.iter_mut().chain(&mut self.ends) {
            *count *= DECAY;
        }
    }
}

#[cfg(test)]
#[path = "hit_density_tests.rs"]
mod tests;
