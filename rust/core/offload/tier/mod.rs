//! The host tier: which slot holds what, and which slot goes when room is needed.
//!
//! ```text
//!             reserve                 publish
//!   [ empty ] -------> [ in flight ] ---------> [ resident ] --+
//!       ^                   | abandon              | evict     | pin: held by a lookup
//!       +-------------------+----------------------+           v or by a load
//! ```
//!
//! Slots lie in a [`BlockPool`]: empty ones are its free blocks; a slot in flight or resident has
//! one reference, the tier's own, and its key in the index. Each slot of a full-attention group
//! stands in [`Chains`]: one that has children does not go for room, so nothing that is kept loses
//! its prefix. Slots of groups that skip blocks have no parents: each can go when its turn comes.
//! A resident slot that proves damaged loses its key and its place at once, and is empty when its
//! last pin ends.

mod chains;
mod policy;
mod record;

use std::cmp::Reverse;
use std::ops::Range;

use crate::error::{Error, Result};
use crate::event::{Event, Medium, Origin};
use crate::group::{Model, Source};
use crate::ids::{BlockId, GroupId};
use crate::key::{BlockHash, BlockKey, HashWidth};
use crate::pool::{BLOCK_BYTES, BlockPool, MAX_BLOCKS, check_memory};

use chains::Chains;
use policy::AnyPolicy;
pub use policy::EvictionPolicy;
pub(super) use record::TierRecord;

/// What the slots of a store are being filled with, known from its plan on.
#[derive(Clone, Debug, Default)]
pub(super) struct Filling {
    pub(super) keys: Vec<BlockKey>,
    /// The hash before each.
    pub(super) parents: Vec<Option<BlockHash>>,
    /// Where each ends in its prompt, in tokens; 0 where that is not known.
    pub(super) ends: Vec<usize>,
}

/// What a slot costs besides its block in the pool and what its policy keeps, in bytes.
const SLOT_BYTES: usize = Chains::SLOT_BYTES + 5;

/// At most 130 bytes a slot, taken at construction; 206 where the policy has ghosts.
#[derive(Clone, Debug)]
pub(super) struct HostTier {
    pool: BlockPool,
    chains: Chains,
    /// Loads that read the slot.
    num_loads: Vec<u32>,
    /// Whether a store is filling the slot: then its key is in the pool's index, to be found by
    /// stores and by no lookup.
    is_filling: Vec<bool>,
    num_filling: usize,
    policy: AnyPolicy,
    /// Slots that were evicted for room.
    pub(super) num_evicted: usize,
    /// How often resident slots have gone though there was room: by a reset, or damaged.
    num_losses: u64,
}

/// What lookup can find: resident slots.
impl Source for HostTier {
    fn get(&self, hash: &BlockHash, group: GroupId) -> Option<BlockId> {
        self.resident(&BlockKey { hash: *hash, group })
    }

    fn prefix(&self, hashes: &[BlockHash], group: GroupId) -> Vec<BlockId> {
        let mut found = self.pool.prefix(hashes, group);
        if self.num_filling > 0 {
            let is_resident = |slot: &&BlockId| !self.is_filling[slot.index()];
            found.truncate(found.iter().take_while(is_resident).count());
        }
        found
    }
}

impl HostTier {
    /// A tier of `num_slots` empty slots.
    pub(super) fn new(num_slots: usize, policy: EvictionPolicy, events: bool) -> Result<Self> {
        let num_blocks = num_slots.saturating_add(1);
        let policy_size =
            u32::try_from(num_blocks).ok().filter(|_| (1..MAX_BLOCKS).contains(&num_slots));
        let Some(policy_size) = policy_size else {
            return Err(Error::Config(format!(
                "{num_slots} host blocks: at least 1 is needed, and at most {} are counted",
                MAX_BLOCKS - 1
            )));
        };
        check_memory(num_blocks, BLOCK_BYTES + SLOT_BYTES + policy.slot_bytes())?;
        Ok(Self {
            pool: BlockPool::new(num_blocks, events.then_some(Medium::Host))?,
            chains: Chains::new(num_blocks),
            num_loads: vec![0; num_blocks],
            is_filling: vec![false; num_blocks],
            num_filling: 0,
            policy: policy.build(policy_size),
            num_evicted: 0,
            num_losses: 0,
        })
    }

