//! A ledger and a scheduler with the memories that they account for.

use std::collections::{BTreeMap, BTreeSet};

use kvstow_core::group::{Attention, Group, Model};
use kvstow_core::ids::BlockId;
use kvstow_core::ledger::BlockLedger;
use kvstow_core::offload::{
    EvictionPolicy, Job, Mode, OffloadConfig, OffloadScheduler, TransferEvent,
};

use super::super::{hashes, ids};
use super::ops::{Op, Options, chain};

/// Tokens per hash, and per block where no model says otherwise.
pub(super) const BLOCK_SIZE: usize = 2;

/// What a block holds: a group's KV of what a hash names.
pub(super) type Content = (usize, u16);

pub(super) const NOTHING: Content = (usize::MAX, 0);

pub(super) struct Request {
    /// Number of this admission.
    pub(super) serial: usize,
    pub(super) names: Vec<u16>,
    pub(super) computed: usize,
    pub(super) is_loading: bool,
    /// Per group, blocks of the table that were reported to the scheduler.
    pub(super) num_reported: Vec<usize>,
}

/// A job in flight, and the content of its source.
pub(super) struct Copy {
    pub(super) job: Job,
    pub(super) contents: Vec<Content>,
    /// The request that waits for a load, its serial, and its tokens after the load.
    pub(super) loads_for: Option<(usize, usize, usize)>,
    /// Ranks, from the first, that have reported.
    pub(super) num_reported: usize,
    pub(super) has_failed: bool,
    pub(super) is_late: bool,
    /// Whether a reset came after it began. Then the tier has dropped its slots already.
    pub(super) is_fenced: bool,
}

pub(super) struct World {
    pub(super) model: Model,
    pub(super) ledger: BlockLedger,
    pub(super) scheduler: OffloadScheduler,
    pub(super) device: Vec<Content>,
    pub(super) host: Vec<Content>,
    pub(super) requests: BTreeMap<usize, Request>,
    pub(super) copies: Vec<Copy>,
    /// Contents that a store has stored, or may store, since the last reset.
    pub(super) storable: BTreeSet<Content>,
    /// Damaged places on the host, and what they held. The load that reads one finds out.
    pub(super) rotten: BTreeMap<u32, Content>,
    /// Slots that a load found damaged, and that no store has filled since.
    pub(super) damaged: BTreeSet<usize>,
    pub(super) num_admitted: usize,
    /// Those that get low priority at their admission.
    pub(super) low_priority: BTreeSet<usize>,
    pub(super) config: OffloadConfig,
    /// The most blocks of a store.
    pub(super) max_blocks: usize,
    /// The requests that have seen what a hash names, by the numbers of their admissions.
    pub(super) seen: BTreeMap<u16, BTreeSet<usize>>,
    pub(super) now: f64,
    /// Events of jobs.
    pub(super) transfers: Vec<TransferEvent>,
}

impl World {
    pub(super) fn new(num_device_blocks: usize, num_host_blocks: usize) -> Self {
        let groups = vec![Group::new(Attention::Full, BLOCK_SIZE).unwrap()];
        Self::of(groups, num_device_blocks, num_host_blocks, Options::default())
    }

    /// As [`World::new`], for every policy.
    pub(super) fn of_each_policy(num_host_blocks: usize) -> impl Iterator<Item = Self> {
        EvictionPolicy::ALL.into_iter().map(move |policy| {
            let groups = vec![Group::new(Attention::Full, BLOCK_SIZE).unwrap()];
            Self::of(groups, 32, num_host_blocks, Options { policy, ..Options::default() })
        })
    }

    pub(super) fn of(
        groups: Vec<Group>,
        num_device_blocks: usize,
        num_host_blocks: usize,
        options: Options,
    ) -> Self {
        let Options { world_size, mode, blocks_per_slot, policy, .. } = options;
        let config = OffloadConfig {
            world_size,
            mode,
            blocks_per_slot,
            policy,
            events: true,
            store_threshold: options.store_threshold,
            ..OffloadConfig::new(num_host_blocks, groups.clone())
        };
        Self {
            model: Model::new(groups.clone()).unwrap(),
            scheduler: OffloadScheduler::new(config.clone()).unwrap(),
            ledger: BlockLedger::new(num_device_blocks, groups, None, false).unwrap(),
            device: vec![NOTHING; num_device_blocks],
            max_blocks: options.max_blocks,
            seen: BTreeMap::new(),
            host: vec![NOTHING; num_host_blocks * blocks_per_slot],
            requests: BTreeMap::new(),
            copies: Vec::new(),
            storable: BTreeSet::new(),
            rotten: BTreeMap::new(),
            damaged: BTreeSet::new(),
            num_admitted: 0,
            low_priority: BTreeSet::new(),
            config,
            now: 0.0,
            transfers: Vec::new(),
        }
    }

