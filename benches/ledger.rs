//! How long does the ledger take for a request, and the offload scheduler for a finished step?
//!
//! The request is a prompt of 131,072 tokens (8,192 blocks). The device is full of cached blocks, so
//! each allocation evicts. The steps have 256 decoding requests, of which 16 enter a new block. The
//! scheduler also runs a step with nothing to store, which must cost no more than a check of each
//! request.
#![expect(clippy::unwrap_used, reason = "a bench that fails has nothing to measure")]

mod common;

use std::hint::black_box;

use criterion::{Criterion, Throughput};
use kvstow_core::group::{Attention, Group};
use kvstow_core::ids::BlockId;
use kvstow_core::key::Hashes;
use kvstow_core::ledger::{AllocateArgs, BlockLedger, Context, PrefixHit};
use kvstow_core::offload::{Job, OffloadConfig, OffloadScheduler, Progress};

use common::{BLOCK_SIZE, NUM_DEVICE_BLOCKS, NUM_PROMPT_BLOCKS, prompt, time};

const NUM_PROMPT_TOKENS: usize = NUM_PROMPT_BLOCKS * BLOCK_SIZE;
const NUM_DECODING: usize = 256;

fn groups() -> Vec<Group> {
    vec![Group::new(Attention::Full, BLOCK_SIZE).unwrap()]
}

/// One prompt more than fits the device or the host. So each prompt is evicted before its next turn.
fn prompts() -> Vec<Hashes> {
    (0..5).map(|which| prompt(which, NUM_PROMPT_BLOCKS)).collect()
}

fn add(ledger: &mut BlockLedger, hashes: &Hashes) {
    ledger.add("request", hashes, Context::default()).unwrap();
}

/// Allocates and publishes a whole prompt.
fn allocate(ledger: &mut BlockLedger) {
    let args = AllocateArgs { num_new_tokens: NUM_PROMPT_TOKENS, ..AllocateArgs::default() };
    black_box(ledger.allocate("request", &args).unwrap().unwrap());
}

fn look_up(ledger: &BlockLedger) -> PrefixHit {
    let hit = ledger.lookup("request", NUM_PROMPT_TOKENS).unwrap();
    assert_eq!(hit.num_tokens, NUM_PROMPT_TOKENS);
    hit
}

fn free(ledger: &mut BlockLedger) {
    ledger.free("request", None).unwrap();
}

fn bench_request(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("ledger");
    group.throughput(Throughput::Elements(NUM_PROMPT_BLOCKS as u64));
    let prompts = prompts();
    let mut turns = prompts.iter().cycle();
    let ledger = &mut BlockLedger::new(NUM_DEVICE_BLOCKS + 1, groups(), None, false).unwrap();
    for hashes in &prompts {
        add(ledger, hashes);
        allocate(ledger);
        free(ledger);
    }
    let cached = &prompts[4];

    add(ledger, cached);
    group.bench_function("add", |bencher| time(bencher, ledger, free, |it| add(it, cached)));
    group.bench_function("lookup, all hit", |bencher| {
        bencher.iter(|| look_up(black_box(ledger)));
    });
    group.bench_function("allocate, all hit", |bencher| {
        let admit = |(ledger, hit): &mut (&mut BlockLedger, PrefixHit)| {
            free(ledger);
            add(ledger, cached);
            *hit = look_up(ledger);
        };
        let take = |(ledger, hit): &mut (&mut BlockLedger, PrefixHit)| {
            let args =
                AllocateArgs { num_new_tokens: 1, hit: Some(hit), ..AllocateArgs::default() };
            black_box(ledger.allocate("request", &args).unwrap().unwrap());
        };
        let hit = look_up(ledger);
        time(bencher, &mut (&mut *ledger, hit), admit, take);
    });
    group.bench_function("allocate and publish, evicting", |bencher| {
        let next = |ledger: &mut BlockLedger| {
            free(ledger);
            add(ledger, turns.next().unwrap());
        };
        time(bencher, ledger, next, allocate);
    });
    group.bench_function("free", |bencher| {
        let mut admit = |ledger: &mut BlockLedger| {
            add(ledger, turns.next().unwrap());
            allocate(ledger);
        };
        free(ledger);
        time(bencher, ledger, &mut admit, free);
        admit(ledger);
    });
    group.finish();
}

fn bench_step(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("ledger");
    group.throughput(Throughput::Elements(NUM_DECODING as u64));
    let ids: Vec<_> = (0..NUM_DECODING).map(|id| format!("request-{id}")).collect();
    let admit = |ledger: &mut BlockLedger| {
        for (at, id) in ids.iter().enumerate() {
            let _ = ledger.free(id, None); // unknown the first time
            // Lengths differ, so that in each step every sixteenth request enters a new block.
            let num_new_tokens = 256 + at % BLOCK_SIZE;
            let args = AllocateArgs { num_new_tokens, ..AllocateArgs::default() };
            ledger.add(id, &Hashes::default(), Context::default()).unwrap();
            ledger.allocate(id, &args).unwrap().unwrap();
        }
    };
    let step = |ledger: &mut BlockLedger| {
        let wants = ids.iter().map(|id| (id.as_str(), 1));
        let allocated = ledger.allocate_step(wants, 0, 0).unwrap();
        assert_eq!(allocated.num_granted, NUM_DECODING);
        black_box(allocated);
    };
    let ledger = &mut BlockLedger::new(NUM_DEVICE_BLOCKS + 1, groups(), None, false).unwrap();
    admit(ledger);
    let mut num_steps = 0;
    group.bench_function("allocate_step, 256 decoding", |bencher| {
        let start_over_in_time = |ledger: &mut BlockLedger| {
            num_steps += 1;
            if num_steps % 1_024 == 0 {
                admit(ledger); // before the device is full
            }
        };
        time(bencher, ledger, start_over_in_time, step);
    });
    group.finish();
}

