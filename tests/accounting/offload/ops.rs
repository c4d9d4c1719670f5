//! What happens to a world: models, options and operations, drawn at random.

use kvstow_core::group::{Attention, Group};
use kvstow_core::offload::{EvictionPolicy, Mode};
use proptest::collection::vec;
use proptest::prelude::*;

pub(super) const NUM_CHAINS: usize = 4;

/// Models with and without full attention, in one block size and in several.
pub(super) fn models() -> impl Strategy<Value = Vec<Group>> {
    let group = |attention, block_size| Group::new(attention, block_size).unwrap();
    let window = |window, size| group(Attention::SlidingWindow { window }, size);
    let dropping = |group: Group| group.dropping_last_block().unwrap();
    prop_oneof![
        4 => Just(vec![group(Attention::Full, 2)]),
        2 => Just(vec![group(Attention::Full, 2), window(4, 2)]),
        1 => Just(vec![group(Attention::Full, 2), window(3, 2).retaining(4).unwrap()]),
        1 => Just(vec![group(Attention::Full, 4), window(3, 2).retaining(2).unwrap()]),
        2 => Just(vec![window(3, 2), group(Attention::Full, 4), group(Attention::StateSpace, 2)]),
        1 => Just(vec![group(Attention::ChunkedLocal { chunk: 6 }, 2), window(5, 4)]),
        1 => Just(vec![group(Attention::Full, 2), group(Attention::Full, 2)]),
        1 => Just(vec![dropping(group(Attention::Full, 2)), group(Attention::StateSpace, 2)]),
        1 => Just(vec![group(Attention::Full, 4), dropping(window(5, 2).retaining(2).unwrap())]),
    ]
}

#[derive(Clone, Debug)]
pub(super) enum Op {
    /// Request, chain, number of its blocks, number of found hits to accept.
    Admit(usize, usize, usize, usize),
    /// Request, number of tokens.
    Run(usize, usize),
    Leave(usize),
    /// Request whose priority will be the other one.
    Lower(usize),
    /// Job in flight, and whether it succeeds.
    End(usize, bool),
    Reset,
    EvictDevice(Vec<u32>),
    /// Place on the host that becomes damaged.
    Rot(usize),
    /// Time advances, so jobs in flight may become late.
    Tick,
    /// The movers are stopped.
    Stop,
    /// The device sleeps and wakes, this many blocks larger or smaller.
    Sleep(Rest, i32),
}

/// How a world sleeps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Rest {
    /// With jobs in flight; the test itself keeps the blocks, and ids stay.
    Abrupt,
    /// With a sleep image after all jobs have ended; ids stay.
    Same,
    /// As `Same`, with other ids.
    Packed,
}

pub(super) fn op() -> impl Strategy<Value = Op> {
    let who = 0..4_usize;
    prop_oneof![
        6 => (who.clone(), 0..NUM_CHAINS, 1..8_usize, 0..4_usize)
            .prop_map(|(who, chain, len, keep)| Op::Admit(who, chain, len, keep)),
        8 => (who.clone(), 1..7_usize).prop_map(|(who, tokens)| Op::Run(who, tokens)),
        3 => who.clone().prop_map(Op::Leave),
        1 => who.prop_map(Op::Lower),
        6 => (0..8_usize, prop::bool::weighted(0.85)).prop_map(|(job, ok)| Op::End(job, ok)),
        1 => vec(1..10_u32, 0..3).prop_map(Op::EvictDevice),
        1 => Just(Op::Reset),
        3 => (0..36_usize).prop_map(Op::Rot),
        2 => Just(Op::Tick),
        1 => prop::bool::weighted(0.3).prop_map(|stop| if stop { Op::Stop } else { Op::Tick }),
        1 => (prop::sample::select(vec![Rest::Abrupt, Rest::Same, Rest::Packed]), -3..3_i32)
            .prop_map(|(rest, more)| Op::Sleep(rest, more)),
    ]
}

/// Chains branch: 0 and 1 share two blocks, 2 shares one with them, 3 none.
pub(crate) fn chain(chain: usize, len: usize) -> Vec<u16> {
    let shared = [2, 2, 1, 0][chain];
    let name = |at: usize| if at < shared { 1 + at } else { 100 * (chain + 1) + at };
    (0..len).map(|at| u16::try_from(name(at)).unwrap()).collect()
}

/// Options of a scheduler besides its model.
#[derive(Clone, Copy, Debug)]
pub(super) struct Options {
    pub(super) world_size: usize,
    pub(super) mode: Mode,
    pub(super) blocks_per_slot: usize,
    pub(super) policy: EvictionPolicy,
    pub(super) store_threshold: u8,
    /// The most blocks of a store.
    pub(super) max_blocks: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            world_size: 1,
            mode: Mode::Eager,
            blocks_per_slot: 1,
            policy: EvictionPolicy::Lru,
            store_threshold: 1,
            max_blocks: usize::MAX,
        }
    }
}

pub(super) fn options() -> impl Strategy<Value = Options> {
    let forms = prop_oneof![
        2 => Just((Mode::Eager, 1)),
        1 => Just((Mode::Eager, 3)), // only with full attention in all groups
        1 => Just((Mode::Lazy, 1)),
    ];
    let policy = prop::sample::select(EvictionPolicy::ALL.to_vec());
    let threshold = prop_oneof![3 => Just(1_u8), 1 => 2..4_u8];
    let max_blocks = prop_oneof![3 => Just(usize::MAX), 1 => 0..4_usize];
    (1..4_usize, forms, policy, threshold, max_blocks).prop_map(
        |(world_size, (mode, blocks_per_slot), policy, store_threshold, max_blocks)| Options {
            world_size,
            mode,
            blocks_per_slot,
            policy,
            store_threshold,
            max_blocks,
        },
    )
}

/// Blocks at the head of the free queue that a lazy scheduler looks at.
pub(super) const HORIZON: usize = 6;

/// Time until a job is late.
pub(super) const PATIENCE: f64 = 3.0;
