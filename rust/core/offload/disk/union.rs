//! The host and the disk as one source of blocks, for lookups that look through both.

use crate::group::{Hit, Model, Source};
use crate::ids::{BlockId, GroupId};
use crate::key::{BlockHash, BlockKey};
use crate::offload::tier::Tier;

/// The union of two tiers. A disk slot's id is above those of all host slots.
///
/// A block that the host has comes from there. A block that a store fills on the host is missing,
/// as for a lookup in the host alone. A block that a promote fills there comes from the disk.
pub(super) struct Union<'a> {
    pub(super) host: &'a Tier,
    pub(super) disk: &'a Tier,
}

impl Union<'_> {
    /// The slot on the disk that an id names. None for a slot on the host.
    fn disk_slot(&self, id: BlockId) -> Option<BlockId> {
        let first = u32::try_from(self.host.slots.len()).unwrap_or(u32::MAX);
        id.0.checked_sub(first).filter(|&slot| slot > 0).map(BlockId)
    }
}

impl Source for Union<'_> {
    fn get(&self, hash: &BlockHash, group: GroupId) -> Option<BlockId> {
        let key = BlockKey { hash: *hash, group };
        let on_host = self.host.resident_or_filling(&key);
        if let Some(slot) = on_host.filter(|&slot| self.host.is_resident(slot)) {
            return Some(slot);
        }
        let slot = self.disk.resident(&key)?;
        let is_found = on_host.is_none() || self.disk.slots.is_loading(slot);
        let first = u32::try_from(self.host.slots.len()).unwrap_or(u32::MAX);
        is_found.then(|| BlockId(slot.0.saturating_add(first)))
    }

    fn prefix(&self, hashes: &[BlockHash], group: GroupId) -> Vec<BlockId> {
        let mut found = self.host.prefix(hashes, group);
        let rest = &hashes[found.len()..];
        found.extend(rest.iter().map_while(|hash| self.get(hash, group)));
        found
    }
}

/// A block of a hit that only the disk has.
#[derive(Clone, Copy, Debug)]
pub(super) struct Needed {
    /// Where it ends in its prompt, in tokens.
    pub(super) end: usize,
    pub(super) key: BlockKey,
    /// The hash before it; None at a prompt's start, and in groups without chains.
    pub(super) parent: Option<BlockHash>,
    pub(super) disk_slot: BlockId,
}

/// The hit over both tiers.
pub(super) struct UnionHit {
    pub(super) num_tokens: usize,
    /// The blocks of the hit that the host has.
    pub(super) host_slots: Vec<BlockId>,
    /// The others, in the order of their prompt, those being promoted left out.
    pub(super) needed: Vec<Needed>,
    /// Whether a promote brings some of its blocks.
    pub(super) is_promoting: bool,
}

impl UnionHit {
    /// The longest hit that `tiers` can serve together.
    pub(super) fn search(
        tiers: &Union<'_>,
        model: &Model,
        hashes: &[BlockHash],
        num_local_tokens: usize,
        max_tokens: usize,
    ) -> Self {
        let Hit { num_tokens, blocks, .. } =
            model.longest_hit(tiers, hashes, num_local_tokens, max_tokens);
        let (mut host_slots, mut needed, mut is_promoting) = (Vec::new(), Vec::new(), false);
        for ((group, attention), mut blocks) in model.enumerate().zip(blocks) {
            let own = |at: usize| {
                let per_hash = model.hashes_per_block(attention);
                hashes.get((at + 1) * per_hash - 1).copied()
            };
            if attention.drops_last_block() && num_tokens > 0 {
                // The host finds the hit only if it has one block more.
                blocks.extend(own(blocks.len()).and_then(|hash| tiers.get(&hash, group)));
            }
            for (at, &id) in blocks.iter().enumerate().filter(|(_, id)| !id.is_null()) {
                let Some(disk_slot) = tiers.disk_slot(id) else {
                    host_slots.push(id);
                    continue;
                };
                if tiers.disk.slots.is_loading(disk_slot) {
                    is_promoting = true;
                    continue;
                }
                let Some(hash) = own(at) else { continue };
                let parent = at.checked_sub(1).filter(|_| attention.is_full()).and_then(own);
                let key = BlockKey { hash, group };
                needed.push(Needed {
                    end: (at + 1) * attention.block_size,
                    key,
                    parent,
                    disk_slot,
                });
            }
        }
        needed.sort_by_key(|needed| needed.end);
        Self { num_tokens, host_slots, needed, is_promoting }
    }
}
