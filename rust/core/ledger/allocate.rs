//! Two-phase allocation: free what is no longer read, predict what all groups need, then take it in
//! an order in which no group can take another group's hit.
//!
//! ```text
//!   tokens   | skipped | local hit | external | new | lookahead |
//!   granted  |<--------------------------------------->|
//!   blocks   | null    | touched   | taken    | taken           |
//!   phase              | 1         | 2        | 3               |
//! ```
//!
//! The reference is vLLM 0.32's `KVCacheManager.allocate_slots`. Every group touches its hits
//! (phase 1) before any group takes a block: a hit that sits in the free queue could otherwise be
//! taken as another group's new block, and stand in two tables.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::group::{Group, Model};
use crate::ids::BlockId;
use crate::pool::BlockPool;

use super::request::{Request, Table};
use super::{BlockLedger, PrefixHit, Publish};

/// More tokens than any request has: keeps sums of token counts far from wrapping.
pub(super) const MAX_TOKENS: usize = 1 << 40;

/// What one request wants; `Default` wants nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct AllocateArgs<'a> {
    /// Tokens to compute in this step, drafts included.
    pub num_new_tokens: usize,
    /// What [`BlockLedger::lookup`] of this request found; first allocation only.
    pub hit: Option<&'a PrefixHit>,
    /// Tokens right after the hit that a tier will fill; first allocation only.
    pub num_external_tokens: usize,
    /// Slots only: never published, never granted.
    pub num_lookahead_tokens: usize,
    /// Publish nothing until [`BlockLedger::cache`], and grant nothing more: a load is to fill the
    /// blocks.
    pub delay_caching: bool,
    /// Blocks that must stay free.
    pub reserve: usize,
    /// Granted tokens whose step is not finished: they still read what later ones skip.
    pub num_in_flight_tokens: usize,
    /// Refuse unless slots for that many tokens of the request would fit as well.
    pub must_fit_tokens: Option<usize>,
}

/// Newly taken ids, flat: request by request, group by group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Taken {
    /// The ids.
    pub ids: Vec<BlockId>,
    /// Where each (request, group) begins in `ids`, and the end of the last.
    pub offsets: Vec<usize>,
    /// How many requests, from the first, were served.
    pub num_granted: usize,
}

impl BlockLedger {
    /// Grants slots for a hit, external tokens and new tokens to one request, for every group or
    /// for none. None when the pool cannot serve it: the request stays added and holds what it
    /// held.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`]; [`Error::Config`] when nothing is asked for, or when external
    /// tokens are no multiple of the block size or reach beyond the known hashes;
    /// [`Error::State`] for a hit that is stale or another request's, a hit or external tokens on
    /// a running request, or a request whose load has not ended.
    pub fn allocate(&mut self, request_id: &str, args: &AllocateArgs) -> Result<Option<Taken>> {
        let place = self.requests.place(request_id)?;
        self.check_args(request_id, self.requests.at(place), args)?;
        let mut taken = Taken::with_capacity(self.model.groups().len());
        let mut grant = Grant {
            pool: &mut self.pool,
            model: &self.model,
            max_in_flight: self.max_in_flight_tokens,
            publish: self.publish,
            request: self.requests.at_mut(place),
            args,
        };
        let is_granted = grant.allocate(&mut taken)?;
        Ok(is_granted.then_some(taken))
    }

    /// As if [`BlockLedger::allocate`] were called for each request in turn; stops at the first
    /// that the pool cannot serve. `wants` gives each request and its new tokens; of `args` only
    /// lookahead and in-flight tokens count.
    ///
    /// # Errors
    /// As [`BlockLedger::allocate`], before anything has changed.
    pub fn allocate_step<'a>(
        &mut self,
        wants: impl Iterator<Item = (&'a str, usize)> + Clone,
        num_lookahead_tokens: usize,
        num_in_flight_tokens: usize,
    ) -> Result<Taken> {
        let mut args =
            AllocateArgs { num_lookahead_tokens, num_in_flight_tokens, ..AllocateArgs::default() };
        let mut places: Vec<usize> = Vec::with_capacity(wants.size_hint().0);
        for (request_id, num_new_tokens) in wants.clone() {
            let place = self.requests.place_after(places.last().copied(), request_id)?;
            args.num_new_tokens = num_new_tokens;
            self.check_args(request_id, self.requests.at(place), &args)?;
            places.push(place);
        }
        let mut taken = Taken::with_capacity(places.len() * self.model.groups().len());
        for (&place, (_, num_new_tokens)) in places.iter().zip(wants) {
            args.num_new_tokens = num_new_tokens;
            let mut grant = Grant {
                pool: &mut self.pool,
                model: &self.model,
                max_in_flight: self.max_in_flight_tokens,
                publish: self.publish,
                request: self.requests.at_mut(place),
                args: &args,
            };
            if !grant.allocate(&mut taken)? {
                break;
            }
        }
        Ok(taken)
    }

