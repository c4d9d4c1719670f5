"""The loop for an engine author: `Engine` wires ledger, scheduler and movers together.

Here lie the engine's state, its copies in flight, the memories and movers of its ranks, sleep and
wake, and the file that an engine sleeps in.

May import: kvstow._core, kvstow.arguments, kvstow.closing, kvstow.memory,
kvstow.observability.events, kvstow.observability.histogram, kvstow.output, kvstow.threads,
kvstow.transfer.
"""

from kvstow.engine.answers import Admission, AdmissionState, Awake, Landed
from kvstow.engine.engine import Engine, Policy
from kvstow.engine.snapshot_file import HOST
from kvstow.engine.transfer import Transfer

__all__ = [
    "HOST",
    "Admission",
    "AdmissionState",
    "Awake",
    "Engine",
    "Landed",
    "Policy",
    "Transfer",
]
