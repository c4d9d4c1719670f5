//! Hits of a cache against its capacity, from the requests that it would serve.
//!
//! A request is a chain of keys. Each key stands for a block and all blocks before it. A cache looks
//! up the whole request, and then makes its keys the most recent, tail before root. [`HitCurve`]
//! gives the hits of an LRU cache at every capacity. [`Clairvoyant`] gives the most hits that any
//! policy can have.
//!
//! May import: error, key, sha256.

mod bit_set;
mod clairvoyant;
mod counted_bits;
mod histogram;
mod hit_curve;
mod keys;
mod lru_stack;
mod memory;
mod prompts;
mod sample;

pub use clairvoyant::Clairvoyant;
pub use hit_curve::{HitCurve, HitCurveConfig};
pub use keys::{keys_of, salted_ids};
pub use prompts::Prompts;
pub use sample::MIN_KEYS;