    #[inline]
    fn check_args(&self, request_id: &str, request: &Request, args: &AllocateArgs) -> Result<()> {
        let hit_tokens = args.hit.map_or(0, |hit| hit.num_tokens);
        let config = |why: String| Err(Error::Config(format!("request {request_id:?}: {why}")));
        let state = |why: &str| Err(Error::State(format!("request {request_id:?} {why}")));
        if args.num_new_tokens == 0 && args.num_external_tokens == 0 && hit_tokens == 0 {
            return config("nothing to allocate: no hit, no external and no new tokens".to_owned());
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
            return config(format!("{size} is more than {MAX_TOKENS}, the most that is counted"));
        }
        let num_slots = request.num_granted_tokens
            + hit_tokens
            + args.num_external_tokens
            + args.num_new_tokens
            + args.num_lookahead_tokens;
        if num_slots > MAX_TOKENS {
            return config(format!(
                "{num_slots} tokens in all are more than {MAX_TOKENS}, the most that is counted"
            ));
        }
        if request.is_delayed {
            return state("waits for a load: call cache when it has landed, or free if it failed");
        }
        if request.is_running && (args.hit.is_some() || args.num_external_tokens > 0) {
            return state("is running: a hit and external tokens are for its first allocation");
        }
        if args.hit.is_none() && args.num_external_tokens == 0 {
            return Ok(());
        }
        let hit_block_size = self.model.hit_block_size();
        if !args.num_external_tokens.is_multiple_of(hit_block_size) {
            return config(format!(
                "{} external tokens are no multiple of {hit_block_size}, the block size that all \
                 groups have in common",
                args.num_external_tokens
            ));
        }
        let known_tokens = request.hashes.len() * self.model.hash_block_size();
        if args.num_external_tokens > 0 && hit_tokens + args.num_external_tokens > known_tokens {
            return config(format!(
                "{hit_tokens} hit and {} external tokens: hashes are known for {known_tokens}",
                args.num_external_tokens
            ));
        }
        if let Some(hit) = args.hit {
            if !Arc::ptr_eq(&hit.ledger, &self.identity) {
                return state("was given a hit of another ledger: look it up in this one");
            }
            if hit.request_serial != request.serial
                || hit.num_tokens > known_tokens
                || !self.model.is_hit(hit.num_tokens, &hit.blocks)
            {
                return state("was given a hit that is not its own: look it up");
            }
            for ((id, group), blocks) in self.model.enumerate().zip(&hit.blocks) {
                let per_block = self.model.hashes_per_block(group);
                let own = request.hashes.chunks_exact(per_block).filter_map(<[_]>::last);
                let mut found = blocks.iter().zip(own).filter(|(block, _)| !block.is_null());
                if self.pool.check_ids(blocks).is_err()
                    || !found.all(|(&block, hash)| self.pool.holds(block, hash, id))
                {
                    return state(
                        "was given a stale hit, a block of it was evicted: look up again",
                    );
                }
            }
        }
        Ok(())
    }
}

impl Taken {
    fn with_capacity(num_ranges: usize) -> Self {
        let mut offsets = Vec::with_capacity(num_ranges + 1);
        offsets.push(0);
        Self { ids: Vec::new(), offsets, num_granted: 0 }
    }
}

/// One allocation under way.
struct Grant<'a> {
    pool: &'a mut BlockPool,
    model: &'a Model,
    max_in_flight: Option<usize>,
    publish: Publish,
    request: &'a mut Request,
    args: &'a AllocateArgs<'a>,
}

