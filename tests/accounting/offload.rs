//! Ledger and offload scheduler together, over a memory that holds names instead of bytes.
//!
//! Copies happen when a job ends, as late as they may: a block or slot that was given to somebody
//! else in the meantime shows as a wrong name. Jobs end in any order, some fail, the tier is reset
//! with jobs in flight, requests go while their stores and loads are under way.

use std::collections::{BTreeMap, BTreeSet};

use kvstow_core::error::Error;
use kvstow_core::group::{Attention, Group, Model};
use kvstow_core::ids::{BlockId, GroupId};
use kvstow_core::key::BlockKey;
use kvstow_core::ledger::{AllocateArgs, Allocation, BlockLedger, Context, NewIds};
use kvstow_core::offload::{
    EvictionPolicy, Job, Mode, OffloadConfig, OffloadScheduler, Outcome, Progress, TransferEvent,
};
use proptest::collection::vec;
use proptest::prelude::*;

use super::{hashes, ids, num_cases, raw};

/// Tokens per hash, and per block where no model says otherwise.
const BLOCK_SIZE: usize = 2;
const NUM_CHAINS: usize = 4;

/// One model of every sort: with and without full attention, in one block size and in several.
fn models() -> impl Strategy<Value = Vec<Group>> {
    let group = |attention, block_size| Group::new(attention, block_size).unwrap();
    let window = |window, size| group(Attention::SlidingWindow { window }, size);
    prop_oneof![
        4 => Just(vec![group(Attention::Full, 2)]),
        2 => Just(vec![group(Attention::Full, 2), window(4, 2)]),
        1 => Just(vec![group(Attention::Full, 2), window(3, 2).retaining(4).unwrap()]),
        1 => Just(vec![group(Attention::Full, 4), window(3, 2).retaining(2).unwrap()]),
        2 => Just(vec![window(3, 2), group(Attention::Full, 4), group(Attention::StateSpace, 2)]),
        1 => Just(vec![group(Attention::ChunkedLocal { chunk: 6 }, 2), window(5, 4)]),
        1 => Just(vec![group(Attention::Full, 2), group(Attention::Full, 2)]),
    ]
}

/// What a block holds: a group's KV of what a hash names.
type Content = (usize, u16);

const NOTHING: Content = (usize::MAX, 0);

#[derive(Clone, Debug)]
enum Op {
    /// Who, which chain, how many blocks of it, how many tokens of the found to accept.
    Admit(usize, usize, usize, usize),
    /// Who, how many tokens.
    Run(usize, usize),
    Leave(usize),
    /// Which of the jobs in flight, and whether it succeeds.
    End(usize, bool),
    Reset,
    EvictDevice(Vec<u32>),
    /// Which place on the host goes bad.
    Rot(usize),
    /// Time goes on: jobs that are in flight for long are late.
    Tick,
    /// The movers are stopped.
    Stop,
    /// The device goes away and comes back, that many blocks larger or smaller.
    Sleep(Rest, i32),
}

/// How a world sleeps.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Rest {
    /// With jobs in flight, its blocks set aside by magic; ids stay.
    Abrupt,
    /// Once all has landed, with a sleep image; ids stay.
    Same,
    /// The same, under other ids.
    Packed,
}

fn op() -> impl Strategy<Value = Op> {
    let who = 0..4_usize;
    prop_oneof![
        6 => (who.clone(), 0..NUM_CHAINS, 1..8_usize, 0..4_usize)
            .prop_map(|(who, chain, len, keep)| Op::Admit(who, chain, len, keep)),
        8 => (who.clone(), 1..7_usize).prop_map(|(who, tokens)| Op::Run(who, tokens)),
        3 => who.prop_map(Op::Leave),
        6 => (0..8_usize, prop::bool::weighted(0.85)).prop_map(|(job, ok)| Op::End(job, ok)),
        1 => vec(1..10_u32, 0..3).prop_map(Op::EvictDevice),
        1 => Just(Op::Reset),
        3 => (0..36_usize).prop_map(Op::Rot),
        2 => Just(Op::Tick),
        1 => prop::bool::weighted(0.3).prop_map(|stop| if stop { Op::Stop } else { Op::Tick }),
        1 => (prop::sample::select(vec![Rest::Abrupt, Rest::Same, Rest::Packed]), -3..3_i32)
            .prop_map(|(rest, more)| Op::Sleep(rest, more)),
    ]
}

/// Chains branch: 0 and 1 share two blocks, 2 shares one with them, 3 none.
fn chain(chain: usize, len: usize) -> Vec<u16> {
    let shared = [2, 2, 1, 0][chain];
    let name = |at: usize| if at < shared { 1 + at } else { 100 * (chain + 1) + at };
    (0..len).map(|at| u16::try_from(name(at)).unwrap()).collect()
}

struct Request {
    /// Which of all admissions this is.
    serial: usize,
    names: Vec<u16>,
    computed: usize,
    is_loading: bool,
    /// Per group, blocks of the table that the scheduler was told of.
    num_told: Vec<usize>,
}

/// A job in flight, and what its source holds while it is.
struct Copy {
    job: Job,
    contents: Vec<Content>,
    /// Who waits for a load, and how many tokens there are when it has landed.
    loads_for: Option<(usize, usize, usize)>,
    /// Ranks, from the first, that have reported.
    num_reported: usize,
    has_failed: bool,
    is_late: bool,
}

struct World {
    model: Model,
    ledger: BlockLedger,
    scheduler: OffloadScheduler,
    device: Vec<Content>,
    host: Vec<Content>,
    requests: BTreeMap<usize, Request>,
    copies: Vec<Copy>,
    /// What a store may still bring, or has brought, since the last reset.
    storable: BTreeSet<Content>,
    /// Places on the host that went bad, and what they held: the load that reads one finds out.
    rotten: BTreeMap<u32, Content>,
    /// Slots that a load has found to be damaged, and that no store was given since.
    damaged: BTreeSet<usize>,
    num_admitted: usize,
    config: OffloadConfig,
    now: f64,
    /// What happened to jobs, as far as it was told of.
    transfers: Vec<TransferEvent>,
}

/// What a scheduler can be made for, besides its model.
#[derive(Clone, Copy, Debug)]
struct Options {
    world_size: usize,
    mode: Mode,
    blocks_per_slot: usize,
    policy: EvictionPolicy,
}

