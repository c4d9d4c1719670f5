//! A scheduler with the memories of all ranks that it accounts for.

use std::collections::{BTreeMap, BTreeSet};

use kvstow_core::error::Error;
use kvstow_core::event::Event;
use kvstow_core::group::{Group, Model};
use kvstow_core::ids::{BlockId, GroupId, JobId};
use kvstow_core::key::{BlockHash, BlockKey};
use kvstow_core::offload::{
    Admit, DiskConfig, DiskMode, EvictionPolicy, Job, JobEnd, Mode, OffloadConfig,
    OffloadScheduler, Outcome, Progress, TierJob,
};

use super::super::hashes;
use super::super::offload::chain;
use super::Op;

/// Tokens per hash.
const BLOCK_SIZE: usize = 2;
/// Time until a job is late.
const PATIENCE: f64 = 0.5;

/// The KV of what a hash names, in a group and an epoch.
type Content = (usize, u16, u32);

/// What a place of a memory holds.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Held {
    Nothing,
    Damaged,
    Whole(Content),
}

/// One of a rank's two memories.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Memory {
    Host,
    Disk,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct WorldOptions {
    pub(super) world_size: usize,
    pub(super) mode: Mode,
    pub(super) blocks_per_slot: usize,
    pub(super) policy: EvictionPolicy,
    pub(super) disk_policy: EvictionPolicy,
    pub(super) admit: Admit,
    pub(super) num_host: usize,
    pub(super) num_disk: usize,
    pub(super) max_in_flight: usize,
    pub(super) min_promote_tokens: usize,
    /// Whether a shared store is below the host instead of a disk.
    pub(super) is_shared: bool,
}

struct Request {
    serial: usize,
    names: Vec<u16>,
    /// Whether its lookup has not answered yet.
    is_waiting: bool,
    /// Local and found tokens of a lookup whose load has not begun.
    held: Option<(usize, usize)>,
    is_loading: bool,
    computed: usize,
    /// Per group; null where the group skips a block.
    tables: Vec<Vec<BlockId>>,
    num_reported: Vec<usize>,
}

/// What a job copies.
#[derive(Clone)]
enum Copies {
    Store(Job),
    /// With the request, its serial and its tokens after the load.
    Load(Job, usize, usize, usize),
    Demote(TierJob),
    Promote(TierJob),
}

struct Flight {
    job_id: JobId,
    copies: Copies,
    /// By rank: the outcome of each block, once the copy took place.
    copied: Vec<Option<Vec<bool>>>,
    reported: Vec<bool>,
    is_late: bool,
    is_fenced: bool,
    /// The epoch at its plan. A shared store keeps the blocks of epochs apart.
    epoch: u32,
}

pub(super) struct World {
    model: Model,
    options: WorldOptions,
    pub(super) scheduler: OffloadScheduler,
    /// By device block. No id is used twice.
    device: BTreeMap<BlockId, Content>,
    num_device: u32,
    /// By rank and place.
    host: Vec<Vec<Held>>,
    disk: Vec<Vec<Held>>,
    /// The shared store, by rank: the places of each block.
    store: Vec<BTreeMap<(BlockKey, u32), Vec<Held>>>,
    /// The index file: what was last written to a disk slot.
    records: Vec<Option<(BlockKey, Option<BlockHash>)>>,
    requests: BTreeMap<usize, Request>,
    num_admitted: usize,
    flights: Vec<Flight>,
    /// Jobs of the disk tier that went on when all others ended.
    was_kept: BTreeSet<JobId>,
    /// Lazy mode: computed blocks, each with its key.
    candidates: Vec<(BlockId, BlockKey)>,
    epoch: u32,
    now: f64,
    pub(super) num_loaded: usize,
    /// The keys that the disk's events report as found.
    on_disk: BTreeSet<BlockKey>,
}

impl Flight {
    fn is_of_disk(&self) -> bool {
        matches!(self.copies, Copies::Demote(_) | Copies::Promote(_))
    }
}

impl World {
    pub(super) fn new(groups: Vec<Group>, options: WorldOptions) -> Self {
        let (num_host, num_disk) = (
            options.num_host * options.blocks_per_slot,
            options.num_disk * options.blocks_per_slot,
        );
        let mut world = Self {
            scheduler: Self::scheduler(&groups, &options),
            model: Model::new(groups).unwrap(),
            options,
            device: BTreeMap::new(),
            num_device: 0,
            host: vec![vec![Held::Nothing; num_host]; options.world_size],
            disk: vec![vec![Held::Nothing; num_disk]; options.world_size],
            store: vec![BTreeMap::new(); options.world_size],
            records: vec![None; options.num_disk],
            requests: BTreeMap::new(),
            num_admitted: 0,
            flights: Vec::new(),
            was_kept: BTreeSet::new(),
            candidates: Vec::new(),
            epoch: 0,
            now: 0.0,
            num_loaded: 0,
            on_disk: BTreeSet::new(),
        };
        assert_eq!(world.scheduler.disk_mode(), Some(DiskMode::Off));
        world.scheduler.set_disk(DiskMode::On).unwrap();
        world
    }

