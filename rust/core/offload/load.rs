//! Lookups in the host tier, and loads of what they found.

use std::borrow::Cow;

use crate::error::{Error, Result};
use crate::group::{Attention, Hit, Source};
use crate::ids::BlockId;
use crate::pool::{check_ids, repeated};

use super::job::Kind;
use super::request::{HeldSlots, ReportedTable};
use super::{Job, Mode, OffloadScheduler};

impl OffloadScheduler {
    /// Returns the number of tokens after the local hit that the host can serve, up to `max_tokens`
    /// of the whole request. Does not look at the disk tier, and stops to wait for it. The slots stay
    /// pinned until [`load`](Self::load),
    /// [`release`](Self::release), [`finish`](Self::finish) or the next lookup of this request.
    ///
    /// None means pending: another request is loading some of the blocks, and they are a local hit
    /// once that job has ended. Then nothing is pinned.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`]; [`Error::Config`] if `num_local_tokens` is not a multiple of the
    /// block size.
    pub fn lookup(
        &mut self,
        request_id: &str,
        num_local_tokens: usize,
        max_tokens: usize,
    ) -> Result<Option<usize>> {
        self.check_multiple("local", num_local_tokens)?;
        if self.disk.is_some() {
            self.stop_wanting(request_id)?;
        }
        let request = self.requests.get_mut(request_id)?;
        let Hit { num_tokens: end, num_full_tokens, blocks } =
            self.slot_model.longest_hit(&self.host, &request.hashes, num_local_tokens, max_tokens);
        request.num_full_tokens = num_full_tokens;
        let (mut slots, mut positions) = (Vec::new(), Vec::with_capacity(blocks.len()));
        for mut table in blocks {
            // Null: on the device, or skipped. The slots follow.
            let num_null = table.iter().take_while(|slot| slot.is_null()).count();
            positions.push(num_null..table.len());
            if slots.is_empty() && num_null == 0 {
                slots = std::mem::take(&mut table);
            }
            slots.extend(table.drain(..).skip(num_null));
        }
        let is_pending = slots.iter().any(|&slot| self.host.slots.is_loading(slot));
        if !is_pending {
            // Before the old pins end. So a slot that is found again stays pinned, and the next
            // search for a victim need not look at it again.
            self.host.pin(&slots)?;
        }
        self.host.unpin(&std::mem::take(&mut request.held).slots)?;
        if is_pending {
            self.counters.pending_lookups += 1;
            return Ok(None);
        }
        let hit_block_size = self.model.hit_block_size();
        let num_known = request.hashes.len() * self.model.hash_block_size();
        let num_whole = max_tokens.min(num_known) / hit_block_size * hit_block_size;
        request.num_queried = num_whole.saturating_sub(num_local_tokens);
        request.num_hit_tokens = end.max(num_local_tokens);
        let num_tokens = end.saturating_sub(num_local_tokens);
        let num_losses = self.host.num_losses;
        request.held = HeldSlots { slots, positions, num_local_tokens, num_tokens, num_losses };
        Ok(Some(num_tokens))
    }

    /// Tokens of the longest prefix for which the last lookup found all full-attention blocks, the
    /// local hit included. 0 before a lookup, and for a model without full attention. Where it is
    /// longer than the hit, the other groups lack what a hit there needs.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`].
    pub fn full_attention_hit(&self, request_id: &str) -> Result<usize> {
        Ok(self.requests.get(request_id)?.num_full_tokens)
    }

    /// Loads the first `num_tokens` of what lookup found into the device blocks of each group, in
    /// order, and unpins the rest. A group that skips blocks loads only those that the token after
    /// the load reads. Makes the whole chain recent, unless the request has low priority.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`]; [`Error::State`] if lookup found nothing to load, if the window
    /// before an earlier end is not on the host, if a found block proved damaged since, and if the
    /// request has reported other blocks for these tokens;
    /// [`Error::Config`] for no tokens, more than were found, a number that is not a multiple of
    /// the block size, or another number of groups or blocks; [`Error::NoSuchBlock`] for an id
    /// outside the device pool, [`Error::InvalidBlock`] for a null or repeated block.
    pub fn load(
        &mut self,
        request_id: &str,
        num_tokens: usize,
        block_ids: &[Vec<BlockId>],
        deadline: Option<f64>,
    ) -> Result<Job> {
        let (slots, copies) = self.plan_load(request_id, num_tokens, block_ids)?;
        self.begin_load(request_id, num_tokens, block_ids, slots, copies, deadline)
    }

