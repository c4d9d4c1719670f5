//! Ledger and offload scheduler together, over a memory that holds names instead of bytes.
//!
//! Copies take place when a job ends, as late as possible. So a block or slot that another user got
//! in the meantime has a wrong name. Jobs end in any order, some fail, the tier is reset with jobs in
//! flight, and requests leave while their stores and loads are in flight.

mod copies;
mod ops;
mod priority;
mod requests;
mod world;

use std::collections::BTreeSet;

use kvstow_core::error::Error;
use kvstow_core::group::{Attention, Group};
use kvstow_core::ids::{BlockId, GroupId};
use kvstow_core::key::BlockKey;
use kvstow_core::offload::{Mode, OffloadConfig, OffloadScheduler, Progress, TransferEvent};
use proptest::collection::vec;
use proptest::prelude::*;

use super::{hashes, ids, num_cases, raw};

pub(crate) use ops::chain;
use ops::{NUM_CHAINS, Op, Options, Rest, models, op, options};
use world::{BLOCK_SIZE, World};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(num_cases()))]

    /// No stale block is served, no pin is lost, no slot or block has two users.
    #[test]
    fn no_stale_block_is_served_and_no_pin_is_lost(
        groups in models(), size in 4..16_usize, num_host in 1..12_usize,
        options in options(), ops in vec(op(), 1..60),
    ) {
        let num_device = size * groups.len();
        let is_full = groups.iter().all(|group| group.attention == Attention::Full);
        let blocks_per_slot = if is_full { options.blocks_per_slot } else { 1 };
        let options = Options { blocks_per_slot, ..options };
        let mut world = World::of(groups, num_device, num_host, options);
        for op in &ops {
            world.apply(op);
            world.check();
        }
        while !world.copies.is_empty() {
            world.end(0, true);
            world.check();
        }
        (0..4).for_each(|who| world.leave(who));
        world.check();
        prop_assert_eq!(world.scheduler.stats().storing_blocks, 0);
        prop_assert_eq!(world.ledger.pool().num_free(), world.device.len() - 1);
        // Every initiated transfer was completed once, and a store was committed before.
        let mut open = BTreeSet::new();
        for event in world.transfers.into_iter().chain(world.scheduler.take_transfer_events()) {
            match event {
                TransferEvent::Initiated { job_id, .. } => prop_assert!(open.insert(job_id)),
                TransferEvent::Committed { job_id, .. } => prop_assert!(open.contains(&job_id)),
                TransferEvent::Completed { job_id, .. } => prop_assert!(open.remove(&job_id)),
            }
        }
        prop_assert!(open.is_empty());
    }

    /// With room, every computed block is on the host once the jobs have ended. A hit is as long as
    /// the blocks that every group needs for it were computed.
    #[test]
    fn with_room_every_computed_block_is_stored(groups in models(), ops in vec(op(), 1..40)) {
        let mut world = World::of(groups.clone(), 80, 200, Options::default());
        for op in &ops {
            let op = match op {
                Op::Reset | Op::Tick | Op::Stop | Op::Sleep(Rest::Abrupt, _) => continue,
                // A running request does not store blocks again that a window has dropped.
                Op::Rot(_) if groups.iter().any(|group| group.attention != Attention::Full) => {
                    continue;
                }
                Op::End(which, _) => &Op::End(*which, true),
                other => other,
            };
            world.apply(op);
        }
        while !world.copies.is_empty() {
            world.end(0, true);
        }
        for which in 0..NUM_CHAINS {
            let servable = (world.num_servable(which), world.num_servable_in_full(which));
            prop_assert_eq!(world.served(which), servable);
        }
        prop_assert_eq!(world.scheduler.stats().evicted_blocks, 0);
        prop_assert_eq!(world.scheduler.stats().dropped_blocks, 0);
        let stats = world.scheduler.stats();
        prop_assert_eq!(stats.stored_blocks - stats.damaged_blocks, world.storable.len());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(num_cases() / 4))]

    /// A scheduler that was restored plans what one that was not plans: the same jobs, in the same
    /// slots, after the same evictions.
    #[test]
    fn a_restored_scheduler_goes_on_as_before(
        groups in models(), size in 4..16_usize, num_host in 1..12_usize,
        options in options(), ops in vec(op(), 1..60),
    ) {
        let is_full = groups.iter().all(|group| group.attention == Attention::Full);
        let blocks_per_slot = if is_full { options.blocks_per_slot } else { 1 };
        // A snapshot has no counts of sightings, so blocks must be seen anew.
        let options =
            Options { blocks_per_slot, mode: Mode::Eager, store_threshold: 1, ..options };
        let world = || World::of(groups.clone(), size * groups.len(), num_host, options);
        let (mut restored, mut other) = (world(), world());
        for op in &ops {
            if matches!(op, Op::Sleep(..)) {
                settle(&mut restored);
                settle(&mut other);
                let snapshot = restored.scheduler.snapshot().unwrap();
                prop_assert_eq!(&snapshot, &other.scheduler.snapshot().unwrap());
                let anew = OffloadScheduler::new(restored.config.clone()).unwrap();
                restored.scheduler = anew.restore(&snapshot).unwrap();
                for request in restored.requests.values_mut() {
                    request.num_reported.fill(0);
                }
                for world in [&mut restored, &mut other] {
                    let running: Vec<usize> = world.requests.keys().copied().collect();
                    for who in running {
                        let job = world.report(who);
                        world.begin_store(job);
                    }
                }
            } else {
                restored.apply(op);
                other.apply(op);
            }
            restored.check();
            let jobs = |world: &World| world.copies.iter().map(|copy| copy.job.clone()).collect::<Vec<_>>();
            prop_assert_eq!(jobs(&restored), jobs(&other));
            prop_assert_eq!(restored.scheduler.stats(), other.scheduler.stats());
        }
        settle(&mut restored);
        settle(&mut other);
        prop_assert_eq!(restored.scheduler.snapshot(), other.scheduler.snapshot());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(num_cases() / 10))]

    /// Lazy, with room and a horizon that covers all: what falls off the device is on the host.
    /// (Of a window not always: what leaves it may be taken again in the same call.)
    #[test]
    fn whatever_falls_off_the_device_is_kept(
        num_groups in 1..3_usize, ops in vec(op(), 1..40),
    ) {
        let groups = vec![Group::new(Attention::Full, BLOCK_SIZE).unwrap(); num_groups];
        let num_device = 12 * num_groups;
        let mut world = World::of(groups, num_device, 200, Options { mode: Mode::Lazy, ..Options::default() });
        let keep = |world: &mut World| {
            world.store_evictable(num_device);
            settle(world);
        };
        for op in &ops {
            if matches!(op, Op::Admit(..) | Op::Run(..) | Op::Leave(_)) {
                world.apply(op);
                world.check();
                keep(&mut world);
            }
        }
        (0..4).for_each(|who| world.leave(who));
        keep(&mut world);
        for which in 0..NUM_CHAINS {
            let servable = (world.num_servable(which), world.num_servable_in_full(which));
            prop_assert_eq!(world.served(which), servable);
        }
        prop_assert!(world.scheduler.stats().stored_blocks <= world.storable.len());
    }
}

