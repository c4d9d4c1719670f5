//! Lazy stores: blocks that the device is about to evict and that the tier does not have.
//!
//! ```text
//!   device's free queue   head [ ][a][b][ ][c] ... tail
//!                              |<- horizon ->|
//!                               stored: a, b          copies pin, so the queue stays as it is
//! ```

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use xxhash_rust::xxh3::xxh3_64;

use crate::error::{Error, Result};
use crate::group::{Attention, Model};
use crate::ids::BlockId;
use crate::key::{BlockHash, BlockKey};
use crate::pool::check_ids;

use super::job::Ranks;
use super::request::ReportedTable;
use super::store::Part;
use super::{Job, Mode, OffloadScheduler};

/// A device block whose KV has been computed, kept also after its request has left.
#[derive(Clone, Copy, Debug)]
pub(super) struct Computed {
    key: BlockKey,
    /// The hash of the block before it.
    parent: Option<BlockHash>,
    /// Whether only requests of low priority have used it.
    is_low_priority: bool,
    /// The tier's losses at the last look at the block. It is stored once each time that it is
    /// used, and again if the tier has lost slots since.
    seen: Option<u64>,
}

/// For each device block, the last KV that was computed into it.
pub(super) type ComputedBlocks = HashMap<BlockId, Computed, BuildHasherDefault<IdHasher>>;

/// A hasher for block ids. Neighbours lie side by side in the table, because requests hold runs of
/// neighbours.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct IdHasher(u64);

impl Hasher for IdHasher {
    #[inline]
    fn write_u32(&mut self, id: u32) {
        // The low bits choose the place in the table. Its places are told apart by the highest.
        let mixed = u64::from(id).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = mixed & !u64::from(u32::MAX) | u64::from(id);
    }

    fn write(&mut self, bytes: &[u8]) {
        self.0 = xxh3_64(bytes);
    }

    #[inline]
    fn finish(&self) -> u64 {
        self.0
    }
}

impl OffloadScheduler {
    /// Plans the stores of `candidates`, blocks that the device will evict next, each with its key.
    /// Returns None if there is nothing to store.
    ///
    /// Stores blocks that were reported to [`store`](Self::store) as computed, unless the tier has
    /// their key or a store is filling a slot with it. If slots are short, it stores the first
    /// candidates, and looks at the others again in the next call.
    ///
    /// # Errors
    /// [`Error::State`] in eager mode.
    pub fn store_evictable(
        &mut self,
        candidates: impl Iterator<Item = (BlockId, BlockKey)>,
        deadline: Option<f64>,
    ) -> Result<Option<Job>> {
        if self.config.mode != Mode::Lazy {
            return Err(Error::State(
                "the scheduler is in eager mode, which stores blocks once they are computed: use \
                 mode lazy"
                    .to_owned(),
            ));
        }
        let mut due: Vec<(BlockId, Computed)> = Vec::new();
        for (id, key) in candidates {
            let Some(known) = self.computed.get_mut(&id) else { continue };
            let seen = Some(self.host.num_losses);
            if known.key != key || known.seen == seen {
                continue;
            }
            known.seen = seen;
            due.push((id, *known));
            self.host.slots.pool.prefetch_key(&key.hash, key.group);
        }
        // The keys lie apart in memory. Here the reads of all overlap.
        due.retain(|(_, computed)| self.host.resident_or_filling(&computed.key).is_none());
        let all: Vec<BlockId> = due.iter().map(|(id, _)| *id).collect();
        keep_first_of_each_key(&mut due);
        let num_due = due.len();
        let parents = self.resident_parents(&due);
        self.host.pin(&parents)?;
        let slots = self.host.reserve(due.len());
        self.host.unpin(&parents)?;
        let slots = slots?;
        let mut parts = vec![Part::default(); self.model.groups().len()];
        let has_events = self.host.slots.pool.has_events();
        let mut low_priority = Vec::new();
        // The device evicts a prompt's tail first. In reverse, few blocks await their parents, and
        // the root becomes the most recent.
        due.truncate(slots.len());
        due.reverse();
        let slots: Vec<BlockId> = slots.into_iter().rev().collect();
        let (model, mut first) = (&self.model, 0);
        for run in due.chunk_by(|(_, before), (_, next)| is_next(model, before, next)) {
            let (head, slots) = (&run[0].1, &slots[first..first + run.len()]);
            first += run.len();
            let hashes: Vec<BlockHash> =
                run.iter().map(|(_, computed)| computed.key.hash).collect();
            let is_chain = is_chained(model, &head.key);
            let parent = head.parent.filter(|_| is_chain);
            self.host.fill_all_below(slots, &hashes, head.key.group, parent, is_chain);
            let part = &mut parts[usize::from(head.key.group.0)];
            part.block_ids.extend(run.iter().map(|(id, _)| *id));
            part.slots.extend(slots);
            part.filling.ends.resize(part.slots.len(), 0);
            if has_events {
                part.filling.parents.extend(run.iter().map(|(_, computed)| computed.parent));
            }
            let is_low =
                run.iter().zip(slots).filter(|((_, computed), _)| computed.is_low_priority);
            low_priority.extend(is_low.map(|(_, &slot)| slot));
        }
        if slots.len() < num_due {
            for id in all {
                if self
                    .computed
                    .get(&id)
                    .is_some_and(|known| self.host.resident_or_filling(&known.key).is_none())
                {
                    self.forget_seen(id);
                }
            }
        }
        Ok(self.begin_store(parts, Ranks { low_priority, ..Ranks::default() }, deadline))
    }

