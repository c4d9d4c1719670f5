//! Single plans of the disk tier.

use kvstow_core::error::Error;
use kvstow_core::group::{Attention, Group};
use kvstow_core::ids::{BlockId, GroupId, JobId};
use kvstow_core::key::{BlockHash, Hashes};
use kvstow_core::ledger::BlockLedger;
use kvstow_core::offload::{
    Admit, DiskConfig, DiskMode, Job, OffloadConfig, OffloadScheduler, Outcome, Progress, TierJob,
    Unsaved,
};

use super::super::hashes;

const BLOCK_SIZE: usize = 4;

pub(super) fn groups() -> Vec<Group> {
    vec![Group::new(Attention::Full, BLOCK_SIZE).unwrap()]
}

fn closed(num_host: usize, disk: DiskConfig) -> OffloadScheduler {
    let config = OffloadConfig { disk: Some(disk), ..OffloadConfig::new(num_host, groups()) };
    OffloadScheduler::new(config).unwrap()
}

pub(super) fn open(num_host: usize, disk: DiskConfig) -> OffloadScheduler {
    let mut scheduler = closed(num_host, disk);
    scheduler.set_disk(DiskMode::On).unwrap();
    scheduler
}

/// A scheduler whose disk holds these blocks, and whose host is empty.
fn warm(num_host: usize, names: &[u16], disk: DiskConfig) -> OffloadScheduler {
    let mut scheduler = open(num_host, disk);
    let slots: Vec<usize> = (0..names.len()).collect();
    let groups = vec![GroupId(0); names.len()];
    let num = scheduler.adopt_disk(&slots, &hashes(names), &groups, &chained(names)).unwrap();
    assert_eq!(num, names.len());
    scheduler
}

/// The hash before each of a chain.
pub(super) fn chained(names: &[u16]) -> Vec<Option<BlockHash>> {
    let hashes = hashes(names);
    let before = hashes.as_slice().iter().copied().map(Some);
    std::iter::once(None).chain(before).take(names.len()).collect()
}

/// Stores a prompt's blocks, with device blocks from `first` on.
pub(super) fn store(scheduler: &mut OffloadScheduler, request_id: &str, names: &[u16], first: u32) {
    if let Some(job) = begin_store(scheduler, request_id, names, first) {
        scheduler.complete(job.job_id, 0, true).unwrap();
    }
}

/// As [`store`], up to the end of the copies.
pub(super) fn begin_store(
    scheduler: &mut OffloadScheduler,
    request_id: &str,
    names: &[u16],
    first: u32,
) -> Option<Job> {
    scheduler.add(request_id, &hashes(names)).unwrap();
    let blocks: Vec<BlockId> = (first..).take(names.len()).map(BlockId).collect();
    let new_blocks = [blocks.as_slice()];
    let num_computed_tokens = names.len() * BLOCK_SIZE;
    let progress = Progress { request_id, num_computed_tokens, new_blocks: &new_blocks };
    scheduler.store(std::iter::once(progress), None).unwrap()
}

pub(super) fn names_of(job: &TierJob) -> Vec<u16> {
    job.keys.iter().map(|key| u16::from_be_bytes([key.hash[6], key.hash[7]])).collect()
}

pub(super) fn ask(
    scheduler: &mut OffloadScheduler,
    request_id: &str,
    names: &[u16],
) -> Option<usize> {
    if scheduler.full_attention_hit(request_id).is_err() {
        scheduler.add(request_id, &hashes(names)).unwrap();
    }
    let found = scheduler.lookup_below(request_id, 0, usize::MAX).unwrap();
    scheduler.check().unwrap();
    found.map(|num_tokens| num_tokens / BLOCK_SIZE)
}

