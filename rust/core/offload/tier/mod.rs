//! One tier: which slot holds what, and which slot is evicted when a store needs room.
//!
//! `slots` owns the state of each slot, `chains` the parents and children, `policy` the eviction
//! order. `room` decides which slots are evicted, `loss` drops slots although there is room, `record`
//! is the form for snapshots. A second medium gets a [`Tier`] of its own.
//!
//! May import: error, event, group, ids, key, ledger, pool.
//!
//! A slot of a full-attention group that has children is not evicted for room, so no block loses
//! its prefix. Slots of groups that skip blocks have no parents. A resident slot that proves
//! damaged loses its key and its place at once, and is empty when its last pin ends.

mod chains;
mod loss;
mod policy;
mod record;
mod room;
mod slot_set;
mod slots;

pub use policy::EvictionPolicy;
pub(super) use record::{MAX_READ_COUNT, TierRecord};
pub(super) use slot_set::SlotSet;

use std::cmp::Reverse;
use std::ops::Range;

use crate::error::{Error, Result};
use crate::event::Origin;
use crate::group::{Model, Source};
use crate::ids::{BlockId, GroupId};
use crate::key::{BlockHash, BlockKey};
use crate::pool::{BLOCK_BYTES, MAX_BLOCKS, check_memory};

use chains::Chains;
#[cfg(test)]
pub(super) use chains::looks;
use policy::{AnyPolicy, Policy, with_policy};
use room::is_unpinned_leaf;
use slots::Slots;

/// What is known of the slots that a store fills besides their keys, which they hold.
#[derive(Clone, Debug, Default)]
pub(super) struct Filling {
    /// Where each ends in its prompt, in tokens; 0 where that is not known.
    pub(super) ends: Vec<usize>,
    /// The hash before each. Empty if no events are recorded.
    pub(super) parents: Vec<Option<BlockHash>>,
}

/// What [`Tier::reserve_chain`] did for a chain of hashes.
pub(super) struct Reserved {
    /// Hashes, from the first, that the tier had.
    pub(super) num_held: usize,
    /// The slots of those that follow; null where the tier had the block.
    pub(super) slots: Vec<BlockId>,
    /// Hashes, from the first, that the tier has now.
    pub(super) num_kept: usize,
}

/// Of a chain of which no slot is a hit.
pub(super) const NO_HITS: Range<usize> = 0..0;

/// What a slot costs besides its block in the pool and what its policy keeps, in bytes.
const SLOT_BYTES: usize = Chains::SLOT_BYTES + Slots::SLOT_BYTES;

/// At most 130 bytes a slot, allocated at construction; 206 where the policy has ghosts.
#[derive(Clone, Debug)]
pub(super) struct Tier {
    pub(super) slots: Slots,
    chains: Chains,
    policy: AnyPolicy,
    /// Slots that were evicted for room.
    pub(super) num_evicted: usize,
    /// How often resident slots went although there was room: by a reset, damaged, or below a slot
    /// whose store has failed. When it changes, requests compare what they have stored with the
    /// tier again, and loads compare what their lookup has found.
    pub(super) num_losses: u64,
    /// The keys that were evicted for room since the caller took them. None if they are not kept.
    pub(super) evicted: Option<Vec<BlockKey>>,
}

/// Lookup finds resident slots.
impl Source for Tier {
    fn get(&self, hash: &BlockHash, group: GroupId) -> Option<BlockId> {
        self.resident(&BlockKey { hash: *hash, group })
    }

    fn prefix(&self, hashes: &[BlockHash], group: GroupId) -> Vec<BlockId> {
        self.slots.published_prefix(hashes, group)
    }
}

impl Tier {
    /// A tier of `num_slots` empty slots, which errors call `name`. With `events` it records them.
    pub(super) fn new(
        name: &str,
        num_slots: usize,
        policy: EvictionPolicy,
        events: bool,
    ) -> Result<Self> {
        let num_blocks = num_slots.saturating_add(1);
        let policy_size =
            u32::try_from(num_blocks).ok().filter(|_| (1..MAX_BLOCKS).contains(&num_slots));
        let Some(policy_size) = policy_size else {
            return Err(Error::Config(format!(
                "{name} is {num_slots}: it must be 1 to {}",
                MAX_BLOCKS - 1
            )));
        };
        let slot_bytes = BLOCK_BYTES + SLOT_BYTES + policy.slot_bytes();
        check_memory(name, num_slots, num_blocks, slot_bytes)?;
        Ok(Self {
            slots: Slots::new(num_slots, events)?,
            chains: Chains::new(num_blocks),
            policy: policy.build(policy_size),
            num_evicted: 0,
            num_losses: 0,
            evicted: None,
        })
    }

