//! Claims of a shared store's blocks, and the hits that they bring.

use std::collections::BTreeSet;

use kvstow_core::error::Error;
use kvstow_core::group::{Attention, Group};
use kvstow_core::ids::GroupId;
use kvstow_core::key::BlockKey;
use kvstow_core::offload::{DiskConfig, DiskMode, OffloadConfig, OffloadScheduler, Outcome};
use proptest::collection::vec;
use proptest::prelude::*;

use super::super::offload::chain;
use super::super::{hashes, num_cases};
use super::lru::Instant;
use super::plans::{ask, chained, groups, names_of, open, store};

const BLOCK_SIZE: usize = 4;

fn names(keys: &[BlockKey]) -> Vec<u16> {
    keys.iter().map(|key| u16::from_be_bytes([key.hash[6], key.hash[7]])).collect()
}

fn unclaimed(scheduler: &OffloadScheduler, request_id: &str) -> Vec<u16> {
    let found = scheduler.unclaimed(request_id, 0, usize::MAX, usize::MAX).unwrap();
    assert_eq!(found.keys.len(), found.parents.len());
    names(&found.keys)
}

fn claim(scheduler: &mut OffloadScheduler, names: &[u16]) -> usize {
    let groups = vec![GroupId(0); names.len()];
    let num = scheduler.claim(&hashes(names), &groups, &chained(names)).unwrap();
    scheduler.check().unwrap();
    num
}

#[test]
fn a_claimed_block_is_promoted_and_a_promote_that_fails_drops_its_claim() {
    let prompt = [1, 2, 3, 4];
    let mut scheduler = open(8, DiskConfig::new(8));
    store(&mut scheduler, "a", &prompt[..1], 1);
    scheduler.finish("a").unwrap();
    scheduler.add("b", &hashes(&prompt)).unwrap();
    assert_eq!(unclaimed(&scheduler, "b"), [2, 3, 4], "the host has the first block");
    assert_eq!(claim(&mut scheduler, &prompt[1..3]), 2);
    assert_eq!(unclaimed(&scheduler, "b"), [4]);
    assert_eq!(claim(&mut scheduler, &prompt[1..3]), 0, "claimed already");
    assert_eq!(ask(&mut scheduler, "b", &prompt), None);
    let job = scheduler.promote(usize::MAX, None).unwrap().unwrap();
    assert_eq!(names_of(&job), [2, 3]);
    scheduler.complete(job.job_id, 0, Outcome::Blocks(vec![true, false])).unwrap();
    assert_eq!(ask(&mut scheduler, "b", &prompt), Some(2));
    assert_eq!(unclaimed(&scheduler, "b"), [], "it has waited once");
    scheduler.restart("b").unwrap();
    assert_eq!(unclaimed(&scheduler, "b"), [3, 4], "the claim of the lost block is gone");
    let stats = scheduler.disk_stats();
    assert_eq!((stats.claimed_blocks, stats.promoted_blocks, stats.failed_promotes), (2, 1, 1));
}

#[test]
fn a_claimed_block_is_not_put_again() {
    let prompt = [1, 2, 3];
    let mut scheduler = open(8, DiskConfig::new(8));
    assert_eq!(claim(&mut scheduler, &prompt[..2]), 2);
    store(&mut scheduler, "a", &prompt, 1);
    let job = scheduler.demote(usize::MAX, None).unwrap().unwrap();
    assert_eq!(names_of(&job), [3]);
}

#[test]
fn the_first_blocks_of_a_prompt_get_the_room_of_the_index() {
    let mut scheduler = open(8, DiskConfig::new(3));
    assert_eq!(claim(&mut scheduler, &[1, 2]), 2);
    assert_eq!(claim(&mut scheduler, &[11, 12, 13, 14]), 3);
    scheduler.add("a", &hashes(&[11, 12, 13, 14])).unwrap();
    assert_eq!(unclaimed(&scheduler, "a"), [14]);
    assert_eq!(claim(&mut scheduler, &[7, 7, 7]), 1, "a list may hold a key twice");
}

#[test]
fn a_claim_does_not_evict_the_block_before_it() {
    let mut scheduler = open(8, DiskConfig::new(2));
    assert_eq!(claim(&mut scheduler, &[1]), 1);
    assert_eq!(claim(&mut scheduler, &[11]), 1);
    let parent = &chained(&[1, 2])[1..];
    assert_eq!(scheduler.claim(&hashes(&[2]), &[GroupId(0)], parent), Ok(1));
    scheduler.check().unwrap();
    scheduler.add("a", &hashes(&[1, 2])).unwrap();
    assert_eq!(unclaimed(&scheduler, "a"), [], "block 11 made room, not block 1");
}

