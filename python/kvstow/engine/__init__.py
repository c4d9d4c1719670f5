"""The loop for an engine author: `Engine` wires ledger, scheduler and movers together.

Here lie the engine's state, its copies in flight, the memories and movers of its ranks, sleep and
wake, and the file that an engine sleeps in.

May import: kvstow._core, kvstow.arguments, kvstow.closing, kvstow.memory, kvstow.observability,
kvstow.output, kvstow.threads, kvstow.transfer.
"""

from kvstow.engine.engine import (
    Admission,
    AdmissionState,
    Engine,
    Landed,
    Policy,
    Transfer,
)

__all__ = ["Admission", "AdmissionState", "Engine", "Landed", "Policy", "Transfer"]
