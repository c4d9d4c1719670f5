//! All groups of a model, and the longest prefix that every group can serve.

use std::borrow::Cow;
use std::ops::Range;

use crate::error::{Error, Result};
use crate::ids::{BlockId, GroupId};
use crate::key::BlockHash;

use super::search::{Cached, Search, own_hashes};
use super::source::Source;
use super::{Group, MAX_GROUP_TOKENS, MAX_GROUPS};

/// A model's groups and the sizes they have in common.
#[derive(Clone, Debug)]
pub struct Model {
    groups: Vec<Group>,
    /// Each distinct group with the ids of all that equal it: they are looked up together. Full
    /// attention comes first, because one scan of it bounds the search of all others.
    kinds: Vec<(Group, Vec<GroupId>)>,
    hash_block_size: usize,
    hit_block_size: usize,
}

impl Model {
    /// A model with these groups, in its own order.
    ///
    /// # Errors
    /// [`Error::Config`] for no groups, too many, or block sizes whose common multiple exceeds
    /// [`MAX_GROUP_TOKENS`].
    pub fn new(groups: Vec<Group>) -> Result<Self> {
        let Some(first) = groups.first() else {
            return Err(Error::Config("groups is empty: name at least one".to_owned()));
        };
        if groups.len() > MAX_GROUPS {
            return Err(Error::Config(format!(
                "{} groups: a model may have at most {MAX_GROUPS}",
                groups.len()
            )));
        }
        let (mut divisor, mut multiple) = (first.block_size, first.block_size);
        for group in &groups {
            divisor = greatest_common_divisor(divisor, group.block_size);
            multiple *= group.block_size / greatest_common_divisor(multiple, group.block_size);
            if multiple > MAX_GROUP_TOKENS {
                return Err(Error::Config(format!(
                    "the block sizes have a common multiple of {multiple} tokens or more: it may \
                     be at most {MAX_GROUP_TOKENS}, because hits end at its multiples"
                )));
            }
        }
        let mut kinds: Vec<(Group, Vec<GroupId>)> = Vec::new();
        for (&group, id) in groups.iter().zip((0..=u16::MAX).map(GroupId)) {
            match kinds.iter_mut().find(|(other, _)| *other == group) {
                Some((_, ids)) => ids.push(id),
                None => kinds.push((group, vec![id])),
            }
        }
        kinds.sort_by_key(|(group, _)| !group.is_full());
        Ok(Self { groups, kinds, hash_block_size: divisor, hit_block_size: multiple })
    }

    /// The groups as a tier holds them: blocks are `factor` times as large, the block size of the
    /// hashes stays.
    ///
    /// # Errors
    /// [`Error::Config`] as [`Model::new`] and [`Group::new`].
    pub(crate) fn in_tier(&self, factor: usize) -> Result<Self> {
        let groups =
            self.groups.iter().map(|group| group.in_tier(factor)).collect::<Result<_>>()?;
        Ok(Self { hash_block_size: self.hash_block_size, ..Self::new(groups)? })
    }

    /// The groups.
    pub fn groups(&self) -> &[Group] {
        &self.groups
    }

    /// The groups with their ids.
    pub fn enumerate(&self) -> impl Iterator<Item = (GroupId, Group)> {
        (0..=u16::MAX).map(GroupId).zip(self.groups.iter().copied())
    }

    /// Tokens per block hash: the greatest common divisor of the groups' block sizes.
    pub fn hash_block_size(&self) -> usize {
        self.hash_block_size
    }

    /// Hits end at multiples of this many tokens: the least common multiple of the groups' block
    /// sizes.
    pub fn hit_block_size(&self) -> usize {
        self.hit_block_size
    }

    /// Tokens of prompts that fit into this many blocks if no group skips any.
    pub fn capacity_tokens(&self, num_blocks: usize) -> usize {
        let blocks_per_hit: usize =
            self.groups.iter().map(|group| self.hit_block_size / group.block_size).sum();
        num_blocks / blocks_per_hit * self.hit_block_size
    }

    /// Block hashes that one block of the group covers. The last of them is the block's own.
    #[inline]
    pub(crate) fn hashes_per_block(&self, group: Group) -> usize {
        group.block_size / self.hash_block_size
    }

