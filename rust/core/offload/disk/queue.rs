//! The host slots that are due for a demote, first in, first out.
//!
//! ```text
//!   entries  [ (3, n1) | (5, n2) | (3, n3) ]      slot and number of the entry
//!   marks    [3: n3]   [5: n2]                    (3, n1) is stale: slot 3 holds another block
//! ```
//!
//! A slot has at most one entry that is not stale. So a queue of twice as many entries as slots
//! never overflows: at least half of a full queue is stale.

use std::collections::VecDeque;

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::error::Result;
use crate::ids::BlockId;
use crate::key::BlockKey;
use crate::pool::check_memory;

/// Entries per slot.
const ENTRIES_PER_SLOT: usize = 2;

/// The valid entry of a slot. Number 0 means none.
#[derive(Clone, Copy, Debug, Default)]
struct Mark {
    number: u32,
    print: u32,
}

/// 24 bytes a host slot, allocated at construction.
#[derive(Clone, Debug)]
pub(super) struct DemoteQueue {
    entries: VecDeque<(BlockId, u32)>,
    marks: Vec<Mark>,
    /// The number of the last entry.
    last: u32,
}

/// Part of a key's fingerprint. If two keys share it, a block that is not due may be demoted.
fn print(key: &BlockKey) -> u32 {
    let print = xxh3_64_with_seed(&key.hash, u64::from(key.group.0));
    u32::try_from(print >> 32).unwrap_or(0)
}

impl DemoteQueue {
    /// An empty queue for the slots of a host tier.
    pub(super) fn new(num_slots: usize) -> Result<Self> {
        let slot_bytes = ENTRIES_PER_SLOT * size_of::<(BlockId, u32)>() + size_of::<Mark>();
        check_memory("num_host_blocks", num_slots, num_slots + 1, slot_bytes)?;
        Ok(Self {
            entries: VecDeque::with_capacity(ENTRIES_PER_SLOT * num_slots),
            marks: vec![Mark::default(); num_slots + 1],
            last: 0,
        })
    }

    /// Whether a slot is due with this key.
    pub(super) fn contains(&self, slot: BlockId, key: &BlockKey) -> bool {
        let mark = self.marks[slot.index()];
        mark.number != 0 && mark.print == print(key)
    }

    /// Appends a slot with its key, unless it is due with this key.
    pub(super) fn push(&mut self, slot: BlockId, key: &BlockKey) {
        if self.contains(slot, key) {
            return;
        }
        if self.entries.len() == ENTRIES_PER_SLOT * (self.marks.len() - 1) {
            let marks = &self.marks;
            self.entries.retain(|&(slot, number)| marks[slot.index()].number == number);
        }
        self.last = self.last.checked_add(1).unwrap_or(1);
        self.marks[slot.index()] = Mark { number: self.last, print: print(key) };
        self.entries.push_back((slot, self.last));
    }

    /// Removes the first slot that still has the key with which it was pushed.
    pub(super) fn pop(
        &mut self,
        key: impl Fn(BlockId) -> Option<BlockKey>,
    ) -> Option<(BlockId, BlockKey)> {
        while let Some((slot, number)) = self.entries.pop_front() {
            let mark = &mut self.marks[slot.index()];
            if mark.number != number {
                continue;
            }
            mark.number = 0;
            if let Some(key) = key(slot)
                && print(&key) == mark.print
            {
                return Some((slot, key));
            }
        }
        None
    }

    /// Removes all.
    pub(super) fn clear(&mut self) {
        self.entries.clear();
        self.marks.fill(Mark::default());
    }

    /// The slots of the entries that are not stale, each with part of its key's fingerprint.
    #[cfg(test)]
    pub(super) fn due(&self) -> impl Iterator<Item = (BlockId, u32)> + '_ {
        let valid = |&&(slot, number): &&(BlockId, u32)| self.marks[slot.index()].number == number;
        self.entries.iter().filter(valid).map(|&(slot, _)| (slot, self.marks[slot.index()].print))
    }

    /// Whether it has no more entries than were allocated.
    pub(super) fn is_within_bound(&self) -> bool {
        self.entries.len() <= ENTRIES_PER_SLOT * (self.marks.len() - 1)
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use std::collections::VecDeque;

    use crate::ids::GroupId;

    use super::*;

    fn key(name: u32) -> BlockKey {
        let mut hash = [0; 32];
        hash[..4].copy_from_slice(&name.to_le_bytes());
        BlockKey { hash, group: GroupId(0) }
    }

    /// A small generator, so that the test needs no dependency: its numbers are the same each time.
    fn next(state: &mut u64) -> u32 {
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        u32::try_from(*state >> 40).unwrap()
    }

    #[test]
    fn a_full_queue_loses_only_stale_entries() {
        const NUM_SLOTS: u32 = 5;
        let mut state = 1;
        let mut queue = DemoteQueue::new(NUM_SLOTS as usize).unwrap();
        let mut held = [0; NUM_SLOTS as usize + 1];
        let mut model: VecDeque<(u32, u32)> = VecDeque::new();
        for _ in 0..20_000 {
            let slot = 1 + next(&mut state) % NUM_SLOTS;
            match next(&mut state) % 4 {
                0 => held[slot as usize] = next(&mut state) % 4,
                1 => {
                    let popped = queue.pop(|slot| Some(key(held[slot.index()])));
                    let valid = loop {
                        let Some((slot, name)) = model.pop_front() else { break None };
                        if held[slot as usize] == name {
                            break Some((BlockId(slot), key(name)));
                        }
                    };
                    assert_eq!(popped, valid);
                }
                _ => {
                    let name = held[slot as usize];
                    queue.push(BlockId(slot), &key(name));
                    if !model.contains(&(slot, name)) {
                        model.retain(|&(other, _)| other != slot);
                        model.push_back((slot, name));
                    }
                    assert!(queue.contains(BlockId(slot), &key(name)));
                }
            }
            assert!(queue.is_within_bound());
        }
    }
}
