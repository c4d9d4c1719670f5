//! A ledger as plain data: what a snapshot keeps of it, and how a new ledger restores it.
//!
//! ```text
//!   kept      requests, their tables up to the granted tokens, the keys of the blocks in them
//!   not kept  blocks without references (their bytes go with the device), lookahead, pins
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use minicbor::{Decode, Encode};

use crate::error::{Error, Result};
use crate::group::{Group, Model};
use crate::ids::{BlockId, GroupId};
use crate::key::{BlockHash, BlockKey, HashWidth, Hashes};
use crate::pool::{MAX_BLOCKS, check_ids, repeated};

use super::request::{MAX_TOKENS, Request};
use super::{BlockLedger, Context, Publish};

/// More requests than any ledger serves. A larger count could wrap.
const MAX_ADDED: u64 = u64::MAX / 2;

/// What a snapshot keeps of a ledger.
#[derive(Clone, Debug, Encode, Decode)]
pub(crate) struct LedgerRecord {
    #[n(0)]
    groups: Vec<Group>,
    #[n(1)]
    width: HashWidth,
    #[n(2)]
    num_added: u64,
    #[n(3)]
    requests: Vec<(String, Request)>,
    /// Of blocks in tables; of duplicates, the oldest first.
    #[n(4)]
    keys: Vec<(BlockId, BlockKey)>,
    #[n(5)]
    #[cbor(default)]
    publish: Publish,
}

/// The ids of restored blocks in the new pool.
#[derive(Clone, Debug)]
pub enum NewIds {
    /// The old ids.
    Same,
    /// 1, 2, 3, and so on, in the order in which the requests' tables name them: a table is a run.
    Packed,
    /// These, in the order of `Packed`. There may be more of them than blocks.
    Given(Vec<BlockId>),
}

/// A ledger restored from a snapshot.
#[derive(Clone, Debug)]
pub struct Restored {
    /// The ledger.
    pub ledger: BlockLedger,
    /// The old and the new id of each block that it holds, sorted by the old id.
    pub moves: Vec<(BlockId, BlockId)>,
}

/// A block in a table, as a sleep image stores it.
pub(crate) struct TableBlock<'a> {
    pub(crate) id: BlockId,
    pub(crate) group: GroupId,
    /// Its position in the table.
    pub(crate) index: usize,
    /// Of the table's request.
    pub(crate) hashes: &'a [BlockHash],
    /// Whether it holds the KV that the hash of its position names.
    pub(crate) is_published: bool,
}

impl BlockLedger {
    /// What a snapshot keeps. Without blocks, requests are as if they had never got slots.
    pub(crate) fn to_record(&self, with_blocks: bool) -> LedgerRecord {
        let kept = |(name, request): (&str, &Request)| {
            let mut request = request.clone();
            if with_blocks {
                let tables = request.tables.iter_mut().zip(self.model.groups());
                tables.for_each(|(table, group)| {
                    table.blocks.truncate(group.num_blocks(request.num_granted_tokens));
                });
            } else {
                request.restart(request.serial);
            }
            (name.to_owned(), request)
        };
        let keys = self.pool.cached().filter(|&(id, _)| with_blocks && self.pool.num_refs(id) > 0);
        LedgerRecord {
            groups: self.model.groups().to_vec(),
            width: self.pool.hash_width(),
            num_added: self.num_added,
            requests: self.requests.iter().map(kept).collect(),
            keys: keys.collect(),
            publish: self.publish,
        }
    }

