//! The cost of lookups, in looks at slots.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use crate::group::Group;
use crate::key::{Hashes, HashesBuilder};
use crate::offload::tier::{EvictionPolicy, looks};
use crate::offload::{OffloadConfig, Progress};

use super::*;

const BLOCK_SIZE: usize = 16;

fn chain(name: u16, len: u16) -> Hashes {
    let mut hashes = HashesBuilder::default();
    for at in 0..len {
        let mut digest = [0; 32];
        digest[..2].copy_from_slice(&name.to_le_bytes());
        digest[2..4].copy_from_slice(&at.to_le_bytes());
        hashes.push(&digest).unwrap();
    }
    hashes.finish()
}

/// Stores the next `num_new` blocks of a request that has `num_blocks` with them.
fn store(scheduler: &mut OffloadScheduler, request_id: &str, num_blocks: usize, num_new: usize) {
    let new_blocks: Vec<BlockId> = (1..).map(BlockId).take(num_new).collect();
    let num_computed_tokens = num_blocks * BLOCK_SIZE;
    let new_blocks = [new_blocks.as_slice()];
    let progress = Progress { request_id, num_computed_tokens, new_blocks: &new_blocks };
    let job = scheduler.store([progress].into_iter(), None).unwrap().unwrap();
    assert!(scheduler.complete(job.job_id, 0, true).unwrap().unwrap().is_ok);
}

/// A waiting request may look up in every step. What it finds again was pinned all the time.
#[test]
fn a_repeated_lookup_makes_no_search_begin_anew() {
    const NUM_WAITING: u16 = 8;
    const LEN: u16 = 128;
    const NUM_STEPS: usize = 64;
    for policy in EvictionPolicy::ALL {
        let num_held = usize::from(NUM_WAITING * LEN);
        let groups = vec![Group::new(Attention::Full, BLOCK_SIZE).unwrap()];
        let config = OffloadConfig { policy, ..OffloadConfig::new(num_held + NUM_STEPS, groups) };
        let mut scheduler = OffloadScheduler::new(config).unwrap();
        let max_tokens = usize::from(LEN) * BLOCK_SIZE;
        for name in 0..NUM_WAITING {
            let id = name.to_string();
            scheduler.add(&id, &chain(name, LEN)).unwrap();
            store(&mut scheduler, &id, LEN.into(), LEN.into());
            scheduler.finish(&id).unwrap();
            scheduler.add(&id, &chain(name, LEN)).unwrap();
            assert_eq!(scheduler.lookup(&id, 0, max_tokens), Ok(Some(max_tokens)));
        }
        // What the running request evicts lies behind all that is held.
        scheduler.add("gone", &chain(NUM_WAITING, NUM_STEPS.try_into().unwrap())).unwrap();
        store(&mut scheduler, "gone", NUM_STEPS, NUM_STEPS);
        scheduler.finish("gone").unwrap();
        scheduler.add("running", &chain(NUM_WAITING + 1, NUM_STEPS.try_into().unwrap())).unwrap();
        looks::take();
        for step in 1..=NUM_STEPS {
            store(&mut scheduler, "running", step, 1);
            assert_eq!(scheduler.lookup("0", 0, max_tokens), Ok(Some(max_tokens)));
        }
        let num_looks = looks::take();
        // Each lookup looks at its own slots. The searches look at all that is held only once.
        let max_looks = 2 * num_held + NUM_STEPS * (usize::from(LEN) + 32);
        assert!(num_looks <= max_looks, "{policy:?}: {num_looks} looks, at most {max_looks}");
        scheduler.check().unwrap();
    }
}
