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

use crate::error::{Error, Result};
use crate::group::{Group, Model};
use crate::ids::BlockId;
use crate::pool::BlockPool;

use super::request::Request;
use super::{BlockLedger, PrefixHit};

/// More tokens than any request has: keeps sums of token counts far from wrapping.
const MAX_TOKENS: usize = 1 << 40;

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
    /// Publish nothing until [`BlockLedger::cache`]: a load is to fill the blocks.
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
        let request = self.requests.get(request_id)?;
        self.check_args(request_id, request, args)?;
        let mut taken = Taken::new();
        let request = self.requests.get_mut(request_id)?;
        let max_in_flight = self.max_in_flight_tokens;
        let mut grant =
            Grant { pool: &mut self.pool, model: &self.model, max_in_flight, request, args };
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
        let args = |num_new_tokens| AllocateArgs {
            num_new_tokens,
            num_lookahead_tokens,
            num_in_flight_tokens,
            ..AllocateArgs::default()
        };
        for (request_id, num_new_tokens) in wants.clone() {
            let request = self.requests.get(request_id)?;
            self.check_args(request_id, request, &args(num_new_tokens))?;
        }
        let mut taken = Taken::new();
        for (request_id, num_new_tokens) in wants {
            let request = self.requests.get_mut(request_id)?;
            let args = &args(num_new_tokens);
            let max_in_flight = self.max_in_flight_tokens;
            let mut grant =
                Grant { pool: &mut self.pool, model: &self.model, max_in_flight, request, args };
            if !grant.allocate(&mut taken)? {
                break;
            }
        }
        Ok(taken)
    }

    fn check_args(&self, request_id: &str, request: &Request, args: &AllocateArgs) -> Result<()> {
        let hit_tokens = args.hit.map_or(0, |hit| hit.num_tokens);
        let config = |why: String| Err(Error::Config(format!("request {request_id:?}: {why}")));
        let state = |why: &str| Err(Error::State(format!("request {request_id:?} {why}")));
        if args.num_new_tokens == 0 && args.num_external_tokens == 0 && hit_tokens == 0 {
            return config("nothing to allocate: no hit, no external and no new tokens".to_owned());
        }
        let asked = [
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
        if request.is_delayed {
            return state("waits for a load: call cache when it has landed, or free if it failed");
        }
        if request.is_running && (args.hit.is_some() || args.num_external_tokens > 0) {
            return state("is running: a hit and external tokens are for its first allocation");
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
            if hit.request_serial != request.serial || hit.num_tokens > known_tokens {
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
    fn new() -> Self {
        Self { ids: Vec::new(), offsets: vec![0], num_granted: 0 }
    }
}

/// One allocation under way.
struct Grant<'a> {
    pool: &'a mut BlockPool,
    model: &'a Model,
    max_in_flight: Option<usize>,
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
        self.free_skipped(num_computed.saturating_sub(args.num_in_flight_tokens))?;
        if self.num_needed(num_slots, num_computed, None) + args.reserve > self.pool.num_free() {
            return Ok(false);
        }
        if !self.request.is_running {
            self.touch_hits(num_computed)?;
        }
        let first_taken: Vec<usize> =
            self.request.tables.iter().map(|table| table.blocks.len()).collect();
        if args.num_external_tokens > 0 {
            self.take_up_to(num_computed)?;
        }
        self.take_up_to(num_slots)?;
        for (table, first) in self.request.tables.iter().zip(first_taken) {
            taken.ids.extend_from_slice(&table.blocks[first..]);
            taken.offsets.push(taken.ids.len());
        }
        taken.num_granted += 1;
        self.request.num_granted_tokens = num_granted;
        self.request.is_running = true;
        self.request.is_delayed = args.delay_caching;
        if !args.delay_caching {
            self.request.publish(self.pool, num_granted, self.model);
        }
        Ok(true)
    }

    /// Frees, group by group and from the right, the blocks that no token after the first
    /// `num_processed` reads.
    fn free_skipped(&mut self, num_processed: usize) -> Result<()> {
        for (table, group) in self.request.tables.iter_mut().zip(self.model.groups()) {
            let end = group.num_skipped_blocks(num_processed).min(table.blocks.len());
            if end > table.num_skipped {
                let skipped = &mut table.blocks[table.num_skipped..end];
                skipped.reverse();
                self.pool.free(skipped)?;
                skipped.fill(BlockId::NULL);
                table.num_skipped = end;
            }
        }
        Ok(())
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
            table.blocks.extend_from_slice(kept);
            table.num_skipped = num_skipped;
            table.num_published = table.blocks.len();
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
