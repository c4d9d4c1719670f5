//! The state of live requests: their hashes, how far they are stored, what their lookup holds.

use std::ops::Range;

use crate::error::{Error, Result};
use crate::group::Attention;
use crate::ids::BlockId;
use crate::key::{Hashes, SharedHashes};

use super::disk::Waiting;
use super::{Mode, OffloadScheduler};

/// The state of a live request.
#[derive(Clone, Debug, Default)]
pub(super) struct RequestState {
    pub(super) hashes: SharedHashes,
    /// Its serial number in the ledger, if `store_step` has read `tables` from there.
    pub(super) ledger_serial: Option<u64>,
    /// Per group.
    pub(super) tables: Vec<ReportedTable>,
    pub(super) held: HeldSlots,
    /// Tokens that its last lookup asked for. They count once it is served, because a request that
    /// waits asks again.
    pub(super) num_queried: usize,
    /// Tokens, from the first, that device and host had at its last lookup. 0 once the policy knows
    /// these hits, because each request counts once.
    pub(super) num_hit_tokens: usize,
    /// Tokens, from the first, that it has computed or loaded since it was added or started over.
    pub(super) num_used_tokens: usize,
    /// Tokens, from the first, that it had used when it last started over. To find them again is no
    /// hit, because no other request has brought it.
    pub(super) num_used_before: usize,
    /// Tokens, from the first, of which its last lookup found all full-attention blocks.
    pub(super) num_full_tokens: usize,
    /// Hashes, from the first, that were compared with the sightings since it was added or started
    /// over.
    pub(super) num_seen: usize,
    /// Hashes, from the first, that the sightings have counted. A request that starts over keeps
    /// them.
    pub(super) num_counted: usize,
    /// Hashes, from the first, that enough requests have seen.
    pub(super) num_wanted: usize,
    /// The number of computed tokens that completes the next hash.
    pub(super) due_tokens: usize,
    /// Whether blocks are still due only because its last store was allowed too few.
    pub(super) is_throttled: bool,
    /// Whether the blocks that it stores are evicted before all others.
    pub(super) is_low_priority: bool,
    /// The tier's losses when `tables` was last compared with it.
    pub(super) num_losses: u64,
    /// What it waits for from the disk tier.
    pub(super) waiting: Option<Box<Waiting>>,
}

impl RequestState {
    /// Reads what a store needs first.
    #[inline]
    pub(super) fn read_ahead(&self) -> u32 {
        let hash = self.hashes.last().map_or(0, |hash| u32::from(hash[0]));
        let last = |table: &ReportedTable| table.blocks.last().map_or(0, |block| block.0);
        self.tables.iter().map(last).fold(hash, |sum, block| sum ^ block)
    }
}

/// A request's blocks in one group.
#[derive(Clone, Debug, Default)]
pub(super) struct ReportedTable {
    /// Device blocks, as far as reported; null where they were skipped.
    pub(super) blocks: Vec<BlockId>,
    /// Slots, from the first, whose blocks are all computed, hashed and allocated.
    pub(super) num_confirmed: usize,
    /// Slots, from the first, that need no store: the tier had them or got them at the last store,
    /// or had no room for them.
    pub(super) num_kept: usize,
    /// Blocks, from the first, that were computed at the last store. A window may have left them
    /// since, and another request may own them. So they are not stored any more, whatever hashes
    /// they get. 0 for full attention, which leaves no block.
    pub(super) num_passed: usize,
}

impl ReportedTable {
    /// The first slot that may be due.
    pub(super) fn first_due(&self) -> usize {
        self.num_kept.max(self.num_passed)
    }
}

/// The slots that a request's last lookup found.
#[derive(Clone, Debug, Default)]
pub(super) struct HeldSlots {
    /// Pinned slots of all groups, group by group.
    pub(super) slots: Vec<BlockId>,
    /// Per group, the positions of its slots in the prompt.
    pub(super) positions: Vec<Range<usize>>,
    pub(super) num_local_tokens: usize,
    /// Tokens found after the local ones.
    pub(super) num_tokens: usize,
    /// The tier's losses at the lookup. While there are no more, the slots hold what was found.
    pub(super) num_losses: u64,
}