#[test]
fn two_requests_share_one_promote() {
    let names = [1, 2, 3];
    let mut scheduler = warm(8, &names, DiskConfig::new(8));
    assert_eq!(ask(&mut scheduler, "a", &names), None);
    assert_eq!(ask(&mut scheduler, "b", &names), None);
    let job = scheduler.promote(usize::MAX, None).unwrap().unwrap();
    assert_eq!(names_of(&job), names);
    assert_eq!(ask(&mut scheduler, "c", &names), None);
    assert_eq!(scheduler.promote(usize::MAX, None).unwrap(), None);
    scheduler.complete(job.job_id, 0, true).unwrap();
    for request_id in ["a", "b", "c"] {
        assert_eq!(ask(&mut scheduler, request_id, &names), Some(3));
    }
}

#[test]
fn a_key_that_a_prompt_names_twice_is_promoted_once() {
    let names = [1, 2, 1];
    let mut scheduler = warm(8, &names[..2], DiskConfig::new(8));
    assert_eq!(ask(&mut scheduler, "a", &names), None);
    let job = scheduler.promote(usize::MAX, None).unwrap().unwrap();
    assert_eq!(names_of(&job), [1, 2]);
    scheduler.complete(job.job_id, 0, true).unwrap();
    assert_eq!(ask(&mut scheduler, "a", &names), Some(3));
    assert_eq!(scheduler.used_slots().count(), 2);
}

#[test]
fn a_large_want_is_served_in_parts_from_its_first_block() {
    let names = [1, 2, 3, 4, 5];
    let disk = DiskConfig { max_in_flight_blocks: 2, ..DiskConfig::new(8) };
    let mut scheduler = warm(8, &names, disk);
    let mut parts = Vec::new();
    while ask(&mut scheduler, "a", &names).is_none() {
        let job = scheduler.promote(usize::MAX, None).unwrap().unwrap();
        assert_eq!(scheduler.promote(usize::MAX, None).unwrap(), None, "the bound is reached");
        parts.push(names_of(&job));
        scheduler.complete(job.job_id, 0, true).unwrap();
    }
    assert_eq!(parts, [vec![1, 2], vec![3, 4], vec![5]]);
    assert_eq!(ask(&mut scheduler, "a", &names), Some(5));
}

#[test]
fn a_request_has_blocks_promoted_once_until_it_restarts() {
    let names = [1, 2, 3, 4];
    let mut scheduler = warm(2, &names, DiskConfig::new(8));
    assert_eq!(ask(&mut scheduler, "a", &names), None);
    let job = scheduler.promote(usize::MAX, None).unwrap().unwrap();
    assert_eq!(names_of(&job), [1, 2], "the host has two slots");
    scheduler.complete(job.job_id, 0, true).unwrap();
    assert_eq!(ask(&mut scheduler, "a", &names), Some(2));
    assert_eq!(scheduler.disk_stats().disk_dropped, 2);
    scheduler.restart("a").unwrap();
    assert_eq!(ask(&mut scheduler, "a", &names), None);
}

#[test]
fn a_lookup_without_promote_goes_on_with_the_host() {
    let names = [1, 2, 3];
    let mut scheduler = warm(8, &names, DiskConfig::new(8));
    assert_eq!(ask(&mut scheduler, "a", &names), None);
    assert_eq!(scheduler.lookup("a", 0, usize::MAX), Ok(Some(0)));
    assert_eq!(scheduler.promote(usize::MAX, None).unwrap(), None, "nobody wants it any more");
}

#[test]
fn few_tokens_are_not_worth_a_promote() {
    let names = [1, 2, 3];
    let disk = DiskConfig { min_promote_tokens: 3 * BLOCK_SIZE + 1, ..DiskConfig::new(8) };
    assert_eq!(ask(&mut warm(8, &names, disk), "a", &names), Some(0));
    let disk = DiskConfig { min_promote_tokens: 3 * BLOCK_SIZE, ..DiskConfig::new(8) };
    assert_eq!(ask(&mut warm(8, &names, disk), "a", &names), None);
}

