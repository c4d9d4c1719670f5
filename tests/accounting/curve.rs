//! Curves against the scheduler, a naive LRU list, and a search of all that a cache can do.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};

use kvstow_core::curve::{
    Clairvoyant, HitCurve, HitCurveConfig, MIN_KEYS, Prompts, keys_of, salted_ids,
};
use kvstow_core::group::{Attention, Group};
use kvstow_core::ids::BlockId;
use kvstow_core::key::{Hashes, HashesBuilder};
use kvstow_core::offload::{OffloadConfig, OffloadScheduler, Progress};
use proptest::collection::{btree_set, vec};
use proptest::option;
use proptest::prelude::*;

use super::num_cases;

type Requests = Vec<Vec<u64>>;

/// Requests of up to `longest` blocks, as chained keys: one key for each path from the root.
fn chains(longest: usize, num_requests: usize) -> impl Strategy<Value = Requests> {
    vec(vec(0..3_u8, 1..=longest), 1..=num_requests).prop_map(|paths| {
        let mut keys = BTreeMap::new();
        let mut key = |path: &[u8]| {
            let new = keys.len() as u64;
            *keys.entry(path.to_vec()).or_insert(new)
        };
        paths.iter().map(|path| (1..=path.len()).map(|end| key(&path[..end])).collect()).collect()
    })
}

/// Lengths of the requests as offsets, and all keys.
fn flat(requests: &[Vec<u64>]) -> (Vec<u64>, Vec<usize>) {
    let mut offsets = vec![0];
    offsets.extend(requests.iter().scan(0, |end, request| {
        *end += request.len();
        Some(*end)
    }));
    (requests.concat(), offsets)
}

fn num_distinct(requests: &[Vec<u64>]) -> usize {
    requests.iter().flatten().collect::<BTreeSet<_>>().len()
}

fn curve_of(requests: &[Vec<u64>], config: HitCurveConfig) -> HitCurve {
    let mut curve = HitCurve::new(config).unwrap();
    let (keys, offsets) = flat(requests);
    curve.add_all(Prompts::new(&keys, &offsets).unwrap()).unwrap();
    curve
}

fn exact(requests: &[Vec<u64>]) -> HitCurve {
    curve_of(requests, HitCurveConfig::default())
}

fn bound(requests: &[Vec<u64>], capacity: u64) -> u64 {
    let (keys, offsets) = flat(requests);
    Clairvoyant::new(Prompts::new(&keys, &offsets).unwrap()).unwrap().hits(capacity).unwrap()
}

fn as_hashes(keys: &[u64]) -> Hashes {
    let mut hashes = HashesBuilder::default();
    for key in keys {
        hashes.push(&key.to_be_bytes()).unwrap();
    }
    hashes.finish()
}

/// Hits of the real scheduler: look up, load what is found, store the rest, finish.
fn scheduler_hits(requests: &[Vec<u64>], capacity: usize) -> u64 {
    let group = Group::new(Attention::Full, 1).unwrap();
    let mut tier = OffloadScheduler::new(OffloadConfig::new(capacity, vec![group])).unwrap();
    let mut num_hits = 0;
    for keys in requests {
        tier.add("request", &as_hashes(keys)).unwrap();
        let table: Vec<_> = (1..).map(BlockId).take(keys.len()).collect();
        let num_found = tier.lookup("request", 0, keys.len()).unwrap().unwrap();
        if num_found > 0 {
            num_hits += num_found as u64;
            let loaded = [table[..num_found].to_vec()];
            let job = tier.load("request", num_found, &loaded, None).unwrap();
            tier.complete(job.job_id, 0, true).unwrap();
        }
        let new_blocks = [table.as_slice()];
        let progress = Progress {
            request_id: "request",
            num_computed_tokens: keys.len(),
            new_blocks: &new_blocks,
        };
        if let Some(job) = tier.store(std::iter::once(progress), None).unwrap() {
            tier.complete(job.job_id, 0, true).unwrap();
        }
        tier.finish("request").unwrap();
    }
    tier.check().unwrap();
    num_hits
}

/// Hits of a list in the order of use. Blocks behind a gap are no hits.
fn list_hits(requests: &[Vec<u64>], capacity: usize) -> u64 {
    let mut resident: Vec<u64> = Vec::new();
    let mut num_hits = 0;
    for keys in requests {
        num_hits += keys.iter().take_while(|key| resident.contains(key)).count();
        for key in keys.iter().rev() {
            resident.retain(|other| other != key);
            resident.insert(0, *key);
        }
        resident.truncate(capacity);
    }
    num_hits as u64
}

