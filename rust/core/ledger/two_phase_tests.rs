//! What two phases prevent (vLLM issue 33775). In each case the hits of a request are at the head
//! of the free queue when the request gets slots for hit and external tokens. Each case runs twice.
//! It must pass as the ledger is, and must fail with [`INTERLEAVED`] set, so it can detect the
//! defect.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::cell::Cell;

use super::{AllocateArgs, BlockLedger, Context, PrefixHit};
use crate::group::{Attention, Group};
use crate::ids::BlockId;
use crate::key::{Hashes, HashesBuilder};

const BLOCK_SIZE: usize = 4;

thread_local! {
    /// Whether each group allocates its external blocks right after it touched its own hits: the
    /// defect that two phases avoid.
    pub(super) static INTERLEAVED: Cell<bool> = const { Cell::new(false) };
}

/// The block that is at two places of a request's tables.
#[derive(Debug, PartialEq)]
struct InTwoPlaces(BlockId);

/// Runs a case with two phases, and with interleaved phases.
fn shows(case: fn() -> Result<(), InTwoPlaces>) {
    assert_eq!(case(), Ok(()));
    INTERLEAVED.set(true);
    let result = case();
    INTERLEAVED.set(false);
    assert!(matches!(result, Err(InTwoPlaces(_))), "the case passes without two phases too");
}

fn full() -> Group {
    Group::new(Attention::Full, BLOCK_SIZE).unwrap()
}

/// A window that reads this many blocks before the block of the next token.
fn window(num_blocks: usize) -> Group {
    let window = num_blocks * BLOCK_SIZE + 1;
    Group::new(Attention::SlidingWindow { window }, BLOCK_SIZE).unwrap()
}

/// A prompt's hashes. As with chained digests, each belongs to one position.
fn prompt(chain: u8, num_blocks: u8) -> Hashes {
    let mut hashes = HashesBuilder::default();
    for at in 0..num_blocks {
        hashes.push(&[chain, at, 0, 0, 0, 0, 0, 0]).unwrap();
    }
    hashes.finish()
}

fn grant(ledger: &mut BlockLedger, name: &str, num_blocks: usize) {
    let num_new_tokens = num_blocks * BLOCK_SIZE;
    let args = AllocateArgs { num_new_tokens, ..AllocateArgs::default() };
    ledger.allocate(name, &args).unwrap().unwrap();
}

/// A ledger whose free queue holds the blocks of a prompt of `num_blocks`, group by group and each
/// tail first, and then the blocks of another, `num_others` in each group. All blocks have keys, so
/// the queue begins with the first prompt.
fn hits_at_head(groups: Vec<Group>, num_blocks: u8, num_others: u8) -> BlockLedger {
    let num_usable = groups.len() * usize::from(num_blocks + num_others);
    let mut ledger = BlockLedger::new(1 + num_usable, groups, None, false).unwrap();
    for (name, chain, num_blocks) in [("first", 1, num_blocks), ("other", 2, num_others)] {
        ledger.add(name, &prompt(chain, num_blocks), Context::default()).unwrap();
        grant(&mut ledger, name, num_blocks.into());
    }
    ledger.free("first", None).unwrap();
    ledger.free("other", None).unwrap();
    ledger
}

/// Adds a request, and allocates its hit, `num_external` and `num_new` blocks.
fn admit(
    ledger: &mut BlockLedger,
    name: &str,
    hashes: &Hashes,
    num_external: usize,
    num_new: usize,
) -> Result<PrefixHit, InTwoPlaces> {
    ledger.add(name, hashes, Context::default()).unwrap();
    let hit = ledger.lookup(name, usize::MAX).unwrap();
    let args = AllocateArgs {
        hit: Some(&hit),
        num_external_tokens: num_external * BLOCK_SIZE,
        num_new_tokens: num_new * BLOCK_SIZE,
        ..AllocateArgs::default()
    };
    ledger.allocate(name, &args).unwrap().unwrap();
    verify(ledger, name, &hit)?;
    Ok(hit)
}

/// Verifies that no block is at two places of a request, and that its hits still hold their keys.
fn verify(ledger: &BlockLedger, name: &str, hit: &PrefixHit) -> Result<(), InTwoPlaces> {
    let request = ledger.requests.get(name).unwrap();
    let mut seen = Vec::new();
    for ((id, _), hits) in ledger.model.enumerate().zip(&hit.blocks) {
        let table = ledger.block_table(name, id.0.into()).unwrap();
        for &block in table.iter().filter(|block| !block.is_null()) {
            if seen.contains(&block) {
                return Err(InTwoPlaces(block));
            }
            seen.push(block);
        }
        for ((&block, &hit), hash) in table.iter().zip(hits).zip(request.hashes.iter()) {
            assert!(block.is_null() || block == hit);
            assert!(block.is_null() || ledger.pool.holds(block, hash, id));
        }
    }
    ledger.check().unwrap();
    Ok(())
}