impl Grant<'_> {
    /// The steps of one allocation. Once the need is known to fit nothing is refused any more.
    fn allocate(&mut self, taken: &mut Taken) -> Result<bool> {
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
            let num_ranges = taken.offsets.len() + self.request.tables.len();
            taken.offsets.resize(num_ranges, taken.ids.len());
        } else if !self.move_blocks(num_slots, num_computed, num_processed, taken)? {
            return Ok(false);
        }
        taken.num_granted += 1;
        self.request.num_granted_tokens = num_granted;
        self.request.is_running = true;
        self.request.is_delayed = args.delay_caching;
        if self.publish == Publish::Granted && !args.delay_caching {
            self.request.publish(self.pool, num_granted, self.model);
        }
        Ok(true)
    }

    /// Whether no group has a block to take or to free: so in most steps of a decoding request.
    fn has_room(&self, num_slots: usize, num_processed: usize) -> bool {
        let has_room = |(table, group): (&Table, &Group)| {
            num_slots <= table.blocks.len() * group.block_size
                && group.num_skipped_blocks(num_processed) <= table.num_skipped
        };
        self.request.is_running
            && self.args.reserve <= self.pool.num_free()
            && self.request.tables.iter().zip(self.model.groups()).all(has_room)
    }

    /// Frees what is no longer read and takes what all groups need, if that fits.
    fn move_blocks(
        &mut self,
        num_slots: usize,
        num_computed: usize,
        num_processed: usize,
        taken: &mut Taken,
    ) -> Result<bool> {
        self.free_skipped(num_processed);
        let num_needed = self.num_needed(num_slots, num_computed, None);
        if num_needed + self.args.reserve > self.pool.num_free() {
            return Ok(false);
        }
        if !self.request.is_running {
            self.touch_hits(num_computed)?;
        }
        // Until the ids are copied, an offset says where in its table a group's new blocks begin.
        let first = taken.offsets.len();
        taken.offsets.extend(self.request.tables.iter().map(|table| table.blocks.len()));
        if self.args.num_external_tokens > 0 {
            self.take_up_to(num_computed)?;
        }
        self.take_up_to(num_slots)?;
        for (table, offset) in self.request.tables.iter().zip(&mut taken.offsets[first..]) {
            taken.ids.extend_from_slice(&table.blocks[*offset..]);
            *offset = taken.ids.len();
        }
        Ok(true)
    }

    /// Frees, group by group and from the right, the blocks that no token after the first
    /// `num_processed` reads.
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

    /// Blocks that leave the free queue so that the request has slots for `num_tokens`: those
    /// taken, and hits that nobody references. With `max_in_flight`, no more of a group than it
    /// can hold at once.
    fn num_needed(
        &self,
        num_tokens: usize,
        num_computed: usize,
        max_in_flight: Option<usize>,
    ) -> usize {
        let need = |(index, &group): (usize, &Group)| {
            let cap = max_in_flight.and_then(|num_tokens| group.max_held_blocks(num_tokens));
            let num_required = group.num_blocks(num_tokens).min(cap.unwrap_or(usize::MAX));
            let num_held = self.request.tables[index].blocks.len();
            if self.request.is_running {
                return num_required.saturating_sub(num_held);
            }
            let hits = self.args.hit.map_or(&[][..], |hit| &hit.blocks[index]);
            let num_skipped = group.num_skipped_blocks(num_computed);
            let is_free = |id: &&BlockId| {
                !id.is_null() && self.pool.num_refs(**id) == 0 && self.pool.num_pins(**id) == 0
            };
            let num_leaving = hits.iter().skip(num_skipped).filter(is_free).count();
            num_required.saturating_sub(num_skipped.max(hits.len())) + num_leaving
        };
        self.model.groups().iter().enumerate().map(need).sum()
    }

    /// Phase 1: puts the hits of every group into its table. What lies before the window of hit
    /// and external tokens becomes null, and is not touched.
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
            // A hit names no block of the tokens that a window retains below it.
            table.num_skipped += kept.iter().take_while(|id| id.is_null()).count();
            table.num_hits = table.blocks.len();
            table.num_published = table.num_hits;
            // A mistake on purpose: `two_phase_tests` shows what it breaks.
            #[cfg(test)]
            if super::two_phase_tests::INTERLEAVED.get() {
                let missing = group.num_blocks(num_computed).saturating_sub(table.blocks.len());
                self.pool.allocate(missing, &mut table.blocks)?;
            }
        }
        Ok(())
    }

    /// Phases 2 and 3: lengthens the table of every group to `num_tokens`.
    #[inline]
    fn take_up_to(&mut self, num_tokens: usize) -> Result<()> {
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