impl Default for Options {
    fn default() -> Self {
        Self { world_size: 1, mode: Mode::Eager, blocks_per_slot: 1, policy: EvictionPolicy::Lru }
    }
}

fn options() -> impl Strategy<Value = Options> {
    let forms = prop_oneof![
        2 => Just((Mode::Eager, 1)),
        1 => Just((Mode::Eager, 3)), // where all is full attention
        1 => Just((Mode::Lazy, 1)),
    ];
    let policy = prop::sample::select(EvictionPolicy::ALL.to_vec());
    (1..4_usize, forms, policy).prop_map(|(world_size, (mode, blocks_per_slot), policy)| Options {
        world_size,
        mode,
        blocks_per_slot,
        policy,
    })
}

/// Blocks at the head of the free queue that a lazy scheduler looks at.
const HORIZON: usize = 6;

/// How long a job may take.
const PATIENCE: f64 = 3.0;

impl World {
    fn new(num_device_blocks: usize, num_host_blocks: usize) -> Self {
        let groups = vec![Group::new(Attention::Full, BLOCK_SIZE).unwrap()];
        Self::of(groups, num_device_blocks, num_host_blocks, Options::default())
    }

    /// As [`World::new`], for every policy.
    fn of_each_policy(num_host_blocks: usize) -> impl Iterator<Item = Self> {
        EvictionPolicy::ALL.into_iter().map(move |policy| {
            let groups = vec![Group::new(Attention::Full, BLOCK_SIZE).unwrap()];
            Self::of(groups, 32, num_host_blocks, Options { policy, ..Options::default() })
        })
    }

    fn of(
        groups: Vec<Group>,
        num_device_blocks: usize,
        num_host_blocks: usize,
        options: Options,
    ) -> Self {
        let Options { world_size, mode, blocks_per_slot, policy } = options;
        let config = OffloadConfig {
            world_size,
            mode,
            blocks_per_slot,
            policy,
            events: true,
            ..OffloadConfig::new(num_host_blocks, groups.clone())
        };
        Self {
            model: Model::new(groups.clone()).unwrap(),
            scheduler: OffloadScheduler::new(config.clone()).unwrap(),
            ledger: BlockLedger::new(num_device_blocks, groups, None, false).unwrap(),
            device: vec![NOTHING; num_device_blocks],
            host: vec![NOTHING; num_host_blocks * blocks_per_slot],
            requests: BTreeMap::new(),
            copies: Vec::new(),
            storable: BTreeSet::new(),
            rotten: BTreeMap::new(),
            damaged: BTreeSet::new(),
            num_admitted: 0,
            config,
            now: 0.0,
            transfers: Vec::new(),
        }
    }

    /// The groups with their positions.
    fn groups(&self) -> Vec<(usize, Group)> {
        self.model.groups().iter().copied().enumerate().collect()
    }

    /// What block `index` of a group is to hold: it takes the last hash that it covers.
    fn content(&self, group: usize, index: usize, names: &[u16]) -> Content {
        let per_block = self.model.groups()[group].block_size / BLOCK_SIZE;
        (group, names[(index + 1) * per_block - 1])
    }

    /// What the full blocks of a request's tables must hold, from token `start` to token `end`.
    fn expected(&self, who: usize, start: usize, end: usize) -> Vec<(BlockId, usize, Content)> {
        let names = &self.requests[&who].names;
        let mut all = Vec::new();
        for (at, group) in self.groups() {
            let table = self.ledger.block_table(&who.to_string(), at).unwrap();
            let num_named = names.len() * BLOCK_SIZE / group.block_size;
            let indices = start / group.block_size..(end / group.block_size).min(num_named);
            for (&block, index) in table[indices.start.min(indices.end)..].iter().zip(indices) {
                if !block.is_null() {
                    all.push((block, index, self.content(at, index, names)));
                }
            }
        }
        all
    }

    fn admit(&mut self, who: usize, which: usize, len: usize, num_kept: usize) {
        let id = who.to_string();
        if self.requests.contains_key(&who) {
            assert!(self.scheduler.add(&id, &hashes(&[])).is_err());
            return;
        }
        let names = chain(which, len);
        self.ledger.add(&id, &hashes(&names), Context::default()).unwrap();
        self.scheduler.add(&id, &hashes(&names)).unwrap();
        let hit = self.ledger.lookup(&id, len * BLOCK_SIZE - 1).unwrap();
        for (group, blocks) in hit.blocks.iter().enumerate() {
            for (index, block) in blocks.iter().enumerate().filter(|(_, id)| !id.is_null()) {
                let held = self.device[block.index()];
                let content = self.content(group, index, &names);
                assert_eq!(held, content, "a local hit holds something else");
            }
        }
        let found = self.scheduler.lookup(&id, hit.num_tokens, len * BLOCK_SIZE - 1).unwrap();
        let Some(found) = found else { return self.refuse(&id) };
        let external = found.min(num_kept.saturating_mul(self.model.hit_block_size()));
        let args = AllocateArgs {
            num_new_tokens: usize::from(external == 0),
            hit: Some(&hit),
            num_external_tokens: external,
            delay_caching: external > 0,
            ..AllocateArgs::default()
        };
        let Some(taken) = self.ledger.allocate(&id, &args).unwrap() else {
            return self.refuse(&id);
        };
        self.num_admitted += 1;
        let request = Request {
            serial: self.num_admitted,
            names,
            computed: hit.num_tokens,
            is_loading: external > 0,
            num_told: vec![0; self.model.groups().len()],
        };
        self.requests.insert(who, request);
        if external > 0 {
            self.load(who, hit.num_tokens, external, found, &taken);
        } else {
            self.scheduler.release(&id).unwrap();
            self.compute(who, 1);
        }
    }

