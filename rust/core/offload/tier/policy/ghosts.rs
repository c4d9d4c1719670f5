//! Ghosts: keys of evicted blocks, for policies that learn from blocks that are stored again.
//!
//! ```text
//!   ring     [ g5 | g6 | -- | g1 | g2 | .. ]     one place per eviction; the next one overwrites
//!                         ^next                  the oldest (--: its block was stored again)
//!   buckets  [ g2 -> g6 | .. | g1 | .. ]         by fingerprint
//! ```

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::error::{Error, Result};
use crate::key::BlockKey;

/// The fingerprint of a key; never 0, which means no ghost. Two keys with one fingerprint only make
/// a policy's estimate worse.
pub(super) fn fingerprint(key: &BlockKey) -> u64 {
    xxh3_64_with_seed(&key.hash, u64::from(key.group.0)) | 1
}

/// What a policy keeps of an evicted block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ghost {
    /// When it last became recent.
    pub(super) time: u32,
    /// The policy's order that contained it.
    pub(super) order: u8,
}

/// The ghosts of the last evictions. 21 bytes for each, allocated at construction. One array per
/// field, because a struct would be padded. Zeroed memory is the empty state of every array.
#[derive(Clone, Debug)]
pub(super) struct Ghosts {
    /// By place in the ring, from 1; 0 means none.
    pub(super) fingerprints: Vec<u64>,
    pub(super) times: Vec<u32>,
    pub(super) orders: Vec<u8>,
    /// The next place in the same bucket; 0 at its end.
    after: Vec<u32>,
    /// The first place in each bucket.
    buckets: Vec<u32>,
    /// The place that was written last.
    pub(super) last: u32,
    len: usize,
}

impl Ghosts {
    pub(super) const GHOST_BYTES: usize = 21;

    /// Ghosts of the last `num_evictions`, at least one.
    pub(super) fn new(num_evictions: u32) -> Self {
        let num_places = num_evictions as usize + 1;
        Self {
            fingerprints: vec![0; num_places],
            times: vec![0; num_places],
            orders: vec![0; num_places],
            after: vec![0; num_places],
            buckets: vec![0; num_evictions as usize],
            last: 0,
            len: 0,
        }
    }

    /// Number of ghosts.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Adds the ghost of an evicted block. Returns the ghost that is too old now, if there is one.
    pub(super) fn push(&mut self, fingerprint: u64, ghost: Ghost) -> Option<Ghost> {
        let place = if self.last as usize == self.buckets.len() { 1 } else { self.last + 1 };
        self.last = place;
        let at = place as usize;
        let oldest = (self.fingerprints[at] != 0).then(|| self.take_at(place));
        self.put(place, fingerprint, ghost);
        oldest
    }

    /// Writes a ghost to an empty place.
    pub(super) fn put(&mut self, place: u32, fingerprint: u64, ghost: Ghost) {
        let (at, bucket) = (place as usize, self.bucket(fingerprint));
        self.fingerprints[at] = fingerprint;
        self.times[at] = ghost.time;
        self.orders[at] = ghost.order;
        self.after[at] = self.buckets[bucket];
        self.buckets[bucket] = place;
        self.len += 1;
    }

    /// Removes and returns the ghost of a block that is stored again, if there is one.
    pub(super) fn take(&mut self, fingerprint: u64) -> Option<Ghost> {
        self.find(fingerprint).map(|place| self.take_at(place))
    }

    /// The place of a ghost.
    pub(super) fn find(&self, fingerprint: u64) -> Option<u32> {
        let mut place = self.buckets[self.bucket(fingerprint)];
        while place != 0 && self.fingerprints[place as usize] != fingerprint {
            place = self.after[place as usize];
        }
        (place != 0).then_some(place)
    }

    fn take_at(&mut self, place: u32) -> Ghost {
        let at = place as usize;
        let bucket = self.bucket(self.fingerprints[at]);
        let mut before = self.buckets[bucket];
        if before == place {
            self.buckets[bucket] = self.after[at];
        } else {
            while before != 0 && self.after[before as usize] != place {
                before = self.after[before as usize];
            }
            self.after[before as usize] = self.after[at];
        }
        self.fingerprints[at] = 0;
        self.len -= 1;
        Ghost { time: self.times[at], order: self.orders[at] }
    }

    #[expect(clippy::cast_possible_truncation, reason = "below the number of buckets")]
    fn bucket(&self, fingerprint: u64) -> usize {
        ((u128::from(fingerprint) * self.buckets.len() as u128) >> 64) as usize
    }

    /// Forgets them all.
    pub(super) fn clear(&mut self) {
        self.fingerprints.fill(0);
        self.buckets.fill(0);
        (self.last, self.len) = (0, 0);
    }

    #[cfg(test)]
    pub(super) fn memory_bytes(&self) -> usize {
        self.fingerprints.capacity() * size_of::<u64>()
            + (self.times.capacity() + self.after.capacity() + self.buckets.capacity())
                * size_of::<u32>()
            + self.orders.capacity()
    }

    /// Verifies that each ghost can be found once, and that the count is right.
    ///
    /// # Errors
    /// [`Error::Broken`].
    pub(super) fn check(&self) -> Result<()> {
        let broken = |what: String| Err(Error::Broken(format!("ghosts: {what}")));
        let mut num_kept = 0;
        for (place, &fingerprint) in (0_u32..).zip(&self.fingerprints) {
            if fingerprint != 0 {
                num_kept += 1;
                if self.find(fingerprint) != Some(place) {
                    return broken(format!("the ghost at place {place} is not found"));
                }
            }
        }
        if num_kept != self.len {
            return broken(format!("{num_kept} ghosts, {} are counted", self.len));
        }
        Ok(())
    }
}
