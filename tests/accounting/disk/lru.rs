//! With instant copies, the hits of each tier are those of an inclusive LRU model.

use std::collections::BTreeSet;

use kvstow_core::group::{Attention, Group};
use kvstow_core::ids::BlockId;
use kvstow_core::offload::{
    Admit, DiskConfig, DiskMode, OffloadConfig, OffloadScheduler, Progress, TierJob,
};
use proptest::collection::vec;
use proptest::prelude::*;

use super::super::offload::chain;
use super::super::{hashes, num_cases};

const BLOCK_SIZE: usize = 4;

/// A scheduler without a device cache, whose copies are instant.
pub(super) struct Instant {
    pub(super) scheduler: OffloadScheduler,
    num_device: u32,
    /// What was demoted, job by job.
    pub(super) demoted: Vec<Vec<u16>>,
}

impl Instant {
    pub(super) fn new(num_host: usize, disk: DiskConfig) -> Self {
        let groups = vec![Group::new(Attention::Full, BLOCK_SIZE).unwrap()];
        let config = OffloadConfig { disk: Some(disk), ..OffloadConfig::new(num_host, groups) };
        let mut scheduler = OffloadScheduler::new(config).unwrap();
        scheduler.set_disk(DiskMode::On).unwrap();
        Self { scheduler, num_device: 0, demoted: Vec::new() }
    }

    fn blocks(&mut self, num: usize) -> Vec<BlockId> {
        let first = self.num_device + 1;
        self.num_device += u32::try_from(num).unwrap();
        (first..=self.num_device).map(BlockId).collect()
    }

    fn end(&mut self, job: &TierJob) {
        assert!(self.scheduler.complete(job.job_id, 0, true).unwrap().unwrap().is_ok);
    }

    /// Serves a prompt: lookup, load, compute the rest, store, finish. Returns the hashes that came
    /// from the host and from the disk.
    pub(super) fn serve(&mut self, names: &[u16]) -> (usize, usize) {
        self.serve_from(names, |_| false)
    }

    /// As `serve`, with a shared store that has these names.
    pub(super) fn serve_from(
        &mut self,
        names: &[u16],
        is_shared: impl Fn(u16) -> bool,
    ) -> (usize, usize) {
        let num_tokens = names.len() * BLOCK_SIZE;
        self.scheduler.add("it", &hashes(names)).unwrap();
        let asked = self.scheduler.unclaimed("it", 0, num_tokens, usize::MAX).unwrap();
        for (key, parent) in asked.keys.iter().zip(asked.parents) {
            let name = u16::from_be_bytes([key.hash[6], key.hash[7]]);
            if is_shared(name) {
                self.scheduler.claim(&hashes(&[name]), &[key.group], &[parent]).unwrap();
            }
        }
        let on_host = self.scheduler.lookup("it", 0, num_tokens).unwrap().unwrap() / BLOCK_SIZE;
        self.scheduler.release("it").unwrap();
        let mut found = self.scheduler.lookup_below("it", 0, num_tokens).unwrap();
        while found.is_none() {
            let job = self.scheduler.promote(usize::MAX, None).unwrap().unwrap();
            self.end(&job);
            found = self.scheduler.lookup_below("it", 0, num_tokens).unwrap();
        }
        let found = found.unwrap() / BLOCK_SIZE;
        let mut table = self.blocks(found);
        if found > 0 {
            let targets = [table.clone()];
            let job = self.scheduler.load("it", found * BLOCK_SIZE, &targets, None).unwrap();
            self.scheduler.complete(job.job_id, 0, true).unwrap().unwrap();
        }
        table.append(&mut self.blocks(names.len() - found));
        let new_blocks = [table.as_slice()];
        let progress =
            Progress { request_id: "it", num_computed_tokens: num_tokens, new_blocks: &new_blocks };
        if let Some(job) = self.scheduler.store(std::iter::once(progress), None).unwrap() {
            self.scheduler.complete(job.job_id, 0, true).unwrap().unwrap();
        }
        while let Some(job) = self.scheduler.demote(usize::MAX, None).unwrap() {
            let name =
                |key: &kvstow_core::key::BlockKey| u16::from_be_bytes([key.hash[6], key.hash[7]]);
            self.demoted.push(job.keys.iter().map(name).collect());
            self.end(&job);
        }
        self.scheduler.finish("it").unwrap();
        self.scheduler.check().unwrap();
        (on_host, found.saturating_sub(on_host))
    }
}

