"""What the connector tells vLLM's own logging and Prometheus."""

from __future__ import annotations

from typing import Any, Final, Literal, TypeAlias

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

Direction: TypeAlias = Literal["store", "load"]
STORE: Final[Direction] = "store"
LOAD: Final[Direction] = "load"

# Counters that the worker half keeps per direction, and how Prometheus describes them.
_MOVED = {
    "blocks": "Device blocks that {}s have moved.",
    "bytes": "Bytes that {}s have moved, of all ranks.",
    "seconds": "Seconds from the start to the end of {}s, summed up over jobs and ranks.",
    "failed": "{} jobs that have failed on a rank.",
}
# Counters of `OffloadScheduler.stats`, by the names they have there.
_COUNTED = {
    "query_tokens": "Tokens that the device did not have and the host tier was asked for.",
    "hit_tokens": "Tokens that the host tier spared requests to compute.",
    "pending_lookups": "Lookups that were told to ask again: another load brings the blocks.",
    "dropped_blocks": "Blocks that were due for a store when there was no room for them.",
    "evicted_blocks": "Blocks that the host tier gave up for room.",
    "late_jobs": "Transfers that missed their deadline.",
}
_GAUGES = {
    "resident_blocks": "Blocks that the host tier holds.",
    "capacity_blocks": "Blocks that the host tier has room for.",
    "capacity_tokens": "Tokens that the host tier has room for, one block of each group for each.",
    "jobs_in_flight": "Transfers under way.",
    "quarantined_blocks": "Device blocks held by transfers that missed their deadline.",
}


class ConnectorStats(KVConnectorStats):
    """Counters since the last report, and gauges: a flat mapping, so that it serialises."""

    def reset(self) -> None:
        """Forget everything."""
        self.data.clear()

    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> ConnectorStats:
        """Add the counters of another rank or interval; of a gauge the newer value counts."""
        for name, value in other.data.items():
            self.data[name] = value if name in _GAUGES else self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """A line for the log."""
        return dict(self.data)

    def moved(
        self, direction: Direction, blocks: int, num_bytes: int, seconds: float, *, ok: bool
    ) -> None:
        """Count a job that has ended."""
        if ok:
            self._add(f"{direction}_blocks", blocks)
            self._add(f"{direction}_bytes", num_bytes)
        else:
            self._add(f"{direction}_failed", 1)
        self._add(f"{direction}_seconds", seconds)

    def _add(self, name: str, value: float) -> None:
        self.data[name] = self.data.get(name, 0) + value


class StatsReporter:
    """Turns the tier's running counters into what was counted since the last report."""

    def __init__(self, capacity_blocks: int) -> None:
        self._last: dict[str, int] = {}
        self._capacity_blocks = capacity_blocks

    def report(self, stats: dict[str, int]) -> ConnectorStats | None:
        """What has changed; None if nothing has."""
        if stats == self._last:
            return None
        last, self._last = self._last, stats
        data: dict[str, Any] = {}
        if not last:
            data["capacity_blocks"] = self._capacity_blocks
        for name, value in stats.items():
            if value != last.get(name):
                if name in _GAUGES:
                    data[name] = value
                elif name in _COUNTED and value:
                    data[name] = value - last.get(name, 0)
        return ConnectorStats(data=data) if data else None


class ConnectorPromMetrics(KVConnectorPromMetrics):
    """The same for Prometheus, as `kvstow:*` beside vLLM's own metrics."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        counters = dict(_COUNTED)
        for direction in (STORE, LOAD):
            for what, text in _MOVED.items():
                counters[f"{direction}_{what}"] = text.format(direction).capitalize()
        self._counters = {
            name: self._counter_cls(
                name=f"kvstow:{name}_total", documentation=text, labelnames=self._labelnames
            )
            for name, text in counters.items()
        }
        self._gauges = {
            name: self._gauge_cls(
                name=f"kvstow:{name}",
                documentation=text,
                labelnames=self._labelnames,
                multiprocess_mode="mostrecent",
            )
            for name, text in _GAUGES.items()
        }

        for labels in self.per_engine_labelvalues.values():
            for metric in (*self._counters.values(), *self._gauges.values()):
                metric.labels(*labels)  # from the start at 0, so that rates have no gap

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take over what an engine reports."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            if name in self._gauges:
                self._gauges[name].labels(*labels).set(value)
            else:
                self._counters[name].labels(*labels).inc(value)