    pub(super) fn num_slots(&self) -> usize {
        self.pool.num_usable()
    }

    pub(super) fn num_resident(&self) -> usize {
        self.policy.len()
    }

    pub(super) fn agree_width(&mut self, width: HashWidth) -> Result<()> {
        self.pool.agree_width(width)
    }

    pub(super) fn hash_width(&self) -> HashWidth {
        self.pool.hash_width()
    }

    pub(super) fn take_events(&mut self) -> Vec<Event> {
        self.pool.take_events()
    }

    /// The slot that holds a block and can be loaded from.
    pub(super) fn resident(&self, key: &BlockKey) -> Option<BlockId> {
        self.resident_or_in_flight(key).filter(|slot| !self.is_filling[slot.index()])
    }

    /// The slot that holds a block or is being filled with it.
    pub(super) fn resident_or_in_flight(&self, key: &BlockKey) -> Option<BlockId> {
        self.pool.get(&key.hash, key.group)
    }

    /// Holds slots in place: they keep their content until they are unpinned.
    pub(super) fn pin(&mut self, slots: &[BlockId]) -> Result<()> {
        self.pool.pin(slots)
    }

    pub(super) fn unpin(&mut self, slots: &[BlockId]) -> Result<()> {
        self.pool.unpin(slots)?;
        self.may_go_again(slots);
        Ok(())
    }

    /// Whether a slot may go for room: an unpinned leaf.
    fn may_go(&self, slot: BlockId) -> bool {
        self.chains.is_leaf(slot) && self.pool.num_pins(slot) == 0
    }

    /// Pins of these slots have ended, or children have gone.
    fn may_go_again(&mut self, slots: &[BlockId]) {
        let Self { policy, chains, pool, .. } = self;
        let may_go = |slot: &BlockId| chains.is_leaf(*slot) && pool.num_pins(*slot) == 0;
        policy.may_go_again(slots.iter().copied().filter(may_go));
    }

    /// Which policy it evicts by.
    pub(super) fn policy(&self) -> EvictionPolicy {
        self.policy.kind()
    }

    /// Whether a load reads the slot.
    pub(super) fn is_loading(&self, slot: BlockId) -> bool {
        self.num_loads[slot.index()] > 0
    }

    pub(super) fn begin_loads(&mut self, slots: &[BlockId]) {
        for slot in slots {
            self.num_loads[slot.index()] += 1;
        }
    }

    pub(super) fn end_loads(&mut self, slots: &[BlockId]) {
        for slot in slots {
            self.num_loads[slot.index()] -= 1;
        }
    }

    /// Exactly so many slots, empty or emptied for it, while no store fills any.
    ///
    /// # Errors
    /// [`Error::NoRoomForImage`], and nothing changed, where there are too few.
    pub(super) fn reserve_all(&mut self, num_slots: usize) -> Result<Vec<BlockId>> {
        let available = self.pool.num_free() + self.num_evictable();
        if num_slots > available {
            return Err(Error::NoRoomForImage { needed: num_slots, available });
        }
        // A slot that is passed over because of a child may go once the child has gone.
        while self.pool.num_free() < num_slots {
            self.make_room(num_slots)?;
        }
        self.reserve(num_slots)
    }

    /// How many resident slots may go, one after the other: all but those that are pinned, and
    /// those above them.
    fn num_evictable(&self) -> usize {
        let mut stays = vec![false; self.pool.num_blocks()];
        stays[0] = true;
        for slot in self.slots().filter(|&slot| self.pool.num_pins(slot) > 0) {
            let mut at = slot;
            while !std::mem::replace(&mut stays[at.index()], true) {
                at = self.chains.parent(at);
            }
        }
        self.slots().filter(|&slot| self.policy.contains(slot) && !stays[slot.index()]).count()
    }

