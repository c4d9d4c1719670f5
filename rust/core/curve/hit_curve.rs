//! Hits of an LRU cache at every capacity, in one pass.

#![expect(clippy::cast_precision_loss, reason = "numbers of lookups stay below 2^53")]

use crate::error::{Error, Result};

use super::histogram::Histogram;
use super::lru_stack::{LruStack, Role};
use super::prompts::Prompts;
use super::sample::{MIN_KEYS, Sample, max_keys_within};

/// The sampled keys are put into so many groups, whose differences show the error of the whole.
const NUM_GROUPS: u8 = 16;

/// The groups' histograms are coarser than the curve's: a 64th of its bins.
const GROUP_SHIFT: u32 = 6;

/// What a curve is made for.
#[derive(Clone, Copy, Debug, Default)]
pub struct HitCurveConfig {
    /// The most keys that the curve watches at a time; none: no bound.
    pub max_keys: Option<usize>,
    /// The most memory that the curve takes; none: no bound.
    pub max_bytes: Option<usize>,
    /// Chooses the sample, once there is one.
    pub seed: u64,
}

/// Hits of an LRU cache at every capacity, for one full-attention group.
///
/// A block is a hit where a cache holds it and all blocks before it. LRU over chains is a stack
/// algorithm: a cache of C blocks holds the C that were used last. So a block is a hit at every
/// capacity from its place in the stack on, and a histogram of these places is the whole curve.
///
/// The curve is exact until as many keys are watched as its bound allows. Then the rate is halved:
/// half of the keys, by hash, leave, and each that stays stands for two. A sample with or without a
/// popular key would be far off, so such keys are held: each stands for itself alone. Every eighth
/// use draws its key to be held, and keys with few uses make room for others.
///
/// ```text
///   hits(C) = hits of held keys
///           + lookups of other keys x (hits of sampled keys / lookups of sampled keys)
/// ```
///
/// For traffic without an end, time is divided into turns ([`HitCurve::turn`]). Lookups of the
/// present turn weigh 1, those of the turn before weigh 1/2, and so on. Keys that no request has used
/// for some turns are forgotten, as if a cache kept its blocks for so long at most.
#[derive(Clone, Debug)]
pub struct HitCurve {
    sample: Sample,
    stack: LruStack,
    /// Hits of held keys, and of all keys while the sample is whole.
    counted: Histogram,
    /// Hits of sampled keys, each with the weight of its key.
    sampled: Histogram,
    /// Lookups of the same keys.
    counted_lookups: f64,
    /// Lookups of sampled keys, each with the weight of its key.
    sampled_lookups: f64,
    /// `sampled` and `sampled_lookups`, by group.
    groups: Vec<(Histogram, f64)>,
    /// All lookups.
    weighed_lookups: f64,
    num_requests: u64,
    num_lookups: u64,
    num_uses: u64,
}

impl HitCurve {
    /// A curve of no requests.
    ///
    /// # Errors
    /// [`Error::Config`] if the bound is below [`MIN_KEYS`] keys, or if the machine lacks the memory.
    pub fn new(config: HitCurveConfig) -> Result<Self> {
        let within = config.max_bytes.map(max_keys_within);
        if let (Some(max_bytes), Some(max_keys)) = (config.max_bytes, within)
            && max_keys < MIN_KEYS
        {
            return Err(Error::Config(format!(
                "max_bytes is {max_bytes}, room for {max_keys} keys; a curve watches at least \
                 {MIN_KEYS} keys"
            )));
        }
        let max_keys = config.max_keys.into_iter().chain(within).min();
        let group = (Histogram::with_shift(GROUP_SHIFT), 0.0);
        Ok(Self {
            sample: Sample::new(max_keys, config.seed)?,
            stack: LruStack::with_room(max_keys.unwrap_or(0))?,
            counted: Histogram::default(),
            sampled: Histogram::default(),
            counted_lookups: 0.0,
            sampled_lookups: 0.0,
            groups: vec![group; NUM_GROUPS.into()],
            weighed_lookups: 0.0,
            num_requests: 0,
            num_lookups: 0,
            num_uses: 0,
        })
    }

    /// Serves all requests of a trace in turn.
    ///
    /// # Errors
    /// As [`HitCurve::add`]; the requests before the one that is refused have been served.
    pub fn add_all(&mut self, prompts: Prompts<'_>) -> Result<()> {
        prompts.iter().try_for_each(|keys| self.add(keys))
    }

    /// Serves a request: looks up its keys, root first, then makes them recent, tail before root.
    ///
    /// # Errors
    /// [`Error::Config`] if the machine lacks the memory. The request then counts as never made.
    pub fn add(&mut self, keys: &[u64]) -> Result<()> {
        self.make_room(keys)?;
        self.lookup(keys, 0, None);
        self.rank(keys);
        Ok(())
    }