    pub(super) fn num_resident(&self) -> usize {
        with_policy!(&self.policy, policy => policy.len())
    }

    /// Whether a slot holds a block that can be loaded.
    pub(super) fn is_resident(&self, slot: BlockId) -> bool {
        self.policy.contains(slot)
    }

    /// The slot above `slot`; null above a root.
    pub(super) fn parent(&self, slot: BlockId) -> BlockId {
        self.chains.parent(slot)
    }

    /// The hash of the block before a slot's, in the tier or awaited.
    pub(super) fn parent_hash(&self, slot: BlockId) -> Option<BlockHash> {
        let parent = self.slots.key(self.chains.parent(slot));
        parent.or_else(|| self.chains.awaited_by(slot)).map(|key| key.hash)
    }

    /// The slot that holds a block and can be loaded from.
    pub(super) fn resident(&self, key: &BlockKey) -> Option<BlockId> {
        self.resident_or_filling(key).filter(|&slot| !self.slots.is_filling(slot))
    }

    /// The slot that holds a block, or that a store fills with it.
    pub(super) fn resident_or_filling(&self, key: &BlockKey) -> Option<BlockId> {
        self.slots.pool.get(&key.hash, key.group)
    }

    /// Whether these slots hold these blocks, and can be loaded from.
    pub(super) fn are_resident(
        &self,
        slots: &[BlockId],
        hashes: &[BlockHash],
        group: GroupId,
    ) -> bool {
        let is_resident = |(&slot, &hash): (&BlockId, &BlockHash)| {
            !self.slots.is_filling(slot)
                && self.slots.pool.key(slot) == Some(BlockKey { hash, group })
        };
        slots.iter().zip(hashes).all(is_resident)
    }

    /// Keeps slots and their content in place until they are unpinned.
    pub(super) fn pin(&mut self, slots: &[BlockId]) -> Result<()> {
        self.slots.pool.pin(slots)
    }

    pub(super) fn unpin(&mut self, slots: &[BlockId]) -> Result<()> {
        self.slots.pool.unpin(slots)?;
        self.retry(slots);
        Ok(())
    }

    /// Lets a store fill a reserved slot with a key that the tier does not have, below `parent`
    /// (null: no parent).
    pub(super) fn fill(&mut self, slot: BlockId, key: BlockKey, parent: BlockId) {
        let is_new = self.slots.withhold(&[slot], &[key.hash], key.group);
        debug_assert!(is_new, "the tier does not have the key");
        self.chains.attach(slot, parent);
        self.adopt(slot, &key);
    }

    /// Puts below a slot the blocks that await the key that it holds from now on.
    fn adopt(&mut self, slot: BlockId, key: &BlockKey) {
        for root in self.chains.adopt(slot, key) {
            with_policy!(&mut self.policy, policy => policy.split(root));
        }
    }

    /// As [`fill_below`](Self::fill_below), for different hashes of which each is the parent of the
    /// next (`is_chain`), or none has a parent.
    pub(super) fn fill_all_below(
        &mut self,
        slots: &[BlockId],
        hashes: &[BlockHash],
        group: GroupId,
        parent: Option<BlockHash>,
        is_chain: bool,
    ) {
        let (Some(&first), Some(&root)) = (slots.first(), hashes.first()) else { return };
        let parent = parent.filter(|hash| *hash != root).map(|hash| BlockKey { hash, group });
        let above = parent.and_then(|parent| self.resident_or_filling(&parent));
        let are_new = self.slots.withhold(slots, hashes, group);
        debug_assert!(are_new, "the tier has none of the keys, and each comes once");
        self.attach_all(slots, hashes, group, above.unwrap_or(BlockId::NULL), is_chain);
        if let (Some(parent), None) = (parent, above) {
            self.chains.await_key(first, parent);
        }
    }

    /// Puts the first slot below `parent`, and each other below the one before it (`is_chain`) or
    /// below none. Then puts the blocks below them that await their keys.
    fn attach_all(
        &mut self,
        slots: &[BlockId],
        hashes: &[BlockHash],
        group: GroupId,
        parent: BlockId,
        is_chain: bool,
    ) {
        let mut above = parent;
        for &slot in slots {
            self.chains.attach(slot, above);
            above = if is_chain { slot } else { BlockId::NULL };
        }
        if self.chains.has_awaited() {
            for (&slot, &hash) in slots.iter().zip(hashes) {
                self.adopt(slot, &BlockKey { hash, group });
            }
        }
    }

