//! A snapshot that is damaged, cut off, forged, or made for another configuration is refused.

use kvstow_core::error::{Error, Result};
use kvstow_core::group::{Attention, Group};
use kvstow_core::hash::ExtraKey;
use kvstow_core::ids::BlockId;
use kvstow_core::ledger::{AllocateArgs, BlockLedger, Context, NewIds, Restored};
use kvstow_core::offload::{EvictionPolicy, OffloadConfig, OffloadScheduler, Progress};
use proptest::prelude::*;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::{hashes, ids, num_cases, raw};

const NUM_BLOCKS: usize = 12;

fn groups() -> Vec<Group> {
    vec![
        Group::new(Attention::Full, 2).unwrap(),
        Group::new(Attention::SlidingWindow { window: 4 }, 2).unwrap(),
    ]
}

fn new_ledger(num_blocks: usize) -> BlockLedger {
    BlockLedger::new(num_blocks, groups(), None, true).unwrap()
}

fn config(policy: EvictionPolicy) -> OffloadConfig {
    OffloadConfig { policy, ..OffloadConfig::new(8, groups()) }
}

/// A ledger with two requests: one has 5 granted tokens and 2 of lookahead, the other only waits.
fn ledger() -> BlockLedger {
    let mut ledger = new_ledger(NUM_BLOCKS);
    let extra_keys = Some(vec![None, Some(vec![ExtraKey::Int(-7), ExtraKey::Null])]);
    let context = Context { tokens: Some((0..5).collect()), extra_keys };
    ledger.add("runs", &hashes(&[1, 2]), context).unwrap();
    let new =
        AllocateArgs { num_new_tokens: 5, num_lookahead_tokens: 2, ..AllocateArgs::default() };
    ledger.allocate("runs", &new).unwrap().unwrap();
    ledger.add("waits", &hashes(&[1]), Context::default()).unwrap();
    ledger
}

/// A scheduler that has stored more blocks than fit on the host. One of its requests still runs.
fn scheduler(policy: EvictionPolicy) -> OffloadScheduler {
    let mut scheduler = OffloadScheduler::new(config(policy)).unwrap();
    for (name, first) in [("a", 1), ("b", 20), ("c", 40)] {
        scheduler.add(name, &hashes(&[first, first + 1, first + 2])).unwrap();
        let blocks = [ids(&[1, 2, 3]), ids(&[4, 5, 6])];
        let new_blocks = blocks.each_ref().map(Vec::as_slice);
        let progress =
            Progress { request_id: name, num_computed_tokens: 6, new_blocks: &new_blocks };
        let job = scheduler.store(std::iter::once(progress), None).unwrap().unwrap();
        scheduler.complete(job.job_id, 0, true).unwrap();
        if name != "c" {
            scheduler.finish(name).unwrap();
        }
    }
    scheduler.check().unwrap();
    scheduler
}

fn restore_ledger(bytes: &[u8]) -> Result<Restored> {
    new_ledger(NUM_BLOCKS).restore(bytes, NewIds::Same)
}

fn restore_scheduler(policy: EvictionPolicy, bytes: &[u8]) -> Result<OffloadScheduler> {
    OffloadScheduler::new(config(policy)).unwrap().restore(bytes)
}

fn is_refused<T>(result: &Result<T>) -> bool {
    matches!(result, Err(Error::Snapshot(_)))
}

#[test]
fn snapshot_keeps_requests_but_no_lookahead_or_free_blocks() {
    let ledger = ledger();
    let Restored { ledger: restored, moves } =
        new_ledger(7).restore(&ledger.snapshot(true), NewIds::Packed).unwrap();
    restored.check().unwrap();
    assert_eq!(restored.num_granted_tokens("runs").unwrap(), 5);
    assert_eq!(ledger.block_table("runs", 0).unwrap().len(), 4);
    assert_eq!(raw(restored.block_table("runs", 0).unwrap().iter().copied()), [1, 2, 3]);
    assert_eq!(moves.len(), 6);
    assert_eq!(restored.pool().num_free(), 0);
    assert_eq!(restored.pool().num_cached(), 4);
    assert_eq!(restored.known("runs").unwrap(), ledger.known("runs").unwrap());
    assert_eq!(restored.lookup("waits", 2).unwrap().num_tokens, 2);
    assert_eq!(restored.snapshot(true), restored.clone().snapshot(true));
}

#[test]
fn snapshot_without_blocks_keeps_requests_that_have_no_tokens() {
    let restored = new_ledger(2).restore(&ledger().snapshot(false), NewIds::Same).unwrap();
    assert_eq!(restored.ledger.num_granted_tokens("runs").unwrap(), 0);
    assert!(restored.moves.is_empty());
    restored.ledger.check().unwrap();
}

