//! Recency: which slots a prompt makes most recent.

use std::cmp::Reverse;
use std::ops::Range;

use crate::group::{Attention, Model};
use crate::key::{BlockHash, BlockKey};

use super::OffloadScheduler;
use super::tier::Tier;

impl OffloadScheduler {
    /// Makes the blocks that each tier has of a prompt most recent, the prompt's first block most of
    /// all in every group. Blocks that end within `hits`, behind its start, are hits.
    pub(super) fn make_recent(&mut self, hashes: &[BlockHash], hits: &Range<usize>) {
        let is_full_attention = self.is_full_attention();
        let make_recent = if is_full_attention { make_chains_recent } else { make_slots_recent };
        make_recent(&mut self.host, &self.slot_model, hashes, hits);
        if let Some(disk) = &mut self.disk {
            make_recent(&mut disk.tier, &self.slot_model, hashes, hits);
        }
    }

    /// Whether no group skips blocks.
    pub(super) fn is_full_attention(&self) -> bool {
        self.model.groups().iter().all(|group| group.attention == Attention::Full)
    }
}

/// As [`OffloadScheduler::make_recent`], in one tier and slot by slot.
fn make_slots_recent(tier: &mut Tier, model: &Model, hashes: &[BlockHash], hits: &Range<usize>) {
    let mut slots = Vec::new();
    for (id, group) in model.enumerate() {
        let per_block = model.hashes_per_block(group);
        let own = hashes.chunks_exact(per_block).filter_map(<[_]>::last);
        let kept = own
            .map(|&hash| tier.resident_or_filling(&BlockKey { hash, group: id }))
            .take_while(|slot| group.attention != Attention::Full || slot.is_some());
        let ends = (1..).map(|num_blocks| num_blocks * group.block_size);
        slots.extend(ends.zip(kept).filter_map(|(end, slot)| Some((end, slot?))));
    }
    // Sorted by their end in the prompt, whatever their group. So what is left after evictions
    // is a shorter prefix that every group still serves.
    slots.sort_by_key(|&(end, _)| Reverse(end));
    let is_hit = |end| hits.start < end && end <= hits.end;
    tier.make_recent(slots.into_iter().map(|(end, slot)| (slot, is_hit(end))));
}

/// As [`OffloadScheduler::make_recent`], in one tier and if all groups are full attention: the tier
/// knows their chains.
fn make_chains_recent(tier: &mut Tier, model: &Model, hashes: &[BlockHash], hits: &Range<usize>) {
    for (id, group) in model.enumerate() {
        let per_block = model.hashes_per_block(group);
        let slot = |index: usize| {
            let hash = hashes[(index + 1) * per_block - 1];
            tier.resident_or_filling(&BlockKey { hash, group: id })
        };
        let (mut num_kept, mut end) = (0, hashes.len() / per_block);
        while num_kept < end {
            let middle = num_kept.midpoint(end);
            if slot(middle).is_some() { num_kept = middle + 1 } else { end = middle }
        }
        if let Some(tail) = num_kept.checked_sub(1).and_then(slot) {
            // Counted from the tail. Of blocks that the start cuts, the end is behind it.
            let from_tail =
                |num_tokens: usize| num_kept.saturating_sub(num_tokens / group.block_size);
            tier.make_chain_recent(tail, &(from_tail(hits.end)..from_tail(hits.start)));
        }
    }
}
