//! Copies of a world's jobs: how they end, fail, come late, and survive sleep.

use std::collections::BTreeMap;

use kvstow_core::error::Error;
use kvstow_core::ids::BlockId;
use kvstow_core::ledger::{BlockLedger, NewIds};
use kvstow_core::offload::{Mode, OffloadScheduler, Outcome, TransferEvent};

use super::ops::Rest;
use super::settle;
use super::world::{Content, Copy, NOTHING, World};

impl World {
    /// The next rank reports one of the copies. The copy takes place when all ranks have reported.
    pub(super) fn end(&mut self, which: usize, is_ok: bool) {
        if self.copies.is_empty() {
            return;
        }
        let which = which % self.copies.len();
        let copy = &self.copies[which];
        let (job_id, rank, is_fenced) = (copy.job.job_id, copy.num_reported, copy.is_fenced);
        let is_sound = |place: &u32| copy.loads_for.is_none() || !self.is_bad(*place, rank);
        let are_ok: Vec<bool> = copy.job.host_slots.iter().map(is_sound).collect();
        let bad = copy.job.host_slots.iter().zip(&are_ok).filter(|&(_, is_sound)| !is_sound);
        let bad: Vec<u32> = bad.map(|(&place, _)| place).collect();
        let is_whole = bad.is_empty() || !is_ok;
        let outcome = if is_whole { Outcome::Whole(is_ok) } else { Outcome::Blocks(are_ok) };
        let is_ok = is_ok && bad.is_empty();
        let end = self.scheduler.complete(job_id, rank, outcome).unwrap();
        assert!(self.scheduler.complete(job_id, rank, is_ok).is_err(), "a rank reports once");
        if !is_whole {
            self.drop_slots(&bad, is_fenced);
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
            assert!(is_rotten || *source == content, "a source was overwritten during the copy");
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

    /// The slot that contains a place.
    pub(super) fn slot(&self, place: u32) -> usize {
        place as usize / self.config.blocks_per_slot
    }

    /// Whether a rank's part of a place is damaged. Each place belongs to one rank.
    pub(super) fn is_bad(&self, place: u32, rank: usize) -> bool {
        self.rotten.contains_key(&place) && place as usize % self.config.world_size == rank
    }

    /// Damages a place on the host, unless a rank has read it already for a load in flight.
    pub(super) fn rot(&mut self, which: usize) {
        let place = u32::try_from(which % self.host.len()).unwrap();
        let is_read = |copy: &Copy| copy.num_reported > 0 && copy.job.host_slots.contains(&place);
        if !self.copies.iter().any(is_read) && !self.rotten.contains_key(&place) {
            let held = std::mem::replace(&mut self.host[place as usize], NOTHING);
            self.rotten.insert(place, held);
        }
    }

    /// Checks that slots that a load found damaged are dropped. If a reset or another rank's report
    /// dropped them before, another slot may hold their blocks now.
    pub(super) fn drop_slots(&mut self, bad: &[u32], is_fenced: bool) {
        for &place in bad {
            let slot = self.slot(place);
            let is_first = self.damaged.insert(slot) && !is_fenced;
            if is_first && self.config.mode == Mode::Eager {
                let per_slot = self.config.blocks_per_slot;
                for at in slot * per_slot..(slot + 1) * per_slot {
                    let held = self.rotten.get(&u32::try_from(at).unwrap());
                    let held = *held.unwrap_or(&self.host[at]);
                    self.storable.remove(&held);
                }
            }
            let is_used =
                |slot: &usize| self.scheduler.used_slots().any(|used| used as usize == *slot);
            assert!(!is_used(&slot), "a damaged slot is empty once nobody pins it");
        }
    }

    /// Ends a load. Its request runs, or leaves.
    pub(super) fn loaded(&mut self, (who, serial, tokens): (usize, usize, usize), is_ok: bool) {
        // The request may have left, and another of its name come, during the load.
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

    /// Advances time. Each late job is reported once, and its request does not wait any more.
    pub(super) fn tick(&mut self) {
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

    /// Ends every job without its copies.
    pub(super) fn stop(&mut self) {
        let ends = self.scheduler.end_all().unwrap();
        assert_eq!(ends.len(), self.copies.len());
        for (end, copy) in ends.into_iter().zip(std::mem::take(&mut self.copies)) {
            assert_eq!((end.job_id, end.is_ok), (copy.job.job_id, false));
            self.ledger.pool_mut().unpin(&end.block_ids).unwrap();
            assert_eq!(self.scheduler.complete(end.job_id, 0, true), Ok(None), "ignored");
            if let Some(load) = copy.loads_for.filter(|_| !copy.is_late) {
                self.loaded(load, false);
            }
        }
    }

    /// The device sleeps and wakes with the blocks that an image, or the test itself, has kept.
    pub(super) fn sleep(&mut self, rest: Rest, more: i32) {
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
        // The results of jobs in flight are ignored, and their loads have failed.
        for copy in std::mem::take(&mut self.copies) {
            let is_other = |event: &TransferEvent| !matches!(event, TransferEvent::Initiated { job_id, .. } if *job_id == copy.job.job_id);
            self.transfers.retain(is_other);
            assert_eq!(self.scheduler.complete(copy.job.job_id, 0, true), Ok(None), "ignored");
            if let Some(load) = copy.loads_for.filter(|_| !copy.is_late) {
                self.loaded(load, false);
            }
        }
        let running: Vec<usize> = self.requests.keys().copied().collect();
        for who in running {
            self.requests.get_mut(&who).unwrap().num_reported.fill(0);
            if self.config.mode == Mode::Lazy {
                self.report(who);
            }
        }
    }

    /// Restores ledger and scheduler from snapshots, over an empty device of `size` blocks if the kept
    /// blocks fit. Returns where the blocks are now.
    pub(super) fn wake(&mut self, size: usize, ids: NewIds) -> Vec<(BlockId, BlockId)> {
        let (ledger, scheduler) = (self.ledger.snapshot(true), self.scheduler.snapshot().unwrap());
        let ledger_of =
            |size| BlockLedger::new(size, self.model.groups().to_vec(), None, false).unwrap();
        let restored = ledger_of(size).restore(&ledger, ids.clone()).unwrap_or_else(|error| {
            assert!(matches!(error, Error::SmallPool { .. } | Error::Config(_)), "{error}");
            ledger_of(self.device.len()).restore(&ledger, ids).unwrap()
        });
        assert_eq!(
            self.ledger.request_ids().collect::<Vec<_>>(),
            restored.ledger.request_ids().collect::<Vec<_>>()
        );
        self.ledger = restored.ledger;
        let anew = OffloadScheduler::new(self.config.clone()).unwrap();
        self.scheduler = anew.restore(&scheduler).unwrap();
        assert_eq!(
            self.scheduler.snapshot().unwrap(),
            scheduler,
            "the restored scheduler has an equal snapshot"
        );
        self.device = vec![NOTHING; self.ledger.pool().num_blocks()];
        restored.moves
    }
}
