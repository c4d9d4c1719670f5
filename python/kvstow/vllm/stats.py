"""The connector's statistics in vLLM's log and in vLLM's Prometheus metrics.

Most statistics have the keys of `Engine.stats`, and `METRICS` names their metrics, so one dashboard
fits an engine and vLLM. Each rank reports bytes and seconds. The scheduler half reports the rest,
once for all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar, Final

from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvstow.observability.metrics import (
    CONNECTOR_METRICS,
    HISTOGRAMS,
    METRICS,
    SHADOW_HIT_RATIO,
    SHADOW_KEY,
    Metric,
)
from kvstow.transfer.mover import Direction

_BYTES: Final[dict[Direction, str]] = {"store": "stored_bytes", "load": "loaded_bytes"}
_SECONDS: Final[dict[Direction, str]] = {"store": "store_seconds", "load": "load_seconds"}

EXPORTED: Final = {
    key: (metric, value)
    for metric in METRICS + CONNECTOR_METRICS
    for value, key in metric.keys.items()
    # vLLM itself counts the device tier. The events file reports its losses in the log.
    if not key.startswith("device_") and key != "lost_events"
}
"""The metric and the value of its label, by key of the statistics."""
EACH: Final = {
    f"{key} each": (metric, value) for metric in HISTOGRAMS for value, key in metric.keys.items()
}
"""The histogram and the value of its label, by key of the list of values."""
_GAUGES: Final = frozenset(key for key, (metric, _) in EXPORTED.items() if metric.kind == "gauge")
# A server may have several API servers. Each exports the reports that it gets, and one that is slow
# may export an old value of a gauge after the new one.
REPEAT_S: Final = 1.0
# These stay, because an alert sees by the size that a server had a tier.
_FALLING: Final = _GAUGES - {"capacity_blocks", "capacity_tokens"}


def _is_gauge(key: str) -> bool:
    return key in _GAUGES or key.startswith(SHADOW_KEY)


class ConnectorStats(KVConnectorStats):
    """Counters and lists of values since the last report, and gauges, which vLLM serialises."""

    def reset(self) -> None:
        """Forget everything."""
        self.data.clear()

    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> ConnectorStats:
        """Add the counters of another rank or interval, and take the newer value of each gauge."""
        for key, value in other.data.items():
            if _is_gauge(key):
                self.data[key] = value
            else:
                self.data[key] = self.data.get(key, [] if key in EACH else 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the numbers for vLLM's log line."""
        return {key: value for key, value in self.data.items() if key not in EACH}

    def moved(
        self, direction: Direction, num_bytes: int, seconds: float, num_ranks: int = 1
    ) -> None:
        """Count a copy that succeeded.

        Args:
            direction: of the copy.
            num_bytes: of this rank.
            seconds: that this rank took.
            num_ranks: that copy a part of the transfer. A transfer takes as long as they do on
                average, because vLLM adds up what they report.
        """
        for key, value, share in (
            (_BYTES[direction], num_bytes, num_bytes),
            (_SECONDS[direction], seconds, seconds / num_ranks),
        ):
            self.data[key] = self.data.get(key, 0) + share
            self.data.setdefault(f"{key} each", []).append(value)


class StatsReporter:
    """Turns the tier's running totals into counts since the last report."""

    def __init__(self, capacity_blocks: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._last: dict[str, int] = {}
        self._capacity_blocks = capacity_blocks
        self._clock, self._repeat_at = clock, 0.0

    def report(self, stats: dict[str, int]) -> ConnectorStats | None:
        """Return the statistics that have changed, and each second all gauges; None without any.

        A tier that is off has no content, so the gauges that `stats` lacks fall to 0. Its size and
        its counters stay.
        """
        last, stats = self._last, {key: value for key, value in stats.items() if key in EXPORTED}
        if not (stats or last):
            return None  # a server that only observes
        for key in last.keys() - stats.keys():
            stats[key] = 0 if key in _FALLING else last[key]
        stats["capacity_blocks"] = self._capacity_blocks
        self._last = stats
        must_repeat = self._clock() >= self._repeat_at
        if must_repeat:
            self._repeat_at = self._clock() + REPEAT_S
        data = {
            key: value if key in _GAUGES else value - last.get(key, 0)
            for key, value in stats.items()
            if value != last.get(key, 0) or (must_repeat and key in _GAUGES)
        }
        return ConnectorStats(data=data) if data else None


class ConnectorPromMetrics(KVConnectorPromMetrics):
    """The statistics as Prometheus metrics, with vLLM's labels before those of `METRICS`."""

    # The metrics of the last engine of this process, by what made them, and their names.
    _registered: ClassVar[dict[tuple[Any, str], Any]] = {}

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        exported = EXPORTED | EACH
        metrics = {metric.name: metric for metric, _ in exported.values()}
        # Its samples are the sizes that are reported.
        self._shadow = self._family(SHADOW_HIT_RATIO)
        families = {name: self._family(metric) for name, metric in metrics.items()}
        self._samples: dict[tuple[int, str], Any] = {}
        for engine, values in self.per_engine_labelvalues.items():
            for key, (metric, value) in exported.items():
                labels = [*values, value] if metric.label else values
                # Every sample starts at 0, so that rates have no gap.
                self._samples[engine, key] = families[metric.name].labels(*labels)

    def _family(self, metric: Metric) -> Any:
        labels = [*self._labelnames, metric.label] if metric.label else self._labelnames
        options: dict[str, Any] = {"multiprocess_mode": "mostrecent"}
        make = self._gauge_cls
        if metric.kind == "histogram":
            make, options = self._histogram_cls, {"buckets": list(metric.bounds)}
        elif metric.kind == "counter":
            make, options = self._counter_cls, {}
        # A registry takes a name once, and vLLM removes only its own metrics of an earlier engine.
        earlier = self._registered.pop((make, metric.name), None)
        if earlier is not None:
            with suppress(KeyError):  # it is in another registry, or in none
                REGISTRY.unregister(earlier)
        family = make(name=metric.name, documentation=metric.text, labelnames=labels, **options)
        self._registered[make, metric.name] = family
        return family

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the statistics that an engine reports."""
        for key, value in transfer_stats_data.items():
            if key.startswith(SHADOW_KEY):
                labels = [*self.per_engine_labelvalues[engine_idx], key.removeprefix(SHADOW_KEY)]
                self._shadow.labels(*labels).set(value)
                continue
            sample = self._samples[engine_idx, key]
            if key in EACH:
                for each in value:
                    sample.observe(each)
            elif key in _GAUGES:
                sample.set(value)
            else:
                sample.inc(value)