    fn scheduler(groups: &[Group], options: &WorldOptions) -> OffloadScheduler {
        let disk = DiskConfig {
            policy: options.disk_policy,
            admit: options.admit,
            max_in_flight_blocks: options.max_in_flight,
            min_promote_tokens: options.min_promote_tokens,
            ..DiskConfig::new(options.num_disk)
        };
        let config = OffloadConfig {
            world_size: options.world_size,
            mode: options.mode,
            blocks_per_slot: options.blocks_per_slot,
            policy: options.policy,
            events: true,
            disk: Some(disk),
            ..OffloadConfig::new(options.num_host, groups.to_vec())
        };
        OffloadScheduler::new(config).unwrap()
    }

    pub(super) fn apply(&mut self, op: &Op) {
        match *op {
            Op::Submit(who, which, len) => self.submit(who, which, len),
            Op::Serve(who, which, len) => self.serve(who, which, len),
            Op::Settle => self.settle(),
            Op::Ask(who, may_wait) => self.ask(who, may_wait),
            Op::AskBehind(who, may_wait, num_local, is_held) => {
                self.ask_behind(who, may_wait, num_local, is_held);
            }
            Op::Accept(who, num) => self.accept(who, num),
            Op::Release(who) => self.release(who),
            Op::Lower(who) => {
                if self.requests.contains_key(&who) {
                    self.scheduler.lower_priority(&who.to_string()).unwrap();
                }
            }
            Op::Clear => self.clear(),
            Op::Resume => self.resume(),
            Op::Run(who, tokens, max_blocks) => self.run(who, tokens, max_blocks),
            Op::Leave(who) => self.leave(who),
            Op::Restart(who) => self.restart(who),
            Op::Truncate(who, num_hashes) => self.truncate(who, num_hashes),
            Op::StoreEvictable(num_blocks) => self.store_evictable(num_blocks),
            Op::Demote(max_blocks) => self.demote(max_blocks),
            Op::Promote(max_blocks) => _ = self.promote(max_blocks),
            Op::Copy(which, rank) => self.copy(which, rank),
            Op::Report(which, rank, how) => self.report(which, rank, how),
            Op::Tick => self.tick(),
            Op::EndAll(running) => self.end_all(running),
            Op::Reset => self.reset(),
            Op::SetDisk(mode) => self.scheduler.set_disk(mode).unwrap(),
            Op::Adopt(subset) => self.adopt(subset),
            Op::Claim(who, lies, max_blocks) => self.claim(who, lies, max_blocks),
            Op::LoseShared(rank, which, is_gone) => self.lose_shared(rank, which, is_gone),
            Op::RotHost(rank, place) => rot(&mut self.host, rank, place),
            Op::RotDisk(rank, place) => rot(&mut self.disk, rank, place),
            Op::Kill => self.kill(),
        }
    }

    pub(super) fn check(&mut self) {
        self.scheduler.check().unwrap();
        self.read_events();
        let num_resident = self.scheduler.disk_stats().disk_resident_blocks;
        let num_claims = self.scheduler.num_claims();
        let num_reported = self.on_disk.len();
        assert_eq!(num_reported + num_claims, num_resident, "events report what the disk holds");
        let (mut num_demoting, mut num_promoting) = (0, 0);
        for flight in &self.flights {
            match &flight.copies {
                Copies::Demote(job) => num_demoting += job.keys.len(),
                Copies::Promote(job) => num_promoting += job.keys.len(),
                _ => {}
            }
        }
        let stats = self.scheduler.disk_stats();
        assert_eq!((stats.demoting_blocks, stats.promoting_blocks), (num_demoting, num_promoting));
        assert!(num_demoting <= self.options.max_in_flight, "too many slots in demotes");
        assert!(num_promoting <= self.options.max_in_flight, "too many slots in promotes");
        let num_late = self.flights.iter().filter(|flight| flight.is_late).count();
        assert_eq!(self.scheduler.stats().quarantined_jobs, num_late);
        assert_eq!(self.scheduler.stats().jobs_in_flight, self.flights.len() - num_late);
        self.check_unsaved();
    }

    /// What only the host has is there on every rank, and no job uses the disk slots for it.
    fn check_unsaved(&self) {
        let found = self.scheduler.unsaved(usize::MAX);
        let mut in_use: BTreeSet<u32> = BTreeSet::new();
        for flight in &self.flights {
            if let Copies::Demote(job) | Copies::Promote(job) = &flight.copies {
                in_use.extend(&job.disk_slots);
            }
        }
        let per_slot = self.options.blocks_per_slot;
        for ((&host, &disk), key) in found.host_slots.iter().zip(&found.disk_slots).zip(&found.keys)
        {
            assert!(in_use.insert(disk), "a disk slot for two blocks");
            assert!(!self.on_disk.contains(key));
            let last = (host as usize + 1) * per_slot - 1;
            let name = u16::from_be_bytes([key.hash[6], key.hash[7]]);
            let whole = Held::Whole((usize::from(key.group.0), name, self.epoch));
            for memory in &self.host {
                assert!([whole, Held::Damaged].contains(&memory[last]), "{:?}", memory[last]);
            }
        }
    }