    fn load(
        &mut self,
        who: usize,
        start: usize,
        external: usize,
        found: usize,
        taken: &Allocation,
    ) {
        let (id, end) = (who.to_string(), start + external);
        let targets: Vec<Vec<BlockId>> =
            taken.offsets.windows(2).map(|ends| taken.ids[ends[0]..ends[1]].to_vec()).collect();
        let Ok(job) = self.scheduler.load(&id, external, &targets, Some(self.now + PATIENCE))
        else {
            // What a window needs before an earlier end may be gone from the host.
            assert!(external < found && self.model.groups().len() > 1);
            return self.leave(who);
        };
        let expected = self.expected(who, start, end);
        let (blocks, contents): (Vec<_>, Vec<_>) =
            expected.into_iter().map(|(block, _, content)| (block, content)).unzip();
        assert_eq!(job.block_ids, blocks, "a load fills what is not skipped");
        for (&place, &content) in job.host_slots.iter().zip(&contents) {
            assert!(!self.damaged.contains(&self.slot(place)), "a damaged slot is served");
            let held = self.rotten.get(&place).unwrap_or(&self.host[place as usize]);
            assert_eq!(*held, content, "the host serves something else");
        }
        let serial = self.requests[&who].serial;
        self.begin(job, contents, Some((who, serial, end)));
    }

    fn refuse(&mut self, id: &str) {
        self.ledger.free(id).unwrap();
        self.scheduler.finish(id).unwrap();
    }

    fn run(&mut self, who: usize, tokens: usize) {
        let id = who.to_string();
        if self.requests.get(&who).is_none_or(|request| request.is_loading) {
            return;
        }
        let args = AllocateArgs { num_new_tokens: tokens, ..AllocateArgs::default() };
        if self.ledger.allocate(&id, &args).unwrap().is_some() {
            self.compute(who, tokens);
        }
    }

    /// A step is over. It has read what is not skipped; the full blocks it completed hold what
    /// their hashes name, and may be stored.
    fn compute(&mut self, who: usize, tokens: usize) {
        let before = self.requests[&who].computed;
        for (block, _, content) in self.expected(who, 0, before) {
            assert_eq!(self.device[block.index()], content, "a step reads something else");
        }
        let after = before + tokens;
        for (block, _, content) in self.expected(who, before, after) {
            self.device[block.index()] = content;
        }
        self.requests.get_mut(&who).unwrap().computed = after;
        let job = self.tell(who);
        self.begin_store(job);
        if self.config.mode == Mode::Lazy {
            self.store_evictable(HORIZON);
        }
    }

    /// Tells the scheduler what a request has computed, and what its tables have new.
    fn tell(&mut self, who: usize) -> Option<Job> {
        let id = who.to_string();
        for (_, index, content) in self.expected(who, 0, self.requests[&who].computed) {
            if self.is_reachable(content.0, index) {
                self.storable.insert(content);
            }
        }
        let mut untold = Vec::new();
        for (at, _) in self.groups() {
            let table = self.ledger.block_table(&id, at).unwrap();
            untold.push(table[self.requests[&who].num_told[at]..].to_vec());
        }
        let request = self.requests.get_mut(&who).unwrap();
        for (told, new) in request.num_told.iter_mut().zip(&untold) {
            *told += new.len();
        }
        let new_blocks: Vec<&[BlockId]> = untold.iter().map(Vec::as_slice).collect();
        let num_computed_tokens = request.computed;
        let progress = Progress { request_id: &id, num_computed_tokens, new_blocks: &new_blocks };
        let deadline = Some(self.now + PATIENCE);
        let job = self.scheduler.store(std::iter::once(progress), deadline).unwrap();
        assert!(job.is_none() || self.config.mode == Mode::Eager);
        job
    }

    /// Stores what stands among the first so many of the device's free queue, which stays as it is.
    fn store_evictable(&mut self, num_blocks: usize) {
        let before: Vec<BlockId> = self.ledger.pool().free_order().collect();
        let candidates = self.ledger.pool().evictable(num_blocks);
        let deadline = Some(self.now + PATIENCE);
        let job = self.scheduler.store_evictable(candidates, deadline).unwrap();
        if let Some(job) = &job {
            assert!(
                job.block_ids.iter().all(|id| before[..num_blocks.min(before.len())].contains(id))
            );
        }
        self.begin_store(job);
        assert!(self.ledger.pool().free_order().eq(before));
    }

    fn begin_store(&mut self, job: Option<Job>) {
        if let Some(job) = job {
            let contents: Vec<_> = job.block_ids.iter().map(|id| self.device[id.index()]).collect();
            for (group, ends) in job.offsets.windows(2).enumerate() {
                assert!(contents[ends[0]..ends[1]].iter().all(|content| content.0 == group));
            }
            self.begin(job, contents, None);
        }
    }

    /// Whether block `index` of a group is kept: of a window, if some hit needs it.
    fn is_reachable(&self, group: usize, index: usize) -> bool {
        let (group, step) = (self.model.groups()[group], self.model.hit_block_size());
        let mut ends = (1..20).map(|end| end * step);
        !matches!(group.attention, Attention::SlidingWindow { .. })
            || ends
                .any(|end| (group.num_skipped_blocks(end)..end / group.block_size).contains(&index))
    }

    fn begin(
        &mut self,
        job: Job,
        contents: Vec<Content>,
        loads_for: Option<(usize, usize, usize)>,
    ) {
        let copy =
            Copy { job, contents, loads_for, num_reported: 0, has_failed: false, is_late: false };
        self.ledger.pool_mut().pin(&copy.job.block_ids).unwrap();
        let busy = self.copies.iter().flat_map(|other| &other.job.host_slots);
        if copy.loads_for.is_none() {
            let slots = copy.job.host_slots.iter().map(|&place| self.slot(place));
            slots.collect::<Vec<_>>().iter().for_each(|slot| _ = self.damaged.remove(slot));
            let busy: BTreeSet<u32> = busy.copied().collect();
            let is_free = |slot: &u32| !busy.contains(slot);
            assert!(copy.job.host_slots.iter().all(is_free), "a slot in two jobs");
            let contents: BTreeSet<Content> = copy.contents.iter().copied().collect();
            assert_eq!(contents.len(), copy.contents.len(), "a key twice in one job");
        }
        self.copies.push(copy);
    }

