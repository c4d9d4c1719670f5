//! One request: what it may publish, what it was granted, which blocks it holds.

use std::ops::Range;

use crate::error::{Error, Result};
use crate::event::Origin;
use crate::hash::ExtraKey;
use crate::ids::{BlockId, GroupId};
use crate::key::{BlockHash, Hashes};
use crate::pool::BlockPool;

/// What events tell about a request's blocks besides their hashes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Context {
    /// The tokens, at least those of the hashed blocks.
    pub tokens: Option<Vec<u64>>,
    /// One entry per hashed block.
    pub extra_keys: Option<Vec<Option<Vec<ExtraKey>>>>,
}

#[derive(Clone, Debug)]
pub(super) struct Request {
    /// Which of all requests ever added this is.
    pub(super) serial: u64,
    pub(super) hashes: Vec<BlockHash>,
    /// Per group; null where the group no longer needs a block.
    pub(super) tables: Vec<Vec<BlockId>>,
    pub(super) num_granted_tokens: usize,
    /// Blocks, from the first, that were published or were hits.
    pub(super) num_published: usize,
    /// Whether it was served once: from then on it has no hit and no external tokens.
    pub(super) is_running: bool,
    /// Whether a load is still to fill its blocks.
    pub(super) is_delayed: bool,
    tokens: Option<Vec<u64>>,
    /// One entry per hash; shorter while nothing but None was given.
    extra_keys: Vec<Option<Vec<ExtraKey>>>,
}

impl Request {
    pub(super) fn new(serial: u64, num_groups: usize, has_tokens: bool) -> Self {
        Self {
            serial,
            hashes: Vec::new(),
            tables: vec![Vec::new(); num_groups],
            num_granted_tokens: 0,
            num_published: 0,
            is_running: false,
            is_delayed: false,
            tokens: has_tokens.then(Vec::new),
            extra_keys: Vec::new(),
        }
    }

    /// Refuses a context that does not go with the hashes, or with what was given before.
    pub(super) fn check_extension(
        &self,
        hashes: &Hashes,
        context: &Context,
        block_size: usize,
    ) -> Result<()> {
        let num_hashes = self.hashes.len() + hashes.len();
        if let Some(known) = &self.tokens {
            let num_tokens = known.len() + context.tokens.as_ref().map_or(0, Vec::len);
            if num_tokens < num_hashes * block_size {
                return Err(Error::Config(format!(
                    "{num_tokens} tokens for {num_hashes} hashes of {block_size} tokens each: give \
                     the tokens of every hashed block"
                )));
            }
        } else if context.tokens.is_some() {
            return Err(Error::Config(
                "tokens for a request that was added without: give them from the start".to_owned(),
            ));
        }
        match &context.extra_keys {
            Some(keys) if keys.len() != hashes.len() => Err(Error::Config(format!(
                "{} extra keys for {} hashes: give one entry per hash, None where there is none",
                keys.len(),
                hashes.len()
            ))),
            _ => Ok(()),
        }
    }

    pub(super) fn extend(&mut self, hashes: &Hashes, context: Context) {
        if let Some(keys) = context.extra_keys {
            self.extra_keys.resize(self.hashes.len(), None);
            self.extra_keys.extend(keys);
        }
        self.hashes.extend_from_slice(hashes.as_slice());
        if let (Some(known), Some(more)) = (&mut self.tokens, context.tokens) {
            known.extend(more);
        }
    }

    /// Refuses more tokens than are granted.
    pub(super) fn check_granted(
        &self,
        request_id: &str,
        num_tokens: usize,
        what: &str,
    ) -> Result<()> {
        if num_tokens > self.num_granted_tokens {
            return Err(Error::Config(format!(
                "cannot {what} {num_tokens} tokens of request {request_id:?}: it was granted {}",
                self.num_granted_tokens
            )));
        }
        Ok(())
    }

    /// Publishes the full blocks among the first `num_tokens` tokens whose hashes are known.
    #[inline]
    pub(super) fn publish(&mut self, pool: &mut BlockPool, num_tokens: usize, block_size: usize) {
        let range = self.num_published..(num_tokens / block_size).min(self.hashes.len());
        if range.is_empty() {
            return;
        }
        for (table, group) in self.tables.iter().zip((0..).map(GroupId)) {
            let ids = &table[range.clone()];
            pool.publish(ids, &self.hashes[range.clone()], group, |run| {
                self.origin(run.start + range.start..run.end + range.start, block_size)
            });
        }
        self.num_published = range.end;
    }

    fn origin(&self, run: Range<usize>, block_size: usize) -> Origin {
        let tokens = self.tokens.as_ref();
        let has_keys = self.extra_keys.iter().any(Option::is_some);
        Origin {
            parent: run.start.checked_sub(1).map(|before| self.hashes[before]),
            tokens: tokens.map(|all| all[run.start * block_size..run.end * block_size].to_vec()),
            extra_keys: has_keys
                .then(|| run.map(|at| self.extra_keys.get(at).cloned().flatten()).collect()),
            block_size: Some(block_size),
        }
    }
}
