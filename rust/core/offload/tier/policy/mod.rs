//! Eviction policies: which slot is evicted when a tier needs room.
//!
//! The tier reports to a policy which slots become resident, are used and leave, and asks it for
//! one victim after the other. Only the tier knows which slots are evictable (unpinned leaves). To
//! add a policy, write a file with a [`Policy`], and an arm in each `match` below. CONTRIBUTING
//! lists the places outside this folder.
//!
//! May import: error, ids, key, ledger, pool, `slot_set`.

mod ghosts;
mod hit_density;
mod lru;
mod order;
mod parts;
mod record;

use std::iter::successors;
use std::ops::Range;
use std::str::FromStr;

use minicbor::{Decode, Encode};

use crate::error::{Error, Result};
use crate::ids::BlockId;
use crate::key::BlockKey;
use crate::pool::FreeQueue;

use hit_density::HitDensity;
use lru::Lru;
pub(super) use record::PolicyRecord;

/// Which slots a tier evicts first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub enum EvictionPolicy {
    /// The least recent slots.
    #[default]
    #[n(0)]
    Lru,
    /// The slot with the fewest expected hits per unit of time, of two: the least recent slot that
    /// was hit, and the least recent slot that was not.
    #[n(1)]
    HitDensity,
}

impl EvictionPolicy {
    /// All policies, the default first.
    pub const ALL: [Self; 2] = [Self::Lru, Self::HitDensity];

    /// The name by which users choose it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Lru => "lru",
            Self::HitDensity => "hit-density",
        }
    }

    /// Bytes that it takes per slot.
    pub(super) fn slot_bytes(self) -> usize {
        match self {
            Self::Lru => Lru::SLOT_BYTES,
            Self::HitDensity => HitDensity::SLOT_BYTES,
        }
    }

    /// A policy for slots `1..num_blocks`, none of them resident yet.
    pub(super) fn build(self, num_blocks: u32) -> AnyPolicy {
        match self {
            Self::Lru => AnyPolicy::Lru(Lru::new(num_blocks)),
            Self::HitDensity => AnyPolicy::HitDensity(Box::new(HitDensity::new(num_blocks))),
        }
    }
}

/// By name.
impl FromStr for EvictionPolicy {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        if let Some(known) = Self::ALL.into_iter().find(|known| known.name() == name) {
            return Ok(known);
        }
        let nearest = Self::ALL.into_iter().min_by_key(|known| distance(known.name(), name));
        Err(Error::Config(format!(
            "policy {name:?}: the nearest known is {:?}; it must be one of {}",
            nearest.unwrap_or_default().name(),
            Self::ALL.map(|known| format!("{:?}", known.name())).join(", ")
        )))
    }
}

/// The edit distance between two names: letters to insert, delete or replace.
fn distance(known: &str, given: &str) -> usize {
    let known: Vec<char> = known.chars().collect();
    let mut row: Vec<usize> = (0..=known.len()).collect();
    for letter in given.chars() {
        let mut diagonal = row[0];
        row[0] += 1;
        for at in 0..known.len() {
            let exchanged = diagonal + usize::from(known[at] != letter);
            diagonal = row[at + 1];
            row[at + 1] = exchanged.min(diagonal + 1).min(row[at] + 1);
        }
    }
    row[known.len()]
}

/// The eviction order of resident slots.
pub(super) trait Policy {
    /// Bytes that it takes per slot, all at construction.
    const SLOT_BYTES: usize;

    /// Reports slots that became resident, each with a `key`, the last of them the most recent.
    fn stored(
        &mut self,
        slots: impl Iterator<Item = BlockId>,
        key: impl Fn(BlockId) -> Option<BlockKey>,
    );

    /// Makes slots the most recent ones, the last most of all. Each comes with whether a request
    /// has hit it, reported once per request. Skips slots that are not resident.
    fn make_recent(&mut self, slots: impl Iterator<Item = (BlockId, bool)>);

    /// As [`make_recent`](Self::make_recent), for the chain from `tail` up to its root, whose
    /// `parent` is null. The `hits` are counted from the tail.
    fn make_chain_recent(
        &mut self,
        tail: BlockId,
        parent: impl Fn(BlockId) -> BlockId,
        hits: &Range<usize>,
    ) {
        let above = |slot: &BlockId| Some(parent(*slot));
        let chain = successors(Some(tail), above).take_while(|slot| !slot.is_null());
        self.make_recent(chain.enumerate().map(|(at, slot)| (slot, hits.contains(&at))));
    }

    /// As [`make_chain_recent`](Self::make_chain_recent) for each of `tails`, without hits.
    fn make_chains_recent(&mut self, tails: &[BlockId], parent: impl Fn(BlockId) -> BlockId);

    /// Makes a slot that was just stored the first victim. Skips one that is not resident.
    fn make_least_recent(&mut self, slot: BlockId);

    /// Reports that the chains below `root` are no longer as they were: the root got a parent, or a
    /// chain was cut.
    fn split(&mut self, _root: BlockId) {}

    /// Reports that a slot is no longer resident, if it was.
    fn removed(&mut self, slot: BlockId);

    /// The next slot to evict of those that are evictable. It stays until it is
    /// [`removed`](Self::removed).
    fn victim(&mut self, is_evictable: impl Fn(BlockId) -> bool) -> Option<BlockId>;

    /// Whether `slot` is resident and not behind `victim`, which the last search has found: it is
    /// before it in the same queue, or in another queue.
    fn has_passed(&self, slot: BlockId, victim: BlockId) -> bool;

    /// Reports slots that are evictable again, because a pin has ended or a child has left.
    fn retry(&mut self, slots: impl Iterator<Item = BlockId> + Clone);

    /// Forgets everything.
    fn clear(&mut self);

    /// Number of resident slots.
    fn len(&self) -> usize;

    /// The resident slots, each queue with its least recent first. Those of the first queue are
    /// worth less.
    fn queues(&self) -> impl Iterator<Item = &FreeQueue>;

    /// Whether `slot` is resident.
    fn contains(&self, slot: BlockId) -> bool;

    /// Bytes on the heap.
    #[cfg(test)]
    fn memory_bytes(&self) -> usize;

    /// Verifies its own state against the keys and parents of the resident slots, and which of them
    /// are evictable.
    ///
    /// # Errors
    /// [`Error::Broken`] names the first invariant that does not hold.
    fn check(
        &self,
        key: impl Fn(BlockId) -> Option<BlockKey>,
        parent: impl Fn(BlockId) -> BlockId,
        is_evictable: impl Fn(BlockId) -> bool,
    ) -> Result<()>;
}

/// One of the policies. [`with_policy`] calls it.
#[derive(Clone, Debug)]
pub(super) enum AnyPolicy {
    Lru(Lru),
    HitDensity(Box<HitDensity>),
}

/// Calls a method of the [`Policy`] in an [`AnyPolicy`]. The `match` is outside each loop, because
/// a call becomes slow if it decides for each of thousands of slots.
macro_rules! with_policy {
    ($any:expr, $policy:ident => $call:expr) => {
        match $any {
            AnyPolicy::Lru($policy) => $call,
            AnyPolicy::HitDensity($policy) => $call,
        }
    };
}

pub(super) use with_policy;

impl AnyPolicy {
    /// Whether `slot` is resident.
    pub(super) fn contains(&self, slot: BlockId) -> bool {
        with_policy!(self, policy => policy.contains(slot))
    }
}

#[cfg(test)]
mod tests;