    /// The next rank reports one of the copies. When all have, what was copied is there: this late
    /// no sooner.
    fn end(&mut self, which: usize, is_ok: bool) {
        if self.copies.is_empty() {
            return;
        }
        let which = which % self.copies.len();
        let copy = &self.copies[which];
        let (job_id, rank) = (copy.job.job_id, copy.num_reported);
        let is_sound = |place: &u32| copy.loads_for.is_none() || !self.is_bad(*place, rank);
        let are_ok: Vec<bool> = copy.job.host_slots.iter().map(is_sound).collect();
        let bad = copy.job.host_slots.iter().zip(&are_ok).filter(|&(_, is_sound)| !is_sound);
        let bad: Vec<u32> = bad.map(|(&place, _)| place).collect();
        let is_whole = bad.is_empty() || !is_ok;
        let outcome = if is_whole { Outcome::Whole(is_ok) } else { Outcome::Blocks(&are_ok) };
        let is_ok = is_ok && bad.is_empty();
        let end = self.scheduler.complete(job_id, rank, outcome).unwrap();
        assert!(self.scheduler.complete(job_id, rank, is_ok).is_err(), "a rank reports once");
        if !is_whole {
            self.drop_slots(&bad);
        }
        let copy = &mut self.copies[which];
        copy.num_reported += 1;
        copy.has_failed |= !is_ok;
        assert_eq!(end.is_some(), copy.num_reported == self.config.world_size);
        let Some(end) = end else { return };
        let Copy { job, contents, loads_for, has_failed, is_late, .. } = self.copies.remove(which);
        for ((block, &slot), &content) in job.block_ids.iter().zip(&job.host_slots).zip(&contents) {
            let (source, target) = (&mut self.device[block.index()], &mut self.host[slot as usize]);
            let (source, target) =
                if loads_for.is_some() { (target, source) } else { (source, target) };
            let is_rotten = loads_for.is_some() && self.rotten.contains_key(&slot);
            assert!(is_rotten || *source == content, "a source was overwritten under way");
            *target = if has_failed { NOTHING } else { content };
            if loads_for.is_none() {
                self.rotten.remove(&slot);
            }
        }
        assert_eq!(end.block_ids, job.block_ids);
        assert_eq!(end.is_late, is_late);
        assert!(!(end.is_ok && (has_failed || is_late)));
        self.ledger.pool_mut().unpin(&end.block_ids).unwrap();
        if let Some(load) = loads_for.filter(|_| !is_late) {
            self.loaded(load, end.is_ok);
        }
    }

    /// The slot in which a place lies.
    fn slot(&self, place: u32) -> usize {
        place as usize / self.config.blocks_per_slot
    }

    /// Whether a rank's part of what lies there went bad: every place belongs to one.
    fn is_bad(&self, place: u32, rank: usize) -> bool {
        self.rotten.contains_key(&place) && place as usize % self.config.world_size == rank
    }

    /// A place on the host goes bad, unless some rank has read it already for a load under way.
    fn rot(&mut self, which: usize) {
        let place = u32::try_from(which % self.host.len()).unwrap();
        let is_read = |copy: &Copy| copy.num_reported > 0 && copy.job.host_slots.contains(&place);
        if !self.copies.iter().any(is_read) && !self.rotten.contains_key(&place) {
            let held = std::mem::replace(&mut self.host[place as usize], NOTHING);
            self.rotten.insert(place, held);
        }
    }

    /// A load has found that slots are damaged: they are gone, unless they were already.
    fn drop_slots(&mut self, bad: &[u32]) {
        for &place in bad {
            let slot = self.slot(place);
            self.damaged.insert(slot);
            if self.config.mode == Mode::Eager {
                let per_slot = self.config.blocks_per_slot;
                for at in slot * per_slot..(slot + 1) * per_slot {
                    let held = self.rotten.get(&u32::try_from(at).unwrap());
                    let held = *held.unwrap_or(&self.host[at]);
                    self.storable.remove(&held);
                }
            }
            let is_used =
                |slot: &usize| self.scheduler.used_slots().any(|used| used as usize == *slot);
            assert!(!is_used(&slot), "a damaged slot is empty as soon as nobody pins it");
        }
    }

    /// A load has ended, and its request runs or begins anew.
    fn loaded(&mut self, (who, serial, tokens): (usize, usize, usize), is_ok: bool) {
        // The request may have gone, and a namesake come, while the load was under way.
        if self.requests.get(&who).is_none_or(|request| request.serial != serial) {
            return;
        }
        if is_ok {
            self.ledger.cache(&who.to_string(), tokens).unwrap();
            let request = self.requests.get_mut(&who).unwrap();
            (request.computed, request.is_loading) = (tokens, false);
        } else {
            self.leave(who);
        }
    }

    /// Jobs that take too long are late, each once; their requests do not wait any more.
    fn tick(&mut self) {
        self.now += 1.0;
        let late = self.scheduler.expire(self.now).unwrap();
        assert!(self.scheduler.expire(self.now).unwrap().is_empty(), "a job is late once");
        for job_id in late {
            let copy = self.copies.iter_mut().find(|copy| copy.job.job_id == job_id).unwrap();
            assert!(!copy.is_late);
            copy.is_late = true;
            if let Some(load) = copy.loads_for {
                self.loaded(load, false);
            }
        }
    }

    /// Every job ends, and nothing is copied any more.
    fn stop(&mut self) {
        let ends = self.scheduler.end_all().unwrap();
        assert_eq!(ends.len(), self.copies.len());
        for (end, copy) in ends.into_iter().zip(std::mem::take(&mut self.copies)) {
            assert_eq!((end.job_id, end.is_ok), (copy.job.job_id, false));
            self.ledger.pool_mut().unpin(&end.block_ids).unwrap();
            assert_eq!(self.scheduler.complete(end.job_id, 0, true), Ok(None), "swallowed");
            if let Some(load) = copy.loads_for.filter(|_| !copy.is_late) {
                self.loaded(load, false);
            }
        }
    }

