//! A request: its hashes, its granted tokens and its block tables.

use std::borrow::Cow;
use std::ops::Range;

use minicbor::{Decode, Encode};

use crate::error::{Error, Result};
use crate::event::Origin;
use crate::group::{Group, Model};
use crate::hash::ExtraKey;
use crate::ids::BlockId;
use crate::key::{Hashes, SharedHashes};
use crate::pool::BlockPool;

/// More tokens than any request has: keeps sums of token counts far from wrapping.
pub const MAX_TOKENS: usize = 1 << 40;

/// What events report about a request's blocks besides their hashes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Context {
    /// The tokens of the blocks whose hashes come with them. Those of a block that is not full may
    /// follow, and are dropped.
    pub tokens: Option<Vec<u64>>,
    /// One entry per hashed block.
    pub extra_keys: Option<Vec<Option<Vec<ExtraKey>>>>,
}

/// A request's blocks in one group.
#[derive(Clone, Debug, Default, Encode, Decode)]
pub(crate) struct BlockTable {
    #[n(0)]
    pub(crate) blocks: Vec<BlockId>,
    /// How many of them, from the first, are null because the group skips them.
    #[n(1)]
    pub(super) num_skipped: usize,
    /// How many of them, from the first, were published, hits, or skipped before either.
    #[n(2)]
    pub(super) num_published: usize,
    /// How many of them, from the first, were hits or were skipped at the first allocation. The
    /// others are the request's own, and hold what it computes.
    #[n(3)]
    #[cbor(default)]
    pub(super) num_hits: usize,
}

#[derive(Clone, Debug, Default, Encode, Decode)]
pub(crate) struct Request {
    /// Number of requests that the ledger had added or restarted before.
    #[n(0)]
    pub(crate) serial: u64,
    #[n(1)]
    #[cbor(with = "crate::key::flat")]
    pub(crate) hashes: SharedHashes,
    /// Per group.
    #[n(2)]
    pub(crate) tables: Vec<BlockTable>,
    #[n(3)]
    pub(crate) num_granted_tokens: usize,
    /// Whether it has got slots. From then on it takes no hit and no external tokens.
    #[n(4)]
    pub(super) is_running: bool,
    /// Whether a load has still to fill its blocks.
    #[n(5)]
    pub(super) is_delayed: bool,
    #[n(6)]
    pub(super) tokens: Option<Vec<u64>>,
    /// One entry per hash. Shorter while every entry was None.
    #[n(7)]
    pub(super) extra_keys: Vec<Option<Vec<ExtraKey>>>,
}

impl Request {
    /// Reads what a store needs of it.
    #[inline]
    pub(super) fn read_ahead(&self) -> u32 {
        let hash = self.hashes.last().map_or(0, |hash| u32::from(hash[0]));
        let last = |table: &BlockTable| table.blocks.last().map_or(0, |block| block.0);
        self.tables.iter().map(last).fold(hash, |sum, block| sum ^ block)
    }

    pub(super) fn new(serial: u64, num_groups: usize, has_tokens: bool) -> Self {
        Self {
            serial,
            tables: vec![BlockTable::default(); num_groups],
            tokens: has_tokens.then(Vec::new),
            ..Self::default()
        }
    }

    /// Makes this a request without blocks, with another serial. Returns the tables it had.
    pub(super) fn restart(&mut self, serial: u64) -> Vec<BlockTable> {
        let tables = vec![BlockTable::default(); self.tables.len()];
        (self.serial, self.num_granted_tokens) = (serial, 0);
        (self.is_running, self.is_delayed) = (false, false);
        std::mem::replace(&mut self.tables, tables)
    }

