//! Copies of blocks in host memory, without the interpreter lock.

use std::cell::Cell;

use kvstow_copy::{self as copy, Error, Pair, Region, Slots, Stores, ThisThread};
use numpy::{IntoPyArray, PyArray1};
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;

use crate::convert::{Count, listed, places};
use crate::error::{ConfigError, InvalidBlock, StateError};

/// Copies blocks between the regions of a layout and the slots of an arena.
///
/// A copy runs without the interpreter lock, and its stores bypass the caches. A brief one keeps
/// the lock, and stores into the caches. While the copier lives, its buffers can be neither resized
/// nor released.
///
/// Each call checks all pairs before it copies the first, so one that raises has changed nothing.
///
/// Args:
///     regions: (memory, block_stride_bytes, block_bytes) for each region, in the order of a slot.
///         The memory is a writable, contiguous buffer of uint8 that begins with block 0.
///     num_blocks: blocks in every region.
///     slots: the memory of the arena, such a buffer.
///     slot_stride_bytes: bytes from the start of one slot to the next.
///     slot_bytes: bytes of a slot that a checksum covers.
///     num_slots: slots of the arena.
///
/// Raises:
///     ConfigError: an object is not such a buffer, the rows reach past their memory or overlap, a
///         block does not fit in a slot, or a region shares memory with the slots.
#[pyclass(frozen, module = "kvstow._core")]
pub(crate) struct BlockCopier {
    regions: Vec<Memory>,
    num_blocks: usize,
    slots: Memory,
    num_slots: usize,
}

/// A buffer, and the rows in it. Python keeps the memory while the buffer is held.
struct Memory {
    buffer: PyBuffer<u8>,
    stride: usize,
    row_bytes: usize,
}

impl Memory {
    fn new(object: &Bound<'_, PyAny>, stride: Count, row_bytes: Count) -> PyResult<Self> {
        let buffer: PyBuffer<u8> = PyBuffer::get(object).map_err(|error| {
            ConfigError::new_err(format!("got {}, not memory: {error}", object.get_type()))
        })?;
        Ok(Self { buffer, stride: stride.0, row_bytes: row_bytes.0 })
    }

    fn cells<'py>(&'py self, py: Python<'py>) -> PyResult<&'py [Cell<u8>]> {
        // The buffer keeps the memory. It does not keep other threads from writing it, which is why
        // pyo3 deprecates this. The head of kvstow_copy says what such a race can do, and what
        // prevents it. Any other way to the memory takes unsafe code, which this crate forbids.
        #[expect(deprecated, reason = "other threads may write the memory; see above")]
        self.buffer.as_mut_slice(py).ok_or_else(|| {
            ConfigError::new_err("a buffer is read-only or not contiguous: pass a writable array")
        })
    }

    fn region<'py>(&'py self, py: Python<'py>, num_blocks: usize) -> PyResult<Region<'py>> {
        Region::new(self.cells(py)?, num_blocks, self.stride, self.row_bytes).map_err(to_py)
    }
}

