//! The copies in flight, and what every place of the memories holds: names instead of bytes.
//!
//! From the plan of a copy until its report, its target is torn: the copy may take place at any
//! moment, and in parts. So a read of that place meanwhile gets no block, and each report finds out
//! whether all that it copied is what the job says.

use crate::ids::{BlockId, JobId};
use crate::key::BlockKey;
use crate::offload::{Direction, Job, JobEnd, Outcome, TierJob};

use super::projection::{Form, Names};
use super::world::{Copied, Phase, World, name};

/// What a place holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Content(u8);

impl Content {
    /// No block, or a part of one.
    pub(super) const TORN: Self = Self(0);
    /// Bytes that changed by themselves. A checksum shows it.
    pub(super) const DAMAGED: Self = Self(255);
    /// Written before the last reset.
    const OLD: u8 = 64;
    /// A partial block, the last of a request.
    const TAIL: u8 = 32;

    pub(super) fn of(name: u8) -> Self {
        Self(name)
    }

    pub(super) fn tail(who: usize) -> Self {
        Self(Self::TAIL + u8::try_from(who).unwrap())
    }

    pub(super) fn become_old(&mut self) {
        if *self != Self::TORN && *self != Self::DAMAGED {
            self.0 |= Self::OLD;
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Memory {
    Device,
    Host,
    Disk,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Place(pub(super) Memory, pub(super) usize);

/// A job in flight.
#[derive(Clone, Debug)]
pub(super) struct Flight {
    pub(super) job_id: JobId,
    pub(super) direction: Direction,
    block_ids: Vec<BlockId>,
    from: Vec<Place>,
    to: Vec<Place>,
    /// What each block of a demote or a promote is.
    pub(super) keys: Vec<BlockKey>,
    /// By rank.
    pub(super) reported: Vec<bool>,
    is_ok: bool,
    pub(super) is_late: bool,
    pub(super) is_fenced: bool,
}

impl Flight {
    pub(super) fn uses_block(&self, block: BlockId) -> bool {
        self.block_ids.contains(&block)
    }
}

fn places(memory: Memory, slots: &[u32]) -> Vec<Place> {
    slots.iter().map(|&slot| Place(memory, slot as usize)).collect()
}

fn blocks(ids: &[BlockId]) -> Vec<Place> {
    ids.iter().map(|id| Place(Memory::Device, id.index())).collect()
}

impl World {
    fn memory(&mut self, memory: Memory) -> &mut Vec<Vec<Content>> {
        match memory {
            Memory::Device => &mut self.device,
            Memory::Host => &mut self.host,
            Memory::Disk => &mut self.disk,
        }
    }

    /// Writes a place on every rank.
    pub(super) fn write(&mut self, Place(memory, at): Place, content: Content) {
        self.memory(memory).iter_mut().for_each(|memory| memory[at] = content);
    }

    pub(super) fn begin_store(&mut self, job: &Job) -> Result<(), String> {
        let to = places(Memory::Host, &job.host_slots);
        self.begin(job.job_id, Direction::Store, &job.block_ids, blocks(&job.block_ids), to, &[])
    }

    pub(super) fn begin_load(&mut self, who: usize, job: &Job) -> Result<(), String> {
        let from = places(Memory::Host, &job.host_slots);
        for (at, &Place(_, slot)) in from.iter().enumerate() {
            let expected = Content::of(name(who, at));
            let is_sound = |held: &Content| *held == expected || *held == Content::DAMAGED;
            if !self.host.iter().all(|host| is_sound(&host[slot])) {
                return Err(format!("request {who} loads another block from slot {slot}"));
            }
        }
        self.begin(job.job_id, Direction::Load, &job.block_ids, from, blocks(&job.block_ids), &[])
    }

    pub(super) fn begin_tier_job(&mut self, job: &TierJob) -> Result<(), String> {
        let host = places(Memory::Host, &job.host_slots);
        let disk = places(Memory::Disk, &job.disk_slots);
        let (from, to) =
            if job.direction == Direction::Demote { (host, disk) } else { (disk, host) };
        self.begin(job.job_id, job.direction, &[], from, to, &job.keys)
    }

    fn begin(
        &mut self,
        job_id: JobId,
        direction: Direction,
        block_ids: &[BlockId],
        from: Vec<Place>,
        to: Vec<Place>,
        keys: &[BlockKey],
    ) -> Result<(), String> {
        for place in &from {
            if self.flights.iter().any(|flight| flight.to.contains(place)) {
                return Err(format!("{job_id:?} reads {place:?}, which a job writes"));
            }
        }
        for &Place(memory, at) in &to {
            self.check_targets(&[u32::try_from(at).unwrap()], memory)?;
        }
        for &place in &to {
            self.write(place, Content::TORN);
        }
        self.flights.push(Flight {
            job_id,
            direction,
            block_ids: block_ids.to_vec(),
            from,
            to,
            keys: keys.to_vec(),
            reported: vec![false; self.options.num_ranks],
            is_ok: true,
            is_late: false,
            is_fenced: false,
        });
        Ok(())
    }

    /// Refuses places that a job, a lookup or the sleep image uses.
    pub(super) fn check_targets(&self, slots: &[u32], memory: Memory) -> Result<(), String> {
        let held: Vec<u32> = self
            .scheduler
            .requests
            .values()
            .flat_map(|request| request.held.slots.iter().map(|slot| slot.0 - 1))
            .collect();
        for &slot in slots {
            let place = Place(memory, slot as usize);
            let is_used =
                |flight: &Flight| flight.from.contains(&place) || flight.to.contains(&place);
            if self.flights.iter().any(is_used) {
                return Err(format!("{place:?} has a writer, and a job in flight uses it"));
            }
            if memory == Memory::Host && held.contains(&slot) {
                return Err(format!("{place:?} has a writer, and a lookup holds it"));
            }
        }
        Ok(())
    }

    /// A rank reports a job. Its copy ends at this moment.
    pub(super) fn report(&mut self, at: usize, rank: usize, copied: Copied) -> Result<(), String> {
        let flight = self.flights[at].clone();
        let mut are_ok = Vec::new();
        for (block, (&Place(from, source), &Place(to, target))) in
            flight.from.iter().zip(&flight.to).enumerate()
        {
            let mut held = self.memory(from)[rank][source];
            let has_failed = copied == Copied::Failed
                || (copied == Copied::FailedFirst && block == 0)
                // A demote copies damaged bytes too. Their checksum is that of the store, so a
                // promote finds out.
                || (held == Content::DAMAGED && flight.direction != Direction::Demote);
            are_ok.push(!has_failed);
            if has_failed {
                held = Content::TORN;
            } else if flight.is_fenced && flight.direction != Direction::Load {
                held.become_old();
            }
            self.memory(to)[rank][target] = held;
        }
        // Only damage fails single blocks of a load, because its slots leave the tier.
        let is_whole = copied == Copied::Failed;
        let damaged: Vec<usize> = flight
            .from
            .iter()
            .zip(&are_ok)
            .filter(|&(_, is_ok)| !is_ok)
            .map(|(place, _)| place.1)
            .collect();
        let is_ok = !are_ok.contains(&false);
        let outcome = if is_whole { Outcome::Whole(false) } else { Outcome::Blocks(are_ok) };
        self.flights[at].reported[rank] = true;
        self.flights[at].is_ok &= is_ok;
        let end = self.scheduler.complete(flight.job_id, rank, outcome).unwrap();
        if flight.direction == Direction::Load && !is_whole {
            self.found_damaged(&damaged)?;
        }
        if self.scheduler.complete(flight.job_id, rank, true).is_ok() {
            return Err("a rank may report a job twice".to_owned());
        }
        let has_ended = !self.flights[at].reported.contains(&false);
        match end {
            Some(_) if !has_ended => Err(format!("{:?} ends before its last copy", flight.job_id)),
            None if has_ended => Err(format!("{:?} does not end", flight.job_id)),
            Some(end) => {
                let flight = self.flights.remove(at);
                self.end(&flight, &end)
            }
            None => Ok(()),
        }
    }

    /// A load has found these host slots damaged. So lookups must not, and demotes of them fail.
    fn found_damaged(&mut self, damaged: &[usize]) -> Result<(), String> {
        if let Some(at) = self.damageable().find(|at| damaged.contains(at)) {
            return Err(format!("slot {at} is damaged, and lookups find it"));
        }
        let is_damaged = |&Place(_, at): &Place| damaged.contains(&at);
        let is_demote = |flight: &&mut Flight| flight.direction == Direction::Demote;
        for flight in self.flights.iter_mut().filter(is_demote) {
            flight.is_ok &= !flight.from.iter().any(is_damaged);
        }
        Ok(())
    }

    fn end(&mut self, flight: &Flight, end: &JobEnd) -> Result<(), String> {
        let Flight { job_id, direction, block_ids, is_late, is_fenced, .. } = flight;
        let is_ok = flight.is_ok && !is_late && !is_fenced;
        let expected =
            JobEnd { job_id: *job_id, block_ids: block_ids.clone(), is_ok, is_late: *is_late };
        if *end != expected {
            return Err(format!("{end:?}, expected {expected:?}"));
        }
        if *direction != Direction::Load {
            return Ok(());
        }
        if !is_ok {
            self.fail_load(*job_id);
            return Ok(());
        }
        let Some(who) = self.loading(*job_id) else { return Ok(()) };
        let request = self.requests[who].as_mut().unwrap();
        request.phase = Phase::Ready;
        for (at, block) in request.table.iter().enumerate() {
            if self.device.iter().any(|device| device[block.index()] != Content::of(name(who, at)))
            {
                return Err(format!("request {who} got another block"));
            }
        }
        Ok(())
    }

    fn loading(&self, job_id: JobId) -> Option<usize> {
        self.requests.iter().position(|request| {
            request.as_ref().is_some_and(|request| request.phase == Phase::Loading(job_id))
        })
    }

    /// The movers have stopped. What they wrote last stays torn.
    pub(super) fn stop_movers(&mut self) -> Result<(), String> {
        let ends = self.scheduler.end_all().unwrap();
        let flights = std::mem::take(&mut self.flights);
        if ends.len() != flights.len() {
            return Err(format!("{} jobs of {} end", ends.len(), flights.len()));
        }
        for (flight, end) in flights.iter().zip(&ends) {
            self.end(&Flight { is_ok: false, ..flight.clone() }, end)?;
        }
        Ok(())
    }

    /// Host slots whose bytes may change by themselves: those that lookup finds.
    pub(super) fn damageable(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.options.num_host)
            .filter(|&at| self.scheduler.host.is_resident(BlockId(u32::try_from(at + 1).unwrap())))
    }

    /// The contracts.
    pub(super) fn check(&self) -> Result<(), String> {
        self.scheduler.check().map_err(|error| error.to_string())?;
        let num_late = self.flights.iter().filter(|flight| flight.is_late).count();
        let stats = self.scheduler.stats();
        if (stats.quarantined_jobs, stats.jobs_in_flight)
            != (num_late, self.flights.len() - num_late)
        {
            return Err("the counts of jobs are wrong".to_owned());
        }
        self.check_served()?;
        self.check_withdrawn()?;
        let is_quiet = self.flights.is_empty()
            && self.image.is_none()
            && self.requests.iter().all(Option::is_none);
        let host = &self.scheduler.host;
        if is_quiet && (host.num_pins() > 0 || host.num_referenced() != host.num_resident()) {
            return Err("nothing is under way, and a slot is still in use".to_owned());
        }
        if self.flights.is_empty() && !self.is_asleep() { self.check_answers() } else { Ok(()) }
    }

    /// What a lookup would find was written whole, by all ranks, since the last reset.
    fn check_served(&self) -> Result<(), String> {
        let tiers = [Some((&self.scheduler.host, &self.host, "host")), {
            let disk = self.scheduler.disk.as_ref();
            disk.map(|disk| (&disk.tier, &self.disk, "disk"))
        }];
        for (tier, memories, what) in tiers.into_iter().flatten() {
            for slot in tier.slots.iter().filter(|&slot| tier.is_resident(slot)) {
                let key = tier.view(slot).key.ok_or("a resident slot without a key")?;
                let at = slot.index() - 1;
                let is_sound =
                    |held: Content| held == Content::of(key.hash[0]) || held == Content::DAMAGED;
                if !memories.iter().all(|memory| is_sound(memory[at])) {
                    return Err(format!(
                        "{what} slot {at} serves block {}, and its ranks hold {:?}",
                        key.hash[0],
                        memories.iter().map(|memory| memory[at]).collect::<Vec<_>>()
                    ));
                }
            }
        }
        Ok(())
    }

    /// The targets of a job that is late or fenced have lost their keys.
    fn check_withdrawn(&self) -> Result<(), String> {
        let is_dropped = |flight: &&Flight| flight.is_late || flight.is_fenced;
        for &Place(memory, at) in self.flights.iter().filter(is_dropped).flat_map(|it| &it.to) {
            let slot = BlockId(u32::try_from(at + 1).unwrap());
            let is_filling = match memory {
                Memory::Device => false,
                Memory::Host => self.scheduler.host.view(slot).is_filling,
                Memory::Disk => {
                    self.scheduler.disk.as_ref().is_some_and(|it| it.tier.view(slot).is_filling)
                }
            };
            if is_filling {
                return Err(format!("slot {at} of {memory:?} keeps the key of a dropped job"));
            }
        }
        Ok(())
    }

    /// No request waits for ever: without a job in flight, promotes and answers follow.
    fn check_answers(&self) -> Result<(), String> {
        for (who, request) in self.requests.iter().enumerate() {
            if request.as_ref().is_some_and(|request| request.phase == Phase::Asking) {
                let mut scheduler = self.scheduler.clone();
                if scheduler.promote(usize::MAX, None).unwrap().is_some() {
                    continue;
                }
                scheduler.lookup_below(&who.to_string(), 0, usize::MAX).unwrap();
                if scheduler.promote(usize::MAX, None).unwrap().is_some() {
                    continue;
                }
                let found = scheduler.lookup_below(&who.to_string(), 0, usize::MAX).unwrap();
                if found.is_none() {
                    return Err(format!("request {who} waits, and nothing comes"));
                }
            }
        }
        Ok(())
    }

    /// Writes the memories, and which rank has reported what. Ranks have no order. A place that
    /// nothing uses counts as torn, because every job tears its targets.
    pub(super) fn project_memories(&self, form: &mut Form) {
        for flight in &self.flights {
            form.put(usize::from(flight.is_ok));
        }
        let host = &self.scheduler.host;
        let mut ranks: Vec<Vec<u8>> = (0..self.options.num_ranks)
            .map(|rank| {
                let mut bytes: Vec<u8> = Vec::new();
                bytes.extend(self.flights.iter().map(|flight| u8::from(flight.reported[rank])));
                let mut add = |names: &Names,
                               memory: &[Content],
                               is_used: &dyn Fn(BlockId) -> bool,
                               first: usize| {
                    for &id in &names.0 {
                        let content = memory[id.index() - first];
                        bytes.push(if is_used(id) { content.0 } else { Content::TORN.0 });
                    }
                };
                let is_used = |slot| host.slots.is_referenced(slot) || host.view(slot).num_pins > 0;
                add(&form.host, &self.host[rank], &is_used, 1);
                if let Some(disk) = &self.scheduler.disk {
                    let is_used = |slot| {
                        disk.tier.slots.is_referenced(slot) || disk.tier.view(slot).num_pins > 0
                    };
                    add(&form.disk, &self.disk[rank], &is_used, 1);
                }
                add(&form.device, &self.device[rank], &|_| true, 0);
                bytes
            })
            .collect();
        ranks.sort_unstable();
        for bytes in ranks {
            form.bytes.extend(bytes);
        }
        if let Some(image) = &self.image {
            form.bytes.extend(image.iter().map(|(_, content)| content.0));
        }
    }
}
