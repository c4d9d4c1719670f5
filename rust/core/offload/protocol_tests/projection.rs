//! The canonical form of a scheduler: two schedulers with one form behave equally from now on.
//!
//! Slots, device blocks and jobs have names, and their order is nothing. So each gets the number of
//! its first appearance. Left out are counters, deadlines (jobs are late in the order of their ids),
//! and what is only a faster way to the same answer: the hash tables, and where the search for a
//! victim begins. A field that a struct gets later does not compile here until somebody decides.

use std::collections::BTreeMap;

use crate::ids::{BlockId, JobId};
use crate::key::BlockKey;
use crate::offload::disk::{Disk, TierJobView};
use crate::offload::image::Image;
use crate::offload::job::{InFlight, Kind, Ranks};
use crate::offload::request::{HeldSlots, ReportedTable, RequestState};
use crate::offload::tier::{Filling, Tier};
use crate::offload::{Direction, OffloadScheduler};

/// Ids in the order of their first appearance.
#[derive(Default)]
pub(super) struct Names(pub(super) Vec<BlockId>);

impl Names {
    fn of(&mut self, id: BlockId) -> usize {
        if id.is_null() {
            return 0;
        }
        let known = self.0.iter().position(|&known| known == id);
        known.unwrap_or_else(|| {
            self.0.push(id);
            self.0.len() - 1
        }) + 1
    }
}

/// The form of a state, as far as it is written.
#[derive(Default)]
pub(super) struct Form {
    pub(super) bytes: Vec<u8>,
    pub(super) host: Names,
    pub(super) disk: Names,
    pub(super) device: Names,
}

impl Form {
    pub(super) fn put(&mut self, number: usize) {
        self.bytes.push(u8::try_from(number).unwrap());
    }

    fn put_all(&mut self, numbers: impl ExactSizeIterator<Item = usize>) {
        self.put(numbers.len());
        numbers.for_each(|number| self.put(number));
    }

    fn flags(&mut self, flags: &[bool]) {
        self.put_all(flags.iter().map(|&flag| usize::from(flag)));
    }

    fn key(&mut self, key: Option<BlockKey>) {
        // The worlds name a block in the first byte of its hash, and have one group.
        self.bytes.push(key.map_or(0, |key| key.hash[0]));
    }

    pub(super) fn device(&mut self, blocks: &[BlockId]) {
        let names: Vec<usize> = blocks.iter().map(|&block| self.device.of(block)).collect();
        self.put_all(names.into_iter());
    }

    fn host(&mut self, slots: &[BlockId]) {
        let names: Vec<usize> = slots.iter().map(|&slot| self.host.of(slot)).collect();
        self.put_all(names.into_iter());
    }

    fn disk(&mut self, slots: &[BlockId]) {
        let names: Vec<usize> = slots.iter().map(|&slot| self.disk.of(slot)).collect();
        self.put_all(names.into_iter());
    }

    /// Writes a scheduler.
    pub(super) fn scheduler(&mut self, scheduler: &OffloadScheduler) {
        let OffloadScheduler {
            host,
            model: _,
            slot_model: _,
            config: _,
            requests,
            jobs,
            num_jobs: _,
            num_ended_jobs: _, // the reports of these jobs are ignored
            computed,
            counters: _,
            image,
            transfers: _,
            sightings,
            disk,
        } = scheduler;
        assert!(computed.is_empty() && sightings.is_none(), "the worlds are eager");
        self.host(&host.eviction_order());
        let disk = disk.as_deref();
        let mut tier_jobs = BTreeMap::new();
        if let Some(disk) = disk {
            self.disk(&disk.tier.eviction_order());
            tier_jobs = disk.view_jobs();
        }
        let mut ids: Vec<JobId> = jobs.keys().chain(tier_jobs.keys()).copied().collect();
        ids.sort_unstable();
        self.put(ids.len());
        for id in ids {
            match jobs.get(&id) {
                Some(job) => self.job(job),
                None => self.tier_job(&tier_jobs[&id]),
            }
        }
        let mut requests: Vec<_> = requests.iter().collect();
        requests.sort_unstable_by_key(|&(name, _)| name);
        self.put(requests.len());
        for (name, request) in &requests {
            self.bytes.extend(name.as_bytes());
            self.request(request, host.num_losses);
        }
        if let Some(disk) = disk {
            self.waiting(host, disk, requests.iter().map(|&(_, request)| request));
        }
        self.image(image.as_ref());
        self.slots(host, false);
        if let Some(disk) = disk {
            self.slots(&disk.tier, true);
        }
    }

    fn job(&mut self, job: &InFlight) {
        let InFlight {
            block_ids,
            slots,
            kind,
            deadline: _,
            reported,
            has_failed,
            is_fenced,
            is_late,
        } = job;
        self.device(block_ids);
        self.host(slots);
        self.flags(&[*has_failed, *is_fenced, *is_late]);
        self.num_reported(reported);
        match kind {
            Kind::Load { host_slots } => self.put(100 + host_slots.len()),
            Kind::Store { filling: Filling { ends, parents }, ranks } => {
                let Ranks { tails, low_priority } = ranks;
                assert!(parents.is_empty(), "the worlds record no events");
                self.put_all(ends.iter().copied());
                self.host(tails);
                self.host(low_priority);
            }
        }
    }