    /// The device goes and comes back with what an image or, abruptly, magic has kept of it.
    fn sleep(&mut self, rest: Rest, more: i32) {
        let mut kept: BTreeMap<BlockId, Content> = BTreeMap::new();
        if rest == Rest::Abrupt {
            kept.extend((0..).map(BlockId).zip(self.device.iter().copied()));
        } else {
            settle(self);
            for (place, held) in std::mem::take(&mut self.rotten) {
                self.host[place as usize] = held;
            }
            let before = format!("{:?}", self.scheduler);
            match self.scheduler.hold_image(&self.ledger) {
                Ok(stores) => {
                    for (block, &slot) in stores.block_ids.iter().zip(&stores.host_slots) {
                        self.host[slot as usize] = self.device[block.index()];
                    }
                }
                Err(error) => {
                    assert!(matches!(error, Error::NoRoomForImage { .. }), "{error}");
                    assert_eq!(format!("{:?}", self.scheduler), before);
                    return;
                }
            }
            self.scheduler.check().unwrap();
            assert!(self.scheduler.hold_image(&self.ledger).is_err(), "an image is held once");
            let copies = self.scheduler.image().unwrap();
            let held = copies.host_slots.iter().map(|&slot| self.host[slot as usize]);
            kept.extend(copies.block_ids.iter().copied().zip(held));
        }
        self.transfers.append(&mut self.scheduler.take_transfer_events());
        let size = (self.device.len().cast_signed() + more as isize).max(2).cast_unsigned();
        let moves =
            self.wake(size, if rest == Rest::Packed { NewIds::Packed } else { NewIds::Same });
        self.scheduler.release_image().unwrap();
        for (old, new) in moves {
            self.device[new.index()] = kept[&old];
        }
        // What was in flight is nobody's any more, and what it was to load is not there.
        for copy in std::mem::take(&mut self.copies) {
            let is_other = |event: &TransferEvent| !matches!(event, TransferEvent::Initiated { job_id, .. } if *job_id == copy.job.job_id);
            self.transfers.retain(is_other);
            assert_eq!(self.scheduler.complete(copy.job.job_id, 0, true), Ok(None), "swallowed");
            if let Some(load) = copy.loads_for.filter(|_| !copy.is_late) {
                self.loaded(load, false);
            }
        }
        let running: Vec<usize> = self.requests.keys().copied().collect();
        for who in running {
            self.requests.get_mut(&who).unwrap().num_told.fill(0);
            if self.config.mode == Mode::Lazy {
                self.tell(who);
            }
        }
    }

    /// Ledger and scheduler anew from snapshots, over a device of `size` blocks if what is kept fits
    /// in there; its memory holds nothing. Returns where the blocks are now.
    fn wake(&mut self, size: usize, ids: NewIds) -> Vec<(BlockId, BlockId)> {
        let (ledger, scheduler) = (self.ledger.snapshot(true), self.scheduler.snapshot().unwrap());
        let ledger_of =
            |size| BlockLedger::new(size, self.model.groups().to_vec(), None, false).unwrap();
        let restored = ledger_of(size).restore(&ledger, ids).unwrap_or_else(|error| {
            assert!(matches!(error, Error::OutOfBlocks { .. } | Error::Config(_)), "{error}");
            ledger_of(self.device.len()).restore(&ledger, ids).unwrap()
        });
        assert_eq!(
            self.ledger.request_ids().collect::<Vec<_>>(),
            restored.ledger.request_ids().collect::<Vec<_>>()
        );
        self.ledger = restored.ledger;
        let anew = OffloadScheduler::new(self.config.clone()).unwrap();
        self.scheduler = anew.restore(&scheduler).unwrap();
        assert_eq!(self.scheduler.snapshot().unwrap(), scheduler, "a snapshot of the restored");
        self.device = vec![NOTHING; self.ledger.pool().num_blocks()];
        restored.moves
    }

    fn leave(&mut self, who: usize) {
        if self.requests.remove(&who).is_some() {
            let id = who.to_string();
            self.scheduler.finish(&id).unwrap();
            self.ledger.free(&id).unwrap();
        }
    }

    fn apply(&mut self, op: &Op) {
        match op {
            Op::Admit(who, chain, len, kept) => self.admit(*who, *chain, *len, *kept),
            Op::Run(who, tokens) => self.run(*who, *tokens),
            Op::Leave(who) => self.leave(*who),
            Op::End(which, is_ok) => self.end(*which, *is_ok),
            Op::Tick => self.tick(),
            Op::Stop => self.stop(),
            Op::Sleep(rest, more) => self.sleep(*rest, *more),
            Op::Reset => {
                self.scheduler.reset().unwrap();
                self.storable.clear();
                if self.config.mode == Mode::Lazy {
                    self.storable.extend(&self.device); // what is there may be stored again
                }
                assert_eq!(self.scheduler.num_resident(), 0);
            }
            Op::Rot(which) => self.rot(*which),
            Op::EvictDevice(some) => {
                let known = self.device.len();
                let some: Vec<u32> =
                    some.iter().copied().filter(|&id| (id as usize) < known).collect();
                self.ledger.pool_mut().evict(&ids(&some)).unwrap();
            }
        }
    }

    fn check(&self) {
        self.ledger.check().unwrap();
        self.scheduler.check().unwrap();
        let pool = self.ledger.pool();
        let all = (0..u32::try_from(self.device.len()).unwrap()).map(BlockId);
        let num_pins: usize = all.map(|id| pool.num_pins(id) as usize).sum();
        let num_copied: usize = self.copies.iter().map(|copy| copy.job.block_ids.len()).sum();
        assert_eq!(num_pins, num_copied, "device pins are those of the jobs in flight");
        let (late, timely): (Vec<_>, Vec<_>) = self.copies.iter().partition(|copy| copy.is_late);
        let stats = self.scheduler.stats();
        assert_eq!((stats.jobs_in_flight, stats.quarantined_jobs), (timely.len(), late.len()));
        assert!(self.scheduler.num_resident() <= self.storable.len(), "nothing stale is kept");
    }

    /// How many hashed blocks of a chain a host that has lost nothing can serve.
    fn num_servable(&self, which: usize) -> usize {
        let (names, step) = (chain(which, 8), self.model.hit_block_size());
        let is_servable = |end: &usize| {
            self.groups().into_iter().all(|(at, group)| {
                let needed = group.num_skipped_blocks(*end)..end / group.block_size;
                needed.into_iter().all(|i| self.storable.contains(&self.content(at, i, &names)))
            })
        };
        let ends = (0..=names.len() * BLOCK_SIZE / step).rev().map(|end| end * step);
        ends.into_iter().find(is_servable).unwrap_or(0) / BLOCK_SIZE
    }

