"""The loop for an engine author: `Engine` wires ledger, scheduler and movers together.

Here lie the engine's state, its copies in flight, the memories and movers of its ranks, sleep and
wake, resets, the file that an engine sleeps in, and its disk tier or shared tier.

May import: kvstow._core, kvstow.arguments, kvstow.closing, kvstow.memory,
kvstow.observability.events, kvstow.observability.histogram, kvstow.output, kvstow.sizes,
kvstow.texts, kvstow.threads, kvstow.tiers, kvstow.transfer.
"""

from kvstow.engine.answers import Admission, AdmissionState, Awake, Landed
from kvstow.engine.arguments import Policy
from kvstow.engine.disk_options import DiskOptions
from kvstow.engine.engine import Engine
from kvstow.engine.shared import SharedOptions
from kvstow.engine.snapshot_file import HOST
from kvstow.engine.transfer import Transfer

__all__ = [
    "HOST",
    "Admission",
    "AdmissionState",
    "Awake",
    "DiskOptions",
    "Engine",
    "Landed",
    "Policy",
    "SharedOptions",
    "Transfer",
]
