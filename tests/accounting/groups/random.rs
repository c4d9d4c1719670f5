//! Properties of every allocation over random models and random requests.

use std::collections::BTreeMap;
use std::ops::Range;

use kvstow_core::group::Group;
use kvstow_core::ids::{BlockId, GroupId};
use kvstow_core::ledger::{AllocateArgs, BlockLedger, Context, PrefixHit};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;

use crate::{hashes, num_cases, raw};

use super::ops::{More, Op, group, op};
use super::{name, needed, num_null, num_skipped, num_unread};

#[derive(Clone, Debug, Default)]
struct Known {
    chain: usize,
    names: Vec<u16>,
    /// The tokens that were computed at its last allocation, refused or not.
    computed: usize,
    is_running: bool,
    is_delayed: bool,
}

/// A request's granted tokens, tables and hit.
type Seen = (usize, Vec<Vec<BlockId>>, PrefixHit);

struct World {
    ledger: BlockLedger,
    requests: BTreeMap<usize, Known>,
    /// Whether the ledger knows the most tokens in flight.
    has_bound: bool,
    /// Whether a key was ever evicted.
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
    /// hit blocks. As with chained digests, each name belongs to one position.
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

    /// Verifies that a hit is the longest that all groups can serve, with exactly the blocks that it
    /// needs.
    fn lookup(&self, who: usize) -> PrefixHit {
        let names = &self.requests[&who].names;
        let hash_block_size = self.ledger.model().hash_block_size();
        // One token is left to compute.
        let num_named = names.len() * hash_block_size;
        let max_tokens = num_named.saturating_sub(1);
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
                    if (index + 1) * group.block_size > num_named {
                        return None;
                    }
                    blocks.push(get(id, group.block_size, index)?);
                }
                blocks.truncate(num_tokens / group.block_size);
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

    /// Verifies that the prediction is exact: the largest reserve that fits is what is left free.
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
        // No allocated block is in another place: as a hit, or in another request's table.
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
        // A group may drop the last block that it finds.
        let dropped = |group: &Group| usize::from(group.drops_last_block()) * group.block_size;
        let num_dropped = self.groups().iter().map(dropped).max().unwrap();
        let num_tokens = num_tokens.saturating_sub(num_dropped);
        let num_published = num_tokens - num_tokens % self.unit();
        // Below what is computed a window may have gone on.
        if self.has_evicted || num_published < known.computed {
            return;
        }
        let mut ledger = self.ledger.clone();
        ledger.free(&name(who), None).unwrap();
        ledger.add(&name(who), &hashes(&known.names), Context::default()).unwrap();
        assert!(ledger.lookup(&name(who), usize::MAX).unwrap().num_tokens >= num_published);
    }

    /// Freeing loses nothing: added again at once, a request finds what it would have found.
    fn free(&mut self, who: usize) {
        let Some(known) = self.requests.remove(&who) else {
            assert!(self.ledger.free(&name(who), None).is_err());
            return;
        };
        let before = self.ledger.lookup(&name(who), usize::MAX).unwrap();
        self.ledger.free(&name(who), None).unwrap();
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