    /// Follows what the disk's events report.
    fn read_events(&mut self) {
        for event in self.scheduler.take_disk_events() {
            match event {
                Event::Stored(stored) => {
                    for hash in stored.hashes {
                        let is_new = self.on_disk.insert(BlockKey { hash, group: stored.group });
                        assert!(is_new, "a key is on the disk once");
                    }
                }
                Event::Removed { hashes, group } => {
                    for hash in hashes {
                        assert!(self.on_disk.remove(&BlockKey { hash, group }));
                    }
                }
                Event::Cleared => self.on_disk.clear(),
            }
        }
    }

    /// Serves each chain once more, waits for the disk, and ends everything.
    pub(super) fn wind_up(&mut self) {
        self.settle();
        (0..4).for_each(|who| self.leave(who));
        self.scheduler.set_disk(DiskMode::On).unwrap();
        for which in 0..4 {
            self.submit(which, which, 8);
            let mut num_asked = 0;
            self.claim(which, 0, usize::MAX);
            while self.requests[&which].is_waiting {
                self.promote(usize::MAX);
                self.settle();
                self.ask(which, true);
                self.check();
                num_asked += 1;
                assert!(num_asked < 30, "a request waits for ever");
            }
            self.settle();
            self.check();
            self.leave(which);
            self.settle();
        }
        self.check();
        let stats = self.scheduler.disk_stats();
        assert_eq!((stats.demoting_blocks, stats.promoting_blocks), (0, 0));
        assert_eq!(self.scheduler.used_slots().count(), self.scheduler.num_resident());
    }

    /// Ends every job well.
    fn settle(&mut self) {
        while !self.flights.is_empty() {
            for rank in 0..self.options.world_size {
                self.report(0, rank, 255);
            }
        }
    }

    // -- requests ------------------------------------------------------------------------------

    fn submit(&mut self, who: usize, which: usize, len: usize) {
        if self.requests.contains_key(&who) {
            return;
        }
        let names = chain(which, len);
        self.scheduler.add(&who.to_string(), &hashes(&names)).unwrap();
        self.insert(who, names);
        self.ask(who, true);
    }

    /// Serves a request without faults, if none of this name is there. The disk gets its blocks.
    fn serve(&mut self, who: usize, which: usize, len: usize) {
        if self.requests.contains_key(&who) {
            return;
        }
        self.submit(who, which, len);
        self.promote(usize::MAX);
        self.settle();
        self.ask(who, false);
        self.settle();
        self.run(who, len * BLOCK_SIZE, usize::MAX);
        self.store_evictable(usize::MAX);
        self.settle();
        self.demote(usize::MAX);
        self.settle();
        self.leave(who);
    }

    fn insert(&mut self, who: usize, names: Vec<u16>) {
        self.num_admitted += 1;
        let num_groups = self.model.groups().len();
        let request = Request {
            serial: self.num_admitted,
            names,
            is_waiting: true,
            held: None,
            is_loading: false,
            computed: 0,
            tables: vec![Vec::new(); num_groups],
            num_reported: vec![0; num_groups],
        };
        self.requests.insert(who, request);
    }

    fn ask(&mut self, who: usize, may_wait: bool) {
        self.ask_behind(who, may_wait, 0, false);
    }

    /// Asks behind a local hit of `num_local` units, and loads what was found unless it `is_held`.
    fn ask_behind(&mut self, who: usize, may_wait: bool, num_local: usize, is_held: bool) {
        let Some(request) = self.requests.get(&who).filter(|request| request.is_waiting) else {
            return;
        };
        let (id, max_tokens) = (who.to_string(), request.names.len() * BLOCK_SIZE);
        let unit = self.model.hit_block_size();
        let local = num_local.min(max_tokens / unit) * unit;
        let (on_host, in_both) = self.scheduler.tier_hits(&id, local, max_tokens).unwrap();
        let found = if may_wait {
            self.scheduler.lookup_below(&id, local, max_tokens)
        } else {
            self.scheduler.lookup(&id, local, max_tokens)
        };
        let found = found.unwrap();
        assert!(!may_wait || in_both == on_host || found.is_none(), "it waits for the disk");
        let Some(found) = found else { return };
        assert_eq!(found + local, on_host);
        let request = self.requests.get_mut(&who).unwrap();
        request.is_waiting = false;
        if is_held && found > 0 {
            request.held = Some((local, found));
        } else {
            self.load(who, local, found);
        }
    }

    /// Loads a part of what a lookup has found, and computes the rest.
    fn accept(&mut self, who: usize, num: usize) {
        let Some(request) = self.requests.get_mut(&who) else { return };
        if let Some((local, found)) = request.held.take() {
            let unit = self.model.hit_block_size();
            self.load(who, local, (num * unit).min(found));
        }
    }

    fn release(&mut self, who: usize) {
        let Some(request) = self.requests.get_mut(&who) else { return };
        if let Some((local, _)) = request.held.take() {
            self.scheduler.release(&who.to_string()).unwrap();
            self.load(who, local, 0);
        }
    }