/// An LRU list of names, the least recent first.
#[derive(Default)]
struct Lru {
    names: Vec<u16>,
    size: usize,
}

impl Lru {
    fn num_held(&self, names: &[u16]) -> usize {
        names.iter().take_while(|name| self.names.contains(name)).count()
    }

    /// Makes names the most recent, the first of them most of all. Those that are new get the room
    /// that is left.
    fn touch(&mut self, names: &[u16]) {
        let names = &names[..names.len().min(self.size)];
        self.names.retain(|name| !names.contains(name));
        self.names.extend(names.iter().rev());
        let num_out = self.names.len().saturating_sub(self.size);
        self.names.drain(..num_out);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(num_cases() / 10))]

    /// Prompts fit into either tier, so no promote or demote lacks room.
    #[test]
    fn hits_of_both_tiers_equal_an_inclusive_lru(
        num_host in 8..14_usize, more in 0..14_usize, max_in_flight in 8..20_usize,
        prompts in vec((0..4_usize, 1..8_usize), 1..60),
    ) {
        let num_disk = num_host + more;
        let disk = DiskConfig { max_in_flight_blocks: max_in_flight, ..DiskConfig::new(num_disk) };
        let mut instant = Instant::new(num_host, disk);
        let mut host = Lru { size: num_host, ..Lru::default() };
        let mut below = Lru { size: num_disk, ..Lru::default() };
        for (which, len) in prompts {
            let names = chain(which, len);
            let on_host = host.num_held(&names);
            let expected = (on_host, below.num_held(&names).saturating_sub(on_host));
            prop_assert_eq!(instant.serve(&names), expected);
            host.touch(&names);
            below.touch(&names);
        }
        let stats = instant.scheduler.disk_stats();
        prop_assert_eq!((stats.disk_dropped, stats.disk_damaged_blocks), (0, 0));
    }

    /// With `Returned`, the disk takes blocks that were loaded, or stored again after an eviction,
    /// and the blocks before them.
    #[test]
    fn returned_blocks_are_those_that_came_back(
        num_host in 8..14_usize, prompts in vec((0..4_usize, 1..8_usize), 1..60),
    ) {
        let disk = DiskConfig { admit: Admit::Returned, ..DiskConfig::new(100) };
        let mut instant = Instant::new(num_host, disk);
        let mut host = Lru { size: num_host, ..Lru::default() };
        let (mut evicted, mut on_disk) = (BTreeSet::<u16>::new(), BTreeSet::<u16>::new());
        for (which, len) in prompts {
            let names = chain(which, len);
            let num_held = host.num_held(&names);
            let hits = names[..num_held.max(on_disk_prefix(&on_disk, &names))].to_vec();
            let before = host.names.clone();
            host.touch(&names);
            evicted.extend(before.iter().filter(|name| !host.names.contains(name)));
            let mut due = hits;
            let stored = &names[due.len()..];
            if let Some(last) = stored.iter().rposition(|name| evicted.contains(name)) {
                due = names[..=due.len() + last].to_vec();
            }
            instant.demoted.clear();
            instant.serve(&names);
            let mut demoted: Vec<u16> = instant.demoted.concat();
            let mut expected: Vec<u16> =
                due.into_iter().filter(|name| on_disk.insert(*name)).collect();
            demoted.sort_unstable();
            expected.sort_unstable();
            prop_assert_eq!(demoted, expected);
        }
    }
}

fn on_disk_prefix(on_disk: &BTreeSet<u16>, names: &[u16]) -> usize {
    names.iter().take_while(|name| on_disk.contains(name)).count()
}
