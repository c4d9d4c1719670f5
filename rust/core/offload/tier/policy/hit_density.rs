//! Fewest hits to be expected for the time that it stays, first.
//!
//! ```text
//!                  a hit                          each order: least recent ... most recent
//!   [ new order ] -------> [ used order ]
//!      ^   |                  ^     |             victim: the first that may go of either order,
//!   stored | evicted          |     | evicted       the older one if it is new, or else the one
//!      |   v                  |     v               whose density at its age is lower
//!   nothing   [ ghosts ] ------ stored again
//! ```
//!
//! Each order keeps two histograms over age: hits, a return from the ghosts included, and ends,
//! that is ghosts that grew too old. From these follows the density of an age, as in LHD
//! (Beckmann, Chen, Cidon: LHD, NSDI 2018): hits to come over time to be spent, of all that has
//! reached it. The orders and their ghosts are those of 2Q (Johnson, Shasha, VLDB 1994) and ARC
//! (Megiddo, Modha, FAST 2003).
//!
//! What differs. Of LHD: nothing is sampled, as within an order the least recent is taken; a ghost
//! counts as if it had stayed, so that what is learned does not depend on what was evicted; and a
//! used slot never goes before a new one that is as old, which bounds what a wrong density can
//! cost. Of 2Q and ARC: the orders have no target sizes. Time is counted in blocks stored.

use crate::error::{Error, Result};
use crate::ids::BlockId;
use crate::key::BlockKey;

use super::Policy;
use super::ghosts::{Ghost, Ghosts, fingerprint};
use super::order::EvictionOrder;

/// The order of slots that were stored and not hit since.
const NEW: usize = 0;
/// The order of slots that were hit, or that came back.
const USED: usize = 1;

// These were chosen on the Mooncake traces, for which benches/results/policies.txt has the figures.
// Neighbouring values do nearly as well: 2.5 to 4 ghosts, 1 to 4 lessons, a decay of 0.9 to 0.97.

/// Ages are told apart up to 8 times the tier's size, in eighths of it.
pub(super) const NUM_BINS: usize = 64;
const BINS_PER_SIZE: u64 = 8;
/// Evictions of which ghosts are kept, per slot.
const GHOSTS_PER_SLOT: u32 = 3;
/// Densities are computed so often in the time that it takes to fill the tier.
const LESSONS_PER_SIZE: u32 = 2;
/// What is left of the histograms after each time.
const DECAY: f64 = 0.95;

/// The two orders of resident slots, the ghosts of those that went, and what was learned. 93 bytes
/// a slot. All is O(1), but a victim is looked for past slots that may not go.
#[derive(Clone, Debug)]
pub(in crate::offload::tier) struct HitDensity {
    /// [`NEW`] and [`USED`], by last rank.
    pub(super) orders: [EvictionOrder; 2],
    pub(super) densities: [Density; 2],
    pub(super) ghosts: Ghosts,
    /// Of the resident slots' keys.
    pub(super) fingerprints: Vec<u64>,
    /// When a slot was last ranked.
    pub(super) times: Vec<u32>,
    /// Blocks ever stored. It wraps: ages are differences.
    pub(super) clock: u32,
}

impl HitDensity {
    /// For slots `1..num_blocks`, none of them resident yet.
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

    /// The order in which `slot` stands.
    #[inline]
    fn order(&self, slot: BlockId) -> Option<usize> {
        [NEW, USED].into_iter().find(|&order| self.orders[order].contains(slot))
    }

    /// Blocks stored since `time`.
    fn age(&self, time: u32) -> u32 {
        self.clock.wrapping_sub(time)
    }

    fn bin(&self, time: u32) -> usize {
        let bin = u64::from(self.age(time)) * BINS_PER_SIZE / u64::from(self.num_slots().max(1));
        usize::try_from(bin).map_or(NUM_BINS - 1, |bin| bin.min(NUM_BINS - 1))
    }

    /// Whether `slot` was last ranked no later than `other`.
    fn is_as_old(&self, slot: BlockId, other: BlockId) -> bool {
        self.age(self.times[slot.index()]) >= self.age(self.times[other.index()])
    }

