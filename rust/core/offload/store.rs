//! Eager stores: blocks that earlier steps have computed and that the tier does not have.

use crate::error::{Error, Result};
use crate::group::{Attention, Group, Model};
use crate::ids::{BlockId, GroupId};
use crate::key::{BlockHash, BlockKey, Hashes};
use crate::pool::check_ids;

use super::job::{Kind, Ranks, place_of};
use super::request::ReportedTable;
use super::step::check_each_once;
use super::tier::{Filling, Reserved, Tier};
use super::{Job, Mode, OffloadScheduler};

/// What a finished step changed for one request.
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a> {
    /// The request.
    pub request_id: &'a str,
    /// Tokens whose KV earlier steps have written.
    pub num_computed_tokens: usize,
    /// Per group, device ids appended to its block table since the request was last named, hits and
    /// loads included; null where they were skipped.
    pub new_blocks: &'a [&'a [BlockId]],
}

/// The stores of one group.
#[derive(Clone, Default)]
pub(super) struct Part {
    /// All blocks of each slot.
    pub(super) block_ids: Vec<BlockId>,
    pub(super) slots: Vec<BlockId>,
    pub(super) filling: Filling,
}

impl Part {
    /// Appends the slots of `other`, and what fills them.
    fn append(&mut self, mut other: Self) {
        if self.slots.is_empty() {
            *self = other;
            return;
        }
        self.slots.append(&mut other.slots);
        self.filling.ends.append(&mut other.filling.ends);
        self.filling.parents.append(&mut other.filling.parents);
    }

    /// The slots after the first `num_slots`, each with where it ends in its prompt.
    fn planned_from(&self, num_slots: usize) -> impl Iterator<Item = (usize, BlockId)> + '_ {
        let ends = self.filling.ends.iter().copied();
        ends.zip(self.slots.iter().copied()).skip(num_slots)
    }
}

