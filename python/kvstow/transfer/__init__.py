"""Movement of bytes between a device's blocks and the host arena."""

from kvstow.transfer.arena import HostArena
from kvstow.transfer.host_mover import HostMover
from kvstow.transfer.layout import BlockLayout, Region
from kvstow.transfer.mover import READY, Event, HostEvent, Mover, Ticket, TransferTimeout
from kvstow.transfer.verified import ProvingMover, VerifiedMover

__all__ = [
    "READY",
    "BlockLayout",
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
]