    /// Takes blocks for a local hit and a load, and begins the load.
    fn load(&mut self, who: usize, local: usize, num_tokens: usize) {
        let mut num_tokens = num_tokens;
        if num_tokens > 0 {
            let mut ids = Vec::new();
            for group in self.model.groups() {
                let end = local + num_tokens;
                let first = group.num_skipped_blocks(end).max(local / group.block_size);
                let num = end / group.block_size - first;
                ids.push((self.num_device + 1..).take(num).map(BlockId).collect::<Vec<_>>());
                self.num_device += u32::try_from(num).unwrap();
            }
            let deadline = Some(self.now + PATIENCE);
            match self.scheduler.load(&who.to_string(), num_tokens, &ids, deadline) {
                Ok(job) => {
                    self.fill(who, local, local + num_tokens, Some(&ids));
                    let request = self.requests.get_mut(&who).unwrap();
                    request.is_loading = true;
                    let serial = request.serial;
                    let copies = Copies::Load(job, who, serial, local + num_tokens);
                    return self.begin(copies_id(&copies), copies);
                }
                // Lost since the lookup, or a window before an earlier end.
                Err(Error::State(_)) => num_tokens = 0,
                Err(error) => panic!("{error}"),
            }
            self.scheduler.release(&who.to_string()).unwrap();
        }
        self.fill(who, local, local + num_tokens, None);
        self.requests.get_mut(&who).unwrap().computed = local;
    }

    /// Appends blocks to a request's tables: local ones with their content, and those of a load.
    fn fill(&mut self, who: usize, local: usize, end: usize, loaded: Option<&[Vec<BlockId>]>) {
        let names = self.requests[&who].names.clone();
        for group in 0..self.model.groups().len() {
            let attention = self.model.groups()[group];
            let num_null = attention.num_skipped_blocks(end);
            let mut table = Vec::new();
            for at in 0..local / attention.block_size {
                if at < num_null {
                    table.push(BlockId::NULL);
                    continue;
                }
                self.num_device += 1;
                let id = BlockId(self.num_device);
                let content = self.content(group, at, &names);
                self.device.insert(id, content);
                table.push(id);
            }
            if let Some(loaded) = loaded {
                let num = end / attention.block_size - loaded[group].len();
                table.resize(num.max(table.len()), BlockId::NULL);
                table.extend(&loaded[group]);
            }
            self.requests.get_mut(&who).unwrap().tables[group] = table;
        }
    }

    /// The content of block `index` of a group, now.
    fn content(&self, group: usize, index: usize, names: &[u16]) -> Content {
        let per_block = self.model.groups()[group].block_size / BLOCK_SIZE;
        (group, names[(index + 1) * per_block - 1], self.epoch)
    }

    fn run(&mut self, who: usize, tokens: usize, max_blocks: usize) {
        let Some(mut request) = self.requests.remove(&who) else { return };
        let num_groups = self.model.groups().len();
        if !request.is_waiting && !request.is_loading && request.held.is_none() {
            let after = (request.computed + tokens).min(request.names.len() * BLOCK_SIZE);
            for group in 0..num_groups {
                let size = self.model.groups()[group].block_size;
                while (request.tables[group].len() + 1) * size <= after {
                    self.num_device += 1;
                    let id = BlockId(self.num_device);
                    let index = request.tables[group].len();
                    let content = self.content(group, index, &request.names);
                    self.device.insert(id, content);
                    let hash = hashes(&[content.1]).as_slice()[0];
                    let group_id = GroupId(u16::try_from(group).unwrap());
                    self.candidates.push((id, BlockKey { hash, group: group_id }));
                    request.tables[group].push(id);
                }
            }
            request.computed = after;
            let new: Vec<&[BlockId]> =
                (0..num_groups).map(|at| &request.tables[at][request.num_reported[at]..]).collect();
            let request_id = who.to_string();
            let progress =
                Progress { request_id: &request_id, num_computed_tokens: after, new_blocks: &new };
            let deadline = Some(self.now + PATIENCE);
            let job = self.scheduler.store_at_most(max_blocks, std::iter::once(progress), deadline);
            request.num_reported = request.tables.iter().map(Vec::len).collect();
            self.begin_store(job.unwrap());
        }
        self.requests.insert(who, request);
    }

    fn store_evictable(&mut self, num_blocks: usize) {
        if self.options.mode == Mode::Lazy {
            let first = self.candidates.len().saturating_sub(num_blocks);
            let candidates = self.candidates.split_off(first).into_iter().rev();
            let deadline = Some(self.now + PATIENCE);
            let job = self.scheduler.store_evictable(candidates, deadline).unwrap();
            self.begin_store(job);
        }
    }

    fn leave(&mut self, who: usize) {
        if self.requests.remove(&who).is_some() {
            self.scheduler.finish(&who.to_string()).unwrap();
        }
    }

    fn restart(&mut self, who: usize) {
        if let Some(request) = self.requests.remove(&who) {
            self.scheduler.restart(&who.to_string()).unwrap();
            self.insert(who, request.names);
        }
    }