#[test]
fn restore_refuses_a_small_pool_and_wrong_new_ids() {
    let bytes = ledger().snapshot(true);
    let restored =
        |num_blocks, ids: NewIds| new_ledger(num_blocks).restore(&bytes, ids).map(|_| ());
    let too_few = Error::SmallPool { needed: 6, num_blocks: 6 };
    for ids in [NewIds::Same, NewIds::Packed] {
        assert_eq!(restored(6, ids), Err(too_few.clone()));
    }
    assert!(matches!(restored(7, NewIds::Same), Err(Error::Config(why)) if why.contains("packed")));
    restored(7, NewIds::Packed).unwrap();
    let given = ids(&[6, 5, 4, 3, 2, 1]);
    restored(7, NewIds::Given(given)).unwrap();
    for (wrong, why) in [
        (ids(&[1, 2, 3]), "3 new ids for 6 blocks"),
        (ids(&[1, 2, 3, 4, 5, 5]), "is the new id of two blocks"),
        (ids(&[0, 1, 2, 3, 4, 5]), "null block"),
        (ids(&[1, 2, 3, 4, 5, 7]), "ids go from 0 to 6"),
    ] {
        let error = restored(7, NewIds::Given(wrong)).unwrap_err();
        assert!(error.to_string().contains(why), "{error}");
    }
}

#[test]
fn restore_needs_a_new_object_with_the_configuration_of_the_snapshot() {
    let bytes = ledger().snapshot(true);
    assert!(matches!(ledger().restore(&bytes, NewIds::Same), Err(Error::State(_))));
    let other = BlockLedger::new(NUM_BLOCKS, groups()[..1].to_vec(), None, false).unwrap();
    assert!(is_refused(&other.restore(&bytes, NewIds::Same)));
    let lru = scheduler(EvictionPolicy::Lru).snapshot().unwrap();
    assert!(is_refused(&restore_ledger(&lru)), "a ledger restored the snapshot of a scheduler");
    assert!(is_refused(&restore_scheduler(EvictionPolicy::Lru, &bytes)));
    assert!(is_refused(&restore_scheduler(EvictionPolicy::HitDensity, &lru)));
    let smaller = OffloadConfig { num_host_blocks: 7, ..config(EvictionPolicy::Lru) };
    let refused = OffloadScheduler::new(smaller).unwrap().restore(&lru).unwrap_err();
    assert!(refused.to_string().contains("host blocks is 8, not 7"), "{refused}");
    let used = scheduler(EvictionPolicy::Lru).restore(&lru);
    assert!(matches!(used, Err(Error::State(_))));
}

#[test]
fn every_flipped_bit_and_every_missing_byte_is_refused() {
    let ledger = ledger().snapshot(true);
    restore_ledger(&ledger).unwrap();
    every_damage(&ledger, |bytes| is_refused(&restore_ledger(bytes)));
    for policy in EvictionPolicy::ALL {
        let scheduler = scheduler(policy).snapshot().unwrap();
        restore_scheduler(policy, &scheduler).unwrap();
        every_damage(&scheduler, |bytes| is_refused(&restore_scheduler(policy, bytes)));
    }
}

fn every_damage(bytes: &[u8], is_refused: impl Fn(&[u8]) -> bool) {
    for at in 0..bytes.len() {
        for bit in 0..8 {
            let mut flipped = bytes.to_vec();
            flipped[at] ^= 1 << bit;
            assert!(is_refused(&flipped), "bit {bit} of byte {at}");
        }
        assert!(is_refused(&bytes[..at]), "{at} bytes");
    }
    assert!(is_refused(&[bytes, &[0]].concat()), "one more byte");
}

#[test]
fn error_names_both_versions_of_a_newer_snapshot() {
    let mut bytes = ledger().snapshot(true);
    bytes[6] = 9;
    let error = restore_ledger(&bytes).unwrap_err().to_string();
    assert!(error.contains("version 9") && error.contains("version 1"), "{error}");
}

/// Returns a changed snapshot with a correct length and checksum.
fn resealed(mut bytes: Vec<u8>) -> Vec<u8> {
    let length = (bytes.len() - 24) as u64;
    bytes[8..16].copy_from_slice(&length.to_le_bytes());
    let checksum = xxh3_64_with_seed(&bytes[24..], xxh3_64_with_seed(&bytes[..16], 0));
    bytes[16..24].copy_from_slice(&checksum.to_le_bytes());
    bytes
}

