"""What kvstow counts, as Prometheus metrics.

    from prometheus_client import REGISTRY, start_http_server
    REGISTRY.register(MetricsCollector(engine.stats))
    start_http_server(9400)

`METRICS` defines every metric, for an engine and for the vLLM connector. The collector reads the
counters at each scrape. It leaves out what its source does not count: `OffloadScheduler.stats` has
no device tier and no bytes.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Final, Literal, NamedTuple, TypeAlias

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError(
        "MetricsCollector needs prometheus_client: pip install 'kvstow[metrics]'", name=error.name
    ) from error

__all__ = ["METRICS", "Metric", "MetricsCollector"]

Family: TypeAlias = CounterMetricFamily | GaugeMetricFamily


class Metric(NamedTuple):
    """One metric, and the statistics that it exports.

    Attributes:
        name: as Prometheus shows it.
        kind: a counter only rises.
        text: what it counts.
        label: the label that distinguishes its samples; empty for a single sample.
        keys: by the label's value, the key in `Engine.stats()`; "" for a single sample.
    """

    name: str
    kind: Literal["counter", "gauge"]
    text: str
    label: str
    keys: Mapping[str, str]


def _tiers(device: str, host: str) -> dict[str, str]:
    return {"device": device, "host": host}


def _directions(store: str, load: str) -> dict[str, str]:
    return {"store": store, "load": load}


METRICS: Final = (
    Metric(
        "kvstow_prefix_query_tokens_total",
        "counter",
        "Tokens, in whole blocks, that admitted requests looked up in the tier; in the host tier, "
        "those that the device lacked.",
        "tier",
        _tiers("device_query_tokens", "query_tokens"),
    ),
    Metric(
        "kvstow_prefix_hit_tokens_total",
        "counter",
        "Tokens of these that the tier held, and that requests used instead of computing them.",
        "tier",
        _tiers("device_hit_tokens", "hit_tokens"),
    ),
    Metric(
        "kvstow_pending_lookups_total",
        "counter",
        "Lookups deferred because another request is loading the same blocks.",
        "",
        {"": "pending_lookups"},
    ),
    Metric(
        "kvstow_transfer_blocks_total",
        "counter",
        "Blocks of transfers that succeeded; a block counts once, whatever the number of ranks.",
        "direction",
        _directions("stored_blocks", "loaded_blocks"),
    ),
    Metric(
        "kvstow_transfer_bytes_total",
        "counter",
        "Bytes of transfers that succeeded, on all ranks.",
        "direction",
        _directions("stored_bytes", "loaded_bytes"),
    ),
    Metric(
        "kvstow_transfer_seconds_total",
        "counter",
        "Time of transfers that succeeded, from submission until kvstow saw their end; transfers "
        "that overlap each count in full.",
        "direction",
        _directions("store_seconds", "load_seconds"),
    ),
    Metric(
        "kvstow_transfer_failures_total",
        "counter",
        "Transfers that failed, missed their deadline, or were loads that a reset overtook.",
        "direction",
        _directions("failed_stores", "failed_loads"),
    ),
    Metric(
        "kvstow_late_transfers_total",
        "counter",
        "Transfers that missed their deadline.",
        "",
        {"": "late_jobs"},
    ),
    Metric(
        "kvstow_transfers_in_flight",
        "gauge",
        "Transfers under way, without those in quarantine.",
        "",
        {"": "jobs_in_flight"},
    ),
    Metric(
        "kvstow_transfers_in_quarantine",
        "gauge",
        "Transfers that missed their deadline and have not ended.",
        "",
        {"": "quarantined_jobs"},
    ),
    Metric(
        "kvstow_blocks_in_quarantine",
        "gauge",
        "Device blocks that transfers in quarantine hold.",
        "",
        {"": "quarantined_blocks"},
    ),
    Metric(
        "kvstow_dropped_blocks_total",
        "counter",
        "Blocks, in host slots, that were due for a store when the host tier had no room.",
        "",
        {"": "dropped_blocks"},
    ),
    Metric(
        "kvstow_damaged_blocks_total",
        "counter",
        "Blocks, in host slots, that left the host tier because a load found their bytes damaged.",
        "",
        {"": "damaged_blocks"},
    ),
    Metric(
        "kvstow_evicted_blocks_total",
        "counter",
        "Cached blocks that the tier evicted; in the host tier, in slots.",
        "tier",
        _tiers("device_evicted_blocks", "evicted_blocks"),
    ),
    Metric(
        "kvstow_cached_blocks",
        "gauge",
        "Blocks that a lookup can find; in the host tier, in slots.",
        "tier",
        _tiers("device_blocks_cached", "resident_blocks"),
    ),
    Metric(
        "kvstow_capacity_blocks",
        "gauge",
        "Blocks that the tier has, without the null block; in the host tier, in slots.",
        "tier",
        _tiers("device_capacity_blocks", "capacity_blocks"),
    ),
    Metric(
        "kvstow_capacity_tokens",
        "gauge",
        "Tokens of prompts that fit into the tier if every group keeps all of its blocks.",
        "tier",
        _tiers("device_capacity_tokens", "capacity_tokens"),
    ),
    Metric(
        "kvstow_lost_events_total",
        "counter",
        "Events that the events file lacks because it could not be written.",
        "",
        {"": "lost_events"},
    ),
)
"""All metrics. `kvstow.Engine` and the vLLM connector export them under the same names."""


class MetricsCollector(Collector):
    """Reads statistics when it is scraped; register it with a `prometheus_client` registry.

    A registry takes one: give each engine of a process a registry of its own.

    Args:
        stats: `Engine.stats` or `OffloadScheduler.stats`, of one that lives as long as this. It may
            be called from any thread.
    """

    def __init__(self, stats: Callable[[], Mapping[str, float]]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Family]:
        """The metrics of the moment."""
        stats = self._stats()
        for metric in METRICS:
            labels = [metric.label] if metric.label else []
            family = _family(metric, labels)
            for value, key in metric.keys.items():
                if key in stats:
                    family.add_metric([value] if labels else [], stats[key])
            if family.samples:
                yield family


def _family(metric: Metric, labels: list[str]) -> Family:
    if metric.kind == "counter":
        return CounterMetricFamily(metric.name, metric.text, labels=labels)
    return GaugeMetricFamily(metric.name, metric.text, labels=labels)
