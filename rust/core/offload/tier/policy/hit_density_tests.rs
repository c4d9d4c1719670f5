//! The policy's mechanisms one by one, and the whole policy beside a naive model.
#![expect(
    clippy::unwrap_used,
    clippy::float_cmp,
    reason = "a test fails by panicking; the model does the same sums"
)]

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use proptest::collection::vec;
use proptest::prelude::*;

use crate::group::{Attention, Group};
use crate::ids::GroupId;
use crate::key::{Hashes, HashesBuilder};
use crate::offload::tier::policy::AnyPolicy;
use crate::offload::{EvictionPolicy, OffloadConfig, OffloadScheduler, Progress};

use super::*;

fn key(name: u8) -> BlockKey {
    BlockKey { hash: [name; 32], group: GroupId(u16::from(name % 2)) }
}

/// A policy of so many slots, each holding the key of its number.
struct Tier(HitDensity, BTreeMap<u32, u8>);

impl Tier {
    fn new(num_slots: u32) -> Self {
        Self(HitDensity::new(num_slots + 1), BTreeMap::new())
    }

    fn store(&mut self, slot: u32, name: u8) {
        self.0.stored(std::iter::once(BlockId(slot)), |_| Some(key(name)));
        self.1.insert(slot, name);
        self.check();
    }

    fn make_recent(&mut self, slots: &[u32], is_hit: bool) {
        self.0.make_recent(slots.iter().map(|&slot| (BlockId(slot), is_hit)));
        self.check();
    }

    fn remove(&mut self, slot: u32) {
        self.0.removed(BlockId(slot));
        self.1.remove(&slot);
        self.check();
    }

    fn victim(&mut self) -> Option<u32> {
        self.0.victim(|_| true).map(|slot| slot.0)
    }

    fn order(&self, slot: u32) -> Option<usize> {
        self.0.order(BlockId(slot))
    }

    fn check(&self) {
        let key = |slot: BlockId| self.1.get(&slot.0).copied().map(key);
        self.0.check(key, |_| BlockId::NULL, |_| false).unwrap();
        assert_eq!(self.0.len(), self.1.len());
        assert!(self.1.keys().all(|&slot| self.0.contains(BlockId(slot))));
    }
}

/// Makes the densities at every age: of new slots `new`, of used ones `used`.
fn learned(tier: &mut Tier, new: f64, used: f64) {
    tier.0.densities[NEW].at = [new; NUM_BINS];
    tier.0.densities[USED].at = [used; NUM_BINS];
}

#[test]
fn without_lessons_the_least_recent_slot_is_the_victim() {
    let mut tier = Tier::new(8);
    (1..=3).for_each(|slot| tier.store(slot, 10 + u8::try_from(slot).unwrap()));
    tier.make_recent(&[1], true);
    let mut order = Vec::new();
    while let Some(slot) = tier.victim() {
        order.push(slot);
        tier.remove(slot);
    }
    assert_eq!(order, [2, 3, 1]);
}

#[test]
fn a_hit_moves_a_slot_to_the_used_order_for_good() {
    let mut tier = Tier::new(8);
    tier.store(1, 1);
    tier.make_recent(&[1], false);
    assert_eq!(tier.order(1), Some(NEW));
    tier.make_recent(&[1], true);
    tier.make_recent(&[1], false);
    assert_eq!(tier.order(1), Some(USED));
    tier.make_recent(&[7], true);
    assert_eq!(tier.order(7), None, "not resident");
}

#[test]
fn a_block_that_is_stored_again_is_used() {
    let mut tier = Tier::new(2);
    tier.store(1, 1);
    tier.remove(1);
    tier.store(2, 1);
    tier.store(1, 2);
    assert_eq!((tier.order(2), tier.order(1)), (Some(USED), Some(NEW)));
    assert!(tier.0.densities[NEW].hits.iter().sum::<f64>() > 0.0, "a return counts as a hit");
}

/// The guard: whatever the densities are, a new slot of the same age goes first.
#[test]
fn a_used_slot_is_never_evicted_before_an_older_new_slot() {
    let mut tier = Tier::new(8);
    tier.store(1, 1);
    tier.store(2, 2);
    tier.make_recent(&[2], true);
    learned(&mut tier, 1.0, 0.0);
    assert_eq!(tier.victim(), Some(1));

    // The oldest used slot does not count if it is not evictable.
    let mut tier = Tier::new(8);
    tier.store(1, 1);
    tier.make_recent(&[1], true);
    tier.store(2, 2);
    tier.store(3, 3);
    tier.make_recent(&[3], true);
    learned(&mut tier, 1.0, 0.0);
    let victim = tier.0.victim(|slot| slot.0 != 1);
    assert_eq!(victim, Some(BlockId(2)));
}

