//! The copies of one job: check every pair, then copy.

use std::ptr;
use std::slice;

use crate::memory::{Error, Region, Rows, Slots};
use crate::stream;

/// A block and the slot that holds it, or will.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pair {
    /// The block, in every region.
    pub block: usize,
    /// The slot.
    pub slot: usize,
}

/// How the bytes of a job are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stores {
    /// Into the caches. For a job that is much smaller than they are.
    Plain,
    /// Past the caches, to memory.
    Streaming,
}

/// Bytes that are summed up and then copied. They stay in the first-level cache in between.
const CHUNK_BYTES: usize = 16 << 10;

/// Copies the blocks to the slots.
///
/// # Errors
///
/// A pair is outside the memory, the blocks do not fit in a slot, or memory is shared. Then nothing
/// was copied.
pub fn store(
    regions: &[Region<'_>],
    slots: &Slots<'_>,
    pairs: &[Pair],
    stores: Stores,
) -> Result<(), Error> {
    each_fragment(regions, slots, pairs, |block, slot, num_bytes, _| {
        // SAFETY: `each_fragment` has checked both sides.
        unsafe { copy(slot, block, num_bytes, stores) };
    })
}

/// Copies the slots to the blocks.
///
/// # Errors
///
/// As [`store`].
pub fn load(
    regions: &[Region<'_>],
    slots: &Slots<'_>,
    pairs: &[Pair],
    stores: Stores,
) -> Result<(), Error> {
    each_fragment(regions, slots, pairs, |block, slot, num_bytes, _| {
        // SAFETY: `each_fragment` has checked both sides.
        unsafe { copy(block, slot, num_bytes, stores) };
    })
}

/// Copies the blocks to the slots, and returns the CRC-32 of each slot, its rest included.
///
/// Each byte is read from memory once. The sum is that of the bytes as they were read: if another
/// thread changes a block meanwhile, the slot may differ from its sum, and a later check says so.
///
/// # Errors
///
/// As [`store`].
pub fn store_with_checksums(
    regions: &[Region<'_>],
    slots: &Slots<'_>,
    pairs: &[Pair],
    stores: Stores,
) -> Result<Vec<u32>, Error> {
    let mut sums = vec![crc32fast::Hasher::new(); pairs.len()];
    each_fragment(regions, slots, pairs, |block, slot, num_bytes, pair_id| {
        for at in (0..num_bytes).step_by(CHUNK_BYTES) {
            let chunk_bytes = CHUNK_BYTES.min(num_bytes - at);
            // SAFETY: within the fragment.
            let from = unsafe { block.add(at) };
            // SAFETY: within the fragment.
            let to = unsafe { slot.add(at) };
            // SAFETY: `each_fragment` has checked it. No code of this thread writes it before the
            // slice is gone.
            sums[pair_id].update(unsafe { slice::from_raw_parts(from, chunk_bytes) });
            // SAFETY: `each_fragment` has checked both sides.
            unsafe { copy(to, from, chunk_bytes, stores) };
        }
    })?;
    let block_bytes = regions.iter().map(|region| region.0.width).sum();
    for (sum, pair) in sums.iter_mut().zip(pairs) {
        // SAFETY: `each_fragment` has checked the slot, and that a block fits in it.
        let rest = unsafe { slots.0.pointer(pair.slot, block_bytes) };
        // SAFETY: up to the end of the slot. Nothing writes it before the slice is gone.
        sum.update(unsafe { slice::from_raw_parts(rest, slots.0.width - block_bytes) });
    }
    Ok(sums.into_iter().map(crc32fast::Hasher::finalize).collect())
}

/// Visits every fragment: its address in the block and in the slot, its bytes, its pair's position.
///
/// Both addresses may be read and written for that many bytes, and the two do not overlap. Visits
/// nothing if the job is refused.
fn each_fragment(
    regions: &[Region<'_>],
    slots: &Slots<'_>,
    pairs: &[Pair],
    mut visit: impl FnMut(*mut u8, *mut u8, usize, usize),
) -> Result<(), Error> {
    slots.check(regions)?;
    check_pairs(regions, slots, pairs)?;
    for (pair_id, pair) in pairs.iter().enumerate() {
        let mut offset = 0;
        for Region(rows) in regions {
            // SAFETY: `check_pairs` has checked the block.
            let block = unsafe { rows.pointer(pair.block, 0) };
            // SAFETY: `check_pairs` has checked the slot, and `check` that all regions fit in it.
            let slot = unsafe { slots.0.pointer(pair.slot, offset) };
            visit(block, slot, rows.width, pair_id);
            offset += rows.width;
        }
    }
    stream::fence();
    Ok(())
}

fn check_pairs(
    regions: &[Region<'_>],
    Slots(slots): &Slots<'_>,
    pairs: &[Pair],
) -> Result<(), Error> {
    let outside = |rows: &Rows<'_>, id: usize| id >= rows.count;
    let shortest = regions.iter().enumerate().min_by_key(|(_, region)| region.0.count);
    for &Pair { block, slot } in pairs {
        if outside(slots, slot) {
            return Err(Error::NoSuchSlot { slot, last: slots.count.saturating_sub(1) });
        }
        if let Some((region, Region(rows))) = shortest
            && outside(rows, block)
        {
            let last = rows.count.saturating_sub(1);
            return Err(Error::NoSuchBlock { block, last, region });
        }
    }
    Ok(())
}

/// # Safety
///
/// `source` may be read and `target` written for `num_bytes`, and the two do not overlap.
unsafe fn copy(target: *mut u8, source: *const u8, num_bytes: usize, stores: Stores) {
    match stores {
        // SAFETY: the caller's promise.
        Stores::Plain => unsafe { ptr::copy_nonoverlapping(source, target, num_bytes) },
        // SAFETY: the caller's promise.
        Stores::Streaming => unsafe { stream::stream(target, source, num_bytes) },
    }
}