    /// The own hashes of a group's blocks.
    pub(crate) fn own_hashes<'a>(
        &self,
        group: Group,
        hashes: &'a [BlockHash],
        blocks: Range<usize>,
    ) -> Cow<'a, [BlockHash]> {
        own_hashes(hashes, self.hashes_per_block(group), blocks)
    }

    /// A test whether a hit can need block `index` of this group. None if a hit can need any block.
    #[inline]
    pub(crate) fn reachable(&self, group: Group) -> Option<impl Fn(usize) -> bool> {
        let step = self.hit_block_size / group.block_size;
        // Of every step, the first block is the last that a longer window reaches. A hit that drops
        // its last block needs that block in any case, so there the second block is the last.
        let last_reached = usize::from(group.drops_last_block);
        (!group.is_reachable(last_reached, step))
            .then_some(move |index| group.is_reachable(index, step))
    }

    /// Number of blocks of a group, from the first, that hits of the first `num_tokens` can need.
    #[inline]
    pub(crate) fn num_hit_blocks(&self, group: Group, num_tokens: usize) -> usize {
        let end = (num_tokens - num_tokens % self.hit_block_size) / group.block_size;
        group.num_searched_blocks(end).min(num_tokens / group.block_size)
    }

    /// Whether these blocks, per group, have the form of a hit of `num_tokens`: a block is null
    /// exactly where the next token reads nothing.
    pub(crate) fn is_hit(&self, num_tokens: usize, blocks: &[Vec<BlockId>]) -> bool {
        let is_served = |(group, blocks): (&Group, &Vec<BlockId>)| {
            let num_null = group.num_unread_blocks(num_tokens);
            blocks.len() == num_tokens / group.block_size
                && blocks.iter().enumerate().all(|(at, id)| id.is_null() == (at < num_null))
        };
        num_tokens.is_multiple_of(self.hit_block_size)
            && blocks.len() == self.groups.len()
            && self.groups.iter().zip(blocks).all(is_served)
    }

    /// The longest prefix of at most `max_tokens` tokens that every group can serve from `source`.
    /// The first `num_local_tokens` need not be in `source`.
    ///
    /// Each kind shortens the hit of the kinds before it, until none does (vLLM 0.32's
    /// `HybridKVCacheCoordinator.find_longest_cache_hit`).
    pub(crate) fn longest_hit<'a>(
        &'a self,
        source: &'a dyn Source,
        hashes: &'a [BlockHash],
        num_local_tokens: usize,
        max_tokens: usize,
    ) -> Hit {
        let mut num_tokens = (hashes.len() * self.hash_block_size).min(max_tokens);
        num_tokens -= num_tokens % self.hit_block_size;
        let search = |(group, ids): &'a (Group, Vec<GroupId>)| {
            let num_local_blocks = num_local_tokens / group.block_size;
            let hashes_per_block = self.hashes_per_block(*group);
            let cached =
                Cached { source, hashes_per_block, group: *group, ids, hashes, num_local_blocks };
            Search::new(cached, self.hit_block_size / group.block_size)
        };
        let mut searches: Vec<Search<'_>> = self.kinds.iter().map(search).collect();
        let num_full = self.kinds.iter().take_while(|(group, _)| group.is_full()).count();
        num_tokens = self.shorten(num_tokens, &mut searches[..num_full]);
        let num_full_tokens = if num_full > 0 { num_tokens } else { 0 };
        loop {
            let before = num_tokens;
            num_tokens = self.shorten(num_tokens, &mut searches);
            if num_tokens == before {
                break;
            }
        }
        let mut blocks = vec![Vec::new(); self.groups.len()];
        for ((group, ids), search) in self.kinds.iter().zip(searches) {
            for (id, found) in ids.iter().zip(search.into_blocks(num_tokens / group.block_size)) {
                blocks[usize::from(id.0)] = found;
            }
        }
        Hit { num_tokens, num_full_tokens, blocks }
    }

    /// The tokens of a hit after the first kinds, one per search, have shortened it in turn.
    fn shorten(&self, mut num_tokens: usize, searches: &mut [Search<'_>]) -> usize {
        for ((group, _), search) in self.kinds.iter().zip(searches) {
            num_tokens = search.longest_hit(num_tokens / group.block_size) * group.block_size;
        }
        num_tokens
    }
}

/// The longest prefix that every group can serve.
pub(crate) struct Hit {
    pub(crate) num_tokens: usize,
    /// Tokens of the longest prefix that the full-attention groups can serve; 0 without any.
    pub(crate) num_full_tokens: usize,
    /// The blocks of each group, null where the group needs none.
    pub(crate) blocks: Vec<Vec<BlockId>>,
}

fn greatest_common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use std::cell::Cell;

    use super::super::Attention;
    use super::*;

    /// Holds the blocks of each group that a rule names, and counts lookups.
    struct Counted {
        holds: fn(usize, u16) -> bool,
        num_lookups: Cell<usize>,
    }

    impl Source for Counted {
        fn get(&self, hash: &BlockHash, group: GroupId) -> Option<BlockId> {
            self.num_lookups.set(self.num_lookups.get() + 1);
            let at = usize::from(u16::from_le_bytes([hash[0], hash[1]]));
            (self.holds)(at, group.0).then_some(BlockId(1))
        }

        fn prefix(&self, hashes: &[BlockHash], group: GroupId) -> Vec<BlockId> {
            hashes.iter().map_while(|hash| self.get(hash, group)).collect()
        }
    }

    #[test]
    fn a_lookup_reads_each_block_only_a_few_times() {
        const NUM_BLOCKS: u16 = 4096;
        let window = |window| Group::new(Attention::SlidingWindow { window }, 1).unwrap();
        let full = Group::new(Attention::Full, 1).unwrap();
        let hashes: Vec<BlockHash> = (0..NUM_BLOCKS)
            .map(|at| {
                let mut hash = BlockHash::default();
                hash[..2].copy_from_slice(&at.to_le_bytes());
                hash
            })
            .collect();
        let rules: [fn(usize, u16) -> bool; 4] = [
            |_, group| group == 0,
            |at, group| group == 0 || at % 512 < 256,
            |at, group| group == 0 || at % 512 > 0,
            |at, group| group == 0 || at % 2 == usize::from(group) % 2,
        ];
        for holds in rules {
            let model = Model::new(vec![full, window(500), window(2)]).unwrap();
            let source = Counted { holds, num_lookups: Cell::new(0) };
            model.longest_hit(&source, &hashes, 0, usize::MAX);
            let most = 3 * 3 * hashes.len();
            assert!(source.num_lookups.get() <= most, "{} lookups", source.num_lookups.get());
        }
    }
}
