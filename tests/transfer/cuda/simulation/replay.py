"""A replay whose blocks lie in the memory of the simulated GPU, and that verifies every load.

python3 -m tests.transfer.cuda.simulation.program tests.transfer.cuda.simulation.replay
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Sequence

import numpy as np
from tests.transfer.cuda.simulation.library import has_context

from kvstow.replay import BUNDLED_TRACE, ReplayConfig, ReplayEngine, read_trace, state
from kvstow.replay.device import Array, HostDevice
from kvstow.replay.stopwatch import Stopwatch, UntimedCudaMover
from kvstow.transfer import BlockLayout, CudaEvent, Event, HostArena, Mover
from kvstow.transfer.cuda.runtime import cuda_runtime

DEVICE = 1  # so that a call for the default device would show
NUM_REQUESTS = 200  # enough for prefixes to come back from the host


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


def main() -> int:
    """Return 0 if no block is corrupt."""
    vars(state)["device_for"] = lambda _: SimulatedDevice()
    config = ReplayConfig(device_blocks=300, host_blocks=6000, mover="cuda")
    engine = ReplayEngine(read_trace(BUNDLED_TRACE, limit=NUM_REQUESTS), config)
    engine.run()
    loaded_bytes, verifier = engine.kv.stats()["loaded_bytes"], engine.verifier
    engine.close()
    print(f"{loaded_bytes} bytes loaded, {verifier.num_verified} blocks verified")
    print(f"{verifier.num_corrupt} corrupt, device 0 {'used' if has_context(0) else 'untouched'}")
    return 0 if loaded_bytes and verifier.num_verified and not verifier.num_corrupt else 1


if __name__ == "__main__":
    sys.exit(main())
