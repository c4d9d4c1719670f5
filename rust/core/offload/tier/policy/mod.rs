//! Which slot goes when room is needed.
//!
//! The tier tells a policy what becomes resident, what is used and what goes, and asks it for one
//! victim after the other; what may go at all (unpinned leaves) the tier alone knows. A policy is a
//! file with a [`Policy`], and an arm in each of the `match`es below.

mod ghosts;
mod hit_density;
mod lru;
mod order;
mod record;

use std::iter::successors;
use std::str::FromStr;

use minicbor::{Decode, Encode};

use crate::error::{Error, Result};
use crate::ids::BlockId;
use crate::key::BlockKey;

use hit_density::HitDensity;
use lru::Lru;
pub(super) use record::PolicyRecord;

/// Which slots a host tier gives up first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub enum EvictionPolicy {
    /// The least recently ranked ones.
    #[default]
    #[n(0)]
    Lru,
    /// Of the least recently ranked slot that was never hit and the one that was, the one that
    /// promises fewer hits for the time that it stays.
    #[n(1)]
    HitDensity,
}

impl EvictionPolicy {
    /// All there are, the default first.
    pub const ALL: [Self; 2] = [Self::Lru, Self::HitDensity];

    /// What it is chosen by.
    pub fn name(self) -> &'static str {
        match self {
            Self::Lru => "lru",
            Self::HitDensity => "hit-density",
        }
    }

    /// What it keeps per slot, in bytes.
    pub(super) fn slot_bytes(self) -> usize {
        match self {
            Self::Lru => Lru::SLOT_BYTES,
            Self::HitDensity => HitDensity::SLOT_BYTES,
        }
    }

    /// For slots `1..num_blocks`, none of them resident yet.
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

/// How many letters must be put in, taken out or exchanged to make one name the other.
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

/// An order of the resident slots in which they go.
pub(super) trait Policy {
    /// What it keeps per slot, in bytes, all of it taken at construction.
    const SLOT_BYTES: usize;

    /// Slots became resident, the last of them the most recent one.
    fn stored<'a>(&mut self, slots: impl Iterator<Item = (BlockId, &'a BlockKey)>);

    /// Slots are the most recent ones now, the last most of all. Each is a hit where a request has
    /// found it, told once for each request that does. Those not resident are passed over.
    fn ranked(&mut self, slots: impl Iterator<Item = (BlockId, bool)>);

    /// As [`ranked`](Self::ranked), of the chain from `tail` up to its root, whose `parent` is null.
    /// All but the `num_missed` next to the tail are hits.
    fn ranked_chain(
        &mut self,
        tail: BlockId,
        parent: impl Fn(BlockId) -> BlockId,
        num_missed: usize,
    ) {
        let above = |slot: &BlockId| Some(parent(*slot));
        let chain = successors(Some(tail), above).take_while(|slot| !slot.is_null());
        self.ranked(chain.enumerate().map(|(at, slot)| (slot, at >= num_missed)));
    }

    /// The chains below `root` stand together no more: one was put below another slot, or cut.
    fn split(&mut self, _root: BlockId) {}

    /// A slot is no longer resident, if it was.
    fn removed(&mut self, slot: BlockId);

    /// The slot to go next, of those that may; it stays until it is [`removed`](Self::removed).
    fn victim(&mut self, may_go: impl Fn(BlockId) -> bool) -> Option<BlockId>;

    /// Whether a search for a victim has passed over `slot`, because it could not go.
    fn has_passed(&self, slot: BlockId) -> bool;

    /// Slots that could not go may go again, perhaps: a pin has ended, or a child has gone.
    fn may_go_again(&mut self, slots: impl Iterator<Item = BlockId> + Clone);

    /// Forgets everything, as at construction.
    fn clear(&mut self);

    /// How many slots are resident.
    fn len(&self) -> usize;

    /// Whether `slot` is resident.
    fn contains(&self, slot: BlockId) -> bool;

    /// Bytes of heap it holds.
    #[cfg(test)]
    fn memory_bytes(&self) -> usize;

    /// Verifies its own state against the keys and parents of the resident slots, and which of them
    /// may go.
    ///
    /// # Errors
    /// [`Error::Broken`] names the first invariant that does not hold.
    fn check(
        &self,
        key: impl Fn(BlockId) -> Option<BlockKey>,
        parent: impl Fn(BlockId) -> BlockId,
        may_go: impl Fn(BlockId) -> bool,
    ) -> Result<()>;
}

/// One of them, told apart before each loop: slots are ranked by the thousand, and a call for each
/// would show.
#[derive(Clone, Debug)]
pub(super) enum AnyPolicy {
    Lru(Lru),
    HitDensity(Box<HitDensity>),
}

macro_rules! delegate {
    ($any:expr, $policy:ident => $call:expr) => {
        match $any {
            AnyPolicy::Lru($policy) => $call,
            AnyPolicy::HitDensity($policy) => $call,
        }
    };
}

impl AnyPolicy {
    /// Which one it is.
    pub(super) fn kind(&self) -> EvictionPolicy {
        match self {
            Self::Lru(_) => EvictionPolicy::Lru,
            Self::HitDensity(_) => EvictionPolicy::HitDensity,
        }
    }

    pub(super) fn stored<'a>(&mut self, slots: impl Iterator<Item = (BlockId, &'a BlockKey)>) {
        delegate!(self, policy => policy.stored(slots));
    }

    pub(super) fn ranked(&mut self, slots: impl Iterator<Item = (BlockId, bool)>) {
        delegate!(self, policy => policy.ranked(slots));
    }

    pub(super) fn ranked_chain(
        &mut self,
        tail: BlockId,
        parent: impl Fn(BlockId) -> BlockId,
        num_missed: usize,
    ) {
        delegate!(self, policy => policy.ranked_chain(tail, parent, num_missed));
    }

    pub(super) fn split(&mut self, root: BlockId) {
        delegate!(self, policy => policy.split(root));
    }

    #[inline]
    pub(super) fn removed(&mut self, slot: BlockId) {
        delegate!(self, policy => policy.removed(slot));
    }

    #[inline]
    pub(super) fn victim(&mut self, may_go: impl Fn(BlockId) -> bool) -> Option<BlockId> {
        delegate!(self, policy => policy.victim(may_go))
    }

    #[inline]
    pub(super) fn has_passed(&self, slot: BlockId) -> bool {
        delegate!(self, policy => policy.has_passed(slot))
    }

    #[inline]
    pub(super) fn may_go_again(&mut self, slots: impl Iterator<Item = BlockId> + Clone) {
        delegate!(self, policy => policy.may_go_again(slots));
    }

    pub(super) fn clear(&mut self) {
        delegate!(self, policy => policy.clear());
    }

    pub(super) fn len(&self) -> usize {
        delegate!(self, policy => policy.len())
    }

    pub(super) fn contains(&self, slot: BlockId) -> bool {
        delegate!(self, policy => policy.contains(slot))
    }

    pub(super) fn check(
        &self,
        key: impl Fn(BlockId) -> Option<BlockKey>,
        parent: impl Fn(BlockId) -> BlockId,
        may_go: impl Fn(BlockId) -> bool,
    ) -> Result<()> {
        delegate!(self, policy => policy.check(key, parent, may_go))
    }
}

#[cfg(test)]
mod tests;
