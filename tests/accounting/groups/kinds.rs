//! What each kind needs and skips, by example.

use kvstow_core::group::Group;
use kvstow_core::ids::{BlockId, GroupId};
use kvstow_core::ledger::{AllocateArgs, BlockLedger, Context};

use crate::{hashes, raw};

use super::{chunked, dropping, full, num_null, retaining, state, window};

/// A ledger with a request "a" of `num_tokens`, all granted at once. So the request holds all its
/// blocks, and those that a hit can need are published.
fn with_prompt(groups: &[Group], num_tokens: u16) -> BlockLedger {
    let mut ledger = BlockLedger::new(100, groups.to_vec(), None, false).unwrap();
    let hash_block_size = u16::try_from(ledger.model().hash_block_size()).unwrap();
    let names: Vec<u16> = (0..num_tokens / hash_block_size).collect();
    ledger.add("a", &hashes(&names), Context::default()).unwrap();
    allocate(&mut ledger, num_tokens.into()).unwrap();
    ledger
}

fn allocate(ledger: &mut BlockLedger, num_new_tokens: usize) -> Option<Vec<u32>> {
    let args = AllocateArgs { num_new_tokens, ..AllocateArgs::default() };
    ledger.allocate("a", &args).unwrap().map(|allocated| raw(allocated.ids))
}

/// The hit of "a" after these blocks of one group were evicted: its tokens, and per group the first
/// block that it needs and the first block after it.
fn found_without(
    ledger: &BlockLedger,
    group: usize,
    evicted: &[usize],
) -> (usize, Vec<(usize, usize)>) {
    let mut ledger = ledger.clone();
    let table = ledger.block_table("a", group).unwrap();
    let blocks: Vec<BlockId> = evicted.iter().map(|&index| table[index]).collect();
    ledger.pool_mut().evict(&blocks).unwrap();
    let hit = ledger.lookup("a", usize::MAX).unwrap();
    (hit.num_tokens, hit.blocks.iter().map(|found| (num_null(found), found.len())).collect())
}

#[test]
fn full_attention_needs_every_block() {
    let ledger = with_prompt(&[full(4)], 18);
    assert_eq!(found_without(&ledger, 0, &[]), (16, vec![(0, 4)]));
    assert_eq!(found_without(&ledger, 0, &[2]), (8, vec![(0, 2)]));
    assert_eq!(found_without(&ledger, 0, &[0]), (0, vec![(0, 0)]));
}

#[test]
fn a_window_needs_its_last_blocks() {
    // The next token reads five before it: two blocks.
    let ledger = with_prompt(&[window(6, 4)], 20);
    assert_eq!(found_without(&ledger, 0, &[]), (20, vec![(3, 5)]));
    assert_eq!(found_without(&ledger, 0, &[0, 1, 2]), (20, vec![(3, 5)]));
    assert_eq!(found_without(&ledger, 0, &[3]), (12, vec![(1, 3)]));
    // A prompt shorter than the window needs all of itself.
    assert_eq!(found_without(&ledger, 0, &[1, 2, 3, 4]), (4, vec![(0, 1)]));
    assert_eq!(found_without(&ledger, 0, &[0, 2, 4]), (0, vec![(0, 0)]));
    // One token less, and one block is enough.
    assert_eq!(found_without(&with_prompt(&[window(5, 4)], 20), 0, &[3]), (20, vec![(4, 5)]));
}

#[test]
fn a_window_of_one_needs_nothing() {
    let mut ledger = with_prompt(&[window(1, 4)], 20);
    assert_eq!(found_without(&ledger, 0, &[]), (20, vec![(5, 5)]));
    // Nor has it anything to publish.
    assert_eq!(ledger.pool().num_cached(), 0);
    allocate(&mut ledger, 1).unwrap();
    assert_eq!(num_null(ledger.block_table("a", 0).unwrap()), 5);
    // Beside full attention it costs no hit.
    let ledger = with_prompt(&[full(4), window(1, 4)], 20);
    assert_eq!(found_without(&ledger, 0, &[3]), (12, vec![(0, 3), (3, 3)]));
}

