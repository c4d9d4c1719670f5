"""A device for the replay whose blocks lie in the memory of the simulated GPU."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import numpy as np

from kvstow.replay.device import Array, HostDevice
from kvstow.replay.stopwatch import Stopwatch, UntimedCudaMover
from kvstow.transfer import BlockLayout, CudaEvent, Event, HostArena, Mover
from kvstow.transfer.cuda.runtime import cuda_runtime

DEVICE = 1  # so that a call for the default device would show


class SimulatedDevice(HostDevice):
    """Memory of the simulated GPU, which numpy reads and writes at once."""

    def __init__(self) -> None:
        self.gpu = cuda_runtime(DEVICE)
        self.compute = self.gpu.stream()

    def full(self, shape: tuple[int, ...], value: int) -> Array:
        size = math.prod(shape)
        memory = (ctypes.c_uint8 * size).from_address(self.gpu.allocate(size))
        array = np.frombuffer(memoryview(memory), dtype=np.uint8).reshape(shape)
        array[:] = value
        return array

    def layout(self, regions: Sequence[Array]) -> BlockLayout:
        layout = BlockLayout.from_arrays(regions)
        return BlockLayout(layout.num_blocks, layout.regions, layout.owners, device=DEVICE)

    def computed(self) -> Event:
        return CudaEvent.record(self.compute, device=DEVICE)

    def mover(self, layout: BlockLayout, arena: HostArena, watch: Stopwatch) -> Mover:
        return UntimedCudaMover(layout, arena, watch)
