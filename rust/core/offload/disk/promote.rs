//! Promotes: copies of disk blocks back to the host, for requests that wait for them.
//!
//! ```text
//!   lookup, the disk adds enough  -->  wants  [ r7 | r9 | r4 ]  -->  promote: one job for several
//!           = pending                           ^ first come, served in parts if it is large
//! ```

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::ids::BlockId;
use crate::key::{BlockKey, SharedHashes};
use crate::offload::tier::Filling;
use crate::offload::transfer_event::Direction;
use crate::offload::{DiskMode, OffloadScheduler};

use super::Disk;
use super::job::{TierInFlight, TierJob};
use super::union::{Needed, Union, UnionHit};

/// A request's place in the queue of wants. It is stale unless the request still has its number.
#[derive(Clone, Debug)]
pub(super) struct Want {
    pub(super) number: u64,
    pub(super) request_id: Arc<str>,
}

/// What a request waits for. Only requests that have waited for the disk have one.
#[derive(Clone, Debug)]
pub(in crate::offload) struct Waiting {
    /// The number of its want; 0 for none.
    pub(super) number: u64,
    pub(super) num_local_tokens: usize,
    pub(super) max_tokens: usize,
    /// Whether a promote was planned for it. A request plans no other until it starts over, so that
    /// it waits once.
    pub(super) has_promoted: bool,
    /// Tokens, from the first, that device and host had when it began to wait.
    pub(super) num_host_tokens: usize,
}

impl Default for Waiting {
    fn default() -> Self {
        Self {
            number: 0,
            num_local_tokens: 0,
            max_tokens: 0,
            has_promoted: false,
            num_host_tokens: usize::MAX,
        }
    }
}

impl Waiting {
    /// Leaves the queue of wants.
    pub(super) fn leave(&mut self) {
        self.number = 0;
    }

    /// Whether a promote was planned for the request.
    pub(super) fn has_promoted(&self) -> bool {
        self.has_promoted
    }

    /// Tokens of a load, from token `start` to `end`, that the host lacked when the request began to
    /// wait.
    pub(in crate::offload) fn take_hit(&mut self, start: usize, end: usize) -> usize {
        let before = std::mem::replace(&mut self.num_host_tokens, usize::MAX);
        end.saturating_sub(before.max(start))
    }
}

/// The blocks of one promote.
#[derive(Default)]
struct Plan {
    host_slots: Vec<BlockId>,
    needed: Vec<Needed>,
    /// Host slots that must not be evicted for this promote.
    pinned: Vec<BlockId>,
}

impl Disk {
    /// Appends a want, which gets its number.
    fn want(&mut self, request_id: &str) -> u64 {
        self.num_wants += 1;
        self.wants.push_back(Want { number: self.num_wants, request_id: request_id.into() });
        self.num_wants
    }
}

impl OffloadScheduler {
    /// As [`lookup`](Self::lookup), with the disk tier below the host. None also means that a
    /// promote brings some of the blocks, or that the request waits for one. Ask again after
    /// [`promote`](Self::promote) and the end of its job, or stop waiting with
    /// [`lookup`](Self::lookup).
    ///
    /// # Errors
    /// As [`lookup`](Self::lookup).
    pub fn lookup_below(
        &mut self,
        request_id: &str,
        num_local_tokens: usize,
        max_tokens: usize,
    ) -> Result<Option<usize>> {
        if self.disk_mode().is_some_and(|mode| mode != DiskMode::Off) {
            self.check_multiple("local", num_local_tokens)?;
            if self.waits(request_id, num_local_tokens, max_tokens)? {
                self.release(request_id)?;
                self.counters.pending_lookups += 1;
                return Ok(None);
            }
        }
        self.lookup(request_id, num_local_tokens, max_tokens)
    }

    /// Tokens of the hit on the host alone, and of the hit on host and disk together, the local hit
    /// included in both. They are equal if a lookup would begin no promote, because the disk adds too
    /// few tokens or is off, or because the request has waited for one. Changes nothing.
    ///
    /// # Errors
    /// As [`lookup`](Self::lookup).
    pub fn tier_hits(
        &self,
        request_id: &str,
        num_local_tokens: usize,
        max_tokens: usize,
    ) -> Result<(usize, usize)> {
        self.check_multiple("local", num_local_tokens)?;
        let request = self.requests.get(request_id)?;
        let num_host = self.num_host_tokens(&request.hashes, num_local_tokens, max_tokens);
        let is_open = self.disk_mode().is_some_and(|mode| mode != DiskMode::Off);
        let has_promoted = request.waiting.as_ref().is_some_and(|it| it.has_promoted());
        let num_both = self
            .union_hit(&request.hashes, num_local_tokens, max_tokens)
            .map(|hit| hit.num_tokens)
            .filter(|&num| is_open && !has_promoted && self.is_worth(num, num_host))
            .unwrap_or(num_host);
        Ok((num_host.max(num_local_tokens), num_both.max(num_local_tokens)))
    }