#[test]
fn a_chunk_needs_its_blocks_from_its_start() {
    let ledger = with_prompt(&[chunked(12, 4)], 20);
    assert_eq!(found_without(&ledger, 0, &[0, 1, 2]), (20, vec![(3, 5)]));
    assert_eq!(found_without(&ledger, 0, &[4]), (16, vec![(3, 4)]));
    // Where a chunk ends the next token begins another, and reads nothing.
    assert_eq!(found_without(&ledger, 0, &[0, 1, 2, 3, 4]), (12, vec![(3, 3)]));
    let ledger = with_prompt(&[chunked(12, 4)], 8);
    assert_eq!(found_without(&ledger, 0, &[0]), (0, vec![(0, 0)]));
}

#[test]
fn a_state_needs_the_block_it_ends_in() {
    let ledger = with_prompt(&[state(4)], 20);
    assert_eq!(found_without(&ledger, 0, &[0, 1, 2, 3]), (20, vec![(4, 5)]));
    assert_eq!(found_without(&ledger, 0, &[3, 4]), (12, vec![(2, 3)]));
    assert_eq!(found_without(&ledger, 0, &[0, 1, 2, 3, 4]), (0, vec![(0, 0)]));
}

#[test]
fn a_kind_skips_blocks_that_no_later_token_reads() {
    // Granted so many tokens, the next one makes so many blocks null: on both sides of each border.
    let skips = [
        (full(4), 20, 0),
        (window(5, 4), 7, 0), // token 7 reads tokens 3 to 7
        (window(5, 4), 8, 1),
        (window(5, 4), 11, 1),
        (window(5, 4), 12, 2),
        (window(1, 4), 3, 0),
        (window(1, 4), 4, 1),
        (retaining(3, window(5, 4)), 10, 0), // token 10 reads from 6 on, 3 to 5 are retained
        (retaining(3, window(5, 4)), 11, 1),
        (retaining(4, window(1, 4)), 7, 0),
        (retaining(4, window(1, 4)), 8, 1),
        (chunked(8, 4), 7, 0),
        (chunked(8, 4), 8, 2),
        (chunked(8, 4), 15, 2),
        (chunked(8, 4), 16, 4),
        (state(4), 4, 0), // the state after token 3 is read
        (state(4), 5, 1),
        (state(4), 8, 1),
        (state(4), 9, 2),
    ];
    for (group, num_tokens, num_skipped) in skips {
        let mut ledger = with_prompt(&[group], num_tokens);
        let free_before = ledger.pool().num_free();
        let allocated = allocate(&mut ledger, 1).unwrap();
        let table = ledger.block_table("a", 0).unwrap();
        assert_eq!(num_null(table), num_skipped, "{group:?} after {num_tokens} tokens");
        assert_eq!(ledger.pool().num_free(), free_before + num_skipped - allocated.len());
        ledger.check().unwrap();
    }
}

#[test]
fn a_hit_does_not_need_retained_blocks() {
    let groups = [retaining(6, window(5, 4))];
    let mut ledger = with_prompt(&groups, 20);
    // The window of token 20 begins in block 4; blocks 2 and 3 are retained below it.
    assert_eq!(found_without(&ledger, 0, &[0, 1, 2, 3]), (20, vec![(4, 5)]));
    ledger.free("a", None).unwrap();
    ledger.add("a", &hashes(&[0, 1, 2, 3, 4]), Context::default()).unwrap();
    let hit = ledger.lookup("a", usize::MAX).unwrap();
    let args = AllocateArgs { num_new_tokens: 4, hit: Some(&hit), ..AllocateArgs::default() };
    ledger.allocate("a", &args).unwrap().unwrap();
    ledger.check().unwrap();
    // What was not hit is null, though a request that computes the same keeps it.
    assert_eq!(num_null(ledger.block_table("a", 0).unwrap()), 4);
    ledger.rewind("a", 20).unwrap();
    allocate(&mut ledger, 12).unwrap();
    allocate(&mut ledger, 1).unwrap();
    // Token 32 reads from 28 on, and 22 to 27 are retained.
    assert_eq!(num_null(ledger.block_table("a", 0).unwrap()), 5);
    ledger.check().unwrap();
}

