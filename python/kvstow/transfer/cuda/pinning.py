"""Host memory that a device reaches by itself: near it, touched by many threads, and pinned.

Pinning takes about a second for 10 GB when the pages are there already, and several times that when
the driver has to ask for each: so threads touch them first, on the processors nearest to the
device, which is where the system then takes them from.
"""

from __future__ import annotations

import math
import mmap
import os
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from pathlib import Path

from kvstow.transfer.arena import HostArena
from kvstow.transfer.cuda.interface import CudaError, Runtime

__all__ = ["memory_node", "nearest_cpus", "pin", "pinned_arena"]

# CUDA refuses to pin 512 GiB at once, and says nothing while it pins: in chunks of about a second
# there is something to tell. A copy must not cross from one chunk into the next, so chunks end
# where slots do; and copies are of runs of slots, which are cut there too.
MAX_CHUNK_BYTES = 8 << 30
# More do not make the system hand out pages any faster.
_MAX_THREADS = 32

Progress = Callable[[int, int], None]
"""Told how many bytes of how many are pinned."""


def pinned_arena(
    num_slots: int,
    slot_bytes: int,
    runtime: Runtime,
    *,
    slots_per_run: int = 1,
    progress: Progress | None = None,
) -> HostArena:
    """An arena near the device and pinned; where that is refused, one that is not, and a warning.

    See `HostArena` for the other arguments and the errors. Unpinned when it is closed.
    """
    cpus = nearest_cpus(runtime.pci_bus_id)
    arena = HostArena(
        num_slots,
        slot_bytes,
        slots_per_run=slots_per_run,
        num_prefault_threads=min(len(cpus), _MAX_THREADS),
        prefault_cpus=cpus,
    )
    try:
        arena.on_close(pin(arena, runtime, progress=progress))
    except CudaError as error:
        if error.is_fatal:
            arena.close()
            raise
        warnings.warn(
            f"{arena.num_bytes / 2**30:.1f} GiB of host memory could not be pinned ({error}): "
            "copies will be slower and hold up the engine; raise the limit of locked memory "
            "(ulimit -l, --ulimit memlock=-1 of a container) or take fewer host blocks",
            RuntimeWarning,
            stacklevel=2,
        )
    return arena


def pin(
    arena: HostArena, runtime: Runtime, *, progress: Progress | None = None
) -> Callable[[], None]:
    """Pin an arena, all of it or none; returns what unpins it.

    Raises:
        CudaError: it was refused.
    """
    with ExitStack() as pinned:
        for begin, num_bytes in _chunks(arena):
            address = arena.base_address + begin
            runtime.register(address, num_bytes)
            pinned.callback(runtime.unregister, address)  # of all chunks, should one be refused
            if progress is not None:
                progress(begin + num_bytes, arena.num_bytes)
        return pinned.pop_all().close


def chunk_slots(slot_stride_bytes: int, slots_per_run: int) -> int:
    """How many slots of an arena are pinned together: whole runs of them, and whole pages."""
    run_bytes = slot_stride_bytes * slots_per_run
    # The least number of runs that end where a page does: no page is pinned twice.
    num_runs = mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, run_bytes)
    return max(1, MAX_CHUNK_BYTES // (num_runs * run_bytes)) * num_runs * slots_per_run


def _chunks(arena: HostArena) -> Iterator[tuple[int, int]]:
    """(begin, num_bytes) of the parts that are pinned one by one."""
    size = chunk_slots(arena.slot_stride_bytes, arena.slots_per_run) * arena.slot_stride_bytes
    for begin in range(0, arena.num_bytes, size):
        yield begin, min(size, arena.num_bytes - begin)


def memory_node(pci_bus_id: str) -> int | None:
    """The memory node that a device is plugged in at; None if nobody tells."""
    try:
        node = int(Path(f"/sys/bus/pci/devices/{pci_bus_id}/numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def nearest_cpus(pci_bus_id: str) -> Collection[int]:
    """The processors on a device's memory node that this process may use; all if nobody tells."""
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
    """Of a list of processors as Linux writes it: "5", or "0-31"."""
    first, _, last = part.partition("-")
    return range(int(first), int(last or first) + 1)