    /// The groups with their positions.
    pub(super) fn groups(&self) -> Vec<(usize, Group)> {
        self.model.groups().iter().copied().enumerate().collect()
    }

    /// The content of block `index` of a group: the last hash that it covers.
    pub(super) fn content(&self, group: usize, index: usize, names: &[u16]) -> Content {
        let per_block = self.model.groups()[group].block_size / BLOCK_SIZE;
        (group, names[(index + 1) * per_block - 1])
    }

    /// The contents of the full blocks in a request's tables, from token `start` to token `end`.
    pub(super) fn expected(
        &self,
        who: usize,
        start: usize,
        end: usize,
    ) -> Vec<(BlockId, usize, Content)> {
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

    pub(super) fn leave(&mut self, who: usize) {
        if self.requests.remove(&who).is_some() {
            let id = who.to_string();
            self.scheduler.finish(&id).unwrap();
            self.ledger.free(&id, None).unwrap();
        }
    }

    pub(super) fn apply(&mut self, op: &Op) {
        match op {
            Op::Admit(who, chain, len, kept) => self.admit(*who, *chain, *len, *kept),
            Op::Run(who, tokens) => self.run(*who, *tokens),
            Op::Leave(who) => self.leave(*who),
            Op::Lower(who) => {
                if !self.low_priority.insert(*who) {
                    self.low_priority.remove(who);
                }
            }
            Op::End(which, is_ok) => self.end(*which, *is_ok),
            Op::Tick => self.tick(),
            Op::Stop => self.stop(),
            Op::Sleep(rest, more) => self.sleep(*rest, *more),
            Op::Reset => {
                self.scheduler.reset().unwrap();
                self.copies.iter_mut().for_each(|copy| copy.is_fenced = true);
                self.storable.clear();
                if self.config.mode == Mode::Lazy {
                    self.storable.extend(&self.device); // the device's blocks may be stored again
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

    pub(super) fn check(&self) {
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
        assert!(self.scheduler.num_resident() <= self.storable.len(), "no stale block is resident");
    }

    /// Number of hashed blocks of a chain that a host without losses can serve in these groups.
    fn num_servable_by(&self, which: usize, is_asked: fn(Group) -> bool) -> usize {
        let (names, step) = (chain(which, 8), self.model.hit_block_size());
        let num_tokens = names.len() * BLOCK_SIZE;
        let is_servable = |end: &usize| {
            self.groups().into_iter().filter(|&(_, group)| is_asked(group)).all(|(at, group)| {
                let dropped = usize::from(group.drops_last_block() && *end > 0);
                let last = end / group.block_size + dropped;
                let mut needed = group.num_skipped_blocks(*end)..last;
                last * group.block_size <= num_tokens
                    && needed.all(|i| self.storable.contains(&self.content(at, i, &names)))
            })
        };
        let ends = (0..=num_tokens / step).rev().map(|end| end * step);
        ends.into_iter().find(is_servable).unwrap_or(0) / BLOCK_SIZE
    }

    /// Number of hashed blocks of a chain that a host without losses can serve.
    pub(super) fn num_servable(&self, which: usize) -> usize {
        self.num_servable_by(which, |_| true)
    }

    /// As [`World::num_servable`], if a hit needed only the full-attention groups.
    pub(super) fn num_servable_in_full(&self, which: usize) -> usize {
        let is_full = |group: Group| group.attention == Attention::Full;
        let has_any = self.model.groups().iter().any(|&group| is_full(group));
        if has_any { self.num_servable_by(which, is_full) } else { 0 }
    }

    /// Number of hashed blocks of a chain that the host can serve from its start.
    pub(super) fn num_served(&mut self, which: usize) -> usize {
        self.served(which).0
    }

    /// What the host can serve from the start of a chain, in hashed blocks: in all groups, and if a
    /// hit needed only the full-attention groups.
    pub(super) fn served(&mut self, which: usize) -> (usize, usize) {
        let names = chain(which, 8);
        self.scheduler.add("probe", &hashes(&names)).unwrap();
        let found = self.scheduler.lookup("probe", 0, usize::MAX).unwrap().unwrap();
        let in_full = self.scheduler.full_attention_hit("probe").unwrap();
        self.scheduler.finish("probe").unwrap();
        (found / BLOCK_SIZE, in_full / BLOCK_SIZE)
    }
}
