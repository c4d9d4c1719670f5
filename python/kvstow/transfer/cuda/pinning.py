"""Pinned host memory near a device, which the device reads and writes by itself.

To pin 10 GB takes about a second if the pages exist, and several times that if the driver must ask
for each. So threads touch the pages first. They run on the processors nearest to the device,
because the system takes the pages from there.
"""

from __future__ import annotations

import math
import mmap
import os
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstow.transfer.arena import HostArena
from kvstow.transfer.cuda.interface import CudaError, Runtime
from kvstow.transfer.shared import SharedMemory

# CUDA refuses to pin 512 GiB at once, and reports nothing while it pins. Chunks of this size take
# about a second each, and then there is progress to report. A copy must not cross from one chunk
# into the next. So chunks end where slots end, and the mover cuts its copies there too.
MAX_CHUNK_BYTES = 8 << 30
# With more threads the system does not hand out pages any faster.
_MAX_THREADS = 32

# Memory of arenas that were closed after the loss of their device. It stays mapped, because a
# device that has only refused all questions may still copy.
_kept: list[npt.NDArray[np.uint8]] = []

Progress = Callable[[int, int], None]
"""Called with the number of pinned bytes, and of all bytes."""


def pinned_arena(  # noqa: PLR0913 - as HostArena
    num_slots: int,
    slot_bytes: int,
    runtime: Runtime,
    *,
    slots_per_run: int = 1,
    progress: Progress | None = None,
    shared: SharedMemory | None = None,
) -> HostArena:
    """Return an arena near the device, pinned until it is closed.

    If CUDA refuses to pin it, return an unpinned arena and warn. See `HostArena` for the other
    arguments and the errors.
    """
    cpus = nearest_cpus(runtime.pci_bus_id)
    arena = HostArena(
        num_slots,
        slot_bytes,
        slots_per_run=slots_per_run,
        num_prefault_threads=min(len(cpus), _MAX_THREADS),
        prefault_cpus=cpus,
        shared=shared,
    )
    try:
        arena.on_close(pin(arena, runtime, progress=progress))
    except CudaError as error:
        if error.is_fatal:
            arena.close()
            raise
        warnings.warn(
            f"CUDA did not pin {arena.num_bytes / 2**30:.1f} GiB of host memory ({error}), so "
            "copies are slower and block the engine; raise the limit of locked memory (ulimit -l, "
            "docker run --ulimit memlock=-1) or lower the number of host blocks",
            RuntimeWarning,
            stacklevel=2,
        )
    return arena


def pin(
    arena: HostArena, runtime: Runtime, *, progress: Progress | None = None
) -> Callable[[], None]:
    """Pin an arena whole or not at all, and return the function that unpins it.

    Raises:
        CudaError: CUDA refused to pin it.
    """

    def keep_if_lost() -> None:
        if runtime.lost is not None:
            _kept.append(arena.memory)

    with ExitStack() as pinned:
        for begin, num_bytes in _chunks(arena):
            address = arena.base_address + begin
            runtime.register(address, num_bytes)
            pinned.callback(runtime.unregister, address)  # of each chunk, if a later one is refused
            if progress is not None:
                progress(begin + num_bytes, arena.num_bytes)
        pinned.callback(keep_if_lost)
        return pinned.pop_all().close


def chunk_slots(slot_stride_bytes: int, slots_per_run: int) -> int:
    """Return the number of slots that are pinned together: whole runs and whole pages."""
    run_bytes = slot_stride_bytes * slots_per_run
    # The least number of runs that ends where a page ends, so that no page is pinned twice.
    num_runs = mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, run_bytes)
    return max(1, MAX_CHUNK_BYTES // (num_runs * run_bytes)) * num_runs * slots_per_run


def _chunks(arena: HostArena) -> Iterator[tuple[int, int]]:
    """Yield (begin, num_bytes) of each part that is pinned at once."""
    size = chunk_slots(arena.slot_stride_bytes, arena.slots_per_run) * arena.slot_stride_bytes
    for begin in range(0, arena.num_bytes, size):
        yield begin, min(size, arena.num_bytes - begin)


def memory_node(pci_bus_id: str) -> int | None:
    """Return the memory node that a device is plugged in at; None if it is unknown."""
    try:
        node = int(Path(f"/sys/bus/pci/devices/{pci_bus_id}/numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def nearest_cpus(pci_bus_id: str) -> Collection[int]:
    """Return the processors near a device that this process may use; all if the node is unknown."""
    allowed = os.sched_getaffinity(0)
    if (node := memory_node(pci_bus_id)) is None:
        return allowed
    try:
        text = Path(f"/sys/devices/system/node/node{node}/cpulist").read_text()
        near = {cpu for part in text.strip().split(",") for cpu in _cpus(part)}
    except (OSError, ValueError):
        return allowed
    return near & allowed or allowed


def _cpus(part: str) -> range:
    """Return the range of one part of a Linux list of processors: "5", or "0-31"."""
    first, _, last = part.partition("-")
    return range(int(first), int(last or first) + 1)