#[test]
fn an_older_used_slot_is_evicted_if_its_density_is_not_higher() {
    let mut tier = Tier::new(8);
    tier.store(1, 1);
    tier.make_recent(&[1], true);
    tier.store(2, 2);
    for (new, used, victim) in [(0.5, 0.4, 1), (0.5, 0.5, 1), (0.4, 0.5, 2)] {
        learned(&mut tier, new, used);
        assert_eq!(tier.victim(), Some(victim), "densities {new} and {used}");
    }
}

#[test]
fn a_ghost_that_is_too_old_counts_as_an_end() {
    let mut tier = Tier::new(1);
    for name in 1..=5 {
        tier.store(1, name);
        tier.remove(1);
    }
    assert_eq!(tier.0.ghosts.len(), 3);
    tier.store(1, 2);
    assert_eq!(tier.order(1), Some(NEW), "its ghost is gone");
    assert!(tier.0.densities[NEW].ends.iter().sum::<f64>() > 0.0);
    tier.remove(1);
    tier.store(1, 4);
    assert_eq!(tier.order(1), Some(USED), "its ghost is there");
}

#[test]
fn density_is_future_hits_divided_by_future_time() {
    let mut density = Density::NOTHING;
    (density.hits[0], density.hits[2], density.ends[3]) = (2.0, 1.0, 1.0);
    density.learn();
    // From bin 0 on: 3 hits; 4 slots spend one bin, 2 of them two more, 1 another one.
    assert_eq!(density.at[..5], [3.0 / 9.0, 1.0 / 5.0, 1.0 / 3.0, 0.0, 0.0]);
    assert_eq!((density.hits[0], density.ends[3]), (2.0 * DECAY, DECAY));
}

#[test]
fn searches_look_once_at_a_slot_that_is_not_evictable() {
    let mut tier = Tier::new(8);
    (1..=4).for_each(|slot| tier.store(slot, u8::try_from(slot).unwrap()));
    let looks = std::cell::Cell::new(0);
    let is_evictable = |slot: BlockId| {
        looks.set(looks.get() + 1);
        slot.0 > 2
    };
    for expected in [Some(3), Some(4), None, None] {
        let victim = tier.0.victim(is_evictable).map(|slot| slot.0);
        assert_eq!(victim, expected);
        if let Some(slot) = victim {
            tier.remove(slot);
        }
    }
    assert_eq!(looks.get(), 4);
    // A slot that was never skipped changes nothing. A skipped slot is looked at again.
    tier.0.retry([BlockId(4)].into_iter());
    assert_eq!((tier.0.victim(is_evictable), looks.get()), (None, 4));
    tier.0.retry([BlockId(2)].into_iter());
    assert_eq!((tier.0.victim(is_evictable), looks.get()), (None, 6));
}

#[test]
fn clear_restores_the_new_state() {
    let mut tier = Tier::new(2);
    (0..40).for_each(|name| {
        tier.store(1, name % 5);
        tier.remove(1);
    });
    tier.store(1, 1);
    tier.0.clear();
    tier.1.clear();
    tier.check();
    tier.store(2, 1);
    assert_eq!(tier.order(2), Some(NEW));
    assert_eq!((tier.0.clock, tier.0.ghosts.len()), (1, 0));
    assert!(tier.0.densities.iter().all(|density| density.at.iter().all(|&at| at == 0.0)));
}

/// Hits that a scheduler has reported to its policy, returns included.
fn num_hits(scheduler: &OffloadScheduler) -> f64 {
    let AnyPolicy::HitDensity(policy) = &scheduler.host.policy else { return f64::NAN };
    policy.densities.iter().flat_map(|density| density.hits).sum()
}

/// A request stores what it computed and leaves.
fn compute(scheduler: &mut OffloadScheduler, hashes: &Hashes, num_groups: usize) {
    let blocks: Vec<BlockId> = (1..=4).map(BlockId).collect();
    let new_blocks = vec![blocks.as_slice(); num_groups];
    let progress = Progress { request_id: "a", num_computed_tokens: 16, new_blocks: &new_blocks };
    scheduler.add("a", hashes).unwrap();
    if let Some(job) = scheduler.store(std::iter::once(progress), None).unwrap() {
        scheduler.complete(job.job_id, 0, true).unwrap();
    }
    scheduler.finish("a").unwrap();
}