/// Runs one request through `len` blocks of a chain, and ends its jobs.
fn serve(world: &mut World, which: usize, len: usize) {
    world.admit(0, which, len, usize::MAX);
    while !world.copies.is_empty() {
        world.end(0, true);
    }
    let computed = world.requests[&0].computed;
    world.run(0, len * BLOCK_SIZE - computed);
    while !world.copies.is_empty() {
        world.end(0, true);
    }
    world.leave(0);
    world.check();
}

#[test]
fn the_least_recent_chain_is_evicted_first_from_its_tail() {
    let mut world = World::new(32, 6);
    serve(&mut world, 0, 4);
    serve(&mut world, 3, 2);
    // Two more blocks: chain 0 loses its last two.
    serve(&mut world, 3, 4);
    assert_eq!((world.num_served(0), world.num_served(3)), (2, 4));
    assert_eq!(world.scheduler.stats().evicted_blocks, 2);
}

#[test]
fn a_chain_that_was_used_again_stays() {
    let mut world = World::new(32, 6);
    serve(&mut world, 0, 3);
    serve(&mut world, 3, 3);
    serve(&mut world, 0, 3);
    serve(&mut world, 2, 2);
    // Chain 2 shares its root with chain 0 and needs one slot: the tail of chain 3 is evicted.
    assert_eq!((world.num_served(0), world.num_served(3), world.num_served(2)), (3, 2, 2));
}

