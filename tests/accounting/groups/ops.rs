//! Random groups, and random operations on their requests.

use kvstow_core::group::Group;
use proptest::prelude::*;
use proptest::sample::select;

use super::{chunked, dropping, full, retaining, state, window};

/// Sizes are eighths of the model's hit block size, so that they fit every model.
#[derive(Clone, Debug)]
pub(super) enum Op {
    Add {
        who: usize,
        chain: usize,
        len: usize,
    },
    Extend {
        who: usize,
        len: usize,
    },
    Admit {
        who: usize,
        new: usize,
        external: usize,
        more: More,
        delay: bool,
        must_fit: Option<usize>,
    },
    Continue {
        who: usize,
        new: usize,
        more: More,
    },
    Step {
        new: usize,
        more: More,
    },
    Cache {
        who: usize,
        back: usize,
    },
    Rewind {
        who: usize,
        back: usize,
    },
    Free {
        who: usize,
    },
    Evict {
        some: usize,
    },
}

#[derive(Clone, Copy, Debug)]
pub(super) struct More {
    pub(super) lookahead: usize,
    pub(super) in_flight: usize,
    pub(super) reserve: usize,
}

pub(super) fn group() -> impl Strategy<Value = Group> {
    (0..8, select(vec![1, 2, 4, 8, 6, 3]), 1..40_usize).prop_map(|(kind, block_size, extent)| {
        match kind {
            0 => full(block_size),
            1 => window(extent, block_size),
            4 => retaining(extent % 13, window(1 + extent % 11, block_size)),
            5 => dropping(full(block_size)),
            6 => dropping(window(extent, block_size)),
            7 => dropping(retaining(extent % 13, window(1 + extent % 11, block_size))),
            2 => chunked((1 + extent % 4) * block_size, block_size),
            _ => state(block_size),
        }
    })
}

pub(super) fn op() -> impl Strategy<Value = Op> {
    let who = 0..4_usize;
    let more = (0..4_usize, select(vec![0, 0, 0, 1, 4]), select(vec![0, 0, 0, 1, 5]))
        .prop_map(|(lookahead, in_flight, reserve)| More { lookahead, in_flight, reserve });
    let must_fit = prop::option::weighted(0.2, 0..40_usize);
    let delay = prop::bool::weighted(0.2);
    prop_oneof![
        5 => (who.clone(), 0..3_usize, 0..36_usize)
            .prop_map(|(who, chain, len)| Op::Add { who, chain, len }),
        1 => (who.clone(), 0..12_usize).prop_map(|(who, len)| Op::Extend { who, len }),
        7 => (who.clone(), 0..24_usize, 0..4_usize, more.clone(), delay, must_fit).prop_map(
            |(who, new, external, more, delay, must_fit)| {
                let external = external.saturating_sub(1);
                Op::Admit { who, new, external, more, delay, must_fit }
            }
        ),
        6 => (who.clone(), 0..10_usize, more.clone())
            .prop_map(|(who, new, more)| Op::Continue { who, new, more }),
        2 => (1..6_usize, more).prop_map(|(new, more)| Op::Step { new, more }),
        3 => (who.clone(), select(vec![0, 0, 2, 8])).prop_map(|(who, back)| Op::Cache { who, back }),
        2 => (who.clone(), 0..4_usize).prop_map(|(who, back)| Op::Rewind { who, back }),
        4 => who.prop_map(|who| Op::Free { who }),
        1 => (0..1000_usize).prop_map(|some| Op::Evict { some }),
    ]
}