    /// Refuses a context that does not match the hashes, or the context of earlier hashes.
    pub(super) fn check_extension(
        &self,
        hashes: &Hashes,
        context: &Context,
        block_size: usize,
    ) -> Result<()> {
        hashes.check_continues(&self.hashes)?;
        if self.tokens.is_some() {
            let num_tokens = context.tokens.as_ref().map_or(0, Vec::len);
            let num_hashed = hashes.len() * block_size;
            if num_tokens < num_hashed {
                return Err(Error::Config(format!(
                    "{num_tokens} tokens for {} hashes of {block_size} tokens each: give the tokens \
                     of these blocks, from the first token of the first block on",
                    hashes.len()
                )));
            }
            // Tokens from the start of the prompt would be those of other blocks.
            if !self.hashes.is_empty() && num_tokens >= num_hashed + block_size {
                return Err(Error::Config(format!(
                    "{num_tokens} tokens for {} more hashes of {block_size} tokens each: give the \
                     tokens of these blocks alone",
                    hashes.len()
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

    pub(super) fn extend(&mut self, hashes: &Hashes, context: Context, block_size: usize) {
        if let Some(keys) = context.extra_keys {
            self.extra_keys.resize(self.hashes.len(), None);
            self.extra_keys.extend(keys);
        }
        if let (Some(known), Some(more)) = (&mut self.tokens, context.tokens) {
            known.truncate(self.hashes.len() * block_size); // a snapshot may have more
            known.extend(&more[..hashes.len() * block_size]);
        }
        hashes.append_to(&mut self.hashes);
    }

    /// Refuses more tokens than were granted.
    pub(super) fn check_granted(
        &self,
        request_id: &str,
        num_tokens: usize,
        what: &str,
    ) -> Result<()> {
        if num_tokens > self.num_granted_tokens {
            return Err(Error::Config(format!(
                "cannot {what} {num_tokens} tokens of request {request_id:?}: it was granted {}, \
                 drafts included",
                self.num_granted_tokens
            )));
        }
        Ok(())
    }

    /// Number of tokens, from the first, that are published in some group.
    pub(super) fn num_published_tokens(&self, model: &Model) -> usize {
        let tables = self.tables.iter().zip(model.groups());
        tables.map(|(table, group)| table.num_published * group.block_size).max().unwrap_or(0)
    }

    /// Publishes, in every group, the full blocks of the first `num_tokens` tokens that have hashes
    /// and that a hit can need.
    #[inline]
    pub(super) fn publish(&mut self, pool: &mut BlockPool, num_tokens: usize, model: &Model) {
        let num_tokens = num_tokens.min(self.hashes.len() * model.hash_block_size());
        let is_behind = |(table, group): (&BlockTable, &Group)| {
            num_tokens >= (table.num_published + 1) * group.block_size
        };
        if !self.tables.iter().zip(model.groups()).any(is_behind) {
            return; // in most steps of a decoding request
        }
        for (id, group) in model.enumerate() {
            let table = &self.tables[usize::from(id.0)];
            let range = table.num_published..model.num_hit_blocks(group, num_tokens);
            if range.is_empty() {
                continue;
            }
            let hashes_per_block = model.hashes_per_block(group);
            let mut ids = Cow::Borrowed(&table.blocks[range.clone()]);
            if let Some(is_reachable) = model.reachable(group) {
                for (id, index) in ids.to_mut().iter_mut().zip(range.clone()) {
                    if !is_reachable(index) {
                        *id = BlockId::NULL;
                    }
                }
            }
            let hashes = model.own_hashes(group, &self.hashes, range.clone());
            pool.publish(&ids, &hashes, id, |run| {
                let run = run.start + range.start..run.end + range.start;
                self.origin(run, group.block_size, hashes_per_block)
            });
            self.tables[usize::from(id.0)].num_published = range.end;
        }
    }

    /// What events report about the blocks at `run`.
    fn origin(&self, run: Range<usize>, block_size: usize, hashes_per_block: usize) -> Origin {
        let tokens = self.tokens.as_ref();
        let has_keys = self.extra_keys.iter().any(Option::is_some);
        let keys = |at: usize| {
            let own = at * hashes_per_block..(at + 1) * hashes_per_block;
            let mut keys: Vec<ExtraKey> = Vec::new();
            // Hashes of one block repeat keys. What repeats within one hash is part of the hash.
            for of_hash in own.filter_map(|hash| self.extra_keys.get(hash)?.as_ref()) {
                let num_before = keys.len();
                for key in of_hash {
                    if !keys[..num_before].contains(key) {
                        keys.push(key.clone());
                    }
                }
            }
            (!keys.is_empty()).then_some(keys)
        };
        Origin {
            parent: (run.start * hashes_per_block).checked_sub(1).map(|before| self.hashes[before]),
            tokens: tokens.map(|all| all[run.start * block_size..run.end * block_size].to_vec()),
            extra_keys: has_keys.then(|| run.map(keys).collect()),
            block_size: Some(block_size),
        }
    }
}