/// Every resident block is served: no chain has a middle or a tail without its prefix.
#[test]
fn no_policy_evicts_the_parent_of_a_resident_slot() {
    for mut world in World::of_each_policy(7) {
        for round in 0..60_usize {
            serve(&mut world, round * round % NUM_CHAINS, 2 + round % 6);
            assert!(world.ledger.pool_mut().reset());
            let served: BTreeSet<u16> =
                (0..NUM_CHAINS).flat_map(|which| chain(which, world.num_served(which))).collect();
            assert_eq!(served.len(), world.scheduler.num_resident());
        }
        assert!(world.scheduler.stats().evicted_blocks > 50);
    }
}

/// The least recent slots are not leaves here, because the block after them is in a store.
#[test]
fn no_policy_evicts_the_parent_of_a_store_in_flight() {
    for mut world in World::of_each_policy(5) {
        prefill(&mut world, 0, 0, 2);
        world.run(0, BLOCK_SIZE);
        assert_eq!(world.copies.len(), 1);
        world.admit(1, 3, 8, 0);
        world.run(1, 4 * BLOCK_SIZE);
        while world.copies.len() > 1 {
            world.end(1, true);
        }
        world.leave(1);
        settle(&mut world);
        world.check();
        assert_eq!((world.num_served(0), world.num_served(3)), (3, 2));
    }
}

#[test]
fn no_policy_evicts_slots_that_a_lookup_holds() {
    for mut world in World::of_each_policy(5) {
        serve(&mut world, 0, 3);
        world.scheduler.add("holder", &hashes(&chain(0, 3))).unwrap();
        let held = Some(3 * BLOCK_SIZE);
        assert_eq!(world.scheduler.lookup("holder", 0, usize::MAX), Ok(held));
        for _ in 0..5 {
            serve(&mut world, 3, 4);
            serve(&mut world, 2, 4);
            assert_eq!(world.num_served(0), 3);
        }
        assert!(world.scheduler.stats().evicted_blocks > 0);
        world.scheduler.finish("holder").unwrap();
        world.check();
    }
}

#[test]
fn blocks_without_room_are_counted_and_a_prefix_is_stored() {
    let mut world = World::new(32, 3);
    serve(&mut world, 0, 5);
    assert_eq!(world.num_served(0), 3);
    assert_eq!(world.scheduler.stats().dropped_blocks, 2);
}

/// Ends every job.
fn settle(world: &mut World) {
    while !world.copies.is_empty() {
        world.end(0, true);
    }
}

/// Admits `who` with a whole chain without hits, and computes it. The request stays.
fn prefill(world: &mut World, who: usize, which: usize, len: usize) {
    world.admit(who, which, 8, 0);
    let computed = world.requests[&who].computed;
    world.run(who, len * BLOCK_SIZE - computed);
    settle(world);
}

#[test]
fn a_store_makes_the_whole_chain_recent() {
    let mut world = World::new(32, 5);
    prefill(&mut world, 0, 0, 2);
    prefill(&mut world, 1, 3, 2);
    world.run(0, BLOCK_SIZE);
    settle(&mut world);
    // Chain 0 has one more block, so all of it is more recent than chain 3, which is evicted.
    prefill(&mut world, 2, 2, 3);
    assert_eq!((world.num_served(0), world.num_served(3), world.num_served(2)), (3, 0, 3));
}