    /// How many hashed blocks of a chain the host can serve from its start.
    fn num_served(&mut self, which: usize) -> usize {
        let names = chain(which, 8);
        self.scheduler.add("probe", &hashes(&names)).unwrap();
        let found = self.scheduler.lookup("probe", 0, usize::MAX).unwrap().unwrap();
        self.scheduler.finish("probe").unwrap();
        found / BLOCK_SIZE
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(num_cases()))]

    /// Nothing stale is served, no pin is lost, no slot or block has two users.
    #[test]
    fn nothing_is_lost_or_mixed_up(
        groups in models(), size in 4..16_usize, num_host in 1..12_usize,
        options in options(), ops in vec(op(), 1..60),
    ) {
        let num_device = size * groups.len();
        let is_full = groups.iter().all(|group| group.attention == Attention::Full);
        let blocks_per_slot = if is_full { options.blocks_per_slot } else { 1 };
        let options = Options { blocks_per_slot, ..options };
        let mut world = World::of(groups, num_device, num_host, options);
        for op in &ops {
            world.apply(op);
            world.check();
        }
        while !world.copies.is_empty() {
            world.end(0, true);
            world.check();
        }
        (0..4).for_each(|who| world.leave(who));
        world.check();
        prop_assert_eq!(world.scheduler.stats().storing_blocks, 0);
        prop_assert_eq!(world.ledger.pool().num_free(), world.device.len() - 1);
        // Every transfer that was initiated was completed once, a store committed before.
        let mut open = BTreeSet::new();
        for event in world.transfers.into_iter().chain(world.scheduler.take_transfer_events()) {
            match event {
                TransferEvent::Initiated { job_id, .. } => prop_assert!(open.insert(job_id)),
                TransferEvent::Committed { job_id, .. } => prop_assert!(open.contains(&job_id)),
                TransferEvent::Completed { job_id, .. } => prop_assert!(open.remove(&job_id)),
            }
        }
        prop_assert!(open.is_empty());
    }

    /// With room, whatever was computed is on the host once the jobs landed: a hit is as long as
    /// what every group needs for it was computed.
    #[test]
    fn with_room_everything_computed_is_kept(groups in models(), ops in vec(op(), 1..40)) {
        let mut world = World::of(groups.clone(), 80, 200, Options::default());
        for op in &ops {
            let op = match op {
                Op::Reset | Op::Tick | Op::Stop | Op::Sleep(Rest::Abrupt, _) => continue,
                // A request that goes on does not store what a window has dropped.
                Op::Rot(_) if groups.iter().any(|group| group.attention != Attention::Full) => {
                    continue;
                }
                Op::End(which, _) => &Op::End(*which, true),
                other => other,
            };
            world.apply(op);
        }
        while !world.copies.is_empty() {
            world.end(0, true);
        }
        for which in 0..NUM_CHAINS {
            prop_assert_eq!(world.num_served(which), world.num_servable(which));
        }
        prop_assert_eq!(world.scheduler.stats().evicted_blocks, 0);
        prop_assert_eq!(world.scheduler.stats().dropped_blocks, 0);
        let stats = world.scheduler.stats();
        prop_assert_eq!(stats.stored_blocks - stats.damaged_blocks, world.storable.len());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(num_cases() / 4))]

    /// A scheduler that was restored plans what one that was not plans: the same jobs, in the same
    /// slots, after the same evictions.
    #[test]
    fn a_restored_scheduler_goes_on_as_before(
        groups in models(), size in 4..16_usize, num_host in 1..12_usize,
        options in options(), ops in vec(op(), 1..60),
    ) {
        let is_full = groups.iter().all(|group| group.attention == Attention::Full);
        let blocks_per_slot = if is_full { options.blocks_per_slot } else { 1 };
        let options = Options { blocks_per_slot, mode: Mode::Eager, ..options };
        let world = || World::of(groups.clone(), size * groups.len(), num_host, options);
        let (mut restored, mut other) = (world(), world());
        for op in &ops {
            if matches!(op, Op::Sleep(..)) {
                settle(&mut restored);
                settle(&mut other);
                let snapshot = restored.scheduler.snapshot().unwrap();
                prop_assert_eq!(&snapshot, &other.scheduler.snapshot().unwrap());
                let anew = OffloadScheduler::new(restored.config.clone()).unwrap();
                restored.scheduler = anew.restore(&snapshot).unwrap();
                for request in restored.requests.values_mut() {
                    request.num_told.fill(0);
                }
                for world in [&mut restored, &mut other] {
                    let running: Vec<usize> = world.requests.keys().copied().collect();
                    for who in running {
                        let job = world.tell(who);
                        world.begin_store(job);
                    }
                }
            } else {
                restored.apply(op);
                other.apply(op);
            }
            restored.check();
            let jobs = |world: &World| world.copies.iter().map(|copy| copy.job.clone()).collect::<Vec<_>>();
            prop_assert_eq!(jobs(&restored), jobs(&other));
            prop_assert_eq!(restored.scheduler.stats(), other.scheduler.stats());
        }
        settle(&mut restored);
        settle(&mut other);
        prop_assert_eq!(restored.scheduler.snapshot(), other.scheduler.snapshot());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(num_cases() / 10))]

    /// Lazy, with room and a horizon that covers all: what falls off the device is on the host.
    /// (Of a window not always: what leaves it may be taken again in the same call.)
    #[test]
    fn whatever_falls_off_the_device_is_kept(
        num_groups in 1..3_usize, ops in vec(op(), 1..40),
    ) {
        let groups = vec![Group::new(Attention::Full, BLOCK_SIZE).unwrap(); num_groups];
        let num_device = 12 * num_groups;
        let mut world = World::of(groups, num_device, 200, Options { mode: Mode::Lazy, ..Options::default() });
        let keep = |world: &mut World| {
            world.store_evictable(num_device);
            settle(world);
        };
        for op in &ops {
            if matches!(op, Op::Admit(..) | Op::Run(..) | Op::Leave(_)) {
                world.apply(op);
                world.check();
                keep(&mut world);
            }
        }
        (0..4).for_each(|who| world.leave(who));
        keep(&mut world);
        for which in 0..NUM_CHAINS {
            prop_assert_eq!(world.num_served(which), world.num_servable(which));
        }
        prop_assert!(world.scheduler.stats().stored_blocks <= world.storable.len());
    }
}

