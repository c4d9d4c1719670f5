"""An arena over memory that another part of this process owns."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from kvstow._core import ConfigError
from kvstow.transfer.arena import SLOT_ALIGNMENT_BYTES, HostArena


class BorrowedArena(HostArena):
    """The rows of a memory as host slots.

    The owner keeps the memory mapped until all jobs of movers and tiers on it have ended. The arena
    itself does not keep it, so that the owner may release its views.
    """

    def __init__(self, memory: memoryview) -> None:
        """Take over the rows of a memory of shape [num_slots, slot_bytes].

        Raises:
            ConfigError: the rows are apart, are not writable, or do not begin at a multiple of
                4 KiB.
        """
        rows: npt.NDArray[np.uint8] = np.asarray(memory).view(np.uint8)
        address = rows.ctypes.data
        if rows.ndim != 2 or not rows.flags.c_contiguous or not rows.flags.writeable:  # noqa: PLR2004
            raise ConfigError(
                f"the memory has shape {rows.shape} and strides {rows.strides}, expected whole "
                "rows that are writable; pass one row for each slot"
            )
        if rows.shape[1] % SLOT_ALIGNMENT_BYTES or address % SLOT_ALIGNMENT_BYTES:
            raise ConfigError(
                f"the rows have {rows.shape[1]} bytes and begin at {address:#x}, expected "
                f"multiples of {SLOT_ALIGNMENT_BYTES}; align the memory to its pages"
            )
        shape = rows.shape
        self._num_slots, self._slot_bytes = shape
        self._slot_stride_bytes, self._slots_per_run = self._slot_bytes, 1
        self._base_address = address
        own = (ctypes.c_uint8 * rows.nbytes).from_address(address)
        self._memory = np.ctypeslib.as_array(own)
        self._slots = self._memory.reshape(shape)
        self._on_close = []

    def close_in_child(self) -> None:
        """Do nothing, because a tier closes itself in a forked child."""

    def _unmap(self) -> None:
        self._drop_views()
