//! The cost of losses and of recency, in looks at slots, and the room that evictions make.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::{Duration, Instant};

use crate::group::{Attention, Group};

use super::chains::{Chains, looks};
use super::*;

fn hashes(chain: u16, len: u16) -> Vec<BlockHash> {
    let hash = |at: u16| {
        let mut hash = BlockHash::default();
        hash[..2].copy_from_slice(&chain.to_le_bytes());
        hash[2..4].copy_from_slice(&at.to_le_bytes());
        hash
    };
    (0..len).map(hash).collect()
}

#[test]
fn a_failed_store_looks_only_at_its_own_slots_and_those_below() {
    const NUM_SLOTS: usize = 4_096;
    for policy in EvictionPolicy::ALL {
        let mut tier = Tier::new("num_host_blocks", NUM_SLOTS, policy, false).unwrap();
        for chain in 0..255 {
            tier.reserve_chain(&hashes(chain, 16), GroupId(0), BlockId::NULL, usize::MAX).unwrap();
        }
        // The second store continues the chain of the first one.
        let chain = hashes(255, 16);
        let slots =
            tier.reserve_chain(&chain[..8], GroupId(0), BlockId::NULL, usize::MAX).unwrap().slots;
        let last = *slots.last().unwrap();
        tier.reserve_chain(&chain[8..], GroupId(0), last, usize::MAX).unwrap();
        assert_eq!(tier.slots.num_filling, NUM_SLOTS);
        looks::take();
        tier.fence(&slots).unwrap();
        let num_looks = looks::take();
        assert_eq!(tier.slots.num_filling, NUM_SLOTS - 16);
        assert!(num_looks <= 5 * 16, "{num_looks} looks for 16 slots of {NUM_SLOTS}");
    }
}

/// Stores a chain into empty slots of a tier.
fn store(tier: &mut Tier, chain: &[BlockHash]) -> Vec<BlockId> {
    let model = Model::new(vec![Group::new(Attention::Full, 1).unwrap()]).unwrap();
    let slots = tier.reserve_chain(chain, GroupId(0), BlockId::NULL, usize::MAX).unwrap().slots;
    let filling = Filling { ends: (1..=chain.len()).collect(), ..Filling::default() };
    assert_eq!(tier.publish(&slots, &filling, &model), Ok(chain.len()));
    slots
}

/// A tier of `num_slots`, 1 to 4 of them one chain. They became recent in this order, by hits on all
/// but the last, so the policy may keep that one apart.
fn chain_of_four(num_slots: usize, policy: EvictionPolicy, order: [u32; 4]) -> Tier {
    let mut tier = Tier::new("num_host_blocks", num_slots, policy, false).unwrap();
    assert_eq!(store(&mut tier, &hashes(0, 4)), [1, 2, 3, 4].map(BlockId));
    tier.make_recent(order.into_iter().map(|slot| (BlockId(slot), slot != 4)));
    tier.check().unwrap();
    tier
}

/// Searches look at no slot twice, and pass parents that they cannot evict yet. This must not cost
/// a store its room.
#[test]
fn a_store_gets_all_room_whatever_the_order_is() {
    let orders = [[1, 2, 3, 4], [4, 3, 2, 1], [4, 1, 3, 2], [2, 4, 1, 3], [3, 4, 1, 2]];
    for (policy, order) in
        EvictionPolicy::ALL.into_iter().flat_map(|policy| orders.map(|order| (policy, order)))
    {
        for wanted in 1..=4 {
            let mut tier = chain_of_four(4, policy, order);
            let taken = tier.reserve(wanted).unwrap();
            let kept = 5 - u32::try_from(wanted).unwrap();
            assert_eq!(taken, (kept..5).map(BlockId).collect::<Vec<_>>(), "{policy:?} {order:?}");
            tier.check().unwrap();
        }
        // A pin keeps the slots above it, and a search that has found nothing changes nothing.
        let mut tier = chain_of_four(4, policy, order);
        tier.pin(&[BlockId(4)]).unwrap();
        assert_eq!(tier.reserve(1), Ok(Vec::new()));
        tier.unpin(&[BlockId(4)]).unwrap();
        tier.pin(&[BlockId(2)]).unwrap();
        assert_eq!(tier.reserve(4), Ok(vec![BlockId(3), BlockId(4)]), "{policy:?} {order:?}");
        tier.check().unwrap();
    }
}

