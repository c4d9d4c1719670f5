//! Lookups find only computed blocks. A memory beside the ledger holds what each block was computed
//! for. Steps are computed late, dropped, or lost with their request.
//!
//! Each property has a control: the same runs without one report must break it.

use std::collections::BTreeMap;

use kvstow_core::group::{Attention, Group};
use kvstow_core::ids::BlockId;
use kvstow_core::ledger::{AllocateArgs, BlockLedger, Context, NewIds, Publish};

use super::{hashes, num_cases};

const NUM_BLOCKS: usize = 40;
const NUM_OPS: usize = 120;
const NUM_REQUESTS: usize = 5;

fn full(block_size: usize) -> Group {
    Group::new(Attention::Full, block_size).unwrap()
}

fn window(window: usize, block_size: usize) -> Group {
    Group::new(Attention::SlidingWindow { window }, block_size).unwrap()
}

fn models() -> Vec<Vec<Group>> {
    let state = Group::new(Attention::StateSpace, 4).unwrap();
    vec![
        vec![full(4)],
        vec![full(4), window(9, 4)],
        vec![window(6, 4), state],
        vec![full(8), window(6, 4)],
    ]
}

#[derive(Clone, Copy)]
struct Rules {
    publish: Publish,
    /// Whether `free` gets the number of computed tokens.
    is_reported: bool,
}

struct Running {
    computed: usize,
    granted: usize,
    is_loading: bool,
}

/// What a block holds: the group and the name of its last hash.
type Content = (usize, u16);

struct World {
    ledger: BlockLedger,
    rules: Rules,
    memory: Vec<Option<Content>>,
    /// The names of each request's hashes, and its progress once it has blocks.
    requests: BTreeMap<usize, (Vec<u16>, Option<Running>)>,
    /// Requests of the step that is granted and not computed yet, in order.
    step: Vec<usize>,
    seed: u64,
    num_lookups: usize,
    /// Blocks that a lookup found although no request will compute them.
    num_lost: usize,
    /// Blocks that a lookup found before they were computed.
    num_early: usize,
    /// Steps that read a block that was never computed.
    num_garbage: usize,
}

fn name(who: usize) -> String {
    format!("request-{who}")
}

impl World {
    fn new(seed: u64, rules: Rules) -> Self {
        let groups = models().swap_remove(usize::try_from(seed % 4).unwrap());
        let ledger = BlockLedger::new(NUM_BLOCKS, groups, None, false).unwrap();
        Self {
            ledger: ledger.with_publish(rules.publish),
            rules,
            memory: vec![None; NUM_BLOCKS],
            requests: BTreeMap::new(),
            step: Vec::new(),
            seed,
            num_lookups: 0,
            num_lost: 0,
            num_early: 0,
            num_garbage: 0,
        }
    }

    /// Knuth's MMIX generator.
    fn below(&mut self, bound: usize) -> usize {
        let (factor, summand) = (6_364_136_223_846_793_005, 1_442_695_040_888_963_407);
        self.seed = self.seed.wrapping_mul(factor).wrapping_add(summand);
        usize::try_from(self.seed >> 33).unwrap() % bound
    }

    fn run(mut self) -> Self {
        for _ in 0..NUM_OPS {
            let who = self.below(NUM_REQUESTS);
            match self.below(10) {
                0..4 => self.advance(who),
                4..7 => self.compute(),
                7 => self.abort(who),
                8 => self.drop_step(),
                _ => self.sleep(),
            }
            self.ledger.check().unwrap();
            self.look();
        }
        self
    }