    /// Whether a request should wait for the disk. If so, it wants a promote, unless others bring
    /// all that it needs.
    fn waits(&mut self, request_id: &str, num_local: usize, max_tokens: usize) -> Result<bool> {
        let hashes = SharedHashes::clone(&self.requests.get(request_id)?.hashes);
        let Some(hit) = self.union_hit(&hashes, num_local, max_tokens) else { return Ok(false) };
        if hit.needed.is_empty() && !hit.is_promoting {
            return Ok(false);
        }
        let num_host = self.num_host_tokens(&hashes, num_local, max_tokens);
        let is_worth = self.is_worth(hit.num_tokens, num_host);
        let request = self.requests.get_mut(request_id)?;
        let waiting = request.waiting.get_or_insert_default();
        (waiting.num_local_tokens, waiting.max_tokens) = (num_local, max_tokens);
        let wants = is_worth && !hit.needed.is_empty() && !waiting.has_promoted;
        let is_pending = wants || (hit.is_promoting && hit.num_tokens > num_host);
        if is_pending {
            waiting.num_host_tokens = waiting.num_host_tokens.min(num_host.max(num_local));
        }
        if wants && waiting.number == 0 {
            waiting.number = self.disk.as_mut().map_or(0, |disk| disk.want(request_id));
            self.forget_stale_wants();
        }
        Ok(is_pending)
    }

    /// Keeps the queue of wants about as short as the list of requests.
    fn forget_stale_wants(&mut self) {
        let Self { disk: Some(disk), requests, .. } = self else { return };
        if disk.wants.len() > 2 * requests.len() + 8 {
            disk.wants.retain(|want| {
                let request = requests.get(&want.request_id);
                let waiting = request.ok().and_then(|request| request.waiting.as_ref());
                waiting.is_some_and(|waiting| waiting.number == want.number)
            });
        }
    }

    /// Whether the disk adds enough tokens to the host's hit.
    pub(super) fn is_worth(&self, num_tokens: usize, num_host_tokens: usize) -> bool {
        let least = self.disk.as_ref().map_or(0, |disk| disk.config.min_promote_tokens);
        num_tokens >= num_host_tokens.saturating_add(least.max(1))
    }

    fn union_hit(
        &self,
        hashes: &SharedHashes,
        local: usize,
        max_tokens: usize,
    ) -> Option<UnionHit> {
        let tiers = Union { host: &self.host, disk: &self.disk.as_ref()?.tier };
        Some(UnionHit::search(&tiers, &self.slot_model, hashes, local, max_tokens))
    }

    pub(super) fn num_host_tokens(
        &self,
        hashes: &SharedHashes,
        local: usize,
        max_tokens: usize,
    ) -> usize {
        self.slot_model.longest_hit(&self.host, hashes, local, max_tokens).num_tokens
    }

    /// Takes a request out of the queue of wants.
    pub(in crate::offload) fn stop_wanting(&mut self, request_id: &str) -> Result<()> {
        if let Some(waiting) = &mut self.requests.get_mut(request_id)?.waiting {
            waiting.leave();
        }
        Ok(())
    }

    /// The request that has wanted a promote longest.
    fn next_want(&mut self) -> Option<Arc<str>> {
        let Self { disk: Some(disk), requests, .. } = self else { return None };
        while let Some(Want { number, request_id }) = disk.wants.front() {
            let waiting = requests.get(request_id).ok().and_then(|it| it.waiting.as_ref());
            if waiting.is_some_and(|waiting| waiting.number == *number) {
                return Some(Arc::clone(request_id));
            }
            disk.wants.pop_front();
        }
        None
    }

