//! 64-bit keys: from block hashes, and into hash tables.

use std::hash::{BuildHasherDefault, Hasher};

use xxhash_rust::xxh3::xxh3_64;

use crate::key::Hashes;
use crate::sha256;

/// 64-bit keys of block hashes. Among ten million hashes, the chance that any two get one key is
/// three in a million.
pub fn keys_of(hashes: &Hashes) -> Vec<u64> {
    let width = hashes.width();
    hashes.as_slice().iter().map(|hash| xxh3_64(width.digest(hash))).collect()
}

/// Ids from 0 to 2^63 - 1 of block hashes. Who lacks the salt cannot compute the id of a known hash,
/// nor the hash of an id. Ids under two salts have nothing in common.
pub fn salted_ids(hashes: &Hashes, salt: &[u8]) -> Vec<u64> {
    let width = hashes.width();
    let mut message = Vec::new();
    let id = |hash| {
        message.clear();
        message.extend_from_slice(salt);
        message.extend_from_slice(width.digest(hash));
        let num_bytes = message.len();
        message.resize(num_bytes + sha256::MAX_PADDING_BYTES, 0);
        let digest = sha256::digest(&mut message, num_bytes);
        digest.iter().take(8).fold(0, |id, &byte| id << 8 | u64::from(byte)) >> 1
    };
    hashes.as_slice().iter().map(id).collect()
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
