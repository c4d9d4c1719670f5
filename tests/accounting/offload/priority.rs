//! Which blocks leave the tier first if some requests have low priority.

use kvstow_core::group::{Attention, Group};
use kvstow_core::ids::BlockId;
use kvstow_core::offload::{EvictionPolicy, Mode, OffloadConfig, OffloadScheduler, Progress};

use super::super::{hashes, ids};
use super::ops::Options;
use super::world::{BLOCK_SIZE, World};
use super::{serve, settle};

/// One world of 7 slots for each policy and mode.
fn worlds() -> impl Iterator<Item = World> {
    let options = |policy| [Mode::Eager, Mode::Lazy].map(|mode| (policy, mode));
    EvictionPolicy::ALL.into_iter().flat_map(options).map(|(policy, mode)| {
        let groups = vec![Group::new(Attention::Full, BLOCK_SIZE).unwrap()];
        World::of(groups, 32, 7, Options { mode, policy, ..Options::default() })
    })
}

/// As [`serve`], in lazy mode with the stores of all that the device may evict.
fn serve_and_keep(world: &mut World, which: usize, len: usize) {
    serve(world, which, len);
    keep(world);
}

fn keep(world: &mut World) {
    if world.config.mode == Mode::Lazy {
        world.store_evictable(32);
        settle(world);
    }
}

/// Serves one request of low priority.
fn serve_low(world: &mut World, which: usize, len: usize) {
    world.low_priority.insert(0);
    serve_and_keep(world, which, len);
    world.low_priority.clear();
}

#[test]
fn blocks_of_low_priority_are_evicted_first_from_their_tail() {
    for mut world in worlds() {
        serve_and_keep(&mut world, 0, 3);
        serve_low(&mut world, 3, 3);
        // Three new blocks, and one slot is empty.
        serve_and_keep(&mut world, 2, 4);
        assert_eq!((world.num_served(0), world.num_served(3), world.num_served(2)), (3, 1, 4));
    }
}

/// The negative control of the test above.
#[test]
fn without_low_priority_the_older_chain_is_evicted() {
    for mut world in worlds() {
        serve_and_keep(&mut world, 0, 3);
        serve_and_keep(&mut world, 3, 3);
        serve_and_keep(&mut world, 2, 4);
        assert_eq!((world.num_served(0), world.num_served(3), world.num_served(2)), (1, 3, 4));
    }
}

#[test]
fn a_request_of_normal_priority_makes_such_blocks_normal() {
    for mut world in worlds() {
        serve_and_keep(&mut world, 0, 3);
        serve_low(&mut world, 3, 3);
        serve_and_keep(&mut world, 3, 3);
        serve_and_keep(&mut world, 2, 4);
        assert_eq!((world.num_served(0), world.num_served(3), world.num_served(2)), (1, 3, 4));
    }
}

#[test]
fn a_request_of_low_priority_makes_no_block_recent() {
    for mut world in worlds() {
        serve_and_keep(&mut world, 0, 3);
        serve_and_keep(&mut world, 3, 3);
        // One from the device, one from the host.
        serve_low(&mut world, 0, 3);
        assert!(world.ledger.pool_mut().reset());
        serve_low(&mut world, 0, 3);
        serve_and_keep(&mut world, 2, 4);
        assert_eq!((world.num_served(0), world.num_served(3), world.num_served(2)), (1, 3, 4));
    }
}

/// A chain of normal priority makes the blocks above it normal, although one job stores both.
#[test]
fn one_job_stores_a_chain_of_both_priorities() {
    for policy in EvictionPolicy::ALL {
        let groups = vec![Group::new(Attention::Full, BLOCK_SIZE).unwrap()];
        let config = OffloadConfig { policy, ..OffloadConfig::new(5, groups) };
        let mut scheduler = OffloadScheduler::new(config).unwrap();
        let mut store = |names: &[(&str, &[u16], bool)], first_block: u32| {
            let mut end = first_block;
            let mut tables = Vec::new();
            for &(id, names, is_low) in names {
                scheduler.add(id, &hashes(names)).unwrap();
                if is_low {
                    scheduler.lower_priority(id).unwrap();
                }
                let begin = end;
                end += u32::try_from(names.len()).unwrap();
                tables.push([ids(&(begin..end).collect::<Vec<_>>())]);
            }
            let tables: Vec<[&[BlockId]; 1]> = tables.iter().map(|[ids]| [&ids[..]]).collect();
            let progress = names.iter().zip(&tables).map(|(&(request_id, names, _), table)| {
                let num_computed_tokens = names.len() * BLOCK_SIZE;
                Progress { request_id, num_computed_tokens, new_blocks: table }
            });
            let job = scheduler.store(progress, None).unwrap().unwrap();
            scheduler.complete(job.job_id, 0, true).unwrap();
            for (id, ..) in names {
                scheduler.check().unwrap();
                scheduler.finish(id).unwrap();
            }
            scheduler.check().unwrap();
        };
        store(&[("other", &[9], false)], 1);
        store(&[("low", &[1, 2], true), ("normal", &[1, 2, 3, 4], false)], 2);
        store(&[("new", &[5], false)], 8);
        let mut num_served = |names| {
            scheduler.add("probe", &hashes(names)).unwrap();
            let found = scheduler.lookup("probe", 0, usize::MAX).unwrap().unwrap();
            scheduler.finish("probe").unwrap();
            found / BLOCK_SIZE
        };
        assert_eq!((num_served(&[9]), num_served(&[1, 2, 3, 4]), num_served(&[5])), (0, 4, 1));
    }
}

#[test]
fn a_request_keeps_its_low_priority_when_it_starts_again() {
    for mut world in World::of_each_policy(7) {
        serve(&mut world, 0, 3);
        world.low_priority.insert(0);
        world.admit(0, 3, 3, 0);
        world.low_priority.clear();
        world.scheduler.restart("0").unwrap();
        settle(&mut world);
        let snapshot = world.scheduler.snapshot().unwrap();
        let anew = OffloadScheduler::new(world.config.clone()).unwrap();
        world.scheduler = anew.restore(&snapshot).unwrap();
        world.requests.get_mut(&0).unwrap().num_reported.fill(0);
        world.run(0, 3 * BLOCK_SIZE - 1);
        settle(&mut world);
        world.leave(0);
        serve(&mut world, 2, 4);
        assert_eq!((world.num_served(0), world.num_served(3), world.num_served(2)), (3, 1, 4));
    }
}
