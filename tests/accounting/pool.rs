//! `BlockPool` against the naive pool.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use kvstow_core::error::Error;
use kvstow_core::event::Event;
use kvstow_core::ids::{BlockId, GroupId};
use kvstow_core::key::HashesBuilder;
use kvstow_core::pool::BlockPool;
use proptest::collection::vec;
use proptest::prelude::*;

use super::model::ModelPool;
use super::{hashes, ids, num_cases, raw};

#[derive(Clone, Debug)]
enum Op {
    Allocate(usize),
    Touch(Vec<u32>),
    Free(Vec<u32>),
    Pin(Vec<u32>),
    Unpin(Vec<u32>),
    Cache(Vec<u32>, Vec<u16>, u16),
    Evict(Vec<u32>),
    Reset,
}

/// Ids of a pool of up to 12 blocks. Some are outside it, some repeat.
fn some_ids() -> impl Strategy<Value = Vec<u32>> {
    vec(0..13_u32, 0..5)
}

fn op() -> impl Strategy<Value = Op> {
    let pairs = vec((0..13_u32, 0..6_u16), 0..4);
    prop_oneof![
        4 => (0..6_usize).prop_map(Op::Allocate),
        2 => some_ids().prop_map(Op::Touch),
        4 => some_ids().prop_map(Op::Free),
        2 => some_ids().prop_map(Op::Pin),
        2 => some_ids().prop_map(Op::Unpin),
        5 => (pairs, 0..2_u16).prop_map(|(pairs, group)| {
            let (ids, names) = pairs.into_iter().unzip();
            Op::Cache(ids, names, group)
        }),
        1 => (some_ids(), vec(0..6_u16, 0..4)).prop_map(|(ids, names)| Op::Cache(ids, names, 0)),
        1 => some_ids().prop_map(Op::Evict),
        1 => Just(Op::Reset),
    ]
}

/// Applies an op to both and compares the results.
fn apply(op: &Op, pool: &mut BlockPool, model: &mut ModelPool) {
    match op {
        Op::Allocate(n) => {
            let mut allocated = Vec::new();
            let done = pool.allocate(*n, &mut allocated).map(|()| raw(allocated));
            assert_eq!(done.ok(), model.allocate(*n));
        }
        Op::Touch(some) => assert_eq!(pool.touch(&ids(some)).is_ok(), model.touch(some)),
        Op::Free(some) => assert_eq!(pool.free(&ids(some)).is_ok(), model.free(some)),
        Op::Pin(some) => assert_eq!(pool.pin(&ids(some)).is_ok(), model.pin(some)),
        Op::Unpin(some) => assert_eq!(pool.unpin(&ids(some)).is_ok(), model.unpin(some)),
        Op::Cache(some, names, group) => assert_eq!(
            pool.cache(&ids(some), &hashes(names), GroupId(*group)).is_ok(),
            model.cache(some, names, *group)
        ),
        Op::Evict(some) => assert_eq!(pool.evict(&ids(some)).is_ok(), model.evict(some)),
        Op::Reset => assert_eq!(pool.reset(), model.reset()),
    }
}

/// An op on many blocks, which [`long_op`] picks by their position among candidates.
#[derive(Clone, Debug)]
struct LongOp {
    kind: u8,
    picks: Vec<(usize, u16)>,
    /// Whether the last block is one for which the op may fail.
    ends_anywhere: bool,
}

fn long_op() -> impl Strategy<Value = LongOp> {
    let picks = vec((0..200_usize, 0..NUM_NAMES), 1..70);
    (0..10_u8, picks, prop::bool::weighted(0.2)).prop_map(|(kind, picks, ends_anywhere)| LongOp {
        kind,
        picks,
        ends_anywhere,
    })
}

const NUM_NAMES: u16 = 60;