    /// Looks up the keys of a request, root first, and returns how many of the first ones the curve
    /// knows: an estimate once the rate is below 1.
    ///
    /// The first `num_local` keys are hits of a cache in front of this one, so they are hits at every
    /// capacity, and this cache is not asked for them. `ends` are the numbers of keys at which a hit
    /// may end, ascending; none: at every key.
    pub fn lookup(&mut self, keys: &[u64], num_local: usize, ends: Option<&[usize]>) -> usize {
        let num_local = num_local.min(keys.len());
        self.counted.add_free(num_local as f64);
        self.counted_lookups += num_local as f64;
        let found = self.find(&keys[num_local..]);
        let mut needed: Vec<_> = found.iter().map(|found| found.needed).collect();
        let num_known = num_local + needed.iter().take_while(|needed| needed.is_some()).count();
        if let Some(ends) = ends {
            needed = needed_for_ends(&needed, num_local, ends);
        }
        for ((&key, found), needed) in keys[num_local..].iter().zip(found).zip(needed) {
            self.count(key, found.is_counted, needed);
        }
        self.weighed_lookups += keys.len() as f64;
        self.num_requests += 1;
        self.num_lookups += keys.len() as u64;
        num_known
    }

    fn find(&self, keys: &[u64]) -> Vec<Found> {
        let weight = self.sample.weight();
        // A block is no hit before all blocks above it are; in true chains they always are.
        let (mut capacity, mut is_prefix) = (0, true);
        let find = |&key: &u64| {
            let place = self.stack.find(key);
            if let Some(place) = place {
                let num_above = place.num_held_above + place.num_sampled_above * weight;
                capacity = capacity.max(num_above + 1);
            } else if self.sample.has(key) {
                is_prefix = false;
            }
            let is_held = place.is_some_and(|place| place.role == Role::Held);
            Found {
                is_counted: self.sample.is_whole() || is_held,
                needed: is_prefix.then_some(capacity),
            }
        };
        keys.iter().map(find).collect()
    }

    /// Counts a lookup that needs a capacity to be a hit; none: it is no hit. A key that counts is
    /// watched, so a hit needs at least its own place.
    #[inline]
    fn count(&mut self, key: u64, is_counted: bool, needed: Option<u64>) {
        if is_counted {
            self.counted_lookups += 1.0;
            if let Some(capacity) = needed {
                self.counted.add(capacity, 1.0);
            }
        } else if self.sample.has(key) {
            let (hits, lookups) = &mut self.groups[self.sample.group(key, NUM_GROUPS)];
            let weight = self.sample.weight() as f64;
            self.sampled_lookups += weight;
            *lookups += weight;
            if let Some(capacity) = needed {
                self.sampled.add(capacity, weight);
                hits.add(capacity, weight);
            }
        }
    }

    /// Makes the keys of a request recent, tail before root, without a lookup.
    ///
    /// # Errors
    /// [`Error::Config`] if the machine lacks the memory. Nothing has changed then.
    pub fn insert(&mut self, keys: &[u64]) -> Result<()> {
        self.make_room(keys)?;
        self.rank(keys);
        Ok(())
    }

    fn make_room(&mut self, keys: &[u64]) -> Result<()> {
        let num_new = keys.len().min(self.sample.max_keys() - self.stack.len());
        self.stack.make_room(keys.len(), num_new)
    }

    /// Needs room.
    fn rank(&mut self, keys: &[u64]) {
        for (at, &key) in (self.num_uses..).zip(keys.iter().rev()) {
            if self.sample.draws(at) {
                self.hold(key);
            } else if !self.stack.touch(key) {
                self.watch(key);
            }
        }
        self.num_uses += keys.len() as u64;
    }

    /// Begins a turn: halves the weight of all lookups so far, and forgets the keys that no request
    /// has used during the last `num_kept` turns.
    pub fn turn(&mut self, num_kept: usize) {
        self.counted.halve();
        self.sampled.halve();
        self.counted_lookups /= 2.0;
        self.sampled_lookups /= 2.0;
        self.weighed_lookups /= 2.0;
        for (hits, lookups) in &mut self.groups {
            hits.halve();
            *lookups /= 2.0;
        }
        self.stack.turn(num_kept);
    }

    /// Forgets all keys, as a cache that is emptied. Past hits and lookups stay.
    pub fn clear(&mut self) {
        self.stack.clear();
    }

    /// Watches a key from now on, if the sample has it.
    fn watch(&mut self, key: u64) {
        while self.sample.has(key) {
            if self.stack.len() < self.sample.max_keys() {
                return self.stack.insert(key, Role::Sampled);
            }
            if !self.thin_out() {
                return;
            }
        }
    }

    /// Holds a key from now on. Keys with few uses make room.
    fn hold(&mut self, key: u64) {
        while self.stack.len() >= self.sample.max_keys() {
            if !self.thin_out() {
                return;
            }
        }
        self.stack.hold(key);
        if self.stack.num_held() > self.sample.max_held() as u64 {
            self.reassign(|role| role == Role::Held);
        }
    }

    /// Halves the rate. False if it is as low as it may be.
    fn thin_out(&mut self) -> bool {
        let was_whole = self.sample.is_whole();
        if !self.sample.halve() {
            return false;
        }
        // A sampled key stands for others, which would be lost if it stood for itself from now on.
        self.reassign(|role| was_whole || role == Role::Held);
        self.counted.coarsen();
        self.sampled.coarsen();
        self.groups.iter_mut().for_each(|(hits, _)| hits.coarsen());
        true
    }

