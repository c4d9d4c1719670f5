"""Memory for the checksums that the kernels return: on the device, and pinned on the host.

The kernels add to the sums on the device, and a copy carries them to the host. So the sums of a job
stay in place until it has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
import numpy.typing as npt

from kvstow.transfer.cuda.interface import Runtime

SUM_BYTES = 8


class SumRing:
    """Memory for the sums of one mover's jobs in one direction, which take turns through it."""

    def __init__(self, runtime: Runtime, capacity: int) -> None:
        """Allocate the memory.

        Args:
            runtime: the device.
            capacity: blocks of the largest job, which fits once it is the only one.
        """
        self._capacity = capacity
        with ExitStack() as built:
            self._host = runtime.allocate_mapped(SUM_BYTES * capacity)
            built.callback(runtime.free_mapped, self._host)
            self._device = runtime.allocate(SUM_BYTES * capacity)
            built.callback(runtime.free, self._device)
            self._allocated = built.pop_all()

    def room_for(self, num: int, reserved: Sequence[tuple[int, int]]) -> int | None:
        """Return where the sums of `num` blocks begin; return None while there is no room.

        Args:
            num: blocks of the job.
            reserved: (begin, blocks) of each job in flight, the oldest first. They are not kept
                here, because an interrupt could then lose one.
        """
        if not reserved:
            return 0
        oldest, newest = reserved[0][0], sum(reserved[-1])
        is_wrapped = newest <= oldest
        fits_behind = not is_wrapped and newest + num <= self._capacity
        first = newest if is_wrapped or fits_behind else 0
        return None if not fits_behind and first + num > oldest else first

    def device_address(self, position: int) -> int:
        """Return the device address of the sum at a position."""
        return self._device + SUM_BYTES * position

    def host_address(self, position: int) -> int:
        """Return the host address to copy the sum at a position to."""
        return int(self._host.host.ctypes.data) + SUM_BYTES * position

    def sums(self, first: int, num: int) -> npt.NDArray[np.uint64]:
        """Return the sums of a job, after they were copied to the host."""
        return self._host.host.view(np.uint64)[first : first + num].copy()

    def close(self) -> None:
        """Free the memory. No job may be in flight."""
        self._allocated.close()