    /// As [`fill`](Self::fill), below the slot that holds the hash before, or that will hold it,
    /// because a lazy store brings a prompt's tail before its root. None: no parent.
    pub(super) fn fill_below(&mut self, slot: BlockId, key: BlockKey, parent: Option<BlockHash>) {
        // In a list that is no true chain a block's parent may have the block's own hash.
        let parent = parent.map(|hash| BlockKey { hash, group: key.group }).filter(|it| *it != key);
        let above = parent.and_then(|parent| self.resident_or_filling(&parent));
        self.fill(slot, key, above.unwrap_or(BlockId::NULL));
        if let (Some(parent), None) = (parent, above) {
            self.chains.await_key(slot, parent);
        }
    }

    /// Reserves and fills slots for those of `hashes`, a chain below `parent` (null: a root), that
    /// the tier does not have. Evicts leaves, never of this chain. If slots are short, or more than
    /// `max_slots` are needed, the chain's head gets them.
    pub(super) fn reserve_chain(
        &mut self,
        hashes: &[BlockHash],
        group: GroupId,
        parent: BlockId,
        max_slots: usize,
    ) -> Result<Reserved> {
        let kept = self.slots.pool.prefix(hashes, group);
        let (num_held, due) = (kept.len(), &hashes[kept.len()..]);
        // Only blocks that await their parents are in the tier without a block before them. In a
        // list that is no true chain there may be others, and then some room is evicted in vain.
        let has_awaited = self.chains.has_awaited();
        let num_awaited = if has_awaited { self.slots.pool.num_held(due, group) } else { 0 };
        let num_missing = due.len() - num_awaited;
        // All of them, not the last alone: in a list that is no true chain they need not stand
        // above one another, and a slot must not be evicted and then become its own parent.
        self.pin(&[parent])?;
        self.pin(&kept)?;
        let empty = self.reserve(num_missing.min(max_slots));
        self.unpin(&kept)?;
        self.unpin(&[parent])?;
        let empty = empty?;
        let mut above = kept.last().copied().unwrap_or(parent);
        if num_awaited == 0 && self.slots.withhold(&empty, &due[..empty.len()], group) {
            self.attach_all(&empty, due, group, above, true);
            return Ok(Reserved { num_held, num_kept: num_held + empty.len(), slots: empty });
        }
        let mut rest = empty.as_slice();
        let mut slots = Vec::with_capacity(due.len());
        for &hash in due {
            let key = BlockKey { hash, group };
            // Each time anew: a list that is no true chain may hold a key twice.
            if let Some(slot) = self.resident_or_filling(&key) {
                above = slot;
                slots.push(BlockId::NULL);
            } else {
                let Some((&slot, others)) = rest.split_first() else { break };
                rest = others;
                self.fill(slot, key, above);
                above = slot;
                slots.push(slot);
            }
        }
        self.slots.pool.free(rest)?;
        Ok(Reserved { num_held, num_kept: num_held + slots.len(), slots })
    }

    /// Makes the slots of a finished store resident, and empties those that were fenced in the
    /// meantime. Returns how many became resident.
    pub(super) fn publish(
        &mut self,
        slots: &[BlockId],
        filling: &Filling,
        model: &Model,
    ) -> Result<usize> {
        let Filling { ends, parents } = filling;
        let mut kept = self.slots.publish(slots);
        if self.slots.pool.has_events() {
            let key = |&at: &usize| self.slots.key(slots[at]);
            let keys: Vec<BlockKey> = kept.iter().filter_map(key).collect();
            debug_assert_eq!(keys.len(), kept.len(), "a slot keeps its key until it is published");
            let named: Vec<(usize, BlockKey)> = kept.iter().copied().zip(keys).collect();
            let continues = |before: &(usize, BlockKey), next: &(usize, BlockKey)| {
                next.0 == before.0 + 1
                    && before.1.group == next.1.group
                    && parents[next.0] == Some(before.1.hash)
            };
            for run in named.chunk_by(continues) {
                self.report_run(run, &parents[run[0].0..], model);
            }
        }
        if kept.len() < slots.len() {
            let is_fenced = |&at: &usize| kept.binary_search(&at).is_err();
            let fenced: Vec<_> = (0..slots.len()).filter(is_fenced).map(|at| slots[at]).collect();
            self.slots.pool.free(&fenced)?;
        }
        // The first block of a prompt is evicted last, whatever its group. So what is left is a
        // shorter prefix that every group still serves.
        kept.sort_unstable_by_key(|&at| Reverse((ends[at], at)));
        let Self { policy, slots: keyed, .. } = self;
        let stored = kept.iter().map(|&at| slots[at]);
        with_policy!(policy, policy => policy.stored(stored, |slot| keyed.key(slot)));
        Ok(kept.len())
    }

