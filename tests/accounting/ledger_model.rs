//! The naive ledger. It does not predict: it allocates from a copy of its pool, and keeps the copy if
//! the pool had enough blocks.

use std::collections::BTreeMap;

use kvstow_core::ledger::Publish;

use crate::model::ModelPool;

pub(crate) const BLOCK_SIZE: usize = 4;

#[derive(Clone, Debug, Default)]
pub(crate) struct ModelRequest {
    pub(crate) names: Vec<u16>,
    pub(crate) tables: Vec<Vec<u32>>,
    pub(crate) granted: usize,
    pub(crate) published: usize,
    pub(crate) hits: usize,
    pub(crate) is_running: bool,
    pub(crate) is_delayed: bool,
}

pub(crate) struct ModelLedger {
    pub(crate) pool: ModelPool,
    pub(crate) publish: Publish,
    pub(crate) num_groups: usize,
    pub(crate) requests: BTreeMap<usize, ModelRequest>,
}

#[derive(Default)]
pub(crate) struct Want {
    pub(crate) new: usize,
    pub(crate) hit: bool,
    pub(crate) external: usize,
    pub(crate) lookahead: usize,
    pub(crate) delay: bool,
    pub(crate) reserve: usize,
    pub(crate) must_fit: usize,
}

impl ModelLedger {
    /// The longest prefix that all groups hold.
    pub(crate) fn lookup(&self, who: usize, max_tokens: usize) -> Vec<Vec<u32>> {
        let names = &self.requests[&who].names;
        let names = &names[..names.len().min(max_tokens / BLOCK_SIZE)];
        let groups = 0..u16::try_from(self.num_groups).unwrap();
        let mut found: Vec<_> = groups.map(|group| self.pool.lookup(names, group)).collect();
        let shortest = found.iter().map(Vec::len).min().unwrap();
        for blocks in &mut found {
            blocks.truncate(shortest);
        }
        found
    }

    /// Keeps the blocks in tables, up to the granted tokens, with new ids.
    pub(crate) fn sleep(&mut self, new_id: impl Fn(u32) -> u32) {
        let mut pool = ModelPool::new(u32::try_from(self.pool.refs.len()).unwrap());
        for request in self.requests.values_mut() {
            for table in &mut request.tables {
                table.truncate(request.granted.div_ceil(BLOCK_SIZE));
                let new: Vec<u32> = table.iter().map(|&id| new_id(id)).collect();
                assert!(pool.touch(&new));
                for (&old, &new) in table.iter().zip(&new) {
                    pool.held[new as usize] = self.pool.held[old as usize];
                }
                *table = new;
            }
        }
        pool.clock = self.pool.clock;
        self.pool = pool;
    }

    pub(crate) fn publish(&mut self, who: usize, tokens: usize) {
        let request = self.requests.get_mut(&who).unwrap();
        let end = request.names.len().min(tokens / BLOCK_SIZE);
        for at in request.published..end {
            for (group, table) in (0..).zip(&request.tables) {
                assert!(self.pool.cache(&[table[at]], &request.names[at..=at], group));
            }
        }
        request.published = request.published.max(end);
    }

    /// Err if the arguments are refused, None if the request does not fit now.
    pub(crate) fn allocate(
        &mut self,
        who: usize,
        want: &Want,
    ) -> Result<Option<Vec<Vec<u32>>>, ()> {
        let hit = if want.hit { self.lookup(who, usize::MAX) } else { Vec::new() };
        let request = self.requests.get(&who).ok_or(())?;
        let num_hit = hit.first().map_or(0, Vec::len);
        let is_first_only = want.hit || want.external > 0;
        if request.is_delayed
            || (request.is_running && is_first_only)
            || num_hit + want.external + want.new == 0
            || (want.external > 0 && num_hit + want.external / BLOCK_SIZE > request.names.len())
        {
            return Err(());
        }
        let num_groups = self.num_groups;
        let take = |pool: &mut ModelPool, tokens: usize| -> Option<(Vec<Vec<u32>>, usize)> {
            assert!(hit.iter().all(|blocks| pool.touch(blocks)));
            let mut allocated = Vec::new();
            for group in 0..num_groups {
                let held = request.tables[group].len() + num_hit;
                allocated.push(pool.allocate(tokens.div_ceil(BLOCK_SIZE).saturating_sub(held))?);
            }
            Some((allocated, pool.num_free()))
        };
        if take(&mut self.pool.clone(), want.must_fit).is_none() {
            return Ok(None);
        }
        let granted = request.granted + (num_hit * BLOCK_SIZE) + want.external + want.new;
        let external = num_hit + want.external / BLOCK_SIZE;
        let mut after = self.pool.clone();
        let Some((_, left)) = take(&mut after, granted + want.lookahead) else { return Ok(None) };
        if left < want.reserve {
            return Ok(None);
        }
        // All groups allocate external blocks before any group allocates new blocks.
        let mut pool = self.pool.clone();
        assert!(hit.iter().all(|blocks| pool.touch(blocks)));
        let mut tables = request.tables.clone();
        for (table, blocks) in tables.iter_mut().zip(&hit) {
            table.extend(blocks);
        }
        let starts: Vec<usize> = tables.iter().map(Vec::len).collect();
        let slots = (granted + want.lookahead).div_ceil(BLOCK_SIZE);
        for goal in [if is_first_only { external } else { 0 }, slots] {
            for table in &mut tables {
                let missing = goal.saturating_sub(table.len());
                table.extend(pool.allocate(missing).unwrap());
            }
        }
        let allocated = tables.iter().zip(starts).map(|(table, at)| table[at..].to_vec()).collect();
        self.pool = pool;
        let request = self.requests.get_mut(&who).unwrap();
        request.tables = tables;
        request.granted = granted;
        request.hits = request.hits.max(num_hit);
        request.published = request.published.max(num_hit);
        (request.is_running, request.is_delayed) = (true, want.delay);
        if self.publish == Publish::Granted && !want.delay {
            self.publish(who, granted);
        }
        Ok(Some(allocated))
    }

    /// Frees a request. Returns the others that hold a block which it did not compute.
    pub(crate) fn free(&mut self, who: usize, computed: usize) -> Vec<usize> {
        let request = self.requests.remove(&who).unwrap();
        let first = request.hits.max(computed / BLOCK_SIZE);
        let mut uncomputed = Vec::new();
        for table in &request.tables {
            let own = table.get(first..).unwrap_or_default();
            assert!(self.pool.evict(own));
            uncomputed.extend_from_slice(own);
        }
        for mut table in request.tables {
            table.reverse();
            assert!(self.pool.free(&table));
        }
        let holds = |request: &ModelRequest| {
            request.tables.iter().flatten().any(|id| uncomputed.contains(id))
        };
        self.requests.iter().filter(|(_, request)| holds(request)).map(|(&who, _)| who).collect()
    }
}