    /// As [`load`](Self::load), and counts the blocks of the whole hit as reported: per group, the
    /// local ones and then those of the load. [`store`](Self::store) then takes the blocks after
    /// them. If the load fails, [`restart`](Self::restart) the request, because its blocks still
    /// count as reported.
    ///
    /// # Errors
    /// As [`load`](Self::load), and as [`store`](Self::store) for the local blocks;
    /// [`Error::Config`] for another number of them; [`Error::State`] if the request has reported
    /// blocks, or if a group does not have full attention: its blocks may leave the device before
    /// the next store.
    pub fn load_reported(
        &mut self,
        request_id: &str,
        num_tokens: usize,
        local_ids: &[Vec<BlockId>],
        block_ids: &[Vec<BlockId>],
        deadline: Option<f64>,
    ) -> Result<Job> {
        let (slots, copies) = self.plan_load(request_id, num_tokens, block_ids)?;
        self.check_local(request_id, local_ids)?;
        let request = self.requests.get_mut(request_id)?;
        let is_local = request.held.num_local_tokens > 0;
        for ((table, local), loaded) in request.tables.iter_mut().zip(local_ids).zip(block_ids) {
            table.blocks.reserve(local.len() + loaded.len());
            table.blocks.extend_from_slice(local);
            table.blocks.extend_from_slice(loaded);
            if !is_local && self.config.mode == Mode::Eager {
                // The tier has these blocks, which no store has to look up again.
                table.num_kept = loaded.len() / self.config.blocks_per_slot;
            }
        }
        request.num_losses = self.host.num_losses;
        self.begin_load(request_id, num_tokens, block_ids, slots, copies, deadline)
    }

    /// Begins a load that was checked.
    fn begin_load(
        &mut self,
        request_id: &str,
        num_tokens: usize,
        block_ids: &[Vec<BlockId>],
        slots: Vec<BlockId>,
        copies: Job,
        deadline: Option<f64>,
    ) -> Result<Job> {
        let request = self.requests.get_mut(request_id)?;
        let held = std::mem::take(&mut request.held);
        let end = held.num_local_tokens + num_tokens;
        if slots != held.slots {
            self.host.pin(&slots)?;
            self.host.unpin(&held.slots)?;
        } // else the pins of the lookup become those of the load
        self.host.slots.begin_loads(&slots);
        for blocks in block_ids {
            Self::forget_computed(&mut self.computed, blocks);
        }
        self.counters.query_tokens += std::mem::take(&mut request.num_queried);
        self.counters.hit_tokens += num_tokens;
        if let Some(waiting) = &mut request.waiting {
            let num_tokens = waiting.take_hit(held.num_local_tokens, end);
            if let Some(disk) = &mut self.disk {
                disk.counters.disk_hit_tokens += num_tokens;
            }
        }
        request.num_hit_tokens = 0;
        request.num_used_tokens = request.num_used_tokens.max(end);
        if !request.is_low_priority {
            let hashes = std::mem::take(&mut request.hashes);
            let hits = request.num_used_before..end;
            self.make_recent(&hashes[..end / self.model.hash_block_size()], &hits);
            self.requests.get_mut(request_id)?.hashes = hashes;
        }
        if self.disk.is_some() {
            self.after_hit(&slots);
        }
        let kind = Kind::Load { host_slots: copies.host_slots.clone() };
        Ok(self.begin(copies, slots, kind, deadline))
    }

    /// Checks a load. Returns its slots, and its copies.
    fn plan_load(
        &self,
        request_id: &str,
        num_tokens: usize,
        block_ids: &[Vec<BlockId>],
    ) -> Result<(Vec<BlockId>, Job)> {
        self.check_multiple("external", num_tokens)?;
        self.check_num_groups(block_ids.len())?;
        let request = self.requests.get(request_id)?;
        let held = &request.held;
        if held.num_tokens == 0 {
            return Err(Error::State(format!(
                "request {request_id:?} holds nothing to load: its lookup comes first"
            )));
        }
        if num_tokens == 0 || num_tokens > held.num_tokens {
            return Err(Error::Config(format!(
                "request {request_id:?}: {num_tokens} tokens to load, {} found: load at least one \
                 block, and at most what was found",
                held.num_tokens
            )));
        }
        let start = held.num_local_tokens;
        let per_slot = self.config.blocks_per_slot;
        let mut slots = Vec::with_capacity(held.slots.len());
        let mut copies = Job::empty();
        let mut num_before = 0;
        for (((id, group), blocks), known) in
            self.model.enumerate().zip(block_ids).zip(&held.positions)
        {
            let end = (start + num_tokens) / group.block_size;
            let first = group.num_skipped_blocks(start + num_tokens).max(start / group.block_size);
            if end - first != blocks.len() {
                return Err(Error::Config(format!(
                    "request {request_id:?}: {num_tokens} tokens from token {start} on are {} \
                     blocks of {} in group {}, not {}",
                    end - first,
                    group.block_size,
                    id.0,
                    blocks.len()
                )));
            }
            check_ids(blocks, self.config.num_device_blocks)?;
            check_reported(request_id, &request.tables[usize::from(id.0)], first, blocks)?;
            let slot_group = self.slot_model.groups()[usize::from(id.0)];
            let needed = first / per_slot..end.div_ceil(per_slot);
            let own = self.slot_model.own_hashes(slot_group, &request.hashes, needed.clone());
            // A shorter load may need another window than the one that lookup held.
            let is_known = known.start <= needed.start && needed.end <= known.end;
            let found = if is_known {
                let at = num_before + needed.start - known.start;
                Cow::Borrowed(&held.slots[at..at + needed.len()])
            } else {
                Cow::Owned(self.host.prefix(&own, id))
            };
            num_before += known.len();
            // A pin keeps a slot from eviction. It does not keep the key of damaged bytes.
            let is_kept = is_known && held.num_losses == self.host.num_losses;
            debug_assert!(!is_kept || self.host.are_resident(&found, &own, id), "pinned slots");
            if !is_kept && (found.len() < needed.len() || !self.host.are_resident(&found, &own, id))
            {
                return Err(Error::State(format!(
                    "request {request_id:?}: blocks before token {} are not on the host in group \
                     {}: load all tokens that were found, or look up again if a block proved \
                     damaged since",
                    start + num_tokens,
                    id.0
                )));
            }
            copies.extend(first, blocks, &found, per_slot);
            slots.extend_from_slice(&found);
            copies.end_group();
        }
        check_targets(&copies.block_ids)?;
        Ok((slots, copies))
    }