#[test]
fn local_hit_and_external_over_window_and_full() {
    shows(|| {
        // One hit falls out of the window, and becomes the first of two external blocks.
        let mut ledger = hits_at_head(vec![window(5), full()], 4, 4);
        let hit = admit(&mut ledger, "next", &prompt(1, 6), 2, 0)?;
        assert_eq!(hit.num_tokens, 4 * BLOCK_SIZE);
        Ok(())
    });
}

#[test]
fn local_hit_and_external_over_three_groups() {
    // The group that comes first would allocate the hits of the others.
    shows(|| admit_over_three(vec![full(), window(5), window(6)]));
    shows(|| admit_over_three(vec![window(6), full(), window(5)]));
    shows(|| admit_over_three(vec![window(5), window(6), full()]));
}

fn admit_over_three(groups: Vec<Group>) -> Result<(), InTwoPlaces> {
    let mut ledger = hits_at_head(groups, 4, 6);
    let hit = admit(&mut ledger, "next", &prompt(1, 8), 3, 1)?;
    assert_eq!(hit.num_tokens, 4 * BLOCK_SIZE);
    Ok(())
}

#[test]
fn two_groups_preempted_and_reallocated() {
    shows(|| preempt_and_reallocate(vec![full(), full()]));
    shows(|| preempt_and_reallocate(vec![full(), window(3)]));
}

#[test]
fn three_groups_preempted_and_reallocated() {
    shows(|| preempt_and_reallocate(vec![full(), full(), window(3)]));
    shows(|| preempt_and_reallocate(vec![window(5), full(), window(4)]));
}

/// Two requests preempt each other. When one resumes, its computed blocks are its hit, a tier has
/// two more blocks, and one block is new.
fn preempt_and_reallocate(groups: Vec<Group>) -> Result<(), InTwoPlaces> {
    let mut ledger = BlockLedger::new(1 + 11 * groups.len(), groups, None, false).unwrap();
    let (a, b) = (prompt(1, 7), prompt(2, 7));
    for (name, hashes, num_blocks) in [("a", &a, 4), ("b", &b, 4), ("rest", &prompt(3, 3), 3)] {
        ledger.add(name, hashes, Context::default()).unwrap();
        grant(&mut ledger, name, num_blocks);
    }
    // All blocks are allocated and cached, so the first blocks freed are at the head.
    ledger.free("a", None).unwrap();
    ledger.free("rest", None).unwrap();
    let hit = admit(&mut ledger, "a", &a, 2, 1)?;
    assert_eq!(hit.num_tokens, 4 * BLOCK_SIZE);
    ledger.free("b", None).unwrap();
    ledger.free("a", None).unwrap();
    let hit = admit(&mut ledger, "b", &b, 2, 1)?;
    assert_eq!(hit.num_tokens, 4 * BLOCK_SIZE);
    Ok(())
}

#[test]
fn evictable_cached_blocks_are_not_allocated_twice() {
    shows(|| {
        // Hits, external blocks and a new block of each group are all blocks of the pool.
        let mut ledger = hits_at_head(vec![full(), full()], 4, 3);
        ledger.add("large", &prompt(1, 6), Context::default()).unwrap();
        let hit = ledger.lookup("large", usize::MAX).unwrap();
        // A hit in the queue is not a block to allocate, so one more block does not fit.
        let args = AllocateArgs {
            hit: Some(&hit),
            num_external_tokens: 2 * BLOCK_SIZE,
            num_new_tokens: BLOCK_SIZE + 1,
            ..AllocateArgs::default()
        };
        assert_eq!(ledger.allocate("large", &args), Ok(None));
        ledger.free("large", None).unwrap();
        admit(&mut ledger, "next", &prompt(1, 6), 2, 1)?;
        assert_eq!(ledger.pool.num_free(), 0);
        Ok(())
    });
}

#[test]
fn hits_that_fall_out_of_the_window_are_not_touched() {
    shows(|| {
        let mut ledger = hits_at_head(vec![full(), window(3)], 5, 5);
        // Another request references the blocks 0 to 2 of both groups.
        admit(&mut ledger, "short", &prompt(1, 3), 0, 0)?;
        // The window reads three of the seven computed blocks; one of them is a hit.
        let hit = admit(&mut ledger, "next", &prompt(1, 7), 2, 0)?;
        let [.., held, free, kept] = hit.blocks[1][..] else { unreachable!("five are hit") };
        let table = ledger.block_table("next", 1).unwrap();
        assert_eq!(table[..5], [BlockId::NULL, BlockId::NULL, BlockId::NULL, BlockId::NULL, kept]);
        assert_eq!(ledger.pool.num_refs(held), 1, "only the other request references it");
        // It kept its place in the queue, so it was next once the hits before it had left.
        assert_eq!(ledger.block_table("next", 0).unwrap()[5], free);
        Ok(())
    });
}