    /// The distinct blocks that hold granted tokens, group after group, in the order of the tables.
    pub(crate) fn table_blocks(&self) -> impl Iterator<Item = TableBlock<'_>> {
        let mut is_seen = vec![false; self.pool.num_blocks()];
        let groups = self.model.enumerate();
        let all = groups.flat_map(move |(group, kind)| {
            self.requests.values().flat_map(move |request| {
                let blocks = &request.tables[usize::from(group.0)].blocks;
                let num_blocks = kind.num_blocks(request.num_granted_tokens);
                let blocks = blocks.iter().take(num_blocks).enumerate();
                blocks.map(move |(index, &id)| (group, index, id, request.hashes.as_slice()))
            })
        });
        let mut is_new = move |id: BlockId| !std::mem::replace(&mut is_seen[id.index()], true);
        all.filter(move |&(_, _, id, _)| !id.is_null() && is_new(id)).map(
            |(group, index, id, hashes)| {
                let is_published = self.pool.key(id).is_some();
                TableBlock { id, group, index, hashes, is_published }
            },
        )
    }

    /// The request's hashes, as `add` and `extend` got them.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`].
    pub fn hashes(&self, request_id: &str) -> Result<Hashes> {
        Ok(Hashes::new(self.pool.hash_width(), &self.requests.get(request_id)?.hashes))
    }

    /// As [`hashes`](Self::hashes), with the request's tokens and extra keys.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`].
    pub fn known(&self, request_id: &str) -> Result<(Hashes, Context)> {
        let request = self.requests.get(request_id)?;
        let extra_keys = (!request.extra_keys.is_empty()).then(|| {
            let mut keys = request.extra_keys.clone();
            keys.resize(request.hashes.len(), None);
            keys
        });
        let context = Context { tokens: request.tokens.clone(), extra_keys };
        Ok((self.hashes(request_id)?, context))
    }

    /// The ids of all requests.
    pub fn request_ids(&self) -> impl Iterator<Item = &str> {
        self.requests.iter().map(|(name, _)| name)
    }

    /// Fills this ledger, which must be new, with a record of another.
    pub(crate) fn fill(mut self, record: LedgerRecord, ids: NewIds) -> Result<Restored> {
        if record.groups != self.model.groups() {
            return Err(Error::Snapshot(format!(
                "the snapshot has groups {:?}, this ledger has {:?}: restore it into a ledger \
                 with its groups",
                record.groups,
                self.model.groups()
            )));
        }
        if record.publish != self.publish {
            return Err(Error::Snapshot(format!(
                "the snapshot publishes {:?} tokens, this ledger publishes {:?} tokens: restore \
                 it into a ledger with its publish",
                record.publish, self.publish
            )));
        }
        if !record.width.is_sound() {
            return damaged("a hash is wider than 32 bytes");
        }
        self.pool.agree_width(record.width)?;
        check_requests(&record, &self.model)?;
        self.num_added = record.num_added;
        self.identity = Arc::default();
        let new_ids = new_ids(&record, ids, self.pool.num_blocks())?;
        let has_events = self.pool.has_events();
        for (name, mut request) in record.requests {
            self.requests.check_new(&name).or_else(|_| damaged("it holds a request twice"))?;
            for table in &mut request.tables {
                for id in &mut table.blocks {
                    *id = new_ids.get(id).map_or(BlockId::NULL, |&(new, _)| new);
                }
                self.pool.touch(&table.blocks)?;
            }
            if !has_events {
                (request.tokens, request.extra_keys) = (None, Vec::new());
            }
            self.requests.insert(&name, request);
        }
        for (id, key) in record.keys {
            let Some(&(new, group)) = new_ids.get(&id) else {
                return damaged("a key belongs to no block in a table");
            };
            if group != key.group || self.pool.key(new).is_some() {
                return damaged("a block has a key of another group, or two keys");
            }
            self.pool.insert_unreported(&[new], &[key.hash], key.group);
        }
        self.check_keys()?;
        self.check().or_else(|error| damaged(&error.to_string()))?;
        let moves = new_ids.into_iter().map(|(old, (new, _))| (old, new)).collect();
        Ok(Restored { ledger: self, moves })
    }

    /// Refuses a published block whose key is not that of its place in a table. Refuses an
    /// unpublished block that has a key or a second reference.
    fn check_keys(&self) -> Result<()> {
        for request in self.requests.values() {
            for ((id, group), table) in self.model.enumerate().zip(&request.tables) {
                let (published, rest) = table.blocks.split_at(table.num_published);
                let hashes = self.model.own_hashes(group, &request.hashes, 0..table.num_published);
                let is_other = |(&block, hash): (&BlockId, &BlockHash)| {
                    self.pool.key(block).is_some() && !self.pool.holds(block, hash, id)
                };
                let is_used = |&block: &BlockId| {
                    !block.is_null()
                        && (self.pool.key(block).is_some() || self.pool.num_refs(block) != 1)
                };
                if published.iter().zip(hashes.iter()).any(is_other) || rest.iter().any(is_used) {
                    return damaged("a block in a table holds the key of another place");
                }
            }
        }
        Ok(())
    }
}