/// Runs one request through `len` blocks of a chain and lets its jobs land.
fn serve(world: &mut World, which: usize, len: usize) {
    world.admit(0, which, len, usize::MAX);
    while !world.copies.is_empty() {
        world.end(0, true);
    }
    let computed = world.requests[&0].computed;
    world.run(0, len * BLOCK_SIZE - computed);
    while !world.copies.is_empty() {
        world.end(0, true);
    }
    world.leave(0);
    world.check();
}

#[test]
fn the_least_recent_chain_goes_first_and_tail_first() {
    let mut world = World::new(32, 6);
    serve(&mut world, 0, 4);
    serve(&mut world, 3, 2);
    // Two more blocks: chain 0 loses its two last ones.
    serve(&mut world, 3, 4);
    assert_eq!((world.num_served(0), world.num_served(3)), (2, 4));
    assert_eq!(world.scheduler.stats().evicted_blocks, 2);
}

#[test]
fn a_chain_that_was_used_again_stays() {
    let mut world = World::new(32, 6);
    serve(&mut world, 0, 3);
    serve(&mut world, 3, 3);
    serve(&mut world, 0, 3);
    serve(&mut world, 2, 2);
    // Chain 2 shares its root with chain 0 and needs one slot: the tail of chain 3 goes.
    assert_eq!((world.num_served(0), world.num_served(3), world.num_served(2)), (3, 2, 2));
}

/// All that is kept is served: of no chain the middle or the tail without what comes before it.
#[test]
fn no_policy_makes_an_orphan() {
    for mut world in World::of_each_policy(7) {
        for round in 0..60_usize {
            serve(&mut world, round * round % NUM_CHAINS, 2 + round % 6);
            assert!(world.ledger.pool_mut().reset());
            let served: BTreeSet<u16> =
                (0..NUM_CHAINS).flat_map(|which| chain(which, world.num_served(which))).collect();
            assert_eq!(served.len(), world.scheduler.num_resident());
        }
        assert!(world.scheduler.stats().evicted_blocks > 50);
    }
}

/// The least recent slots are not leaves here: the block after them is just being stored.
#[test]
fn no_policy_evicts_what_a_store_in_flight_stands_below() {
    for mut world in World::of_each_policy(5) {
        prefill(&mut world, 0, 0, 2);
        world.run(0, BLOCK_SIZE);
        assert_eq!(world.copies.len(), 1);
        world.admit(1, 3, 8, 0);
        world.run(1, 4 * BLOCK_SIZE);
        while world.copies.len() > 1 {
            world.end(1, true);
        }
        world.leave(1);
        settle(&mut world);
        world.check();
        assert_eq!((world.num_served(0), world.num_served(3)), (3, 2));
    }
}

#[test]
fn no_policy_evicts_what_a_lookup_holds() {
    for mut world in World::of_each_policy(5) {
        serve(&mut world, 0, 3);
        world.scheduler.add("holder", &hashes(&chain(0, 3))).unwrap();
        let held = Some(3 * BLOCK_SIZE);
        assert_eq!(world.scheduler.lookup("holder", 0, usize::MAX), Ok(held));
        for _ in 0..5 {
            serve(&mut world, 3, 4);
            serve(&mut world, 2, 4);
            assert_eq!(world.num_served(0), 3);
        }
        assert!(world.scheduler.stats().evicted_blocks > 0);
        world.scheduler.finish("holder").unwrap();
        world.check();
    }
}

#[test]
fn what_finds_no_room_is_counted_and_a_prefix_is_kept() {
    let mut world = World::new(32, 3);
    serve(&mut world, 0, 5);
    assert_eq!(world.num_served(0), 3);
    assert_eq!(world.scheduler.stats().dropped_blocks, 2);
}

/// Lets every job land.
fn settle(world: &mut World) {
    while !world.copies.is_empty() {
        world.end(0, true);
    }
}

/// Admits `who` with a whole chain that nothing serves, and computes it; it stays.
fn prefill(world: &mut World, who: usize, which: usize, len: usize) {
    world.admit(who, which, 8, 0);
    let computed = world.requests[&who].computed;
    world.run(who, len * BLOCK_SIZE - computed);
    settle(world);
}

#[test]
fn a_store_ranks_the_whole_chain() {
    let mut world = World::new(32, 5);
    prefill(&mut world, 0, 0, 2);
    prefill(&mut world, 1, 3, 2);
    world.run(0, BLOCK_SIZE);
    settle(&mut world);
    // Chain 0 has one more block, so all of it is more recent than chain 3, which goes.
    prefill(&mut world, 2, 2, 3);
    assert_eq!((world.num_served(0), world.num_served(3), world.num_served(2)), (3, 0, 3));
}

#[test]
fn a_restart_equals_finish_and_add() {
    let mut world = World::new(32, 6);
    prefill(&mut world, 0, 0, 3);
    prefill(&mut world, 1, 3, 3);
    let (mut added, mut restarted) = (world.scheduler.clone(), world.scheduler);
    added.finish("0").unwrap();
    added.add("0", &hashes(&chain(0, 8))).unwrap();
    restarted.restart("0").unwrap();
    assert_eq!(added.snapshot().unwrap(), restarted.snapshot().unwrap());
    restarted.check().unwrap();
    assert!(matches!(restarted.restart("nobody"), Err(Error::UnknownRequest { .. })));
}

#[test]
fn an_accepted_load_ranks_the_whole_chain() {
    let mut world = World::new(32, 6);
    serve(&mut world, 0, 3);
    serve(&mut world, 3, 3);
    assert!(world.ledger.pool_mut().reset());
    world.admit(0, 0, 3, usize::MAX);
    settle(&mut world);
    assert_eq!(world.scheduler.stats().loaded_blocks, 2, "one token is left to compute");
    // Chain 2 shares its root with chain 0 and needs two slots: those of the least recent tails,
    // which are chain 0's third block, that was not loaded, and chain 3's.
    prefill(&mut world, 1, 2, 3);
    assert_eq!((world.num_served(0), world.num_served(3), world.num_served(2)), (2, 2, 3));
}

#[test]
fn a_lookup_is_pending_while_another_request_loads_the_same() {
    let mut world = World::new(32, 6);
    serve(&mut world, 0, 4);
    assert!(world.ledger.pool_mut().reset());
    world.admit(0, 0, 4, 2);
    assert_eq!(world.copies.len(), 1);
    world.scheduler.add("other", &hashes(&chain(0, 4))).unwrap();
    assert_eq!(world.scheduler.lookup("other", 0, usize::MAX).unwrap(), None);
    world.check();
    settle(&mut world);
    assert_eq!(world.scheduler.lookup("other", 0, usize::MAX).unwrap(), Some(4 * BLOCK_SIZE));
}

