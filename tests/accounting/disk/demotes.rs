//! Demotes read only what lies on the host, and only what the disk lacks.

use kvstow_core::ids::{BlockId, GroupId};
use kvstow_core::offload::{DiskConfig, OffloadScheduler, Outcome};

use super::super::hashes;
use super::plans::{ask, begin_store, names_of, open, store};

const BLOCK_SIZE: usize = 4;

fn demoted(scheduler: &mut OffloadScheduler) -> Vec<u16> {
    let job = scheduler.demote(usize::MAX, None).unwrap();
    scheduler.check().unwrap();
    job.as_ref().map(names_of).unwrap_or_default()
}

#[test]
fn no_demote_reads_a_slot_that_a_store_fills_again() {
    let mut scheduler = open(1, DiskConfig::new(4));
    store(&mut scheduler, "a", &[1], 1);
    // The slot is due for a demote when a load finds it damaged.
    assert_eq!(ask(&mut scheduler, "b", &[1]), Some(1));
    let load = scheduler.load("b", BLOCK_SIZE, &[vec![BlockId(2)]], None).unwrap();
    scheduler.complete(load.job_id, 0, Outcome::Blocks(vec![false])).unwrap().unwrap();
    // The next store brings the same block to the same slot.
    let refill = begin_store(&mut scheduler, "c", &[1], 3).unwrap();
    assert_eq!(demoted(&mut scheduler), [], "the slot is half written");
    scheduler.complete(refill.job_id, 0, true).unwrap().unwrap();
    assert_eq!(demoted(&mut scheduler), [1]);
}

#[test]
fn no_demote_brings_what_the_disk_got_since_the_store() {
    let mut scheduler = open(4, DiskConfig::new(4));
    store(&mut scheduler, "a", &[1, 2], 1);
    assert_eq!(scheduler.claim(&hashes(&[1]), &[GroupId(0)], &[]).unwrap(), 1);
    assert_eq!(demoted(&mut scheduler), [2]);
}

#[test]
fn a_demote_evicts_no_parent_of_its_blocks() {
    let mut scheduler = open(4, DiskConfig::new(2));
    store(&mut scheduler, "a", &[1], 1);
    let job = scheduler.demote(usize::MAX, None).unwrap().unwrap();
    scheduler.complete(job.job_id, 0, true).unwrap().unwrap();
    store(&mut scheduler, "b", &[1, 2], 2);
    // The disk is full, and the parent is its least recent block.
    assert_eq!(scheduler.claim(&hashes(&[9]), &[GroupId(0)], &[]).unwrap(), 1);
    assert_eq!(demoted(&mut scheduler), [2]);
    assert_eq!(scheduler.claim(&hashes(&[1]), &[GroupId(0)], &[]).unwrap(), 0, "it is there");
}
