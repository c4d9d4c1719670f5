"""Pinned host memory for the block ids that kernels read, and for the checksums that they return.

An upload of the ids would queue behind bulk loads in the copy engine. But a kernel reads host
memory when it runs, not when it is launched. So the ids of a job stay in place until it has ended.
"""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack

import numpy as np
import numpy.typing as npt

from kvstow.transfer.cuda.interface import MappedMemory, Runtime
from kvstow.transfer.mover import Index

SUM_BYTES = 8
_ID_BYTES = 4


class IdRing:
    """Memory for the ids of one mover's jobs in one direction, freed as it was reserved."""

    def __init__(self, runtime: Runtime, capacity: int, *, checksums: bool) -> None:
        """Allocate the memory.

        Args:
            runtime: the device.
            capacity: blocks of the largest job, which fits once it is the only one.
            checksums: whether to allocate 8 bytes per block, on the device and on the host.
        """
        self._capacity = capacity
        self._reserved: deque[tuple[int, int]] = deque()  # [begin, end) of each job, oldest first
        with ExitStack() as built:

            def mapped(num_bytes: int) -> MappedMemory:
                memory = runtime.allocate_mapped(num_bytes)
                built.callback(runtime.free_mapped, memory)
                return memory

            self._ids = mapped(_ID_BYTES * capacity)
            self._sums = mapped(SUM_BYTES * capacity) if checksums else None
            self._device_sums = 0
            if checksums:
                self._device_sums = runtime.allocate(SUM_BYTES * capacity)
                built.callback(runtime.free, self._device_sums)
            self._allocated = built.pop_all()

    def reserve(self, block_ids: Index) -> int | None:
        """Write a job's ids, and return where they begin; return None while there is no room."""
        num = len(block_ids)
        first = 0
        if self._reserved:
            oldest, newest = self._reserved[0][0], self._reserved[-1][1]
            is_wrapped = newest <= oldest
            fits_behind = not is_wrapped and newest + num <= self._capacity
            first = newest if is_wrapped or fits_behind else 0
            if not fits_behind and first + num > oldest:
                return None
        self._ids.host.view(np.int32)[first : first + num] = block_ids
        self._reserved.append((first, first + num))
        return first

    def free_oldest(self) -> None:
        """Free the ids of the oldest job, which has ended."""
        self._reserved.popleft()

    def ids_address(self, position: int) -> int:
        """Return the device address of the id at a position."""
        return self._ids.device_address + _ID_BYTES * position

    def sums_address(self, position: int) -> int:
        """Return the device address of the checksum at a position; 0 without checksums."""
        return self._device_sums and self._device_sums + SUM_BYTES * position

    def host_sums_address(self, position: int) -> int:
        """Return the host address to copy the checksum at a position to."""
        assert self._sums is not None
        return self._sums.host.ctypes.data + SUM_BYTES * position

    def sums(self, first: int, num: int) -> npt.NDArray[np.uint64]:
        """Return the checksums of a job, after they were copied to the host."""
        assert self._sums is not None
        return self._sums.host.view(np.uint64)[first : first + num].copy()

    def close(self) -> None:
        """Free the memory. No job may be in flight."""
        self._allocated.close()