    /// Admits a request, or gives a running one its next tokens.
    fn advance(&mut self, who: usize) {
        if !self.requests.contains_key(&who) {
            // One of two texts, shared up to a point.
            let (text, num_shared, len) = (self.below(2), self.below(9), 2 + self.below(10));
            let own = 100 * (who + 2);
            let at = |at: usize| if at < num_shared { 50 * text + at } else { own + at };
            let names: Vec<u16> = (0..len).map(|i| u16::try_from(at(i)).unwrap()).collect();
            self.ledger.add(&name(who), &hashes(&names), Context::default()).unwrap();
            self.requests.insert(who, (names, None));
        }
        let unit = self.ledger.model().hit_block_size();
        let num_new_tokens = 1 + self.below(12);
        let (names, running) = &self.requests[&who];
        let known = names.len() * self.ledger.model().hash_block_size();
        if let Some(running) = running {
            if running.is_loading || running.granted + num_new_tokens > known {
                return;
            }
            let num_in_flight_tokens = running.granted - running.computed;
            let args =
                AllocateArgs { num_new_tokens, num_in_flight_tokens, ..AllocateArgs::default() };
            self.allocate(who, &args);
            return;
        }
        let hit = self.ledger.lookup(&name(who), known - 1).unwrap();
        let num_left = (known - 1 - hit.num_tokens) / unit;
        let is_loading = self.below(4) == 0 && num_left > 0;
        let num_external_tokens = if is_loading { unit } else { 0 };
        let num_new_tokens =
            if is_loading { 0 } else { num_new_tokens.min(known - hit.num_tokens) };
        let args = AllocateArgs {
            num_new_tokens,
            hit: Some(&hit),
            num_external_tokens,
            delay_caching: is_loading,
            ..AllocateArgs::default()
        };
        self.allocate(who, &args);
    }

    fn allocate(&mut self, who: usize, args: &AllocateArgs) {
        let Some(allocated) = self.ledger.allocate(&name(who), args).unwrap() else { return };
        for id in allocated.ids {
            self.memory[id.index()] = None;
        }
        let granted = self.ledger.num_granted_tokens(&name(who)).unwrap();
        let computed = args.hit.map_or(0, |hit| hit.num_tokens);
        let first = Running { computed, granted, is_loading: args.delay_caching };
        let running = &mut self.requests.get_mut(&who).unwrap().1;
        running.get_or_insert(first).granted = granted;
        if !self.step.contains(&who) {
            self.step.push(who);
        }
    }

    /// Computes the granted step in order, and reports it.
    fn compute(&mut self) {
        let mut reports = Vec::new();
        for who in std::mem::take(&mut self.step) {
            let Running { computed, granted, is_loading } = *self.running(who);
            let is_garbage = !is_loading
                && self.blocks(who, 0, computed).iter().any(|&(id, content)| {
                    !id.is_null() && self.memory[id.index()] != Some(content)
                });
            self.num_garbage += usize::from(is_garbage);
            for (id, content) in self.blocks(who, computed, granted) {
                if !id.is_null() && !is_garbage {
                    self.memory[id.index()] = Some(content);
                }
            }
            *self.running(who) = Running { computed: granted, granted, is_loading: false };
            if is_loading || self.rules.publish == Publish::Computed {
                reports.push((name(who), granted));
            }
        }
        let reports = reports.iter().map(|(name, computed)| (name.as_str(), *computed));
        self.ledger.cache_step(reports).unwrap();
    }

    /// Drops the granted step. Rewinds its grants where that is still possible, and aborts the
    /// other requests.
    fn drop_step(&mut self) {
        while !self.step.is_empty() {
            let who = self.step.remove(0);
            let computed = self.running(who).computed;
            if self.running(who).is_loading || self.ledger.rewind(&name(who), computed).is_err() {
                self.abort(who);
            } else {
                self.running(who).granted = computed;
            }
        }
    }

    /// Frees a request, also in the middle of a step, and all requests that hit blocks which it did
    /// not compute.
    fn abort(&mut self, who: usize) {
        let Some((_, running)) = self.requests.remove(&who) else { return };
        self.step.retain(|&other| other != who);
        let computed = running.map_or(0, |running| running.computed);
        if !self.rules.is_reported {
            self.ledger.free(&name(who), None).unwrap();
            return;
        }
        for other in self.ledger.free(&name(who), Some(computed)).unwrap() {
            assert_eq!(
                self.rules.publish,
                Publish::Granted,
                "{other} hit a block that was not computed"
            );
            self.abort(other.trim_start_matches("request-").parse().unwrap());
        }
    }

