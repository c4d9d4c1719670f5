//! Keys in recency order, and the number of more recent keys for each.
//!
//! ```text
//!   slots     0   1   2   3   4   5   6       a key that is used takes the next slot
//!   held      .   .   1   .   .   .   .       keys that stand for themselves
//!   sampled   1   .   .   1   1   .   .       keys that stand for others, too
//!                                 ^next_slot
//! ```
//!
//! When the slots run out, the keys close the gaps. The new slot of a key is the number of less
//! recent keys.
//!
//! Each turn marks the slot that is next when it begins. So a key below a mark was not used since.

use std::collections::{HashMap, VecDeque};

use crate::error::{Error, Result};

use super::counted_bits::CountedBits;
use super::keys::MixedKeys;
use super::memory::no_memory;

/// More keys than this would not have 32-bit slots to move to.
const MAX_KEYS: usize = 1 << 30;

/// Whether a key stands for itself alone or, in a sample, for other keys too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Held,
    Sampled,
}

/// A key's place in the stack.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) role: Role,
    pub(super) num_held_above: u64,
    pub(super) num_sampled_above: u64,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    slot: u32,
    num_uses: u32,
}

/// An LRU stack. It takes about 34 bytes per key, the free room of its table included.
#[derive(Clone, Debug, Default)]
pub(super) struct LruStack {
    entries: HashMap<u64, Entry, MixedKeys>,
    held: CountedBits,
    sampled: CountedBits,
    next_slot: u32,
    num_slots: usize,
    marks: VecDeque<u32>,
}