    /// Checks the local blocks of a load that reports its blocks.
    fn check_local(&self, request_id: &str, local_ids: &[Vec<BlockId>]) -> Result<()> {
        let request = self.requests.get(request_id)?;
        let num_local_tokens = request.held.num_local_tokens;
        let slices: Vec<&[BlockId]> = local_ids.iter().map(Vec::as_slice).collect();
        self.check_blocks(&slices)?;
        for ((group, table), local) in self.model.groups().iter().zip(&request.tables).zip(&slices)
        {
            if group.attention != Attention::Full || !table.blocks.is_empty() {
                return Err(Error::State(format!(
                    "request {request_id:?}: a load reports its blocks only if all groups have full \
                     attention and no block was reported before: load without local blocks, and \
                     name all blocks in the next store"
                )));
            }
            let num_local = num_local_tokens / group.block_size;
            if local.len() != num_local {
                return Err(Error::Config(format!(
                    "request {request_id:?}: {num_local_tokens} local tokens are {num_local} blocks \
                     of {}, not {}: give the blocks before the load",
                    group.block_size,
                    local.len()
                )));
            }
        }
        Ok(())
    }

    /// Unpins what a request's lookup holds.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`].
    pub fn release(&mut self, request_id: &str) -> Result<()> {
        let request = self.requests.get_mut(request_id)?;
        self.host.unpin(&std::mem::take(&mut request.held).slots)
    }

    pub(super) fn check_multiple(&self, what: &str, num_tokens: usize) -> Result<()> {
        let block_size = self.model.hit_block_size();
        if !num_tokens.is_multiple_of(block_size) {
            return Err(Error::Config(format!(
                "{num_tokens} {what} tokens: it must be a multiple of the block size {block_size}"
            )));
        }
        Ok(())
    }
}

/// Refuses to load into other blocks than those that were reported in their places. A store would
/// take the reported ones for these tokens.
fn check_reported(
    request_id: &str,
    table: &ReportedTable,
    first: usize,
    blocks: &[BlockId],
) -> Result<()> {
    let reported = table.blocks.iter().skip(first);
    match reported.zip(blocks).find(|(known, block)| known != block) {
        Some((known, block)) => Err(Error::State(format!(
            "request {request_id:?} has reported block {} where the load fills block {}: restart a \
             request that has lost its blocks, also if its load has failed",
            known.0, block.0
        ))),
        None => Ok(()),
    }
}

/// Refuses null blocks, and one block as the target of two copies.
fn check_targets(block_ids: &[BlockId]) -> Result<()> {
    let refuse = |id, why| Err(Error::InvalidBlock { id, why });
    if block_ids.contains(&BlockId::NULL) {
        return refuse(BlockId::NULL, "is the null block: give a block to load into");
    }
    match first_repeated(block_ids) {
        Some(id) => refuse(id, "is the target of two copies: give each block once"),
        None => Ok(()),
    }
}

/// The first block that is named before. One bit per block of the range that the ids span, if that
/// is no more than a few words per id; a sort otherwise.
fn first_repeated(block_ids: &[BlockId]) -> Option<BlockId> {
    const MAX_WORDS_PER_ID: usize = 16;
    let first = block_ids.iter().min()?.index();
    let num_words = (block_ids.iter().max()?.index() - first) / 64 + 1;
    if num_words > block_ids.len() * MAX_WORDS_PER_ID {
        let mut sorted = block_ids.to_vec();
        sorted.sort_unstable();
        return repeated(&sorted);
    }
    let mut is_named = vec![0_u64; num_words];
    block_ids.iter().copied().find(|id| {
        let (word, bit) = ((id.index() - first) / 64, 1 << ((id.index() - first) % 64));
        let was_named = is_named[word] & bit != 0;
        is_named[word] |= bit;
        was_named
    })
}

#[cfg(test)]
#[path = "load_tests.rs"]
mod tests;