    /// At most `num_slots` empty slots, the caller's to [`fill`](Self::fill). Evicts for them.
    pub(super) fn reserve(&mut self, num_slots: usize) -> Result<Vec<BlockId>> {
        self.make_room(num_slots)?;
        let mut slots = Vec::new();
        self.pool.allocate(num_slots.min(self.pool.num_free()), &mut slots)?;
        Ok(slots)
    }

    /// A reserved slot is in flight from now on, below `parent` (null: it can go at any time).
    pub(super) fn fill(&mut self, slot: BlockId, key: BlockKey, parent: BlockId) {
        self.pool.hide(slot, &key);
        self.chains.attach(slot, parent);
        self.is_filling[slot.index()] = true;
        self.num_filling += 1;
        self.adopt(slot, &key);
    }

    /// Puts below a slot what has waited for the key that it holds from now on.
    fn adopt(&mut self, slot: BlockId, key: &BlockKey) {
        for root in self.chains.adopt(slot, key) {
            self.policy.split(root);
        }
    }

    /// A slot is not being filled any more.
    fn end_filling(&mut self, slot: BlockId) {
        self.num_filling -= usize::from(self.is_filling[slot.index()]);
        self.is_filling[slot.index()] = false;
    }

    /// As [`fill`](Self::fill), below the slot that holds the hash before, or that will hold it: a
    /// lazy store brings a prompt's tail before its root. None: below nothing.
    pub(super) fn fill_below(&mut self, slot: BlockId, key: BlockKey, parent: Option<BlockHash>) {
        // In a list that is no true chain a block's parent may have the block's own hash.
        let parent = parent.map(|hash| BlockKey { hash, group: key.group }).filter(|it| *it != key);
        match parent.map(|parent| (parent, self.resident_or_in_flight(&parent))) {
            Some((_, Some(above))) => self.fill(slot, key, above),
            Some((parent, None)) => {
                self.fill(slot, key, BlockId::NULL);
                self.chains.wait(slot, parent);
            }
            None => self.fill(slot, key, BlockId::NULL),
        }
    }

    /// Slots for those of `keys`, a chain below `parent` (null: a root), that the tier does not
    /// have: in flight from now on. Evicts leaves, never of this chain. With
    /// slots short the chain's head gets them. Returns each slot with its key's position, and
    /// how many keys, from the first, the tier now has.
    pub(super) fn reserve_chain(
        &mut self,
        hashes: &[BlockHash],
        group: GroupId,
        parent: BlockId,
    ) -> Result<(Vec<(usize, BlockId)>, usize)> {
        let kept = self.pool.prefix(hashes, group);
        let due = &hashes[kept.len()..];
        let num_missing = due.len() - self.pool.num_held(due, group);
        // All of them, not the last alone: in a list that is no true chain they need not stand
        // above one another, and a slot must not be evicted and then made its own parent.
        self.pool.pin(&[parent])?;
        self.pool.pin(&kept)?;
        let empty = self.reserve(num_missing);
        self.unpin(&kept)?;
        self.unpin(&[parent])?;
        let empty = empty?;
        let mut above = kept.last().copied().unwrap_or(parent);
        if num_missing == due.len() && self.pool.hide_all(&empty, &due[..empty.len()], group) {
            for &slot in &empty {
                self.chains.attach(slot, above);
                self.is_filling[slot.index()] = true;
                above = slot;
            }
            self.num_filling += empty.len();
            if self.chains.has_waiting() {
                empty.iter().zip(due).for_each(|(&slot, &hash)| {
                    self.adopt(slot, &BlockKey { hash, group });
                });
            }
            let num_kept = kept.len() + empty.len();
            return Ok(((kept.len()..).zip(empty).collect(), num_kept));
        }
        let mut rest = empty.as_slice();
        let mut placed = Vec::with_capacity(rest.len());
        let mut num_kept = kept.len();
        for (at, &hash) in hashes.iter().enumerate().skip(kept.len()) {
            let key = BlockKey { hash, group };
            // Asked again for each: the same key may stand twice in a list that is no true chain.
            if let Some(slot) = self.resident_or_in_flight(&key) {
                above = slot;
            } else {
                let Some((&slot, others)) = rest.split_first() else { break };
                rest = others;
                self.fill(slot, key, above);
                placed.push((at, slot));
                above = slot;
            }
            num_kept = at + 1;
        }
        self.pool.free(rest)?;
        Ok((placed, num_kept))
    }