    /// Records one event for consecutive blocks of one chain, each with the hash before it.
    fn report_run(
        &mut self,
        run: &[(usize, BlockKey)],
        parents: &[Option<BlockHash>],
        model: &Model,
    ) {
        let Some((_, BlockKey { group, .. })) = run.first() else { return };
        let origin = |part: Range<usize>| Origin {
            parent: parents[part.start],
            block_size: model.groups().get(usize::from(group.0)).map(|group| group.block_size),
            ..Origin::default()
        };
        let hashes: Vec<_> = run.iter().map(|(_, key)| key.hash).collect();
        self.slots.pool.report_stored(&hashes, *group, origin);
    }

    /// Makes slots the most recent ones, the last most of all. Each comes with whether it is a hit.
    pub(super) fn make_recent(&mut self, slots: impl Iterator<Item = (BlockId, bool)>) {
        with_policy!(&mut self.policy, policy => policy.make_recent(slots));
    }

    /// Makes those of `slots` that are resident the next to be evicted, the last of them first.
    pub(super) fn make_least_recent(&mut self, slots: &[BlockId]) {
        for &slot in slots {
            with_policy!(&mut self.policy, policy => policy.make_least_recent(slot));
        }
    }

    /// Makes a whole chain most recent, from `tail` up to its root. The `hits` are
    /// counted from the tail.
    pub(super) fn make_chain_recent(&mut self, tail: BlockId, hits: &Range<usize>) {
        let Self { policy, chains, .. } = self;
        let parent = |slot| chains.parent(slot);
        with_policy!(policy, policy => policy.make_chain_recent(tail, parent, hits));
    }

    /// Makes whole chains most recent, one after the other, from each tail up to its root. None of
    /// them is a hit. Looks at what the chains share only once.
    pub(super) fn make_chains_recent(&mut self, tails: &[BlockId]) {
        if let [tail] = tails {
            self.make_chain_recent(*tail, &NO_HITS);
        } else if !tails.is_empty() {
            let Self { policy, chains, .. } = self;
            let parent = |slot| chains.parent(slot);
            with_policy!(policy, policy => policy.make_chains_recent(tails, parent));
        }
    }

    /// Drops everything. Slots in use by jobs are empty when the jobs end, pinned ones when they
    /// are unpinned.
    pub(super) fn reset(&mut self) -> Result<()> {
        let residents: Vec<BlockId> =
            self.slots.iter().filter(|&slot| self.policy.contains(slot)).collect();
        self.slots.pool.evict(&residents)?;
        self.slots.pool.free(&residents)?;
        with_policy!(&mut self.policy, policy => policy.clear());
        self.num_losses += 1;
        let filling: Vec<BlockId> =
            self.slots.iter().filter(|&slot| self.slots.is_filling(slot)).collect();
        self.slots.withdraw(&filling);
        self.chains.clear();
        Ok(())
    }

    /// Takes a slot out of its chain and out of the eviction order. Returns its parent, which may
    /// be a leaf now.
    fn forget(&mut self, slot: BlockId) -> BlockId {
        with_policy!(&mut self.policy, policy => policy.removed(slot));
        self.chains.leave(slot)
    }

    /// Verifies every invariant of the tier.
    pub(super) fn check(&self) -> Result<()> {
        let is_resident = |slot| self.policy.contains(slot);
        self.slots.check(is_resident)?;
        let parent = |slot| self.chains.parent(slot);
        let key = |slot| self.slots.key(slot);
        let is_evictable = |slot| is_unpinned_leaf(&self.chains, &self.slots, slot);
        with_policy!(&self.policy, policy => policy.check(key, parent, is_evictable))?;
        let is_kept = |slot| is_resident(slot) || self.slots.is_filling(slot);
        self.chains.check(is_kept, |key| self.resident_or_filling(key).is_some())
    }

    /// Number of pins on all slots.
    pub(super) fn num_pins(&self) -> usize {
        self.slots.iter().map(|slot| self.slots.pool.num_pins(slot) as usize).sum()
    }

    /// Number of slots in use.
    pub(super) fn num_referenced(&self) -> usize {
        self.slots.iter().filter(|&slot| self.slots.is_referenced(slot)).count()
    }
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod view_tests;