    /// Only a request that has nothing yet, because a table shrinks with its hashes.
    fn truncate(&mut self, who: usize, num_hashes: usize) {
        let Some(request) = self.requests.get_mut(&who).filter(|request| request.is_waiting) else {
            return;
        };
        let num_hashes = num_hashes.min(request.names.len());
        request.names.truncate(num_hashes);
        self.scheduler.truncate(&who.to_string(), num_hashes).unwrap();
    }

    // -- jobs ----------------------------------------------------------------------------------

    fn begin_store(&mut self, job: Option<Job>) {
        if let Some(job) = job {
            self.begin(job.job_id, Copies::Store(job));
        }
    }

    fn demote(&mut self, max_blocks: usize) {
        let job = self.scheduler.demote(max_blocks, Some(self.now + PATIENCE)).unwrap();
        if let Some(job) = job {
            assert!((1..=max_blocks).contains(&job.keys.len()));
            assert_eq!(self.scheduler.disk_mode(), Some(DiskMode::On));
            self.begin(job.job_id, Copies::Demote(job));
        }
    }

    fn promote(&mut self, max_blocks: usize) -> bool {
        let job = self.scheduler.promote(max_blocks, Some(self.now + PATIENCE)).unwrap();
        let is_planned = job.is_some();
        if let Some(job) = job {
            assert!((1..=max_blocks).contains(&job.keys.len()));
            assert_ne!(self.scheduler.disk_mode(), Some(DiskMode::Off));
            self.begin(job.job_id, Copies::Promote(job));
        }
        is_planned
    }

    fn begin(&mut self, job_id: JobId, copies: Copies) {
        let targets = |copies: &Copies| match copies {
            Copies::Store(job) => (Memory::Host, job.host_slots.clone()),
            Copies::Load(..) => (Memory::Host, Vec::new()),
            Copies::Demote(job) => (Memory::Disk, self.places(&job.disk_slots)),
            Copies::Promote(job) => (Memory::Host, self.places(&job.host_slots)),
        };
        let (memory, own) = targets(&copies);
        for flight in &self.flights {
            let (other_memory, other) = targets(&flight.copies);
            let is_shared = memory == other_memory && own.iter().any(|place| other.contains(place));
            assert!(!is_shared, "two jobs in flight write one slot");
        }
        let flight = Flight {
            job_id,
            copies,
            copied: vec![None; self.options.world_size],
            reported: vec![false; self.options.world_size],
            is_late: false,
            is_fenced: false,
            epoch: self.epoch,
        };
        self.flights.push(flight);
    }

    /// The places of whole slots.
    fn places(&self, slots: &[u32]) -> Vec<u32> {
        let per_slot = u32::try_from(self.options.blocks_per_slot).unwrap();
        slots.iter().flat_map(|slot| slot * per_slot..(slot + 1) * per_slot).collect()
    }

    /// A rank's copy takes place, unless it has.
    fn copy(&mut self, which: usize, rank: usize) {
        let rank = rank % self.options.world_size;
        let num_flights = self.flights.len();
        if num_flights == 0 || self.flights[which % num_flights].copied[rank].is_some() {
            return;
        }
        let flight = &self.flights[which % num_flights];
        let epoch = flight.epoch;
        let are_ok = match flight.copies.clone() {
            Copies::Store(job) => {
                for (block, &place) in job.block_ids.iter().zip(&job.host_slots) {
                    self.host[rank][place as usize] = Held::Whole(self.device[block]);
                }
                vec![true; job.block_ids.len()]
            }
            Copies::Load(job, ..) => self.copy_load(which % num_flights, rank, &job),
            Copies::Demote(job) if self.options.is_shared => self.put_shared(rank, epoch, &job),
            Copies::Promote(job) if self.options.is_shared => self.get_shared(rank, epoch, &job),
            Copies::Demote(job) => {
                for (at, &slot) in job.disk_slots.iter().enumerate() {
                    self.records[slot as usize] = Some((job.keys[at], job.parents[at]));
                }
                let (host, disk) = (self.places(&job.host_slots), self.places(&job.disk_slots));
                let Self { host: from, disk: to, .. } = self;
                copy_places(&from[rank], &host, &mut to[rank], &disk, job.keys.len())
            }
            Copies::Promote(job) => {
                let (host, disk) = (self.places(&job.host_slots), self.places(&job.disk_slots));
                let Self { host: to, disk: from, .. } = self;
                copy_places(&from[rank], &disk, &mut to[rank], &host, job.keys.len())
            }
        };
        self.flights[which % num_flights].copied[rank] = Some(are_ok);
    }

    fn put_shared(&mut self, rank: usize, epoch: u32, job: &TierJob) -> Vec<bool> {
        let per_slot = self.options.blocks_per_slot;
        for (&slot, &key) in job.host_slots.iter().zip(&job.keys) {
            let held = self.host[rank][slot as usize * per_slot..][..per_slot].to_vec();
            self.store[rank].insert((key, epoch), held);
        }
        vec![true; job.keys.len()]
    }