#[test]
fn a_draft_group_needs_one_block_after_the_hit() {
    let ledger = with_prompt(&[dropping(full(4))], 18);
    assert_eq!(found_without(&ledger, 0, &[]), (12, vec![(0, 3)]));
    assert_eq!(found_without(&ledger, 0, &[2]), (4, vec![(0, 1)]));
    assert_eq!(found_without(&ledger, 0, &[1]), (0, vec![(0, 0)]));
    assert_eq!(found_without(&with_prompt(&[dropping(full(4))], 3), 0, &[]), (0, vec![(0, 0)]));
    let ledger = with_prompt(&[dropping(window(6, 4))], 24);
    assert_eq!(found_without(&ledger, 0, &[0, 1, 2]), (20, vec![(3, 5)]));
    assert_eq!(found_without(&ledger, 0, &[5]), (16, vec![(2, 4)]));
    // A hit of one block needs two blocks, and a hit of none needs none.
    assert_eq!(found_without(&ledger, 0, &[2, 5]), (4, vec![(0, 1)]));
    assert_eq!(found_without(&ledger, 0, &[1, 4]), (0, vec![(0, 0)]));
}

#[test]
fn only_the_draft_group_needs_the_block_after_the_hit() {
    let ledger = with_prompt(&[dropping(full(4)), state(4), full(4)], 20);
    assert_eq!(found_without(&ledger, 0, &[]), (16, vec![(0, 4), (3, 4), (0, 4)]));
    // The hit ends at a state, and the states after it are not needed.
    assert_eq!(found_without(&ledger, 1, &[4]), (16, vec![(0, 4), (3, 4), (0, 4)]));
    assert_eq!(found_without(&ledger, 2, &[4]), (16, vec![(0, 4), (3, 4), (0, 4)]));
    assert_eq!(found_without(&ledger, 0, &[4]), (12, vec![(0, 3), (2, 3), (0, 3)]));
}

#[test]
fn a_draft_group_publishes_the_block_after_a_hit() {
    // Hits end at 8, and a hit of 16 needs the blocks that begin at 16.
    let ledger = with_prompt(&[full(8), dropping(full(2)), dropping(window(3, 2))], 21);
    let is_published = |group: usize| -> Vec<bool> {
        let table = ledger.block_table("a", group).unwrap();
        table.iter().map(|&id| ledger.pool().key(id).is_some()).collect()
    };
    assert_eq!(is_published(0), [true, true, false]);
    assert_eq!(is_published(1), [[true; 9].as_slice(), &[false; 2]].concat());
    let [no, yes] = [false, true];
    assert_eq!(is_published(2), [no, no, no, yes, yes, no, no, yes, yes, no, no]);
    assert_eq!(found_without(&ledger, 2, &[3, 4]).0, 16);
    assert_eq!(found_without(&ledger, 2, &[8]).0, 8);
}

#[test]
fn only_attention_drops_its_last_block() {
    for group in [chunked(8, 4), state(4)] {
        assert!(group.dropping_last_block().is_err());
    }
}

#[test]
fn only_a_window_retains_tokens_below_it() {
    for group in [full(4), chunked(8, 4), state(4)] {
        assert!(group.retaining(1).is_err());
    }
    assert!(window(5, 4).retaining(usize::MAX).is_err());
    assert!(window(5, 4).retaining((1 << 30) - 4).is_err());
    assert!(window(5, 4).retaining((1 << 30) - 5).is_ok());
}

