//! A thousand overlapping requests over three groups.

use std::collections::VecDeque;

use kvstow_core::ids::BlockId;
use kvstow_core::ledger::{AllocateArgs, BlockLedger, Context};

use crate::hashes;

use super::{full, name, num_null, num_skipped, window};

const NUM_REQUESTS: usize = 1000;
const MAX_RUNNING: usize = 24;
const NUM_DRAFTS: usize = 3;
const HASH_TOKENS: usize = 8;

/// How often each event happened in the run.
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
    /// The first token of a load in flight.
    loading_from: Option<usize>,
}

/// A scheduler over three groups, and its memory: the last write to each block.
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
            // A prefix of one of ten texts, and then a text of its own.
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
        self.ledger.free(&name(who), None).unwrap();
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
    // Each event must be frequent, or the run tests little.
    for count in [hit, loaded, failed, rejected, preempted, refused, skipped] {
        assert!(count > 50, "{:?}", soak.counts);
    }
}
