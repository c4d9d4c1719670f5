//! Models of several groups: what each kind needs and skips, properties of every allocation over
//! random models, and a long run of overlapping requests.
//!
//! What a hit needs and what is skipped is said once more, by the table of `kvstow_core::group`,
//! and as plainly as can be.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use kvstow_core::group::{Attention, Group};
use kvstow_core::ids::{BlockId, GroupId};
use kvstow_core::ledger::{AllocateArgs, BlockLedger, Context, PrefixHit};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;

use super::{hashes, num_cases, raw};

fn full(block_size: usize) -> Group {
    Group::new(Attention::Full, block_size).unwrap()
}

fn window(window: usize, block_size: usize) -> Group {
    Group::new(Attention::SlidingWindow { window }, block_size).unwrap()
}

fn retaining(extra: usize, group: Group) -> Group {
    group.retaining(extra).unwrap()
}

fn chunked(chunk: usize, block_size: usize) -> Group {
    Group::new(Attention::ChunkedLocal { chunk }, block_size).unwrap()
}

fn state(block_size: usize) -> Group {
    Group::new(Attention::StateSpace, block_size).unwrap()
}

/// The blocks that a hit of `num_tokens`, a multiple of the block size, needs.
fn needed(group: Group, num_tokens: usize) -> Range<usize> {
    let end = num_tokens / group.block_size;
    let start = match group.attention {
        Attention::Full => 0,
        Attention::SlidingWindow { window } => {
            end.saturating_sub((window - 1).div_ceil(group.block_size))
        }
        Attention::ChunkedLocal { chunk } => num_tokens / chunk * chunk / group.block_size,
        Attention::StateSpace => end.saturating_sub(1),
        _ => unreachable!("no other kind is known here"),
    };
    start..end
}

/// Blocks, from the first, that nobody reads any more.
fn num_skipped(group: Group, num_tokens: usize) -> usize {
    match group.attention {
        Attention::Full => 0,
        Attention::SlidingWindow { window } => {
            let kept = window + group.extra_retained_tokens();
            (num_tokens + 1).saturating_sub(kept) / group.block_size
        }
        Attention::ChunkedLocal { chunk } => num_tokens / chunk * (chunk / group.block_size),
        Attention::StateSpace => num_tokens.div_ceil(group.block_size).saturating_sub(1),
        _ => unreachable!("no other kind is known here"),
    }
}

/// Blocks, from the first, that no token reads from there on.
fn num_unread(group: Group, num_tokens: usize) -> usize {
    num_skipped(Group::new(group.attention, group.block_size).unwrap(), num_tokens)
}

fn name(who: usize) -> String {
    format!("request-{who}")
}

fn num_null(table: &[BlockId]) -> usize {
    table.iter().take_while(|id| id.is_null()).count()
}

// ---- Each kind by example ----

/// A ledger with a request "a" of `num_tokens`, all granted at once: so all its blocks are held, and
/// those that a hit can need are published.
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