    /// Plans the promote of what requests have wanted longest, at most `max_blocks` blocks. Returns
    /// None if nothing is wanted, if as many are in flight as may be, and if the disk is off.
    ///
    /// What a request does not need any more, or what the disk has lost, is skipped. Evicts from the
    /// host for room, never a block of a request that it serves. Where the host has no room, the
    /// request goes on without the rest, which is counted.
    ///
    /// # Errors
    /// None that a caller can cause.
    pub fn promote(&mut self, max_blocks: usize, deadline: Option<f64>) -> Result<Option<TierJob>> {
        let Some(disk) = self.disk.as_ref().filter(|disk| disk.mode != DiskMode::Off) else {
            return Ok(None);
        };
        let max_in_flight = disk.config.max_in_flight_blocks;
        let max_blocks = max_blocks.min(max_in_flight.saturating_sub(disk.num_promoting));
        let mut plan = Plan::default();
        while plan.needed.len() < max_blocks
            && let Some(request_id) = self.next_want()
        {
            if !self.serve(&request_id, max_blocks, &mut plan)? {
                break;
            }
            self.stop_wanting(&request_id)?;
        }
        self.host.unpin(&plan.pinned)?;
        let Plan { host_slots, needed, .. } = plan;
        let Some(disk) = self.disk.as_mut().filter(|_| !needed.is_empty()) else {
            return Ok(None);
        };
        let disk_slots: Vec<BlockId> = needed.iter().map(|needed| needed.disk_slot).collect();
        disk.tier.pin(&disk_slots)?;
        let filling = Filling {
            ends: needed.iter().map(|needed| needed.end).collect(),
            parents: needed.iter().map(|needed| needed.parent).collect(),
        };
        let keys = needed.iter().map(|needed| needed.key).collect();
        let job = TierInFlight::new(Direction::Promote, host_slots, disk_slots, filling, deadline);
        Ok(Some(self.begin_tier(job, keys)))
    }

    /// Adds what a request needs to a promote. Returns whether the request has all that it can get.
    fn serve(&mut self, request_id: &str, max_blocks: usize, plan: &mut Plan) -> Result<bool> {
        let request = self.requests.get(request_id)?;
        let hashes = SharedHashes::clone(&request.hashes);
        let Some(Waiting { num_local_tokens, max_tokens, .. }) = request.waiting.as_deref() else {
            return Ok(true);
        };
        let (num_local, max_tokens) = (*num_local_tokens, *max_tokens);
        let Some(hit) = self.union_hit(&hashes, num_local, max_tokens) else { return Ok(true) };
        let num_host = self.num_host_tokens(&hashes, num_local, max_tokens);
        if hit.needed.is_empty() || !self.is_worth(hit.num_tokens, num_host) {
            return Ok(true);
        }
        let num_blocks = hit.needed.len().min(max_blocks - plan.needed.len());
        let parent = |needed: &Needed| {
            let parent = BlockKey { hash: needed.parent?, group: needed.key.group };
            self.host.resident_or_filling(&parent)
        };
        let mut pinned = hit.host_slots;
        pinned.extend(hit.needed.iter().filter_map(parent));
        self.host.pin(&pinned)?;
        plan.pinned.append(&mut pinned);
        let slots = self.host.reserve(num_blocks)?;
        let is_short = slots.len() < num_blocks;
        let Self { host, disk: Some(disk), .. } = self else { return Ok(true) };
        for (&slot, needed) in slots.iter().zip(&hit.needed) {
            // A list that is no true chain may hold a key twice.
            if host.resident_or_filling(&needed.key).is_some() {
                host.slots.pool.free(&[slot])?;
                continue;
            }
            host.fill_below(slot, needed.key, needed.parent);
            // From now on, the next request of this promote waits for the block as well.
            disk.tier.slots.begin_loads(&[needed.disk_slot]);
            plan.host_slots.push(slot);
            plan.needed.push(*needed);
        }
        let is_done = is_short || num_blocks == hit.needed.len();
        if is_short {
            disk.counters.disk_dropped += hit.needed.len() - slots.len();
        }
        if let Some(waiting) = self.requests.get_mut(request_id)?.waiting.as_mut() {
            waiting.has_promoted |= is_done;
        }
        Ok(is_done)
    }

    /// Verifies that each want that is not stale stands once in the queue.
    pub(super) fn check_wants(&self, disk: &Disk) -> Result<()> {
        for (request_id, request) in self.requests.iter() {
            let Some(waiting) = request.waiting.as_ref().filter(|it| it.number != 0) else {
                continue;
            };
            let is_its_own =
                |want: &&Want| want.number == waiting.number && *want.request_id == *request_id;
            if disk.wants.iter().filter(is_its_own).count() != 1 {
                return Err(Error::Broken(format!(
                    "disk: request {request_id:?} wants a promote and does not stand once in the \
                     queue"
                )));
            }
        }
        Ok(())
    }
}