#[test]
fn a_restart_equals_finish_and_add() {
    let mut world = World::new(32, 6);
    prefill(&mut world, 0, 0, 3);
    prefill(&mut world, 1, 3, 3);
    let (mut added, mut restarted) = (world.scheduler.clone(), world.scheduler);
    added.finish("0").unwrap();
    added.add("0", &hashes(&chain(0, 8))).unwrap();
    restarted.restart("0").unwrap();
    restarted.check().unwrap();
    // Until it leaves, a request that was restarted knows what it has used.
    let life = |scheduler: &mut OffloadScheduler| {
        let found = scheduler.lookup("0", 0, usize::MAX).unwrap();
        scheduler.release("0").unwrap();
        let new_blocks = ids(&(20..28).collect::<Vec<u32>>());
        let num_computed_tokens = 8 * BLOCK_SIZE;
        let progress =
            Progress { request_id: "0", num_computed_tokens, new_blocks: &[&new_blocks] };
        let job = scheduler.store(std::iter::once(progress), None).unwrap();
        scheduler.end_all().unwrap();
        scheduler.finish("0").unwrap();
        (found, job, scheduler.snapshot().unwrap())
    };
    assert_eq!(life(&mut added), life(&mut restarted));
    assert!(matches!(restarted.restart("nobody"), Err(Error::UnknownRequest { .. })));
}

#[test]
fn a_load_makes_the_whole_chain_recent() {
    let mut world = World::new(32, 6);
    serve(&mut world, 0, 3);
    serve(&mut world, 3, 3);
    assert!(world.ledger.pool_mut().reset());
    world.admit(0, 0, 3, usize::MAX);
    settle(&mut world);
    assert_eq!(world.scheduler.stats().loaded_blocks, 2, "one token is left to compute");
    // Chain 2 shares its root with chain 0 and needs two slots: those of the least recent tails.
    // These are chain 0's third block, which was not loaded, and chain 3's.
    prefill(&mut world, 1, 2, 3);
    assert_eq!((world.num_served(0), world.num_served(3), world.num_served(2)), (2, 2, 3));
}

#[test]
fn a_lookup_is_pending_while_another_request_loads_the_blocks() {
    let mut world = World::new(32, 6);
    serve(&mut world, 0, 4);
    assert!(world.ledger.pool_mut().reset());
    world.admit(0, 0, 4, 2);
    assert_eq!(world.copies.len(), 1);
    world.scheduler.add("other", &hashes(&chain(0, 4))).unwrap();
    assert_eq!(world.scheduler.lookup("other", 0, usize::MAX).unwrap(), None);
    world.check();
    settle(&mut world);
    assert_eq!(world.scheduler.lookup("other", 0, usize::MAX).unwrap(), Some(4 * BLOCK_SIZE));
}

#[test]
fn an_evicted_chain_of_a_live_request_is_stored_again_from_its_root() {
    let mut world = World::new(32, 4);
    prefill(&mut world, 0, 0, 2);
    prefill(&mut world, 1, 3, 4);
    assert_eq!((world.num_served(0), world.num_served(3)), (0, 4));
    world.run(0, BLOCK_SIZE);
    settle(&mut world);
    assert_eq!((world.num_served(0), world.num_served(3)), (3, 1));
}

#[test]
fn after_a_reset_loads_do_not_count_and_live_requests_store_again() {
    let mut world = World::new(32, 8);
    serve(&mut world, 0, 4);
    assert!(world.ledger.pool_mut().reset());
    prefill(&mut world, 1, 3, 2);
    world.admit(0, 0, 4, 3);
    let load = world.copies[0].job.clone();
    world.apply(&Op::Reset);
    let end = world.scheduler.complete(load.job_id, 0, true).unwrap().unwrap();
    assert_eq!((end.is_ok, end.block_ids), (false, load.block_ids));
    assert_eq!(world.scheduler.stats().failed_loads, 1);
    assert_eq!(world.num_served(3), 0);
    world.copies.clear();
    world.run(1, 1);
    settle(&mut world);
    assert_eq!(world.num_served(3), 2, "stored again without a new full block");
}

