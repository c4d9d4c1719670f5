//! The longest hit of one kind of group. Its cost is linear in the prompt: no block is looked up
//! again because a hit that ends further right has failed.

use std::ops::Range;

use crate::ids::{BlockId, GroupId};
use crate::key::BlockHash;

use super::model::{Model, Source};
use super::{Attention, Group};

/// The search for what groups of one kind can serve together.
pub(super) struct Search<'a> {
    cached: Cached<'a>,
    /// Hits end at its multiples, in blocks.
    step: usize,
    /// All blocks from here up to the end of the hit are there; none is known before the first look.
    known: Option<usize>,
    /// Per group, what the first look found, if it found all that it needed.
    found: Vec<Vec<BlockId>>,
}

impl<'a> Search<'a> {
    pub(super) fn new(cached: Cached<'a>, step: usize) -> Self {
        Self { cached, step, known: None, found: Vec::new() }
    }

    /// Blocks of the longest hit of at most `max_blocks` blocks, which is no more than before.
    pub(super) fn longest_hit(&mut self, max_blocks: usize) -> usize {
        let group = self.cached.group;
        let mut end = max_blocks - max_blocks % self.step;
        let known = match self.known {
            Some(known) => known,
            None if group.attention == Attention::Full => {
                self.found = self.cached.prefix(end);
                end = self.found.first().map_or(0, Vec::len);
                0
            }
            None => {
                // Most often all is there, and a range is found quicker than its blocks one by one.
                let first = self.first_needed(end);
                let found = self.cached.range(&(first..end));
                let is_complete = found.iter().all(|blocks| blocks.len() == end);
                self.found = if is_complete { found } else { Vec::new() };
                if is_complete { first } else { end }
            }
        };
        end -= end % self.step;
        let mut known = known.min(end);
        // From the right: a short window is found at once, however long the prefix. No hit that
        // ends behind a missing block and needs it can do.
        while let Some(missing) =
            (self.first_needed(end)..known).rev().find(|&index| !self.cached.has(index))
        {
            end = missing - missing % self.step;
            known = end;
        }
        self.known = Some(known.min(self.first_needed(end)));
        end
    }

    /// Per group, the blocks of a hit of `num_blocks` blocks; null where none is needed.
    pub(super) fn into_blocks(mut self, num_blocks: usize) -> Vec<Vec<BlockId>> {
        let is_full = self.cached.group.attention == Attention::Full;
        if !is_full && self.found.first().map(Vec::len) != Some(num_blocks) {
            return self.cached.range(&(self.first_needed(num_blocks)..num_blocks));
        }
        for blocks in &mut self.found {
            blocks.truncate(num_blocks);
        }
        self.found
    }

    /// The first block that a hit of `num_blocks` blocks needs.
    fn first_needed(&self, num_blocks: usize) -> usize {
        self.cached.group.num_unread_blocks(num_blocks * self.cached.group.block_size)
    }
}

/// What a source holds of one prompt, in groups that are looked up together.
pub(super) struct Cached<'a> {
    pub(super) source: &'a dyn Source,
    pub(super) model: &'a Model,
    pub(super) group: Group,
    pub(super) ids: &'a [GroupId],
    pub(super) hashes: &'a [BlockHash],
    /// Blocks, from the first, that need not be found.
    pub(super) num_local_blocks: usize,
}

impl Cached<'_> {
    /// Whether every group has the block at `index`.
    fn has(&self, index: usize) -> bool {
        let hash = &self.hashes[(index + 1) * self.model.hashes_per_block(self.group) - 1];
        index < self.num_local_blocks
            || self.ids.iter().all(|&id| self.source.get(hash, id).is_some())
    }

    /// Per group, the blocks from the first up to the first that one of the groups misses, at most
    /// `max_blocks`.
    fn prefix(&self, mut max_blocks: usize) -> Vec<Vec<BlockId>> {
        let mut found = Vec::with_capacity(self.ids.len());
        for &id in self.ids {
            let blocks = self.blocks(id, 0..max_blocks);
            max_blocks = blocks.len();
            found.push(blocks);
        }
        for blocks in &mut found {
            blocks.truncate(max_blocks);
        }
        found
    }

    /// Per group, the blocks of a range that every group has.
    fn range(&self, range: &Range<usize>) -> Vec<Vec<BlockId>> {
        self.ids.iter().map(|&id| self.blocks(id, range.clone())).collect()
    }

    /// A group's blocks up to the end of a range or the first in it that is missing; null before
    /// the range and where they are local.
    fn blocks(&self, id: GroupId, range: Range<usize>) -> Vec<BlockId> {
        let start = range.start.max(self.num_local_blocks).min(range.end);
        let own = self.model.own_hashes(self.group, self.hashes, start..range.end);
        let found = self.source.prefix(&own, id);
        if start == 0 {
            return found;
        }
        let mut blocks = vec![BlockId::NULL; start];
        blocks.extend(found);
        blocks
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use std::cell::Cell;

    use super::*;

    /// Holds the blocks of each group that a rule names, and counts what is looked up.
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
    fn a_lookup_costs_no_more_than_a_few_looks_at_each_block() {
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
            assert!(source.num_lookups.get() <= most, "{} looks", source.num_lookups.get());
        }
    }
}