impl OffloadScheduler {
    /// Plans the stores that a step has made due, all in one job. Returns None if there are none,
    /// and in lazy mode, which only records what was computed. Name every request in which a block
    /// has become full, before the device's next allocation, because that frees blocks that have
    /// left a window.
    ///
    /// A key that is on the host or in flight is not stored again. If slots are short, the first
    /// due blocks of a full-attention group are stored, and the others when the request is next
    /// named. Of a window, the last due blocks are stored and the others are dropped. Only whole
    /// slots are stored.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`]; [`Error::Config`] for another number of groups;
    /// [`Error::NoSuchBlock`] for an id outside the device pool, [`Error::InvalidBlock`] for a null
    /// block of a full-attention group.
    pub fn store<'a>(
        &mut self,
        progress: impl Iterator<Item = Progress<'a>> + Clone,
        deadline: Option<f64>,
    ) -> Result<Option<Job>> {
        self.store_at_most(usize::MAX, progress, deadline)
    }

    /// As [`store`](Self::store), with at most `max_blocks` blocks in the job, as if slots were
    /// short.
    ///
    /// # Errors
    /// As [`store`](Self::store).
    pub fn store_at_most<'a>(
        &mut self,
        max_blocks: usize,
        progress: impl Iterator<Item = Progress<'a>> + Clone,
        deadline: Option<f64>,
    ) -> Result<Option<Job>> {
        let places = self.checked_places(progress.clone())?;
        self.store_checked(&places, max_blocks, progress, deadline)
    }

    /// As [`store_at_most`](Self::store_at_most), after each request has got its new hashes, as
    /// [`extend`](Self::extend) does.
    ///
    /// # Errors
    /// As [`store`](Self::store) and [`extend`](Self::extend), and [`Error::Config`] for a request
    /// that is named twice, before any request has got hashes.
    pub fn extend_and_store<'a>(
        &mut self,
        new_hashes: &'a [Hashes],
        max_blocks: usize,
        progress: impl Iterator<Item = Progress<'a>> + Clone,
        deadline: Option<f64>,
    ) -> Result<Option<Job>> {
        let places = self.checked_places(progress.clone())?;
        if !new_hashes.is_empty() {
            // Each chain is compared with the hashes before the call.
            let names = progress.clone().map(|each| each.request_id);
            check_each_once(places.iter().copied().zip(names).collect())?;
        }
        self.extend_step(progress.clone().map(|each| each.request_id).zip(new_hashes))?;
        self.store_checked(&places, max_blocks, progress, deadline)
    }

    /// Checks the progress of requests. Returns their places.
    fn checked_places<'a>(
        &self,
        progress: impl Iterator<Item = Progress<'a>>,
    ) -> Result<Vec<usize>> {
        let mut places: Vec<usize> = Vec::with_capacity(progress.size_hint().0);
        for progress in progress {
            places.push(self.requests.place(progress.request_id)?);
            self.check_blocks(progress.new_blocks)?;
        }
        Ok(places)
    }

    /// Checks the blocks that a request appends to its tables.
    pub(super) fn check_blocks(&self, new_blocks: &[&[BlockId]]) -> Result<()> {
        self.check_num_groups(new_blocks.len())?;
        for (blocks, group) in new_blocks.iter().zip(self.model.groups()) {
            check_ids(blocks, self.config.num_device_blocks)?;
            let is_full = group.attention == Attention::Full;
            if is_full && blocks.contains(&BlockId::NULL) {
                let why = "is the null block: a full-attention table holds none";
                return Err(Error::InvalidBlock { id: BlockId::NULL, why });
            }
        }
        Ok(())
    }

    /// Plans the stores of requests at `places`, whose progress was checked.
    pub(super) fn store_checked<'a>(
        &mut self,
        places: &[usize],
        max_blocks: usize,
        progress: impl Iterator<Item = Progress<'a>>,
        deadline: Option<f64>,
    ) -> Result<Option<Job>> {
        self.read_ahead(places);
        let mut parts = vec![Part::default(); self.model.groups().len()];
        let mut tails = Vec::new();
        let mut low_priority = Vec::new();
        let mut max_slots = max_blocks / self.config.blocks_per_slot;
        let num_losses = self.host.num_losses;
        let has_events = self.host.slots.pool.has_events();
        for (&place, Progress { num_computed_tokens, new_blocks, .. }) in
            places.iter().zip(progress)
        {
            if self.requests.at(place).num_losses != num_losses {
                self.reconsider(place);
            }
            self.see(place, num_computed_tokens);
            let request = self.requests.at_mut(place);
            self.counters.query_tokens += std::mem::take(&mut request.num_queried);
            let num_wanted =
                if self.sightings.is_some() { request.num_wanted } else { request.hashes.len() };
            request.is_throttled = false;
            request.num_used_tokens = request.num_used_tokens.max(num_computed_tokens);
            let tokens_per_hash = self.model.hash_block_size();
            request.due_tokens = (num_computed_tokens / tokens_per_hash + 1) * tokens_per_hash;
            for (index, (id, group)) in self.slot_model.enumerate().enumerate() {
                let table = &mut request.tables[index];
                let num_planned = parts[index].slots.len();
                table.blocks.extend_from_slice(new_blocks[index]);
                let num_computed = (num_computed_tokens / group.block_size)
                    .min(table.blocks.len() / self.config.blocks_per_slot);
                table.num_confirmed =
                    num_computed.min(num_wanted / self.slot_model.hashes_per_block(group));
                let mut plan = Plan {
                    model: &self.slot_model,
                    blocks_per_slot: self.config.blocks_per_slot,
                    id,
                    group,
                    hashes: &request.hashes,
                    part: &mut parts[index],
                    max_slots: &mut max_slots,
                    has_events,
                };
                if self.config.mode == Mode::Lazy {
                    let is_low_priority = request.is_low_priority;
                    Self::record(&mut self.computed, table, is_low_priority, |at| plan.key(at));
                } else if group.attention == Attention::Full {
                    let tail = plan.chain(table, &mut self.host)?;
                    tails.extend(tail.filter(|_| !request.is_low_priority));
                    request.is_throttled |= max_slots == 0 && table.num_kept < table.num_confirmed;
                } else {
                    let (num_dropped, num_throttled) = plan.window(table, &mut self.host)?;
                    self.counters.dropped_blocks += num_dropped;
                    self.counters.throttled_blocks += num_throttled;
                }
                if group.attention != Attention::Full {
                    table.num_passed = table.num_passed.max(num_computed);
                }
                if request.is_low_priority {
                    low_priority.extend(parts[index].planned_from(num_planned));
                }
            }
        }
        Ok(self.begin_store(parts, Ranks::new(tails, low_priority), deadline))
    }

    /// Reads what the stores of requests need first. Requests lie apart in memory, and so do their
    /// keys in the tier's index. Here the reads of all overlap.
    pub(super) fn read_ahead(&self, places: &[usize]) {
        let read = |sum, &place: &usize| sum ^ self.requests.at(place).read_ahead();
        std::hint::black_box(places.iter().fold(0, read));
        let pool = &self.host.slots.pool;
        self.for_each_next(places, |hash, group| pool.prefetch_key(hash, group));
        self.for_each_next(places, |hash, group| pool.prefetch_holder(hash, group));
    }

    /// Calls `read` with the key of the last slot that each request keeps, and with the next one.
    fn for_each_next(&self, places: &[usize], read: impl Fn(&BlockHash, GroupId)) {
        for &place in places {
            let request = self.requests.at(place);
            for ((id, group), table) in self.slot_model.enumerate().zip(&request.tables) {
                let per_slot = self.slot_model.hashes_per_block(group);
                for num_slots in [table.num_kept, table.num_kept + 1] {
                    let last = (num_slots * per_slot).checked_sub(1);
                    if let Some(hash) = last.and_then(|last| request.hashes.get(last)) {
                        read(hash, id);
                    }
                }
            }
        }
    }

    /// Begins one job for the stores of all groups. Returns None if there is nothing to store.
    pub(super) fn begin_store(
        &mut self,
        parts: Vec<Part>,
        ranks: Ranks,
        deadline: Option<f64>,
    ) -> Option<Job> {
        let per_slot = self.config.blocks_per_slot;
        let mut all = Part::default();
        let mut copies = Job::empty();
        for mut part in parts {
            copies.host_slots.reserve(part.block_ids.len());
            if per_slot == 1 {
                copies.host_slots.extend(part.slots.iter().map(|&slot| place_of(slot, 0, 1)));
            } else {
                for &slot in &part.slots {
                    copies.host_slots.extend((0..per_slot).map(|at| place_of(slot, at, per_slot)));
                }
            }
            if copies.block_ids.is_empty() {
                copies.block_ids = std::mem::take(&mut part.block_ids);
            } else {
                copies.block_ids.append(&mut part.block_ids);
            }
            copies.end_group();
            all.append(part);
        }
        let kind = Kind::Store { filling: all.filling, ranks };
        (!all.slots.is_empty()).then(|| self.begin(copies, all.slots, kind, deadline))
    }

    pub(super) fn check_num_groups(&self, given: usize) -> Result<()> {
        let known = self.model.groups().len();
        if given != known {
            return Err(Error::Config(format!(
                "block ids for {given} groups: the model has {known}, so give one list for each"
            )));
        }
        Ok(())
    }
}

