//! An array with one record for each block, in large pages if there are many.
//!
//! A large pool is visited at random, so in pages of 4 KiB nearly each visit also misses the
//! processor's address translations. A prefetch starts such a translation, and then the
//! instructions after it wait. With pages of 2 MiB they go on.

use std::ops::{Deref, DerefMut};

use bytemuck::Pod;
use memmap2::MmapMut;

/// The size of a large page. A smaller array stays on the heap.
const LARGE_PAGE_BYTES: usize = 2 << 20;

/// A slice whose length is fixed at construction.
#[derive(Debug)]
pub(crate) enum Records<T> {
    Heap(Vec<T>),
    /// The bytes of the records.
    Pages(MmapMut),
}

impl<T: Pod> Records<T> {
    /// `len` records whose bytes are all zero.
    pub(crate) fn zeroed(len: usize) -> Self {
        let bytes = len.saturating_mul(size_of::<T>());
        let pages = if bytes < LARGE_PAGE_BYTES { None } else { MmapMut::map_anon(bytes).ok() };
        let Some(pages) = pages else { return Self::Heap(vec![T::zeroed(); len]) };
        // The system gives the pages now, so that no step waits for them. If it refuses the first
        // advice, they are small. If it refuses the second, it gives each at its first visit.
        #[cfg(target_os = "linux")]
        for advice in [memmap2::Advice::HugePage, memmap2::Advice::PopulateWrite] {
            let _ = pages.advise(advice);
        }
        Self::Pages(pages)
    }

    /// The records that `records` yields.
    pub(crate) fn new(records: impl ExactSizeIterator<Item = T>) -> Self {
        let mut filled = Self::zeroed(records.len());
        for (place, record) in filled.iter_mut().zip(records) {
            *place = record;
        }
        filled
    }
}

impl<T: Pod> Clone for Records<T> {
    fn clone(&self) -> Self {
        let mut copy = Self::zeroed(self.len());
        copy.copy_from_slice(self);
        copy
    }
}

impl<T: Pod> Deref for Records<T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        match self {
            Self::Heap(records) => records,
            Self::Pages(bytes) => bytemuck::cast_slice(bytes),
        }
    }
}

impl<T: Pod> DerefMut for Records<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [T] {
        match self {
            Self::Heap(records) => records,
            Self::Pages(bytes) => bytemuck::cast_slice_mut(bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The fewest words that are in pages.
    const MANY: u32 = 1 << 19;

    #[test]
    fn records_are_in_pages_from_the_size_of_one() {
        assert!(matches!(Records::new(0..MANY), Records::Pages(_)));
        assert!(matches!(Records::new(0..MANY - 1), Records::Heap(_)));
        assert!(matches!(Records::<u32>::zeroed(0), Records::Heap(_)));
    }

    #[test]
    fn records_are_what_they_were_made_of_and_a_copy_is_another() {
        for num in [0, 1, MANY - 1, MANY, MANY + 1] {
            let mut records = Records::new(0..num);
            assert!(records.iter().copied().eq(0..num));
            assert!(Records::<u32>::zeroed(num as usize).iter().all(|&word| word == 0));
            let copy = records.clone();
            records.fill(7);
            assert!(copy.iter().copied().eq(0..num));
        }
    }
}
