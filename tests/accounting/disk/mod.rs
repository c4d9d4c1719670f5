//! The disk tier over simulated media: every rank has a host and a disk that hold names instead of
//! bytes. Each copy of a job takes place at a random moment between its plan and its report, also
//! after its deadline. Every load must deliver what its keys name, in the current epoch: a reset
//! begins a new one, as if the weights had changed.

mod claims;
mod demotes;
mod lru;
mod plans;
mod world;

use proptest::collection::vec;
use proptest::prelude::*;

use kvstow_core::group::{Attention, Group};
use kvstow_core::offload::{Admit, DiskMode, EvictionPolicy, Mode};

use super::num_cases;

use world::{World, WorldOptions};

#[derive(Clone, Debug)]
enum Op {
    /// Request, chain, number of its hashes.
    Submit(usize, usize, usize),
    /// Request, chain, number of its hashes: from its lookup to the end of its demotes.
    Serve(usize, usize, usize),
    /// All jobs end well.
    Settle,
    /// Request, and whether it may wait for the disk.
    Ask(usize, bool),
    /// Request, whether it may wait, blocks on the device, and whether it loads only later.
    AskBehind(usize, bool, usize, bool),
    /// Request, blocks of its lookup to load.
    Accept(usize, usize),
    Release(usize),
    Lower(usize),
    /// The host tier and the disk are emptied, but the weights and the requests stay.
    Clear,
    /// The process ends, and the next one has the snapshot of the host tier.
    Resume,
    /// Request, tokens to compute, most blocks to store.
    Run(usize, usize, usize),
    Leave(usize),
    Restart(usize),
    Truncate(usize, usize),
    /// Lazy mode: store blocks of those that were computed.
    StoreEvictable(usize),
    /// Most slots.
    Demote(usize),
    Promote(usize),
    /// Job and rank whose copy takes place now.
    Copy(usize, usize),
    /// Job and rank that reports, and how: see [`World::report`].
    Report(usize, usize, u8),
    Tick,
    /// A subset of the disk tier's jobs, which go on.
    EndAll(u64),
    Reset,
    SetDisk(DiskMode),
    /// A subset of the disk's slots.
    Adopt(u64),
    /// Request, which answers of the shared store are wrong, most blocks to ask for.
    Claim(usize, u64, usize),
    /// Rank and block that the shared store loses or damages.
    LoseShared(usize, usize, bool),
    /// Rank and place that becomes damaged.
    RotHost(usize, usize),
    RotDisk(usize, usize),
    /// The process is killed, and the next one opens the disk.
    Kill,
}

fn op() -> impl Strategy<Value = Op> {
    let who = 0..4_usize;
    let max = || prop_oneof![2 => Just(usize::MAX), 1 => 0..4_usize];
    let mode = prop_oneof![
        4 => Just(DiskMode::On), 1 => Just(DiskMode::ReadOnly), 1 => Just(DiskMode::Off),
    ];
    prop_oneof![
        8 => (who.clone(), 0..4_usize, 1..8_usize).prop_map(|(w, c, l)| Op::Submit(w, c, l)),
        8 => (who.clone(), 0..4_usize, 1..8_usize).prop_map(|(w, c, l)| Op::Serve(w, c, l)),
        2 => Just(Op::Settle),
        6 => (who.clone(), prop::bool::weighted(0.85)).prop_map(|(w, p)| Op::Ask(w, p)),
        6 => (who.clone(), prop::bool::weighted(0.85), 0..4_usize, any::<bool>())
            .prop_map(|(w, p, l, h)| Op::AskBehind(w, p, l, h)),
        6 => (who.clone(), 0..5_usize).prop_map(|(w, n)| Op::Accept(w, n)),
        1 => who.clone().prop_map(Op::Release),
        1 => who.clone().prop_map(Op::Lower),
        1 => prop::bool::weighted(0.6).prop_map(|clear| if clear { Op::Clear } else { Op::Resume }),
        8 => (who.clone(), 1..9_usize, max()).prop_map(|(w, t, m)| Op::Run(w, t, m)),
        4 => who.clone().prop_map(Op::Leave),
        1 => who.clone().prop_map(Op::Restart),
        1 => (who, 0..6_usize).prop_map(|(w, n)| Op::Truncate(w, n)),
        4 => (1..8_usize).prop_map(Op::StoreEvictable),
        7 => max().prop_map(Op::Demote),
        7 => max().prop_map(Op::Promote),
        8 => (0..6_usize, 0..3_usize).prop_map(|(job, rank)| Op::Copy(job, rank)),
        16 => (0..6_usize, 0..3_usize, any::<u8>()).prop_map(|(j, r, how)| Op::Report(j, r, how)),
        2 => Just(Op::Tick),
        1 => (prop::bool::weighted(0.3), any::<u64>())
            .prop_map(|(end, running)| if end { Op::EndAll(running) } else { Op::Tick }),
        1 => prop::bool::weighted(0.7).prop_map(|reset| if reset { Op::Reset } else { Op::Kill }),
        3 => mode.prop_map(Op::SetDisk),
        2 => any::<u64>().prop_map(Op::Adopt),
        8 => (0..4_usize, any::<u64>(), max()).prop_map(|(w, lies, m)| Op::Claim(w, lies, m)),
        2 => (0..3_usize, 0..36_usize, any::<bool>())
            .prop_map(|(rank, which, is_gone)| Op::LoseShared(rank, which, is_gone)),
        1 => (0..3_usize, 0..36_usize).prop_map(|(rank, place)| Op::RotHost(rank, place)),
        1 => (0..3_usize, 0..36_usize).prop_map(|(rank, place)| Op::RotDisk(rank, place)),
    ]
}

