"""The course of a replay: what its counters were after each step, in spans of virtual time."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstow.replay.observer import Observer
from kvstow.replay.state import ReplayState

_MAX_SPANS: Final = 100
_COLUMNS: Final = (
    "device_hits",
    "host_hits",
    "recomputed_blocks",
    "preemptions",
    "stored_blocks",
    "loaded_blocks",
    "bytes_stored",
    "bytes_loaded",
)

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Spans:
    """A replay in spans of equal length.

    Attributes:
        hours: the end of each span, in hours of virtual time since the first arrival.
        span_s: the length of a span in seconds.
        increases: by counter of `Figures`, by how much it rose in each span.
        waiting: the most requests that waited at a time in each span; NaN without a step.
        running: the most requests that ran.
        loading: the most requests that loaded.
        accounting_p50_us: median of the accounting time of a step; NaN without a step.
        accounting_p99_us: its 99th percentile.
    """

    hours: Floats
    span_s: float
    increases: dict[str, Floats]
    waiting: Floats
    running: Floats
    loading: Floats
    accounting_p50_us: Floats
    accounting_p99_us: Floats


class Timeline(Observer):
    """Records the counters after each step."""

    def __init__(self) -> None:
        self._times = array("d")
        self._counters = {name: array("q") for name in _COLUMNS}
        self._queue = {name: array("q") for name in ("waiting", "running", "loading")}

    def stepped(self, replay: ReplayState) -> None:
        """Record the counters."""
        self._times.append(replay.now_s)
        for name, values in self._counters.items():
            values.append(getattr(replay.figures, name))
        self._queue["waiting"].append(len(replay.waiting))
        self._queue["running"].append(len(replay.batch.running))
        self._queue["loading"].append(len(replay.loading))

    def spans(self, replay: ReplayState) -> Spans | None:
        """Return the course so far; None before the first step."""
        if not self._times:
            return None
        times = np.array(self._times) - replay.trace.requests[0].arrival_s
        number = min(_MAX_SPANS, len(times))
        span_s = float(times[-1]) / number
        # A span has the steps that end in it; the last step ends with the last span.
        ends = np.searchsorted(times, span_s * np.arange(1, number) + span_s * 1e-9, side="right")
        bounds = [0, *ends.tolist(), len(times)]
        parts = [slice(*pair) for pair in pairwise(bounds)]
        increases = {}
        for name, values in self._counters.items():
            after = np.array([0, *values])[bounds]
            increases[name] = np.diff(after).astype(np.float64)
        accounting_us = np.array(replay.figures.accounting_us)
        return Spans(
            span_s * np.arange(1, number + 1) / 3600,
            span_s,
            increases,
            *(_most(np.array(values), parts) for values in self._queue.values()),
            *(_percentile(accounting_us, parts, share) for share in (50, 99)),
        )


def _most(values: npt.NDArray[np.int64], parts: list[slice]) -> Floats:
    return np.array([values[part].max() if len(values[part]) else np.nan for part in parts])


def _percentile(values: Floats, parts: list[slice], share: int) -> Floats:
    return np.array(
        [np.percentile(values[part], share) if len(values[part]) else np.nan for part in parts]
    )