/// Hashes that are not a chain, for example content ids, must not link the tier's slots into a loop.
#[test]
fn hashes_that_are_not_a_chain_make_no_slot_its_own_parent() {
    let groups = vec![Group::new(Attention::Full, BLOCK_SIZE).unwrap()];
    let mut scheduler = OffloadScheduler::new(OffloadConfig::new(4, groups)).unwrap();
    for (id, names) in [("p", &[1][..]), ("k", &[2]), ("l", &[3]), ("all", &[1, 2, 3, 4, 5, 6])] {
        scheduler.add(id, &hashes(names)).unwrap();
    }
    let stores =
        [("p", 1, 1..2), ("k", 1, 2..3), ("l", 1, 3..4), ("all", 1, 4..10), ("all", 6, 0..0)];
    for (request_id, num_blocks, new) in stores {
        let new_blocks = ids(&new.collect::<Vec<u32>>());
        let num_computed_tokens = num_blocks * BLOCK_SIZE;
        let progress = Progress { request_id, num_computed_tokens, new_blocks: &[&new_blocks] };
        if let Some(job) = scheduler.store(std::iter::once(progress), None).unwrap() {
            scheduler.complete(job.job_id, 0, true).unwrap();
        }
        scheduler.check().unwrap();
    }
    // The request's blocks on the host stay. It gets only the one empty slot.
    assert_eq!(scheduler.stats().resident_blocks, 4);
    assert_eq!(scheduler.stats().evicted_blocks, 0);
}

/// Such a list may hold a hash twice. The tier has one slot for it.
#[test]
fn a_key_that_is_listed_twice_is_stored_once() {
    let groups = vec![Group::new(Attention::Full, BLOCK_SIZE).unwrap()];
    let mut scheduler = OffloadScheduler::new(OffloadConfig::new(8, groups)).unwrap();
    scheduler.add("a", &hashes(&[1, 2, 1, 3])).unwrap();
    let new_blocks = ids(&[1, 2, 3, 4]);
    let progress = Progress {
        request_id: "a",
        num_computed_tokens: 4 * BLOCK_SIZE,
        new_blocks: &[&new_blocks],
    };
    let job = scheduler.store(std::iter::once(progress), None).unwrap().unwrap();
    assert_eq!(raw(job.block_ids.iter().copied()), [1, 2, 4]);
    scheduler.complete(job.job_id, 0, true).unwrap();
    scheduler.check().unwrap();
    assert_eq!(scheduler.stats().resident_blocks, 3);
}

/// Whatever a caller reports, only hashed and allocated blocks are stored.
#[test]
fn blocks_that_are_not_hashed_or_allocated_are_not_stored() {
    let groups = vec![Group::new(Attention::Full, BLOCK_SIZE).unwrap()];
    let mut scheduler = OffloadScheduler::new(OffloadConfig::new(8, groups)).unwrap();
    scheduler.add("a", &hashes(&[1, 2, 3])).unwrap();
    let mut store = |new: &[u32]| {
        let new_blocks = ids(new);
        let progress =
            Progress { request_id: "a", num_computed_tokens: 1000, new_blocks: &[&new_blocks] };
        let job = scheduler.store(std::iter::once(progress), None).unwrap();
        scheduler.check().unwrap();
        job.map_or(Vec::new(), |job| raw(job.block_ids))
    };
    assert_eq!(store(&[5, 6]), [5, 6]);
    assert_eq!(store(&[7, 8, 9]), [7]);
    assert_eq!(store(&[]), []);
}

/// Lazy mode: a block whose content is not what was computed into it has another user by now.
#[test]
fn a_former_key_of_a_block_is_not_stored() {
    let groups = vec![Group::new(Attention::Full, BLOCK_SIZE).unwrap()];
    let config = OffloadConfig { mode: Mode::Lazy, ..OffloadConfig::new(8, groups) };
    let mut scheduler = OffloadScheduler::new(config).unwrap();
    scheduler.add("a", &hashes(&[1, 2])).unwrap();
    let new_blocks = ids(&[5, 6]);
    let progress = Progress {
        request_id: "a",
        num_computed_tokens: 2 * BLOCK_SIZE,
        new_blocks: &[&new_blocks],
    };
    assert!(scheduler.store(std::iter::once(progress), None).unwrap().is_none());
    let key = |at: usize| BlockKey { hash: hashes(&[1, 2, 3]).as_slice()[at], group: GroupId(0) };
    let candidates = [(BlockId(5), key(2)), (BlockId(6), key(1)), (BlockId(7), key(0))];
    let job = scheduler.store_evictable(candidates.into_iter(), None).unwrap().unwrap();
    assert_eq!(raw(job.block_ids), [6]);
}
