//! Which keys a curve of bounded memory watches.

use crate::error::{Error, Result};

use super::keys::mixed;
use super::lru_stack::{Role, table_bytes};

/// The fewest keys that a bounded curve may watch.
pub const MIN_KEYS: usize = 64;

/// The rate is never below 2^-32: a curve of [`MIN_KEYS`] then stands for 10^11 blocks.
const MAX_HALVINGS: u32 = 32;

/// One key in so many lookups is drawn to be held.
const LOOKUPS_PER_DRAW: u64 = 8;

/// Bytes that a key takes beside its place in the table: slots, a bin in each histogram with the
/// room that their lists keep free, and its entry once more while keys get new roles.
const BESIDE_TABLE_BYTES: usize = 56;

/// A sample of keys by hash, and the share of memory that keys with many uses may hold outside it.
#[derive(Clone, Debug)]
pub(super) struct Sample {
    seed: u64,
    max_keys: usize,
    num_halvings: u32,
}

impl Sample {
    /// All keys, until [`Sample::halve`] is called.
    ///
    /// # Errors
    /// [`Error::Config`] if the bound is below [`MIN_KEYS`].
    pub(super) fn new(max_keys: Option<usize>, seed: u64) -> Result<Self> {
        let max_keys = max_keys.unwrap_or(usize::MAX);
        if max_keys < MIN_KEYS {
            return Err(Error::Config(format!(
                "max_keys is {max_keys}; a curve watches at least {MIN_KEYS} keys"
            )));
        }
        // Not the hash of the tables by key: all members would share its first bits.
        let seed = mixed(seed.wrapping_add(0x9e37_79b9_7f4a_7c15));
        Ok(Self { seed, max_keys, num_halvings: 0 })
    }

    pub(super) fn max_keys(&self) -> usize {
        self.max_keys
    }

    /// Whether every key is in it.
    pub(super) fn is_whole(&self) -> bool {
        self.num_halvings == 0
    }

    /// Keys that each member stands for.
    pub(super) fn weight(&self) -> u64 {
        1 << self.num_halvings
    }

    /// Halves the rate. False if it is as low as it may be.
    pub(super) fn halve(&mut self) -> bool {
        let may_halve = self.num_halvings < MAX_HALVINGS;
        self.num_halvings += u32::from(may_halve);
        may_halve
    }

    #[inline]
    pub(super) fn has(&self, key: u64) -> bool {
        self.num_halvings == 0 || self.hash(key).leading_zeros() >= self.num_halvings
    }

    /// One of `num_groups` groups of members, of equal size.
    #[inline]
    pub(super) fn group(&self, key: u64, num_groups: u8) -> usize {
        usize::try_from(self.hash(key) % u64::from(num_groups)).unwrap_or(0)
    }

    /// The role of a key from now on; none if the key leaves.
    pub(super) fn role(&self, key: u64, is_held: bool) -> Option<Role> {
        if is_held {
            return Some(Role::Held);
        }
        self.has(key).then_some(Role::Sampled)
    }

    /// The most keys that are held outside the sample.
    pub(super) fn max_held(&self) -> usize {
        self.max_keys / 4
    }

    /// Whether the key of this lookup is held from now on. Does not depend on the key, so a key that
    /// becomes popular is soon held, in the sample or not.
    #[inline]
    pub(super) fn draws(&self, lookup: u64) -> bool {
        self.num_halvings > 0 && mixed(lookup ^ self.seed).is_multiple_of(LOOKUPS_PER_DRAW)
    }

    /// The least number of uses, at least 2, that few enough keys have to be held all.
    pub(super) fn threshold(&self, uses: impl Iterator<Item = u32>) -> u32 {
        let max_held = self.max_held() / 2; // the other half is for keys that will be drawn
        let least = 2;
        let mut uses: Vec<u32> = uses.filter(|&num_uses| num_uses >= least).collect();
        if uses.len() <= max_held {
            return least;
        }
        let (_, &mut nth, _) = uses.select_nth_unstable_by(max_held, |one, other| other.cmp(one));
        nth.saturating_add(1)
    }

    fn hash(&self, key: u64) -> u64 {
        mixed(key ^ self.seed)
    }
}

/// The most keys that a curve of so many bytes can watch.
pub(super) fn max_keys_within(max_bytes: usize) -> usize {
    let keys_of_table = |num_halvings: u32| {
        let room_in_table = (1_usize << (40 - num_halvings)) / 8 * 7;
        let left = max_bytes.saturating_sub(table_bytes(room_in_table));
        room_in_table.min(left / BESIDE_TABLE_BYTES)
    };
    (0..36).map(keys_of_table).max().unwrap_or(0)
}