/// What an online curve is asked to do.
#[derive(Clone, Debug)]
enum Op {
    /// Keys of a request, how many of them a cache in front has, and where hits may end.
    Lookup(Vec<u64>, usize, Option<Vec<usize>>),
    Insert(Vec<u64>),
    Turn,
    Clear,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let keys = || prop_oneof![chains(8, 1).prop_map(|chains| chains.concat()), vec(0..9_u64, 0..8)];
    let op = prop_oneof![
        8 => (keys(), 0..4_usize, option::of(btree_set(0..10_usize, 0..4))).prop_map(
            |(keys, num_local, ends)| {
                Op::Lookup(keys, num_local, ends.map(|ends| ends.into_iter().collect()))
            }
        ),
        8 => keys().prop_map(Op::Insert),
        2 => Just(Op::Turn),
        1 => Just(Op::Clear),
    ];
    vec(op, 1..60)
}

/// A list of keys in the order of use, each with the turn of its last use, and all past lookups
/// with their turn: the capacity from which on each is a hit, if there is one.
#[derive(Default)]
struct ListCurve {
    resident: Vec<(u64, usize)>,
    lookups: Vec<(usize, Option<usize>)>,
    turn: usize,
}

impl ListCurve {
    fn apply(&mut self, op: &Op, num_kept: usize) {
        match op {
            Op::Lookup(keys, num_local, ends) => {
                // By number of blocks: the least cache that has them all behind the local ones.
                let mut needed = vec![Some(0)];
                for (at, key) in keys.iter().enumerate() {
                    let place = self.resident.iter().position(|(other, _)| other == key);
                    let own = if at < *num_local { Some(0) } else { place.map(|place| place + 1) };
                    let before = needed[at];
                    needed.push(before.and_then(|before: usize| own.map(|own| own.max(before))));
                }
                for at in 0..keys.len() {
                    let all = || (0..=keys.len()).collect();
                    let may_end = ends.clone().unwrap_or_else(all);
                    let next = may_end.into_iter().find(|&end| end > at && end <= keys.len());
                    let is_local = at < *num_local;
                    let least = if is_local { Some(0) } else { next.and_then(|end| needed[end]) };
                    self.lookups.push((self.turn, least));
                }
            }
            Op::Insert(keys) => {
                for &key in keys.iter().rev() {
                    self.resident.retain(|&(other, _)| other != key);
                    self.resident.insert(0, (key, self.turn));
                }
            }
            Op::Turn => {
                self.turn += 1;
                self.resident.retain(|&(_, used)| used + num_kept >= self.turn);
            }
            Op::Clear => self.resident.clear(),
        }
    }

    /// Hits at a capacity, and all lookups, by their weight.
    fn weighed(&self, capacity: usize) -> (f64, f64) {
        let (mut hits, mut all) = (0.0, 0.0);
        for &(turn, needed) in &self.lookups {
            let weight = 0.5_f64.powi(i32::try_from(self.turn - turn).unwrap());
            all += weight;
            if needed.is_some_and(|needed| needed <= capacity) {
                hits += weight;
            }
        }
        (hits, all)
    }
}

/// The most hits of any cache: all sets that it can hold are followed, each with its best past.
fn most_hits(requests: &[Vec<u64>], capacity: u32) -> u64 {
    let mut best = BTreeMap::from([(0_u32, 0_u64)]);
    for keys in requests {
        let asked = keys.iter().fold(0, |set, key| set | 1 << key);
        let mut next = BTreeMap::new();
        for (held, num_hits) in best {
            let found = keys.iter().take_while(|&&key| held >> key & 1 == 1).count() as u64;
            let all = held | asked;
            let mut part = all;
            loop {
                if part.count_ones() <= capacity {
                    let most: &mut u64 = next.entry(part).or_default();
                    *most = (*most).max(num_hits + found);
                }
                if part == 0 {
                    break;
                }
                part = (part - 1) & all;
            }
        }
        best = next;
    }
    best.into_values().max().unwrap()
}

