//! Two-phase allocation: free skipped blocks, predict what all groups need, then allocate in an
//! order in which no group can evict another group's hit.
//!
//! ```text
//!   tokens   | skipped | local hit | external | new | lookahead |
//!   granted  |<--------------------------------------->|
//!   blocks   | null    | touched   | allocated    | allocated           |
//!   phase              | 1         | 2        | 3               |
//! ```
//!
//! The reference is vLLM 0.32's `KVCacheManager.allocate_slots`. Every group touches its hits
//! (phase 1) before any group allocates a block. Otherwise a group could allocate another group's
//! hit from the free queue, and one block would be in two tables.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::group::{Group, Model};
use crate::ids::BlockId;
use crate::pool::BlockPool;

use super::request::{BlockTable, MAX_TOKENS, Request};
use super::{BlockLedger, PrefixHit, Publish};

/// What a request asks for. `Default` asks for nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct AllocateArgs<'a> {
    /// Tokens to compute in this step, drafts included.
    pub num_new_tokens: usize,
    /// The hit that [`BlockLedger::lookup`] of this request found; first allocation only.
    pub hit: Option<&'a PrefixHit>,
    /// Tokens right after the hit that a tier fills; first allocation only.
    pub num_external_tokens: usize,
    /// Tokens that get slots, but are neither granted nor published.
    pub num_lookahead_tokens: usize,
    /// Publish and grant nothing more until [`BlockLedger::cache`], because a load has still to
    /// fill the blocks.
    pub delay_caching: bool,
    /// Blocks that must stay free.
    pub reserve: usize,
    /// Granted tokens whose step is not finished. They still read blocks that later tokens skip.
    pub num_in_flight_tokens: usize,
    /// Refuse unless slots for that many tokens of the request would fit as well.
    pub must_fit_tokens: Option<usize>,
}

/// The newly allocated ids: request by request, group by group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// The ids.
    pub ids: Vec<BlockId>,
    /// The start of each (request, group) in `ids`, and the end of the last.
    pub offsets: Vec<usize>,
    /// Number of requests, from the first, that got their slots.
    pub num_granted: usize,
}

impl BlockLedger {
    /// Grants slots for a hit, external tokens and new tokens to a request, in all groups or in
    /// none. None if the pool cannot serve the request; then it keeps what it held.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`]; [`Error::Config`] if nothing is asked for, or for external tokens
    /// that are not a multiple of the block size or exceed the known hashes; [`Error::State`] for a
    /// hit that is stale or of another request, a hit or external tokens after the first
    /// allocation, or a request whose load has not ended.
    pub fn allocate(
        &mut self,
        request_id: &str,
        args: &AllocateArgs,
    ) -> Result<Option<Allocation>> {
        let place = self.requests.place(request_id)?;
        self.check_args(request_id, self.requests.at(place), args)?;
        let mut allocated = Allocation::with_capacity(self.model.groups().len());
        let is_granted = self.grant(place, args).allocate(&mut allocated)?;
        Ok(is_granted.then_some(allocated))
    }

    /// Calls [`BlockLedger::allocate`] for each request in turn, and stops at the first that the
    /// pool cannot serve. `wants` names the requests and their new tokens.
    ///
    /// # Errors
    /// As [`BlockLedger::allocate`], before anything has changed.
    pub fn allocate_step<'a>(
        &mut self,
        wants: impl Iterator<Item = (&'a str, usize)> + Clone,
        num_lookahead_tokens: usize,
        num_in_flight_tokens: usize,
    ) -> Result<Allocation> {
        let mut args =
            AllocateArgs { num_lookahead_tokens, num_in_flight_tokens, ..AllocateArgs::default() };
        let mut places: Vec<usize> = Vec::with_capacity(wants.size_hint().0);
        for (request_id, num_new_tokens) in wants.clone() {
            let place = self.requests.place_after(places.last().copied(), request_id)?;
            args.num_new_tokens = num_new_tokens;
            self.check_args(request_id, self.requests.at(place), &args)?;
            places.push(place);
        }
        let mut allocated = Allocation::with_capacity(places.len() * self.model.groups().len());
        for (&place, (_, num_new_tokens)) in places.iter().zip(wants) {
            args.num_new_tokens = num_new_tokens;
            if !self.grant(place, &args).allocate(&mut allocated)? {
                break;
            }
        }
        Ok(allocated)
    }