/// The op for the model's state. Most blocks that it names are such that it succeeds, and some are
/// named twice.
fn resolve(op: &LongOp, model: &ModelPool) -> Op {
    let all = 0..u32::try_from(model.refs.len()).unwrap();
    let referenced: Vec<u32> = all.clone().filter(|&id| model.refs[id as usize] > 0).collect();
    let is_clean = |id: &u32| model.held[*id as usize].is_none();
    let clean: Vec<u32> = referenced.iter().copied().filter(is_clean).collect();
    let pinned: Vec<u32> = all.clone().filter(|&id| model.pins[id as usize] > 0).collect();
    let all: Vec<u32> = all.collect();
    let candidates = match op.kind {
        1 | 2 | 5 => &referenced,
        4 | 8 => &clean,
        7 => &pinned,
        _ => &all,
    };
    let last = op.picks.len() - 1;
    let id = |(at, &(pick, _)): (usize, &(usize, u16))| {
        let from = if at == last && op.ends_anywhere { &all } else { candidates };
        from.get(pick % from.len().max(1)).copied()
    };
    let mut some: Vec<u32> = op.picks.iter().enumerate().filter_map(id).collect();
    if matches!(op.kind, 1 | 2 | 4 | 7) && !op.ends_anywhere {
        let mut seen = BTreeSet::new();
        some.retain(|&id| seen.insert(id));
    }
    let names = op.picks.iter().map(|&(_, name)| name).take(some.len()).collect();
    match op.kind {
        0 => Op::Allocate(op.picks.len().min(model.num_free())),
        1 | 2 => Op::Free(some),
        3 => Op::Touch(some),
        4 | 5 | 8 => Op::Cache(some, names, 0),
        6 => Op::Pin(some),
        7 => Op::Unpin(some),
        _ => Op::Evict(some),
    }
}

/// Compares all observable state.
fn compare(pool: &BlockPool, model: &ModelPool) {
    assert_eq!(pool.num_free(), model.num_free());
    assert_eq!(pool.num_cached(), model.num_cached());
    assert_eq!(raw(pool.free_order()), model.queue);
    for (id, (&refs, &pins)) in (0..).zip(model.refs.iter().zip(&model.pins)) {
        assert_eq!((pool.num_refs(BlockId(id)), pool.num_pins(BlockId(id))), (refs, pins));
    }
    for (name, group) in (0..NUM_NAMES).flat_map(|name| [(name, 0), (name, 1)]) {
        let found = pool.lookup(&hashes(&[name]), GroupId(group)).unwrap();
        assert_eq!(raw(found), model.lookup(&[name], group), "key {name} of group {group}");
    }
    pool.check().unwrap();
}

