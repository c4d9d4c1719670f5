//! `BlockLedger` against a naive ledger over the naive pool.
//!
//! The model does not predict: it takes what is needed from a copy of its pool, and keeps the copy
//! if there was enough. That the two agree shows that what is predicted is what is allocated.

use std::collections::BTreeMap;

use kvstow_core::group::{Attention, Group};
use kvstow_core::ids::BlockId;
use kvstow_core::ledger::{AllocateArgs, BlockLedger, Context, NewIds, PrefixHit, Publish};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;

use super::model::ModelPool;
use super::{hashes, ids, num_cases, raw};

const BLOCK_SIZE: usize = 4;

#[derive(Clone, Debug)]
enum Op {
    /// Two lists: what a request begins with, so that prefixes are shared.
    Add(usize, usize, usize),
    Extend(usize, usize, usize),
    Admit {
        who: usize,
        new: usize,
        external: usize,
        delay: bool,
        reserve: usize,
        must_fit: usize,
    },
    Continue {
        who: usize,
        new: usize,
        lookahead: usize,
    },
    Step {
        new: usize,
    },
    Cache(usize, usize),
    /// A step of all requests was computed, each up to so many tokens before what it was granted.
    CacheStep(usize),
    Rewind(usize, usize),
    Free(usize),
    /// As `Free`, with so many computed tokens.
    FreeComputed(usize, usize),
    /// As `Free`, or as `FreeComputed`, of a request that stays added.
    Restart(usize, Option<usize>),
    Evict(Vec<u32>),
    Pin(Vec<u32>),
    Unpin(Vec<u32>),
    /// The ledger comes back from a snapshot, its blocks under the same ids or others.
    Sleep {
        is_packed: bool,
    },
}

fn op() -> impl Strategy<Value = Op> {
    let who = 0..4_usize;
    prop_oneof![
        4 => (who.clone(), 0..3_usize, 0..6_usize).prop_map(|(who, chain, len)| Op::Add(who, chain, len)),
        1 => (who.clone(), 5..8_usize, 0..3_usize).prop_map(|(who, chain, len)| Op::Extend(who, chain, len)),
        6 => (who.clone(), 0..20_usize, 0..4_usize, prop::bool::weighted(0.2), 0..3_usize, 0..30_usize)
            .prop_map(|(who, new, blocks, delay, reserve, must_fit)| Op::Admit {
                who, new, external: blocks.saturating_sub(1) * BLOCK_SIZE, delay, reserve, must_fit,
            }),
        4 => (who.clone(), 0..9_usize, 0..4_usize)
            .prop_map(|(who, new, lookahead)| Op::Continue { who, new, lookahead }),
        2 => (1..6_usize).prop_map(|new| Op::Step { new }),
        2 => (who.clone(), 0..30_usize).prop_map(|(who, tokens)| Op::Cache(who, tokens)),
        1 => (who.clone(), 0..30_usize).prop_map(|(who, tokens)| Op::Rewind(who, tokens)),
        1 => (0..6_usize).prop_map(Op::CacheStep),
        2 => (who.clone(), 0..9_usize).prop_map(|(who, tokens)| Op::FreeComputed(who, tokens)),
        2 => (who.clone(), prop::option::of(0..9_usize))
            .prop_map(|(who, computed)| Op::Restart(who, computed)),
        3 => who.prop_map(Op::Free),
        1 => vec(0..12_u32, 0..3).prop_map(Op::Evict),
        1 => vec(0..12_u32, 0..3).prop_map(Op::Pin),
        1 => vec(0..12_u32, 0..3).prop_map(Op::Unpin),
        1 => any::<bool>().prop_map(|is_packed| Op::Sleep { is_packed }),
    ]
}

/// The hash names of chain `chain`, `len` blocks: all chains share their first two blocks. No name
/// stands at two positions, as no chained digest does.
fn chain(chain: usize, len: usize) -> Vec<u16> {
    let name = |at: usize| u16::try_from(if at < 2 { at } else { 100 * (chain + 1) + at }).unwrap();
    (0..len).map(name).collect()
}