#[pymethods]
impl BlockCopier {
    #[new]
    fn new(
        #[pyo3(from_py_with = listed)] regions: Vec<Bound<'_, PyAny>>,
        num_blocks: Count,
        slots: &Bound<'_, PyAny>,
        slot_stride_bytes: Count,
        slot_bytes: Count,
        num_slots: Count,
    ) -> PyResult<Self> {
        let regions = regions.iter().map(|region| {
            let (memory, stride, block_bytes): (Bound<'_, PyAny>, Count, Count) =
                region.extract()?;
            Memory::new(&memory, stride, block_bytes)
        });
        let copier = Self {
            regions: regions.collect::<PyResult<_>>()?,
            num_blocks: num_blocks.0,
            slots: Memory::new(slots, slot_stride_bytes, slot_bytes)?,
            num_slots: num_slots.0,
        };
        // An empty job is refused for all reasons but its ids.
        copier.run(slots.py(), true, |regions, slots, stores| {
            copy::store(regions, slots, &[], stores)
        })?;
        Ok(copier)
    }

    /// Copy block `block_ids[i]` to slot `host_slots[i]`, for every i.
    ///
    /// Raises:
    ///     InvalidBlock: a block or slot is out of range.
    ///     ConfigError: the arguments are not ids, or differ in number.
    #[pyo3(signature = (block_ids, host_slots, *, brief = false))]
    fn store(
        &self,
        block_ids: &Bound<'_, PyAny>,
        host_slots: &Bound<'_, PyAny>,
        brief: bool,
    ) -> PyResult<()> {
        let (pairs, _) = pairs(block_ids, host_slots, brief)?;
        self.run(block_ids.py(), brief, |regions, slots, stores| {
            copy::store(regions, slots, &pairs, stores)
        })
    }

    /// Copy slot `host_slots[i]` to block `block_ids[i]`, for every i.
    ///
    /// Raises:
    ///     InvalidBlock: as `store`.
    ///     ConfigError: as `store`.
    #[pyo3(signature = (host_slots, block_ids, *, brief = false))]
    fn load(
        &self,
        host_slots: &Bound<'_, PyAny>,
        block_ids: &Bound<'_, PyAny>,
        brief: bool,
    ) -> PyResult<()> {
        let (pairs, _) = pairs(block_ids, host_slots, brief)?;
        self.run(block_ids.py(), brief, |regions, slots, stores| {
            copy::load(regions, slots, &pairs, stores)
        })
    }

    /// Copy as `store`, and return the CRC-32 of each slot, of all its `slot_bytes`.
    ///
    /// Each byte of a block is read once.
    ///
    /// Raises:
    ///     InvalidBlock: as `store`.
    ///     ConfigError: as `store`.
    #[pyo3(signature = (block_ids, host_slots, *, brief = false))]
    fn store_with_checksums<'py>(
        &self,
        block_ids: &Bound<'py, PyAny>,
        host_slots: &Bound<'py, PyAny>,
        brief: bool,
    ) -> PyResult<Bound<'py, PyArray1<u32>>> {
        let (pairs, positions) = pairs(block_ids, host_slots, brief)?;
        let sums = self.run(block_ids.py(), brief, |regions, slots, stores| {
            copy::store_with_checksums(regions, slots, &pairs, stores)
        })?;
        let mut in_order = vec![0; sums.len()];
        for (sum, position) in sums.into_iter().zip(positions) {
            in_order[position] = sum;
        }
        Ok(in_order.into_pyarray(block_ids.py()))
    }
}

impl BlockCopier {
    /// Calls with the memory, and without the interpreter lock unless the job is brief.
    fn run<R: Send>(
        &self,
        py: Python<'_>,
        brief: bool,
        call: impl FnOnce(&[Region<'_>], &Slots<'_>, Stores) -> Result<R, Error> + Send,
    ) -> PyResult<R> {
        let regions = self.regions.iter().map(|memory| memory.region(py, self.num_blocks));
        let regions = regions.collect::<PyResult<Vec<_>>>()?;
        let Memory { stride, row_bytes, .. } = self.slots;
        let cells = self.slots.cells(py)?;
        let slots = Slots::new(cells, self.num_slots, stride, row_bytes).map_err(to_py)?;
        if brief {
            return call(&regions, &slots, Stores::Plain).map_err(to_py);
        }
        let memory = ThisThread::new((&regions[..], &slots));
        let copied = py.detach(move || {
            memory.get().map(|(regions, slots)| call(regions, slots, Stores::Streaming))
        });
        // `detach` calls on the same thread.
        let Some(copied) = copied else {
            return Err(StateError::new_err("the copy ran on another thread: report this"));
        };
        copied.map_err(to_py)
    }
}

/// The pairs of a job, and the position of each in the caller's order.
///
/// Pairs of a longer job are in the order of their slots. So the copies walk the arena in one
/// direction.
fn pairs(
    block_ids: &Bound<'_, PyAny>,
    host_slots: &Bound<'_, PyAny>,
    brief: bool,
) -> PyResult<(Vec<Pair>, Vec<usize>)> {
    let (blocks, slots) = (places(block_ids, "block_ids")?, places(host_slots, "host_slots")?);
    if blocks.len() != slots.len() {
        return Err(ConfigError::new_err(format!(
            "{} block_ids but {} host_slots; pass one slot for each block",
            blocks.len(),
            slots.len()
        )));
    }
    let mut positions: Vec<usize> = (0..slots.len()).collect();
    if !brief && !slots.is_sorted() {
        positions.sort_unstable_by_key(|&position| slots[position]);
    }
    let pair = |&position: &usize| Pair { block: blocks[position], slot: slots[position] };
    Ok((positions.iter().map(pair).collect(), positions))
}

fn to_py(error: Error) -> PyErr {
    let message = error.to_string();
    match error {
        Error::NoSuchBlock { .. } | Error::NoSuchSlot { .. } => InvalidBlock::new_err(message),
        _ => ConfigError::new_err(message),
    }
}