/// Applies events to the set of keys that lookups can find.
fn follow(events: Vec<Event>, findable: &mut BTreeSet<([u8; 32], u16)>) {
    for event in events {
        match event {
            Event::Stored(stored) => {
                for hash in stored.hashes {
                    assert!(findable.insert((hash, stored.group.0)), "stored twice");
                }
            }
            Event::Removed { hashes, group } => {
                for hash in hashes {
                    assert!(findable.remove(&(hash, group.0)), "removed, but never stored");
                }
            }
            Event::Cleared => findable.clear(),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(num_cases()))]

    #[test]
    fn pool_equals_model(num_blocks in 2..12_u32, ops in vec(op(), 1..40)) {
        let mut pool = BlockPool::new(num_blocks as usize, true).unwrap();
        let mut model = ModelPool::new(num_blocks);
        let mut findable = BTreeSet::new();
        for op in &ops {
            apply(op, &mut pool, &mut model);
            compare(&pool, &model);
            follow(pool.take_events(), &mut findable);
            let held: BTreeSet<_> = (0..num_blocks)
                .filter_map(|id| pool.key(BlockId(id)))
                .map(|key| (key.hash, key.group.0))
                .collect();
            prop_assert_eq!(&findable, &held);
        }
    }

    /// Many more keys than places in a small table, so that probes collide and wrap.
    #[test]
    fn lookup_survives_churn(names in vec(any::<u16>(), 1..200)) {
        let mut pool = BlockPool::new(9, false).unwrap();
        let mut held: Vec<u16> = Vec::new();
        for name in names {
            let mut allocated = Vec::new();
            pool.allocate(1, &mut allocated).unwrap();
            pool.cache(&allocated, &hashes(&[name]), GroupId(0)).unwrap();
            pool.free(&allocated).unwrap();
            held.push(name);
            for name in &held[held.len().saturating_sub(8)..] {
                prop_assert_eq!(pool.lookup(&hashes(&[*name]), GroupId(0)).unwrap().len(), 1);
            }
            pool.check().unwrap();
        }
    }

    /// Chains in ascending and descending runs of neighbours, over several batches. Some keys have
    /// an older holder elsewhere, some blocks have lost their key, and a run may end at the last
    /// block of the pool.
    #[test]
    fn a_prefix_lookup_equals_single_lookups(
        runs in vec((1..40_usize, any::<bool>()), 1..6),
        older in vec(0..200_u16, 0..4),
        lost in vec(0..200_u16, 0..2),
        pad in 0..2_usize,
    ) {
        let mut order: Vec<u32> = Vec::new();
        for (len, down) in runs {
            let run = (0..len).map(|at| u32::try_from(order.len() + at + 1).unwrap());
            let run: Vec<_> = if down { run.rev().collect() } else { run.collect() };
            order.extend(run);
        }
        let num_keys = order.len();
        let mut pool = BlockPool::new(num_keys + older.len() + pad + 1, false).unwrap();
        let mut allocated = Vec::new();
        pool.allocate(pool.num_usable(), &mut allocated).unwrap();
        for (at, &name) in older.iter().enumerate() {
            pool.cache(&allocated[num_keys + at..][..1], &hashes(&[name]), GroupId(0)).unwrap();
        }
        let names: Vec<u16> = (0..u16::try_from(num_keys).unwrap()).collect();
        pool.cache(&ids(&order), &hashes(&names), GroupId(0)).unwrap();
        for &name in lost.iter().filter(|&&name| usize::from(name) < num_keys) {
            pool.evict(&ids(&order[usize::from(name)..][..1])).unwrap();
        }
        let all = hashes(&names);
        let one_by_one: Vec<_> =
            all.as_slice().iter().map_while(|hash| pool.get(hash, GroupId(0))).collect();
        prop_assert_eq!(pool.lookup(&all, GroupId(0)).unwrap(), one_by_one);
    }
}

proptest! {
    // Each case has many blocks and keys to compare.
    #![proptest_config(ProptestConfig::with_cases(num_cases() / 16))]

    /// Calls that name more blocks than the pool handles ahead of its prefetches.
    #[test]
    fn long_calls_equal_the_model(num_blocks in 20..150_u32, ops in vec(long_op(), 1..30)) {
        let mut pool = BlockPool::new(num_blocks as usize, true).unwrap();
        let mut model = ModelPool::new(num_blocks);
        let mut findable = BTreeSet::new();
        for op in &ops {
            apply(&resolve(op, &model), &mut pool, &mut model);
            compare(&pool, &model);
            follow(pool.take_events(), &mut findable);
            let keys = (0..num_blocks).filter_map(|id| pool.key(BlockId(id)));
            let held: BTreeSet<_> = keys.map(|key| (key.hash, key.group.0)).collect();
            prop_assert_eq!(&findable, &held);
        }
    }
}