/// Hits of a cache that keeps the nearest next uses, at a tie the shallower block.
fn farsighted_hits(requests: &[Vec<u64>], capacity: usize) -> u64 {
    let mut held: Vec<u64> = Vec::new();
    let mut num_hits = 0;
    for (at, keys) in requests.iter().enumerate() {
        num_hits += keys.iter().take_while(|key| held.contains(key)).count();
        held.extend(keys);
        held.sort_unstable();
        held.dedup();
        let next_use = |key: &u64| {
            requests.iter().enumerate().skip(at + 1).find_map(|(later, keys)| {
                keys.iter().position(|other| other == key).map(|depth| (later, depth))
            })
        };
        held.retain(|key| next_use(key).is_some());
        held.sort_by_key(|key| next_use(key));
        held.truncate(capacity);
    }
    num_hits as u64
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(num_cases() / 20))]

    #[test]
    fn curve_equals_the_scheduler_at_every_capacity(requests in chains(8, 25)) {
        let curve = exact(&requests);
        let capacities: Vec<_> = (1..=num_distinct(&requests) + 1).collect();
        let hits = curve.hits(&capacities.iter().map(|&capacity| capacity as u64).collect::<Vec<_>>());
        for (&capacity, hits) in capacities.iter().zip(hits) {
            prop_assert_eq!(hits, scheduler_hits(&requests, capacity), "{} slots", capacity);
        }
    }

    /// Keys in any order too, some of them twice in one request.
    #[test]
    fn curve_equals_a_list_at_every_capacity(
        requests in prop_oneof![chains(8, 25), vec(vec(0..9_u64, 0..8), 1..25)]
    ) {
        let curve = exact(&requests);
        for capacity in 0..12 {
            let expected = list_hits(&requests, capacity);
            prop_assert_eq!(curve.hits(&[capacity as u64]), [expected], "{} blocks", capacity);
        }
        prop_assert_eq!(curve.num_unique(), num_distinct(&requests) as u64);
        let largest = curve.largest_capacity();
        prop_assert_eq!(curve.hits(&[largest]), curve.hits(&[u64::MAX]));
        prop_assert!(largest == 0 || curve.hits(&[largest - 1]) < curve.hits(&[largest]));
    }

    #[test]
    fn online_curve_equals_a_list_in_every_turn(ops in ops(), num_kept in 0..4_usize) {
        let mut curve = HitCurve::new(HitCurveConfig::default()).unwrap();
        let mut list = ListCurve::default();
        for op in &ops {
            list.apply(op, num_kept);
            match op {
                Op::Lookup(keys, num_local, ends) => {
                    let is_known = |key| list.resident.iter().any(|(other, _)| other == key);
                    let others = keys.iter().skip(*num_local);
                    let num_known = others.take_while(|&key| is_known(key)).count();
                    let found = curve.lookup(keys, *num_local, ends.as_deref());
                    prop_assert_eq!(found, keys.len().min(*num_local) + num_known);
                }
                Op::Insert(keys) => curve.insert(keys).unwrap(),
                Op::Turn => curve.turn(num_kept),
                Op::Clear => curve.clear(),
            }
            prop_assert_eq!(curve.num_unique(), list.resident.len() as u64);
            for capacity in 0..12 {
                let (hits, all) = list.weighed(capacity);
                let expected = if all > 0.0 { hits / all } else { 0.0 };
                let found = curve.hit_ratios(&[capacity as u64])[0];
                prop_assert!((found - expected).abs() < 1e-12, "{found}, {expected} expected");
            }
        }
        let num_lookups = list.lookups.len() as u64;
        prop_assert_eq!(curve.num_lookups(), num_lookups);
    }

    #[test]
    fn request_that_is_added_is_looked_up_and_inserted(requests in chains(8, 25)) {
        let whole = exact(&requests);
        let mut parts = HitCurve::new(HitCurveConfig::default()).unwrap();
        for keys in &requests {
            parts.lookup(keys, 0, None);
            parts.insert(keys).unwrap();
        }
        let capacities: Vec<_> = (0..30).collect();
        prop_assert_eq!(whole.hits(&capacities), parts.hits(&capacities));
    }

    #[test]
    fn bound_is_attained_and_never_beaten(requests in chains(4, 7), capacity in 0..6_u32) {
        if num_distinct(&requests) <= 10 {
            let bound = bound(&requests, capacity.into());
            prop_assert_eq!(bound, most_hits(&requests, capacity), "no cache hits more");
            prop_assert_eq!(bound, farsighted_hits(&requests, capacity as usize), "a cache hits it");
        }
    }

    #[test]
    fn bound_is_at_least_lru_and_at_most_infinite(requests in chains(8, 25)) {
        let curve = exact(&requests);
        for capacity in 0..30 {
            let bound = bound(&requests, capacity);
            prop_assert!(curve.hits(&[capacity])[0] <= bound);
            prop_assert!(bound <= curve.hits(&[u64::MAX])[0]);
        }
    }

    #[test]
    fn bounded_curve_is_exact_until_it_is_full(requests in chains(6, 12), seed in any::<u64>()) {
        let config = HitCurveConfig { max_keys: Some(MIN_KEYS), seed, ..Default::default() };
        let (bounded, unbounded) = (curve_of(&requests, config), exact(&requests));
        if num_distinct(&requests) <= MIN_KEYS {
            prop_assert!(bounded.rate() >= 1.0);
            let capacities: Vec<_> = (0..80).collect();
            prop_assert_eq!(bounded.hits(&capacities), unbounded.hits(&capacities));
            prop_assert!(bounded.errors(&capacities).iter().all(|&error| error == 0.0));
        } else {
            prop_assert!(bounded.rate() < 1.0);
        }
    }

    #[test]
    fn sampled_curve_keeps_its_bounds(
        requests in vec(vec(0..500_u64, 0..40), 1..60), seed in any::<u64>(),
    ) {
        let config = HitCurveConfig { max_keys: Some(MIN_KEYS), seed, ..Default::default() };
        let curve = curve_of(&requests, config);
        prop_assert!(curve.num_keys() <= MIN_KEYS);
        let capacities: Vec<_> = (0..=curve.largest_capacity()).collect();
        let hits = curve.hits(&capacities);
        prop_assert!(hits.is_sorted() && hits[0] == 0);
        prop_assert!(hits.last().unwrap() <= &curve.num_lookups());
        prop_assert_eq!(hits, curve_of(&requests, config).hits(&capacities), "deterministic");
    }
}

