"""Movement of bytes between a device's blocks and the host arena.

A `BlockLayout` describes the device's blocks, a `HostArena` holds the host's slots, and a mover of
`host/` or `cuda/` copies between them. `verified` adds checksums.

May import: kvstow._core, kvstow.arguments, kvstow.closing, kvstow.threads.
"""

from kvstow.transfer.arena import HostArena
from kvstow.transfer.choose import arena_for, mover_for
from kvstow.transfer.cuda.interface import CudaError
from kvstow.transfer.cuda.link import CudaLink
from kvstow.transfer.cuda.mover import CudaMover
from kvstow.transfer.cuda.pinning import pinned_arena
from kvstow.transfer.cuda.runtime import CudaEvent
from kvstow.transfer.host.mover import HostMover
from kvstow.transfer.layout import BlockLayout, Region
from kvstow.transfer.mover import READY, Event, HostEvent, Mover
from kvstow.transfer.ticket import Ticket, TransferTimeout, outcome
from kvstow.transfer.verified import ProvingMover, VerifiedMover

__all__ = [
    "READY",
    "BlockLayout",
    "CudaError",
    "CudaEvent",
    "CudaLink",
    "CudaMover",
    "Event",
    "HostArena",
    "HostEvent",
    "HostMover",
    "Mover",
    "ProvingMover",
    "Region",
    "Ticket",
    "TransferTimeout",
    "VerifiedMover",
    "arena_for",
    "mover_for",
    "outcome",
    "pinned_arena",
]