/// A scheduler for groups of blocks of 4 tokens, and the hashes of a prompt of 4 blocks.
fn scheduler_of(attentions: &[Attention]) -> (OffloadScheduler, Hashes) {
    let group = |&attention| Group::new(attention, 4).unwrap();
    let groups: Vec<Group> = attentions.iter().map(group).collect();
    let policy = EvictionPolicy::HitDensity;
    let config = OffloadConfig { policy, ..OffloadConfig::new(100, groups) };
    let mut hashes = HashesBuilder::default();
    (1..=4).for_each(|name| hashes.push(&[name; 8]).unwrap());
    (OffloadScheduler::new(config).unwrap(), hashes.finish())
}

const WINDOW: Attention = Attention::SlidingWindow { window: 8 };

#[test]
fn a_request_that_starts_over_does_not_hit_what_it_has_used() {
    for attentions in [&[Attention::Full][..], &[Attention::Full, WINDOW]] {
        let (mut scheduler, hashes) = scheduler_of(attentions);
        let num_groups = u32::try_from(attentions.len()).unwrap();
        compute(&mut scheduler, &hashes, attentions.len());
        let found = |scheduler: &mut OffloadScheduler, name| {
            assert_eq!(scheduler.lookup(name, 0, 16).unwrap(), Some(16));
            scheduler.release(name).unwrap();
        };

        // The request computes two blocks itself, is preempted, and finds all four.
        scheduler.add("b", &hashes).unwrap();
        let blocks = [BlockId(5), BlockId(6)];
        let new_blocks = vec![&blocks[..]; attentions.len()];
        let progress =
            Progress { request_id: "b", num_computed_tokens: 8, new_blocks: &new_blocks };
        assert_eq!(scheduler.store(std::iter::once(progress), None).unwrap(), None);
        scheduler.restart("b").unwrap();
        assert_eq!(num_hits(&scheduler), 0.0);
        found(&mut scheduler, "b");
        // A snapshot keeps what it has used.
        let anew = OffloadScheduler::new(scheduler.config.clone()).unwrap();
        let mut restored = anew.restore(&scheduler.snapshot().unwrap()).unwrap();
        for scheduler in [&mut scheduler, &mut restored] {
            scheduler.restart("b").unwrap();
            assert_eq!(num_hits(scheduler), f64::from(2 * num_groups), "those of another");
        }

        // What it has hit before is no further hit.
        found(&mut scheduler, "b");
        scheduler.finish("b").unwrap();
        assert_eq!(num_hits(&scheduler), f64::from(2 * num_groups));

        // Another request hits all of them.
        scheduler.add("c", &hashes).unwrap();
        found(&mut scheduler, "c");
        scheduler.finish("c").unwrap();
        assert_eq!(num_hits(&scheduler), f64::from(6 * num_groups));
        scheduler.check().unwrap();
    }
}

#[test]
fn a_request_hits_each_block_once() {
    for attentions in [&[Attention::Full][..], &[Attention::Full, WINDOW]] {
        let num_groups = attentions.len();
        let (mut scheduler, hashes) = scheduler_of(attentions);
        compute(&mut scheduler, &hashes, num_groups);
        compute(&mut scheduler, &hashes, num_groups);
        assert_eq!(num_hits(&scheduler), 0.0, "no lookup, no hit");

        // The request asks twice, loads what it found, and leaves.
        scheduler.add("b", &hashes).unwrap();
        scheduler.lookup("b", 0, 16).unwrap();
        assert_eq!(scheduler.lookup("b", 0, 16).unwrap(), Some(16));
        let targets: Vec<Vec<BlockId>> = attentions
            .iter()
            .zip([4_u32, 2])
            .scan(0, |last, (_, num_blocks)| {
                *last += num_blocks;
                Some((*last - num_blocks + 1..=*last).map(BlockId).collect())
            })
            .collect();
        let job = scheduler.load("b", 16, &targets, None).unwrap();
        scheduler.complete(job.job_id, 0, true).unwrap();
        let num_resident = u32::try_from(scheduler.num_resident()).unwrap();
        assert_eq!(num_hits(&scheduler), f64::from(num_resident));
        scheduler.finish("b").unwrap();
        assert_eq!(num_hits(&scheduler), f64::from(num_resident));

        // A local hit counts too, when the request leaves.
        scheduler.add("c", &hashes).unwrap();
        assert_eq!(scheduler.lookup("c", 16, 16).unwrap(), Some(0));
        scheduler.release("c").unwrap();
        scheduler.finish("c").unwrap();
        assert_eq!(num_hits(&scheduler), f64::from(2 * num_resident));

        // A partial hit counts only its part.
        scheduler.add("d", &hashes).unwrap();
        assert_eq!(scheduler.lookup("d", 8, 8).unwrap(), Some(0));
        scheduler.finish("d").unwrap();
        let num_hit = u32::try_from(2 * num_groups).unwrap();
        assert_eq!(num_hits(&scheduler), f64::from(2 * num_resident + num_hit));
        scheduler.check().unwrap();
    }
}

