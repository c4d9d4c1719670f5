//! 64-bit keys: from block hashes, and into hash tables.

use std::hash::{BuildHasherDefault, Hasher};

use xxhash_rust::xxh3::xxh3_64;

use crate::key::Hashes;

/// 64-bit keys of block hashes. Among ten million hashes, the chance that any two get one key is
/// three in a million.
pub fn keys_of(hashes: &Hashes) -> Vec<u64> {
    let width = hashes.width();
    hashes.as_slice().iter().map(|hash| xxh3_64(width.digest(hash))).collect()
}

/// A bijection of 64-bit words that spreads every bit over the whole word (splitmix64's finalizer).
#[inline]
pub(super) const fn mixed(key: u64) -> u64 {
    let key = (key ^ (key >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let key = (key ^ (key >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    key ^ (key >> 31)
}

/// The hasher of tables by key: ids that count up are spread, and nothing is random.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct MixedKey(u64);

pub(super) type MixedKeys = BuildHasherDefault<MixedKey>;

impl Hasher for MixedKey {
    #[inline]
    fn write_u64(&mut self, key: u64) {
        self.0 = mixed(key);
    }

    fn write(&mut self, bytes: &[u8]) {
        self.0 = xxh3_64(bytes);
    }

    #[inline]
    fn finish(&self) -> u64 {
        self.0
    }
}
