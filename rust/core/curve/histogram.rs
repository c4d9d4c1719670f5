//! Hits by the capacity that they need.

#![expect(clippy::cast_precision_loss, reason = "numbers of lookups stay below 2^53")]

/// Weights in bins of capacities, `1 << shift` capacities each. While a bin holds one capacity, the
/// histogram is exact.
#[derive(Clone, Debug, Default)]
pub(super) struct Histogram {
    bins: Vec<u64>,
    shift: u32,
    total: u64,
}

impl Histogram {
    pub(super) fn with_shift(shift: u32) -> Self {
        Self { shift, ..Self::default() }
    }

    /// Adds hits that need a capacity of 1 or more.
    #[inline]
    pub(super) fn add(&mut self, capacity: u64, weight: u64) {
        let bin = usize::try_from((capacity - 1) >> self.shift).unwrap_or(usize::MAX);
        if bin >= self.bins.len() {
            self.bins.resize(bin + 1, 0);
        }
        self.bins[bin] += weight;
        self.total += weight;
    }

    /// Doubles the capacities of a bin.
    pub(super) fn coarsen(&mut self) {
        self.bins = self.bins.chunks(2).map(|pair| pair.iter().sum()).collect();
        self.shift += 1;
    }

    /// Number of capacities up to which hits are known.
    pub(super) fn largest_capacity(&self) -> u64 {
        (self.bins.len() as u64) << self.shift
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.bins.capacity() * size_of::<u64>()
    }

    /// The sums from the first bin on.
    pub(super) fn cumulated(&self) -> Cumulated {
        let mut sum = 0;
        let to_sum = |&bin: &u64| {
            sum += bin;
            sum
        };
        Cumulated { sums: self.bins.iter().map(to_sum).collect(), shift: self.shift }
    }
}

/// Hits up to a capacity.
pub(super) struct Cumulated {
    sums: Vec<u64>,
    shift: u32,
}

impl Cumulated {
    /// Hits that need at most `capacity`: whole bins, and of the next one its share.
    pub(super) fn up_to(&self, capacity: u64) -> f64 {
        let num_bins = capacity >> self.shift;
        let whole = self.sum(num_bins);
        let share = (capacity - (num_bins << self.shift)) as f64 / (1_u64 << self.shift) as f64;
        whole as f64 + (self.sum(num_bins.saturating_add(1)) - whole) as f64 * share
    }

    fn sum(&self, num_bins: u64) -> u64 {
        let last = self.sums.len().min(usize::try_from(num_bins).unwrap_or(usize::MAX));
        if last == 0 { 0 } else { self.sums[last - 1] }
    }
}