#[test]
fn nothing_is_asked_that_no_promote_would_bring() {
    let prompt = [1, 2, 3];
    let disk = DiskConfig { min_promote_tokens: 3 * BLOCK_SIZE, ..DiskConfig::new(8) };
    let mut scheduler = open(8, disk);
    scheduler.add("a", &hashes(&prompt)).unwrap();
    assert_eq!(unclaimed(&scheduler, "a"), prompt);
    let limited = |local, most| {
        let found = scheduler.unclaimed("a", local, usize::MAX, most).unwrap();
        names(&found.keys)
    };
    assert_eq!(limited(0, 2), prompt[..2]);
    assert_eq!(limited(BLOCK_SIZE, 9), [], "two blocks more are too few");
    scheduler.set_disk(DiskMode::Off).unwrap();
    assert_eq!(unclaimed(&scheduler, "a"), []);
    assert_eq!(claim(&mut scheduler, &prompt), 0);
    scheduler.set_disk(DiskMode::On).unwrap();
    assert_eq!(claim(&mut scheduler, &prompt), 3);
    scheduler.reset().unwrap();
    scheduler.set_disk(DiskMode::On).unwrap();
    assert_eq!(unclaimed(&scheduler, "a"), prompt, "a reset drops all claims");
    assert!(matches!(scheduler.unclaimed("b", 0, 9, 9), Err(Error::UnknownRequest { .. })));
}

#[test]
fn every_group_is_asked_for() {
    let window = Group::new(Attention::SlidingWindow { window: 5 }, BLOCK_SIZE).unwrap();
    let both = vec![groups()[0], window];
    let config = OffloadConfig { disk: Some(DiskConfig::new(8)), ..OffloadConfig::new(8, both) };
    let mut scheduler = OffloadScheduler::new(config).unwrap();
    scheduler.set_disk(DiskMode::On).unwrap();
    let prompt = [1, 2, 3];
    scheduler.add("a", &hashes(&prompt)).unwrap();
    let found = scheduler.unclaimed("a", 0, usize::MAX, usize::MAX).unwrap();
    let groups: Vec<u16> = found.keys.iter().map(|key| key.group.0).collect();
    assert_eq!((names(&found.keys), groups), (vec![1, 1, 2, 2, 3, 3], vec![0, 1, 0, 1, 0, 1]));
    let windows: Vec<_> = found.parents.iter().skip(1).step_by(2).collect();
    assert_eq!(windows, [&None; 3], "blocks of a window have no parent");
    let groups: Vec<GroupId> = found.keys.iter().map(|key| key.group).collect();
    // The last block of the window is not there.
    let num = scheduler.claim(&hashes(&[1, 1, 2, 2, 3]), &groups[..5], &found.parents[..5]);
    assert_eq!(num, Ok(5));
    assert_eq!(ask(&mut scheduler, "a", &prompt), None);
    let job = scheduler.promote(usize::MAX, None).unwrap().unwrap();
    assert_eq!(names_of(&job), [1, 2, 2], "the window needs its last block");
    scheduler.complete(job.job_id, 0, true).unwrap();
    assert_eq!(ask(&mut scheduler, "a", &prompt), Some(2));
}

#[test]
fn claims_that_cannot_be_are_refused_and_nothing_changes() {
    let mut scheduler = open(8, DiskConfig::new(8));
    scheduler.add("a", &hashes(&[1])).unwrap();
    let one = hashes(&[1]);
    let before = format!("{scheduler:?}");
    let mut refused = |hashes, groups: &[GroupId], parents: &[_]| {
        let error = scheduler.claim(hashes, groups, parents).unwrap_err();
        assert_eq!(format!("{scheduler:?}"), before);
        error.to_string()
    };
    assert!(refused(&one, &[], &[]).starts_with("1 hashes, 0 groups and 0 parents: give one of"));
    assert!(refused(&one, &[GroupId(0)], &[None, None]).contains("2 parents"));
    assert!(refused(&one, &[GroupId(2)], &[]).contains("group 2 is unknown"));
    let mut other = kvstow_core::key::HashesBuilder::default();
    other.push(&[1; 16]).unwrap();
    assert!(refused(&other.finish(), &[GroupId(0)], &[]).contains("16"));
    let mut none = OffloadScheduler::new(OffloadConfig::new(4, groups())).unwrap();
    assert!(matches!(none.claim(&one, &[GroupId(0)], &[]), Err(Error::State(_))));
    none.add("a", &one).unwrap();
    assert_eq!(unclaimed(&none, "a"), []);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(num_cases() / 10))]

    /// Servers of a fleet hit what their own host and the store have together.
    #[test]
    fn servers_that_share_a_store_hit_what_any_of_them_put(
        num_servers in 1..4_usize, num_host in 8..14_usize,
        prompts in vec((0..4_usize, 0..4_usize, 1..8_usize), 1..60),
    ) {
        let below = DiskConfig { max_in_flight_blocks: 100, ..DiskConfig::new(100) };
        let mut servers: Vec<Instant> =
            (0..num_servers).map(|_| Instant::new(num_host, below)).collect();
        let mut shared = BTreeSet::<u16>::new();
        for (server, which, len) in prompts {
            let prompt = chain(which, len);
            let server = &mut servers[server % num_servers];
            let num_shared = prompt.iter().take_while(|name| shared.contains(name)).count();
            let (on_host, more) = server.serve_from(&prompt, |name| shared.contains(&name));
            prop_assert_eq!(on_host + more, on_host.max(num_shared));
            shared.extend(server.demoted.drain(..).flatten());
            prop_assert!(prompt.iter().all(|name| shared.contains(name)));
        }
    }
}