impl OffloadScheduler {
    /// Adds a request with the hashes of its blocks known so far.
    ///
    /// # Errors
    /// [`Error::State`] for a known request, [`Error::HashWidth`] for hashes of another width,
    /// [`Error::Config`] for hashes that are known not to begin a prompt.
    pub fn add(&mut self, request_id: &str, hashes: &Hashes) -> Result<()> {
        self.requests.check_new(request_id)?;
        hashes.check_continues(&[])?;
        self.host.slots.pool.agree_width(hashes.width())?;
        let mut shared = SharedHashes::default();
        hashes.append_to(&mut shared);
        self.track(request_id, shared);
        Ok(())
    }

    fn track(&mut self, request_id: &str, hashes: SharedHashes) {
        let tables = vec![ReportedTable::default(); self.model.groups().len()];
        let num_losses = self.host.num_losses;
        let request = RequestState { hashes, tables, num_losses, ..RequestState::default() };
        self.requests.insert(request_id, request);
    }

    /// Gives a request low priority, until it finishes. The tier evicts the blocks that it stores
    /// from now on before all others, its last block first, until a request of normal priority
    /// uses them. Its own loads and its end make no block recent.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`].
    pub fn lower_priority(&mut self, request_id: &str) -> Result<()> {
        self.requests.get_mut(request_id)?.is_low_priority = true;
        Ok(())
    }

    /// Appends hashes as generated tokens fill blocks.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`], [`Error::HashWidth`], [`Error::Config`] for hashes that are known
    /// not to continue the request's.
    pub fn extend(&mut self, request_id: &str, hashes: &Hashes) -> Result<()> {
        self.extend_step(std::iter::once((request_id, hashes)))
    }