/// What is found of "a" once these blocks of one group are evicted: tokens, and per group the first
/// block that the hit needs and the first behind it.
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
fn a_kind_skips_what_no_later_token_reads() {
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
fn a_hit_does_not_need_what_a_window_retains() {
    let groups = [retaining(6, window(5, 4))];
    let mut ledger = with_prompt(&groups, 20);
    // The window of token 20 begins in block 4; blocks 2 and 3 are retained below it.
    assert_eq!(found_without(&ledger, 0, &[0, 1, 2, 3]), (20, vec![(4, 5)]));
    ledger.free("a").unwrap();
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
fn only_a_window_retains_tokens_below_it() {
    for group in [full(4), chunked(8, 4), state(4)] {
        assert!(group.retaining(1).is_err());
    }
    assert!(window(5, 4).retaining(usize::MAX).is_err());
    assert!(window(5, 4).retaining((1 << 30) - 4).is_err());
    assert!(window(5, 4).retaining((1 << 30) - 5).is_ok());
}

#[test]
fn tokens_in_flight_keep_what_they_read() {
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
fn what_no_hit_can_need_is_not_published() {
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

// ---- Random models, random requests ----

/// Sizes are eighths of the model's hit block size, so that they mean the same in every model.
#[derive(Clone, Debug)]
enum Op {
    Add {
        who: usize,
        chain: usize,
        len: usize,
    },
    Extend {
        who: usize,
        len: usize,
    },
    Admit {
        who: usize,
        new: usize,
        external: usize,
        more: More,
        delay: bool,
        must_fit: Option<usize>,
    },
    Continue {
        who: usize,
        new: usize,
        more: More,
    },
    Step {
        new: usize,
        more: More,
    },
    Cache {
        who: usize,
        back: usize,
    },
    Rewind {
        who: usize,
        back: usize,
    },
    Free {
        who: usize,
    },
    Evict {
        some: usize,
    },
}

#[derive(Clone, Copy, Debug)]
struct More {
    lookahead: usize,
    in_flight: usize,
    reserve: usize,
}

fn group() -> impl Strategy<Value = Group> {
    (0..5, select(vec![1, 2, 4, 8, 6, 3]), 1..40_usize).prop_map(|(kind, block_size, extent)| {
        match kind {
            0 => full(block_size),
            1 => window(extent, block_size),
            4 => retaining(extent % 13, window(1 + extent % 11, block_size)),
            2 => chunked((1 + extent % 4) * block_size, block_size),
            _ => state(block_size),
        }
    })
}

fn op() -> impl Strategy<Value = Op> {
    let who = 0..4_usize;
    let more = (0..4_usize, select(vec![0, 0, 0, 1, 4]), select(vec![0, 0, 0, 1, 5]))
        .prop_map(|(lookahead, in_flight, reserve)| More { lookahead, in_flight, reserve });
    let must_fit = prop::option::weighted(0.2, 0..40_usize);
    let delay = prop::bool::weighted(0.2);
    prop_oneof![
        5 => (who.clone(), 0..3_usize, 0..36_usize)
            .prop_map(|(who, chain, len)| Op::Add { who, chain, len }),
        1 => (who.clone(), 0..12_usize).prop_map(|(who, len)| Op::Extend { who, len }),
        7 => (who.clone(), 0..24_usize, 0..4_usize, more.clone(), delay, must_fit).prop_map(
            |(who, new, external, more, delay, must_fit)| {
                let external = external.saturating_sub(1);
                Op::Admit { who, new, external, more, delay, must_fit }
            }
        ),
        6 => (who.clone(), 0..10_usize, more.clone())
            .prop_map(|(who, new, more)| Op::Continue { who, new, more }),
        2 => (1..6_usize, more).prop_map(|(new, more)| Op::Step { new, more }),
        3 => (who.clone(), select(vec![0, 0, 2, 8])).prop_map(|(who, back)| Op::Cache { who, back }),
        2 => (who.clone(), 0..4_usize).prop_map(|(who, back)| Op::Rewind { who, back }),
        4 => who.prop_map(|who| Op::Free { who }),
        1 => (0..1000_usize).prop_map(|some| Op::Evict { some }),
    ]
}

#[derive(Clone, Debug, Default)]
struct Known {
    chain: usize,
    names: Vec<u16>,
    /// What was computed when it was last allocated to, or refused: all before may be skipped.
    computed: usize,
    is_running: bool,
    is_delayed: bool,
}

/// All that can be observed of a request.
type Seen = (usize, Vec<Vec<BlockId>>, PrefixHit);

struct World {
    ledger: BlockLedger,
    requests: BTreeMap<usize, Known>,
    /// Whether it is known how many tokens are in flight at most.
    has_bound: bool,
    /// Whether a key was ever dropped under a request's feet.
    has_evicted: bool,
}

impl World {
    fn new(groups: Vec<Group>, num_hit_blocks: usize, max_in_flight: Option<usize>) -> Self {
        let unit =
            BlockLedger::new(2, groups.clone(), None, false).unwrap().model().hit_block_size();
        let per_hit_block: usize = groups.iter().map(|group| unit / group.block_size).sum();
        let num_blocks = 2 + num_hit_blocks * per_hit_block;
        let ledger = BlockLedger::new(num_blocks, groups, max_in_flight, false).unwrap();
        Self {
            ledger,
            requests: BTreeMap::new(),
            has_bound: max_in_flight.is_some(),
            has_evicted: false,
        }
    }

    fn groups(&self) -> Vec<Group> {
        self.ledger.model().groups().to_vec()
    }

    fn unit(&self) -> usize {
        self.ledger.model().hit_block_size()
    }

    fn eighths(&self, num: usize) -> usize {
        num * self.unit() / 8
    }

    /// The hash names of a chain from one position to another. All chains begin with the same two
    /// hit blocks; no name stands at two positions, as no chained digest does.
    fn chain(&self, chain: usize, positions: Range<usize>) -> Vec<u16> {
        let shared = 2 * self.unit() / self.ledger.model().hash_block_size();
        let name = |at| if at < shared { at } else { 1000 * (chain + 1) + at };
        positions.map(|at| u16::try_from(name(at)).unwrap()).collect()
    }

    fn tables(&self, ledger: &BlockLedger, who: usize) -> Vec<Vec<BlockId>> {
        let table = |group| ledger.block_table(&name(who), group).unwrap().to_vec();
        (0..self.groups().len()).map(table).collect()
    }

    fn seen(&self, ledger: &BlockLedger) -> (BTreeMap<usize, Seen>, Vec<u32>) {
        let seen = |&who: &usize| {
            let granted = ledger.num_granted_tokens(&name(who)).unwrap();
            let hit = ledger.lookup(&name(who), usize::MAX).unwrap();
            (who, (granted, self.tables(ledger, who), hit))
        };
        (self.requests.keys().map(seen).collect(), raw(ledger.pool().free_order()))
    }

    fn apply(&mut self, op: &Op) {
        match *op {
            Op::Add { who, chain, len } => {
                let num_hashes = self.eighths(len) / self.ledger.model().hash_block_size();
                let names = self.chain(chain, 0..num_hashes);
                let done = self.ledger.add(&name(who), &hashes(&names), Context::default());
                assert_eq!(done.is_ok(), !self.requests.contains_key(&who));
                self.requests.entry(who).or_insert(Known { chain, names, ..Known::default() });
            }
            Op::Extend { who, len } => {
                let Some(known) = self.requests.get(&who) else { return };
                let start = known.names.len();
                let end = start + self.eighths(len) / self.ledger.model().hash_block_size();
                let names = self.chain(known.chain, start..end);
                self.ledger.extend(&name(who), &hashes(&names), Context::default()).unwrap();
                self.requests.get_mut(&who).unwrap().names.extend(names);
            }
            Op::Admit { who, new, external, more, delay, must_fit } => {
                if !self.requests.contains_key(&who) {
                    return;
                }
                let hit = self.lookup(who);
                let args = AllocateArgs {
                    hit: Some(&hit),
                    num_external_tokens: external * self.unit(),
                    delay_caching: delay,
                    must_fit_tokens: must_fit.map(|num| self.eighths(num)),
                    ..self.args(new, more)
                };
                self.allocate(who, &args);
            }
            Op::Continue { who, new, more } => {
                if self.requests.contains_key(&who) {
                    self.allocate(who, &self.args(new, more));
                }
            }
            Op::Step { new, more } => self.step(&self.args(new, more)),
            Op::Cache { who, back } => {
                let Some(known) = self.requests.get_mut(&who) else { return };
                let granted = self.ledger.num_granted_tokens(&name(who)).unwrap();
                let num_tokens = granted.saturating_sub(back);
                self.ledger.cache(&name(who), num_tokens).unwrap();
                known.is_delayed = false;
                self.verify_published(who, num_tokens);
            }
            Op::Rewind { who, back } => {
                if self.requests.contains_key(&who) {
                    self.rewind(who, back);
                }
            }
            Op::Free { who } => self.free(who),
            Op::Evict { some } => {
                self.has_evicted = true;
                let id = 1 + some % (self.ledger.pool().num_blocks() - 1);
                self.ledger.pool_mut().evict(&[BlockId(u32::try_from(id).unwrap())]).unwrap();
            }
        }
    }

    fn args(&self, new: usize, more: More) -> AllocateArgs<'static> {
        AllocateArgs {
            num_new_tokens: self.eighths(new),
            num_lookahead_tokens: more.lookahead,
            num_in_flight_tokens: more.in_flight,
            reserve: more.reserve,
            ..AllocateArgs::default()
        }
    }

    /// A hit is the longest that all groups can serve, and names just the blocks that it needs.
    fn lookup(&self, who: usize) -> PrefixHit {
        let names = &self.requests[&who].names;
        let hash_block_size = self.ledger.model().hash_block_size();
        // One token is left to compute.
        let max_tokens = (names.len() * hash_block_size).saturating_sub(1);
        let hashes = hashes(names);
        let get = |group: usize, block_size: usize, index: usize| {
            let hash = &hashes.as_slice()[(index + 1) * block_size / hash_block_size - 1];
            self.ledger.pool().get(hash, GroupId(u16::try_from(group).unwrap()))
        };
        let serve = |num_tokens: usize| -> Option<Vec<Vec<BlockId>>> {
            let blocks = |(id, group): (usize, Group)| {
                let needed = needed(group, num_tokens);
                let mut blocks = vec![BlockId::NULL; needed.start];
                for index in needed {
                    blocks.push(get(id, group.block_size, index)?);
                }
                Some(blocks)
            };
            self.groups().into_iter().enumerate().map(blocks).collect()
        };
        let longest = (0..=max_tokens / self.unit()).rev().map(|num| num * self.unit());
        let mut served = longest.filter_map(|num_tokens| Some((num_tokens, serve(num_tokens)?)));
        let (num_tokens, blocks) = served.next().unwrap();
        let hit = self.ledger.lookup(&name(who), max_tokens).unwrap();
        assert_eq!((hit.num_tokens, &hit.blocks), (num_tokens, &blocks));
        hit
    }

    fn allocate(&mut self, who: usize, args: &AllocateArgs) {
        let before = self.ledger.clone();
        let known = &self.requests[&who];
        let num_hit = args.hit.map_or(0, |hit| hit.num_tokens);
        let num_loaded = num_hit + args.num_external_tokens;
        let known_tokens = known.names.len() * before.model().hash_block_size();
        let is_refused = known.is_delayed
            || num_loaded + args.num_new_tokens == 0
            || (known.is_running && (args.hit.is_some() || args.num_external_tokens > 0))
            || (args.num_external_tokens > 0 && num_loaded > known_tokens);
        let computed = before.num_granted_tokens(&name(who)).unwrap() + num_loaded;
        match self.ledger.allocate(&name(who), args) {
            Err(error) => {
                assert!(is_refused, "{error}");
                assert_eq!(self.seen(&self.ledger), self.seen(&before));
            }
            Ok(None) => {
                assert!(!is_refused);
                self.requests.get_mut(&who).unwrap().computed = computed;
                self.verify_refusal(&before, who, args);
                let fewer = AllocateArgs { must_fit_tokens: None, ..*args };
                let is_short = before.clone().allocate(&name(who), &fewer).unwrap().is_none();
                assert!(is_short || self.has_bound || !self.whole_fits(&before, who, args));
            }
            Ok(Some(allocated)) => {
                assert!(!is_refused);
                let known = self.requests.get_mut(&who).unwrap();
                (known.is_running, known.is_delayed) = (true, args.delay_caching);
                known.computed = computed;
                self.verify_prediction(&before, who, args);
                self.verify_tables(&before, who, args, &allocated.ids);
                let granted = self.ledger.num_granted_tokens(&name(who)).unwrap();
                assert_eq!(granted, computed + args.num_new_tokens);
                assert!(self.whole_fits(&before, who, args));
                if args.delay_caching {
                    assert!(allocated.ids.iter().all(|&id| self.ledger.pool().key(id).is_none()));
                } else {
                    self.verify_published(who, granted);
                }
            }
        }
    }

    /// Where the pool could not serve, blocks that nobody reads any more are free. All else is as it
    /// was.
    fn verify_refusal(&self, before: &BlockLedger, who: usize, args: &AllocateArgs) {
        let processed = self.requests[&who].computed.saturating_sub(args.num_in_flight_tokens);
        let (mut expected, _) = self.seen(before);
        let mut pool = before.pool().clone();
        for (table, group) in expected.get_mut(&who).unwrap().1.iter_mut().zip(self.groups()) {
            let end = num_skipped(group, processed).min(table.len());
            let skipped: Vec<BlockId> = table.drain(..end).rev().collect();
            pool.free(&skipped).unwrap();
            table.splice(..0, vec![BlockId::NULL; end]);
        }
        assert_eq!(self.seen(&self.ledger), (expected, raw(pool.free_order())));
    }

    /// What is predicted is what is allocated: the most blocks that could be reserved are those left.
    fn verify_prediction(&self, before: &BlockLedger, who: usize, args: &AllocateArgs) {
        let num_left = self.ledger.pool().num_free();
        let fits = |reserve| {
            let args = AllocateArgs { reserve, ..*args };
            before.clone().allocate(&name(who), &args).unwrap().is_some()
        };
        assert!(fits(num_left) && !fits(num_left + 1));
    }

    /// Whether all the tokens that must fit would be granted at once. With a bound on what is in
    /// flight fewer blocks may do.
    fn whole_fits(&self, before: &BlockLedger, who: usize, args: &AllocateArgs) -> bool {
        let missing =
            args.must_fit_tokens.unwrap_or(0).saturating_sub(self.requests[&who].computed);
        let args = AllocateArgs {
            num_new_tokens: missing,
            num_lookahead_tokens: 0,
            reserve: 0,
            must_fit_tokens: None,
            ..*args
        };
        self.has_bound
            || missing == 0
            || before.clone().allocate(&name(who), &args).unwrap().is_some()
    }

    fn verify_tables(
        &self,
        before: &BlockLedger,
        who: usize,
        args: &AllocateArgs,
        allocated: &[BlockId],
    ) {
        let computed = self.requests[&who].computed;
        let num_slots = computed + args.num_new_tokens + args.num_lookahead_tokens;
        let is_first = before.block_table(&name(who), 0).unwrap().is_empty();
        let processed = computed.saturating_sub(args.num_in_flight_tokens);
        let mut expected_allocated = Vec::new();
        for (index, group) in self.groups().into_iter().enumerate() {
            let table = self.ledger.block_table(&name(who), index).unwrap();
            let held = before.block_table(&name(who), index).unwrap();
            assert_eq!(table.len(), held.len().max(num_slots.div_ceil(group.block_size)));
            let (skipped, mut held) = if is_first {
                let hits = args.hit.map_or(Vec::new(), |hit| hit.blocks[index].clone());
                (num_skipped(group, computed), hits)
            } else {
                let skipped = num_skipped(group, processed).min(held.len());
                (skipped.max(num_null(held)), held.to_vec())
            };
            held.resize(held.len().max(skipped), BlockId::NULL);
            held[..skipped].fill(BlockId::NULL);
            assert_eq!(table[..held.len()], held, "skipped blocks are null, others stay");
            expected_allocated.extend_from_slice(&table[held.len()..]);
        }
        assert_eq!(allocated, expected_allocated);
        // No block that was allocated stands anywhere else: as a hit, or as another request's.
        let all = self.requests.keys().flat_map(|&who| self.tables(&self.ledger, who)).flatten();
        let all: Vec<BlockId> = all.collect();
        for id in allocated {
            assert_eq!(all.iter().filter(|&other| other == id).count(), 1);
        }
    }

    /// Nothing but the granted tokens changes, and what they read is there.
    fn rewind(&mut self, who: usize, back: usize) {
        let mut expected = self.seen(&self.ledger);
        let (granted, tables, _) = expected.0.get_mut(&who).unwrap();
        let num_tokens = granted.saturating_sub(back);
        if self.ledger.rewind(&name(who), num_tokens).is_ok() {
            *granted = num_tokens;
            for (table, group) in tables.iter().zip(self.groups()) {
                assert!(num_null(table) <= num_unread(group, num_tokens));
            }
        }
        assert_eq!(self.seen(&self.ledger), expected);
    }

    /// What a request has published is found again once it is freed and added anew.
    fn verify_published(&self, who: usize, num_tokens: usize) {
        let known = &self.requests[&who];
        let num_tokens = num_tokens.min(known.names.len() * self.ledger.model().hash_block_size());
        let num_published = num_tokens - num_tokens % self.unit();
        // Below what is computed a window may have gone on.
        if self.has_evicted || num_published < known.computed {
            return;
        }
        let mut ledger = self.ledger.clone();
        ledger.free(&name(who)).unwrap();
        ledger.add(&name(who), &hashes(&known.names), Context::default()).unwrap();
        assert!(ledger.lookup(&name(who), usize::MAX).unwrap().num_tokens >= num_published);
    }

    /// Freeing loses nothing: added again at once, a request finds what it would have found.
    fn free(&mut self, who: usize) {
        let Some(known) = self.requests.remove(&who) else {
            assert!(self.ledger.free(&name(who)).is_err());
            return;
        };
        let before = self.ledger.lookup(&name(who), usize::MAX).unwrap();
        self.ledger.free(&name(who)).unwrap();
        let mut again = self.ledger.clone();
        again.add(&name(who), &hashes(&known.names), Context::default()).unwrap();
        let after = again.lookup(&name(who), usize::MAX).unwrap();
        assert_eq!((after.num_tokens, after.blocks), (before.num_tokens, before.blocks));
    }

    /// A step of all is as if each were asked in turn, up to the first that does not fit.
    fn step(&mut self, args: &AllocateArgs) {
        let names: Vec<String> = self.requests.keys().map(|&who| name(who)).collect();
        let wants = names.iter().map(|name| (name.as_str(), args.num_new_tokens));
        let mut in_turn = self.ledger.clone();
        let (lookahead, in_flight) = (args.num_lookahead_tokens, args.num_in_flight_tokens);
        let Ok(allocated) = self.ledger.allocate_step(wants, lookahead, in_flight) else {
            let is_delayed = self.requests.values().any(|known| known.is_delayed);
            assert!(is_delayed || args.num_new_tokens == 0);
            assert_eq!(self.seen(&self.ledger), self.seen(&in_turn));
            return;
        };
        let args = AllocateArgs { reserve: 0, ..*args };
        let mut num_granted = 0;
        for (name, known) in names.iter().zip(self.requests.values_mut()) {
            known.computed = in_turn.num_granted_tokens(name).unwrap();
            if in_turn.allocate(name, &args).unwrap().is_none() {
                break;
            }
            known.is_running = true;
            num_granted += 1;
        }
        assert_eq!(allocated.num_granted, num_granted);
        assert_eq!(self.seen(&self.ledger), self.seen(&in_turn));
    }

    /// References are counted here once more: from the tables alone.
    fn check(&self) {
        self.ledger.check().unwrap();
        let mut num_refs = vec![0; self.ledger.pool().num_blocks()];
        for id in self.requests.keys().flat_map(|&who| self.tables(&self.ledger, who)).flatten() {
            num_refs[id.index()] += u32::from(!id.is_null());
        }
        for (id, num_refs) in (0..).map(BlockId).zip(num_refs) {
            assert_eq!(self.ledger.pool().num_refs(id), num_refs);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(num_cases() / 2))]

    #[test]
    fn allocations_over_random_models_are_sound(
        groups in vec(group(), 1..4),
        num_hit_blocks in 1..9_usize,
        max_in_flight in select(vec![None, Some(8)]),
        ops in vec(op(), 1..40),
    ) {
        let mut world = World::new(groups, num_hit_blocks, max_in_flight);
        for op in &ops {
            world.apply(op);
            world.check();
        }
    }
}

// ---- A long run ----

const NUM_REQUESTS: usize = 1000;
const MAX_RUNNING: usize = 24;
const NUM_DRAFTS: usize = 3;
const HASH_TOKENS: usize = 8;

/// What must have happened for the run to show anything.
#[derive(Debug, Default)]
struct Counts {
    hit: usize,
    loaded: usize,
    failed: usize,
    rejected: usize,
    preempted: usize,
    refused: usize,
    skipped: usize,
}

struct Scheduled {
    names: Vec<u16>,
    num_prompt: usize,
    num_total: usize,
    /// Where a load that is under way begins.
    loading_from: Option<usize>,
}

/// A scheduler over three groups, and the memory it stands for: per block, what was last written.
struct Soak {
    ledger: BlockLedger,
    memory: Vec<Option<(usize, u16)>>,
    requests: Vec<Scheduled>,
    waiting: VecDeque<usize>,
    running: Vec<usize>,
    most_running: usize,
    counts: Counts,
    seed: u64,
}

impl Soak {
    fn new(seed: u64) -> Self {
        let groups = vec![full(16), window(64, 16), window(20, 8)];
        let ledger = BlockLedger::new(240, groups, Some(32 + NUM_DRAFTS), false).unwrap();
        let memory = vec![None; ledger.pool().num_blocks()];
        let mut soak = Self {
            ledger,
            memory,
            requests: Vec::new(),
            waiting: (0..NUM_REQUESTS).collect(),
            running: Vec::new(),
            most_running: 0,
            counts: Counts::default(),
            seed,
        };
        let mut num_names = 1000;
        for who in 0..NUM_REQUESTS {
            let num_prompt = 8 + soak.below(200);
            let num_total = num_prompt + 1 + soak.below(40);
            // One of ten texts, and from some point on a text of its own.
            let (text, num_shared) = (soak.below(10), soak.below(30));
            let mut name = |at: usize| {
                num_names += usize::from(at >= num_shared);
                u16::try_from(if at < num_shared { 100 * text + at } else { num_names }).unwrap()
            };
            let names = (0..num_total / HASH_TOKENS).map(&mut name).collect();
            soak.requests.push(Scheduled { names, num_prompt, num_total, loading_from: None });
            soak.add(who);
        }
        soak
    }

    /// A generator of its own, so that the run is the same everywhere (Knuth's MMIX).
    fn below(&mut self, bound: usize) -> usize {
        let (factor, summand) = (6_364_136_223_846_793_005, 1_442_695_040_888_963_407);
        self.seed = self.seed.wrapping_mul(factor).wrapping_add(summand);
        usize::try_from(self.seed >> 33).unwrap() % bound
    }

    fn run(&mut self) {
        while !(self.waiting.is_empty() && self.running.is_empty()) {
            while self.running.len() < MAX_RUNNING
                && let Some(&who) = self.waiting.front()
                && self.admit(who)
            {
                self.waiting.pop_front();
                self.running.push(who);
            }
            self.most_running = self.most_running.max(self.running.len());
            for who in self.running.clone() {
                // One before it may have preempted it.
                if self.running.contains(&who) {
                    self.advance(who);
                }
            }
        }
    }

    fn add(&mut self, who: usize) {
        let request = &self.requests[who];
        let known = &request.names[..request.num_prompt / HASH_TOKENS];
        self.ledger.add(&name(who), &hashes(known), Context::default()).unwrap();
        self.ledger.check().unwrap();
    }

    fn admit(&mut self, who: usize) -> bool {
        let num_prompt = self.requests[who].num_prompt;
        let hit = self.ledger.lookup(&name(who), num_prompt - 1).unwrap();
        let num_hit = hit.num_tokens;
        let has_tier = self.below(2) == 0;
        let num_loads = self.below((num_prompt - 1 - num_hit) / 16 + 1) * usize::from(has_tier);
        let num_new = if num_loads > 0 { 0 } else { (num_prompt - num_hit).min(32) };
        let args = AllocateArgs {
            num_new_tokens: num_new,
            hit: Some(&hit),
            num_external_tokens: 16 * num_loads,
            delay_caching: num_loads > 0,
            reserve: 4,
            must_fit_tokens: Some(num_prompt),
            ..AllocateArgs::default()
        };
        let is_granted = self.allocate(who, &args);
        if is_granted {
            self.counts.hit += num_hit;
            if num_loads > 0 {
                self.requests[who].loading_from = Some(num_hit);
            } else {
                self.read(who, num_hit);
                self.write(who, num_hit, num_hit + num_new);
            }
        }
        is_granted
    }

    fn advance(&mut self, who: usize) {
        let granted = self.ledger.num_granted_tokens(&name(who)).unwrap();
        if let Some(start) = self.requests[who].loading_from {
            match self.below(8) {
                0 => {
                    self.counts.failed += 1;
                    self.requeue(who);
                }
                1..4 => {
                    self.counts.loaded += 1;
                    self.requests[who].loading_from = None;
                    self.write(who, start, granted);
                    self.ledger.cache(&name(who), granted).unwrap();
                    self.ledger.check().unwrap();
                }
                _ => {}
            }
            return;
        }
        let Scheduled { num_prompt, num_total, .. } = self.requests[who];
        if granted >= num_total {
            self.stop(who);
            return;
        }
        let is_prompt = granted < num_prompt;
        let num_new = if is_prompt { (num_prompt - granted).min(32) } else { 1 + NUM_DRAFTS };
        let args = AllocateArgs {
            num_new_tokens: num_new,
            num_lookahead_tokens: NUM_DRAFTS,
            ..AllocateArgs::default()
        };
        while !self.allocate(who, &args) {
            // The last to come that waits for no load; `who` itself is one.
            let mut others = self.running.iter().rev();
            let victim = *others.find(|&&who| self.requests[who].loading_from.is_none()).unwrap();
            self.counts.preempted += 1;
            self.requeue(victim);
            if victim == who {
                return;
            }
        }
        self.read(who, granted);
        let num_rejected = if is_prompt { 0 } else { self.below(NUM_DRAFTS + 1) };
        let accepted = granted + num_new - num_rejected;
        self.counts.rejected += num_rejected;
        self.ledger.rewind(&name(who), accepted).unwrap();
        self.ledger.check().unwrap();
        self.write(who, granted, accepted);
        if !is_prompt {
            let names = &self.requests[who].names;
            let filled = granted / HASH_TOKENS..(accepted / HASH_TOKENS).min(names.len());
            let more = hashes(names.get(filled).unwrap_or_default());
            self.ledger.extend(&name(who), &more, Context::default()).unwrap();
            self.ledger.check().unwrap();
        }
    }

    fn allocate(&mut self, who: usize, args: &AllocateArgs) -> bool {
        let is_granted = self.ledger.allocate(&name(who), args).unwrap().is_some();
        self.ledger.check().unwrap();
        self.counts.refused += usize::from(!is_granted);
        is_granted
    }

    fn stop(&mut self, who: usize) {
        self.running.retain(|&other| other != who);
        self.requests[who].loading_from = None;
        self.ledger.free(&name(who)).unwrap();
        self.ledger.check().unwrap();
    }

    /// To be rebuilt from what is still cached.
    fn requeue(&mut self, who: usize) {
        self.stop(who);
        self.add(who);
        self.waiting.push_front(who);
    }

    /// The blocks of a request that end behind `start` tokens, up to `end`, as far as they are in a
    /// table and have a name: the block, and what is in it.
    fn blocks(&self, who: usize, start: usize, end: usize) -> Vec<(BlockId, (usize, u16))> {
        let mut blocks = Vec::new();
        for (id, group) in self.ledger.model().groups().iter().enumerate() {
            let table = self.ledger.block_table(&name(who), id).unwrap();
            let own = self.requests[who].names.chunks_exact(group.block_size / HASH_TOKENS);
            let range = start / group.block_size..end / group.block_size;
            let named = table.iter().zip(own).take(range.end).skip(range.start);
            let kept = named.filter(|(block, _)| !block.is_null());
            blocks.extend(kept.map(|(&block, own)| (block, (id, own[own.len() - 1]))));
        }
        blocks
    }

    fn write(&mut self, who: usize, start: usize, end: usize) {
        for (block, content) in self.blocks(who, start, end) {
            self.memory[block.index()] = Some(content);
        }
    }

    /// The next token after these reads what was written, and all that it reads is still there.
    fn read(&mut self, who: usize, num_tokens: usize) {
        for (block, content) in self.blocks(who, 0, num_tokens) {
            assert_eq!(self.memory[block.index()], Some(content));
        }
        for (id, group) in self.ledger.model().groups().iter().enumerate() {
            let table = self.ledger.block_table(&name(who), id).unwrap();
            assert_eq!(num_null(table), num_skipped(*group, num_tokens));
            self.counts.skipped += num_null(table);
        }
    }
}

#[test]
fn a_thousand_overlapping_requests_break_nothing() {
    let mut soak = Soak::new(1);
    soak.run();
    assert_eq!(soak.ledger.num_requests(), 0);
    assert_eq!(soak.ledger.pool().num_free(), soak.ledger.pool().num_usable());
    let Counts { hit, loaded, failed, rejected, preempted, refused, skipped } = soak.counts;
    assert_eq!(soak.most_running, MAX_RUNNING);
    // So many of each, or the run shows little.
    for count in [hit, loaded, failed, rejected, preempted, refused, skipped] {
        assert!(count > 50, "{:?}", soak.counts);
    }
}