#[test]
fn tokens_in_flight_keep_the_blocks_that_they_read() {
    let mut ledger = with_prompt(&[window(5, 4)], 12);
    // Drafts: no hash is known of them, so they are not published. The window reads 8 to 12.
    allocate(&mut ledger, 4).unwrap();
    let mut processed = ledger.clone();
    allocate(&mut processed, 1).unwrap();
    assert_eq!(num_null(processed.block_table("a", 0).unwrap()), 3);
    assert!(processed.rewind("a", 15).is_err(), "token 15 reads 11, whose block is freed");
    let args =
        AllocateArgs { num_new_tokens: 1, num_in_flight_tokens: 1, ..AllocateArgs::default() };
    ledger.allocate("a", &args).unwrap().unwrap();
    assert_eq!(num_null(ledger.block_table("a", 0).unwrap()), 2);
    ledger.rewind("a", 15).unwrap();
}

#[test]
fn a_model_needs_no_full_attention() {
    let ledger = with_prompt(&[window(6, 4), state(4)], 20);
    assert_eq!(found_without(&ledger, 0, &[0, 1]), (20, vec![(3, 5), (4, 5)]));
    // Each shortens the other: no state ends at 16 or 12, the window has none of block 1.
    assert_eq!(found_without(&ledger, 1, &[4]), (16, vec![(2, 4), (3, 4)]));
    let mut ledger = ledger;
    let states = ledger.block_table("a", 1).unwrap();
    let (third, last) = (states[3], states[4]);
    ledger.pool_mut().evict(&[third, last]).unwrap();
    assert_eq!(found_without(&ledger, 0, &[1]), (4, vec![(0, 1), (0, 1)]));
}

#[test]
fn groups_of_one_kind_are_found_together() {
    let ledger = with_prompt(&[full(4), window(5, 4), full(4), window(5, 4)], 20);
    assert_eq!(found_without(&ledger, 2, &[4]), (16, vec![(0, 4), (3, 4), (0, 4), (3, 4)]));
    assert_eq!(found_without(&ledger, 3, &[4]), (16, vec![(0, 4), (3, 4), (0, 4), (3, 4)]));
}

#[test]
fn a_hit_ends_at_the_common_multiple() {
    // Hashes of 2 tokens each, hits of 12.
    let ledger = with_prompt(&[full(4), window(9, 6)], 34);
    assert_eq!(ledger.model().hash_block_size(), 2);
    assert_eq!(ledger.model().hit_block_size(), 12);
    assert_eq!(found_without(&ledger, 0, &[]), (24, vec![(0, 6), (2, 4)]));
    assert_eq!(found_without(&ledger, 0, &[5]), (12, vec![(0, 3), (0, 2)]));
    assert_eq!(found_without(&ledger, 1, &[3]), (12, vec![(0, 3), (0, 2)]));
    assert_eq!(found_without(&ledger, 1, &[1, 3]), (0, vec![(0, 0), (0, 0)]));
    // Also where one kind alone would end elsewhere.
    let hit = ledger.lookup("a", 23).unwrap();
    assert_eq!(hit.num_tokens, 12);
}

#[test]
fn a_block_takes_the_last_hash_it_covers() {
    let ledger = with_prompt(&[full(4), full(6)], 24);
    let hashes = hashes(&(0..12).collect::<Vec<u16>>());
    for (group, id, per_block) in [(0, GroupId(0), 2), (1, GroupId(1), 3)] {
        for (index, &block) in ledger.block_table("a", group).unwrap().iter().enumerate() {
            let own = hashes.as_slice()[(index + 1) * per_block - 1];
            assert!(ledger.pool().holds(block, &own, id));
        }
    }
}

#[test]
fn a_block_that_no_hit_can_need_is_not_published() {
    // Hits end at 8: a window of 3 needs the last of four blocks, one of 4 the last two.
    let ledger = with_prompt(&[full(8), window(3, 2), window(4, 2), state(2)], 18);
    let is_published = |group: usize| -> Vec<bool> {
        let table = ledger.block_table("a", group).unwrap();
        table.iter().map(|&id| ledger.pool().key(id).is_some()).collect()
    };
    assert_eq!(is_published(0), [true, true, false]);
    let one_of_four = [false, false, false, true, false, false, false, true, false];
    assert_eq!(is_published(1), one_of_four);
    assert_eq!(is_published(2), [false, false, true, true, false, false, true, true, false]);
}