    /// As [`OffloadScheduler::extend`] for each of a step's requests.
    ///
    /// # Errors
    /// As [`OffloadScheduler::extend`], before any request has got hashes.
    pub fn extend_step<'a>(
        &mut self,
        extended: impl Iterator<Item = (&'a str, &'a Hashes)> + Clone,
    ) -> Result<()> {
        let mut width = self.hash_width();
        for (request_id, hashes) in extended.clone() {
            hashes.check_continues(&self.requests.get(request_id)?.hashes)?;
            width.agree(hashes.width())?;
        }
        self.host.slots.pool.agree_width(width)?;
        for (request_id, hashes) in extended {
            hashes.append_to(&mut self.requests.get_mut(request_id)?.hashes);
        }
        Ok(())
    }

    /// Keeps the first `num_hashes` hashes of a request, because a streaming session replaces its
    /// last tokens. Later blocks are not due any more, and in a group that skips blocks they never
    /// are again. Stored blocks stay under their own key. Releases what its lookup holds.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`]; [`Error::Config`] for more hashes than are known.
    pub fn truncate(&mut self, request_id: &str, num_hashes: usize) -> Result<()> {
        let request = self.requests.get_mut(request_id)?;
        let num_known = request.hashes.len();
        if num_hashes > num_known {
            return Err(Error::Config(format!(
                "request {request_id:?}: {num_hashes} of {num_known} hashes cannot be kept: \
                 truncate to at most {num_known}, or extend for more"
            )));
        }
        if num_hashes == num_known {
            return Ok(());
        }
        self.host.unpin(&std::mem::take(&mut request.held).slots)?;
        request.waiting = None;
        request.hashes = request.hashes[..num_hashes].to_vec().into();
        let num_tokens = num_hashes * self.model.hash_block_size();
        request.num_queried = request.num_queried.min(num_tokens);
        request.num_hit_tokens = request.num_hit_tokens.min(num_tokens);
        request.num_used_tokens = request.num_used_tokens.min(num_tokens);
        request.num_used_before = request.num_used_before.min(num_tokens);
        request.num_seen = request.num_seen.min(num_hashes);
        request.num_counted = request.num_counted.min(num_hashes);
        request.num_wanted = request.num_wanted.min(num_hashes);
        request.due_tokens = request.due_tokens.min(num_tokens);
        for (table, &group) in request.tables.iter_mut().zip(self.slot_model.groups()) {
            let num_slots = num_hashes / self.slot_model.hashes_per_block(group);
            if self.config.mode == Mode::Lazy {
                // In lazy mode a slot holds one block. Not only the confirmed ones are dropped: after
                // a reset none of those that were computed before is confirmed.
                let dropped = table.blocks.get(num_slots..).unwrap_or_default();
                Self::forget_computed(&mut self.computed, dropped);
            }
            table.num_confirmed = table.num_confirmed.min(num_slots);
            table.num_kept = table.num_kept.min(num_slots);
        }
        Ok(())
    }

    /// Forgets a request that finished, was preempted or was aborted, and makes its chain recent.
    /// Releases what its lookup holds. Its jobs continue.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`].
    pub fn finish(&mut self, request_id: &str) -> Result<()> {
        let request = self.requests.remove(request_id)?;
        self.host.unpin(&request.held.slots)?;
        let left_out = |table: &ReportedTable| table.num_confirmed.saturating_sub(table.num_kept);
        let num_left_out: usize = request.tables.iter().map(left_out).sum();
        if request.is_throttled {
            self.counters.throttled_blocks += num_left_out;
        } else {
            self.counters.dropped_blocks += num_left_out;
        }
        self.counters.rare_blocks += self.num_rare(&request);
        if !request.is_low_priority {
            self.make_recent(&request.hashes, &(request.num_used_before..request.num_hit_tokens));
        }
        Ok(())
    }

    /// Forgets what a request computed, as [`OffloadScheduler::finish`] does. The request stays
    /// added, with all its hashes and its priority. `store_threshold` still counts it once, and for
    /// the policy it does not hit what it has used before.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`].
    pub fn restart(&mut self, request_id: &str) -> Result<()> {
        let request = self.requests.get(request_id)?;
        let (hashes, num_counted) = (SharedHashes::clone(&request.hashes), request.num_counted);
        let is_low_priority = request.is_low_priority;
        let num_used_before =
            request.num_used_before.max(request.num_used_tokens).max(request.num_hit_tokens);
        self.finish(request_id)?;
        self.track(request_id, hashes);
        let request = self.requests.get_mut(request_id)?;
        (request.num_counted, request.is_low_priority) = (num_counted, is_low_priority);
        request.num_used_before = num_used_before;
        Ok(())
    }

    /// Slots of a request's table, from the first, that need no store. After a loss none is known
    /// to be in the tier. Blocks of a window are not due again even then, because they may have
    /// left the device.
    pub(super) fn num_kept(&self, request: &RequestState, at: usize) -> usize {
        let is_lost = self.config.mode == Mode::Eager
            && request.num_losses != self.host.num_losses
            && self.model.groups()[at].attention == Attention::Full;
        if is_lost { 0 } else { request.tables[at].num_kept }
    }

    /// Reconsiders what is due, because the tier has lost slots since this request's last store,
    /// perhaps some of its own.
    pub(super) fn reconsider(&mut self, place: usize) {
        let request = self.requests.at(place);
        let num_kept: Vec<usize> =
            (0..request.tables.len()).map(|at| self.num_kept(request, at)).collect();
        let request = self.requests.at_mut(place);
        for (table, num_kept) in request.tables.iter_mut().zip(num_kept) {
            table.num_kept = num_kept;
        }
        request.num_losses = self.host.num_losses;
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::super::{OffloadConfig, Progress};
    use super::*;
    use crate::group::Group;
    use crate::key::HashesBuilder;

    fn hashes(num_bytes: usize) -> Hashes {
        let mut hashes = HashesBuilder::default();
        hashes.push(&vec![1; num_bytes]).unwrap();
        hashes.finish()
    }

    #[test]
    fn refused_step_adopts_no_width() {
        let groups = vec![Group::new(Attention::Full, 4).unwrap()];
        let mut scheduler = OffloadScheduler::new(OffloadConfig::new(8, groups)).unwrap();
        for name in ["x", "y"] {
            scheduler.add(name, &Hashes::default()).unwrap();
        }
        let (narrow, wide) = (hashes(16), hashes(32));
        let progress = ["x", "y"].into_iter().map(|request_id| Progress {
            request_id,
            num_computed_tokens: 0,
            new_blocks: &[&[]],
        });
        let new_hashes = [narrow.clone(), wide.clone()];
        let refused = scheduler.extend_and_store(&new_hashes, 8, progress, None);
        assert_eq!(refused, Err(Error::HashWidth { expected: Some(16), got: 32 }));
        // An unknown request refuses the step after the width of the first one was checked.
        let step = [("x", &narrow), ("unknown", &narrow)];
        assert!(scheduler.extend_step(step.into_iter()).is_err());
        scheduler.extend("x", &wide).unwrap();
        assert!(scheduler.extend("y", &narrow).is_err());
        scheduler.check().unwrap();
    }
}