/// Models with and without full attention, in one block size and in several.
fn models() -> impl Strategy<Value = Vec<Group>> {
    let group = |attention, block_size| Group::new(attention, block_size).unwrap();
    let window = |window, size| group(Attention::SlidingWindow { window }, size);
    prop_oneof![
        5 => Just(vec![group(Attention::Full, 2)]),
        2 => Just(vec![group(Attention::Full, 2), window(4, 2)]),
        2 => Just(vec![window(3, 2), group(Attention::Full, 4), group(Attention::StateSpace, 2)]),
        1 => Just(vec![group(Attention::ChunkedLocal { chunk: 6 }, 2), window(5, 4)]),
        1 => Just(vec![group(Attention::Full, 2), group(Attention::Full, 2)]),
        1 => Just(vec![
            group(Attention::Full, 2).dropping_last_block().unwrap(),
            group(Attention::StateSpace, 2),
        ]),
    ]
}

fn options() -> impl Strategy<Value = WorldOptions> {
    let form = prop_oneof![
        3 => Just((Mode::Eager, 1)), 1 => Just((Mode::Eager, 2)), 1 => Just((Mode::Lazy, 1)),
    ];
    let policy = || prop::sample::select(EvictionPolicy::ALL.to_vec());
    let admit = prop_oneof![2 => Just(Admit::All), 1 => Just(Admit::Returned)];
    // Half of the worlds have a shared store. Its index may be longer than all chains.
    let num_below = prop_oneof![
        2 => (1..14_usize, Just(false)), 1 => (1..14_usize, Just(true)),
        1 => (Just(200_usize), Just(true)),
    ];
    let sizes = (1..10_usize, num_below, 1..8_usize, 0..6_usize);
    (1..4_usize, form, policy(), policy(), admit, sizes).prop_map(
        |(world_size, (mode, blocks_per_slot), policy, disk_policy, admit, sizes)| {
            let (num_host, (num_disk, is_shared), max_in_flight, min_promote_tokens) = sizes;
            WorldOptions {
                world_size,
                mode,
                blocks_per_slot,
                policy,
                disk_policy,
                admit,
                num_host,
                num_disk,
                max_in_flight,
                min_promote_tokens,
                is_shared,
            }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(num_cases()))]

    /// Every load delivers the blocks that its keys name. No pin and no slot is lost. As many slots
    /// are in flight as may be. A request that waits for the disk does not wait for ever.
    #[test]
    fn every_load_through_the_disk_delivers_its_keys(
        groups in models(), options in options(), ops in vec(op(), 1..100),
    ) {
        let is_full = groups.iter().all(|group| group.attention == Attention::Full);
        let blocks_per_slot = if is_full { options.blocks_per_slot } else { 1 };
        let mut world = World::new(groups, WorldOptions { blocks_per_slot, ..options });
        for op in &ops {
            world.apply(op);
            world.check();
        }
        world.wind_up();
    }
}
