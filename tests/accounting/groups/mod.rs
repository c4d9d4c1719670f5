//! Models of several groups. `kinds` shows each kind by example, `random` drives random models with
//! the operations of `ops`, and `soak` runs a thousand overlapping requests.
//!
//! `needed` and `num_skipped` repeat the table of `kvstow_core::group` as plainly as possible.

mod kinds;
mod ops;
mod random;
mod soak;

use std::ops::Range;

use kvstow_core::group::{Attention, Group};
use kvstow_core::ids::BlockId;

fn full(block_size: usize) -> Group {
    Group::new(Attention::Full, block_size).unwrap()
}

fn window(window: usize, block_size: usize) -> Group {
    Group::new(Attention::SlidingWindow { window }, block_size).unwrap()
}

fn retaining(extra: usize, group: Group) -> Group {
    group.retaining(extra).unwrap()
}

fn dropping(group: Group) -> Group {
    group.dropping_last_block().unwrap()
}

fn chunked(chunk: usize, block_size: usize) -> Group {
    Group::new(Attention::ChunkedLocal { chunk }, block_size).unwrap()
}

fn state(block_size: usize) -> Group {
    Group::new(Attention::StateSpace, block_size).unwrap()
}

/// The blocks that a hit of `num_tokens`, a multiple of the block size, needs. The last of them is
/// not part of the hit if the group drops it.
fn needed(group: Group, num_tokens: usize) -> Range<usize> {
    let end = num_tokens / group.block_size;
    let start = match group.attention {
        Attention::Full => 0,
        Attention::SlidingWindow { window } => {
            end.saturating_sub((window - 1).div_ceil(group.block_size))
        }
        Attention::ChunkedLocal { chunk } => num_tokens / chunk * chunk / group.block_size,
        Attention::StateSpace => end.saturating_sub(1),
        _ => unreachable!("no other kind is known here"),
    };
    start..end + usize::from(group.drops_last_block() && end > 0)
}

/// Number of blocks, from the first, that the request gives up.
fn num_skipped(group: Group, num_tokens: usize) -> usize {
    match group.attention {
        Attention::Full => 0,
        Attention::SlidingWindow { window } => {
            let kept = window + group.extra_retained_tokens();
            (num_tokens + 1).saturating_sub(kept) / group.block_size
        }
        Attention::ChunkedLocal { chunk } => num_tokens / chunk * (chunk / group.block_size),
        Attention::StateSpace => num_tokens.div_ceil(group.block_size).saturating_sub(1),
        _ => unreachable!("no other kind is known here"),
    }
}

/// Number of blocks, from the first, that no later token reads.
fn num_unread(group: Group, num_tokens: usize) -> usize {
    num_skipped(Group::new(group.attention, group.block_size).unwrap(), num_tokens)
}

fn name(who: usize) -> String {
    format!("request-{who}")
}

fn num_null(table: &[BlockId]) -> usize {
    table.iter().take_while(|id| id.is_null()).count()
}