    /// A block that is not there, or that is damaged, fails.
    fn get_shared(&mut self, rank: usize, epoch: u32, job: &TierJob) -> Vec<bool> {
        let per_slot = self.options.blocks_per_slot;
        let mut are_ok = Vec::new();
        for (&slot, &key) in job.host_slots.iter().zip(&job.keys) {
            let target = &mut self.host[rank][slot as usize * per_slot..][..per_slot];
            let held = self.store[rank].get(&(key, epoch));
            target.fill(Held::Nothing);
            if let Some(held) = held {
                target.copy_from_slice(held);
            }
            are_ok.push(held.is_some_and(|held| !held.contains(&Held::Damaged)));
        }
        are_ok
    }

    /// The blocks that a load delivers must be those of its request, unless its result is dropped.
    fn copy_load(&mut self, which: usize, rank: usize, job: &Job) -> Vec<bool> {
        let Flight { copies, is_late, is_fenced, .. } = &self.flights[which];
        let Copies::Load(_, who, serial, num_tokens) = copies else { unreachable!() };
        let request = self.requests.get(who).filter(|request| request.serial == *serial);
        let mut are_ok = Vec::new();
        for (group, ends) in job.offsets.windows(2).enumerate() {
            let attention = self.model.groups()[group];
            let first = *num_tokens / attention.block_size - (ends[1] - ends[0]);
            for (at, &place) in job.host_slots[ends[0]..ends[1]].iter().enumerate() {
                let held = self.host[rank][place as usize];
                are_ok.push(held != Held::Damaged);
                if let Some(request) = request.filter(|_| !is_late && !is_fenced)
                    && held != Held::Damaged
                {
                    let content = self.content(group, first + at, &request.names);
                    assert_eq!(held, Held::Whole(content), "a load delivers another block");
                    self.num_loaded += 1;
                }
            }
        }
        are_ok
    }

    /// A rank reports a job, if it has not. `how` is odd for a fault. A fault of the first kind is
    /// of some blocks, one of the second kind of all, and the copy may not have taken place.
    pub(super) fn report(&mut self, which: usize, rank: usize, how: u8) {
        let rank = rank % self.options.world_size;
        if self.flights.is_empty() {
            return;
        }
        let which = which % self.flights.len();
        if self.flights[which].reported[rank] {
            return;
        }
        let is_fault = how < 32;
        if !(is_fault && how.is_multiple_of(3)) {
            self.copy(which, rank);
        }
        let flight = &mut self.flights[which];
        let is_tier = matches!(flight.copies, Copies::Demote(_) | Copies::Promote(_));
        let outcome = match flight.copied[rank].clone() {
            Some(are_ok) if !is_fault => Outcome::Blocks(are_ok),
            // A load's blocks are False only if the host's bytes are damaged.
            Some(are_ok) if is_tier && how.is_multiple_of(2) => {
                let fails = |at: usize| (usize::from(how) >> (at % 6)) % 2 == 1;
                let blocks = are_ok.iter().enumerate();
                Outcome::Blocks(blocks.map(|(at, &is_ok)| is_ok && !fails(at)).collect())
            }
            _ => Outcome::Whole(false),
        };
        flight.reported[rank] = true;
        // The content of a target that failed is undefined.
        if let (Outcome::Whole(false), Copies::Store(job)) = (&outcome, &flight.copies) {
            for &place in &job.host_slots {
                self.host[rank][place as usize] = Held::Nothing;
            }
        }
        let (job_id, copies) = (flight.job_id, flight.copies.clone());
        self.spoil(&copies, rank, &outcome);
        let end = self.scheduler.complete(job_id, rank, outcome.clone()).unwrap();
        let is_ended = !self.flights[which].reported.contains(&false);
        assert_eq!(end.is_some(), is_ended);
        let again = self.scheduler.complete(job_id, rank, true);
        assert!(
            again.is_err() || (is_ended && self.was_kept.contains(&job_id)),
            "a rank reports once"
        );
        if let Some(end) = end {
            let flight = self.flights.remove(which);
            assert_eq!(end.is_late, flight.is_late);
            assert!(!end.is_ok || !(flight.is_late || flight.is_fenced));
            self.ended(&flight, &end);
            self.check_failed(&copies, &outcome, flight.is_fenced || flight.is_late);
        }
    }

    /// No failed block is on the disk at the end of its job.
    fn check_failed(&mut self, copies: &Copies, last: &Outcome, is_dropped: bool) {
        self.read_events();
        let (Copies::Demote(job) | Copies::Promote(job)) = copies else { return };
        for (at, key) in job.keys.iter().enumerate().filter(|_| !is_dropped) {
            let is_ok = match last {
                Outcome::Whole(is_ok) => *is_ok,
                Outcome::Blocks(are_ok) => are_ok[at],
            };
            assert!(is_ok || !self.on_disk.contains(key), "a failed block stays on the disk");
        }
    }

