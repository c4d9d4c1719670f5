//! All groups of a model, and the longest prefix that every one of them can serve.

use std::borrow::Cow;
use std::ops::Range;

use crate::error::{Error, Result};
use crate::ids::{BlockId, GroupId};
use crate::key::BlockHash;
use crate::pool::BlockPool;

use super::search::{Cached, Search};
use super::{Attention, Group, MAX_GROUP_TOKENS, MAX_GROUPS};

/// Blocks that are found by their key: a device pool, or the host tier.
pub(crate) trait Source {
    /// The block that holds a key.
    fn get(&self, hash: &BlockHash, group: GroupId) -> Option<BlockId>;

    /// The blocks of the longest prefix of `hashes` that is held.
    fn prefix(&self, hashes: &[BlockHash], group: GroupId) -> Vec<BlockId>;
}

impl Source for BlockPool {
    fn get(&self, hash: &BlockHash, group: GroupId) -> Option<BlockId> {
        self.get(hash, group)
    }

    fn prefix(&self, hashes: &[BlockHash], group: GroupId) -> Vec<BlockId> {
        self.prefix(hashes, group)
    }
}

/// A model's groups and the sizes they have in common.
#[derive(Clone, Debug)]
pub struct Model {
    groups: Vec<Group>,
    /// Groups of one kind and block size are looked up together. Full attention first: one scan of
    /// it bounds the search of all others.
    alike: Vec<(Group, Vec<GroupId>)>,
    hash_block_size: usize,
    hit_block_size: usize,
}

impl Model {
    /// The groups, in the order in which the model names them.
    ///
    /// # Errors
    /// [`Error::Config`] for no groups, too many, or block sizes whose common multiple is beyond
    /// [`MAX_GROUP_TOKENS`].
    pub fn new(groups: Vec<Group>) -> Result<Self> {
        let Some(first) = groups.first() else {
            return Err(Error::Config("no groups: a model has at least one".to_owned()));
        };
        if groups.len() > MAX_GROUPS {
            return Err(Error::Config(format!(
                "{} groups: at most {MAX_GROUPS} are counted",
                groups.len()
            )));
        }
        let (mut divisor, mut multiple) = (first.block_size, first.block_size);
        for group in &groups {
            divisor = greatest_common_divisor(divisor, group.block_size);
            multiple *= group.block_size / greatest_common_divisor(multiple, group.block_size);
            if multiple > MAX_GROUP_TOKENS {
                return Err(Error::Config(format!(
                    "block sizes with a common multiple of {multiple} tokens or more: a hit ends at \
                     its multiples, and it may be at most {MAX_GROUP_TOKENS}"
                )));
            }
        }
        let mut alike: Vec<(Group, Vec<GroupId>)> = Vec::new();
        for (&group, id) in groups.iter().zip((0..=u16::MAX).map(GroupId)) {
            match alike.iter_mut().find(|(other, _)| *other == group) {
                Some((_, ids)) => ids.push(id),
                None => alike.push((group, vec![id])),
            }
        }
        alike.sort_by_key(|(group, _)| group.attention != Attention::Full);
        Ok(Self { groups, alike, hash_block_size: divisor, hit_block_size: multiple })
    }

    /// The groups as a tier holds them, in blocks `factor` times as large, hashed as finely as
    /// before.
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

    /// A hit ends at a multiple of that many tokens: the least common multiple of the groups'
    /// block sizes.
    pub fn hit_block_size(&self) -> usize {
        self.hit_block_size
    }

    /// Tokens of prompts that so many blocks hold, where every group keeps all of its own.
    pub fn capacity_tokens(&self, num_blocks: usize) -> usize {
        let blocks_per_hit: usize =
            self.groups.iter().map(|group| self.hit_block_size / group.block_size).sum();
        num_blocks / blocks_per_hit * self.hit_block_size
    }

    /// Block hashes that one block of the group covers. The last of them is its own.
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
        let per_block = self.hashes_per_block(group);
        let hashes = &hashes[blocks.start * per_block..blocks.end * per_block];
        match per_block {
            1 => Cow::Borrowed(hashes),
            _ => hashes.chunks_exact(per_block).filter_map(<[_]>::last).copied().collect(),
        }
    }

    /// Whether a hit can need block `index` of this group. None: it can need any.
    #[inline]
    pub(crate) fn reachable(&self, group: Group) -> Option<impl Fn(usize) -> bool> {
        let step = self.hit_block_size / group.block_size;
        // The first of every step is the last that a longer window reaches.
        (!group.is_reachable(0, step)).then_some(move |index| group.is_reachable(index, step))
    }

    /// Whether these blocks, per group, have the form of a hit of `num_tokens`: null exactly where
    /// the next token reads nothing.
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

    /// The longest prefix of at most `max_tokens` tokens that every group can serve from `source`,
    /// its first `num_local_tokens` being there already: its length, and the blocks of each group,
    /// null where it needs none.
    ///
    /// Every kind shortens what the ones before it have left, until none does (vLLM 0.32's
    /// `HybridKVCacheCoordinator.find_longest_cache_hit`).
    pub(crate) fn longest_hit<'a>(
        &'a self,
        source: &'a dyn Source,
        hashes: &'a [BlockHash],
        num_local_tokens: usize,
        max_tokens: usize,
    ) -> (usize, Vec<Vec<BlockId>>) {
        let mut num_tokens = (hashes.len() * self.hash_block_size).min(max_tokens);
        num_tokens -= num_tokens % self.hit_block_size;
        let search = |(group, ids): &'a (Group, Vec<GroupId>)| {
            let num_local_blocks = num_local_tokens / group.block_size;
            let cached =
                Cached { source, model: self, group: *group, ids, hashes, num_local_blocks };
            Search::new(cached, self.hit_block_size / group.block_size)
        };
        let mut searches: Vec<Search<'_>> = self.alike.iter().map(search).collect();
        loop {
            let before = num_tokens;
            for ((group, _), search) in self.alike.iter().zip(&mut searches) {
                num_tokens = search.longest_hit(num_tokens / group.block_size) * group.block_size;
            }
            if num_tokens == before {
                break;
            }
        }
        let mut blocks = vec![Vec::new(); self.groups.len()];
        for ((group, ids), search) in self.alike.iter().zip(searches) {
            for (id, found) in ids.iter().zip(search.into_blocks(num_tokens / group.block_size)) {
                blocks[usize::from(id.0)] = found;
            }
        }
        (num_tokens, blocks)
    }
}

fn greatest_common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}
