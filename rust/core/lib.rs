//! Block accounting for an LLM server's KV cache.
//!
//! A [`BlockPool`](pool::BlockPool) knows who references each block of one memory and what it
//! holds. A [`BlockLedger`](ledger::BlockLedger) keeps a device's requests, their block tables and
//! the prefixes they share. An [`OffloadScheduler`](offload::OffloadScheduler) decides what the
//! host tier stores, loads and evicts. A [`HitCurve`](curve::HitCurve) shows how many blocks a
//! cache of any capacity would hit. None of them knows the time, draws a random number, starts a
//! thread or moves a byte; every operation is all or nothing.
//!
//! Each module uses only those above it in this list:
//!
//! | floor | modules |
//! |---|---|
//! | 0 | [`ids`], [`error`], [`key`], [`hash`], [`event`] |
//! | 1 | [`pool`], [`curve`] |
//! | 2 | [`group`] |
//! | 3 | [`ledger`] |
//! | 4 | [`offload`] |
//! | 5 | [`snapshot`] |

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

mod requests;