#[test]
fn tier_hits_differ_while_a_lookup_would_begin_a_promote() {
    let names = [1, 2, 3];
    let mut scheduler = warm(8, &names, DiskConfig::new(8));
    let hits = |scheduler: &OffloadScheduler, local: usize, end: usize| {
        let (host, both) = scheduler.tier_hits("a", local * BLOCK_SIZE, end * BLOCK_SIZE).unwrap();
        (host / BLOCK_SIZE, both / BLOCK_SIZE)
    };
    scheduler.add("a", &hashes(&names)).unwrap();
    assert_eq!(hits(&scheduler, 0, 3), (0, 3));
    assert_eq!(hits(&scheduler, 0, 2), (0, 2), "no more than the request may load");
    assert_eq!(hits(&scheduler, 1, 3), (1, 3), "the device has the first block");
    assert_eq!(hits(&scheduler, 3, 3), (3, 3));
    scheduler.set_disk(DiskMode::Off).unwrap();
    assert_eq!(hits(&scheduler, 0, 3), (0, 0));
    scheduler.set_disk(DiskMode::On).unwrap();
    assert_eq!(ask(&mut scheduler, "a", &names), None);
    let job = scheduler.promote(usize::MAX, None).unwrap().unwrap();
    let outcome = Outcome::Blocks(vec![true, true, false]);
    scheduler.complete(job.job_id, 0, outcome).unwrap();
    store(&mut scheduler, "b", &names, 1);
    assert_eq!(hits(&scheduler, 0, 3), (3, 3));

    let mut scheduler = warm(2, &names, DiskConfig::new(8));
    assert_eq!(ask(&mut scheduler, "a", &names), None);
    let job = scheduler.promote(usize::MAX, None).unwrap().unwrap();
    scheduler.complete(job.job_id, 0, true).unwrap();
    assert_eq!(hits(&scheduler, 0, 3), (2, 2), "it has waited once");
    let disk = DiskConfig { min_promote_tokens: 3 * BLOCK_SIZE + 1, ..DiskConfig::new(8) };
    let mut scheduler = warm(8, &names, disk);
    scheduler.add("a", &hashes(&names)).unwrap();
    assert_eq!(hits(&scheduler, 0, 3), (0, 0), "too few tokens");
    assert!(matches!(scheduler.tier_hits("b", 0, 1), Err(Error::UnknownRequest { .. })));
    assert!(matches!(scheduler.tier_hits("a", 1, 1), Err(Error::Config(_))));
}

#[test]
fn a_failed_block_leaves_the_disk_and_the_others_count() {
    let names = [1, 2, 3];
    let mut scheduler = warm(8, &names, DiskConfig::new(8));
    assert_eq!(ask(&mut scheduler, "a", &names), None);
    let job = scheduler.promote(usize::MAX, None).unwrap().unwrap();
    let outcome = Outcome::Blocks(vec![true, false, true]);
    assert!(!scheduler.complete(job.job_id, 0, outcome).unwrap().unwrap().is_ok);
    scheduler.check().unwrap();
    let stats = scheduler.disk_stats();
    assert_eq!(
        (stats.promoted_blocks, stats.failed_promotes, stats.disk_resident_blocks),
        (2, 1, 2)
    );
    assert_eq!(ask(&mut scheduler, "a", &names), Some(1));
    // The block is stored again, and then the third is found without another promote.
    store(&mut scheduler, "b", &names, 1);
    assert_eq!(ask(&mut scheduler, "c", &names), Some(3));
    let job = scheduler.demote(usize::MAX, None).unwrap().unwrap();
    assert_eq!(names_of(&job), [2], "only the disk's gap is due");
}

#[test]
fn a_late_promote_holds_up_no_lookup_and_never_counts() {
    let names = [1, 2];
    let mut scheduler = warm(4, &names, DiskConfig::new(4));
    assert_eq!(ask(&mut scheduler, "a", &names), None);
    let job = scheduler.promote(usize::MAX, Some(1.0)).unwrap().unwrap();
    assert_eq!(scheduler.expire(2.0).unwrap(), [job.job_id]);
    assert_eq!(ask(&mut scheduler, "a", &names), Some(0));
    assert_eq!(ask(&mut scheduler, "b", &names), Some(0));
    assert_eq!(scheduler.used_slots().count(), 2, "the late copies may still write");
    let end = scheduler.complete(job.job_id, 0, true).unwrap().unwrap();
    assert!(end.is_late && !end.is_ok);
    assert_eq!(ask(&mut scheduler, "b", &names), Some(0));
    assert_eq!(scheduler.used_slots().count(), 0);
    assert_eq!(scheduler.disk_stats().disk_resident_blocks, 0);
}