#[test]
fn a_live_chain_that_was_evicted_is_stored_again_from_its_root() {
    let mut world = World::new(32, 4);
    prefill(&mut world, 0, 0, 2);
    prefill(&mut world, 1, 3, 4);
    assert_eq!((world.num_served(0), world.num_served(3)), (0, 4));
    world.run(0, BLOCK_SIZE);
    settle(&mut world);
    assert_eq!((world.num_served(0), world.num_served(3)), (3, 1));
}

#[test]
fn after_a_reset_loads_do_not_count_and_live_requests_store_anew() {
    let mut world = World::new(32, 8);
    serve(&mut world, 0, 4);
    assert!(world.ledger.pool_mut().reset());
    prefill(&mut world, 1, 3, 2);
    world.admit(0, 0, 4, 3);
    let load = world.copies[0].job.clone();
    world.apply(&Op::Reset);
    let end = world.scheduler.complete(load.job_id, 0, true).unwrap().unwrap();
    assert_eq!((end.is_ok, end.block_ids), (false, load.block_ids));
    assert_eq!(world.scheduler.stats().failed_loads, 1);
    assert_eq!(world.num_served(3), 0);
    world.copies.clear();
    world.run(1, 1);
    settle(&mut world);
    assert_eq!(world.num_served(3), 2, "stored again without a new full block");
}

/// Hashes that are no true chain (content ids, say) must not tie the tier's slots into a loop.
#[test]
fn hashes_that_are_no_chain_make_no_slot_its_own_parent() {
    let groups = vec![Group::new(Attention::Full, BLOCK_SIZE).unwrap()];
    let mut scheduler = OffloadScheduler::new(OffloadConfig::new(4, groups)).unwrap();
    for (id, names) in [("p", &[1][..]), ("k", &[2]), ("l", &[3]), ("all", &[1, 2, 3, 4, 5, 6])] {
        scheduler.add(id, &hashes(names)).unwrap();
    }
    let stores =
        [("p", 1, 1..2), ("k", 1, 2..3), ("l", 1, 3..4), ("all", 1, 4..10), ("all", 6, 0..0)];
    for (request_id, num_blocks, new) in stores {
        let new_blocks = ids(&new.collect::<Vec<u32>>());
        let num_computed_tokens = num_blocks * BLOCK_SIZE;
        let progress = Progress { request_id, num_computed_tokens, new_blocks: &[&new_blocks] };
        if let Some(job) = scheduler.store(std::iter::once(progress), None).unwrap() {
            scheduler.complete(job.job_id, 0, true).unwrap();
        }
        scheduler.check().unwrap();
    }
    // What the request has of its list on the host stays; the one empty slot is all it gets.
    assert_eq!(scheduler.stats().resident_blocks, 4);
    assert_eq!(scheduler.stats().evicted_blocks, 0);
}

/// In such a list a hash may stand twice: the tier has one slot for it.
#[test]
fn a_key_that_stands_twice_is_stored_once() {
    let groups = vec![Group::new(Attention::Full, BLOCK_SIZE).unwrap()];
    let mut scheduler = OffloadScheduler::new(OffloadConfig::new(8, groups)).unwrap();
    scheduler.add("a", &hashes(&[1, 2, 1, 3])).unwrap();
    let new_blocks = ids(&[1, 2, 3, 4]);
    let progress = Progress {
        request_id: "a",
        num_computed_tokens: 4 * BLOCK_SIZE,
        new_blocks: &[&new_blocks],
    };
    let job = scheduler.store(std::iter::once(progress), None).unwrap().unwrap();
    assert_eq!(raw(job.block_ids.iter().copied()), [1, 2, 4]);
    scheduler.complete(job.job_id, 0, true).unwrap();
    scheduler.check().unwrap();
    assert_eq!(scheduler.stats().resident_blocks, 3);
}

/// Contract 1: whatever a caller claims, no more is stored than is hashed and was allocated.
#[test]
fn what_was_not_hashed_or_allocated_is_not_stored() {
    let groups = vec![Group::new(Attention::Full, BLOCK_SIZE).unwrap()];
    let mut scheduler = OffloadScheduler::new(OffloadConfig::new(8, groups)).unwrap();
    scheduler.add("a", &hashes(&[1, 2, 3])).unwrap();
    let mut store = |new: &[u32]| {
        let new_blocks = ids(new);
        let progress =
            Progress { request_id: "a", num_computed_tokens: 1000, new_blocks: &[&new_blocks] };
        let job = scheduler.store(std::iter::once(progress), None).unwrap();
        scheduler.check().unwrap();
        job.map_or(Vec::new(), |job| raw(job.block_ids))
    };
    assert_eq!(store(&[5, 6]), [5, 6]);
    assert_eq!(store(&[7, 8, 9]), [7]);
    assert_eq!(store(&[]), []);
}

/// Lazy: a block that does not hold what was computed into it is somebody else's by now.
#[test]
fn what_a_block_holds_no_more_is_not_stored() {
    let groups = vec![Group::new(Attention::Full, BLOCK_SIZE).unwrap()];
    let config = OffloadConfig { mode: Mode::Lazy, ..OffloadConfig::new(8, groups) };
    let mut scheduler = OffloadScheduler::new(config).unwrap();
    scheduler.add("a", &hashes(&[1, 2])).unwrap();
    let new_blocks = ids(&[5, 6]);
    let progress = Progress {
        request_id: "a",
        num_computed_tokens: 2 * BLOCK_SIZE,
        new_blocks: &[&new_blocks],
    };
    assert!(scheduler.store(std::iter::once(progress), None).unwrap().is_none());
    let key = |at: usize| BlockKey { hash: hashes(&[1, 2, 3]).as_slice()[at], group: GroupId(0) };
    let candidates = [(BlockId(5), key(2)), (BlockId(6), key(1)), (BlockId(7), key(0))];
    let job = scheduler.store_evictable(candidates.into_iter(), None).unwrap().unwrap();
    assert_eq!(raw(job.block_ids), [6]);
}
