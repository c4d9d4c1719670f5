//! When the ledger publishes a block's key, and which keys it drops with a step that was not
//! computed.
//!
//! ```text
//!   Granted   allocate publishes         a lookup finds blocks whose step may still be running
//!   Computed  cache, cache_step publish  a lookup finds only blocks that the caller reported
//! ```
//!
//! vLLM publishes granted tokens, so requests of one step share a prefix that this step computes.
//! If the step is dropped, blocks have keys but no KV. [`BlockLedger::free`] drops these keys
//! and names the requests that have hit the blocks.

use crate::error::Result;
use crate::ids::BlockId;

use super::request::BlockTable;
use super::{BlockLedger, Publish};

impl BlockLedger {
    /// The same ledger with this `publish`. Call it on a new ledger.
    #[must_use]
    pub fn with_publish(mut self, publish: Publish) -> Self {
        self.publish = publish;
        self
    }

    /// Publishes a request's blocks up to `num_tokens` computed tokens. Ends the delay that
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

    /// Takes their keys from the request's own blocks beyond its first `num_computed_tokens`. Blocks
    /// that it hit keep theirs, and skipped blocks count as computed. Returns these blocks; none if
    /// the number is None, because all granted tokens were computed.
    pub(super) fn evict_uncomputed(
        &mut self,
        request_id: &str,
        num_computed_tokens: Option<usize>,
    ) -> Result<Vec<BlockId>> {
        let Some(num_computed_tokens) = num_computed_tokens else { return Ok(Vec::new()) };
        let request = self.requests.get(request_id)?;
        request.check_granted(request_id, num_computed_tokens, "count as computed")?;
        let mut uncomputed: Vec<BlockId> = Vec::new();
        for (table, group) in request.tables.iter().zip(self.model.groups()) {
            let start = num_computed_tokens / group.block_size;
            let start = start.max(table.num_hits).max(table.num_skipped);
            uncomputed.extend(table.blocks.get(start..).unwrap_or_default());
        }
        self.pool.evict(&uncomputed)?;
        Ok(uncomputed)
    }

    /// The requests whose tables hold one of these blocks, sorted.
    pub(super) fn holders(&self, blocks: &[BlockId]) -> Vec<String> {
        if blocks.is_empty() {
            return Vec::new();
        }
        let mut is_named = vec![false; self.pool.num_blocks()];
        for id in blocks {
            is_named[id.index()] = true;
        }
        let holds = |tables: &[BlockTable]| {
            tables.iter().flat_map(|table| &table.blocks).any(|id| is_named[id.index()])
        };
        let all = self.requests.iter().filter(|(_, request)| holds(&request.tables));
        let mut names: Vec<String> = all.map(|(name, _)| name.to_owned()).collect();
        names.sort_unstable();
        names
    }
}