#[test]
fn a_late_promote_keeps_no_block_from_being_stored_again() {
    let names = [1, 2];
    let mut scheduler = warm(4, &names, DiskConfig::new(4));
    assert_eq!(ask(&mut scheduler, "a", &names), None);
    let job = scheduler.promote(usize::MAX, Some(1.0)).unwrap().unwrap();
    assert_eq!(scheduler.expire(2.0).unwrap(), [job.job_id]);
    store(&mut scheduler, "b", &names, 1);
    assert_eq!(ask(&mut scheduler, "a", &names), Some(2), "the recomputed blocks are on the host");
    scheduler.complete(job.job_id, 0, false).unwrap().unwrap();
    assert_eq!(ask(&mut scheduler, "a", &names), Some(2), "the late end drops none of them");
}

#[test]
fn no_request_waits_for_a_disk_block_that_a_store_brings_to_the_host() {
    let names = [1, 2];
    let mut scheduler = warm(4, &names, DiskConfig::new(4));
    let job = begin_store(&mut scheduler, "a", &names, 1).unwrap();
    assert_eq!(ask(&mut scheduler, "b", &names), Some(0));
    assert_eq!(scheduler.promote(usize::MAX, None).unwrap(), None);
    scheduler.complete(job.job_id, 0, true).unwrap().unwrap();
    assert_eq!(ask(&mut scheduler, "b", &names), Some(2));
}

#[test]
fn stopped_movers_damage_no_disk_block() {
    let names = [1, 2];
    let mut scheduler = warm(4, &names, DiskConfig::new(4));
    assert_eq!(ask(&mut scheduler, "a", &names), None);
    scheduler.promote(usize::MAX, None).unwrap().unwrap();
    assert_eq!(scheduler.end_all().unwrap().len(), 1);
    scheduler.check().unwrap();
    let stats = scheduler.disk_stats();
    assert_eq!((stats.disk_resident_blocks, stats.failed_promotes), (2, 0));
    assert_eq!(scheduler.used_slots().count(), 0);
}

#[test]
fn a_tier_job_that_goes_on_keeps_its_pins_when_all_others_end() {
    let names = [1, 2];
    let mut scheduler = warm(4, &names, DiskConfig::new(4));
    assert_eq!(ask(&mut scheduler, "a", &names), None);
    let promote = scheduler.promote(usize::MAX, None).unwrap().unwrap();
    assert_eq!(scheduler.end_all_but(&[promote.job_id]).unwrap(), []);
    scheduler.check().unwrap();
    assert_eq!(scheduler.used_slots().count(), 2);
    assert!(scheduler.complete(promote.job_id, 0, true).unwrap().unwrap().is_ok);
    assert_eq!(ask(&mut scheduler, "a", &names), Some(2));
}

#[test]
fn a_demote_of_a_host_block_that_proves_damaged_fails() {
    let names = [1, 2];
    let mut scheduler = open(4, DiskConfig::new(4));
    store(&mut scheduler, "a", &names, 1);
    let demote = scheduler.demote(usize::MAX, None).unwrap().unwrap();
    assert_eq!(ask(&mut scheduler, "b", &names), Some(2));
    let blocks = vec![vec![BlockId(11), BlockId(12)]];
    let load = scheduler.load("b", 2 * BLOCK_SIZE, &blocks, None).unwrap();
    scheduler.complete(load.job_id, 0, Outcome::Blocks(vec![true, false])).unwrap();
    scheduler.complete(demote.job_id, 0, true).unwrap();
    scheduler.check().unwrap();
    let stats = scheduler.disk_stats();
    assert_eq!((stats.demoted_blocks, stats.failed_demotes), (1, 1));
}

