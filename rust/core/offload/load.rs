//! Lookup of what the host can serve, and loads of it.

use crate::error::{Error, Result};
use crate::group::Source;
use crate::ids::BlockId;

use super::job::{Copies, Kind};
use super::{Held, Job, OffloadScheduler};

impl OffloadScheduler {
    /// How many tokens right after the local hit the host can serve, up to `max_tokens` of the
    /// whole request. What is found stays pinned until [`load`](Self::load),
    /// [`release`](Self::release), [`finish`](Self::finish) or the next lookup of this request.
    ///
    /// None means pending: some of it is just being loaded for another request, and will be a
    /// local hit when that job has ended. Nothing is pinned then.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`]; [`Error::Config`] if `num_local_tokens` is no multiple of the
    /// block size.
    pub fn lookup(
        &mut self,
        request_id: &str,
        num_local_tokens: usize,
        max_tokens: usize,
    ) -> Result<Option<usize>> {
        self.check_multiple("local", num_local_tokens)?;
        let request = self.requests.get_mut(request_id)?;
        self.tier.unpin(&std::mem::take(&mut request.held).slots)?;
        let (end, found) =
            self.slot_model.longest_hit(&self.tier, &request.hashes, num_local_tokens, max_tokens);
        let slots: Vec<BlockId> = found.into_iter().flatten().filter(|id| !id.is_null()).collect();
        if slots.iter().any(|&slot| self.tier.is_loading(slot)) {
            self.counters.pending_lookups += 1;
            return Ok(None);
        }
        self.tier.pin(&slots)?;
        let hit_block_size = self.model.hit_block_size();
        let num_known = request.hashes.len() * self.model.hash_block_size();
        let num_whole = max_tokens.min(num_known) / hit_block_size * hit_block_size;
        request.num_queried = num_whole.saturating_sub(num_local_tokens);
        request.num_hit_tokens = end.max(num_local_tokens);
        let num_tokens = end.saturating_sub(num_local_tokens);
        request.held = Held { slots, num_local_tokens, num_tokens };
        Ok(Some(num_tokens))
    }

    /// Loads the first `num_tokens` of what lookup found into the device blocks of each group, in
    /// order; the rest is unpinned. A group that skips blocks loads only those that the token
    /// after the load reads. Ranks the whole chain.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`]; [`Error::State`] without a lookup, where a window before an
    /// earlier end is not on the host, and where what was found proved damaged since; [`Error::Config`] for no tokens, more than were found, a
    /// number that is no multiple of the block size, or another number of groups or blocks;
    /// [`Error::NoSuchBlock`] for an id outside the device pool, [`Error::InvalidBlock`] for a null
    /// or repeated block.
    pub fn load(
        &mut self,
        request_id: &str,
        num_tokens: usize,
        block_ids: &[Vec<BlockId>],
        deadline: Option<f64>,
    ) -> Result<Job> {
        self.check_multiple("external", num_tokens)?;
        self.check_num_groups(block_ids.len())?;
        let request = self.requests.get(request_id)?;
        let held = &request.held;
        if held.num_tokens == 0 {
            return Err(Error::State(format!(
                "request {request_id:?} holds nothing to load: its lookup comes first"
            )));
        }
        if num_tokens == 0 || num_tokens > held.num_tokens {
            return Err(Error::Config(format!(
                "request {request_id:?}: {num_tokens} tokens of {} found: load at least one \
                 block, at most what was found",
                held.num_tokens
            )));
        }
        let start = held.num_local_tokens;
        let per_slot = self.blocks_per_slot;
        let mut slots = Vec::with_capacity(held.slots.len());
        let mut copies = Copies::default();
        for ((id, group), blocks) in self.model.enumerate().zip(block_ids) {
            let end = (start + num_tokens) / group.block_size;
            let first = group.num_skipped_blocks(start + num_tokens).max(start / group.block_size);
            if end - first != blocks.len() {
                return Err(Error::Config(format!(
                    "request {request_id:?}: {num_tokens} tokens from token {start} on are {} \
                     blocks of {} in group {}, not {}",
                    end - first,
                    group.block_size,
                    id.0,
                    blocks.len()
                )));
            }
            self.check_ids(blocks)?;
            let slot_group = self.slot_model.groups()[usize::from(id.0)];
            let needed = first / per_slot..end.div_ceil(per_slot);
            let own = self.slot_model.own_hashes(slot_group, &request.hashes, needed.clone());
            let found = self.tier.prefix(&own, id);
            if found.len() < needed.len() {
                return Err(Error::State(format!(
                    "request {request_id:?}: what comes before token {} is not on the host in \
                     group {}: load all that was found, or look up again if some of it proved \
                     damaged since",
                    start + num_tokens,
                    id.0
                )));
            }
            for (index, &block) in (first..end).zip(blocks) {
                copies.push(
                    block,
                    found[index / per_slot - needed.start],
                    index % per_slot,
                    per_slot,
                );
            }
            slots.extend(found);
            copies.end_group();
        }
        check_targets(&block_ids.concat())?;
        self.tier.pin(&slots)?;
        let request = self.requests.get_mut(request_id)?;
        self.tier.unpin(&std::mem::take(&mut request.held).slots)?;
        self.tier.begin_loads(&slots);
        for blocks in block_ids {
            Self::forget_computed(&mut self.computed, blocks);
        }
        self.counters.query_tokens += std::mem::take(&mut request.num_queried);
        self.counters.hit_tokens += num_tokens;
        request.num_hit_tokens = 0;
        let hashes = std::mem::take(&mut request.hashes);
        let end = start + num_tokens;
        self.rank(&hashes[..end / self.model.hash_block_size()], end);
        self.requests.get_mut(request_id)?.hashes = hashes;
        let kind = Kind::Load { host_slots: copies.host_slots.clone() };
        Ok(self.begin(copies, slots, kind, deadline))
    }

    /// Gives back what a request's lookup holds.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`].
    pub fn release(&mut self, request_id: &str) -> Result<()> {
        let request = self.requests.get_mut(request_id)?;
        self.tier.unpin(&std::mem::take(&mut request.held).slots)
    }

    fn check_multiple(&self, what: &str, num_tokens: usize) -> Result<()> {
        let block_size = self.model.hit_block_size();
        if !num_tokens.is_multiple_of(block_size) {
            return Err(Error::Config(format!(
                "{num_tokens} {what} tokens are no multiple of the block size {block_size}"
            )));
        }
        Ok(())
    }
}

/// Refuses null blocks, and one block as the target of two copies.
fn check_targets(block_ids: &[BlockId]) -> Result<()> {
    let mut sorted = block_ids.to_vec();
    sorted.sort_unstable();
    if let Some(&id) = sorted.first().filter(|id| id.is_null()) {
        return Err(Error::InvalidBlock { id, why: "is the null block: nothing is loaded there" });
    }
    match sorted.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(Error::InvalidBlock { id: pair[0], why: "is the target of two copies" }),
        None => Ok(()),
    }
}
