//! Requests of a world: admission, loads, steps, and the stores that steps make due.

use std::collections::BTreeSet;

use kvstow_core::group::Attention;
use kvstow_core::ids::BlockId;
use kvstow_core::ledger::{AllocateArgs, Allocation, Context};
use kvstow_core::offload::{Job, Mode, Progress};

use super::super::hashes;
use super::ops::{HORIZON, PATIENCE, chain};
use super::world::{BLOCK_SIZE, Content, Copy, Request, World};

impl World {
    pub(super) fn admit(&mut self, who: usize, which: usize, len: usize, num_kept: usize) {
        let id = who.to_string();
        if self.requests.contains_key(&who) {
            assert!(self.scheduler.add(&id, &hashes(&[])).is_err());
            return;
        }
        let names = chain(which, len);
        self.ledger.add(&id, &hashes(&names), Context::default()).unwrap();
        self.scheduler.add(&id, &hashes(&names)).unwrap();
        if self.low_priority.contains(&who) {
            self.scheduler.lower_priority(&id).unwrap();
        }
        let hit = self.ledger.lookup(&id, len * BLOCK_SIZE - 1).unwrap();
        for (group, blocks) in hit.blocks.iter().enumerate() {
            for (index, block) in blocks.iter().enumerate().filter(|(_, id)| !id.is_null()) {
                let held = self.device[block.index()];
                let content = self.content(group, index, &names);
                assert_eq!(held, content, "a local hit holds another block");
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
            num_reported: vec![0; self.model.groups().len()],
        };
        self.requests.insert(who, request);
        if external > 0 {
            self.load(who, hit.num_tokens, external, found, &taken);
        } else {
            self.scheduler.release(&id).unwrap();
            self.compute(who, 1);
        }
    }

    pub(super) fn load(
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
        let deadline = Some(self.now + PATIENCE);
        // Every other load of a full-attention model reports its blocks.
        let groups = self.groups();
        let is_full = groups.iter().all(|(_, group)| group.attention == Attention::Full);
        let job = if is_full && self.requests[&who].serial.is_multiple_of(2) {
            let local: Vec<Vec<BlockId>> = groups
                .iter()
                .map(|&(at, group)| {
                    let table = self.ledger.block_table(&id, at).unwrap();
                    table[..start / group.block_size].to_vec()
                })
                .collect();
            let num_reported = groups.iter().map(|(_, group)| end / group.block_size).collect();
            self.requests.get_mut(&who).unwrap().num_reported = num_reported;
            self.scheduler.load_reported(&id, external, &local, &targets, deadline)
        } else {
            self.scheduler.load(&id, external, &targets, deadline)
        };
        let Ok(job) = job else {
            // The window before an earlier end may not be on the host any more.
            assert!(external < found && self.model.groups().len() > 1);
            return self.leave(who);
        };
        let expected = self.expected(who, start, end);
        let (blocks, contents): (Vec<_>, Vec<_>) =
            expected.into_iter().map(|(block, _, content)| (block, content)).unzip();
        assert_eq!(job.block_ids, blocks, "a load fills the blocks that are not skipped");
        for (&place, &content) in job.host_slots.iter().zip(&contents) {
            assert!(!self.damaged.contains(&self.slot(place)), "a damaged slot is served");
            let held = self.rotten.get(&place).unwrap_or(&self.host[place as usize]);
            assert_eq!(*held, content, "the host serves another block");
        }
        let serial = self.requests[&who].serial;
        self.begin(job, contents, Some((who, serial, end)));
    }

    pub(super) fn refuse(&mut self, id: &str) {
        self.ledger.free(id, None).unwrap();
        self.scheduler.finish(id).unwrap();
    }

    pub(super) fn run(&mut self, who: usize, tokens: usize) {
        let id = who.to_string();
        if self.requests.get(&who).is_none_or(|request| request.is_loading) {
            return;
        }
        let args = AllocateArgs { num_new_tokens: tokens, ..AllocateArgs::default() };
        if self.ledger.allocate(&id, &args).unwrap().is_some() {
            self.compute(who, tokens);
        }
    }

    /// Ends a step. It has read the blocks that are not skipped. The full blocks that it computed hold
    /// what their hashes name, and may be stored.
    pub(super) fn compute(&mut self, who: usize, tokens: usize) {
        let before = self.requests[&who].computed;
        for (block, _, content) in self.expected(who, 0, before) {
            assert_eq!(self.device[block.index()], content, "a step reads another block");
        }
        let after = before + tokens;
        for (block, _, content) in self.expected(who, before, after) {
            self.device[block.index()] = content;
        }
        self.requests.get_mut(&who).unwrap().computed = after;
        let job = self.report(who);
        self.begin_store(job);
        if self.config.mode == Mode::Lazy {
            self.store_evictable(HORIZON);
        }
    }

    /// Reports to the scheduler what a request has computed, and the new blocks of its tables.
    pub(super) fn report(&mut self, who: usize) -> Option<Job> {
        let id = who.to_string();
        for (_, index, content) in self.expected(who, 0, self.requests[&who].computed) {
            if self.is_reachable(content.0, index) {
                self.storable.insert(content);
            }
        }
        let mut unreported = Vec::new();
        for (at, _) in self.groups() {
            let table = self.ledger.block_table(&id, at).unwrap();
            unreported.push(table[self.requests[&who].num_reported[at]..].to_vec());
        }
        let request = self.requests.get_mut(&who).unwrap();
        for (reported, new) in request.num_reported.iter_mut().zip(&unreported) {
            *reported += new.len();
        }
        let new_blocks: Vec<&[BlockId]> = unreported.iter().map(Vec::as_slice).collect();
        let num_computed_tokens = request.computed;
        let progress = Progress { request_id: &id, num_computed_tokens, new_blocks: &new_blocks };
        let deadline = Some(self.now + PATIENCE);
        let progress = std::iter::once(progress);
        let job = self.scheduler.store_at_most(self.max_blocks, progress, deadline).unwrap();
        assert!(job.is_none() || self.config.mode == Mode::Eager);
        for name in request.names.iter().take(num_computed_tokens / BLOCK_SIZE) {
            self.seen.entry(*name).or_default().insert(request.serial);
        }
        if let Some(job) = &job {
            assert!(job.block_ids.len() <= self.max_blocks);
            self.check_seen(&job.block_ids);
        }
        job
    }

    /// Only blocks that enough requests have seen are stored.
    pub(super) fn check_seen(&self, stored: &[BlockId]) {
        for block in stored {
            let (_, name) = self.device[block.index()];
            assert!(self.seen[&name].len() >= usize::from(self.config.store_threshold));
        }
    }

    /// Stores due blocks among the first `num_blocks` of the device's free queue, which stays as it is.
    pub(super) fn store_evictable(&mut self, num_blocks: usize) {
        let before: Vec<BlockId> = self.ledger.pool().free_order().collect();
        let candidates = self.ledger.pool().evictable(num_blocks);
        let deadline = Some(self.now + PATIENCE);
        let job = self.scheduler.store_evictable(candidates, deadline).unwrap();
        if let Some(job) = &job {
            assert!(
                job.block_ids.iter().all(|id| before[..num_blocks.min(before.len())].contains(id))
            );
            self.check_seen(&job.block_ids);
        }
        self.begin_store(job);
        assert!(self.ledger.pool().free_order().eq(before));
    }

    pub(super) fn begin_store(&mut self, job: Option<Job>) {
        if let Some(job) = job {
            let contents: Vec<_> = job.block_ids.iter().map(|id| self.device[id.index()]).collect();
            for (group, ends) in job.offsets.windows(2).enumerate() {
                assert!(contents[ends[0]..ends[1]].iter().all(|content| content.0 == group));
            }
            self.begin(job, contents, None);
        }
    }

    /// Whether block `index` of a group is stored. A window stores it only if a hit needs it.
    pub(super) fn is_reachable(&self, group: usize, index: usize) -> bool {
        let (group, step) = (self.model.groups()[group], self.model.hit_block_size());
        let mut ends = (1..20).map(|end| end * step);
        !matches!(group.attention, Attention::SlidingWindow { .. })
            || ends
                .any(|end| (group.num_skipped_blocks(end)..end / group.block_size).contains(&index))
    }

    pub(super) fn begin(
        &mut self,
        job: Job,
        contents: Vec<Content>,
        loads_for: Option<(usize, usize, usize)>,
    ) {
        let copy = Copy {
            job,
            contents,
            loads_for,
            num_reported: 0,
            has_failed: false,
            is_late: false,
            is_fenced: false,
        };
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
}
