//! A device's accounting: requests, their block tables, and the prefixes they share.
//!
//! `allocate` grants slots, `publish` makes keys findable, `request` holds one request, `record` is
//! the ledger as plain data for snapshots.
//!
//! May import: error, event, group, hash, ids, key, pool, requests.

mod allocate;
mod publish;
mod record;
mod request;
#[cfg(test)]
mod two_phase_tests;

pub use allocate::{AllocateArgs, Allocation};
pub(crate) use record::{LedgerRecord, TableBlock, damaged};
pub use record::{NewIds, Restored};
pub use request::{Context, MAX_TOKENS};

use std::sync::Arc;

use minicbor::{Decode, Encode};

use crate::error::{Error, Result};
use crate::group::{Group, Hit, Model};
use crate::ids::BlockId;
use crate::key::Hashes;
use crate::pool::BlockPool;
use crate::requests::Requests;

use request::{BlockTable, Request};

/// When lookups can find the key of a full block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub enum Publish {
    /// When its slots are granted, as vLLM does.
    #[n(0)]
    #[default]
    Granted,
    /// When the caller reports its tokens as computed.
    #[n(1)]
    Computed,
}

/// Block tables over one [`BlockPool`], for any number of groups.
#[derive(Clone, Debug)]
pub struct BlockLedger {
    pool: BlockPool,
    model: Model,
    /// The most tokens that a request is granted before they are processed, if the caller knows.
    max_in_flight_tokens: Option<usize>,
    publish: Publish,
    requests: Requests<Request>,
    /// Requests ever added or restarted: the serial number of the next one.
    num_added: u64,
    /// A hit holds it too, and so names the ledger that found the hit.
    identity: Arc<()>,
}

/// The prefix that [`BlockLedger::lookup`] found. It holds no references:
/// [`BlockLedger::allocate`] takes them. It refuses a hit with a block that has lost its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrefixHit {
    /// Tokens in the prefix, a multiple of the common block size.
    pub num_tokens: usize,
    /// The blocks of the prefix, per group; null where the group needs none.
    pub blocks: Vec<Vec<BlockId>>,
    request_serial: u64,
    ledger: Arc<()>,
}

impl BlockLedger {
    /// A ledger with a new pool of `num_blocks`, the null block included. `max_in_flight_tokens` is
    /// the most tokens that a request is granted before they are processed. With it,
    /// [`AllocateArgs::must_fit_tokens`] counts only what a window holds at once. Without it,
    /// `must_fit_tokens` counts all tokens.
    ///
    /// # Errors
    /// [`Error::Config`] for a number of blocks that [`BlockPool::new`] refuses, groups that
    /// [`Model::new`] refuses, or more than 2^40 tokens in flight.
    pub fn new(
        num_blocks: usize,
        groups: Vec<Group>,
        max_in_flight_tokens: Option<usize>,
        events: bool,
    ) -> Result<Self> {
        let model = Model::new(groups)?;
        let pool = BlockPool::new(num_blocks, events)?;
        if let Some(num_tokens) = max_in_flight_tokens
            && num_tokens > MAX_TOKENS
        {
            return Err(Error::Config(format!(
                "max_in_flight_tokens is {num_tokens}, more than {MAX_TOKENS}, the maximum: leave \
                 it out if there is no bound"
            )));
        }
        Ok(Self {
            pool,
            model,
            max_in_flight_tokens,
            publish: Publish::Granted,
            requests: Requests::default(),
            num_added: 0,
            identity: Arc::default(),
        })
    }

    /// The pool, to inspect it.
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// The pool, for pins, eviction of keys, reset and events. Only the ledger takes and drops
    /// references: [`BlockLedger::check`] fails after `allocate`, `touch` or `free` on the pool.
    pub fn pool_mut(&mut self) -> &mut BlockPool {
        &mut self.pool
    }

    /// The groups.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The fewest blocks for slots of `num_tokens`, `num_computed` of them computed. A pool with
    /// fewer usable blocks can never grant them.
    pub fn min_blocks(&self, num_tokens: usize, num_computed: usize) -> usize {
        let held = |group: &Group| {
            group.num_blocks(num_tokens).saturating_sub(group.num_skipped_blocks(num_computed))
        };
        self.model.groups().iter().map(held).fold(0, usize::saturating_add)
    }

    /// The blocks that [`AllocateArgs::must_fit_tokens`] counts for `num_tokens`.
    pub fn blocks_to_fit(&self, num_tokens: usize) -> usize {
        let held = |group: &Group| group.max_held_blocks(num_tokens, self.max_in_flight_tokens);
        self.model.groups().iter().map(held).fold(0, usize::saturating_add)
    }