impl LruStack {
    /// Returns an empty stack with room for `num_keys` keys.
    pub(super) fn with_room(num_keys: usize) -> Result<Self> {
        let mut stack = Self::default();
        stack.entries.try_reserve(num_keys).map_err(|_| no_memory())?;
        Ok(stack)
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn num_held(&self) -> u64 {
        self.held.num_set()
    }

    pub(super) fn num_sampled(&self) -> u64 {
        self.sampled.num_set()
    }

    /// Bytes of heap: a table of entries with one byte of control each, and the slots.
    pub(super) fn memory_bytes(&self) -> usize {
        table_bytes(self.entries.capacity())
            + self.held.memory_bytes()
            + self.sampled.memory_bytes()
    }

    /// Reserves slots for `num_uses` uses, and room for `num_new` new keys.
    pub(super) fn make_room(&mut self, num_uses: usize, num_new: usize) -> Result<()> {
        self.entries.try_reserve(num_new).map_err(|_| no_memory())?;
        if self.next_slot as usize + num_uses <= self.num_slots {
            return Ok(());
        }
        let num_needed = self.entries.len().saturating_add(num_uses);
        if num_needed > MAX_KEYS {
            return Err(Error::Config(format!(
                "{num_needed} distinct keys; a curve takes at most 2^30: bound it with max_keys"
            )));
        }
        self.compact(num_needed * 2)
    }

    /// Moves all keys to the lowest slots, in their order.
    fn compact(&mut self, num_slots: usize) -> Result<()> {
        let (mut held, mut sampled) = (CountedBits::new(num_slots)?, CountedBits::new(num_slots)?);
        for entry in self.entries.values_mut() {
            let old = entry.slot;
            let num_below = self.held.count_before(old) + self.sampled.count_before(old);
            entry.slot = u32::try_from(num_below).unwrap_or(u32::MAX);
            let row = if self.held.is_set(old) { &mut held } else { &mut sampled };
            row.flip(entry.slot);
        }
        held.count();
        sampled.count();
        let num_keys = u32::try_from(self.entries.len()).unwrap_or(u32::MAX);
        for mark in &mut self.marks {
            // Each key is in one of the two rows. A mark behind the last slot is above all keys.
            *mark = if (*mark as usize) < self.num_slots {
                let num_below = self.held.count_before(*mark) + self.sampled.count_before(*mark);
                u32::try_from(num_below).unwrap_or(u32::MAX)
            } else {
                num_keys
            };
        }
        (self.held, self.sampled) = (held, sampled);
        self.num_slots = num_slots;
        self.next_slot = num_keys;
        Ok(())
    }

    /// Returns the place of a key, or None if the stack lacks it.
    #[inline]
    pub(super) fn find(&self, key: u64) -> Option<Place> {
        let slot = self.entries.get(&key)?.slot;
        let role = self.role(slot);
        // The key itself is not above itself, and it is in one of the two rows.
        let above = |row: &CountedBits| row.num_set() - row.count_before(slot);
        let (num_held, num_sampled) = (above(&self.held), above(&self.sampled));
        Some(match role {
            Role::Held => {
                Place { role, num_held_above: num_held - 1, num_sampled_above: num_sampled }
            }
            Role::Sampled => {
                Place { role, num_held_above: num_held, num_sampled_above: num_sampled - 1 }
            }
        })
    }

    /// Moves a key to the top. False if it is not in the stack. Needs a slot.
    #[inline]
    pub(super) fn touch(&mut self, key: u64) -> bool {
        let Some(entry) = self.entries.get_mut(&key) else { return false };
        let old = std::mem::replace(&mut entry.slot, self.next_slot);
        entry.num_uses = entry.num_uses.saturating_add(1);
        let row = if self.held.is_set(old) { &mut self.held } else { &mut self.sampled };
        row.clear(old);
        row.set(self.next_slot);
        self.next_slot += 1;
        true
    }

    /// Puts a key on top that the stack lacks. Needs a slot.
    #[inline]
    pub(super) fn insert(&mut self, key: u64, role: Role) {
        self.entries.insert(key, Entry { slot: self.next_slot, num_uses: 1 });
        let row = match role {
            Role::Held => &mut self.held,
            Role::Sampled => &mut self.sampled,
        };
        row.set(self.next_slot);
        self.next_slot += 1;
    }

    /// Puts a key on top as one that is held; its uses count from now on. Needs a slot.
    pub(super) fn hold(&mut self, key: u64) {
        if let Some(entry) = self.entries.get_mut(&key)
            && !self.held.is_set(entry.slot)
        {
            self.sampled.clear(entry.slot);
            self.held.set(entry.slot);
            entry.num_uses = 0;
        }
        if !self.touch(key) {
            self.insert(key, Role::Held);
        }
    }

    /// Keys with their role and number of uses, in no order that means anything.
    pub(super) fn uses(&self) -> impl Iterator<Item = (Role, u32)> {
        self.entries.values().map(|entry| (self.role(entry.slot), entry.num_uses))
    }

    /// Gives each key a new role, or drops it. Uses count half from now on.
    pub(super) fn reassign(&mut self, new_role: impl Fn(u64, Role, u32) -> Option<Role>) {
        // Keys that are taken out of a table leave traces, and a table that is full of them doubles
        // its size. Emptied, it has none.
        let mut kept = Vec::with_capacity(self.entries.len());
        for (key, mut entry) in self.entries.drain() {
            let is_held = self.held.is_set(entry.slot);
            let old = if is_held { Role::Held } else { Role::Sampled };
            let new = new_role(key, old, entry.num_uses);
            if new != Some(old) {
                if is_held { &mut self.held } else { &mut self.sampled }.flip(entry.slot);
                match new {
                    Some(Role::Held) => self.held.flip(entry.slot),
                    Some(Role::Sampled) => self.sampled.flip(entry.slot),
                    None => continue,
                }
            }
            entry.num_uses = (entry.num_uses / 2).max(1);
            kept.push((key, entry));
        }
        self.entries.extend(kept);
        self.held.count();
        self.sampled.count();
    }

    /// Begins a turn, and forgets the keys that were not used during the last `num_kept` turns.
    pub(super) fn turn(&mut self, num_kept: usize) {
        self.marks.push_back(self.next_slot);
        while self.marks.len() > num_kept {
            let mark = self.marks.pop_front();
            self.forget_below(mark.unwrap_or(0));
        }
    }

    /// Forgets all keys.
    pub(super) fn clear(&mut self) {
        self.forget_below(self.next_slot);
    }

    fn forget_below(&mut self, mark: u32) {
        // A table is emptied for the reason that `reassign` gives.
        let mut kept = Vec::new();
        for (key, entry) in self.entries.drain() {
            if entry.slot >= mark {
                kept.push((key, entry));
            } else if self.held.is_set(entry.slot) {
                self.held.flip(entry.slot);
            } else {
                self.sampled.flip(entry.slot);
            }
        }
        self.entries.extend(kept);
        self.held.count();
        self.sampled.count();
    }

    fn role(&self, slot: u32) -> Role {
        if self.held.is_set(slot) { Role::Held } else { Role::Sampled }
    }
}

/// Bytes that a table takes which has room for so many keys: seven of eight buckets are used.
pub(super) const fn table_bytes(num_keys: usize) -> usize {
    let num_buckets = (num_keys.saturating_mul(8) / 7).next_power_of_two();
    num_buckets.saturating_mul(size_of::<(u64, Entry)>() + 1)
}
