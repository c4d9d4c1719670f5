//! The core against naive models: one op enum drives both, and everything that can be observed is
//! compared after each op. A failing case prints its shortest form, and its seed is kept beside
//! these files, to be run first from then on.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod computed;
mod curve;
mod groups;
mod ledger;
mod model;
mod offload;
mod pool;
mod snapshot;

use kvstow_core::ids::BlockId;
use kvstow_core::key::Hashes;

/// Cases per property: what CI runs within seconds, or what `make soak` asks for.
fn num_cases() -> u32 {
    std::env::var("KVSTOW_CASES").map_or(20_000, |cases| cases.parse().unwrap())
}

/// A digest of this name, one of few so that keys meet.
fn digest(name: u16) -> [u8; 8] {
    u64::from(name).to_be_bytes()
}

fn hashes(names: &[u16]) -> Hashes {
    let mut hashes = Hashes::default();
    for &name in names {
        hashes.push(&digest(name)).unwrap();
    }
    hashes
}

fn ids(ids: &[u32]) -> Vec<BlockId> {
    ids.iter().copied().map(BlockId).collect()
}

fn raw(ids: impl IntoIterator<Item = BlockId>) -> Vec<u32> {
    ids.into_iter().map(|id| id.0).collect()
}