    /// Makes the slots of a finished store resident; those that were fenced in the meantime
    /// are emptied. Returns how many became resident.
    pub(super) fn publish(
        &mut self,
        slots: &[BlockId],
        filling: &Filling,
        model: &Model,
    ) -> Result<usize> {
        let Filling { keys, parents, ends } = filling;
        let mut dropped = Vec::new();
        let mut kept = Vec::with_capacity(slots.len());
        let mut run = 0..0;
        for (at, (&slot, key)) in slots.iter().zip(keys).enumerate() {
            if !std::mem::take(&mut self.is_filling[slot.index()]) {
                dropped.push(slot);
                continue;
            }
            kept.push((ends[at], at));
            if self.pool.medium().is_none() {
                continue; // no events are kept: there are no runs to tell of
            }
            let goes_on = run.end == at
                && at > 0
                && keys[at - 1].group == key.group
                && parents[at] == Some(keys[at - 1].hash);
            if !goes_on {
                self.publish_run(filling, run, model);
                run = at..at;
            }
            run.end = at + 1;
        }
        self.publish_run(filling, run, model);
        self.num_filling -= kept.len();
        // The first of a prompt goes last, whatever its group: what is left when some have gone is a
        // shorter prefix that every group still serves.
        kept.sort_unstable_by_key(|&place| Reverse(place));
        self.policy.stored(kept.iter().map(|&(_, at)| (slots[at], &keys[at])));
        self.pool.free(&dropped)?;
        Ok(kept.len())
    }

    /// Publishes consecutive blocks of one chain: one event tells of them all.
    fn publish_run(&mut self, filling: &Filling, run: Range<usize>, model: &Model) {
        let Some(group) = filling.keys.get(run.start).map(|key| key.group) else { return };
        let origin = |part: Range<usize>| Origin {
            parent: filling.parents[run.start + part.start],
            block_size: model.groups().get(usize::from(group.0)).map(|group| group.block_size),
            ..Origin::default()
        };
        let hashes: Vec<_> = filling.keys[run.clone()].iter().map(|key| key.hash).collect();
        self.pool.reveal(&hashes, group, origin);
    }

    /// Nothing waits any more for what these slots of a store were to hold. Drops whatever hangs
    /// below them: without its prefix it could not be evicted in order.
    pub(super) fn fence(&mut self, slots: &[BlockId]) -> Result<()> {
        let is_filling = |slot: &BlockId| self.is_filling[slot.index()];
        let lost: Vec<BlockId> = slots.iter().copied().filter(is_filling).collect();
        if lost.is_empty() { Ok(()) } else { self.drop_below(&lost) }
    }

    /// Takes back slots that hold nothing that can be found.
    pub(super) fn give_back(&mut self, slots: &[BlockId]) -> Result<()> {
        self.pool.free(slots)
    }

    /// Makes slots the most recent ones, the last most of all; of each, whether it is a hit.
    pub(super) fn ranked(&mut self, slots: impl Iterator<Item = (BlockId, bool)>) {
        self.policy.ranked(slots);
    }

    /// Ranks a whole chain, from `tail` up to its root. All but the `num_missed` next to the tail are
    /// hits.
    pub(super) fn rank_chain(&mut self, tail: BlockId, num_missed: usize) {
        let Self { policy, chains, .. } = self;
        policy.ranked_chain(tail, |slot| chains.parent(slot), num_missed);
    }

