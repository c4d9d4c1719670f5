//! Hits by the capacity that they need.

#![expect(clippy::cast_precision_loss, reason = "capacities stay below 2^53")]

/// Weights in bins of capacities, `1 << shift` capacities each. While a bin holds one capacity, the
/// histogram is exact.
#[derive(Clone, Debug, Default)]
pub(super) struct Histogram {
    /// Hits that need no capacity.
    free: f64,
    bins: Vec<f64>,
    shift: u32,
}

impl Histogram {
    pub(super) fn with_shift(shift: u32) -> Self {
        Self { shift, ..Self::default() }
    }

    /// Adds hits that need no capacity.
    pub(super) fn add_free(&mut self, weight: f64) {
        self.free += weight;
    }

    /// Adds hits that need a capacity of 1 or more.
    #[inline]
    pub(super) fn add(&mut self, capacity: u64, weight: f64) {
        let bin = usize::try_from((capacity - 1) >> self.shift).unwrap_or(usize::MAX);
        if bin >= self.bins.len() {
            self.bins.resize(bin + 1, 0.0);
        }
        self.bins[bin] += weight;
    }

    /// Doubles the capacities of a bin.
    pub(super) fn coarsen(&mut self) {
        self.bins = self.bins.chunks(2).map(|pair| pair.iter().sum()).collect();
        self.shift += 1;
    }

    /// Halves every weight.
    pub(super) fn halve(&mut self) {
        self.free /= 2.0;
        self.bins.iter_mut().for_each(|bin| *bin /= 2.0);
    }

    /// Number of capacities up to which hits are known.
    pub(super) fn largest_capacity(&self) -> u64 {
        (self.bins.len() as u64) << self.shift
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.bins.capacity() * size_of::<f64>()
    }

    /// The sums from the first bin on.
    pub(super) fn cumulated(&self) -> Cumulated {
        let mut sum = self.free;
        let to_sum = |&bin: &f64| {
            sum += bin;
            sum
        };
        Cumulated {
            free: self.free,
            sums: self.bins.iter().map(to_sum).collect(),
            shift: self.shift,
        }
    }
}

/// Hits up to a capacity.
pub(super) struct Cumulated {
    free: f64,
    sums: Vec<f64>,
    shift: u32,
}

impl Cumulated {
    /// Hits that need at most `capacity`: whole bins, and of the next one its share.
    pub(super) fn up_to(&self, capacity: u64) -> f64 {
        let num_bins = capacity >> self.shift;
        let whole = self.sum(num_bins);
        let share = (capacity - (num_bins << self.shift)) as f64 / (1_u64 << self.shift) as f64;
        whole + (self.sum(num_bins.saturating_add(1)) - whole) * share
    }

    fn sum(&self, num_bins: u64) -> f64 {
        let last = self.sums.len().min(usize::try_from(num_bins).unwrap_or(usize::MAX));
        if last == 0 { self.free } else { self.sums[last - 1] }
    }
}
