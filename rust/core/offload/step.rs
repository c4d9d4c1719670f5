//! Stores of a step, read from the device's ledger: no caller repeats what the ledger knows.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::ids::BlockId;
use crate::key::BlockHash;
use crate::ledger::BlockLedger;

use super::request::RequestState;
use super::{Job, OffloadScheduler, Progress};

impl OffloadScheduler {
    /// As [`store_at_most`](Self::store_at_most), with the block tables of `ledger`, and with the
    /// hashes that its requests got since. Each request comes with its computed tokens. Looks
    /// further only at requests in which a block became full.
    ///
    /// Call it before the ledger's next allocation, because that frees blocks that have left a
    /// window.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`]; [`Error::Config`] for a ledger of other groups, for a request
    /// that is named twice, and for more tokens than were granted; [`Error::State`] if a request has
    /// other hashes in the ledger, or has started over only there. Nothing has changed then.
    pub fn store_step<'a>(
        &mut self,
        max_blocks: usize,
        ledger: &BlockLedger,
        computed: impl Iterator<Item = (&'a str, usize)>,
        deadline: Option<f64>,
    ) -> Result<Option<Job>> {
        if ledger.model().groups() != self.model.groups() {
            return Err(Error::Config(
                "the ledger has other groups than this scheduler: build both for one model"
                    .to_owned(),
            ));
        }
        let num_groups = self.model.groups().len();
        let (mut places, mut named) = (Vec::new(), Vec::new());
        let mut before = None;
        for (request_id, num_tokens) in computed {
            let place = self.requests.place_after(before, request_id)?;
            before = Some(place);
            if num_tokens >= self.requests.at(place).due_tokens {
                places.push(place);
                named.push((request_id, num_tokens));
            }
        }
        self.read_ahead(&places);
        let ids = named.iter().map(|&(request_id, _)| request_id);
        let on_device = ledger.read_ahead(places.iter().copied().zip(ids))?;
        let (mut due, mut tables) = (Vec::with_capacity(places.len()), Vec::new());
        for ((&place, (request_id, num_tokens)), on_device) in
            places.iter().zip(named).zip(on_device)
        {
            let request = self.requests.at(place);
            check_serial(request, on_device.serial, request_id)?;
            check_granted(request_id, num_tokens, on_device.num_granted_tokens)?;
            let hashes = new_hashes(request, &on_device.hashes, request_id)?;
            let known = request.tables.iter().zip(self.model.groups());
            for (table, (known, group)) in on_device.tables.iter().zip(known) {
                let end = (num_tokens / group.block_size).min(table.blocks.len());
                tables.push(&table.blocks[known.blocks.len().min(end)..end]);
            }
            due.push(Due { place, request_id, num_tokens, hashes, serial: on_device.serial });
        }
        check_each_once(due.iter().map(|due| (due.place, due.request_id)).collect())?;
        let tables: Vec<&[&[BlockId]]> = tables.chunks_exact(num_groups).collect();
        let progress = due.iter().zip(&tables).map(|(due, new_blocks)| Progress {
            request_id: due.request_id,
            num_computed_tokens: due.num_tokens,
            new_blocks,
        });
        progress.clone().try_for_each(|progress| self.check_blocks(progress.new_blocks))?;
        self.host.slots.pool.agree_width(ledger.pool().hash_width())?;
        for due in &due {
            let request = self.requests.at_mut(due.place);
            request.ledger_serial = Some(due.serial);
            if !due.hashes.is_empty() {
                Arc::make_mut(&mut request.hashes).extend_from_slice(due.hashes);
            }
        }
        self.store_checked(&places, max_blocks, progress, deadline)
    }
}

/// A request in which a block became full.
struct Due<'a> {
    place: usize,
    request_id: &'a str,
    num_tokens: usize,
    /// Those that the request has got in the ledger since its last step.
    hashes: &'a [BlockHash],
    /// Its serial number in the ledger.
    serial: u64,
}

/// Refuses a request that has other blocks in the ledger since it started over there.
fn check_serial(request: &RequestState, serial: u64, request_id: &str) -> Result<()> {
    if request.ledger_serial.is_some_and(|known| known != serial) {
        return Err(Error::State(format!(
            "request {request_id:?} has started over in the ledger: restart it in the scheduler, too"
        )));
    }
    Ok(())
}

/// Those of the ledger's hashes of a request that are not known here.
fn new_hashes<'a>(
    request: &RequestState,
    hashes: &'a [BlockHash],
    request_id: &str,
) -> Result<&'a [BlockHash]> {
    let known = &request.hashes;
    // A hash covers all tokens before it, so the last one is enough.
    if known.last().is_none_or(|last| hashes.get(known.len() - 1) == Some(last)) {
        return Ok(&hashes[known.len()..]);
    }
    Err(Error::State(format!(
        "request {request_id:?} has other hashes in the ledger than here: give both the same"
    )))
}

fn check_granted(request_id: &str, num_tokens: usize, num_granted: usize) -> Result<()> {
    if num_tokens > num_granted {
        return Err(Error::Config(format!(
            "cannot store {num_tokens} tokens of request {request_id:?}: it was granted \
             {num_granted}"
        )));
    }
    Ok(())
}

/// Refuses a request that is named twice. It would get its new hashes and blocks twice.
pub(super) fn check_each_once(mut named: Vec<(usize, &str)>) -> Result<()> {
    named.sort_unstable();
    match named.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(Error::Config(format!(
            "request {:?} is named twice: name each request of a step once",
            pair[0].1
        ))),
        None => Ok(()),
    }
}