    /// Records what a request's newly confirmed blocks hold.
    pub(super) fn record(
        computed: &mut ComputedBlocks,
        table: &mut ReportedTable,
        is_low_priority: bool,
        key: impl Fn(usize) -> BlockKey,
    ) {
        for at in table.first_due()..table.num_confirmed {
            let id = table.blocks[at];
            let known = Computed {
                key: key(at),
                parent: at.checked_sub(1).map(|before| key(before).hash),
                is_low_priority,
                seen: None,
            };
            // A hit is recorded anew: it is stored again if the host has evicted it since.
            if !id.is_null() {
                computed.insert(id, known);
            }
        }
        table.num_kept = table.num_kept.max(table.num_confirmed);
    }

    /// Forgets what was computed into device blocks, because they are about to be overwritten. A
    /// block that gets the same key again may not be computed yet. Eager mode keeps no such record.
    ///
    /// # Errors
    /// [`Error::NoSuchBlock`] for an id outside the device pool.
    pub fn invalidate(&mut self, block_ids: &[BlockId]) -> Result<()> {
        check_ids(block_ids, self.config.num_device_blocks)?;
        Self::forget_computed(&mut self.computed, block_ids);
        Ok(())
    }

    pub(super) fn forget_computed(computed: &mut ComputedBlocks, block_ids: &[BlockId]) {
        if !computed.is_empty() {
            for id in block_ids {
                computed.remove(id);
            }
        }
    }

    /// Lets the next call look again at a block whose store did not succeed.
    pub(super) fn forget_seen(&mut self, id: BlockId) {
        if let Some(known) = self.computed.get_mut(&id) {
            known.seen = None;
        }
    }

    /// The slots of these blocks' parents, which must not be evicted for them.
    fn resident_parents(&self, due: &[(BlockId, Computed)]) -> Vec<BlockId> {
        let parent = |(at, (_, computed)): (usize, &(BlockId, Computed))| {
            let key = BlockKey { hash: computed.parent?, group: computed.key.group };
            // Most often it comes right behind its child, and is not in the tier either.
            let is_due = due.get(at + 1).is_some_and(|(_, next)| next.key == key);
            if is_due { None } else { self.host.resident_or_filling(&key) }
        };
        due.iter().enumerate().filter_map(parent).collect()
    }
}

/// Whether `next` follows `before` in its chain, or neither is in a chain.
fn is_next(model: &Model, before: &Computed, next: &Computed) -> bool {
    before.key.group == next.key.group
        && (!is_chained(model, &next.key) || next.parent == Some(before.key.hash))
}

fn is_chained(model: &Model, key: &BlockKey) -> bool {
    let group = model.groups().get(usize::from(key.group.0));
    group.is_some_and(|group| group.attention == Attention::Full)
}

/// Drops the blocks whose key a block before them has.
fn keep_first_of_each_key(due: &mut Vec<(BlockId, Computed)>) {
    // Most keys differ in these bytes, which are faster to sort.
    let mut prefixes: Vec<[u8; 8]> =
        due.iter().filter_map(|(_, computed)| computed.key.hash.first_chunk().copied()).collect();
    prefixes.sort_unstable();
    if prefixes.windows(2).all(|pair| pair[0] != pair[1]) {
        return;
    }
    let mut keys: Vec<(BlockKey, usize)> =
        due.iter().enumerate().map(|(at, (_, computed))| (computed.key, at)).collect();
    keys.sort_unstable();
    let mut repeated: Vec<usize> =
        keys.windows(2).filter(|pair| pair[0].0 == pair[1].0).map(|pair| pair[1].1).collect();
    repeated.sort_unstable();
    let mut at = 0..;
    due.retain(|_| at.next().is_none_or(|at| repeated.binary_search(&at).is_err()));
}
