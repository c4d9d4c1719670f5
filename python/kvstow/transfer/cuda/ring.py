"""Block ids that kernels read where they lie, in pinned host memory, and checksums coming back.

An upload of the ids would queue behind bulk loads in the copy engine. But what a kernel reads in
host memory it reads when it runs, not when it is launched: so what a job has written stays until
the job has ended.
"""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack

import numpy as np
import numpy.typing as npt

from kvstow.transfer.cuda.interface import MappedMemory, Runtime
from kvstow.transfer.mover import Index

__all__ = ["SUM_BYTES", "IdRing"]

SUM_BYTES = 8
_ID_BYTES = 4


class IdRing:
    """Room for the ids of one mover's jobs in one direction, given back in the order taken."""

    def __init__(self, runtime: Runtime, capacity: int, *, checksums: bool) -> None:
        """Allocate it.

        Args:
            runtime: the device.
            capacity: blocks of the largest job, which always finds room once it is the only one.
            checksums: have 8 bytes a block for them, on the device and on the host.
        """
        self._capacity = capacity
        self._taken: deque[tuple[int, int]] = deque()  # [begin, end) of each job, oldest first
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

    def take(self, block_ids: Index) -> int | None:
        """Write a job's ids; where they begin, or None while there is no room."""
        num = len(block_ids)
        first = 0
        if self._taken:
            oldest, newest = self._taken[0][0], self._taken[-1][1]
            is_wrapped = newest <= oldest
            fits_behind = not is_wrapped and newest + num <= self._capacity
            first = newest if is_wrapped or fits_behind else 0
            if not fits_behind and first + num > oldest:
                return None
        self._ids.host.view(np.int32)[first : first + num] = block_ids
        self._taken.append((first, first + num))
        return first

    def give_back(self) -> None:
        """The oldest job has ended."""
        self._taken.popleft()

    def ids_address(self, position: int) -> int:
        """Where kernels find the id at a position."""
        return self._ids.device_address + _ID_BYTES * position

    def sums_address(self, position: int) -> int:
        """Where kernels add up the checksum of the block at a position; 0 without checksums."""
        return self._device_sums and self._device_sums + SUM_BYTES * position

    def host_sums_address(self, position: int) -> int:
        """Where they are to be copied to."""
        assert self._sums is not None
        return self._sums.host.ctypes.data + SUM_BYTES * position

    def sums(self, first: int, num: int) -> npt.NDArray[np.uint64]:
        """The checksums of a job, once they were copied."""
        assert self._sums is not None
        return self._sums.host.view(np.uint64)[first : first + num].copy()

    def close(self) -> None:
        """Give the memory back, once no job is in flight."""
        self._allocated.close()