/// The planning of one request's stores in one group, slot by slot.
struct Plan<'a> {
    model: &'a Model,
    blocks_per_slot: usize,
    id: GroupId,
    group: Group,
    hashes: &'a [BlockHash],
    part: &'a mut Part,
    /// How many slots this job may still fill.
    max_slots: &'a mut usize,
    has_events: bool,
}

impl Plan<'_> {
    /// Adds the due blocks of a full-attention group, each below the block before it. Returns the
    /// last slot that was filled.
    fn chain(&mut self, table: &mut ReportedTable, tier: &mut Tier) -> Result<Option<BlockId>> {
        if table.num_kept >= table.num_confirmed {
            return Ok(None);
        }
        // The tier may have evicted what it had of this chain. Then the walk starts over, because
        // no request can use a block without its prefix.
        let last_kept = table.num_kept.checked_sub(1).map(|at| self.key(at));
        let parent = last_kept.and_then(|key| tier.resident_or_filling(&key));
        let first = if parent.is_some() { table.num_kept } else { 0 };
        let due = self.model.own_hashes(self.group, self.hashes, first..table.num_confirmed);
        let above = parent.unwrap_or(BlockId::NULL);
        let Reserved { num_held, slots, num_kept } =
            tier.reserve_chain(&due, self.id, above, *self.max_slots)?;
        table.num_kept = first + num_kept;
        let placed = (first + num_held..).zip(slots).filter(|(_, slot)| !slot.is_null());
        Ok(self.add(table, placed))
    }

    /// Adds the due blocks of a group that skips blocks, one per slot. Returns the number of blocks
    /// without room, and of blocks beyond those that the job may have.
    fn window(&mut self, table: &mut ReportedTable, tier: &mut Tier) -> Result<(usize, usize)> {
        let is_reachable = self.model.reachable(self.group);
        let mut due = Vec::new();
        for at in table.first_due()..table.num_confirmed {
            if !table.blocks[at].is_null()
                && is_reachable.as_ref().is_none_or(|is_reachable| is_reachable(at))
                && tier.resident_or_filling(&self.key(at)).is_none()
            {
                due.push(at);
            }
        }
        table.num_kept = table.num_kept.max(table.num_confirmed);
        let num_allowed = due.len().min(*self.max_slots);
        let slots = tier.reserve(num_allowed)?;
        let num_dropped = num_allowed - slots.len();
        let num_throttled = due.len() - num_allowed;
        let mut placed = Vec::with_capacity(slots.len());
        for (&at, slot) in due[num_throttled + num_dropped..].iter().zip(slots) {
            // A list that is no true chain may hold a key twice.
            if tier.resident_or_filling(&self.key(at)).is_some() {
                tier.slots.pool.free(&[slot])?;
                continue;
            }
            tier.fill(slot, self.key(at), BlockId::NULL);
            placed.push((at, slot));
        }
        self.add(table, placed.into_iter());
        Ok((num_dropped, num_throttled))
    }

    /// Adds filled slots, each with its index in the table. Returns the last.
    fn add(
        &mut self,
        table: &ReportedTable,
        placed: impl Iterator<Item = (usize, BlockId)>,
    ) -> Option<BlockId> {
        let per_hash = self.model.hashes_per_block(self.group);
        let hash = |at: usize| self.hashes[(at + 1) * per_hash - 1];
        let num_before = self.part.slots.len();
        let Part { block_ids, slots, filling } = &mut *self.part;
        let num_placed = placed.size_hint().1.unwrap_or(0);
        slots.reserve(num_placed);
        filling.ends.reserve(num_placed);
        block_ids.reserve(num_placed * self.blocks_per_slot);
        for (at, slot) in placed {
            slots.push(slot);
            filling.ends.push((at + 1) * self.group.block_size);
            match self.blocks_per_slot {
                1 => block_ids.push(table.blocks[at]),
                num => block_ids.extend_from_slice(&table.blocks[at * num..(at + 1) * num]),
            }
            if self.has_events {
                filling.parents.push(at.checked_sub(1).map(hash));
            }
        }
        *self.max_slots -= slots.len() - num_before;
        slots[num_before..].last().copied()
    }

    /// The key of the slot at `index`.
    fn key(&self, index: usize) -> BlockKey {
        let last = (index + 1) * self.model.hashes_per_block(self.group) - 1;
        BlockKey { hash: self.hashes[last], group: self.id }
    }
}