#[test]
fn a_block_that_failed_on_a_rank_stays_failed_when_another_proves_damaged() {
    let (names, disk) = ([1, 2, 3], Some(DiskConfig::new(4)));
    let config = OffloadConfig { world_size: 2, disk, ..OffloadConfig::new(4, groups()) };
    let mut scheduler = OffloadScheduler::new(config).unwrap();
    scheduler.set_disk(DiskMode::On).unwrap();
    store(&mut scheduler, "a", &names, 1);
    scheduler.complete(JobId(1), 1, true).unwrap().unwrap();
    let demote = scheduler.demote(usize::MAX, None).unwrap().unwrap();
    scheduler.complete(demote.job_id, 0, Outcome::Blocks(vec![true, false, true])).unwrap();
    assert_eq!(ask(&mut scheduler, "b", &names), Some(3));
    let blocks = vec![vec![BlockId(11), BlockId(12), BlockId(13)]];
    let load = scheduler.load("b", 3 * BLOCK_SIZE, &blocks, None).unwrap();
    scheduler.complete(load.job_id, 0, Outcome::Blocks(vec![true, true, false])).unwrap();
    scheduler.complete(demote.job_id, 1, true).unwrap().unwrap();
    scheduler.check().unwrap();
    let stats = scheduler.disk_stats();
    assert_eq!((stats.demoted_blocks, stats.failed_demotes, stats.disk_resident_blocks), (1, 2, 1));
}

#[test]
fn a_reset_closes_the_disk_until_it_is_opened() {
    let names = [1, 2];
    let mut scheduler = warm(4, &names, DiskConfig::new(4));
    assert_eq!(ask(&mut scheduler, "a", &names), None);
    scheduler.reset().unwrap();
    assert_eq!(scheduler.disk_mode(), Some(DiskMode::Off));
    assert_eq!(ask(&mut scheduler, "a", &names), Some(0), "nobody waits for a closed disk");
    store(&mut scheduler, "b", &[5, 6], 1);
    assert_eq!(scheduler.demote(usize::MAX, None).unwrap(), None);
    scheduler.set_disk(DiskMode::On).unwrap();
    store(&mut scheduler, "c", &[7], 3);
    let job = scheduler.demote(usize::MAX, None).unwrap().unwrap();
    assert_eq!(names_of(&job), [7]);
}

#[test]
fn no_record_takes_a_disk_slot_that_a_promote_reads() {
    let names = [1, 2];
    let mut scheduler = warm(4, &names, DiskConfig::new(4));
    assert_eq!(ask(&mut scheduler, "a", &names), None);
    let promote = scheduler.promote(usize::MAX, None).unwrap().unwrap();
    scheduler.reset().unwrap();
    let (hashes, groups) = (hashes(&[5, 6]), [GroupId(0); 2]);
    assert_eq!(scheduler.adopt_disk(&[0, 2], &hashes, &groups, &[]).unwrap(), 1);
    scheduler.check().unwrap();
    scheduler.complete(promote.job_id, 0, true).unwrap().unwrap();
    assert_eq!(scheduler.adopt_disk(&[0, 2], &hashes, &groups, &[]).unwrap(), 1);
    scheduler.check().unwrap();
}

#[test]
fn a_read_only_disk_promotes_and_demotes_nothing() {
    let names = [1, 2];
    let mut scheduler = warm(4, &names, DiskConfig::new(4));
    scheduler.set_disk(DiskMode::ReadOnly).unwrap();
    store(&mut scheduler, "b", &[5], 1);
    assert_eq!(scheduler.demote(usize::MAX, None).unwrap(), None);
    assert_eq!(ask(&mut scheduler, "a", &names), None);
    assert!(scheduler.promote(usize::MAX, None).unwrap().is_some());
}