    /// Hits to be expected of a slot for the time that it stays from now on.
    fn density(&self, order: usize, slot: BlockId) -> f64 {
        self.densities[order].at[self.bin(self.times[slot.index()])]
    }

    #[inline]
    fn append(&mut self, order: usize, slot: BlockId) {
        self.orders[order].push_back(slot);
        self.times[slot.index()] = self.clock;
    }
}

impl Policy for HitDensity {
    const SLOT_BYTES: usize =
        2 * EvictionOrder::SLOT_BYTES + 8 + 4 + GHOSTS_PER_SLOT as usize * Ghosts::GHOST_BYTES;

    fn stored<'a>(&mut self, slots: impl Iterator<Item = (BlockId, &'a BlockKey)>) {
        for (slot, key) in slots {
            self.clock = self.clock.wrapping_add(1);
            let fingerprint = fingerprint(key);
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

    fn ranked(&mut self, slots: impl Iterator<Item = (BlockId, bool)>) {
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

    fn victim(&mut self, may_go: impl Fn(BlockId) -> bool) -> Option<BlockId> {
        let new = self.orders[NEW].first_that_may_go(&may_go);
        if let Some(new) = new {
            // If it is as old as the first used slot it is as old as each: no need to look for one
            // that may go, past those whose children stand in the other order.
            let first_used = self.orders[USED].first();
            if first_used.is_null() || self.is_as_old(new, first_used) {
                return Some(new);
            }
        }
        let used = self.orders[USED].first_that_may_go(&may_go);
        let (Some(new), Some(used)) = (new, used) else { return new.or(used) };
        let is_new_to_go =
            self.is_as_old(new, used) || self.density(NEW, new) < self.density(USED, used);
        Some(if is_new_to_go { new } else { used })
    }

    #[inline]
    fn has_passed(&self, slot: BlockId) -> bool {
        self.orders.iter().any(|order| order.has_passed(slot))
    }

    #[inline]
    fn may_go_again(&mut self, slots: impl Iterator<Item = BlockId> + Clone) {
        for order in &mut self.orders {
            order.may_go_again(slots.clone());
        }
    }

    fn clear(&mut self) {
        self.orders.iter_mut().for_each(EvictionOrder::clear);
        self.densities = [Density::NOTHING, Density::NOTHING];
        self.ghosts.clear();
        self.clock = 0;
    }

    fn len(&self) -> usize {
        self.orders.iter().map(EvictionOrder::len).sum()
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
        may_go: impl Fn(BlockId) -> bool,
    ) -> Result<()> {
        let broken = |what: String| Err(Error::Broken(format!("hit density: {what}")));
        self.ghosts.check()?;
        let max_ghosts = self.num_slots() as usize * GHOSTS_PER_SLOT as usize;
        if self.ghosts.len() > max_ghosts {
            return broken(format!("{} ghosts, at most {max_ghosts}", self.ghosts.len()));
        }
        for order in &self.orders {
            order.check(&may_go)?;
            let mut age = u32::MAX;
            for slot in order.iter() {
                if self.orders.iter().filter(|order| order.contains(slot)).count() != 1 {
                    return broken(format!("slot {slot} stands in both orders"));
                }
                if self.age(self.times[slot.index()]) > age {
                    return broken(format!("slot {slot} is older than the one before it"));
                }
                age = self.age(self.times[slot.index()]);
                let print = self.fingerprints[slot.index()];
                if key(slot).is_none_or(|key| fingerprint(&key) != print) {
                    return broken(format!("slot {slot} is resident with another key"));
                }
                if self.ghosts.contains(print) {
                    return broken(format!("slot {slot} is resident and its key a ghost"));
                }
            }
        }
        Ok(())
    }
}

/// What was learned of the slots in one order, by the age at which they were hit or given up.
#[derive(Clone, Debug)]
pub(super) struct Density {
    pub(super) hits: [f64; NUM_BINS],
    pub(super) ends: [f64; NUM_BINS],
    /// Hits to come, per bin of time to be spent.
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