/// With this many keys, some have equal fingerprints and full buckets.
#[test]
fn a_lookup_never_confuses_two_keys() {
    let digests = |numbers: std::ops::Range<u64>| {
        let mut all = HashesBuilder::default();
        numbers.for_each(|number| all.push(&number.to_be_bytes()).unwrap());
        all.finish()
    };
    let mut pool = BlockPool::new(200_001, false).unwrap();
    let mut allocated = Vec::new();
    pool.allocate(200_000, &mut allocated).unwrap();
    pool.cache(&allocated, &digests(0..200_000), GroupId(0)).unwrap();
    for number in 200_000..800_000 {
        let absent = digests(number..number + 2); // a batch takes another path than a single key
        assert_eq!(pool.lookup(&absent, GroupId(0)).unwrap(), []);
        assert_eq!(pool.get(&absent.as_slice()[0], GroupId(0)), None);
    }
}

#[test]
fn a_block_costs_at_most_100_bytes() {
    for num_blocks in [1 << 20, (1 << 20) + 1, 1_000_000] {
        let pool = BlockPool::new(num_blocks, false).unwrap();
        let memory_bytes = pool.memory_bytes();
        assert!(memory_bytes <= 100 * num_blocks, "{memory_bytes} bytes for {num_blocks} blocks");
    }
}

#[test]
fn sizes_beyond_bounds_are_refused() {
    for num_blocks in [0, 1, usize::try_from(i32::MAX).unwrap() + 1, usize::MAX] {
        assert!(BlockPool::new(num_blocks, false).is_err());
    }
}

#[test]
fn hashes_keep_one_width() {
    let mut pool = BlockPool::new(4, false).unwrap();
    let mut allocated = Vec::new();
    pool.allocate(2, &mut allocated).unwrap();
    pool.cache(&allocated[..1], &hashes(&[1]), GroupId(0)).unwrap();
    let mut wide = HashesBuilder::default();
    wide.push(&[7; 32]).unwrap();
    assert!(wide.push(&[7; 31]).is_err());
    assert!(wide.push(&[]).is_err());
    assert!(wide.push(&[7; 33]).is_err());
    let wide = wide.finish();
    assert!(pool.cache(&allocated[1..], &wide, GroupId(0)).is_err());
    assert!(pool.lookup(&wide, GroupId(0)).is_err());
    assert_eq!(pool.num_cached(), 1);
}

#[test]
fn removals_of_two_groups_are_two_events() {
    let mut pool = BlockPool::new(4, true).unwrap();
    let mut allocated = Vec::new();
    pool.allocate(2, &mut allocated).unwrap();
    pool.cache(&allocated[..1], &hashes(&[1]), GroupId(0)).unwrap();
    pool.cache(&allocated[1..], &hashes(&[1]), GroupId(1)).unwrap();
    pool.take_events();
    pool.evict(&allocated).unwrap();
    let groups = pool.take_events().into_iter().map(|event| match event {
        Event::Removed { group, hashes } => (group.0, hashes.len()),
        other => panic!("{other:?}"),
    });
    assert_eq!(groups.collect::<Vec<_>>(), [(0, 1), (1, 1)]);
}

/// A comparison of all pairs takes hundreds of times as long.
#[test]
fn one_id_that_is_named_twice_is_found_among_many() {
    let num_blocks = 400_000;
    let mut pool = BlockPool::new(num_blocks + 1, false).unwrap();
    let mut ids = Vec::new();
    pool.allocate(num_blocks, &mut ids).unwrap();
    let (first, second) = (ids[num_blocks - 2], ids[7]);
    ids.extend([first, second]);
    let mut hashes = HashesBuilder::default();
    for name in 0..=num_blocks + 1 {
        let mut digest = [0; 32];
        digest[..8].copy_from_slice(&name.to_le_bytes());
        hashes.push(&digest).unwrap();
    }
    let hashes = hashes.finish();
    let began = Instant::now();
    let refused = pool.cache(&ids, &hashes, GroupId(0));
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    match refused {
        Err(Error::InvalidBlock { id, why }) => {
            assert_eq!(id, first, "of several, the one whose second place comes first");
            assert!(why.contains("named twice"), "{why}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(pool.num_cached(), 0);
}
