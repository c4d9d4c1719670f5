//! What the jobs of the tiers make recent, and the cost for blocks that share a prefix, in looks at
//! slots.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use crate::group::{Attention, Group};
use crate::ids::GroupId;
use crate::key::{BlockHash, Hashes, HashesBuilder};
use crate::offload::tier::{EvictionPolicy, looks};
use crate::offload::{OffloadConfig, Progress};

use super::*;

const BLOCK_SIZE: usize = 16;
const PREFIX: usize = 512;
const NUM_REQUESTS: usize = 64;
/// Blocks of each request after the prefix.
const NUM_OWN: usize = 2;
const NUM_SLOTS: usize = PREFIX + NUM_REQUESTS * NUM_OWN;
/// A few for each slot. A look at the whole prefix for each request would take 50 times as many.
const MAX_LOOKS: usize = 12 * NUM_SLOTS;

/// The hash of a request's block. All requests have the prefix in common.
fn hash(request: usize, at: usize) -> BlockHash {
    let mut hash = BlockHash::default();
    let name = if at < PREFIX { 0 } else { request + 1 };
    hash[..8].copy_from_slice(&name.to_le_bytes());
    hash[8..16].copy_from_slice(&at.to_le_bytes());
    hash
}

fn hashes(all: impl Iterator<Item = BlockHash>) -> Hashes {
    let mut hashes = HashesBuilder::default();
    all.for_each(|hash| hashes.push(&hash).unwrap());
    hashes.finish()
}

fn scheduler(policy: EvictionPolicy) -> OffloadScheduler {
    let groups = vec![Group::new(Attention::Full, BLOCK_SIZE).unwrap()];
    let disk = DiskConfig { policy, max_in_flight_blocks: NUM_SLOTS, ..DiskConfig::new(NUM_SLOTS) };
    let config =
        OffloadConfig { policy, disk: Some(disk), ..OffloadConfig::new(NUM_SLOTS, groups) };
    let mut scheduler = OffloadScheduler::new(config).unwrap();
    scheduler.set_disk(DiskMode::On).unwrap();
    for request in 0..NUM_REQUESTS {
        let all = (0..PREFIX + NUM_OWN).map(|at| hash(request, at));
        scheduler.add(&request.to_string(), &hashes(all)).unwrap();
    }
    scheduler
}

/// Completes a job, with at most so many looks at slots.
fn complete(scheduler: &mut OffloadScheduler, job_id: JobId, max_looks: usize) {
    looks::take();
    let end = scheduler.complete(job_id, 0, true).unwrap().unwrap();
    let num_looks = looks::take();
    assert!(num_looks <= max_looks, "{num_looks} looks, at most {max_looks}");
    assert!(end.is_ok);
}

/// Plans a store of the first requests, each with the first `num_own` blocks of its own.
fn store(scheduler: &mut OffloadScheduler, num_requests: usize, num_own: usize) -> JobId {
    let ids: Vec<String> = (0..num_requests).map(|request| request.to_string()).collect();
    let blocks: Vec<BlockId> = (1..).map(BlockId).take(PREFIX + NUM_OWN).collect();
    let num_before = if num_own == 1 { 0 } else { PREFIX + num_own - 1 };
    let new_blocks = [&blocks[num_before..PREFIX + num_own]];
    let num_computed_tokens = (PREFIX + num_own) * BLOCK_SIZE;
    let progress = ids.iter().map(|id| Progress {
        request_id: id,
        num_computed_tokens,
        new_blocks: &new_blocks,
    });
    scheduler.store(progress, None).unwrap().unwrap().job_id
}

#[test]
fn a_job_looks_at_a_shared_prefix_once() {
    for policy in EvictionPolicy::ALL {
        let mut scheduler = scheduler(policy);
        for num_own in 1..=NUM_OWN {
            let job_id = store(&mut scheduler, NUM_REQUESTS, num_own);
            complete(&mut scheduler, job_id, MAX_LOOKS);
            let job = scheduler.demote(NUM_SLOTS, None).unwrap().unwrap();
            complete(&mut scheduler, job.job_id, MAX_LOOKS);
        }
        assert_eq!(scheduler.disk_stats().demoted_blocks, NUM_SLOTS);
        scheduler.check().unwrap();
    }
}

