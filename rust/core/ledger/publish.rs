//! When a block's key is published, and which keys go when a step is never computed.
//!
//! ```text
//!   Granted   allocate publishes        a lookup finds blocks whose step may still be running
//!   Computed  cache, cache_step publish  a lookup finds only blocks that the caller reported
//! ```
//!
//! vLLM publishes when it grants: requests of one step share a prefix that this step computes. A
//! step that is dropped leaves keys of blocks that nobody wrote; [`BlockLedger::free_computed`]
//! drops them and names the requests that have hit them.

use minicbor::{Decode, Encode};

use crate::error::Result;
use crate::ids::BlockId;

use super::BlockLedger;

/// When the key of a full block becomes findable.
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

impl BlockLedger {
    /// The same ledger, with another moment of publication. Call it on a new one.
    #[must_use]
    pub fn with_publish(mut self, publish: Publish) -> Self {
        self.publish = publish;
        self
    }

    /// Publishes a request's blocks up to `num_tokens` computed tokens, and ends the delay that
    /// [`AllocateArgs::delay_caching`](super::AllocateArgs::delay_caching) began.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`](crate::error::Error::UnknownRequest);
    /// [`Error::Config`](crate::error::Error::Config) beyond the granted tokens.
    pub fn cache(&mut self, request_id: &str, num_tokens: usize) -> Result<()> {
        self.cache_step(std::iter::once((request_id, num_tokens)))
    }

    /// As [`BlockLedger::cache`] for each of a step's requests.
    ///
    /// # Errors
    /// As [`BlockLedger::cache`], before anything has changed.
    pub fn cache_step<'a>(
        &mut self,
        computed: impl Iterator<Item = (&'a str, usize)> + Clone,
    ) -> Result<()> {
        let mut places: Vec<usize> = Vec::with_capacity(computed.size_hint().0);
        for (request_id, num_tokens) in computed.clone() {
            let place = self.requests.place_after(places.last().copied(), request_id)?;
            self.requests.at(place).check_granted(request_id, num_tokens, "publish")?;
            places.push(place);
        }
        for (&place, (_, num_tokens)) in places.iter().zip(computed) {
            let request = self.requests.at_mut(place);
            request.is_delayed = false;
            request.publish(&mut self.pool, num_tokens, &self.model);
        }
        Ok(())
    }

    /// As [`BlockLedger::free`], of a request that has computed only its first
    /// `num_computed_tokens`: its own blocks beyond them lose their keys. Blocks that it hit keep
    /// theirs. Returns, sorted, the other requests whose tables hold a block that was never
    /// computed: free them too, and let them recompute.
    ///
    /// Tokens that an allocation did not name as in flight count as computed: what a window has
    /// left since is not looked at.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`](crate::error::Error::UnknownRequest);
    /// [`Error::Config`](crate::error::Error::Config) beyond the granted tokens.
    pub fn free_computed(
        &mut self,
        request_id: &str,
        num_computed_tokens: usize,
    ) -> Result<Vec<String>> {
        self.end_computed(request_id, num_computed_tokens, Self::free)
    }

    /// As [`BlockLedger::free_computed`], of a request that stays added: [`BlockLedger::restart`].
    ///
    /// # Errors
    /// As [`BlockLedger::free_computed`].
    pub fn restart_computed(
        &mut self,
        request_id: &str,
        num_computed_tokens: usize,
    ) -> Result<Vec<String>> {
        self.end_computed(request_id, num_computed_tokens, Self::restart)
    }

    fn end_computed(
        &mut self,
        request_id: &str,
        num_computed_tokens: usize,
        end: impl FnOnce(&mut Self, &str) -> Result<()>,
    ) -> Result<Vec<String>> {
        let request = self.requests.get(request_id)?;
        request.check_granted(request_id, num_computed_tokens, "count as computed")?;
        let mut uncomputed: Vec<BlockId> = Vec::new();
        for (table, group) in request.tables.iter().zip(self.model.groups()) {
            let start = num_computed_tokens / group.block_size;
            let start = start.max(table.num_hits).max(table.num_skipped);
            uncomputed.extend(table.blocks.get(start..).unwrap_or_default());
        }
        self.pool.evict(&uncomputed)?;
        end(self, request_id)?;
        uncomputed.retain(|&id| self.pool.num_refs(id) > 0);
        Ok(self.holders(&uncomputed))
    }

    /// The requests whose tables hold one of these blocks, sorted.
    fn holders(&self, blocks: &[BlockId]) -> Vec<String> {
        if blocks.is_empty() {
            return Vec::new();
        }
        let mut is_named = vec![false; self.pool.num_blocks()];
        for id in blocks {
            is_named[id.index()] = true;
        }
        let holds = |tables: &[super::request::Table]| {
            tables.iter().flat_map(|table| &table.blocks).any(|id| is_named[id.index()])
        };
        let all = self.requests.iter().filter(|(_, request)| holds(&request.tables));
        let mut names: Vec<String> = all.map(|(name, _)| name.to_owned()).collect();
        names.sort_unstable();
        names
    }
}
