//! The two sides of a copy, each within the memory that it was checked against.

use std::cell::Cell;
use std::ops::Range;

/// Why a job was refused. Nothing was copied.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The rows of a region or an arena reach past the end of its memory.
    #[error(
        "{num_rows} rows of {row_bytes} bytes, {stride} bytes apart, do not fit in {memory_bytes} \
         bytes of memory; pass memory up to the end of the last row"
    )]
    TooLittleMemory {
        /// Blocks of a region, or slots.
        num_rows: usize,
        /// Bytes from the start of a row to the start of the next.
        stride: usize,
        /// Bytes of a row.
        row_bytes: usize,
        /// Bytes of the memory.
        memory_bytes: usize,
    },
    /// The rows of a region or an arena overlap.
    #[error(
        "rows of {row_bytes} bytes begin {stride} bytes apart, so each overlaps the next; pass a \
         stride of at least {row_bytes}"
    )]
    ShortStride {
        /// Bytes from the start of a row to the start of the next.
        stride: usize,
        /// Bytes of a row.
        row_bytes: usize,
    },
    /// The blocks of all regions do not fit in a slot.
    #[error(
        "a block has {block_bytes} bytes in all regions, but a slot has {slot_bytes}; build slots \
         that are at least as large"
    )]
    SlotTooSmall {
        /// Bytes of a block over all regions.
        block_bytes: usize,
        /// Bytes of a slot.
        slot_bytes: usize,
    },
    /// A region and the slots share memory.
    #[error("region {region} shares memory with the slots; give the slots memory of their own")]
    SharedMemory {
        /// Position of the region.
        region: usize,
    },
    /// A block id outside of a region.
    #[error("block {block} is outside 0 to {last} of region {region}; pass ids of this pool")]
    NoSuchBlock {
        /// The block id.
        block: usize,
        /// The largest block id of the region.
        last: usize,
        /// Position of the region.
        region: usize,
    },
    /// A slot outside of the arena.
    #[error("slot {slot} is outside 0 to {last}; pass slots of this arena")]
    NoSuchSlot {
        /// The slot.
        slot: usize,
        /// The largest slot.
        last: usize,
    },
}

/// `count` rows of `width` bytes in one memory. Row `i` begins at `i * stride`.
#[derive(Clone, Copy)]
pub(crate) struct Rows<'a> {
    cells: &'a [Cell<u8>],
    pub(crate) count: usize,
    stride: usize,
    pub(crate) width: usize,
}

impl<'a> Rows<'a> {
    fn new(
        cells: &'a [Cell<u8>],
        num_rows: usize,
        stride: usize,
        row_bytes: usize,
    ) -> Result<Self, Error> {
        let end = match num_rows.checked_sub(1) {
            None => Some(0),
            Some(last) => last.checked_mul(stride).and_then(|start| start.checked_add(row_bytes)),
        };
        if end.is_none_or(|end| end > cells.len()) {
            let memory_bytes = cells.len();
            return Err(Error::TooLittleMemory { num_rows, stride, row_bytes, memory_bytes });
        }
        // A single row has no next one, and arrays of one row may have any stride.
        if num_rows > 1 && stride < row_bytes {
            return Err(Error::ShortStride { stride, row_bytes });
        }
        Ok(Self { cells, count: num_rows, stride, width: row_bytes })
    }

    /// Returns the address of a byte: `offset` bytes into a row.
    ///
    /// The pointer may be used for the rest of the row, for as long as `'a`.
    ///
    /// # Safety
    ///
    /// `row` is below `count`, and `offset` is at most `width`.
    pub(crate) unsafe fn pointer(&self, row: usize, offset: usize) -> *mut u8 {
        let start = self.cells.as_ptr().cast::<u8>().cast_mut();
        // SAFETY: `new` has checked that the last row ends within `cells`. So neither the product
        // nor the sum overflows, and both stay within the slice.
        unsafe { start.add(row * self.stride + offset) }
    }

    fn addresses(&self) -> Range<usize> {
        let range = self.cells.as_ptr_range();
        range.start.addr()..range.end.addr()
    }

    fn shares_memory(&self, other: &Rows<'_>) -> bool {
        let (a, b) = (self.addresses(), other.addresses());
        a.start < b.end && b.start < a.end
    }
}

/// One region of a layout: the bytes of every block in one layer.
#[derive(Clone, Copy)]
pub struct Region<'a>(pub(crate) Rows<'a>);

impl<'a> Region<'a> {
    /// Returns the region whose block `i` is the `block_bytes` bytes from `i * stride`.
    ///
    /// # Errors
    ///
    /// [`Error::TooLittleMemory`] if a block reaches past the end of `cells`;
    /// [`Error::ShortStride`] if blocks overlap.
    pub fn new(
        cells: &'a [Cell<u8>],
        num_blocks: usize,
        stride: usize,
        block_bytes: usize,
    ) -> Result<Self, Error> {
        Rows::new(cells, num_blocks, stride, block_bytes).map(Self)
    }
}

/// The slots of an arena. A slot holds one block of every region, in their order, then a rest.
#[derive(Clone, Copy)]
pub struct Slots<'a>(pub(crate) Rows<'a>);

impl<'a> Slots<'a> {
    /// Returns the slots of which slot `i` is the `slot_bytes` bytes from `i * stride`.
    ///
    /// # Errors
    ///
    /// [`Error::TooLittleMemory`] if a slot reaches past the end of `cells`;
    /// [`Error::ShortStride`] if slots overlap.
    pub fn new(
        cells: &'a [Cell<u8>],
        num_slots: usize,
        stride: usize,
        slot_bytes: usize,
    ) -> Result<Self, Error> {
        Rows::new(cells, num_slots, stride, slot_bytes).map(Self)
    }

    /// Refuses regions that do not fit in a slot, or that share memory with the slots.
    pub(crate) fn check(&self, regions: &[Region<'_>]) -> Result<(), Error> {
        let block_bytes =
            regions.iter().try_fold(0_usize, |sum, region| sum.checked_add(region.0.width));
        let slot_bytes = self.0.width;
        if block_bytes.is_none_or(|bytes| bytes > slot_bytes) {
            let block_bytes = block_bytes.unwrap_or(usize::MAX);
            return Err(Error::SlotTooSmall { block_bytes, slot_bytes });
        }
        match regions.iter().position(|region| region.0.shares_memory(&self.0)) {
            Some(region) => Err(Error::SharedMemory { region }),
            None => Ok(()),
        }
    }
}
