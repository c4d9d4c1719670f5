"""Replay request traces through `kvstow.Engine` in virtual time, and check every byte.

Here lie the trace readers, the loop of a continuous-batching engine, the bytes that blocks must
hold, faults, and the command's options and reports.

May import: kvstow._core, kvstow.choices, kvstow.closing, kvstow.engine, kvstow.geometry,
kvstow.memory, kvstow.output, kvstow.report, kvstow.sizes, kvstow.texts, kvstow.tiers,
kvstow.transfer.
"""

from pathlib import Path
from typing import Final

from kvstow.replay.config import ReplayConfig
from kvstow.replay.engine import ReplayEngine
from kvstow.replay.observer import Observer
from kvstow.replay.report import figures_json
from kvstow.replay.state import ReplayState
from kvstow.replay.trace import Trace, TraceRequest, read_trace

__all__ = [
    "BUNDLED_TRACE",
    "Observer",
    "ReplayConfig",
    "ReplayEngine",
    "ReplayState",
    "Trace",
    "TraceRequest",
    "figures_json",
    "read_trace",
]

BUNDLED_TRACE: Final = Path(__file__).parent / "data" / "conversation_1000.jsonl.gz"
"""The first 1,000 requests of a public trace; its licence lies beside it."""
