//! `BlockLedger` against the naive ledger. The naive ledger does not predict its need, so equality
//! shows that the ledger's prediction is exact.

use std::collections::BTreeMap;

use kvstow_core::group::{Attention, Group};
use kvstow_core::ids::BlockId;
use kvstow_core::ledger::{AllocateArgs, BlockLedger, Context, NewIds, PrefixHit, Publish};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;

use super::ledger_model::{BLOCK_SIZE, ModelLedger, ModelRequest, Want};
use super::model::ModelPool;
use super::{hashes, ids, num_cases, raw};

#[derive(Clone, Debug)]
enum Op {
    /// Request, chain and number of hashes.
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
    /// Reports a step of all requests, each this many tokens short of its granted tokens.
    CacheStep(usize),
    Rewind(usize, usize),
    Free(usize),
    /// As `Free`, with this many computed tokens.
    FreeComputed(usize, usize),
    /// As `Free` or `FreeComputed`, for a request that stays added.
    Restart(usize, Option<usize>),
    Evict(Vec<u32>),
    Pin(Vec<u32>),
    Unpin(Vec<u32>),
    /// Restores the ledger from its snapshot, with the same or packed ids.
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

/// The hash names of `len` blocks of a chain. All chains share their first two blocks. As with
/// chained digests, each name belongs to one position.
fn chain(chain: usize, len: usize) -> Vec<u16> {
    let name = |at: usize| u16::try_from(if at < 2 { at } else { 100 * (chain + 1) + at }).unwrap();
    (0..len).map(name).collect()
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
                delay: *delay,
                reserve: *reserve,
                must_fit: *must_fit,
                ..Want::default()
            };
            admit(*who, &want, ledger, model);
        }
        Op::Continue { who, new, lookahead } => {
            let want = Want { new: *new, lookahead: *lookahead, ..Want::default() };
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
        Op::Cache(who, tokens) => cache(*who, *tokens, ledger, model),
        Op::Rewind(who, tokens) => rewind(*who, *tokens, ledger, model),
        Op::Free(who) => free(*who, None, ledger, model),
        Op::CacheStep(back) => cache_step(*back, ledger, model),
        Op::FreeComputed(who, computed) => free(*who, Some(*computed), ledger, model),
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

fn cache(who: usize, tokens: usize, ledger: &mut BlockLedger, model: &mut ModelLedger) {
    let is_ok = model.requests.get(&who).is_some_and(|request| tokens <= request.granted);
    assert_eq!(ledger.cache(&name(who), tokens).is_ok(), is_ok);
    if is_ok {
        model.requests.get_mut(&who).unwrap().is_delayed = false;
        model.publish(who, tokens);
    }
}

fn rewind(who: usize, tokens: usize, ledger: &mut BlockLedger, model: &mut ModelLedger) {
    let is_ok = model.requests.get(&who).is_some_and(|request| {
        tokens <= request.granted && tokens >= request.published * BLOCK_SIZE
    });
    assert_eq!(ledger.rewind(&name(who), tokens).is_ok(), is_ok);
    if is_ok {
        model.requests.get_mut(&who).unwrap().granted = tokens;
    }
}

/// Frees a request that has computed so many tokens; None: all that were granted.
fn free(who: usize, computed: Option<usize>, ledger: &mut BlockLedger, model: &mut ModelLedger) {
    let num_computed = computed.unwrap_or(0);
    let is_ok = model.requests.get(&who).is_some_and(|request| num_computed <= request.granted);
    let freed = ledger.free(&name(who), computed);
    let expected = is_ok.then(|| {
        let holders = model.free(who, computed.unwrap_or(usize::MAX));
        holders.into_iter().map(name).collect::<Vec<_>>()
    });
    assert_eq!(freed.ok(), expected);
}

fn sleep(is_packed: bool, ledger: &mut BlockLedger, model: &mut ModelLedger) {
    let ids = if is_packed { NewIds::Packed } else { NewIds::Same };
    let groups = ledger.model().groups().to_vec();
    let anew = BlockLedger::new(ledger.pool().num_blocks(), groups, None, false).unwrap();
    let anew = anew.with_publish(model.publish);
    let restored = anew.restore(&ledger.snapshot(true), ids).unwrap();
    let new_ids: BTreeMap<_, _> = restored.moves.into_iter().collect();
    model.sleep(|id| new_ids[&BlockId(id)].0);
    *ledger = restored.ledger;
}

/// Compares a restart with a request that is freed and added again.
fn restart(who: usize, computed: Option<usize>, ledger: &mut BlockLedger, model: &mut ModelLedger) {
    let hit = ledger.lookup(&name(who), usize::MAX).ok();
    let done = ledger.restart(&name(who), computed);
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

/// Compares a step with one allocation per request, up to the first refusal.
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
        let want = Want { new, lookahead: 1, ..Want::default() };
        let Some(blocks) = model.allocate(who, &want).unwrap() else { break };
        expected.extend(blocks);
        num_granted += 1;
    }
    assert_eq!(allocated.num_granted, num_granted);
    assert_eq!(per_group(allocated), expected);
}

/// Publishes nothing unless each request's computed tokens were granted.
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
    ledger.free("second", None).unwrap();
    ledger.add("second", &hashes(&[1, 2]), context()).unwrap();
    assert!(ledger.allocate("second", &with_hit).is_err(), "a namesake's hit");
}

#[test]
fn an_edited_hit_is_refused() {
    let groups = vec![Group::new(Attention::Full, BLOCK_SIZE).unwrap()];
    let mut ledger = BlockLedger::new(8, groups, None, false).unwrap();
    ledger.add("first", &hashes(&[1, 2, 3]), Context::default()).unwrap();
    let new = AllocateArgs { num_new_tokens: 3 * BLOCK_SIZE, ..AllocateArgs::default() };
    ledger.allocate("first", &new).unwrap().unwrap();
    let table = ledger.block_table("first", 0).unwrap().to_vec();
    ledger.add("second", &hashes(&[1, 2]), Context::default()).unwrap();
    let found = ledger.lookup("second", usize::MAX).unwrap();
    let before = format!("{ledger:?}");
    for (num_tokens, blocks, why) in [
        (3 * BLOCK_SIZE, table.clone(), "more tokens than the request has hashes for"),
        (BLOCK_SIZE, table[..2].to_vec(), "fewer tokens than blocks"),
        (BLOCK_SIZE + 1, table[..1].to_vec(), "a part of a block"),
        (2 * BLOCK_SIZE, vec![table[0], BlockId(8)], "a block outside the pool"),
        (2 * BLOCK_SIZE, vec![table[0], BlockId::NULL], "a null block"),
        (2 * BLOCK_SIZE, vec![table[1], table[0]], "blocks of other places"),
    ] {
        let mut hit = found.clone();
        (hit.num_tokens, hit.blocks) = (num_tokens, vec![blocks]);
        let with_hit = AllocateArgs { hit: Some(&hit), ..AllocateArgs::default() };
        assert!(ledger.allocate("second", &with_hit).is_err(), "{why}");
        assert_eq!(format!("{ledger:?}"), before);
    }
    let with_hit = AllocateArgs { hit: Some(&found), ..AllocateArgs::default() };
    ledger.allocate("second", &with_hit).unwrap().unwrap();
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