    /// An allocation of the request at a place, whose arguments were checked.
    #[inline]
    fn grant<'a>(&'a mut self, place: usize, args: &'a AllocateArgs<'a>) -> Grant<'a> {
        Grant {
            pool: &mut self.pool,
            model: &self.model,
            max_in_flight: self.max_in_flight_tokens,
            publish: self.publish,
            request: self.requests.at_mut(place),
            args,
        }
    }

    #[inline]
    fn check_args(&self, request_id: &str, request: &Request, args: &AllocateArgs) -> Result<()> {
        let hit_tokens = args.hit.map_or(0, |hit| hit.num_tokens);
        let config = |why: String| Err(Error::Config(format!("request {request_id:?}: {why}")));
        let state = |why: &str| Err(Error::State(format!("request {request_id:?} {why}")));
        if args.num_new_tokens == 0 && args.num_external_tokens == 0 && hit_tokens == 0 {
            return config(
                "0 new tokens, no hit and no external tokens: leave the request out of this step, or \
                 pass new tokens"
                    .to_owned(),
            );
        }
        let asked = [
            hit_tokens,
            args.num_new_tokens,
            args.num_external_tokens,
            args.num_lookahead_tokens,
            args.num_in_flight_tokens,
            args.must_fit_tokens.unwrap_or(0),
            args.reserve,
        ];
        if let Some(size) = asked.iter().find(|&&size| size > MAX_TOKENS) {
            return config(format!("{size} is more than {MAX_TOKENS}, the maximum of a count"));
        }
        let num_slots = request.num_granted_tokens
            + hit_tokens
            + args.num_external_tokens
            + args.num_new_tokens
            + args.num_lookahead_tokens;
        if num_slots > MAX_TOKENS {
            return config(format!(
                "{num_slots} tokens in all are more than {MAX_TOKENS}, the maximum of a request"
            ));
        }
        if request.is_delayed {
            return state(
                "waits for a load: call cache when it has landed, or free if it has failed",
            );
        }
        if request.is_running && (args.hit.is_some() || args.num_external_tokens > 0) {
            return state("has slots: pass a hit and external tokens only at its first allocation");
        }
        if args.hit.is_none() && args.num_external_tokens == 0 {
            return Ok(());
        }
        let hit_block_size = self.model.hit_block_size();
        if !args.num_external_tokens.is_multiple_of(hit_block_size) {
            return config(format!(
                "{} external tokens are not a multiple of {hit_block_size}, the common block size \
                 of all groups",
                args.num_external_tokens
            ));
        }
        let known_tokens = request.hashes.len() * self.model.hash_block_size();
        if args.num_external_tokens > 0 && hit_tokens + args.num_external_tokens > known_tokens {
            return config(format!(
                "{hit_tokens} hit and {} external tokens exceed the {known_tokens} tokens that \
                 have hashes",
                args.num_external_tokens
            ));
        }
        args.hit.map_or(Ok(()), |hit| self.check_hit(hit, request).or_else(state))
    }

    /// The reason to refuse a hit of another ledger, of another request, or with a block that has
    /// lost its key.
    fn check_hit(&self, hit: &PrefixHit, request: &Request) -> Result<(), &'static str> {
        if !Arc::ptr_eq(&hit.ledger, &self.identity) {
            return Err("got a hit of another ledger: look it up in this one");
        }
        if hit.request_serial != request.serial
            || hit.num_tokens > request.hashes.len() * self.model.hash_block_size()
            || !self.model.is_hit(hit.num_tokens, &hit.blocks)
        {
            return Err("got a hit of another request: look it up");
        }
        for ((id, group), blocks) in self.model.enumerate().zip(&hit.blocks) {
            let per_block = self.model.hashes_per_block(group);
            let own = request.hashes.chunks_exact(per_block).filter_map(<[_]>::last);
            let mut found = blocks.iter().zip(own).filter(|(block, _)| !block.is_null());
            if self.pool.check_ids(blocks).is_err()
                || !found.all(|(&block, hash)| self.pool.holds(block, hash, id))
            {
                return Err("got a stale hit, a block of it has lost its key: look up again");
            }
        }
        Ok(())
    }
}

