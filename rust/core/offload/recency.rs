//! Recency: which slots a prompt makes the most recent ones.

use std::cmp::Reverse;

use crate::group::Attention;
use crate::key::{BlockHash, BlockKey};

use super::OffloadScheduler;

impl OffloadScheduler {
    /// Makes what the tier has of a prompt its most recent blocks: in every group the first of all
    /// goes last. Those that end within `num_hit_tokens` are hits.
    pub(super) fn rank(&mut self, hashes: &[BlockHash], num_hit_tokens: usize) {
        if self.is_full_attention() {
            return self.rank_chains(hashes, num_hit_tokens);
        }
        let mut slots = Vec::new();
        for (id, group) in self.slot_model.enumerate() {
            let per_block = self.slot_model.hashes_per_block(group);
            let own = hashes.chunks_exact(per_block).filter_map(<[_]>::last);
            let kept =
                own.map(|&hash| self.tier.resident_or_in_flight(&BlockKey { hash, group: id }));
            let with_end =
                |(index, slot): (usize, Option<_>)| Some(((index + 1) * group.block_size, slot?));
            if group.attention == Attention::Full {
                slots.extend(kept.take_while(Option::is_some).enumerate().filter_map(with_end));
            } else {
                slots.extend(kept.enumerate().filter_map(with_end));
            }
        }
        // By where they end in the prompt, whatever their group: what is left when some have gone
        // is a shorter prefix that every group still serves.
        slots.sort_by_key(|&(end, _)| Reverse(end));
        self.tier.ranked(slots.into_iter().map(|(end, slot)| (slot, end <= num_hit_tokens)));
    }

    /// Whether no group skips blocks.
    pub(super) fn is_full_attention(&self) -> bool {
        self.model.groups().iter().all(|group| group.attention == Attention::Full)
    }

    /// As [`rank`](Self::rank) where all groups are full attention: the tier knows their chains.
    fn rank_chains(&mut self, hashes: &[BlockHash], num_hit_tokens: usize) {
        for (id, group) in self.slot_model.enumerate() {
            let per_block = self.slot_model.hashes_per_block(group);
            let slot = |index: usize| {
                let hash = hashes[(index + 1) * per_block - 1];
                self.tier.resident_or_in_flight(&BlockKey { hash, group: id })
            };
            let (mut num_kept, mut end) = (0, hashes.len() / per_block);
            while num_kept < end {
                let middle = num_kept.midpoint(end);
                if slot(middle).is_some() { num_kept = middle + 1 } else { end = middle }
            }
            if let Some(tail) = num_kept.checked_sub(1).and_then(slot) {
                let num_missed = num_kept.saturating_sub(num_hit_tokens / group.block_size);
                self.tier.rank_chain(tail, num_missed);
            }
        }
    }
}