/// What earlier searches have skipped is not in a snapshot, and a restored tier goes on as before.
#[test]
fn an_earlier_search_does_not_change_which_slots_go() {
    for policy in EvictionPolicy::ALL {
        let gone = [false, true].map(|has_searched| {
            let mut tier = chain_of_four(5, policy, [4, 3, 2, 1]);
            let other = store(&mut tier, &hashes(1, 1));
            if has_searched {
                let pinned = [BlockId(4), other[0]];
                tier.pin(&pinned).unwrap();
                assert_eq!(tier.reserve(1), Ok(Vec::new()));
                tier.unpin(&pinned).unwrap();
            }
            tier.reserve(2).unwrap()
        });
        assert_eq!(gone[0], gone[1], "{policy:?}");
    }
}

/// The resident slots in the order of each queue.
fn orders(tier: &Tier) -> Vec<Vec<BlockId>> {
    with_policy!(&tier.policy, policy => policy.queues().map(|queue| queue.iter().collect()).collect())
}

/// A step of a walk that visits all numbers. Enough for choices that only need to differ.
fn next_choice(state: &mut u64, below: usize) -> usize {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    usize::try_from(*state >> 33).unwrap() % below
}

/// Chains that become recent together end in the order of chains that become recent one by one.
#[test]
fn chains_become_recent_together_as_one_by_one() {
    for (policy, seed) in
        EvictionPolicy::ALL.into_iter().flat_map(|it| (0..60).map(move |s| (it, s)))
    {
        let mut state: u64 = seed;
        let mut tier = Tier::new("num_host_blocks", 48, policy, false).unwrap();
        let mut num_chains = 0;
        for _ in 0..60 {
            let num_parts = 1 + next_choice(&mut state, 4);
            let mut tails = Vec::new();
            let mut slots = Vec::new();
            for _ in 0..num_parts {
                let kept: Vec<BlockId> = tier
                    .slots
                    .iter()
                    .filter(|&slot| tier.is_resident(slot) || tier.slots.is_filling(slot))
                    .collect();
                let parent = match next_choice(&mut state, 4) {
                    0 => BlockId::NULL,
                    _ if kept.is_empty() => BlockId::NULL,
                    _ => kept[next_choice(&mut state, kept.len())],
                };
                num_chains += 1;
                let len = u16::try_from(1 + next_choice(&mut state, 5)).unwrap();
                let part = tier
                    .reserve_chain(&hashes(num_chains, len), GroupId(0), parent, usize::MAX)
                    .unwrap()
                    .slots;
                tails.extend(part.last());
                slots.extend(part);
                // An older tail, which may be above another one.
                if next_choice(&mut state, 3) == 0 && !kept.is_empty() {
                    let slot = kept[next_choice(&mut state, kept.len())];
                    tails.extend(
                        (tier.is_resident(slot) || tier.slots.is_filling(slot)).then_some(slot),
                    );
                }
            }
            let filling = Filling { ends: vec![0; slots.len()], ..Filling::default() };
            let model = Model::new(vec![Group::new(Attention::Full, 1).unwrap()]).unwrap();
            if next_choice(&mut state, 5) > 0 {
                tier.publish(&slots, &filling, &model).unwrap();
            }
            let mut one_by_one = tier.clone();
            tier.make_chains_recent(&tails);
            for tail in &tails {
                one_by_one.make_chain_recent(*tail, &NO_HITS);
            }
            assert_eq!(orders(&tier), orders(&one_by_one), "{policy:?} {seed}: {tails:?}");
            tier.check().unwrap();
        }
    }
}