    /// The targets of a tier job's failed blocks hold nothing that counts.
    fn spoil(&mut self, copies: &Copies, rank: usize, outcome: &Outcome) {
        let (memory, slots) = match copies {
            Copies::Demote(job) => (&mut self.disk[rank], &job.disk_slots),
            Copies::Promote(job) => (&mut self.host[rank], &job.host_slots),
            _ => return,
        };
        let per_slot = self.options.blocks_per_slot;
        for (at, &slot) in slots.iter().enumerate() {
            let is_ok = match outcome {
                Outcome::Whole(is_ok) => *is_ok,
                Outcome::Blocks(are_ok) => are_ok[at],
            };
            if !is_ok {
                memory[slot as usize * per_slot..][..per_slot].fill(Held::Nothing);
            }
        }
    }

    fn ended(&mut self, flight: &Flight, end: &JobEnd) {
        if let Copies::Load(job, who, serial, num_tokens) = &flight.copies {
            assert_eq!(end.block_ids, job.block_ids);
            let is_other = |request: &Request| request.serial != *serial;
            if self.requests.get(who).is_none_or(is_other) || flight.is_late {
                return;
            }
            if !end.is_ok {
                return self.leave(*who);
            }
            let names = self.requests[who].names.clone();
            for (group, ends) in job.offsets.windows(2).enumerate() {
                let size = self.model.groups()[group].block_size;
                let first = *num_tokens / size - (ends[1] - ends[0]);
                for (at, &block) in job.block_ids[ends[0]..ends[1]].iter().enumerate() {
                    self.device.insert(block, self.content(group, first + at, &names));
                }
            }
            let request = self.requests.get_mut(who).unwrap();
            (request.is_loading, request.computed) = (false, *num_tokens);
        } else if !matches!(flight.copies, Copies::Store(_)) {
            assert!(end.block_ids.is_empty());
        }
    }

    fn tick(&mut self) {
        self.now += 1.0;
        for job_id in self.scheduler.expire(self.now).unwrap() {
            let flight = self.flights.iter_mut().find(|flight| flight.job_id == job_id).unwrap();
            assert!(!std::mem::replace(&mut flight.is_late, true), "a job is late once");
            if let Copies::Load(_, who, serial, _) = flight.copies
                && self.requests.get(&who).is_some_and(|request| request.serial == serial)
            {
                self.leave(who);
            }
        }
    }

    /// The movers stop: copies that did not take place never will, except those of a subset of the
    /// disk tier's jobs.
    fn end_all(&mut self, running: u64) {
        let (kept, mut flights): (Vec<Flight>, Vec<Flight>) = std::mem::take(&mut self.flights)
            .into_iter()
            .partition(|flight| flight.is_of_disk() && running >> (flight.job_id.0 % 64) & 1 == 1);
        let ids: Vec<JobId> = kept.iter().map(|flight| flight.job_id).collect();
        let ends = self.scheduler.end_all_but(&ids).unwrap();
        self.was_kept.extend(ids);
        self.flights = kept;
        assert_eq!(ends.len(), flights.len());
        flights.sort_by_key(|flight| flight.job_id);
        for (end, flight) in ends.iter().zip(&flights) {
            assert_eq!((end.job_id, end.is_ok), (flight.job_id, false));
            assert_eq!(self.scheduler.complete(end.job_id, 0, true), Ok(None), "ignored");
            self.ended(flight, end);
        }
    }

    /// The weights change. The device forgets everything.
    fn reset(&mut self) {
        self.scheduler.reset().unwrap();
        assert_eq!(self.scheduler.disk_mode(), Some(DiskMode::Off));
        assert_eq!(self.scheduler.disk_stats().disk_resident_blocks, 0);
        self.flights.iter_mut().for_each(|flight| flight.is_fenced = true);
        (0..4).for_each(|who| self.leave(who));
        let computed: Vec<BlockId> = self.candidates.drain(..).map(|(id, _)| id).collect();
        self.scheduler.invalidate(&computed).unwrap();
        self.epoch += 1;
        self.scheduler.set_disk(DiskMode::On).unwrap();
    }

    /// The tiers forget everything. What the device has is still right.
    fn clear(&mut self) {
        self.scheduler.reset().unwrap();
        self.flights.iter_mut().for_each(|flight| flight.is_fenced = true);
        self.scheduler.set_disk(DiskMode::On).unwrap();
    }

    /// Copies that did not take place never will. The host and its requests stay.
    fn resume(&mut self) {
        let snapshot = self.scheduler.snapshot().unwrap();
        self.scheduler.check().unwrap();
        self.flights.clear();
        self.was_kept.clear();
        self.candidates.clear();
        let anew = Self::scheduler(self.model.groups(), &self.options);
        self.scheduler = anew.restore(&snapshot).unwrap();
        self.on_disk.clear();
        let requests: Vec<usize> = self.requests.keys().copied().collect();
        for who in requests {
            self.restart(who);
        }
        self.adopt(u64::MAX);
        self.scheduler.set_disk(DiskMode::On).unwrap();
    }