/// The policy in vectors, with every search from the start.
struct Model {
    num_slots: u64,
    clock: u64,
    /// Slot, key, time of last use; least recent first.
    orders: [Vec<(u32, u8, u64)>; 2],
    /// One per eviction: key, time, order. None once the block is stored again.
    ghosts: VecDeque<Option<(u8, u64, usize)>>,
    hits: [[f64; NUM_BINS]; 2],
    ends: [[f64; NUM_BINS]; 2],
    densities: [[f64; NUM_BINS]; 2],
}

impl Model {
    fn new(num_slots: u32) -> Self {
        Self {
            num_slots: u64::from(num_slots),
            clock: 0,
            orders: [Vec::new(), Vec::new()],
            ghosts: VecDeque::new(),
            hits: [[0.0; NUM_BINS]; 2],
            ends: [[0.0; NUM_BINS]; 2],
            densities: [[0.0; NUM_BINS]; 2],
        }
    }

    fn bin(&self, time: u64) -> usize {
        let bin = (self.clock - time) * 8 / self.num_slots;
        usize::try_from(bin).unwrap().min(NUM_BINS - 1)
    }

    fn take(&mut self, slot: u32) -> Option<(usize, u8, u64)> {
        for (at, order) in self.orders.iter_mut().enumerate() {
            if let Some(place) = order.iter().position(|resident| resident.0 == slot) {
                let (_, name, time) = order.remove(place);
                return Some((at, name, time));
            }
        }
        None
    }

    fn store(&mut self, slot: u32, name: u8) {
        self.clock += 1;
        let is_its_own =
            |ghost: &&mut Option<(u8, u64, usize)>| matches!(ghost, Some((of, ..)) if *of == name);
        let ghost = self.ghosts.iter_mut().find(is_its_own).and_then(Option::take);
        if let Some((_, time, order)) = ghost {
            self.hits[order][self.bin(time)] += 1.0;
        }
        self.orders[usize::from(ghost.is_some())].push((slot, name, self.clock));
        if self.clock.is_multiple_of((self.num_slots / 2).max(1)) {
            self.learn();
        }
    }

    fn make_recent(&mut self, slot: u32, is_hit: bool) {
        let Some((mut order, name, time)) = self.take(slot) else { return };
        if is_hit {
            self.hits[order][self.bin(time)] += 1.0;
            order = 1;
        }
        self.orders[order].push((slot, name, self.clock));
    }

    fn remove(&mut self, slot: u32) {
        let Some((order, name, time)) = self.take(slot) else { return };
        self.ghosts.push_back(Some((name, time, order)));
        if self.ghosts.len() as u64 > 3 * self.num_slots
            && let Some((_, time, order)) = self.ghosts.pop_front().unwrap()
        {
            self.ends[order][self.bin(time)] += 1.0;
        }
    }

    fn learn(&mut self) {
        for order in 0..2 {
            for bin in 0..NUM_BINS {
                let (mut hits, mut reached, mut spent) = (0.0, 0.0, 0.0);
                for later in (bin..NUM_BINS).rev() {
                    hits += self.hits[order][later];
                    reached += self.hits[order][later] + self.ends[order][later];
                    spent += reached;
                }
                self.densities[order][bin] = if spent > 0.0 { hits / spent } else { 0.0 };
            }
            self.hits[order].iter_mut().for_each(|count| *count *= 0.95);
            self.ends[order].iter_mut().for_each(|count| *count *= 0.95);
        }
    }