    /// Whether no request was added and the pool is empty.
    pub(crate) fn is_new(&self) -> bool {
        let is_idle = self.pool.num_free() == self.pool.num_usable();
        self.num_added == 0 && is_idle && self.pool.num_cached() == 0
    }

    /// Number of requests that were added and not freed.
    pub fn num_requests(&self) -> usize {
        self.requests.len()
    }

    /// Adds a request. `context` is for events.
    ///
    /// # Errors
    /// [`Error::State`] for an id that the ledger has, [`Error::HashWidth`] for hashes of another
    /// width, [`Error::Config`] for hashes that are known not to continue the request's, for a
    /// context without events or one that does not cover the hashes.
    pub fn add(&mut self, request_id: &str, hashes: &Hashes, context: Context) -> Result<()> {
        self.requests.check_new(request_id)?;
        self.check_context(&context)?;
        let mut request =
            Request::new(self.num_added, self.model.groups().len(), context.tokens.is_some());
        request.check_extension(hashes, &context, self.model.hash_block_size())?;
        self.pool.agree_width(hashes.width())?;
        request.extend(hashes, context, self.model.hash_block_size());
        self.requests.insert(request_id, request);
        self.num_added += 1;
        Ok(())
    }

    /// Appends the hashes of blocks that generated tokens have filled.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`], and as [`BlockLedger::add`].
    pub fn extend(&mut self, request_id: &str, hashes: &Hashes, context: Context) -> Result<()> {
        self.check_context(&context)?;
        let request = self.requests.get_mut(request_id)?;
        request.check_extension(hashes, &context, self.model.hash_block_size())?;
        self.pool.agree_width(hashes.width())?;
        request.extend(hashes, context, self.model.hash_block_size());
        Ok(())
    }

    /// The longest cached prefix of at most `max_tokens` tokens that every group can serve.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`].
    pub fn lookup(&self, request_id: &str, max_tokens: usize) -> Result<PrefixHit> {
        let request = self.requests.get(request_id)?;
        let Hit { num_tokens, blocks, .. } =
            self.model.longest_hit(&self.pool, &request.hashes, 0, max_tokens);
        let ledger = Arc::clone(&self.identity);
        Ok(PrefixHit { num_tokens, blocks, request_serial: request.serial, ledger })
    }

    /// Reduces the granted tokens to `num_tokens`, because drafts were rejected. Frees nothing.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`]; [`Error::Config`] for more tokens than were granted;
    /// [`Error::State`] for fewer tokens than are published, because other requests may use them,
    /// and if the remaining tokens read blocks that were freed.
    pub fn rewind(&mut self, request_id: &str, num_tokens: usize) -> Result<()> {
        let request = self.requests.get_mut(request_id)?;
        request.check_granted(request_id, num_tokens, "rewind to")?;
        let num_published = request.num_published_tokens(&self.model);
        if num_tokens < num_published {
            return Err(Error::State(format!(
                "cannot rewind request {request_id:?} to {num_tokens} tokens: {num_published} are \
                 published, rewind to these or more"
            )));
        }
        for (table, group) in request.tables.iter().zip(self.model.groups()) {
            if table.num_skipped > group.num_unread_blocks(num_tokens) {
                return Err(Error::State(format!(
                    "cannot rewind request {request_id:?} to {num_tokens} tokens: they read blocks \
                     that were freed; rewind before the next step, or pass num_in_flight_tokens with \
                     its new tokens"
                )));
            }
        }
        request.num_granted_tokens = num_tokens;
        Ok(())
    }

    /// A request's block ids in one group.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`]; [`Error::Config`] for a group that does not exist.
    pub fn block_table(&self, request_id: &str, group: usize) -> Result<&[BlockId]> {
        let tables = &self.requests.get(request_id)?.tables;
        tables.get(group).map(|table| table.blocks.as_slice()).ok_or_else(|| {
            Error::Config(format!(
                "group {group} is not in a ledger of {}: groups count from 0",
                tables.len()
            ))
        })
    }

    /// Requests, as far as a tier below the device needs them. The reads of all overlap.
    ///
    /// Each id comes with the place that the request most likely has: the tier's place of it,
    /// because both get requests in one order.
    pub(crate) fn read_ahead<'a>(
        &self,
        likely: impl Iterator<Item = (usize, &'a str)>,
    ) -> Result<Vec<&Request>> {
        let at = |(place, request_id)| {
            Ok(self.requests.at(self.requests.place_near(place, request_id)?))
        };
        let requests = likely.map(at).collect::<Result<Vec<_>>>()?;
        std::hint::black_box(requests.iter().fold(0, |sum, request| sum ^ request.read_ahead()));
        Ok(requests)
    }

