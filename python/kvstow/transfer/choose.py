"""The arena and the mover that suit a layout: where its memory lies decides."""

from __future__ import annotations

from collections.abc import Sequence

from kvstow._core import ConfigError
from kvstow.transfer.arena import HostArena
from kvstow.transfer.cuda.mover import CudaMover
from kvstow.transfer.cuda.pinning import Progress, pinned_arena
from kvstow.transfer.cuda.runtime import cuda_runtime
from kvstow.transfer.host.mover import HostMover
from kvstow.transfer.layout import BlockLayout
from kvstow.transfer.mover import Mover
from kvstow.transfer.verified import VerifiedMover

__all__ = ["arena_for", "mover_for"]


def arena_for(
    layouts: Sequence[BlockLayout],
    num_slots: int,
    *,
    slots_per_run: int = 1,
    progress: Progress | None = None,
) -> HostArena:
    """Host memory for the blocks of all these layouts: pinned where they lie on a CUDA device.

    `progress` is told how many bytes of how many are pinned: 10 GB take a second or more.

    Raises:
        ConfigError: the layouts lie on several devices, or there is no memory for the slots.
    """
    slot_bytes = max(layout.slot_bytes for layout in layouts)
    device, *others = {layout.device for layout in layouts}
    if others:
        raise ConfigError(
            f"the layouts lie on several devices, {device} and {others[0]} (None: the CPU); a rank "
            "has one, pass the layouts of each device as a rank of their own"
        )
    if device is None:
        return HostArena(num_slots, slot_bytes, slots_per_run=slots_per_run)
    return pinned_arena(
        num_slots,
        slot_bytes,
        cuda_runtime(device),
        slots_per_run=slots_per_run,
        progress=progress,
    )


def mover_for(layout: BlockLayout, arena: HostArena, *, verify: bool = False) -> Mover:
    """What copies between these: a `CudaMover` if the layout is of a CUDA device, or a `HostMover`.

    With `verify` each load is compared with what was stored, by a checksum per block.
    """
    if layout.device is not None:
        return CudaMover(layout, arena, verify=verify)
    mover = HostMover(layout, arena)
    return VerifiedMover(mover) if verify else mover
