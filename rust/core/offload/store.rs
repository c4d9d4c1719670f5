//! Eager store planning: what earlier steps have computed, and the tier does not have.

use crate::error::{Error, Result};
use crate::ids::BlockId;

use super::job::Kind;
use super::tier::{Filling, HostTier};
use super::{Job, OffloadScheduler, Tracked};

/// What a finished step changed for one request.
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a> {
    /// The request.
    pub request_id: &'a str,
    /// Tokens whose KV earlier steps have written.
    pub num_computed_tokens: usize,
    /// Device ids appended to its block table since it was last named, hits and loads included.
    pub new_blocks: &'a [BlockId],
}

#[derive(Default)]
struct Plan {
    block_ids: Vec<BlockId>,
    slots: Vec<BlockId>,
    filling: Filling,
    tails: Vec<BlockId>,
}

impl OffloadScheduler {
    /// Plans the stores that a step has made due, all in one job; None when there are none. Only
    /// requests that changed need naming.
    ///
    /// A key that is on the host or in flight is not stored again. With slots short a prefix of
    /// what is due is stored; the rest stays due and is tried when the request is next named.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`]; [`Error::InvalidBlock`] for a null block.
    pub fn store<'a>(
        &mut self,
        progress: impl Iterator<Item = Progress<'a>> + Clone,
    ) -> Result<Option<Job>> {
        for Progress { request_id, new_blocks, .. } in progress.clone() {
            self.requests.get(request_id)?;
            if let Some(&id) = new_blocks.iter().find(|id| id.is_null()) {
                let why = "is the null block: a full-attention table holds none";
                return Err(Error::InvalidBlock { id, why });
            }
        }
        let filling = Filling { block_size: self.block_size, ..Filling::default() };
        let mut plan = Plan { filling, ..Plan::default() };
        for Progress { request_id, num_computed_tokens, new_blocks } in progress {
            let request = self.requests.get_mut(request_id)?;
            request.table.extend_from_slice(new_blocks);
            request.num_confirmed = (num_computed_tokens / self.block_size)
                .min(request.hashes.len())
                .min(request.table.len());
            request.plan_stores(&mut self.tier, &mut plan)?;
        }
        let Plan { block_ids, slots, filling, tails } = plan;
        if block_ids.is_empty() {
            return Ok(None);
        }
        Ok(Some(self.begin(block_ids, slots, Kind::Store { filling, tails })))
    }
}

impl Tracked {
    /// Adds what is due of this request.
    fn plan_stores(&mut self, tier: &mut HostTier, plan: &mut Plan) -> Result<()> {
        if self.num_kept >= self.num_confirmed {
            return Ok(());
        }
        // What the tier once had of this chain it may have evicted since: then the walk starts
        // over, because a block without its prefix serves nobody.
        let last_kept = self.num_kept.checked_sub(1).map(|at| &self.hashes[at]);
        let parent = last_kept.and_then(|hash| tier.resident_or_in_flight(hash));
        let first = if parent.is_some() { self.num_kept } else { 0 };
        let due = &self.hashes[first..self.num_confirmed];
        let (placed, num_kept) = tier.reserve(due, parent.unwrap_or(BlockId::NULL))?;
        self.num_kept = first + num_kept;
        plan.tails.extend(placed.last().map(|&(_, slot)| slot));
        for (at, slot) in placed {
            plan.block_ids.push(self.table[first + at]);
            plan.slots.push(slot);
            plan.filling.hashes.push(due[at]);
            plan.filling
                .parents
                .push((first + at).checked_sub(1).map(|before| self.hashes[before]));
        }
        Ok(())
    }
}
