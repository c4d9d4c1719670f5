"""The link between one device and the host: two lanes that all movers of the device share."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack

from kvstow._core import ConfigError, StateError
from kvstow.transfer.cuda.interface import Runtime
from kvstow.transfer.cuda.lane import Lane
from kvstow.transfer.cuda.runtime import cuda_runtime
from kvstow.transfer.layout import MAX_ADDRESS, checked_int

__all__ = ["CudaLink", "cuda_link"]

# Large enough that a launch costs nothing beside a copy of it (0.6 ms), small enough that the
# engine's own small copies, which take turns with ours in the copy engine, hardly wait.
STAGING_BYTES = 32 << 20
# One is gathered, one is copied, one makes up for a kernel that comes late.
NUM_PLACES = 3
_MAX_PLACES = 64


class CudaLink:
    """What the movers of one device share: two lanes, and their staging memory on the device.

    Movers of several groups need no more of it than one does. It is closed with the last of them.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        staging_bytes: int = STAGING_BYTES,
        num_places: int = NUM_PLACES,
    ) -> None:
        """Allocate the staging memory: `2 * num_places * staging_bytes` on the device.

        Args:
            runtime: the device, as `cuda_runtime` gives it.
            staging_bytes: of a place, which one batch goes through: also the longest copy. At
                least one block must fit.
            num_places: that take turns, in each direction.

        Raises:
            ConfigError: a number outside its bounds.
            CudaError: the device has no memory for it.
        """
        checked_int("staging_bytes", staging_bytes, 1, MAX_ADDRESS, "pass 8 to 64 MiB")
        checked_int("num_places", num_places, 1, _MAX_PLACES, "pass 3, or more under heavy load")
        self.runtime = runtime
        self.staging_bytes = -(-staging_bytes // 4096) * 4096
        with ExitStack() as built:
            self.stores = Lane(runtime, self.staging_bytes, num_places)
            built.callback(self.stores.close)
            self.loads = Lane(runtime, self.staging_bytes, num_places)
            built.pop_all()
        self._num_movers = 0
        self._was_used = False

    def attach(self, block_bytes: int) -> ExitStack:
        """Let a mover use the lanes until it closes what is returned; the last closes the link.

        Raises:
            ConfigError: its blocks are larger than a place.
            StateError: the link is closed.
        """
        if self.closed:
            raise StateError("this CudaLink was closed with its last mover; build a new one")
        if block_bytes > self.staging_bytes:
            raise ConfigError(
                f"a block takes {block_bytes} bytes and a place for staging {self.staging_bytes}; "
                f"build CudaLink(runtime, staging_bytes={block_bytes}) or more"
            )
        self._num_movers += 1
        self._was_used = True
        attached = ExitStack()
        attached.callback(self._detach)
        return attached

    @property
    def closed(self) -> bool:
        """Whether its last mover was closed."""
        return self._was_used and not self._num_movers

    def finish(self, mover: object) -> None:
        """Carry out what may begin of a mover's jobs, fail the others, and wait for all of them."""
        try:
            self.stores.finish(mover)
        finally:
            self.loads.finish(mover)

    def _detach(self) -> None:
        self._num_movers -= 1
        if self.closed:
            try:
                self.stores.close()
            finally:
                self.loads.close()


_links: dict[int, CudaLink] = {}
_links_lock = threading.Lock()
# Those of the parent process: a child cannot go on with its context.
os.register_at_fork(after_in_child=_links.clear)


def cuda_link(device: int, block_bytes: int = 0) -> CudaLink:
    """The link that movers of this device share unless they are given one.

    The first of them says how large a block its staging must have room for.
    """
    with _links_lock:
        if device not in _links or _links[device].closed:
            staging_bytes = max(STAGING_BYTES, block_bytes)
            _links[device] = CudaLink(cuda_runtime(device), staging_bytes=staging_bytes)
        return _links[device]
