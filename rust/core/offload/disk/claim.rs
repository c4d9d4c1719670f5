//! Claims: what a shared store below the host is known to have.
//!
//! A shared store finds blocks by their key and has no slots. Each block that it is known to have
//! gets a slot of the disk tier's index, which names no place then. So lookups, promotes and demotes
//! are those of a disk. A claim may be wrong, because the store loses blocks: its promote fails then,
//! and the claim goes.

use crate::error::{Error, Result};
use crate::ids::{BlockId, GroupId};
use crate::key::{BlockHash, BlockKey, Hashes, SharedHashes};
use crate::offload::tier::Filling;
use crate::offload::{DiskMode, OffloadScheduler};

use super::no_disk;

/// Blocks of a request, in the order of their prompt, each with the hash before it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Unclaimed {
    /// What each block is.
    pub keys: Vec<BlockKey>,
    /// The hash before each; None at the start of a prompt, and in groups that skip blocks.
    pub parents: Vec<Option<BlockHash>>,
}

impl OffloadScheduler {
    /// The first `max_blocks` blocks of a request that neither the host nor the disk tier has, and
    /// that could lengthen its hit. None of them if the request has waited for a promote already, if
    /// they would add too few tokens, and if the disk tier is off. [`claim`](Self::claim) those that
    /// a shared store has, and then look up.
    ///
    /// # Errors
    /// As [`lookup`](Self::lookup).
    pub fn unclaimed(
        &self,
        request_id: &str,
        num_local_tokens: usize,
        max_tokens: usize,
        max_blocks: usize,
    ) -> Result<Unclaimed> {
        self.check_multiple("local", num_local_tokens)?;
        let request = self.requests.get(request_id)?;
        let Some(disk) = self.disk.as_ref().filter(|disk| disk.mode != DiskMode::Off) else {
            return Ok(Unclaimed::default());
        };
        let hashes = SharedHashes::clone(&request.hashes);
        let model = &self.slot_model;
        let num_known = hashes.len() * model.hash_block_size();
        let num_whole = max_tokens.min(num_known) / model.hit_block_size() * model.hit_block_size();
        let has_promoted = request.waiting.as_ref().is_some_and(|it| it.has_promoted());
        let num_host = self.num_host_tokens(&hashes, num_local_tokens, max_tokens);
        if has_promoted || !self.is_worth(num_whole, num_host.max(num_local_tokens)) {
            return Ok(Unclaimed::default());
        }
        let mut found = Vec::new();
        for (group, attention) in model.enumerate() {
            let own =
                |at: usize| hashes.get((at + 1) * model.hashes_per_block(attention) - 1).copied();
            let first = num_local_tokens / attention.block_size;
            let end = num_whole / attention.block_size + usize::from(attention.drops_last_block());
            for (at, hash) in (first..end).map_while(|at| Some((at, own(at)?))) {
                let key = BlockKey { hash, group };
                let is_here = self.host.resident_or_filling(&key).is_some()
                    || disk.tier.resident_or_filling(&key).is_some();
                if !is_here {
                    let parent = at.checked_sub(1).filter(|_| attention.is_full()).and_then(own);
                    found.push(((at + 1) * attention.block_size, key, parent));
                }
            }
        }
        found.sort_by_key(|&(end, ..)| end);
        found.truncate(max_blocks);
        let (keys, parents) = found.into_iter().map(|(_, key, parent)| (key, parent)).unzip();
        Ok(Unclaimed { keys, parents })
    }

    /// Adds blocks that a shared store has, the first of a prompt first. Evicts from the disk tier's
    /// index for room, and the first blocks get what room there is. An empty list of `parents` means
    /// that none is known.
    ///
    /// Skips a block that the disk tier has. Returns the number of blocks that it added: 0 if the
    /// disk tier is off.
    ///
    /// # Errors
    /// As [`adopt_disk`](Self::adopt_disk). Nothing has changed then.
    pub fn claim(
        &mut self,
        hashes: &Hashes,
        groups: &[GroupId],
        parents: &[Option<BlockHash>],
    ) -> Result<usize> {
        if self.disk.is_none() {
            return Err(no_disk("claim blocks"));
        }
        let num = hashes.len();
        if groups.len() != num || !(parents.is_empty() || parents.len() == num) {
            return Err(Error::Config(format!(
                "{num} hashes, {} groups and {} parents: give one of each per block, or no parents \
                 at all",
                groups.len(),
                parents.len()
            )));
        }
        self.check_groups(groups, parents)?;
        self.host.slots.pool.agree_width(hashes.width())?;
        let Self { disk: Some(disk), slot_model, .. } = self else { return Ok(0) };
        if disk.mode == DiskMode::Off {
            return Ok(0);
        }
        let keys = hashes.as_slice().iter().zip(groups);
        let keys: Vec<BlockKey> = keys.map(|(&hash, &group)| BlockKey { hash, group }).collect();
        let parent = |at: usize| parents.get(at).copied().flatten();
        let num_new =
            keys.iter().filter(|key| disk.tier.resident_or_filling(key).is_none()).count();
        let above = |at: usize| {
            let key = BlockKey { hash: parent(at)?, group: keys[at].group };
            disk.tier.resident_or_filling(&key)
        };
        let above: Vec<BlockId> = (0..num).filter_map(above).collect();
        disk.tier.pin(&above)?;
        let slots = disk.tier.reserve(num_new);
        disk.tier.unpin(&above)?;
        let slots = slots?;
        let (mut rest, mut taken) = (slots.as_slice(), Vec::new());
        let mut filling = Filling::default();
        for (at, &key) in keys.iter().enumerate() {
            // Computed each time, because a list may hold a key twice.
            if disk.tier.resident_or_filling(&key).is_some() {
                continue;
            }
            let Some((&slot, others)) = rest.split_first() else { break };
            rest = others;
            disk.tier.fill_below(slot, key, parent(at));
            taken.push(slot);
            filling.ends.push(0);
            filling.parents.push(parent(at));
        }
        disk.tier.slots.pool.free(rest)?;
        let claimed = taken.iter().filter_map(|&slot| disk.tier.slots.key(slot));
        let claimed: Vec<BlockKey> = claimed.collect();
        let num_claimed = disk.events.without(&mut disk.tier, claimed.into_iter(), |tier| {
            tier.publish(&taken, &filling, slot_model)
        })?;
        disk.counters.claimed_blocks += num_claimed;
        Ok(num_claimed)
    }
}