    /// Drops everything. Slots in flight are emptied when their jobs end; pinned ones when they
    /// are unpinned.
    pub(super) fn reset(&mut self) -> Result<()> {
        let residents: Vec<BlockId> =
            self.slots().filter(|&slot| self.policy.contains(slot)).collect();
        self.pool.evict(&residents)?;
        self.pool.free(&residents)?;
        self.policy.clear();
        self.num_losses += 1;
        let filling: Vec<BlockId> =
            self.slots().filter(|slot| self.is_filling[slot.index()]).collect();
        self.pool.forget_hidden(&filling);
        self.is_filling.fill(false);
        self.num_filling = 0;
        self.chains.clear();
        Ok(())
    }

    /// Evicts until `num_slots` are empty, or nothing more may go.
    fn make_room(&mut self, num_slots: usize) -> Result<()> {
        let num_missing = num_slots.saturating_sub(self.pool.num_free());
        let mut victims = Vec::with_capacity(num_missing.min(self.num_resident()));
        let mut passed = Vec::new();
        while victims.len() < num_missing {
            let Self { policy, chains, pool, .. } = self;
            let may_go = |slot| chains.is_leaf(slot) && pool.num_pins(slot) == 0;
            let Some(slot) = policy.victim(may_go) else { break };
            let parent = self.forget(slot);
            if self.policy.has_passed(parent) {
                passed.push(parent);
            }
            victims.push(slot);
        }
        // Not before: what was passed over because of a child goes when room is asked for again.
        self.may_go_again(&passed);
        // Slots are given out in the order they are emptied in: ascending, so that runs are long.
        victims.sort_unstable();
        self.pool.evict(&victims)?;
        self.pool.release(victims.iter().copied());
        self.num_evicted += victims.len();
        Ok(())
    }

    /// Takes a slot out of the chain it stands in. Returns its parent, which may be a leaf now.
    fn forget(&mut self, slot: BlockId) -> BlockId {
        self.policy.removed(slot);
        self.chains.leave(slot)
    }

    /// Takes `lost`, and all slots below them, out of the tier. Those of jobs in flight stay
    /// referenced until their jobs end.
    fn drop_below(&mut self, lost: &[BlockId]) -> Result<()> {
        let all = self.chains.below(lost);
        let (filling, residents): (Vec<BlockId>, Vec<BlockId>) =
            all.iter().partition(|slot| self.is_filling[slot.index()]);
        self.pool.forget_hidden(&filling);
        for &slot in &filling {
            self.end_filling(slot);
        }
        let parents: Vec<BlockId> = all.into_iter().map(|slot| self.forget(slot)).collect();
        self.may_go_again(&parents);
        self.pool.evict(&residents)?;
        self.pool.free(&residents)
    }

    /// Takes those of `slots` that are resident out of the tier, because what they hold is damaged.
    /// Their children wait for them. Returns them, sorted: each is the caller's to
    /// [`give_back`](Self::give_back).
    pub(super) fn drop_damaged(&mut self, slots: &[BlockId]) -> Result<Vec<BlockId>> {
        let mut lost = slots.to_vec();
        lost.sort_unstable();
        lost.dedup();
        lost.retain(|&slot| self.policy.contains(slot));
        for &slot in &lost {
            let Some(key) = self.pool.key(slot) else { continue };
            self.policy.split(self.chains.root(slot));
            self.chains.abandon(slot, key);
            let parent = self.forget(slot);
            self.may_go_again(&[parent]);
        }
        self.pool.evict(&lost)?;
        self.num_losses += u64::from(!lost.is_empty());
        Ok(lost)
    }

    /// Changes whenever resident slots have gone though there was room: what had been kept is to be
    /// looked at again.
    pub(super) fn num_losses(&self) -> u64 {
        self.num_losses
    }

    /// Slots that stores are filling.
    pub(super) fn num_in_flight(&self) -> usize {
        self.num_filling
    }

    pub(super) fn slots(&self) -> impl Iterator<Item = BlockId> + use<> {
        let slots = (1..=u32::try_from(self.num_slots()).unwrap_or(0)).map(BlockId);
        #[cfg(test)]
        let slots = slots.inspect(|_| chains::looks::count());
        slots
    }