#[test]
fn a_promote_looks_at_a_shared_prefix_once() {
    for policy in EvictionPolicy::ALL {
        let mut scheduler = scheduler(policy);
        let own = (0..NUM_REQUESTS)
            .flat_map(|request| (PREFIX..PREFIX + NUM_OWN).map(move |at| (request, at)));
        let blocks: Vec<(usize, usize)> = (0..PREFIX).map(|at| (0, at)).chain(own).rev().collect();
        let parents: Vec<Option<BlockHash>> = blocks
            .iter()
            .map(|&(request, at)| at.checked_sub(1).map(|before| hash(request, before)))
            .collect();
        let keys = hashes(blocks.iter().map(|&(request, at)| hash(request, at)));
        let slots: Vec<usize> = (0..NUM_SLOTS).collect();
        let groups = vec![GroupId(0); NUM_SLOTS];
        assert_eq!(scheduler.adopt_disk(&slots, &keys, &groups, &parents), Ok(NUM_SLOTS));
        let num_tokens = (PREFIX + NUM_OWN) * BLOCK_SIZE;
        for request in 0..NUM_REQUESTS {
            assert_eq!(scheduler.lookup_below(&request.to_string(), 0, num_tokens), Ok(None));
        }
        let job = scheduler.promote(NUM_SLOTS, None).unwrap().unwrap();
        complete(&mut scheduler, job.job_id, MAX_LOOKS);
        assert_eq!(scheduler.num_resident(), NUM_SLOTS);
        scheduler.check().unwrap();
    }
}

/// A scheduler with an open disk, both tiers of eight slots.
fn small() -> OffloadScheduler {
    let groups = vec![Group::new(Attention::Full, BLOCK_SIZE).unwrap()];
    let disk = Some(DiskConfig::new(8));
    let config = OffloadConfig { disk, ..OffloadConfig::new(8, groups) };
    let mut scheduler = OffloadScheduler::new(config).unwrap();
    scheduler.set_disk(DiskMode::On).unwrap();
    scheduler
}

fn named(names: &[u8]) -> Hashes {
    hashes(names.iter().map(|&name| [name; 32]))
}

/// Stores the next blocks of requests in one job. Each request has `num_before` already.
fn store_named(scheduler: &mut OffloadScheduler, new: &[(&str, usize, &[u8])]) {
    let mut blocks: Vec<Vec<BlockId>> = Vec::new();
    for &(id, num_before, names) in new {
        if num_before == 0 {
            scheduler.add(id, &named(names)).unwrap();
        } else {
            scheduler.extend(id, &named(names)).unwrap();
        }
        blocks.push(names.iter().map(|&name| BlockId(name.into())).collect());
    }
    let new_blocks: Vec<[&[BlockId]; 1]> =
        blocks.iter().map(|blocks| [blocks.as_slice()]).collect();
    let progress = new.iter().zip(&new_blocks).map(|(&(id, num_before, names), blocks)| Progress {
        request_id: id,
        num_computed_tokens: (num_before + names.len()) * BLOCK_SIZE,
        new_blocks: blocks,
    });
    let job = scheduler.store(progress, None).unwrap().unwrap();
    complete(scheduler, job.job_id, MAX_LOOKS);
}

fn demote(scheduler: &mut OffloadScheduler, max_blocks: usize) {
    let job = scheduler.demote(max_blocks, None).unwrap().unwrap();
    complete(scheduler, job.job_id, MAX_LOOKS);
}

/// The names of a tier's blocks, the first victim first.
fn order(tier: &Tier) -> Vec<u8> {
    tier.eviction_order().iter().map(|&slot| tier.slots.key(slot).unwrap().hash[0]).collect()
}