    /// Number of hashes that `add` and `extend` gave for a request.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`].
    pub fn num_hashes(&self, request_id: &str) -> Result<usize> {
        Ok(self.requests.get(request_id)?.hashes.len())
    }

    /// Tokens that have slots: hit, external and new ones, minus rewound ones.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`].
    pub fn num_granted_tokens(&self, request_id: &str) -> Result<usize> {
        Ok(self.requests.get(request_id)?.num_granted_tokens)
    }

    /// Drops a request and its references, group by group, each group's tail first. So a prefix
    /// outlives its extensions.
    ///
    /// If a step was not finished, give the number of tokens that were computed: the request's own
    /// blocks beyond them lose their keys, and blocks that it hit keep theirs. Returns the other
    /// requests, sorted, whose tables hold a block that was never computed. Free them too, and let
    /// them recompute. Skipped blocks count as computed, so name tokens in flight when you allocate.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`]; [`Error::Config`] for more computed tokens than were granted.
    pub fn free(
        &mut self,
        request_id: &str,
        num_computed_tokens: Option<usize>,
    ) -> Result<Vec<String>> {
        let uncomputed = self.evict_uncomputed(request_id, num_computed_tokens)?;
        let request = self.requests.remove(request_id)?;
        Ok(self.release(&request.tables, uncomputed))
    }

    /// Frees a request's blocks as [`BlockLedger::free`] does. The request stays added, with its
    /// hashes and its context, as before its first allocation.
    ///
    /// # Errors
    /// As [`BlockLedger::free`].
    pub fn restart(
        &mut self,
        request_id: &str,
        num_computed_tokens: Option<usize>,
    ) -> Result<Vec<String>> {
        let uncomputed = self.evict_uncomputed(request_id, num_computed_tokens)?;
        let tables = self.requests.get_mut(request_id)?.restart(self.num_added);
        self.num_added += 1;
        Ok(self.release(&tables, uncomputed))
    }

    /// Drops a request's references. Returns the requests that still hold `uncomputed` blocks.
    fn release(&mut self, tables: &[BlockTable], mut uncomputed: Vec<BlockId>) -> Vec<String> {
        for table in tables {
            let kept = table.blocks.get(table.num_skipped..).unwrap_or_default();
            self.pool.release(kept.iter().rev().copied());
        }
        uncomputed.retain(|&id| self.pool.num_refs(id) > 0);
        self.holders(&uncomputed)
    }

    /// Verifies every invariant of requests and pool.
    ///
    /// # Errors
    /// [`Error::Broken`] names the first that does not hold.
    pub fn check(&self) -> Result<()> {
        self.pool.check()?;
        let broken = |what: String| Err(Error::Broken(format!("ledger: {what}")));
        let mut num_refs = vec![0; self.pool.num_blocks()];
        for request in self.requests.values() {
            for ((_, group), table) in self.model.enumerate().zip(&request.tables) {
                let (num_blocks, num_granted) = (table.blocks.len(), request.num_granted_tokens);
                if table.num_skipped > group.num_unread_blocks(num_granted) {
                    return broken(format!("{} blocks were skipped too early", table.num_skipped));
                }
                if num_blocks < group.num_blocks(num_granted) {
                    return broken(format!("{num_blocks} blocks for {num_granted} granted tokens"));
                }
                if table.num_published * group.block_size > num_granted
                    || table.num_hits > table.num_published
                {
                    return broken(format!("{} blocks published", table.num_published));
                }
                let (skipped, kept) = table.blocks.split_at(table.num_skipped.min(num_blocks));
                if skipped.iter().any(|id| !id.is_null()) || kept.iter().any(|id| id.is_null()) {
                    return broken(format!("{} blocks skipped", table.num_skipped));
                }
                for id in kept {
                    num_refs[id.index()] += 1;
                }
            }
        }
        for (id, num_refs) in (0..).map(BlockId).zip(num_refs) {
            if self.pool.num_refs(id) != num_refs {
                return broken(format!(
                    "block {id} is {num_refs} times in tables and has {} references",
                    self.pool.num_refs(id)
                ));
            }
        }
        Ok(())
    }

    fn check_context(&self, context: &Context) -> Result<()> {
        let is_given = context.tokens.is_some() || context.extra_keys.is_some();
        if is_given && !self.pool.has_events() {
            return Err(Error::Config(
                "tokens and extra keys are for events: pass events=True to the engine or ledger, \
                 events_path to the engine, or leave them out"
                    .to_owned(),
            ));
        }
        Ok(())
    }
}