    fn tier_job(&mut self, job: &TierJobView<'_>) {
        self.put(if job.direction == Direction::Demote { 200 } else { 201 });
        self.host(job.host_slots);
        self.disk(job.disk_slots);
        self.put_all(job.ends.iter().copied());
        self.flags(&job.has_parent);
        self.flags(job.are_ok);
        self.flags(&[job.is_fenced, job.is_late]);
        self.num_reported(job.reported);
    }

    /// Ranks have no order: the caller writes which of them have reported.
    fn num_reported(&mut self, reported: &[bool]) {
        self.put(reported.iter().filter(|&&has_reported| has_reported).count());
    }

    fn request(&mut self, request: &RequestState, num_host_losses: u64) {
        let RequestState {
            hashes,
            tables,
            held: HeldSlots { slots, positions: _, num_local_tokens, num_tokens, num_losses },
            num_queried: _, // these five count hits
            num_hit_tokens: _,
            num_used_tokens: _,
            num_used_before: _,
            num_full_tokens: _,
            num_seen: _, // these three belong to the sightings
            num_counted: _,
            num_wanted: _,
            due_tokens: _,   // only `store_step` reads it
            is_throttled: _, // only a counter reads it
            is_low_priority,
            num_losses: num_losses_at_store,
            waiting: _,
            ledger_serial: _, // only `store_step` reads it
        } = request;
        self.put(hashes.len());
        self.flags(&[
            *is_low_priority,
            slots.is_empty() || *num_losses == num_host_losses,
            *num_losses_at_store == num_host_losses,
        ]);
        self.host(slots);
        self.put_all([*num_local_tokens, *num_tokens].into_iter());
        for ReportedTable { blocks, num_confirmed, num_kept, num_passed } in tables {
            self.device(blocks);
            self.put_all([*num_confirmed, *num_kept, *num_passed].into_iter());
        }
    }

    fn waiting<'a>(
        &mut self,
        host: &Tier,
        disk: &Disk,
        requests: impl Iterator<Item = &'a RequestState>,
    ) {
        let (mode, due) = disk.view_due();
        self.put(mode as usize);
        // An empty slot that is filled with its old key revives its entry. So the order counts.
        let mut empty: Vec<BlockId> = host.empty_order().collect();
        let is_due = |slot: &BlockId| due.iter().any(|(due, _)| due == slot);
        empty.truncate(empty.iter().rposition(is_due).map_or(0, |at| at + 1));
        let empty = empty.into_iter().map(|slot| if is_due(&slot) { slot } else { BlockId::NULL });
        self.host(&empty.collect::<Vec<_>>());
        self.put(due.len());
        for (slot, print) in due {
            let name = self.host.of(slot);
            self.put(name);
            self.bytes.extend(print.to_le_bytes());
        }
        let waiting: Vec<[usize; 4]> = requests.map(|request| disk.view_waiting(request)).collect();
        for [place, num_local_tokens, max_tokens, state] in &waiting {
            let num_before = waiting.iter().filter(|[other, ..]| (1..*place).contains(other));
            let place = if *place == 0 { 0 } else { num_before.count() + 1 };
            self.put_all([place, *num_local_tokens, *max_tokens, *state].into_iter());
        }
    }

    fn image(&mut self, image: Option<&Image>) {
        let Some(Image { own, shared, copies, is_damaged }) = image else { return self.put(0) };
        self.put(1);
        self.host(own);
        self.host(shared);
        // Its blocks are of a ledger that no longer exists.
        let places: Vec<BlockId> = copies.host_slots.iter().map(|&at| BlockId(at + 1)).collect();
        self.host(&places);
        self.flags(&[*is_damaged]);
    }

    /// Writes what holds for each slot: first those with a name, then the others.
    fn slots(&mut self, tier: &Tier, is_disk: bool) {
        let mut names = std::mem::take(if is_disk { &mut self.disk } else { &mut self.host });
        let mut at = 0;
        while let Some(&slot) = names.0.get(at) {
            let view = tier.view(slot);
            self.key(view.key);
            self.key(view.awaited);
            let counts = [names.of(view.parent), view.num_refs as usize, view.num_pins as usize];
            self.put_all(counts.into_iter());
            self.flags(&[view.is_filling, view.is_loading]);
            at += 1;
        }
        for slot in tier.slots.iter().filter(|slot| !names.0.contains(slot)) {
            let view = tier.view(slot);
            assert!(view.key.is_none() && view.num_refs == 0 && view.num_pins == 0, "{view:?}");
        }
        *(if is_disk { &mut self.disk } else { &mut self.host }) = names;
    }
}