fn disk_order(scheduler: &OffloadScheduler) -> Vec<u8> {
    order(&scheduler.disk.as_ref().unwrap().tier)
}

#[test]
fn a_demote_and_a_store_make_the_chain_on_the_disk_recent() {
    let mut scheduler = small();
    store_named(&mut scheduler, &[("a", 0, &[1, 2, 3]), ("b", 0, &[4])]);
    demote(&mut scheduler, 2);
    assert_eq!(disk_order(&scheduler), [2, 1]);
    demote(&mut scheduler, 1);
    assert_eq!(disk_order(&scheduler), [3, 2, 1]);
    demote(&mut scheduler, 1);
    assert_eq!(disk_order(&scheduler), [3, 2, 1, 4]);
    store_named(&mut scheduler, &[("a", 3, &[5])]);
    assert_eq!(disk_order(&scheduler), [4, 3, 2, 1]);
    // Of one job, the last chain becomes the most recent.
    store_named(&mut scheduler, &[("a", 4, &[6]), ("b", 1, &[7])]);
    assert_eq!(disk_order(&scheduler), [3, 2, 1, 4]);
    scheduler.check().unwrap();
}

#[test]
fn a_warm_disk_evicts_the_tail_of_the_oldest_chain_first() {
    let mut scheduler = small();
    // 1 to 3 are a chain whose last block was written after 4 and 5, which are another one.
    let (names, before): ([u8; 5], [u8; 5]) = ([1, 2, 4, 5, 3], [0, 1, 0, 4, 2]);
    let parents = before.map(|name| (name > 0).then_some([name; 32]));
    for part in [0..3, 3..5] {
        let slots: Vec<usize> = part.clone().collect();
        let groups = vec![GroupId(0); slots.len()];
        let adopted =
            scheduler.adopt_disk(&slots, &named(&names[part.clone()]), &groups, &parents[part]);
        assert_eq!(adopted, Ok(slots.len()));
    }
    assert_eq!(disk_order(&scheduler), [5, 4, 3, 2, 1]);
    scheduler.check().unwrap();
}

#[test]
fn a_promote_makes_the_chain_recent_in_both_tiers() {
    let mut scheduler = small();
    let parents = [Some([2; 32]), Some([1; 32]), None, None];
    let adopted =
        scheduler.adopt_disk(&[0, 1, 2, 3], &named(&[3, 2, 1, 4]), &[GroupId(0); 4], &parents);
    assert_eq!(adopted, Ok(4));
    assert_eq!(disk_order(&scheduler), [3, 2, 1, 4]);
    store_named(&mut scheduler, &[("a", 0, &[1])]);
    store_named(&mut scheduler, &[("c", 0, &[7])]);
    assert_eq!((order(&scheduler.host), disk_order(&scheduler)), (vec![1, 7], vec![3, 2, 4, 1]));
    scheduler.add("b", &named(&[1, 2])).unwrap();
    assert_eq!(scheduler.lookup_below("b", 0, 2 * BLOCK_SIZE), Ok(None));
    let job = scheduler.promote(8, None).unwrap().unwrap();
    complete(&mut scheduler, job.job_id, MAX_LOOKS);
    assert_eq!((order(&scheduler.host), disk_order(&scheduler)), (vec![7, 2, 1], vec![3, 4, 2, 1]));
    scheduler.check().unwrap();
}

/// The disk has nothing of this prompt. A step of it must not look at the whole prompt again.
#[test]
fn a_store_looks_no_further_than_the_block_before_it() {
    let mut scheduler = scheduler(EvictionPolicy::Lru);
    scheduler.set_disk(DiskMode::ReadOnly).unwrap();
    let job_id = store(&mut scheduler, 1, 1);
    complete(&mut scheduler, job_id, MAX_LOOKS);
    let job_id = store(&mut scheduler, 1, 2);
    complete(&mut scheduler, job_id, 32);
}
