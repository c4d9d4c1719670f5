//! The core against naive models. An op enum drives both, and each test compares all observable
//! state after every op. A failing case prints its shortest form. Its seed is kept in
//! `proptest-regressions`, and later runs begin with it.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod computed;
mod curve;
mod disk;
mod groups;
mod ledger;
mod ledger_model;
mod model;
mod offload;
mod pool;
mod snapshot;

use kvstow_core::ids::BlockId;
use kvstow_core::key::{Hashes, HashesBuilder};

/// Cases per property: a number that CI runs in seconds, or the number of `make soak`.
fn num_cases() -> u32 {
    std::env::var("KVSTOW_CASES").map_or(10_000, |cases| cases.parse().unwrap())
}

/// The digest of a name. Names are few, so keys meet.
fn digest(name: u16) -> [u8; 8] {
    u64::from(name).to_be_bytes()
}

fn hashes(names: &[u16]) -> Hashes {
    let mut hashes = HashesBuilder::default();
    for &name in names {
        hashes.push(&digest(name)).unwrap();
    }
    hashes.finish()
}

fn ids(ids: &[u32]) -> Vec<BlockId> {
    ids.iter().copied().map(BlockId).collect()
}

fn raw(ids: impl IntoIterator<Item = BlockId>) -> Vec<u32> {
    ids.into_iter().map(|id| id.0).collect()
}