#[test]
fn a_promote_evicts_no_host_block_of_its_own_request() {
    let names = [1, 2, 3, 4];
    let mut scheduler = open(3, DiskConfig::new(8));
    store(&mut scheduler, "a", &[1, 2], 1);
    store(&mut scheduler, "other", &[9], 5);
    scheduler.finish("other").unwrap();
    let slots = [0, 1];
    let parents = [chained(&names)[2], chained(&names)[3]];
    scheduler.adopt_disk(&slots, &hashes(&[3, 4]), &[GroupId(0); 2], &parents).unwrap();
    assert_eq!(ask(&mut scheduler, "b", &names), None);
    let job = scheduler.promote(usize::MAX, None).unwrap().unwrap();
    assert_eq!(names_of(&job), [3], "it takes the slot of the other request only");
    scheduler.complete(job.job_id, 0, true).unwrap();
    assert_eq!(ask(&mut scheduler, "b", &names), Some(3));
}

#[test]
fn records_that_cannot_be_are_refused_and_nothing_changes() {
    let window = Group::new(Attention::SlidingWindow { window: 4 }, BLOCK_SIZE).unwrap();
    let both = vec![groups()[0], window];
    let config = OffloadConfig { disk: Some(DiskConfig::new(4)), ..OffloadConfig::new(4, both) };
    let mut scheduler = OffloadScheduler::new(config).unwrap();
    let one = hashes(&[1]);
    let parent = one.as_slice()[0];
    let (full, window, unknown) = ([GroupId(0)], [GroupId(1)], [GroupId(2)]);
    let before = format!("{scheduler:?}");
    let mut refused = |slots: &[usize], hashes: &Hashes, groups: &[GroupId], parents: &[_]| {
        let error = scheduler.adopt_disk(slots, hashes, groups, parents).unwrap_err();
        assert_eq!(format!("{scheduler:?}"), before);
        error.to_string()
    };
    assert!(refused(&[4], &one, &full, &[]).contains("slot 4 is not on the disk"));
    assert!(refused(&[0], &one, &unknown, &[]).contains("group 2 is unknown"));
    assert!(refused(&[0], &one, &window, &[Some(parent)]).contains("record 0 has a parent"));
    assert!(refused(&[0, 1], &one, &full, &[]).contains("2 slots, 1 hashes"));
    assert_eq!(scheduler.adopt_disk(&[0], &one, &window, &[None]), Ok(1));
    assert_eq!(scheduler.adopt_disk(&[0], &hashes(&[2]), &full, &[]), Ok(0), "in use");
    assert_eq!(scheduler.adopt_disk(&[1], &one, &window, &[]), Ok(0), "a known key");
    let mut other = kvstow_core::key::HashesBuilder::default();
    other.push(&[1; 16]).unwrap();
    let error = scheduler.adopt_disk(&[2], &other.finish(), &full, &[]).unwrap_err();
    assert!(matches!(error, Error::HashWidth { .. }));
}

#[test]
fn records_in_any_order_form_chains_and_never_a_loop() {
    let names = [1, 2, 3, 4];
    let hashes_of = hashes(&names);
    let mut scheduler = open(8, DiskConfig::new(8));
    // Children come before their parents, one record at a time.
    for at in (0..4).rev() {
        let one = hashes(&names[at..=at]);
        let parents = [chained(&names)[at]];
        assert_eq!(scheduler.adopt_disk(&[at], &one, &[GroupId(0)], &parents), Ok(1));
        scheduler.check().unwrap();
    }
    assert_eq!(ask(&mut scheduler, "a", &names), None);
    let mut looped = open(8, DiskConfig::new(8));
    let parents: Vec<_> = [1, 2, 3, 0].map(|at| Some(hashes_of.as_slice()[at])).to_vec();
    let num = looped.adopt_disk(&[0, 1, 2, 3], &hashes_of, &[GroupId(0); 4], &parents);
    assert_eq!(num, Ok(4));
    looped.check().unwrap();
}

#[test]
fn a_scheduler_with_tier_jobs_does_not_sleep_and_its_snapshot_has_no_disk() {
    let mut scheduler = open(4, DiskConfig::new(4));
    store(&mut scheduler, "a", &[1, 2], 1);
    scheduler.finish("a").unwrap();
    let job = scheduler.demote(usize::MAX, None).unwrap().unwrap();
    let ledger = BlockLedger::new(4, groups(), None, false).unwrap();
    assert!(matches!(scheduler.hold_image(&ledger), Err(Error::State(_))));
    let snapshot = scheduler.snapshot().unwrap();
    let restored = closed(4, DiskConfig::new(4)).restore(&snapshot).unwrap();
    restored.check().unwrap();
    assert_eq!(restored.disk_mode(), Some(DiskMode::Off));
    assert_eq!((restored.num_resident(), restored.disk_stats().disk_resident_blocks), (2, 0));
    scheduler.complete(job.job_id, 0, true).unwrap();
    scheduler.hold_image(&ledger).unwrap();
    assert_eq!(scheduler.disk_stats().disk_resident_blocks, 2);
}