#[derive(Clone, Debug, Default)]
struct ModelRequest {
    names: Vec<u16>,
    tables: Vec<Vec<u32>>,
    granted: usize,
    published: usize,
    hits: usize,
    is_running: bool,
    is_delayed: bool,
}

struct ModelLedger {
    pool: ModelPool,
    publish: Publish,
    num_groups: usize,
    requests: BTreeMap<usize, ModelRequest>,
}

struct Want {
    new: usize,
    hit: bool,
    external: usize,
    lookahead: usize,
    delay: bool,
    reserve: usize,
    must_fit: usize,
}

impl ModelLedger {
    /// The cached prefix that all groups have, one block short of everything hashed.
    fn lookup(&self, who: usize, max_tokens: usize) -> Vec<Vec<u32>> {
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

    /// What is left of it after sleep: blocks in tables, up to the granted tokens, under new ids.
    fn sleep(&mut self, new_id: impl Fn(u32) -> u32) {
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

    fn publish(&mut self, who: usize, tokens: usize) {
        let request = self.requests.get_mut(&who).unwrap();
        let end = request.names.len().min(tokens / BLOCK_SIZE);
        for at in request.published..end {
            for (group, table) in (0..).zip(&request.tables) {
                assert!(self.pool.cache(&[table[at]], &request.names[at..=at], group));
            }
        }
        request.published = request.published.max(end);
    }

    /// Err: the arguments are refused; None: it does not fit now.
    fn allocate(&mut self, who: usize, want: &Want) -> Result<Option<Vec<Vec<u32>>>, ()> {
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
        // The order in which groups take: all of them external blocks, then all of them new ones.
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

    /// Frees a request, and names the others that hold a block which it did not compute.
    fn free(&mut self, who: usize, computed: usize) -> Vec<usize> {
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

fn name(who: usize) -> String {
    format!("request-{who}")
}

fn apply(op: &Op, ledger: &mut BlockLedger, model: &mut ModelLedger) {
    match op {
        Op::Add(who, which, len) => {
            let names = chain(*which, *len);
            let done = ledger.add(&name(*who), &hashes(&names), Context::default());
            assert_eq!(done.is_ok(), !model.requests.contains_key(who));
            let tables = vec![Vec::new(); model.num_groups];
            let new = || ModelRequest { names, tables, ..ModelRequest::default() };
            model.requests.entry(*who).or_insert_with(new);
        }
        Op::Extend(who, which, len) => {
            let known = model.requests.get(who).map_or(0, |request| request.names.len());
            let names = chain(*which, known + len).split_off(known);
            let done = ledger.extend(&name(*who), &hashes(&names), Context::default());
            assert_eq!(done.is_ok(), model.requests.contains_key(who));
            if let Some(request) = model.requests.get_mut(who) {
                request.names.extend(names);
            }
        }
        Op::Admit { who, new, external, delay, reserve, must_fit } => {
            let want = Want {
                new: *new,
                hit: true,
                external: *external,
                lookahead: 0,
                delay: *delay,
                reserve: *reserve,
                must_fit: *must_fit,
            };
            admit(*who, &want, ledger, model);
        }
        Op::Continue { who, new, lookahead } => {
            let want = Want {
                new: *new,
                hit: false,
                external: 0,
                lookahead: *lookahead,
                delay: false,
                reserve: 0,
                must_fit: 0,
            };
            let args = AllocateArgs {
                num_new_tokens: *new,
                num_lookahead_tokens: *lookahead,
                ..AllocateArgs::default()
            };
            let allocated = ledger.allocate(&name(*who), &args);
            let expected = model.allocate(*who, &want);
            assert_eq!(
                allocated.map(|allocated| allocated.map(per_group)).map_err(|_| ()),
                expected
            );
        }
        Op::Sleep { is_packed } => sleep(*is_packed, ledger, model),
        Op::Step { new } => step(*new, ledger, model),
        Op::Cache(who, tokens) => {
            let is_ok = model.requests.get(who).is_some_and(|request| *tokens <= request.granted);
            assert_eq!(ledger.cache(&name(*who), *tokens).is_ok(), is_ok);
            if is_ok {
                model.requests.get_mut(who).unwrap().is_delayed = false;
                model.publish(*who, *tokens);
            }
        }
        Op::Rewind(who, tokens) => {
            let is_ok = model.requests.get(who).is_some_and(|request| {
                *tokens <= request.granted && *tokens >= request.published * BLOCK_SIZE
            });
            assert_eq!(ledger.rewind(&name(*who), *tokens).is_ok(), is_ok);
            if is_ok {
                model.requests.get_mut(who).unwrap().granted = *tokens;
            }
        }
        Op::Free(who) => {
            let granted = model.requests.get(who).map(|request| request.granted);
            assert_eq!(ledger.free(&name(*who)).is_ok(), granted.is_some());
            if granted.is_some() {
                model.free(*who, usize::MAX);
            }
        }
        Op::CacheStep(back) => cache_step(*back, ledger, model),
        Op::FreeComputed(who, computed) => {
            let is_ok = model.requests.get(who).is_some_and(|request| *computed <= request.granted);
            let expected =
                is_ok.then(|| model.free(*who, *computed).into_iter().map(name).collect());
            assert_eq!(ledger.free_computed(&name(*who), *computed).ok(), expected);
        }
        Op::Restart(who, computed) => restart(*who, *computed, ledger, model),
        Op::Evict(some) => {
            assert_eq!(ledger.pool_mut().evict(&ids(some)).is_ok(), model.pool.evict(some));
        }
        Op::Pin(some) => {
            assert_eq!(ledger.pool_mut().pin(&ids(some)).is_ok(), model.pool.pin(some));
        }
        Op::Unpin(some) => {
            assert_eq!(ledger.pool_mut().unpin(&ids(some)).is_ok(), model.pool.unpin(some));
        }
    }
}

fn sleep(is_packed: bool, ledger: &mut BlockLedger, model: &mut ModelLedger) {
    let ids = if is_packed { NewIds::Packed } else { NewIds::Same };
    let groups = ledger.model().groups().to_vec();
    let anew = BlockLedger::new(ledger.pool().num_blocks(), groups, None, false).unwrap();
    let anew = anew.with_publish(model.publish);
    let restored = anew.restore(&ledger.snapshot(true), ids).unwrap();
    model.sleep(|id| restored.new_id(BlockId(id)).unwrap().0);
    *ledger = restored.ledger;
}

/// A restart is as if the request were freed, and added with the names that it had.
fn restart(who: usize, computed: Option<usize>, ledger: &mut BlockLedger, model: &mut ModelLedger) {
    let hit = ledger.lookup(&name(who), usize::MAX).ok();
    let done = match computed {
        None => ledger.restart(&name(who)).map(|()| Vec::new()),
        Some(computed) => ledger.restart_computed(&name(who), computed),
    };
    let known = model.requests.get(&who);
    let known = known.filter(|request| computed.unwrap_or(0) <= request.granted);
    let Some(names) = known.map(|request| request.names.clone()) else {
        assert!(done.is_err());
        return;
    };
    let holders = model.free(who, computed.unwrap_or(usize::MAX));
    assert_eq!(done.unwrap(), holders.into_iter().map(name).collect::<Vec<_>>());
    assert_eq!(ledger.num_hashes(&name(who)).unwrap(), names.len());
    let tables = vec![Vec::new(); model.num_groups];
    model.requests.insert(who, ModelRequest { names, tables, ..ModelRequest::default() });
    if let Some(hit) = hit.filter(|hit| hit.num_tokens > 0) {
        let args = AllocateArgs { hit: Some(&hit), ..AllocateArgs::default() };
        assert!(ledger.allocate(&name(who), &args).is_err(), "a hit from before is stale");
    }
}

fn admit(who: usize, want: &Want, ledger: &mut BlockLedger, model: &mut ModelLedger) {
    let hit: Option<PrefixHit> = ledger.lookup(&name(who), usize::MAX).ok();
    assert_eq!(hit.is_some(), model.requests.contains_key(&who));
    let Some(hit) = hit else { return };
    let found: Vec<Vec<u32>> = hit.blocks.iter().cloned().map(raw).collect();
    assert_eq!(found, model.lookup(who, usize::MAX));
    let args = AllocateArgs {
        num_new_tokens: want.new,
        hit: Some(&hit),
        num_external_tokens: want.external,
        delay_caching: want.delay,
        reserve: want.reserve,
        must_fit_tokens: Some(want.must_fit),
        ..AllocateArgs::default()
    };
    let allocated = ledger.allocate(&name(who), &args);
    if let Ok(Some(allocated)) = &allocated {
        assert!(allocated.ids.iter().all(|id| hit.blocks.iter().all(|hits| !hits.contains(id))));
    }
    let expected = model.allocate(who, want);
    assert_eq!(allocated.map(|allocated| allocated.map(per_group)).map_err(|_| ()), expected);
}

/// A step of all requests is as if each were asked in turn, up to the first refusal.
fn step(new: usize, ledger: &mut BlockLedger, model: &mut ModelLedger) {
    let all: Vec<usize> = model.requests.keys().copied().collect();
    let names: Vec<String> = all.iter().map(|&who| name(who)).collect();
    let wants = names.iter().map(|name| (name.as_str(), new));
    let allocated = ledger.allocate_step(wants, 1, 0);
    if model.requests.values().any(|request| request.is_delayed) {
        assert!(allocated.is_err());
        return;
    }
    let allocated = allocated.unwrap();
    let (mut expected, mut num_granted) = (Vec::new(), 0);
    for who in all {
        let want = Want {
            new,
            hit: false,
            external: 0,
            lookahead: 1,
            delay: false,
            reserve: 0,
            must_fit: 0,
        };
        let Some(blocks) = model.allocate(who, &want).unwrap() else { break };
        expected.extend(blocks);
        num_granted += 1;
    }
    assert_eq!(allocated.num_granted, num_granted);
    assert_eq!(per_group(allocated), expected);
}

/// Nothing is published unless every request was granted what it is said to have computed.
fn cache_step(back: usize, ledger: &mut BlockLedger, model: &mut ModelLedger) {
    let tokens: Vec<(String, usize)> = model
        .requests
        .iter()
        .map(|(&who, request)| (name(who), (request.granted + 1).saturating_sub(back)))
        .collect();
    let step = tokens.iter().map(|(name, tokens)| (name.as_str(), *tokens));
    let is_ok = back > 0 || model.requests.is_empty();
    assert_eq!(ledger.cache_step(step).is_ok(), is_ok);
    let whos: Vec<usize> = model.requests.keys().copied().filter(|_| is_ok).collect();
    for (who, (_, tokens)) in whos.into_iter().zip(&tokens) {
        model.requests.get_mut(&who).unwrap().is_delayed = false;
        model.publish(who, *tokens);
    }
}

fn per_group(allocated: kvstow_core::ledger::Allocation) -> Vec<Vec<u32>> {
    let ids = raw(allocated.ids);
    allocated.offsets.windows(2).map(|ends| ids[ends[0]..ends[1]].to_vec()).collect()
}

fn compare(ledger: &BlockLedger, model: &ModelLedger) {
    ledger.check().unwrap();
    assert_eq!(ledger.num_requests(), model.requests.len());
    assert_eq!(ledger.pool().num_free(), model.pool.num_free());
    assert_eq!(raw(ledger.pool().free_order()), model.pool.queue);
    for (&who, request) in &model.requests {
        assert_eq!(ledger.num_granted_tokens(&name(who)).unwrap(), request.granted);
        for (group, table) in request.tables.iter().enumerate() {
            let ids = ledger.block_table(&name(who), group).unwrap();
            assert_eq!(&raw(ids.iter().copied()), table);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(num_cases()))]

    #[test]
    fn ledger_equals_model(
        num_blocks in 4..24_u32,
        num_groups in 1..3_usize,
        publish in select(vec![Publish::Granted, Publish::Computed]),
        ops in vec(op(), 1..40),
    ) {
        let groups = vec![Group::new(Attention::Full, BLOCK_SIZE).unwrap(); num_groups];
        let ledger = BlockLedger::new(num_blocks as usize, groups, None, false).unwrap();
        let mut ledger = ledger.with_publish(publish);
        let pool = ModelPool::new(num_blocks);
        let mut model = ModelLedger { pool, publish, num_groups, requests: BTreeMap::new() };
        for op in &ops {
            apply(op, &mut ledger, &mut model);
            compare(&ledger, &model);
        }
    }
}

#[test]
fn a_hit_is_refused_once_stale_or_foreign() {
    let groups = vec![Group::new(Attention::Full, BLOCK_SIZE).unwrap()];
    let mut ledger = BlockLedger::new(8, groups, None, false).unwrap();
    let context = Context::default;
    ledger.add("first", &hashes(&[1, 2]), context()).unwrap();
    let new = AllocateArgs { num_new_tokens: 2 * BLOCK_SIZE, ..AllocateArgs::default() };
    ledger.allocate("first", &new).unwrap().unwrap();
    ledger.add("second", &hashes(&[1, 2]), context()).unwrap();
    ledger.add("third", &hashes(&[1, 2]), context()).unwrap();
    let hit = ledger.lookup("second", usize::MAX).unwrap();
    assert_eq!(hit.num_tokens, 2 * BLOCK_SIZE);
    let with_hit = AllocateArgs { hit: Some(&hit), ..AllocateArgs::default() };
    assert!(ledger.allocate("third", &with_hit).is_err(), "another request's hit");
    ledger.pool_mut().evict(&hit.blocks[0][1..]).unwrap();
    let before = format!("{ledger:?}");
    assert!(ledger.allocate("second", &with_hit).is_err(), "a stale hit");
    assert_eq!(format!("{ledger:?}"), before);
    ledger.free("second").unwrap();
    ledger.add("second", &hashes(&[1, 2]), context()).unwrap();
    assert!(ledger.allocate("second", &with_hit).is_err(), "a namesake's hit");
}

#[test]
fn events_tell_tokens_and_parents() {
    use kvstow_core::event::Event;
    use kvstow_core::hash::ExtraKey;
    let groups = vec![Group::new(Attention::Full, 2).unwrap()];
    let mut ledger = BlockLedger::new(8, groups, None, true).unwrap();
    let context = Context {
        tokens: Some(vec![10, 11, 12, 13, 14]),
        extra_keys: Some(vec![None, Some(vec![ExtraKey::Bool(true)])]),
    };
    ledger.add("a", &hashes(&[1, 2]), context).unwrap();
    let new = |num_new_tokens| AllocateArgs { num_new_tokens, ..AllocateArgs::default() };
    ledger.allocate("a", &new(2)).unwrap().unwrap();
    ledger.allocate("a", &new(2)).unwrap().unwrap();
    let events = ledger.pool_mut().take_events();
    let [Event::Stored(first), Event::Stored(second)] = events.as_slice() else {
        panic!("two runs were stored: {events:?}");
    };
    assert_eq!((first.origin.parent, &first.origin.tokens), (None, &Some(vec![10, 11])));
    assert_eq!(second.origin.parent, Some(first.hashes[0]));
    assert_eq!(second.origin.tokens, Some(vec![12, 13]));
    assert_eq!(second.origin.extra_keys, Some(vec![Some(vec![ExtraKey::Bool(true)])]));
}