#[test]
fn chains_that_become_recent_together_look_at_their_prefix_once() {
    const PREFIX: u16 = 4_096;
    const NUM_CHAINS: u16 = 64;
    for policy in EvictionPolicy::ALL {
        let num_slots = usize::from(PREFIX + NUM_CHAINS);
        let mut tier = Tier::new("num_host_blocks", num_slots, policy, false).unwrap();
        let last = *store(&mut tier, &hashes(0, PREFIX)).last().unwrap();
        let tails: Vec<BlockId> = (1..=NUM_CHAINS)
            .map(|chain| {
                tier.reserve_chain(&hashes(chain, 1), GroupId(0), last, usize::MAX).unwrap().slots
                    [0]
            })
            .collect();
        for _ in 0..2 {
            looks::take();
            tier.make_chains_recent(&tails);
            let num_looks = looks::take();
            assert!(
                num_looks <= 3 * num_slots,
                "{policy:?}: {num_looks} looks at {num_slots} slots"
            );
        }
    }
}

#[test]
fn a_chain_that_proves_damaged_is_looked_at_once() {
    const NUM_SLOTS: u16 = 4_096;
    for policy in EvictionPolicy::ALL {
        let mut tier = Tier::new("num_host_blocks", NUM_SLOTS.into(), policy, false).unwrap();
        let mut slots = store(&mut tier, &hashes(0, NUM_SLOTS));
        tier.make_chain_recent(*slots.last().unwrap(), &NO_HITS);
        // The slot with the lowest id holds the end of the chain, as after a lazy store.
        slots.reverse();
        looks::take();
        tier.cut(&slots);
        let num_looks = looks::take();
        assert!(num_looks <= 8 * slots.len(), "{policy:?}: {num_looks} looks at {NUM_SLOTS} slots");
    }
}

#[test]
fn a_slot_adopts_many_children_with_one_look_at_its_own_chain() {
    const DEPTH: usize = 1_000;
    const NUM_CHILDREN: usize = 10_000;
    let slots: Vec<BlockId> = (1..).map(BlockId).take(DEPTH + NUM_CHILDREN).collect();
    let mut chains = Chains::new(slots.len() + 1);
    for pair in slots[..DEPTH].windows(2) {
        chains.attach(pair[1], pair[0]);
    }
    let key = BlockKey { hash: BlockHash::default(), group: GroupId(0) };
    for &child in &slots[DEPTH..] {
        assert!(chains.await_key(child, key));
    }
    looks::take();
    assert_eq!(chains.adopt(slots[DEPTH - 1], &key), slots[DEPTH..]);
    let num_looks = looks::take();
    assert!(num_looks <= 2 * DEPTH + NUM_CHILDREN, "{num_looks} looks at {} slots", slots.len());
    // A root that awaits a key is never put below a slot of its own chain.
    assert!(chains.await_key(slots[0], key));
    assert_eq!(chains.adopt(slots[DEPTH - 1], &key), []);
    assert!(!chains.has_loop());
}

/// A search of all that await the key, for each that leaves, takes a thousand times as long.
#[test]
fn slots_that_await_one_key_leave_one_by_one() {
    let slots: Vec<BlockId> = (1..).map(BlockId).take(500_000).collect();
    let mut chains = Chains::new(slots.len() + 1);
    let key = BlockKey { hash: BlockHash::default(), group: GroupId(0) };
    for &slot in &slots {
        assert!(chains.await_key(slot, key));
    }
    let (gone, rest) = slots.split_at(slots.len() - 3);
    let began = Instant::now();
    for &slot in gone {
        assert!(chains.leave(slot).is_null());
    }
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    chains.check(|slot| rest.contains(&slot), |_| false).unwrap();
    assert_eq!(chains.awaited(), rest.iter().map(|&slot| (slot, key)).collect::<Vec<_>>());
    for &slot in rest {
        chains.leave(slot);
    }
    assert!(!chains.has_awaited());
}