/// A third of the requests are popular, a third are new, and a third repeat one of the new ones.
fn long_trace(num_requests: u64) -> Requests {
    let chain = |root: u64| (0..20).map(|depth| root * 100 + depth).collect::<Vec<_>>();
    let spread = |at: u64| BuildHasherDefault::<DefaultHasher>::default().hash_one(at);
    let prompt = |at: u64| match at % 3 {
        0 => chain(at % 10),
        1 => chain(1000 + at),
        _ => chain(1000 + (at - 1).saturating_sub(3 * (spread(at) % 2000))),
    };
    (0..num_requests).map(prompt).collect()
}

#[test]
fn curve_of_bounded_memory_stays_within_its_bytes() {
    for max_bytes in [10_000, 100_000, 400_000] {
        let config = HitCurveConfig { max_bytes: Some(max_bytes), ..Default::default() };
        let curve = curve_of(&long_trace(20_000), config);
        assert!(curve.rate() < 1.0, "it is full");
        assert!(curve.memory_bytes() <= max_bytes, "{} of {max_bytes}", curve.memory_bytes());
        assert!(curve.memory_bytes() >= max_bytes / 4, "the memory is used");
    }
}

/// The table has room for exactly so many keys, and is emptied in part again and again.
#[test]
fn table_of_a_bounded_curve_never_grows() {
    let config = HitCurveConfig { max_keys: Some(28_672), ..Default::default() };
    let of_empty = curve_of(&[], config).memory_bytes();
    let mut curve = HitCurve::new(config).unwrap();
    for keys in long_trace(20_000) {
        curve.add(&keys).unwrap();
        assert!(curve.memory_bytes() < 2 * of_empty, "{} bytes", curve.memory_bytes());
    }
    assert!(curve.rate() < 0.5);
}

/// Traffic changes at each turn, and never ends.
#[test]
fn online_curve_forgets_what_no_request_uses() {
    let config = HitCurveConfig { max_keys: Some(4000), ..Default::default() };
    let mut curve = HitCurve::new(config).unwrap();
    for turn in 0..50 {
        // Each turn has 100 prompts of 20 blocks of its own, twice.
        for request in 0..200_u64 {
            let root = turn * 100 + request % 100;
            curve.add(&(0..20).map(|depth| root * 20 + depth).collect::<Vec<_>>()).unwrap();
        }
        assert!((curve.hit_ratios(&[2000])[0] - 0.5).abs() < 0.01, "turn {turn}");
        curve.turn(1);
        assert_eq!(curve.num_unique(), 2000, "turn {turn}");
    }
    assert!(curve.rate() >= 1.0, "keys of one turn and the turn before it fit");
    curve.turn(1);
    assert_eq!((curve.num_keys(), curve.num_requests()), (0, 10_000));
}