    /// Adopts those of a subset of the disk's slots that hold one block on all ranks.
    fn adopt(&mut self, subset: u64) {
        if self.options.is_shared {
            return;
        }
        let (mut slots, mut names) = (Vec::new(), Vec::new());
        let (mut groups, mut parents) = (Vec::new(), Vec::new());
        for slot in 0..self.options.num_disk {
            let Some((key, parent)) = self.records[slot].filter(|_| subset >> slot & 1 == 1) else {
                continue;
            };
            let places = slot * self.options.blocks_per_slot..;
            let held =
                |rank: usize| &self.disk[rank][places.clone()][..self.options.blocks_per_slot];
            let is_current =
                |held: &Held| matches!(held, Held::Whole((_, _, epoch)) if *epoch == self.epoch);
            let are_same = (1..self.options.world_size).all(|rank| held(rank) == held(0));
            let Some(&Held::Whole((group, name, _))) = held(0).last() else { continue };
            let is_its_own =
                usize::from(key.group.0) == group && key.hash == hashes(&[name]).as_slice()[0];
            if are_same && is_its_own && held(0).iter().all(is_current) {
                slots.push(slot);
                names.push(name);
                groups.push(key.group);
                parents.push(parent);
            }
        }
        if subset.is_multiple_of(5) {
            parents.clear();
        }
        let num_before = self.scheduler.disk_stats().disk_resident_blocks;
        let num = self.scheduler.adopt_disk(&slots, &hashes(&names), &groups, &parents).unwrap();
        assert!(num <= slots.len());
        assert_eq!(self.scheduler.disk_stats().disk_resident_blocks, num_before + num);
    }

    /// A request asks the store what it has. Some answers are wrong.
    fn claim(&mut self, who: usize, lies: u64, max_blocks: usize) {
        let Some(request) = self.requests.get(&who).filter(|request| request.is_waiting) else {
            return;
        };
        let (id, num_tokens) = (who.to_string(), request.names.len() * BLOCK_SIZE);
        let found = self.scheduler.unclaimed(&id, 0, num_tokens, max_blocks).unwrap();
        assert!(found.keys.len() <= max_blocks);
        let own = hashes(&request.names);
        assert!(found.keys.iter().all(|key| own.as_slice().contains(&key.hash)));
        assert!(!found.keys.iter().any(|key| self.on_disk.contains(key)), "it is claimed already");
        let (mut names, mut groups, mut parents) = (Vec::new(), Vec::new(), Vec::new());
        for (at, (key, parent)) in found.keys.iter().zip(&found.parents).enumerate() {
            let is_lie = lies >> (2 * (at % 32)) & 3 == 3;
            if self.options.is_shared && self.store[0].contains_key(&(*key, self.epoch)) != is_lie {
                names.push(u16::from_be_bytes([key.hash[6], key.hash[7]]));
                groups.push(key.group);
                parents.push(*parent);
            }
        }
        let num = self.scheduler.claim(&hashes(&names), &groups, &parents).unwrap();
        assert!(num <= names.len());
        self.read_events();
        let claimed = hashes(&names);
        for (&hash, &group) in claimed.as_slice().iter().zip(&groups) {
            assert!(!self.on_disk.contains(&BlockKey { hash, group }), "a claim has no event");
        }
        if self.options.num_disk > 100 {
            let again = self.scheduler.claim(&claimed, &groups, &parents).unwrap();
            assert_eq!(again, 0, "what there is room for is claimed");
        }
    }

    /// A rank's store loses a block, or damages it.
    fn lose_shared(&mut self, rank: usize, which: usize, is_gone: bool) {
        let store = &mut self.store[rank % self.options.world_size];
        let num = store.len();
        if let Some(key) = (num > 0).then(|| *store.keys().nth(which % num).unwrap()) {
            if is_gone {
                store.remove(&key);
            } else {
                store.get_mut(&key).unwrap().fill(Held::Damaged);
            }
        }
    }

    /// Copies that did not take place never will. The host is lost, and the index is read again.
    fn kill(&mut self) {
        self.flights.clear();
        self.was_kept.clear();
        self.requests.clear();
        self.candidates.clear();
        self.host.iter_mut().for_each(|host| host.fill(Held::Nothing));
        self.scheduler = Self::scheduler(self.model.groups(), &self.options);
        self.on_disk.clear();
        self.adopt(u64::MAX);
        self.scheduler.set_disk(DiskMode::On).unwrap();
    }
}

fn copies_id(copies: &Copies) -> JobId {
    match copies {
        Copies::Store(job) | Copies::Load(job, ..) => job.job_id,
        Copies::Demote(job) | Copies::Promote(job) => job.job_id,
    }
}

fn rot(memories: &mut [Vec<Held>], rank: usize, place: usize) {
    let rank = rank % memories.len();
    let place = place % memories[rank].len();
    if memories[rank][place] != Held::Nothing {
        memories[rank][place] = Held::Damaged;
    }
}

/// Copies whole slots. A slot with a damaged place fails, as a checksum shows.
fn copy_places(
    from: &[Held],
    sources: &[u32],
    to: &mut [Held],
    targets: &[u32],
    num_slots: usize,
) -> Vec<bool> {
    let per_slot = sources.len() / num_slots;
    let mut are_ok = vec![true; num_slots];
    for (at, (&source, &target)) in sources.iter().zip(targets).enumerate() {
        to[target as usize] = from[source as usize];
        are_ok[at / per_slot] &= from[source as usize] != Held::Damaged;
    }
    are_ok
}
