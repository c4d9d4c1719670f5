"""The link between one device and the host: two lanes that all movers of the device share."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack
from typing import Final

from kvstow._core import ConfigError, StateError
from kvstow.arguments import checked_int
from kvstow.transfer.cuda.interface import Runtime
from kvstow.transfer.cuda.lane import Lane
from kvstow.transfer.cuda.pace import Pace
from kvstow.transfer.cuda.runtime import cuda_runtime
from kvstow.transfer.layout import MAX_ADDRESS

# At 55 GB/s a copy of this size takes 0.15 ms. The host queues it in a tenth of that. The engine's
# own small copies take turns with ours in the copy engine, and hardly wait for one of this size.
STAGING_BYTES = 8 << 20
# One for the batch that is gathered, one for the batch that is copied, one for a late kernel.
NUM_PLACES = 3
# About a third of what PCIe 5 with 16 lanes carries.
BUSY_BYTES_PER_MS = 16 << 20
_MAX_PLACES = 64


class CudaLink:
    """What the movers of one device share: two lanes, and their staging memory on the device.

    Movers of several groups need no more staging memory than one mover does. The link is closed
    with its last mover.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        staging_bytes: int = STAGING_BYTES,
        num_places: int = NUM_PLACES,
        busy_bytes_per_ms: int | None = BUSY_BYTES_PER_MS,
    ) -> None:
        """Allocate the staging memory: `2 * num_places * staging_bytes` on the device.

        Args:
            runtime: the device, for example `cuda_runtime(0)`.
            staging_bytes: bytes of a place, and so of the largest batch and copy. At least one
                block must fit.
            num_places: places of each direction, which take turns.
            busy_bytes_per_ms: bytes of stores that are queued at most for each ms between two
                polls, while the engine computes; None for no limit. All places may be filled at
                once, whatever the rate.

        Raises:
            ConfigError: a number is outside its bounds.
            CudaError: the device has too little memory.
        """
        checked_int("staging_bytes", staging_bytes, 1, MAX_ADDRESS, "pass 4 to 32 MiB")
        checked_int("num_places", num_places, 1, _MAX_PLACES, "pass 3, or more under heavy load")
        if busy_bytes_per_ms is not None:
            fix = "pass 4 to 32 MiB, or None"
            checked_int("busy_bytes_per_ms", busy_bytes_per_ms, 1, MAX_ADDRESS, fix)
        self.runtime = runtime
        self.staging_bytes = -(-staging_bytes // 4096) * 4096
        with ExitStack() as built:
            pace = None
            if busy_bytes_per_ms is not None:
                pace = Pace(busy_bytes_per_ms, num_places * self.staging_bytes)
            self.stores = Lane(runtime, self.staging_bytes, num_places, pace)
            built.callback(self.stores.close)
            self.loads = Lane(runtime, self.staging_bytes, num_places)
            built.pop_all()
        self._num_movers = 0
        self._was_used = False

    def attach(self, block_bytes: int) -> ExitStack:
        """Return a stack whose `close` detaches the mover; the last mover closes the link.

        Raises:
            ConfigError: a block is larger than a place.
            StateError: the link is closed.
        """
        if block_bytes > self.staging_bytes:
            raise ConfigError(
                f"a block has {block_bytes} bytes, but a staging place {self.staging_bytes}; "
                f"build CudaLink(runtime, staging_bytes={block_bytes}) or more"
            )
        with links_lock:
            if self.closed:
                raise StateError("this CudaLink was closed with its last mover; build a new one")
            self._num_movers += 1
            self._was_used = True
        attached = ExitStack()
        attached.callback(self._detach)
        return attached

    @property
    def closed(self) -> bool:
        """Whether the last mover of this link was closed."""
        return self._was_used and not self._num_movers

    def finish(self, mover: object) -> None:
        """Carry out the jobs of a mover that may begin, fail its other jobs, and wait for all."""
        try:
            self.stores.finish(mover)
        finally:
            self.loads.finish(mover)

    def _detach(self) -> None:
        with links_lock:
            self._num_movers -= 1
            if not self.closed:
                return
        try:
            self.stores.close()
        finally:
            self.loads.close()


_links: dict[int, CudaLink] = {}
links_lock: Final = threading.RLock()
"""Hold it from `cuda_link` to `attach`. Else another thread may close the link in between."""
# A forked child cannot use the CUDA context of its parent.
os.register_at_fork(after_in_child=_links.clear)


def cuda_link(device: int, block_bytes: int = 0) -> CudaLink:
    """Return the link that movers of this device share by default.

    The first call builds it, with staging places of at least `block_bytes`.
    """
    with links_lock:
        if device not in _links or _links[device].closed:
            staging_bytes = max(STAGING_BYTES, block_bytes)
            _links[device] = CudaLink(cuda_runtime(device), staging_bytes=staging_bytes)
        return _links[device]