    fn victim(&self, is_evictable: &BTreeSet<u32>) -> Option<u32> {
        let first = |order: usize| {
            let found =
                self.orders[order].iter().find(|resident| is_evictable.contains(&resident.0))?;
            Some((found.0, found.2, self.densities[order][self.bin(found.2)]))
        };
        match (first(0), first(1)) {
            (Some(new), Some(used)) if new.1 <= used.1 || new.2 < used.2 => Some(new.0),
            (Some(_), Some(used)) => Some(used.0),
            (new, used) => new.or(used).map(|found| found.0),
        }
    }
}

#[derive(Clone, Debug)]
enum Op {
    /// Stores these, each in an empty slot, and evicts for those that find none.
    Store(Vec<u8>),
    /// Makes the slots that hold these recent.
    Rank(Vec<u8>, bool),
    /// Removes a slot that is not a victim.
    Remove(u8),
    /// Evicts so many slots, none of them among these.
    Evict(usize, BTreeSet<u32>),
    Clear,
}

fn op() -> impl Strategy<Value = Op> {
    let names = || vec(0..24_u8, 1..5);
    prop_oneof![
        12 => names().prop_map(Op::Store),
        8 => (names(), any::<bool>()).prop_map(|(names, is_hit)| Op::Rank(names, is_hit)),
        1 => (0..24_u8).prop_map(Op::Remove),
        4 => (1..4_usize, prop::collection::btree_set(1..9_u32, 0..6))
            .prop_map(|(num_slots, pinned)| Op::Evict(num_slots, pinned)),
        1 => prop::bool::weighted(0.2)
            .prop_map(|clear| if clear { Op::Clear } else { Op::Store(vec![0]) }),
    ]
}

/// Both evict `num_slots` slots, and agree on each.
fn evict(tier: &mut Tier, model: &mut Model, num_slots: usize, is_evictable: &mut BTreeSet<u32>) {
    // Each time, another set of slots is pinned.
    tier.0.retry((1..=tier.0.num_slots()).map(BlockId));
    for _ in 0..num_slots {
        let victim = tier.0.victim(|slot| is_evictable.contains(&slot.0));
        assert_eq!(victim.map(|slot| slot.0), model.victim(is_evictable));
        let Some(BlockId(slot)) = victim else { return };
        is_evictable.remove(&slot);
        tier.remove(slot);
        model.remove(slot);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(
        std::env::var("KVSTOW_CASES").map_or(2_000, |cases| cases.parse().unwrap())
    ))]

    #[test]
    fn policy_and_model_choose_equal_victims(num_slots in 1..9_u32, ops in vec(op(), 1..120)) {
        let (mut tier, mut model) = (Tier::new(num_slots), Model::new(num_slots));
        for op in ops {
            let slot_of = |tier: &Tier, name| {
                tier.1.iter().find(|(_, of)| **of == name).map(|(&slot, _)| slot)
            };
            match op {
                Op::Store(names) => for name in names {
                    if slot_of(&tier, name).is_none() {
                        let mut all: BTreeSet<u32> = (1..=num_slots).collect();
                        let is_full = tier.1.len() == num_slots as usize;
                        evict(&mut tier, &mut model, usize::from(is_full), &mut all);
                        let slot = (1..=num_slots).find(|slot| !tier.1.contains_key(slot)).unwrap();
                        tier.store(slot, name);
                        model.store(slot, name);
                    }
                },
                Op::Rank(names, is_hit) => for name in names {
                    let slot = slot_of(&tier, name).unwrap_or(num_slots);
                    tier.make_recent(&[slot], is_hit);
                    model.make_recent(slot, is_hit);
                },
                Op::Remove(name) => if let Some(slot) = slot_of(&tier, name) {
                    tier.remove(slot);
                    model.remove(slot);
                },
                Op::Evict(num_victims, pinned) => {
                    let mut is_evictable =
                        (1..=num_slots).filter(|slot| !pinned.contains(slot)).collect();
                    evict(&mut tier, &mut model, num_victims, &mut is_evictable);
                }
                Op::Clear => {
                    tier.0.clear();
                    tier.1.clear();
                    model = Model::new(num_slots);
                }
            }
            let num_ghosts = model.ghosts.iter().flatten().count();
            prop_assert_eq!(tier.0.ghosts.len(), num_ghosts);
            for order in [NEW, USED] {
                let slots: Vec<u32> = tier.0.orders[order].queue().iter().map(|slot| slot.0).collect();
                let expected: Vec<u32> = model.orders[order].iter().map(|found| found.0).collect();
                prop_assert_eq!(slots, expected);
                prop_assert_eq!(tier.0.densities[order].at, model.densities[order]);
            }
        }
    }
}
