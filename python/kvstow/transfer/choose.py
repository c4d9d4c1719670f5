"""The choice of the arena and the mover for a layout, by the device of its memory."""

from __future__ import annotations

from collections.abc import Sequence

from kvstow._core import ConfigError
from kvstow.transfer.arena import HostArena
from kvstow.transfer.cuda.mover import CudaMover
from kvstow.transfer.cuda.pinning import Progress, pinned_arena
from kvstow.transfer.cuda.runtime import cuda_runtime
from kvstow.transfer.host.mover import HostMover
from kvstow.transfer.layout import BlockLayout
from kvstow.transfer.mover import Mover, check_sides
from kvstow.transfer.shared import SharedMemory
from kvstow.transfer.verified import VerifiedMover


def arena_for(
    layouts: Sequence[BlockLayout],
    num_slots: int,
    *,
    slots_per_run: int = 1,
    progress: Progress | None = None,
    shared: SharedMemory | None = None,
) -> HostArena:
    """Return host memory for the blocks of all layouts, pinned if they are on a CUDA device.

    Args:
        layouts: the layouts of one rank; a slot fits the largest block.
        num_slots: blocks the arena holds.
        slots_per_run: see `HostArena`.
        progress: called with the number of pinned bytes, and of all bytes. To pin 10 GB takes a
            second or more.
        shared: memory that other processes map, too: see `HostArena`.

    Raises:
        ConfigError: the layouts are on several devices, or there is no memory for the slots.
    """
    given: object = layouts
    if (
        not isinstance(given, Sequence)
        or not given
        or not all(isinstance(each, BlockLayout) for each in given)
    ):
        raise ConfigError(
            f"layouts is {layouts!r}, expected a list of BlockLayout: pass those of one rank"
        )
    slot_bytes = max(layout.slot_bytes for layout in layouts)
    device, *others = {layout.device for layout in layouts}
    if others:
        raise ConfigError(
            f"the layouts are on several devices, {device} and {others[0]} (None: the CPU); pass "
            "the layouts of each device as a rank of their own"
        )
    if device is None:
        return HostArena(num_slots, slot_bytes, slots_per_run=slots_per_run, shared=shared)
    return pinned_arena(
        num_slots,
        slot_bytes,
        cuda_runtime(device),
        slots_per_run=slots_per_run,
        progress=progress,
        shared=shared,
    )


def mover_for(layout: BlockLayout, arena: HostArena, *, verify: bool = False) -> Mover:
    """Return a `CudaMover` for a layout on a CUDA device, and a `HostMover` for any other.

    With `verify` a load fails if a block's checksum is not that of its store.
    """
    check_sides(layout, arena)
    if layout.device is not None:
        return CudaMover(layout, arena, verify=verify)
    mover = HostMover(layout, arena)
    return VerifiedMover(mover) if verify else mover