#[test]
fn sampled_online_curve_is_near_the_exact_one() {
    let capacities: Vec<_> = (0..40).map(|step| step * 2000).collect();
    let requests = long_trace(20_000);
    let run = |config| {
        let mut curve = HitCurve::new(config).unwrap();
        for (at, keys) in requests.iter().enumerate() {
            curve.lookup(keys, at % 3, None);
            curve.insert(keys).unwrap();
            if at % 3000 == 2999 {
                curve.turn(3);
            }
        }
        curve
    };
    let expected = run(HitCurveConfig::default()).hit_ratios(&capacities);
    for seed in 0..20 {
        let curve = run(HitCurveConfig { max_keys: Some(8000), seed, ..Default::default() });
        assert!(curve.rate() < 0.2);
        for (found, expected) in curve.hit_ratios(&capacities).into_iter().zip(&expected) {
            assert!((found - expected).abs() < 0.02, "seed {seed}: {found}, {expected} expected");
        }
    }
}

#[test]
fn sampled_curve_is_near_the_exact_one() {
    let requests = long_trace(20_000);
    let capacities: Vec<_> = (1..40).map(|step| step * 2000).collect();
    let unbounded = exact(&requests);
    let expected = unbounded.hits(&capacities);
    for seed in 0..20 {
        let config = HitCurveConfig { max_keys: Some(8000), seed, ..Default::default() };
        let curve = curve_of(&requests, config);
        assert!(curve.rate() < 0.1);
        for (hits, expected) in curve.hits(&capacities).into_iter().zip(&expected) {
            let thousandths = hits.abs_diff(*expected) * 1000 / curve.num_lookups();
            assert!(thousandths < 15, "seed {seed}: {hits} hits, {expected} expected");
        }
    }
}

#[test]
fn offsets_that_do_not_fit_are_refused() {
    for offsets in [&[][..], &[0], &[1, 3], &[0, 2], &[0, 2, 1, 3]] {
        assert!(Prompts::new(&[7, 8, 9], offsets).is_err(), "{offsets:?}");
    }
    assert!(Prompts::new(&[], &[0]).is_ok());
}

#[test]
fn bound_refuses_keys_that_are_not_chained() {
    for requests in [&[vec![1, 2], vec![2]][..], &[vec![1, 2], vec![3, 2]], &[vec![1, 1]]] {
        let (keys, offsets) = flat(requests);
        assert!(Clairvoyant::new(Prompts::new(&keys, &offsets).unwrap()).is_err(), "{requests:?}");
    }
}

#[test]
fn curve_refuses_a_bound_that_is_too_small() {
    let bounds = [(Some(MIN_KEYS - 1), None), (None, Some(100)), (Some(1_000_000), Some(0))];
    for (max_keys, max_bytes) in bounds {
        let config = HitCurveConfig { max_keys, max_bytes, seed: 0 };
        assert!(HitCurve::new(config).is_err(), "{config:?}");
    }
    let config = HitCurveConfig { max_keys: Some(MIN_KEYS), ..Default::default() };
    assert!(HitCurve::new(config).is_ok());
}

#[test]
fn keys_of_equal_hashes_are_equal() {
    let keys = keys_of(&as_hashes(&[1, 2, 1]));
    assert!(keys[0] == keys[2] && keys[0] != keys[1]);
    assert_eq!(keys, keys_of(&as_hashes(&[1, 2, 1])));
}

#[test]
fn salted_ids_depend_on_the_salt_and_on_the_hash() {
    let hashes = as_hashes(&(0..1000).chain([7]).collect::<Vec<_>>());
    let ids = salted_ids(&hashes, b"salt");
    assert_eq!(ids[7], ids[1000]);
    assert_eq!(ids.iter().collect::<BTreeSet<_>>().len(), 1000);
    assert!(ids.iter().all(|&id| id < 1 << 63));
    let others: BTreeSet<_> = salted_ids(&hashes, b"tals").into_iter().collect();
    assert!(ids.iter().all(|id| !others.contains(id)));
}
