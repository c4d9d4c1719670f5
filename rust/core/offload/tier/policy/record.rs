//! A policy as plain data, for snapshots.

use minicbor::{Decode, Encode};

use crate::error::Result;
use crate::ids::BlockId;
use crate::key::BlockKey;
use crate::ledger::damaged;

use super::AnyPolicy;
use super::ghosts::{Ghost, Ghosts, fingerprint};
use super::hit_density::Density;
use super::order::EvictionOrder;

/// A policy as plain data; slots in eviction order.
#[derive(Clone, Debug, Encode, Decode)]
#[expect(clippy::large_enum_variant, reason = "there is one at a time, and not for long")]
pub(in crate::offload) enum PolicyRecord {
    #[n(0)]
    Lru {
        #[n(0)]
        order: Vec<BlockId>,
    },
    #[n(1)]
    HitDensity {
        #[n(0)]
        orders: [Vec<BlockId>; 2],
        /// When each last became recent.
        #[n(1)]
        times: [Vec<u32>; 2],
        #[n(2)]
        densities: [Density; 2],
        /// Place in the ring, fingerprint, time and order; the oldest first.
        #[n(3)]
        ghosts: Vec<(u32, u64, u32, u8)>,
        /// The place in the ring that was written last.
        #[n(4)]
        last: u32,
        #[n(5)]
        clock: u32,
    },
}

impl AnyPolicy {
    /// What a snapshot keeps.
    pub(in crate::offload) fn to_record(&self) -> PolicyRecord {
        match self {
            Self::Lru(lru) => PolicyRecord::Lru { order: lru.order.queue().iter().collect() },
            Self::HitDensity(policy) => {
                let orders = policy.orders.each_ref().map(EvictionOrder::queue);
                let time = |slot: BlockId| policy.times[slot.index()];
                PolicyRecord::HitDensity {
                    orders: orders.map(|order| order.iter().collect()),
                    times: orders.map(|order| order.iter().map(time).collect()),
                    densities: policy.densities.clone(),
                    ghosts: policy.ghosts.kept().collect(),
                    last: policy.ghosts.last,
                    clock: policy.clock,
                }
            }
        }
    }

    /// Fills this new policy from the record of another of its kind. `key` returns the key of a
    /// resident slot, and None for other slots.
    pub(in crate::offload) fn restore(
        &mut self,
        record: PolicyRecord,
        key: impl Fn(BlockId) -> Option<BlockKey>,
    ) -> Result<()> {
        match (self, record) {
            (Self::Lru(lru), PolicyRecord::Lru { order }) => fill(&mut lru.order, &order, &key)?,
            (
                Self::HitDensity(policy),
                PolicyRecord::HitDensity { orders, times, densities, ghosts, last, clock },
            ) => {
                for (at, (order, times)) in orders.iter().zip(&times).enumerate() {
                    fill(&mut policy.orders[at], order, &key)?;
                    if times.len() != order.len() {
                        return damaged(
                            "a list of slots and a list of their times differ in length",
                        );
                    }
                    for (slot, &time) in order.iter().zip(times) {
                        policy.times[slot.index()] = time;
                        if let Some(key) = key(*slot) {
                            policy.fingerprints[slot.index()] = fingerprint(&key);
                        }
                    }
                }
                if !densities.iter().all(Density::is_sound) {
                    return damaged("a histogram of hits has a wrong value");
                }
                policy.densities = densities;
                policy.ghosts.refill(&ghosts, last)?;
                policy.clock = clock;
            }
            _ => return damaged("its eviction order belongs to another policy"),
        }
        Ok(())
    }
}

/// Fills an empty order with resident slots, each once.
fn fill(
    queue: &mut EvictionOrder,
    order: &[BlockId],
    key: impl Fn(BlockId) -> Option<BlockKey>,
) -> Result<()> {
    for &slot in order {
        if key(slot).is_none() || queue.queue().contains(slot) {
            return damaged("an eviction order has an empty slot, or a slot twice");
        }
        queue.push_back_all(std::iter::once(slot));
    }
    Ok(())
}

/// 2^53: an `f64` represents every whole number up to it.
const MAX_WHOLE: f64 = 9_007_199_254_740_992.0;

impl Density {
    /// Whether each value is a count: a whole number that decays. Above this, sums may become
    /// infinite.
    fn is_sound(&self) -> bool {
        let values = self.hits.iter().chain(&self.ends).chain(&self.at);
        values.into_iter().all(|value| (0.0..=MAX_WHOLE).contains(value))
    }
}

impl Ghosts {
    /// Place, fingerprint, time and order of each, the oldest first.
    fn kept(&self) -> impl Iterator<Item = (u32, u64, u32, u8)> {
        let num_places = u32::try_from(self.fingerprints.len() - 1).unwrap_or(u32::MAX);
        let places = (self.last + 1..=num_places).chain(1..=self.last);
        places.filter(|&place| self.fingerprints[place as usize] != 0).map(|place| {
            let at = place as usize;
            (place, self.fingerprints[at], self.times[at], self.orders[at])
        })
    }

    /// Fills this ring, which must be empty, with ghosts in the order of [`Ghosts::kept`].
    fn refill(&mut self, ghosts: &[(u32, u64, u32, u8)], last: u32) -> Result<()> {
        let num_places = self.fingerprints.len() - 1;
        if last as usize > num_places {
            return damaged("the ring of evicted blocks has another size");
        }
        for &(place, fingerprint, time, order) in ghosts {
            let is_sound = (1..=num_places).contains(&(place as usize))
                && self.fingerprints[place as usize] == 0
                && fingerprint & 1 == 1
                && order <= 1
                && self.find(fingerprint).is_none();
            if !is_sound {
                return damaged("an evicted block is listed twice, or at no place");
            }
            self.put(place, fingerprint, Ghost { time, order });
        }
        self.last = last;
        Ok(())
    }
}
