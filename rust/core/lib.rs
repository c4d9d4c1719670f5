//! Block accounting for an LLM server's KV cache.
//!
//! A [`BlockPool`](pool::BlockPool) counts the references on each block of one memory and keeps its
//! key. A [`BlockLedger`](ledger::BlockLedger) keeps a device's requests, their block tables and
//! the prefixes they share. An [`OffloadScheduler`](offload::OffloadScheduler) decides what the
//! host tier stores, loads and evicts. A [`HitCurve`](curve::HitCurve) shows how many blocks a
//! cache of any capacity would hit. None of them reads a clock, draws a random number, starts a
//! thread or moves a byte. Every operation is all or nothing.
//!
//! Each module imports only from the floors below its own:
//!
//! | floor | modules |
//! |---|---|
//! | 0 | [`ids`], [`error`], [`key`], [`hash`], [`event`], `integers`, `cbor`, `pickle`, `sha256`, `requests` |
//! | 1 | [`pool`], [`curve`] |
//! | 2 | [`group`] |
//! | 3 | [`ledger`] |
//! | 4 | [`offload`] |
//! | 5 | [`snapshot`] |
//!
//! May import: nothing else of kvstow.

pub mod curve;
pub mod error;
pub mod event;
pub mod group;
pub mod hash;
pub mod ids;
pub mod key;
pub mod ledger;
pub mod offload;
pub mod pool;
pub mod snapshot;

mod cbor;
mod integers;
mod pickle;
mod requests;
mod sha256;