/// A forgery of a body: bytes to overwrite, and perhaps a new end.
fn forgery() -> impl Strategy<Value = (Vec<(prop::sample::Index, u8)>, Option<prop::sample::Index>)>
{
    let byte =
        prop_oneof![any::<u8>(), prop::sample::select(vec![0, 0x1b, 0x3b, 0x5b, 0x9b, 0xbf])];
    let cut = prop::option::weighted(0.1, any::<prop::sample::Index>());
    (prop::collection::vec((any::<prop::sample::Index>(), byte), 1..4), cut)
}

fn forged(
    bytes: &[u8],
    (changes, cut): &(Vec<(prop::sample::Index, u8)>, Option<prop::sample::Index>),
) -> Vec<u8> {
    let mut body = bytes[24..].to_vec();
    for (at, byte) in changes {
        let at = at.index(body.len());
        body[at] = *byte;
    }
    body.truncate(cut.map_or(body.len(), |cut| cut.index(body.len())));
    resealed([&bytes[..24], &body].concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(num_cases()))]

    /// The checksum of the forged snapshot is correct. So restore must refuse what is not sound, or
    /// return a ledger or scheduler that works.
    #[test]
    fn forged_snapshot_is_refused_or_sound(how in forgery(), policy in prop::sample::select(EvictionPolicy::ALL.to_vec())) {
        match restore_ledger(&forged(&ledger().snapshot(true), &how)) {
            Ok(Restored { mut ledger, .. }) => {
                ledger.check().unwrap();
                let names: Vec<String> = ledger.request_ids().map(str::to_owned).collect();
                for name in names {
                    let new = AllocateArgs { num_new_tokens: 1, ..AllocateArgs::default() };
                    let _ = ledger.allocate(&name, &new);
                    ledger.free(&name, None).unwrap();
                }
                ledger.check().unwrap();
            }
            Err(error) => prop_assert!(matches!(
                error,
                Error::Snapshot(_) | Error::SmallPool { .. } | Error::Config(_)
            ), "{error}"),
        }
        match restore_scheduler(policy, &forged(&scheduler(policy).snapshot().unwrap(), &how)) {
            Ok(mut scheduler) => {
                scheduler.check().unwrap();
                // The forgery may have set another hash width. Then all new hashes are refused.
                if scheduler.add("new", &hashes(&[1, 2, 50, 51, 52])).is_err() {
                    return Ok(());
                }
                let _ = scheduler.lookup("new", 0, 100);
                let blocks = [ids(&[1, 2, 3, 4, 5]), ids(&[6, 7, 8, 9, 10])];
                let new_blocks = blocks.each_ref().map(Vec::as_slice);
                let progress =
                    Progress { request_id: "new", num_computed_tokens: 10, new_blocks: &new_blocks };
                let _ = scheduler.store(std::iter::once(progress), None);
                scheduler.end_all().unwrap();
                scheduler.finish("new").unwrap();
                scheduler.check().unwrap();
            }
            Err(error) => prop_assert!(is_refused::<()>(&Err(error.clone())), "{error}"),
        }
    }
}

#[test]
fn image_survives_a_snapshot_and_can_be_released_twice() {
    let ledger = ledger();
    let mut scheduler = scheduler(EvictionPolicy::Lru);
    let copies = scheduler.hold_image(&ledger).unwrap();
    assert_eq!(copies.offsets.len(), 3);
    assert_eq!(scheduler.image().unwrap().block_ids.len(), 6);
    scheduler.check().unwrap();
    let bytes = scheduler.snapshot().unwrap();
    let mut restored = restore_scheduler(EvictionPolicy::Lru, &bytes).unwrap();
    assert_eq!(restored.image(), scheduler.image());
    restored.release_image().unwrap();
    restored.release_image().unwrap();
    assert!(restored.image().is_err());
    restored.check().unwrap();
    let known: Vec<BlockId> = copies.block_ids;
    assert!(!known.is_empty(), "no tier stores the partial last block, so it must be copied");
}

#[test]
fn image_that_does_not_fit_changes_nothing() {
    let groups = vec![Group::new(Attention::Full, 2).unwrap()];
    let mut ledger = BlockLedger::new(8, groups.clone(), None, false).unwrap();
    ledger.add("a", &hashes(&[]), Context::default()).unwrap();
    let new = AllocateArgs { num_new_tokens: 7, ..AllocateArgs::default() };
    ledger.allocate("a", &new).unwrap().unwrap();
    let mut scheduler = OffloadScheduler::new(OffloadConfig::new(3, groups)).unwrap();
    let before = format!("{scheduler:?}");
    let refused = scheduler.hold_image(&ledger).unwrap_err();
    assert_eq!(refused, Error::NoRoomForImage { needed: 4, available: 3 });
    assert_eq!(format!("{scheduler:?}"), before);
}