    /// Takes a snapshot and restores it with new block ids.
    fn sleep(&mut self) {
        let groups = self.ledger.model().groups().to_vec();
        let anew = BlockLedger::new(NUM_BLOCKS, groups, None, false).unwrap();
        let anew = anew.with_publish(self.rules.publish);
        let restored = anew.restore(&self.ledger.snapshot(true), NewIds::Packed).unwrap();
        let mut memory = vec![None; NUM_BLOCKS];
        for &(old, new) in &restored.moves {
            memory[new.index()] = self.memory[old.index()];
        }
        (self.ledger, self.memory) = (restored.ledger, memory);
    }

    /// Looks up the hashes of all requests, and counts blocks that hold other content.
    fn look(&mut self) {
        for (who, (names, _)) in &self.requests {
            let hit = self.ledger.lookup(&name(*who), usize::MAX).unwrap();
            let per_block = self.per_block();
            for (group, found) in hit.blocks.iter().enumerate() {
                let own = names.chunks_exact(per_block[group]).map(|own| own[own.len() - 1]);
                for (&id, own) in found.iter().zip(own).filter(|(id, _)| !id.is_null()) {
                    self.num_lookups += 1;
                    if self.memory[id.index()] != Some((group, own)) {
                        self.num_early += 1;
                        self.num_lost += usize::from(!self.is_due(id));
                    }
                }
            }
        }
    }

    /// Whether a running request will still compute this block.
    fn is_due(&self, id: BlockId) -> bool {
        self.requests.iter().any(|(&who, (_, running))| {
            running.as_ref().is_some_and(|running| {
                let due = self.blocks(who, running.computed, running.granted);
                due.iter().any(|&(other, _)| other == id)
            })
        })
    }

    fn running(&mut self, who: usize) -> &mut Running {
        self.requests.get_mut(&who).unwrap().1.as_mut().unwrap()
    }

    fn per_block(&self) -> Vec<usize> {
        let model = self.ledger.model();
        model.groups().iter().map(|group| group.block_size / model.hash_block_size()).collect()
    }

    /// The blocks that end after `start` tokens and not after `end`, with their content.
    fn blocks(&self, who: usize, start: usize, end: usize) -> Vec<(BlockId, Content)> {
        let (groups, per_block) = (self.ledger.model().groups(), self.per_block());
        let mut blocks = Vec::new();
        for (group, per_block) in per_block.into_iter().enumerate() {
            let table = self.ledger.block_table(&name(who), group).unwrap();
            let own = self.requests[&who].0.chunks_exact(per_block);
            let size = groups[group].block_size;
            let named = table.iter().zip(own).take(end / size).skip(start / size);
            blocks.extend(named.map(|(&id, own)| (id, (group, own[per_block - 1]))));
        }
        blocks
    }
}

/// The sums over many runs: blocks found, lost, early, and garbage steps.
fn sums(rules: Rules) -> [usize; 4] {
    let mut sums = [0; 4];
    for seed in 0..u64::from(num_cases() / 10) {
        let world = World::new(seed, rules).run();
        let found = [world.num_lookups, world.num_lost, world.num_early, world.num_garbage];
        for (sum, found) in sums.iter_mut().zip(found) {
            *sum += found;
        }
    }
    sums
}

#[test]
fn no_lookup_finds_a_block_that_was_never_computed() {
    let rules = Rules { publish: Publish::Computed, is_reported: true };
    let [looked, lost, early, garbage] = sums(rules);
    assert!(looked > 10_000);
    assert_eq!([lost, early, garbage], [0; 3]);
    // With vLLM's order, the requests find blocks before they are computed.
    let [_, _, early, _] = sums(Rules { publish: Publish::Granted, ..rules });
    assert!(early > 100, "no run looked between grant and compute");
}

#[test]
fn freeing_with_the_computed_tokens_leaves_no_key_of_a_lost_block() {
    let rules = Rules { publish: Publish::Granted, is_reported: true };
    let [looked, lost, _, garbage] = sums(rules);
    assert!(looked > 10_000);
    assert_eq!([lost, garbage], [0; 2]);
    let [_, lost, _, garbage] = sums(Rules { is_reported: false, ..rules });
    assert!(lost > 100 && garbage > 10, "no run lost a block that another request hit");
}
