//! Lookup of what the host can serve, and loads of it.

use crate::error::{Error, Result};
use crate::ids::BlockId;

use super::job::Kind;
use super::{Job, OffloadScheduler};

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
        self.tier.unpin(&std::mem::take(&mut request.held))?;
        let end = request.hashes.len().min(max_tokens / self.block_size);
        let start = (num_local_tokens / self.block_size).min(end);
        let found: Vec<BlockId> =
            request.hashes[start..end].iter().map_while(|hash| self.tier.resident(hash)).collect();
        if found.iter().any(|&slot| self.tier.is_loading(slot)) {
            return Ok(None);
        }
        self.tier.pin(&found)?;
        request.held = found;
        Ok(Some(request.held.len() * self.block_size))
    }

    /// Loads the first `num_tokens` of what lookup found into `block_ids`, in order; the rest is
    /// unpinned. Ranks the whole chain.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`]; [`Error::State`] without a lookup; [`Error::Config`] for no
    /// tokens, more than were found, a number that is no multiple of the block size, or another
    /// number of blocks; [`Error::InvalidBlock`] for a null or repeated block.
    pub fn load(
        &mut self,
        request_id: &str,
        num_tokens: usize,
        block_ids: &[BlockId],
    ) -> Result<Job> {
        self.check_multiple("external", num_tokens)?;
        let request = self.requests.get_mut(request_id)?;
        if request.held.is_empty() {
            return Err(Error::State(format!(
                "request {request_id:?} holds nothing to load: its lookup comes first"
            )));
        }
        let num_blocks = num_tokens / self.block_size;
        if num_blocks == 0 || num_blocks > request.held.len() || num_blocks != block_ids.len() {
            return Err(Error::Config(format!(
                "request {request_id:?}: {num_tokens} tokens into {} blocks of {}, of {} tokens \
                 found: load at least one block, at most what was found, one block each",
                block_ids.len(),
                self.block_size,
                request.held.len() * self.block_size,
            )));
        }
        check_targets(block_ids)?;
        let mut slots = std::mem::take(&mut request.held);
        let unused = slots.split_off(num_blocks);
        self.tier.unpin(&unused)?;
        self.tier.begin_loads(&slots);
        if let Some(&tail) = slots.last() {
            self.tier.rank(tail);
        }
        Ok(self.begin(block_ids.to_vec(), slots, Kind::Load))
    }

    /// Gives back what a request's lookup holds.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`].
    pub fn release(&mut self, request_id: &str) -> Result<()> {
        let request = self.requests.get_mut(request_id)?;
        self.tier.unpin(&std::mem::take(&mut request.held))
    }

    fn check_multiple(&self, what: &str, num_tokens: usize) -> Result<()> {
        if !num_tokens.is_multiple_of(self.block_size) {
            return Err(Error::Config(format!(
                "{num_tokens} {what} tokens are no multiple of the block size {}",
                self.block_size
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