/// By old id, the new id and the group whose tables hold the block.
fn new_ids(
    record: &LedgerRecord,
    ids: NewIds,
    num_blocks: usize,
) -> Result<BTreeMap<BlockId, (BlockId, GroupId)>> {
    let mut order = Vec::new();
    // Requests share a block only through hits, so always at the same position.
    let mut positions = BTreeMap::new();
    let groups = || (0..=u16::MAX).map(GroupId);
    for (group, table) in record.requests.iter().flat_map(|(_, r)| groups().zip(&r.tables)) {
        let mut in_table = BTreeSet::new();
        for (index, &id) in table.blocks.iter().enumerate().filter(|(_, id)| !id.is_null()) {
            if id.index() >= MAX_BLOCKS || !in_table.insert(id) {
                return damaged("a block id is out of range, or a table holds a block twice");
            }
            let position = positions.entry(id).or_insert_with(|| {
                order.push((id, group));
                (group, index)
            });
            if *position != (group, index) {
                return damaged("tables hold a block at two positions");
            }
        }
    }
    if order.len() > num_blocks - 1 {
        return Err(Error::SmallPool { needed: order.len(), num_blocks });
    }
    let given = match ids {
        NewIds::Same => match positions.last_key_value() {
            Some((last, _)) if last.index() >= num_blocks => {
                return Err(Error::Config(format!(
                    "block {last} is outside a pool of {num_blocks} blocks: restore the {} blocks \
                     with packed ids, which fit",
                    order.len()
                )));
            }
            _ => order.iter().map(|&(id, _)| id).collect(),
        },
        NewIds::Packed => (1..).map(BlockId).take(order.len()).collect(),
        NewIds::Given(given) => {
            check_given(&given, order.len(), num_blocks)?;
            given
        }
    };
    Ok(order.into_iter().zip(given).map(|((old, group), new)| (old, (new, group))).collect())
}

/// Refuses new ids that are too few, outside the pool, null, or repeated.
fn check_given(given: &[BlockId], num_needed: usize, num_blocks: usize) -> Result<()> {
    if given.len() < num_needed {
        return Err(Error::Config(format!(
            "{} new ids for {num_needed} blocks: pass one id per block",
            given.len()
        )));
    }
    check_ids(given, num_blocks)?;
    let mut sorted = given.to_vec();
    sorted.sort_unstable();
    let refuse = |id, why| Err(Error::InvalidBlock { id, why });
    match (repeated(&sorted), sorted.first()) {
        (Some(id), _) => refuse(id, "is the new id of two blocks: pass each id once"),
        (None, Some(&id)) if id.is_null() => refuse(id, "is the null block: pass ids from 1 on"),
        _ => Ok(()),
    }
}

/// Refuses a record that no ledger writes.
fn check_requests(record: &LedgerRecord, model: &Model) -> Result<()> {
    if record.num_added > MAX_ADDED {
        return damaged("its count of requests is too large");
    }
    let mut serials = BTreeSet::new();
    for (_, request) in &record.requests {
        if request.serial >= record.num_added || !serials.insert(request.serial) {
            return damaged("a request has no serial number of its own");
        }
        if !request.hashes.iter().all(|hash| record.width.fits(hash)) {
            return damaged("a hash is wider than the others");
        }
        check_request(request, model)?;
    }
    if !record.keys.iter().all(|(_, key)| record.width.fits(&key.hash)) {
        return damaged("a hash is wider than the others");
    }
    Ok(())
}

fn check_request(request: &Request, model: &Model) -> Result<()> {
    if request.tables.len() != model.groups().len() {
        return damaged("a request has tables for other groups");
    }
    if request.num_granted_tokens > MAX_TOKENS
        || (!request.is_running && (request.num_granted_tokens > 0 || request.is_delayed))
    {
        return damaged("a request has grants that none can have");
    }
    for (table, group) in request.tables.iter().zip(model.groups()) {
        let num_blocks = table.blocks.len();
        let num_hashed = request.hashes.len() / model.hashes_per_block(*group);
        if num_blocks != group.num_blocks(request.num_granted_tokens)
            || table.num_skipped > group.num_unread_blocks(request.num_granted_tokens)
            || (request.is_delayed && table.num_published > table.num_hits)
            || table.num_published > num_blocks.min(num_hashed)
            || table.num_hits > table.num_published
        {
            return damaged("a table does not match its request's granted tokens");
        }
    }
    let num_hashed_tokens = request.hashes.len() * model.hash_block_size();
    let is_short = |tokens: &Vec<u64>| tokens.len() < num_hashed_tokens;
    if request.tokens.as_ref().is_some_and(is_short)
        || request.extra_keys.len() > request.hashes.len()
    {
        return damaged("a request's tokens or extra keys do not match its hashes");
    }
    Ok(())
}

/// The error for content that no kvstow writes.
pub(crate) fn damaged<T>(what: &str) -> Result<T> {
    Err(Error::Snapshot(format!("the snapshot is damaged: {what}")))
}