    /// Holds the keys with the most uses among those that may be held. Of the others, those in the
    /// sample stay.
    fn reassign(&mut self, may_hold: impl Fn(Role) -> bool) {
        let uses = self.stack.uses().filter(|&(role, _)| may_hold(role)).map(|(_, uses)| uses);
        let (threshold, sample) = (self.sample.threshold(uses), &self.sample);
        self.stack
            .reassign(|key, role, uses| sample.role(key, may_hold(role) && uses >= threshold));
    }

    /// Hit blocks at each of these capacities, rounded where they are estimated or weighed.
    pub fn hits(&self, capacities: &[u64]) -> Vec<u64> {
        self.weighed_hits(capacities).map(rounded).collect()
    }

    /// The share of looked-up blocks that are hits, at each of these capacities; 0 without lookups.
    pub fn hit_ratios(&self, capacities: &[u64]) -> Vec<f64> {
        self.weighed_hits(capacities).map(|hits| ratio(hits, self.weighed_lookups)).collect()
    }

    fn weighed_hits(&self, capacities: &[u64]) -> impl Iterator<Item = f64> {
        let (counted, sampled) = (self.counted.cumulated(), self.sampled.cumulated());
        let scale = ratio(self.weighed_lookups - self.counted_lookups, self.sampled_lookups);
        capacities.iter().map(move |&capacity| {
            let hits = counted.up_to(capacity) + sampled.up_to(capacity) * scale;
            hits.min(self.weighed_lookups)
        })
    }

    /// The standard error of the hit ratio at each of these capacities; 0 while the curve is exact.
    pub fn errors(&self, capacities: &[u64]) -> Vec<f64> {
        let sampled = self.sampled.cumulated();
        let groups: Vec<_> =
            self.groups.iter().map(|(hits, lookups)| (hits.cumulated(), *lookups)).collect();
        let of_all = ratio(self.weighed_lookups - self.counted_lookups, self.weighed_lookups);
        let not_in_sample = 1.0 - 1.0 / self.sample.weight() as f64;
        let num_groups = f64::from(NUM_GROUPS);
        let error = |&capacity: &u64| {
            let all = self.sampled_lookups;
            let sampled_ratio = ratio(sampled.up_to(capacity), all);
            let squares = groups.iter().map(|(hits, lookups)| {
                let difference = hits.up_to(capacity) - sampled_ratio * lookups;
                difference * difference
            });
            let variance = squares.sum::<f64>() * num_groups / (num_groups - 1.0) * not_in_sample;
            ratio(variance.sqrt(), all) * of_all
        };
        capacities.iter().map(error).collect()
    }

    /// The capacity from which on there are as many hits as without a bound.
    pub fn largest_capacity(&self) -> u64 {
        self.counted.largest_capacity().max(self.sampled.largest_capacity())
    }

    /// Requests served.
    pub fn num_requests(&self) -> u64 {
        self.num_requests
    }

    /// Blocks looked up, those of earlier turns in full.
    pub fn num_lookups(&self) -> u64 {
        self.num_lookups
    }

    /// Distinct blocks that are remembered; an estimate once the rate is below 1.
    pub fn num_unique(&self) -> u64 {
        self.stack.num_held() + self.stack.num_sampled() * self.sample.weight()
    }

    /// Keys that are watched.
    pub fn num_keys(&self) -> usize {
        self.stack.len()
    }

    /// The share of keys that is watched: 1 while the curve is exact.
    pub fn rate(&self) -> f64 {
        1.0 / self.sample.weight() as f64
    }

    /// Bytes of heap that the curve takes.
    pub fn memory_bytes(&self) -> usize {
        let groups: usize = self.groups.iter().map(|(hits, _)| hits.memory_bytes()).sum();
        self.stack.memory_bytes()
            + self.counted.memory_bytes()
            + self.sampled.memory_bytes()
            + groups
    }
}

/// What is known of a looked-up key.
struct Found {
    /// Whether it stands for itself alone.
    is_counted: bool,
    /// The capacity at which the cache holds this key and those before it; none: it holds a key at
    /// no capacity.
    needed: Option<u64>,
}

/// The capacities for hits that end at certain keys only: a key needs what the next end needs, and
/// keys behind the last end are no hits. `needed` begins behind `num_local` keys.
fn needed_for_ends(needed: &[Option<u64>], num_local: usize, ends: &[usize]) -> Vec<Option<u64>> {
    let mut for_ends = vec![None; needed.len()];
    let mut start = 0;
    for end in ends.iter().filter_map(|end| end.checked_sub(num_local)) {
        if end > start && end <= needed.len() {
            for_ends[start..end].fill(needed[end - 1]);
            start = end;
        }
    }
    for_ends
}

fn ratio(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a cast saturates")]
fn rounded(hits: f64) -> u64 {
    hits.round() as u64
}