/// A scheduler, and the block table of the current request.
struct Host {
    scheduler: OffloadScheduler,
    /// Per group.
    block_ids: Vec<Vec<BlockId>>,
    job: Option<Job>,
}

impl Host {
    fn add(&mut self, hashes: &Hashes) {
        self.scheduler.add("request", hashes).unwrap();
    }

    fn store(&mut self) {
        let progress = Progress {
            request_id: "request",
            num_computed_tokens: NUM_PROMPT_TOKENS,
            new_blocks: &[&self.block_ids[0]],
        };
        self.job = self.scheduler.store([progress].into_iter(), None).unwrap();
        assert!(self.job.as_ref().is_some_and(|job| job.block_ids.len() == NUM_PROMPT_BLOCKS));
    }

    fn complete(&mut self) {
        if let Some(job) = self.job.take() {
            self.scheduler.complete(job.job_id, 0, true).unwrap();
        }
    }

    fn finish(&mut self) {
        self.scheduler.finish("request").unwrap();
    }

    /// Completes jobs in flight, and adds the next prompt.
    fn turn_to(&mut self, hashes: &Hashes) {
        self.complete();
        self.finish();
        self.add(hashes);
    }

    fn look_up(&mut self) {
        let found = self.scheduler.lookup("request", 0, NUM_PROMPT_TOKENS).unwrap();
        assert_eq!(found, Some(NUM_PROMPT_TOKENS));
    }

    fn load(&mut self) {
        let job = self.scheduler.load("request", NUM_PROMPT_TOKENS, &self.block_ids, None).unwrap();
        self.job = Some(job);
    }
}

fn bench_offload(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("offload");
    group.throughput(Throughput::Elements(NUM_PROMPT_BLOCKS as u64));
    let prompts = prompts();
    let mut turns = prompts.iter().cycle();
    let mut host = Host {
        scheduler: OffloadScheduler::new(OffloadConfig::new(NUM_DEVICE_BLOCKS, groups())).unwrap(),
        block_ids: vec![(1..).take(NUM_PROMPT_BLOCKS).map(BlockId).collect()],
        job: None,
    };
    host.add(&prompts[0]);
    host.store();
    for hashes in &prompts[1..] {
        host.turn_to(hashes);
        host.store();
    }
    group.bench_function("store: plan, evicting", |bencher| {
        time(bencher, &mut host, |host| host.turn_to(turns.next().unwrap()), Host::store);
    });
    group.bench_function("store: complete", |bencher| {
        let plan = |host: &mut Host| {
            host.turn_to(turns.next().unwrap());
            host.store();
        };
        time(bencher, &mut host, plan, Host::complete);
    });
    // One that the host holds from here on.
    let cached = turns.next().unwrap();
    host.turn_to(cached);
    host.store();
    host.complete();
    group.bench_function("lookup, all hit", |bencher| {
        let release = |host: &mut Host| host.scheduler.release("request").unwrap();
        time(bencher, &mut host, release, Host::look_up);
    });
    group.bench_function("load: plan", |bencher| {
        let look_up = |host: &mut Host| {
            host.complete();
            host.look_up();
        };
        time(bencher, &mut host, look_up, Host::load);
    });
    group.bench_function("load: complete", |bencher| {
        let plan = |host: &mut Host| {
            host.complete();
            host.look_up();
            host.load();
        };
        time(bencher, &mut host, plan, Host::complete);
    });
    host.complete();
    group.bench_function("finish", |bencher| {
        host.finish();
        time(bencher, &mut host, |host| host.add(cached), Host::finish);
        host.add(cached);
    });
    group.finish();
}

fn bench_idle_step(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("offload");
    group.throughput(Throughput::Elements(NUM_DECODING as u64));
    let mut scheduler =
        OffloadScheduler::new(OffloadConfig::new(NUM_DEVICE_BLOCKS, groups())).unwrap();
    let ids: Vec<_> = (0..NUM_DECODING).map(|id| format!("request-{id}")).collect();
    for id in &ids {
        scheduler.add(id, &Hashes::default()).unwrap();
    }
    group.bench_function("idle step, 256 decoding", |bencher| {
        bencher.iter(|| {
            let progress = ids.iter().map(|id| Progress {
                request_id: id,
                num_computed_tokens: 256,
                new_blocks: &[&[]],
            });
            assert!(scheduler.store(progress, None).unwrap().is_none());
        });
    });
    group.finish();
}

fn main() {
    let mut criterion = common::criterion();
    bench_request(&mut criterion);
    bench_step(&mut criterion);
    bench_offload(&mut criterion);
    bench_idle_step(&mut criterion);
    criterion.final_summary();
}
