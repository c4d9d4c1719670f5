//! A small world: a scheduler, two requests, and the memories of all ranks.
//!
//! The requests have the prompts `[a, b]` and `[a, c]`, of two full blocks and one token more.

use crate::error::Error;
use crate::group::{Attention, Group};
use crate::ids::{BlockId, JobId};
use crate::key::{Hashes, HashesBuilder};
use crate::offload::{DiskConfig, DiskMode, OffloadConfig, OffloadScheduler, Progress, TierJob};

use super::explorer;
use super::memory::{Content, Flight};
use super::projection::Form;

/// Tokens of a block.
pub(super) const BLOCK_SIZE: usize = 2;
/// Full blocks of a prompt.
pub(super) const NUM_BLOCKS: usize = 2;

/// What a world has, and what can happen in it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Options {
    pub(super) num_ranks: usize,
    pub(super) num_requests: usize,
    pub(super) num_host: usize,
    pub(super) num_disk: usize,
    pub(super) num_device: u32,
    /// The most jobs in flight, late ones included.
    pub(super) num_jobs: usize,
    /// How many copies may fail.
    pub(super) num_faults: u8,
    /// How many host slots may become damaged.
    pub(super) num_damages: u8,
    /// How many times the tier may be reset.
    pub(super) num_resets: u8,
    pub(super) can_expire: bool,
    pub(super) can_sleep: bool,
    pub(super) can_stop: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Action {
    Submit(usize),
    Ask(usize),
    /// The request waits no longer for the disk.
    AskHost(usize),
    /// Request, blocks.
    Load(usize, usize),
    Compute(usize),
    /// Stores what the last store had no room for.
    StoreRest(usize),
    Finish(usize),
    Demote,
    Promote,
    SetDisk(DiskMode),
    /// Job, rank, how its copy went.
    Report(usize, usize, Copied),
    /// All jobs up to this one are late.
    Expire(usize),
    StopMovers,
    Reset,
    Sleep,
    Wake,
    /// A slot becomes damaged on the first rank.
    Damage(usize),
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Copied {
    Well,
    Failed,
    /// A demote or a promote: the first block failed.
    FailedFirst,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Phase {
    Asking,
    /// Lookup found as many blocks.
    Holding(usize),
    Loading(JobId),
    /// The blocks of its table are computed, the others are not.
    Ready,
    Done,
}

#[derive(Clone, Debug)]
pub(super) struct Request {
    pub(super) phase: Phase,
    pub(super) table: Vec<BlockId>,
    num_reported: usize,
}

#[derive(Clone)]
pub(super) struct World {
    pub(super) options: Options,
    pub(super) scheduler: OffloadScheduler,
    pub(super) requests: Vec<Option<Request>>,
    pub(super) flights: Vec<Flight>,
    /// By rank.
    pub(super) host: Vec<Vec<Content>>,
    pub(super) disk: Vec<Vec<Content>>,
    pub(super) device: Vec<Vec<Content>>,
    /// What the sleep image holds: by copy, a place on the host and its content.
    pub(super) image: Option<Vec<(usize, Content)>>,
    num_faults: u8,
    num_damages: u8,
    num_resets: u8,
}

pub(super) fn groups() -> Vec<Group> {
    vec![Group::new(Attention::Full, BLOCK_SIZE).unwrap()]
}

/// The name of a block of a request's prompt. All prompts begin with the same block.
pub(super) fn name(who: usize, at: usize) -> u8 {
    if at == 0 { 1 } else { 1 + u8::try_from(who * (NUM_BLOCKS - 1) + at).unwrap() }
}

pub(super) fn hashes(who: usize) -> Hashes {
    let mut hashes = HashesBuilder::default();
    (0..NUM_BLOCKS).for_each(|at| hashes.push(&[name(who, at)]).unwrap());
    hashes.finish()
}

impl World {
    pub(super) fn new(options: Options) -> Self {
        let disk = (options.num_disk > 0).then(|| DiskConfig {
            max_in_flight_blocks: NUM_BLOCKS,
            ..DiskConfig::new(options.num_disk)
        });
        let config = OffloadConfig {
            world_size: options.num_ranks,
            disk,
            ..OffloadConfig::new(options.num_host, groups())
        };
        let memory = |num| vec![vec![Content::TORN; num]; options.num_ranks];
        let mut scheduler = OffloadScheduler::new(config).unwrap();
        if disk.is_some() {
            scheduler.set_disk(DiskMode::On).unwrap();
        }
        Self {
            options,
            scheduler,
            requests: vec![None; options.num_requests],
            flights: Vec::new(),
            host: memory(options.num_host),
            disk: memory(options.num_disk),
            device: memory(options.num_device as usize + 1),
            image: None,
            num_faults: options.num_faults,
            num_damages: options.num_damages,
            num_resets: options.num_resets,
        }
    }

    pub(super) fn is_asleep(&self) -> bool {
        self.image.is_some()
    }

    /// Device blocks that neither a request nor a copy uses.
    fn free_blocks(&self) -> Vec<BlockId> {
        let ids = (1..=self.options.num_device).map(BlockId);
        let is_used = |id: &BlockId| {
            self.requests.iter().flatten().any(|request| request.table.contains(id))
                || self.flights.iter().any(|flight| flight.uses_block(*id))
        };
        ids.filter(|id| !is_used(id)).collect()
    }

    fn request_actions(&self, who: usize, actions: &mut Vec<Action>) {
        let Some(request) = &self.requests[who] else { return actions.push(Action::Submit(who)) };
        let num_free = self.free_blocks().len();
        let has_room = self.flights.len() < self.options.num_jobs;
        match request.phase {
            Phase::Asking => {
                actions.push(Action::Ask(who));
                if self.options.num_disk > 0 {
                    actions.push(Action::AskHost(who));
                }
            }
            Phase::Holding(num) if has_room => {
                let loads = (1..=num.min(num_free)).map(|num| Action::Load(who, num));
                actions.extend(loads);
            }
            Phase::Ready if has_room && NUM_BLOCKS - request.table.len() <= num_free => {
                actions.push(Action::Compute(who));
            }
            Phase::Done if has_room => actions.push(Action::StoreRest(who)),
            _ => {}
        }
        actions.push(Action::Finish(who));
    }

    fn report_actions(&self, at: usize, actions: &mut Vec<Action>) {
        let flight = &self.flights[at];
        for rank in (0..self.options.num_ranks).filter(|&rank| !flight.reported[rank]) {
            actions.push(Action::Report(at, rank, Copied::Well));
            if self.num_faults > 0 {
                actions.push(Action::Report(at, rank, Copied::Failed));
                if flight.keys.len() > 1 {
                    actions.push(Action::Report(at, rank, Copied::FailedFirst));
                }
            }
        }
    }

    fn submit(&mut self, who: usize) {
        self.scheduler.add(&who.to_string(), &hashes(who)).unwrap();
        self.requests[who] =
            Some(Request { phase: Phase::Asking, table: Vec::new(), num_reported: 0 });
    }

    fn ask(&mut self, who: usize, may_wait: bool) {
        let (name, max_tokens) = (who.to_string(), NUM_BLOCKS * BLOCK_SIZE);
        let found = if may_wait {
            self.scheduler.lookup_below(&name, 0, max_tokens)
        } else {
            self.scheduler.lookup(&name, 0, max_tokens)
        };
        let request = self.requests[who].as_mut().unwrap();
        match found.unwrap() {
            Some(0) => request.phase = Phase::Ready,
            Some(num_tokens) => request.phase = Phase::Holding(num_tokens / BLOCK_SIZE),
            None => {}
        }
    }

    fn load(&mut self, who: usize, num_blocks: usize) -> Result<(), String> {
        let blocks: Vec<BlockId> = self.free_blocks().into_iter().take(num_blocks).collect();
        let deadline = Some(self.deadline());
        let job = self.scheduler.load(
            &who.to_string(),
            num_blocks * BLOCK_SIZE,
            std::slice::from_ref(&blocks),
            deadline,
        );
        let request = self.requests[who].as_mut().unwrap();
        let job = match job {
            Err(Error::State(_)) if self.num_damages < self.options.num_damages => {
                request.phase = Phase::Asking;
                return Ok(());
            }
            job => job.unwrap(),
        };
        (request.phase, request.table) = (Phase::Loading(job.job_id), blocks);
        self.begin_load(who, &job)
    }

    fn compute(&mut self, who: usize) -> Result<(), String> {
        let mut free = self.free_blocks().into_iter();
        let request = self.requests[who].as_mut().unwrap();
        for at in request.table.len()..NUM_BLOCKS {
            let block = free.next().unwrap();
            request.table.push(block);
            let content = Content::of(name(who, at));
            self.device.iter_mut().for_each(|device| device[block.index()] = content);
        }
        request.phase = Phase::Done;
        self.store(who)
    }

    fn store(&mut self, who: usize) -> Result<(), String> {
        let deadline = Some(self.deadline());
        let request = self.requests[who].as_mut().unwrap();
        let new_blocks = request.table[request.num_reported..].to_vec();
        request.num_reported = request.table.len();
        let progress = Progress {
            request_id: &who.to_string(),
            num_computed_tokens: NUM_BLOCKS * BLOCK_SIZE,
            new_blocks: &[&new_blocks],
        };
        match self.scheduler.store(std::iter::once(progress), deadline).unwrap() {
            Some(job) => self.begin_store(&job),
            None => Ok(()),
        }
    }

    pub(super) fn finish(&mut self, who: usize) {
        self.scheduler.finish(&who.to_string()).unwrap();
        self.requests[who] = None;
    }

    /// Jobs become late in the order of their ids.
    #[expect(clippy::cast_precision_loss, reason = "few jobs begin")]
    fn deadline(&self) -> f64 {
        (self.scheduler.num_jobs + 1) as f64
    }

    fn move_blocks(&mut self, is_demote: bool) -> Result<(), String> {
        let deadline = Some(self.deadline());
        let job: Option<TierJob> = if is_demote {
            self.scheduler.demote(usize::MAX, deadline).unwrap()
        } else {
            self.scheduler.promote(usize::MAX, deadline).unwrap()
        };
        job.map_or(Ok(()), |job| self.begin_tier_job(&job))
    }

    /// Jobs up to `at` are late, and the requests whose loads they are fail.
    fn expire(&mut self, at: usize) -> Result<(), String> {
        #[expect(clippy::cast_precision_loss, reason = "few jobs begin")]
        let now = self.flights[at].job_id.0 as f64 + 0.5;
        let late = self.scheduler.expire(now).unwrap();
        let due: Vec<JobId> = self.flights[..=at]
            .iter()
            .filter(|flight| !flight.is_late)
            .map(|flight| flight.job_id)
            .collect();
        if late != due {
            return Err(format!("{late:?} are late, {due:?} are due"));
        }
        self.flights[..=at].iter_mut().for_each(|flight| flight.is_late = true);
        for job_id in late {
            self.fail_load(job_id);
        }
        Ok(())
    }

    /// The request fails whose load this is, if it is one.
    pub(super) fn fail_load(&mut self, job_id: JobId) {
        let is_its_own = |request: &Option<Request>| {
            request.as_ref().is_some_and(|request| request.phase == Phase::Loading(job_id))
        };
        if let Some(who) = self.requests.iter().position(is_its_own) {
            self.finish(who);
        }
    }

    fn reset(&mut self) {
        self.scheduler.reset().unwrap();
        self.flights.iter_mut().for_each(|flight| flight.is_fenced = true);
        for memory in self.host.iter_mut().chain(&mut self.disk) {
            memory.iter_mut().for_each(Content::become_old);
        }
        for (_, content) in self.image.iter_mut().flatten() {
            content.become_old();
        }
        for request in self.requests.iter_mut().flatten() {
            if matches!(request.phase, Phase::Holding(_)) {
                request.phase = Phase::Asking;
            }
        }
    }
}

impl explorer::World for World {
    type Action = Action;

    fn actions(&self) -> Vec<Action> {
        let mut actions = Vec::new();
        let Options { num_disk, num_jobs, can_expire, can_sleep, can_stop, .. } = self.options;
        if self.num_resets > 0 {
            actions.push(Action::Reset);
        }
        if self.is_asleep() {
            actions.push(Action::Wake);
            return actions;
        }
        (0..self.requests.len()).for_each(|who| self.request_actions(who, &mut actions));
        for at in 0..self.flights.len() {
            self.report_actions(at, &mut actions);
            if can_expire && !self.flights[at].is_late {
                actions.push(Action::Expire(at));
            }
        }
        if num_disk > 0 {
            if self.flights.len() < num_jobs {
                actions.extend([Action::Demote, Action::Promote]);
            }
            let is_on = self.scheduler.disk_mode() == Some(DiskMode::On);
            actions.push(Action::SetDisk(if is_on { DiskMode::Off } else { DiskMode::On }));
        }
        if can_stop && !self.flights.is_empty() {
            actions.push(Action::StopMovers);
        }
        if can_sleep && self.flights.is_empty() {
            actions.push(Action::Sleep);
        }
        if self.num_damages > 0 {
            actions.extend(self.damageable().map(Action::Damage));
        }
        actions
    }

    fn apply(&mut self, action: Action) -> Result<(), String> {
        match action {
            Action::Submit(who) => self.submit(who),
            Action::Ask(who) => self.ask(who, true),
            Action::AskHost(who) => self.ask(who, false),
            Action::Load(who, num_blocks) => self.load(who, num_blocks)?,
            Action::Compute(who) => self.compute(who)?,
            Action::StoreRest(who) => self.store(who)?,
            Action::Finish(who) => self.finish(who),
            Action::Demote => self.move_blocks(true)?,
            Action::Promote => self.move_blocks(false)?,
            Action::SetDisk(mode) => self.scheduler.set_disk(mode).unwrap(),
            Action::Report(at, rank, copied) => {
                self.num_faults -= u8::from(copied != Copied::Well);
                self.report(at, rank, copied)?;
            }
            Action::Expire(at) => self.expire(at)?,
            Action::StopMovers => self.stop_movers()?,
            Action::Reset => {
                self.num_resets -= 1;
                self.reset();
            }
            Action::Sleep => self.sleep()?,
            Action::Wake => self.wake()?,
            Action::Damage(slot) => {
                self.num_damages -= 1;
                self.host[0][slot] = Content::DAMAGED;
            }
        }
        self.check()
    }

    fn project(&self) -> Vec<u8> {
        let mut form = Form::default();
        form.scheduler(&self.scheduler);
        for request in &self.requests {
            let Some(Request { phase, table, num_reported }) = request else {
                form.put(0);
                continue;
            };
            let [kind, detail] = match phase {
                Phase::Asking => [1, 0],
                Phase::Holding(num) => [2, *num],
                Phase::Loading(job_id) => [
                    3,
                    // A load that ended failed took its request along.
                    self.flights.iter().position(|flight| flight.job_id == *job_id).unwrap(),
                ],
                Phase::Ready => [4, 0],
                Phase::Done => [5, 0],
            };
            form.put(kind);
            form.put(detail);
            form.put(*num_reported);
            form.device(table);
        }
        form.bytes.extend([self.num_faults, self.num_damages, self.num_resets]);
        self.project_memories(&mut form);
        form.bytes
    }
}
