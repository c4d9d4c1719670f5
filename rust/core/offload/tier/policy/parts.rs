//! Chains that become recent together: which part of each is moved.
//!
//! ```text
//!   root <-- a <-- b <-- c     tail 1 = c, tail 2 = d
//!             ^--- d           parts: [c b] of tail 1, [d a root] of tail 2
//! ```
//!
//! If the chains became recent one after the other, a shared slot would stay where the last of them
//! has put it. So each slot is in the part of the last chain that contains it.

use std::iter::successors;

use crate::ids::BlockId;

use super::super::slot_set::SlotSet;

/// A run of a chain, from its first slot up to its last. The slots between are neighbours in the
/// order.
pub(super) type Stretch = (BlockId, BlockId);

/// The part of each chain, tail first, in the order of `tails`. The end of the contiguous chain
/// that begins at a slot is `end_of_chain`, which is a root, or the slot itself if none begins
/// there.
///
/// It looks at a shared slot once, or twice if a contiguous chain contains it.
pub(super) fn parts(
    tails: &[BlockId],
    num_blocks: usize,
    parent: impl Fn(BlockId) -> BlockId,
    end_of_chain: impl Fn(BlockId) -> BlockId,
) -> Vec<Vec<Stretch>> {
    let mut visited = SlotSet::new(num_blocks);
    // Contiguous chains of which only the ends are in `visited`.
    let mut unvisited: Vec<Stretch> = Vec::new();
    let mut parts: Vec<Vec<Stretch>> = Vec::with_capacity(tails.len());
    for &tail in tails.iter().rev() {
        let mut part = Vec::new();
        let mut at = tail;
        while !at.is_null() && visited.insert(at) {
            let mut end = end_of_chain(at);
            if end != at {
                if visited.insert(end) {
                    unvisited.push((at, end));
                } else {
                    // A later chain has the same root. The two may meet below it.
                    end = at;
                }
            }
            part.push((at, end));
            at = parent(end);
        }
        if let Some(jump) = unvisited.iter().position(|&(_, end)| end == at && !at.is_null()) {
            let (first, root) = unvisited.swap_remove(jump);
            let is_below_root = |slot: &BlockId| *slot != root && !slot.is_null();
            let above = |slot: &BlockId| Some(parent(*slot));
            let chain: Vec<BlockId> =
                successors(Some(first), above).take_while(is_below_root).collect();
            for &slot in &chain {
                visited.insert(slot);
            }
            // The two are the same from the slot where they meet up to the root, which is not in
            // this part.
            let both = part.iter().rev().zip(chain.iter().rev());
            let num_shared = both.take_while(|((own, _), slot)| own == *slot).count();
            part.truncate(part.len() - num_shared);
        }
        parts.push(part);
    }
    parts.reverse();
    parts
}
