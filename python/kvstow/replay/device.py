"""The device that a replay computes on: this machine's memory, or a GPU's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstow._core import ConfigError
from kvstow.replay.stopwatch import Stopwatch, UntimedCudaMover, UntimedHostMover
from kvstow.transfer import READY, BlockLayout, CudaEvent, Event, HostArena, Mover, Region
from kvstow.transfer.cuda.runtime import import_cupy

__all__ = ["CudaDevice", "HostDevice", "MoverKind", "device_for"]

MoverKind: TypeAlias = Literal["auto", "host", "cuda"]

# numpy's, or cupy's with the same methods.
Array: TypeAlias = Any


class HostDevice:
    """Plain memory; what is computed is there at once."""

    def full(self, shape: tuple[int, ...], value: int) -> Array:
        """Bytes of one value."""
        return np.full(shape, value, dtype=np.uint8)

    def put(self, array: npt.NDArray[np.generic]) -> Array:
        """An array as the device's arrays take it, to be written to them or to index them."""
        return array

    def get(self, array: Array) -> npt.NDArray[Any]:
        """What a part of the device's memory holds."""
        held: npt.NDArray[Any] = array
        return held

    def layout(self, regions: Sequence[Array]) -> BlockLayout:
        """Where blocks lie in arrays of shape [num_blocks, num_bytes]."""
        return BlockLayout.from_arrays(regions)

    def computed(self) -> Event:
        """The event of all that was computed by now."""
        return READY

    def mover(self, layout: BlockLayout, arena: HostArena, watch: Stopwatch) -> Mover:
        """What copies its blocks."""
        return UntimedHostMover(layout, arena, watch)


class CudaDevice(HostDevice):
    """The GPU that is current; what is computed is queued."""

    def __init__(self) -> None:
        """Take it; raises `ConfigError` where there is none."""
        self._cupy = import_cupy()
        self._number = int(self._cupy.cuda.runtime.getDevice())

    def full(self, shape: tuple[int, ...], value: int) -> Array:
        """Bytes of one value."""
        return self._cupy.full(shape, value, dtype=np.uint8)

    def put(self, array: npt.NDArray[np.generic]) -> Array:
        """An array as the device's arrays take it, to be written to them or to index them."""
        return self._cupy.asarray(array)

    def get(self, array: Array) -> npt.NDArray[Any]:
        """What a part of the device's memory holds."""
        held: npt.NDArray[Any] = self._cupy.asnumpy(array)
        return held

    def layout(self, regions: Sequence[Array]) -> BlockLayout:
        """Where blocks lie in arrays of shape [num_blocks, num_bytes]."""
        places = tuple(Region(one.data.ptr, one.strides[0], one.shape[1]) for one in regions)
        return BlockLayout(len(regions[0]), places, tuple(regions), device=self._number)

    def computed(self) -> Event:
        """The event of all that was queued by now."""
        return CudaEvent.record(self._cupy.cuda.get_current_stream(), device=self._number)

    def mover(self, layout: BlockLayout, arena: HostArena, watch: Stopwatch) -> Mover:
        """What copies its blocks."""
        return UntimedCudaMover(layout, arena, watch)


def device_for(mover: MoverKind) -> HostDevice:
    """The device that a mover is for; "auto" takes a GPU if there is one.

    Raises:
        ConfigError: "cuda", and there is no GPU, or nothing that reaches it.
    """
    if mover == "host":
        return HostDevice()
    try:
        return CudaDevice()
    except ConfigError:
        if mover == "cuda":
            raise
        return HostDevice()
