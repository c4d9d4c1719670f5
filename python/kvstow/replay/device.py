"""The device that a replay computes on: the memory of this machine, or of a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstow._core import ConfigError
from kvstow.replay.stopwatch import Stopwatch, UntimedCudaMover, UntimedHostMover
from kvstow.transfer import READY, BlockLayout, CudaEvent, Event, HostArena, Mover, Region
from kvstow.transfer.cuda.runtime import import_cupy

MoverKind: TypeAlias = Literal["auto", "host", "cuda"]

# An array of numpy, or of cupy, which has the same methods.
Array: TypeAlias = Any


class HostDevice:
    """The memory of this machine; a computed byte is there at once."""

    def full(self, shape: tuple[int, ...], value: int) -> Array:
        """Return an array of bytes that all have this value."""
        return np.full(shape, value, dtype=np.uint8)

    def put(self, array: npt.NDArray[np.generic]) -> Array:
        """Return an array that the device's arrays take as a value or as an index."""
        return array

    def get(self, array: Array) -> npt.NDArray[Any]:
        """Return a part of the device memory as an array in host memory."""
        held: npt.NDArray[Any] = array
        return held

    def layout(self, regions: Sequence[Array]) -> BlockLayout:
        """Return the layout of blocks in arrays of shape [num_blocks, num_bytes]."""
        return BlockLayout.from_arrays(regions)

    def computed(self) -> Event:
        """Return the event of everything computed so far."""
        return READY

    def mover(self, layout: BlockLayout, arena: HostArena, watch: Stopwatch) -> Mover:
        """Return a mover for the blocks of this device."""
        return UntimedHostMover(layout, arena, watch)


class CudaDevice(HostDevice):
    """The current GPU; a computed byte is there when the queue has come to it."""

    def __init__(self) -> None:
        """Take the current GPU. Raises `ConfigError` if there is none."""
        self._cupy = import_cupy()
        self._number = int(self._cupy.cuda.runtime.getDevice())

    def full(self, shape: tuple[int, ...], value: int) -> Array:
        """Return an array of bytes that all have this value."""
        return self._cupy.full(shape, value, dtype=np.uint8)

    def put(self, array: npt.NDArray[np.generic]) -> Array:
        """Return an array that the device's arrays take as a value or as an index."""
        return self._cupy.asarray(array)

    def get(self, array: Array) -> npt.NDArray[Any]:
        """Return a part of the device memory as an array in host memory."""
        held: npt.NDArray[Any] = self._cupy.asnumpy(array)
        return held

    def layout(self, regions: Sequence[Array]) -> BlockLayout:
        """Return the layout of blocks in arrays of shape [num_blocks, num_bytes]."""
        places = tuple(
            Region(region.data.ptr, region.strides[0], region.shape[1]) for region in regions
        )
        return BlockLayout(len(regions[0]), places, tuple(regions), device=self._number)

    def computed(self) -> Event:
        """Return the event of everything queued so far."""
        return CudaEvent.record(self._cupy.cuda.get_current_stream(), device=self._number)

    def mover(self, layout: BlockLayout, arena: HostArena, watch: Stopwatch) -> Mover:
        """Return a mover for the blocks of this device."""
        return UntimedCudaMover(layout, arena, watch)


def device_for(mover: MoverKind) -> HostDevice:
    """Return the device for a kind of mover; "auto" takes a GPU if there is one.

    Raises:
        ConfigError: "cuda" without a GPU, or without the packages that it needs.
    """
    if mover == "host":
        return HostDevice()
    try:
        return CudaDevice()
    except ConfigError:
        if mover == "cuda":
            raise
        return HostDevice()