#[test]
fn a_disk_of_no_blocks_or_no_jobs_is_refused() {
    let build = |disk| {
        OffloadScheduler::new(OffloadConfig { disk: Some(disk), ..OffloadConfig::new(4, groups()) })
    };
    let error = build(DiskConfig::new(0)).unwrap_err().to_string();
    assert!(error.starts_with("num_disk_blocks is 0: it must be 1 to"), "{error}");
    let disk = DiskConfig { max_in_flight_blocks: 0, ..DiskConfig::new(4) };
    let error = build(disk).unwrap_err().to_string();
    assert!(error.starts_with("max_disk_blocks_in_flight is 0: it must be 1 or more"), "{error}");
    let mut none = OffloadScheduler::new(OffloadConfig::new(4, groups())).unwrap();
    assert!(matches!(none.set_disk(DiskMode::On), Err(Error::State(_))));
    assert!(matches!(none.adopt_disk(&[], &hashes(&[]), &[], &[]), Err(Error::State(_))));
    assert_eq!(
        (none.disk_mode(), none.demote(9, None), none.promote(9, None)),
        (None, Ok(None), Ok(None))
    );
}

#[test]
fn unsaved_blocks_are_the_most_recent_of_the_host_and_take_the_coldest_places() {
    let mut scheduler = open(8, DiskConfig { admit: Admit::Returned, ..DiskConfig::new(4) });
    let groups = [GroupId(0); 3];
    scheduler.adopt_disk(&[0, 1, 3], &hashes(&[1, 2, 9]), &groups, &[]).unwrap();
    assert_eq!(scheduler.unsaved(8), Unsaved::default(), "the host is empty");
    store(&mut scheduler, "a", &[5, 6], 1);
    store(&mut scheduler, "b", &[1, 7], 11);
    let found = scheduler.unsaved(8);
    let names = |found: &Unsaved| -> Vec<u16> {
        found.keys.iter().map(|key| u16::from_be_bytes([key.hash[6], key.hash[7]])).collect()
    };
    // The disk has block 1, and keeps it for block 7.
    assert_eq!(names(&found), [7, 5, 6]);
    assert_eq!(found.disk_slots, [2, 1, 3]);
    assert_eq!(found.parents[0], Some(hashes(&[1]).as_slice()[0]));
    assert_eq!(found.parents[1], None);
    assert_eq!(scheduler.unsaved(8), found, "nothing has changed");
    assert_eq!(names(&scheduler.unsaved(2)), [7], "of blocks 1 and 7");
    scheduler.set_disk(DiskMode::ReadOnly).unwrap();
    assert_eq!(scheduler.unsaved(8), Unsaved::default());
    scheduler.check().unwrap();
}

#[test]
fn unsaved_blocks_take_no_place_of_a_job() {
    let mut scheduler = open(8, DiskConfig::new(3));
    scheduler.adopt_disk(&[0], &hashes(&[9]), &[GroupId(0)], &[]).unwrap();
    store(&mut scheduler, "a", &[1, 2, 3], 1);
    let job = scheduler.demote(1, None).unwrap().unwrap();
    assert_eq!(ask(&mut scheduler, "b", &[9]), None);
    let promote = scheduler.promote(1, None).unwrap().unwrap();
    let found = scheduler.unsaved(8);
    assert_eq!(found.disk_slots.len(), 1, "one place is neither written nor read");
    assert!(!found.disk_slots.contains(&job.disk_slots[0]));
    assert!(!found.disk_slots.contains(&promote.disk_slots[0]));
}
