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
/// lookup draws its key to be held, and keys with few uses make room for others.
///
/// ```text
///   hits(C) = hits of held keys
///           + lookups of other keys x (hits of sampled keys / lookups of sampled keys)
/// ```
#[derive(Clone, Debug)]
pub struct HitCurve {
    sample: Sample,
    stack: LruStack,
    /// Hits of held keys, and of all keys while the sample is whole.
    counted: Histogram,
    /// Hits of sampled keys, each with the weight of its key.
    sampled: Histogram,
    /// Lookups of the same keys.
    num_counted_lookups: u64,
    /// Lookups of sampled keys, each with the weight of its key.
    sampled_lookups: u64,
    /// `sampled` and `sampled_lookups`, by group.
    groups: Vec<(Histogram, u64)>,
    num_requests: u64,
    num_lookups: u64,
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
        let group = (Histogram::with_shift(GROUP_SHIFT), 0);
        Ok(Self {
            sample: Sample::new(max_keys, config.seed)?,
            stack: LruStack::with_room(max_keys.unwrap_or(0))?,
            counted: Histogram::default(),
            sampled: Histogram::default(),
            num_counted_lookups: 0,
            sampled_lookups: 0,
            groups: vec![group; NUM_GROUPS.into()],
            num_requests: 0,
            num_lookups: 0,
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
        let num_new = keys.len().min(self.sample.max_keys() - self.stack.len());
        self.stack.make_room(keys.len(), num_new)?;
        self.look_up(keys);
        for (at, &key) in (self.num_lookups..).zip(keys.iter().rev()) {
            if self.sample.draws(at) {
                self.hold(key);
            } else if !self.stack.touch(key) {
                self.watch(key);
            }
        }
        self.num_requests += 1;
        self.num_lookups += keys.len() as u64;
        Ok(())
    }

    fn look_up(&mut self, keys: &[u64]) {
        let weight = self.sample.weight();
        // A block is no hit before all blocks above it are; in true chains they always are.
        let (mut capacity, mut is_prefix) = (0, true);
        for &key in keys {
            let place = self.stack.find(key);
            let is_member = self.sample.has(key);
            if let Some(place) = place {
                let num_above = place.num_held_above + place.num_sampled_above * weight;
                capacity = capacity.max(num_above + 1);
            } else if is_member {
                is_prefix = false;
            }
            let is_hit = is_prefix && place.is_some();
            if self.sample.is_whole() || place.is_some_and(|place| place.role == Role::Held) {
                self.num_counted_lookups += 1;
                if is_hit {
                    self.counted.add(capacity, 1);
                }
            } else if is_member {
                let (hits, lookups) = &mut self.groups[self.sample.group(key, NUM_GROUPS)];
                self.sampled_lookups += weight;
                *lookups += weight;
                if is_hit {
                    self.sampled.add(capacity, weight);
                    hits.add(capacity, weight);
                }
            }
        }
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

    /// Hit blocks at each of these capacities, rounded where they are estimated.
    pub fn hits(&self, capacities: &[u64]) -> Vec<u64> {
        let (counted, sampled) = (self.counted.cumulated(), self.sampled.cumulated());
        let others = self.num_lookups - self.num_counted_lookups;
        let scale = ratio(others, self.sampled_lookups);
        let hits = |&capacity: &u64| {
            let hits = counted.up_to(capacity) + sampled.up_to(capacity) * scale;
            rounded(hits).min(self.num_lookups)
        };
        capacities.iter().map(hits).collect()
    }

    /// The standard error of the hit ratio at each of these capacities; 0 while the curve is exact.
    pub fn errors(&self, capacities: &[u64]) -> Vec<f64> {
        let sampled = self.sampled.cumulated();
        let groups: Vec<_> =
            self.groups.iter().map(|(hits, lookups)| (hits.cumulated(), *lookups as f64)).collect();
        let others = self.num_lookups - self.num_counted_lookups;
        let of_all = ratio(others, self.num_lookups);
        let not_in_sample = 1.0 - 1.0 / self.sample.weight() as f64;
        let num_groups = f64::from(NUM_GROUPS);
        let error = |&capacity: &u64| {
            if self.sampled_lookups == 0 {
                return 0.0;
            }
            let lookups = self.sampled_lookups as f64;
            let sampled_ratio = sampled.up_to(capacity) / lookups;
            let squares = groups.iter().map(|(hits, lookups)| {
                let difference = hits.up_to(capacity) - sampled_ratio * lookups;
                difference * difference
            });
            let variance = squares.sum::<f64>() * num_groups / (num_groups - 1.0) * not_in_sample;
            variance.sqrt() / lookups * of_all
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

    /// Blocks looked up.
    pub fn num_lookups(&self) -> u64 {
        self.num_lookups
    }

    /// Distinct blocks looked up; an estimate once the rate is below 1.
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

fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a cast saturates")]
fn rounded(hits: f64) -> u64 {
    hits.round() as u64
}