impl Allocation {
    fn with_capacity(num_ranges: usize) -> Self {
        let mut offsets = Vec::with_capacity(num_ranges + 1);
        offsets.push(0);
        Self { ids: Vec::new(), offsets, num_granted: 0 }
    }
}

/// One allocation of one request.
struct Grant<'a> {
    pool: &'a mut BlockPool,
    model: &'a Model,
    max_in_flight: Option<usize>,
    publish: Publish,
    request: &'a mut Request,
    args: &'a AllocateArgs<'a>,
}

impl Grant<'_> {
    /// The steps of an allocation. After the check that the need fits, no step can fail.
    fn allocate(&mut self, allocated: &mut Allocation) -> Result<bool> {
        let args = self.args;
        let num_hit_tokens = args.hit.map_or(0, |hit| hit.num_tokens);
        let num_computed =
            self.request.num_granted_tokens + num_hit_tokens + args.num_external_tokens;
        let num_granted = num_computed + args.num_new_tokens;
        let num_slots = num_granted + args.num_lookahead_tokens;
        if let Some(num_tokens) = args.must_fit_tokens
            && self.num_needed(num_tokens, num_computed, self.max_in_flight) > self.pool.num_free()
        {
            return Ok(false);
        }
        let num_processed = num_computed.saturating_sub(args.num_in_flight_tokens);
        if self.has_room(num_slots, num_processed) {
            let num_ranges = allocated.offsets.len() + self.request.tables.len();
            allocated.offsets.resize(num_ranges, allocated.ids.len());
        } else if !self.move_blocks(num_slots, num_computed, num_processed, allocated)? {
            return Ok(false);
        }
        allocated.num_granted += 1;
        self.request.num_granted_tokens = num_granted;
        self.request.is_running = true;
        self.request.is_delayed = args.delay_caching;
        if self.publish == Publish::Granted && !args.delay_caching {
            self.request.publish(self.pool, num_granted, self.model);
        }
        Ok(true)
    }

    /// Whether no group has to allocate or free a block, as in most steps of a decoding request.
    fn has_room(&self, num_slots: usize, num_processed: usize) -> bool {
        let has_room = |(table, group): (&BlockTable, &Group)| {
            num_slots <= table.blocks.len() * group.block_size
                && group.num_skipped_blocks(num_processed) <= table.num_skipped
        };
        self.request.is_running
            && self.args.reserve <= self.pool.num_free()
            && self.request.tables.iter().zip(self.model.groups()).all(has_room)
    }

    /// Frees skipped blocks, and allocates what all groups need if it fits.
    fn move_blocks(
        &mut self,
        num_slots: usize,
        num_computed: usize,
        num_processed: usize,
        allocated: &mut Allocation,
    ) -> Result<bool> {
        self.free_skipped(num_processed);
        let num_needed = self.num_needed(num_slots, num_computed, None);
        if num_needed + self.args.reserve > self.pool.num_free() {
            return Ok(false);
        }
        if !self.request.is_running {
            self.touch_hits(num_computed)?;
        }
        // Until the ids are copied, an offset is the position of a group's new blocks in its table.
        let first = allocated.offsets.len();
        allocated.offsets.extend(self.request.tables.iter().map(|table| table.blocks.len()));
        if self.args.num_external_tokens > 0 {
            self.extend_tables(num_computed)?;
        }
        self.extend_tables(num_slots)?;
        for (table, offset) in self.request.tables.iter().zip(&mut allocated.offsets[first..]) {
            allocated.ids.extend_from_slice(&table.blocks[*offset..]);
            *offset = allocated.ids.len();
        }
        Ok(true)
    }

    /// Frees the blocks that no token after the first `num_processed` reads, group by group, the
    /// last block first.
    fn free_skipped(&mut self, num_processed: usize) {
        for (table, group) in self.request.tables.iter_mut().zip(self.model.groups()) {
            let end = group.num_skipped_blocks(num_processed).min(table.blocks.len());
            if end > table.num_skipped {
                let skipped = &mut table.blocks[table.num_skipped..end];
                self.pool.release(skipped.iter().rev().copied());
                skipped.fill(BlockId::NULL);
                table.num_skipped = end;
            }
        }
    }

    /// Number of blocks that leave the free queue for slots of `num_tokens`: allocated blocks, and
    /// hits without references. With `max_in_flight`, a group counts no more blocks than it can
    /// hold at once.
    fn num_needed(
        &self,
        num_tokens: usize,
        num_computed: usize,
        max_in_flight: Option<usize>,
    ) -> usize {
        let need = |(index, &group): (usize, &Group)| {
            let num_required = group.max_held_blocks(num_tokens, max_in_flight);
            let num_held = self.request.tables[index].blocks.len();
            if self.request.is_running {
                return num_required.saturating_sub(num_held);
            }
            let hits = self.args.hit.map_or(&[][..], |hit| &hit.blocks[index]);
            let num_skipped = group.num_skipped_blocks(num_computed);
            let kept = hits.get(num_skipped..).unwrap_or_default();
            let num_leaving = self.pool.num_free_of(kept);
            num_required.saturating_sub(num_skipped.max(hits.len())) + num_leaving
        };
        self.model.groups().iter().enumerate().map(need).sum()
    }

    /// Phase 1: puts the hits of every group into its table and touches them. Hits before the
    /// window of hit and external tokens become null, and are not touched.
    fn touch_hits(&mut self, num_computed: usize) -> Result<()> {
        for (index, group) in self.model.groups().iter().enumerate() {
            let table = &mut self.request.tables[index];
            let hits = self.args.hit.map_or(&[][..], |hit| &hit.blocks[index]);
            let num_skipped = group.num_skipped_blocks(num_computed);
            let kept = hits.get(num_skipped..).unwrap_or_default();
            self.pool.touch(kept)?;
            table.blocks.resize(num_skipped, BlockId::NULL);
            table.num_skipped = num_skipped;
            table.blocks.extend_from_slice(kept);
            // A hit has no blocks for the tokens that a window retains below it.
            table.num_skipped += kept.iter().take_while(|id| id.is_null()).count();
            table.num_hits = table.blocks.len();
            table.num_published = table.num_hits;
            // A defect for `two_phase_tests`, which show what it breaks.
            #[cfg(test)]
            if super::two_phase_tests::INTERLEAVED.get() {
                let missing = group.num_blocks(num_computed).saturating_sub(table.blocks.len());
                self.pool.allocate(missing, &mut table.blocks)?;
            }
        }
        Ok(())
    }

    /// Phases 2 and 3: extends the table of every group to `num_tokens`.
    #[inline]
    fn extend_tables(&mut self, num_tokens: usize) -> Result<()> {
        for (table, group) in self.request.tables.iter_mut().zip(self.model.groups()) {
            if let Some(missing @ 1..) =
                group.num_blocks(num_tokens).checked_sub(table.blocks.len())
            {
                self.pool.allocate(missing, &mut table.blocks)?;
            }
        }
        Ok(())
    }
}
