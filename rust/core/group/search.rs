//! The longest hit of one kind of group. Its cost is linear in the prompt: a failed attempt at a
//! longer hit causes no second lookup of a block.

use std::borrow::Cow;
use std::ops::Range;

use crate::ids::{BlockId, GroupId};
use crate::key::BlockHash;

use super::Group;
use super::source::Source;

/// The search for the longest hit of equal groups.
pub(super) struct Search<'a> {
    cached: Cached<'a>,
    /// Hits end at its multiples, in blocks.
    step: usize,
    /// Every group has all blocks from here up to the last that the hit needs. None before the
    /// first attempt.
    known: Option<usize>,
    /// The blocks that the first attempt found, per group, if none was missing.
    found: Vec<Vec<BlockId>>,
}

impl<'a> Search<'a> {
    pub(super) fn new(cached: Cached<'a>, step: usize) -> Self {
        Self { cached, step, known: None, found: Vec::new() }
    }

    /// Number of blocks in the longest hit of at most `max_blocks`. Calls pass no larger number
    /// than the call before.
    pub(super) fn longest_hit(&mut self, max_blocks: usize) -> usize {
        let group = self.cached.group;
        let mut end = self.longest_end(max_blocks, self.cached.num_named_blocks());
        let known = match self.known {
            Some(known) => known,
            None if group.is_full() => {
                self.found = self.cached.prefix(group.num_searched_blocks(end));
                end = self.longest_end(end, self.found.first().map_or(0, Vec::len));
                0
            }
            None => {
                // Usually no block is missing, and one range is faster than many blocks.
                let (first, searched) = (self.first_needed(end), group.num_searched_blocks(end));
                let found = self.cached.range(&(first..searched));
                let is_complete = found.iter().all(|blocks| blocks.len() == searched);
                self.found = if is_complete { found } else { Vec::new() };
                if is_complete { first } else { searched }
            }
        };
        let mut known = known.min(group.num_searched_blocks(end));
        // From the right, so that a short window costs little however long the prefix is. A hit
        // that needs a missing block must end before it.
        while let Some(missing) =
            (self.first_needed(end)..known).rev().find(|&index| !self.cached.has(index))
        {
            end = self.longest_end(end, missing);
            known = group.num_searched_blocks(end);
        }
        self.known = Some(known.min(self.first_needed(end)));
        end
    }

    /// Where the longest hit of at most `max_blocks` ends that needs only the first `num_found`.
    fn longest_end(&self, max_blocks: usize, num_found: usize) -> usize {
        let dropped = usize::from(self.cached.group.drops_last_block);
        let end = max_blocks.min(num_found.saturating_sub(dropped));
        end - end % self.step
    }

    /// The blocks of a hit of `num_blocks` blocks, per group; null where the hit needs none.
    pub(super) fn into_blocks(mut self, num_blocks: usize) -> Vec<Vec<BlockId>> {
        let group = self.cached.group;
        let num_searched = group.num_searched_blocks(num_blocks);
        if !group.is_full() && self.found.first().map(Vec::len) != Some(num_searched) {
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

/// The blocks of one prompt in a source, in equal groups.
pub(super) struct Cached<'a> {
    pub(super) source: &'a dyn Source,
    /// Block hashes that one block of the group covers.
    pub(super) hashes_per_block: usize,
    pub(super) group: Group,
    pub(super) ids: &'a [GroupId],
    pub(super) hashes: &'a [BlockHash],
    /// This many blocks, from the first, need not be in the source.
    pub(super) num_local_blocks: usize,
}

impl Cached<'_> {
    /// Number of blocks that have a hash.
    fn num_named_blocks(&self) -> usize {
        self.hashes.len() / self.hashes_per_block
    }

    /// Whether every group has the block at `index`.
    fn has(&self, index: usize) -> bool {
        let hash = &self.hashes[(index + 1) * self.hashes_per_block - 1];
        index < self.num_local_blocks
            || self.ids.iter().all(|&id| self.source.get(hash, id).is_some())
    }

    /// The blocks, per group, up to the first that one of the groups lacks; at most `max_blocks`.
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

    /// The blocks of a range, per group.
    fn range(&self, range: &Range<usize>) -> Vec<Vec<BlockId>> {
        self.ids.iter().map(|&id| self.blocks(id, range.clone())).collect()
    }

    /// A group's blocks up to the end of a range or the first missing block in it. Null before the
    /// range and where blocks are local.
    fn blocks(&self, id: GroupId, range: Range<usize>) -> Vec<BlockId> {
        let start = range.start.max(self.num_local_blocks).min(range.end);
        let own = own_hashes(self.hashes, self.hashes_per_block, start..range.end);
        let found = self.source.prefix(&own, id);
        if start == 0 {
            return found;
        }
        let mut blocks = vec![BlockId::NULL; start];
        blocks.extend(found);
        blocks
    }
}

/// The last hash that each of these blocks covers, of `per_block` hashes.
pub(super) fn own_hashes(
    hashes: &[BlockHash],
    per_block: usize,
    blocks: Range<usize>,
) -> Cow<'_, [BlockHash]> {
    let hashes = &hashes[blocks.start * per_block..blocks.end * per_block];
    match per_block {
        1 => Cow::Borrowed(hashes),
        _ => hashes.chunks_exact(per_block).filter_map(<[_]>::last).copied().collect(),
    }
}