    /// Verifies every invariant of the tier.
    pub(super) fn check(&self) -> Result<()> {
        self.pool.check()?;
        let parent = |slot| self.chains.parent(slot);
        self.policy.check(|slot| self.pool.key(slot), parent, |slot| self.may_go(slot))?;
        let broken = |what: String| Err(Error::Broken(format!("host tier: {what}")));
        let is_filling = &self.is_filling;
        if is_filling.iter().filter(|&&is_filling| is_filling).count() != self.num_filling {
            return broken("slots that stores fill are miscounted".to_owned());
        }
        for slot in self.slots() {
            let is_resident = self.policy.contains(slot);
            if self.pool.key(slot).is_some() != (is_resident || is_filling[slot.index()]) {
                return broken(format!("slot {slot} holds a key and nothing else, or no key"));
            }
            if is_filling[slot.index()] && is_resident {
                return broken(format!("slot {slot} is resident while a store fills it"));
            }
            let is_kept = is_resident || is_filling[slot.index()];
            if is_kept && self.pool.num_refs(slot) != 1 {
                return broken(format!("slot {slot} has {} references", self.pool.num_refs(slot)));
            }
            if self.num_loads[slot.index()] > self.pool.num_pins(slot) {
                return broken(format!("slot {slot} is read by a load that does not pin it"));
            }
        }
        let is_kept = |slot: BlockId| self.policy.contains(slot) || is_filling[slot.index()];
        self.chains.check(is_kept, |key| self.resident_or_in_flight(key).is_some())
    }

    /// How many pins are held on all slots.
    pub(super) fn num_pins(&self) -> usize {
        self.slots().map(|slot| self.pool.num_pins(slot) as usize).sum()
    }

    /// Whether a slot is in use: resident, given to a store, or a sleep image's own.
    pub(super) fn is_referenced(&self, slot: BlockId) -> bool {
        self.pool.num_refs(slot) > 0
    }

    /// Whether a slot holds a block of a group, or is empty.
    pub(super) fn holds_group(&self, slot: BlockId, group: usize) -> bool {
        slot.index() < self.pool.num_blocks()
            && self.pool.key(slot).is_none_or(|key| usize::from(key.group.0) == group)
    }

    /// How many slots are in use.
    pub(super) fn num_referenced(&self) -> usize {
        self.slots().filter(|&slot| self.is_referenced(slot)).count()
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::chains::looks;
    use super::*;

    fn hashes(chain: u16, len: u16) -> Vec<BlockHash> {
        let hash = |at: u16| {
            let mut hash = BlockHash::default();
            hash[..2].copy_from_slice(&chain.to_le_bytes());
            hash[2..4].copy_from_slice(&at.to_le_bytes());
            hash
        };
        (0..len).map(hash).collect()
    }

    #[test]
    fn a_failed_store_looks_only_at_its_own_slots_and_those_below() {
        const NUM_SLOTS: usize = 4_096;
        for policy in EvictionPolicy::ALL {
            let mut tier = HostTier::new(NUM_SLOTS, policy, false).unwrap();
            for chain in 0..255 {
                tier.reserve_chain(&hashes(chain, 16), GroupId(0), BlockId::NULL).unwrap();
            }
            // Two stores: the second continues the chain that the first one brings.
            let chain = hashes(255, 16);
            let (first, _) = tier.reserve_chain(&chain[..8], GroupId(0), BlockId::NULL).unwrap();
            let last = first.last().unwrap().1;
            tier.reserve_chain(&chain[8..], GroupId(0), last).unwrap();
            assert_eq!(tier.num_in_flight(), NUM_SLOTS);
            let slots: Vec<BlockId> = first.into_iter().map(|(_, slot)| slot).collect();
            looks::take();
            tier.fence(&slots).unwrap();
            let num_looks = looks::take();
            assert_eq!(tier.num_in_flight(), NUM_SLOTS - 16);
            assert!(num_looks <= 5 * 16, "{num_looks} looks for 16 slots of {NUM_SLOTS}");
        }
    }
}
