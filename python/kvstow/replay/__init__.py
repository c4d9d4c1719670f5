"""Replay of request traces through ledger, scheduler and mover, with every byte checked."""

from pathlib import Path
from typing import Final

from kvstow.replay.config import ReplayConfig
from kvstow.replay.engine import ReplayEngine
from kvstow.replay.observer import Observer
from kvstow.replay.report import figures_json
from kvstow.replay.trace import Trace, TraceRequest, read_trace

__all__ = [
    "BUNDLED_TRACE",
    "Observer",
    "ReplayConfig",
    "ReplayEngine",
    "Trace",
    "TraceRequest",
    "figures_json",
    "read_trace",
]

BUNDLED_TRACE: Final = Path(__file__).parent / "data" / "conversation_1000.jsonl.gz"
"""The first 1,000 requests of a public trace; its licence lies beside it."""
