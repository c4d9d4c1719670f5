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
//! one reference, the tier's own, and only a resident one has its key in the index. Each slot
//! of a full-attention group knows its parent's slot, and how many children it has in flight or
//! resident: a slot that has any does not go, so nothing that is kept loses its prefix. Slots of
//! groups that skip blocks have no parents: each can go when its turn comes.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, DefaultHasher};
use std::ops::Range;

use crate::error::{Error, Result};
use crate::event::{Event, Medium, Origin};
use crate::group::{Model, Source};
use crate::ids::{BlockId, GroupId};
use crate::key::{BlockHash, BlockKey, HashWidth};
use crate::pool::{BLOCK_BYTES, BlockPool, MAX_BLOCKS, check_memory};

use super::policy::{AnyPolicy, EvictionPolicy, Pass};

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
const SLOT_BYTES: usize = 13;

/// At most 121 bytes a slot, taken at construction; 196 where the policy has ghosts.
#[derive(Clone, Debug)]
pub(super) struct HostTier {
    pub(super) pool: BlockPool,
    /// The slot of the block before; null for a root.
    pub(super) parents: Vec<u32>,
    /// Children in flight or resident.
    pub(super) num_children: Vec<u32>,
    /// Loads that read the slot.
    num_loads: Vec<u32>,
    /// Whether a store is filling the slot: then its key is in the pool's index, to be found by
    /// stores and by no lookup.
    is_filling: Vec<bool>,
    num_filling: usize,
    /// Slots whose parent is not on the host, and its key: the device has it, or nobody.
    pub(super) awaited: HashMap<BlockId, BlockKey, BuildHasherDefault<DefaultHasher>>,
    /// The same by that key.
    pub(super) awaiting: HashMap<BlockKey, Vec<BlockId>, BuildHasherDefault<DefaultHasher>>,
    pub(super) policy: AnyPolicy,
    /// Slots that were evicted for room.
    pub(super) num_evicted: usize,
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
            parents: vec![0; num_blocks],
            num_children: vec![0; num_blocks],
            num_loads: vec![0; num_blocks],
            is_filling: vec![false; num_blocks],
            num_filling: 0,
            awaited: HashMap::default(),
            awaiting: HashMap::default(),
            policy: policy.build(policy_size),
            num_evicted: 0,
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
        self.pool.unpin(slots)
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
        let mut stays = vec![false; self.parents.len()];
        stays[0] = true;
        for slot in self.slots().filter(|&slot| self.pool.num_pins(slot) > 0) {
            let mut at = slot.index();
            while !std::mem::replace(&mut stays[at], true) {
                at = self.parents[at] as usize;
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
        self.enter(slot, key, parent);
    }

    /// A slot that has its key takes its place in the chain.
    fn enter(&mut self, slot: BlockId, key: BlockKey, parent: BlockId) {
        self.parents[slot.index()] = parent.0;
        self.num_children[parent.index()] += 1;
        let children = if self.awaiting.is_empty() { None } else { self.awaiting.remove(&key) };
        for child in children.unwrap_or_default() {
            self.awaited.remove(&child);
            if self.is_below(slot, child) {
                continue; // in a list that is no true chain: the two would be each other's parents
            }
            self.parents[child.index()] = slot.0;
            self.policy.attached(child);
            self.num_children[BlockId::NULL.index()] -= 1;
            self.num_children[slot.index()] += 1;
        }
        self.is_filling[slot.index()] = true;
        self.num_filling += 1;
    }

    /// A slot is not being filled any more.
    fn end_filling(&mut self, slot: BlockId) {
        self.num_filling -= usize::from(self.is_filling[slot.index()]);
        self.is_filling[slot.index()] = false;
    }

    /// Whether `slot` is `other`, or stands below it.
    fn is_below(&self, slot: BlockId, other: BlockId) -> bool {
        let mut at = slot;
        while !at.is_null() && at != other {
            at = BlockId(self.parents[at.index()]);
        }
        at == other
    }

    /// As [`fill`](Self::fill), below the slot that holds the hash before, or that will hold it: a
    /// lazy store brings a prompt's tail before its root. None: below nothing.
    pub(super) fn fill_below(&mut self, slot: BlockId, key: BlockKey, parent: Option<BlockHash>) {
        let parent = parent.map(|hash| BlockKey { hash, group: key.group });
        match parent.map(|parent| (parent, self.resident_or_in_flight(&parent))) {
            Some((_, Some(above))) => self.fill(slot, key, above),
            Some((parent, None)) => {
                self.fill(slot, key, BlockId::NULL);
                self.awaited.insert(slot, parent);
                self.awaiting.entry(parent).or_default().push(slot);
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
        self.pool.unpin(&kept)?;
        self.pool.unpin(&[parent])?;
        let empty = empty?;
        let mut above = kept.last().copied().unwrap_or(parent);
        if num_missing == due.len() && self.pool.hide_all(&empty, &due[..empty.len()], group) {
            for (&slot, &hash) in empty.iter().zip(due) {
                self.enter(slot, BlockKey { hash, group }, above);
                above = slot;
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
            if !self.is_filling[slot.index()] {
                dropped.push(slot);
                continue;
            }
            self.end_filling(slot);
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
        // The first of a prompt goes last, whatever its group: what is left when some have gone is a
        // shorter prefix that every group still serves.
        kept.reverse();
        kept.sort_by_key(|&(end, _)| Reverse(end));
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
        self.policy.ranked_chain(tail, &self.parents, num_missed);
    }

    /// Drops everything. Slots in flight are emptied when their jobs end; pinned ones when they
    /// are unpinned.
    pub(super) fn reset(&mut self) -> Result<()> {
        let residents: Vec<BlockId> =
            self.slots().filter(|&slot| self.policy.contains(slot)).collect();
        self.pool.evict(&residents)?;
        self.pool.free(&residents)?;
        self.policy.clear();
        let filling: Vec<BlockId> =
            self.slots().filter(|slot| self.is_filling[slot.index()]).collect();
        self.pool.forget_hidden(&filling);
        self.is_filling.fill(false);
        self.num_filling = 0;
        self.awaited.clear();
        self.awaiting.clear();
        self.parents.fill(0);
        self.num_children.fill(0);
        Ok(())
    }

    /// Evicts until `num_slots` are empty, or nothing more may go.
    fn make_room(&mut self, num_slots: usize) -> Result<()> {
        let num_missing = num_slots.saturating_sub(self.pool.num_free());
        let mut victims = Vec::new();
        let mut pass = Pass::default();
        while victims.len() < num_missing {
            let is_unpinned_leaf = |slot: BlockId| {
                self.num_children[slot.index()] == 0 && self.pool.num_pins(slot) == 0
            };
            let Some(slot) = self.policy.victim(&mut pass, is_unpinned_leaf) else { break };
            self.forget(slot);
            victims.push(slot);
        }
        // Slots are given out in the order they are emptied in: ascending, so that runs are long.
        victims.sort_unstable();
        self.pool.evict(&victims)?;
        self.pool.release(victims.iter().copied());
        self.num_evicted += victims.len();
        Ok(())
    }

    /// Takes a slot out of the chain it stands in.
    fn forget(&mut self, slot: BlockId) {
        let parent = std::mem::take(&mut self.parents[slot.index()]);
        self.num_children[parent as usize] -= 1;
        if !self.awaited.is_empty()
            && let Some(parent) = self.awaited.remove(&slot)
            && let Some(children) = self.awaiting.get_mut(&parent)
        {
            children.retain(|&child| child != slot);
            if children.is_empty() {
                self.awaiting.remove(&parent);
            }
        }
        self.policy.removed(slot);
    }

    /// Takes `lost`, and all slots below them, out of the tier. Those of jobs in flight stay
    /// referenced until their jobs end.
    fn drop_below(&mut self, lost: &[BlockId]) -> Result<()> {
        let is_lost = self.below(lost);
        let doomed = |slot: &BlockId| is_lost[slot.index()];
        let all: Vec<BlockId> = self.slots().filter(doomed).collect();
        let filling: Vec<BlockId> =
            all.iter().copied().filter(|slot| self.is_filling[slot.index()]).collect();
        self.pool.forget_hidden(&filling);
        for &slot in &filling {
            self.end_filling(slot);
        }
        let residents: Vec<BlockId> =
            all.iter().copied().filter(|&slot| self.policy.contains(slot)).collect();
        for slot in all {
            self.forget(slot);
        }
        self.pool.evict(&residents)?;
        self.pool.free(&residents)
    }

    /// Marks `lost` and everything below them, by walking each slot up to one that is known.
    fn below(&self, lost: &[BlockId]) -> Vec<bool> {
        let mut is_lost = vec![None; self.parents.len()];
        is_lost[0] = Some(false);
        for slot in lost {
            is_lost[slot.index()] = Some(true);
        }
        let mut path = Vec::new();
        for slot in 1..self.parents.len() {
            let mut at = slot;
            let known = loop {
                match is_lost[at] {
                    Some(known) => break known,
                    None => path.push(at),
                }
                at = self.parents[at] as usize;
            };
            for at in path.drain(..) {
                is_lost[at] = Some(known);
            }
        }
        is_lost.into_iter().map(|known| known == Some(true)).collect()
    }

    /// Slots that stores are filling.
    pub(super) fn num_in_flight(&self) -> usize {
        self.num_filling
    }

    pub(super) fn slots(&self) -> impl Iterator<Item = BlockId> + use<> {
        (1..=u32::try_from(self.num_slots()).unwrap_or(0)).map(BlockId)
    }

    /// Verifies every invariant of the tier.
    pub(super) fn check(&self) -> Result<()> {
        self.pool.check()?;
        let parent = |slot: BlockId| BlockId(self.parents[slot.index()]);
        self.policy.check(|slot| self.pool.key(slot), parent)?;
        let broken = |what: String| Err(Error::Broken(format!("host tier: {what}")));
        let is_filling = &self.is_filling;
        if is_filling.iter().filter(|&&is_filling| is_filling).count() != self.num_filling {
            return broken("slots that stores fill are miscounted".to_owned());
        }
        let mut num_children = vec![0; self.pool.num_blocks()];
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
            let parent = BlockId(self.parents[slot.index()]);
            if !is_kept && !parent.is_null() {
                return broken(format!("slot {slot} is empty and has the parent {parent}"));
            }
            if is_kept {
                if !parent.is_null() && !self.policy.contains(parent) && !is_filling[parent.index()]
                {
                    return broken(format!("slot {slot} has lost its parent {parent}"));
                }
                num_children[parent.index()] += 1;
            }
            if self.num_loads[slot.index()] > self.pool.num_pins(slot) {
                return broken(format!("slot {slot} is read by a load that does not pin it"));
            }
        }
        let num_awaiting: usize = self.awaiting.values().map(Vec::len).sum();
        for (slot, parent) in &self.awaited {
            let is_kept = self.policy.contains(*slot) || is_filling[slot.index()];
            let waits = self.awaiting.get(parent).is_some_and(|slots| slots.contains(slot));
            if !is_kept || !waits || self.parents[slot.index()] != 0 {
                return broken(format!("slot {slot} does not wait for its parent as it should"));
            }
            if self.resident_or_in_flight(parent).is_some() {
                return broken(format!("slot {slot} waits for a parent that is there"));
            }
        }
        if num_awaiting != self.awaited.len() {
            return broken("slots that wait for their parents are miscounted".to_owned());
        }
        if num_children != self.num_children {
            return broken("children are miscounted".to_owned());
        }
        Ok(())
    }

    /// How many pins are held on all slots.
    pub(super) fn num_pins(&self) -> usize {
        self.slots().map(|slot| self.pool.num_pins(slot) as usize).sum()
    }

    /// Slots in use: resident, given to a store, or of a sleep image.
    pub(super) fn used_slots(&self) -> impl Iterator<Item = BlockId> {
        self.slots().filter(|&slot| self.pool.num_refs(slot) > 0)
    }

    /// How many slots are in use.
    pub(super) fn num_referenced(&self) -> usize {
        self.used_slots().count()
    }
}
