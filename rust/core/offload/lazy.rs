//! Lazy store planning: what the device is about to evict, and the tier does not have.
//!
//! ```text
//!   device's free queue   head [ ][a][b][ ][c] ... tail
//!                              |<- horizon ->|
//!                               stored: a, b          the queue stays as it is: copies pin
//! ```

use std::collections::HashMap;

use crate::error::{Error, Result};
use crate::group::Attention;
use crate::ids::BlockId;
use crate::key::{BlockHash, BlockKey};

use super::store::Part;
use super::{Job, Mode, OffloadScheduler, Table};

/// What is known of a device block whose KV has been computed, also when its request is gone.
#[derive(Clone, Copy, Debug)]
pub(super) struct Computed {
    key: BlockKey,
    /// The hash of the block before it.
    parent: Option<BlockHash>,
    /// The tier's losses when it was looked at: it is stored once for each time that it was used,
    /// and again if the tier has lost slots since.
    seen: Option<u64>,
}

/// Of each device block, the last KV that was computed into it.
pub(super) type ComputedBlocks = HashMap<BlockId, Computed>;

impl OffloadScheduler {
    /// Plans the stores of blocks that the device will evict next: `candidates`, next to go first,
    /// each with the key it holds. None when there is nothing to store.
    ///
    /// Stored is what [`store`](Self::store) was told of as computed, whose key the tier neither has
    /// nor is being given. With slots short those that go first are stored, the rest is looked at
    /// again.
    ///
    /// # Errors
    /// [`Error::State`] in eager mode.
    pub fn store_evictable(
        &mut self,
        candidates: impl Iterator<Item = (BlockId, BlockKey)>,
        deadline: Option<f64>,
    ) -> Result<Option<Job>> {
        if self.mode != Mode::Lazy {
            return Err(Error::State(
                "this scheduler stores eagerly, as soon as blocks are computed: make it lazy"
                    .to_owned(),
            ));
        }
        let mut due: Vec<(BlockId, Computed)> = Vec::new();
        for (id, key) in candidates {
            let Some(known) = self.computed.get_mut(&id) else { continue };
            let seen = Some(self.tier.num_losses());
            if known.key != key || known.seen == seen {
                continue;
            }
            known.seen = seen;
            if self.tier.resident_or_in_flight(&key).is_none() {
                due.push((id, *known));
            }
        }
        // Two blocks may hold one key.
        let mut keys: Vec<BlockKey> = due.iter().map(|(_, computed)| computed.key).collect();
        keys.sort_unstable();
        keys.dedup();
        let parents = self.resident_parents(&due);
        self.tier.pin(&parents)?;
        let slots = self.tier.reserve(keys.len());
        self.tier.unpin(&parents)?;
        let mut slots = slots?.into_iter();
        let mut parts = vec![Part::default(); self.model.groups().len()];
        for &(id, Computed { key, parent, .. }) in &due {
            if self.tier.resident_or_in_flight(&key).is_some() {
                continue;
            }
            let Some(slot) = slots.next() else {
                self.forget_seen(id);
                continue;
            };
            self.tier.fill_below(slot, key, parent.filter(|_| self.is_chained(&key)));
            let part = &mut parts[usize::from(key.group.0)];
            part.block_ids.push(id);
            part.slots.push(slot);
            part.filling.keys.push(key);
            part.filling.parents.push(parent);
            part.filling.ends.push(0);
        }
        // What goes first from the device is a prompt's tail: its root is to be the most recent.
        parts.iter_mut().for_each(Part::reverse);
        Ok(self.begin_store(parts, Vec::new(), deadline))
    }

    /// Remembers what a request's newly confirmed blocks hold.
    pub(super) fn record(
        computed: &mut ComputedBlocks,
        table: &mut Table,
        key: impl Fn(usize) -> BlockKey,
    ) {
        for at in table.num_kept..table.num_confirmed {
            let id = table.blocks[at];
            let known = Computed {
                key: key(at),
                parent: at.checked_sub(1).map(|before| key(before).hash),
                seen: None,
            };
            // A hit is told of again: it may be stored again, if the host has evicted it since.
            if !id.is_null() {
                computed.insert(id, known);
            }
        }
        table.num_kept = table.num_kept.max(table.num_confirmed);
    }

    /// Forgets what was computed into device blocks, because they are about to be overwritten: a
    /// block that holds the same key again may not have been computed since. Eager mode keeps no
    /// such record.
    ///
    /// # Errors
    /// [`Error::NoSuchBlock`] for an id outside the device pool.
    pub fn invalidate(&mut self, block_ids: &[BlockId]) -> Result<()> {
        self.check_ids(block_ids)?;
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

    /// A store that came to nothing is looked at again.
    pub(super) fn forget_seen(&mut self, id: BlockId) {
        if let Some(known) = self.computed.get_mut(&id) {
            known.seen = None;
        }
    }

    /// The slots that hold what comes right before these blocks: not to be evicted for them.
    fn resident_parents(&self, due: &[(BlockId, Computed)]) -> Vec<BlockId> {
        let parent = |(_, computed): &(BlockId, Computed)| {
            let key = BlockKey { hash: computed.parent?, group: computed.key.group };
            self.tier.resident_or_in_flight(&key)
        };
        due.iter().filter_map(parent).collect()
    }

    fn is_chained(&self, key: &BlockKey) -> bool {
        let group = self.model.groups().get(usize::from(key.group.0));
        group.is_some_and(|group| group.attention == Attention::Full)
    }
}
