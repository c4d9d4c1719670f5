"""What kvstow counts, as Prometheus metrics.

    from prometheus_client import REGISTRY, start_http_server
    REGISTRY.register(MetricsCollector(engine.stats))
    start_http_server(9400)

The counters are read when the metrics are scraped and kept nowhere twice. What a source does not
count is left out: `OffloadScheduler.stats` has no device, and knows blocks but no bytes.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Final, Literal, NamedTuple, TypeAlias

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError(
        "kvstow.metrics needs prometheus_client: pip install 'kvstow[metrics]'", name=error.name
    ) from error

__all__ = ["METRICS", "Metric", "MetricsCollector"]

Family: TypeAlias = CounterMetricFamily | GaugeMetricFamily


class Metric(NamedTuple):
    """One metric, and where its numbers are.

    Attributes:
        name: as it is exposed.
        kind: a counter only rises.
        text: what it counts.
        label: which label tells its samples apart; none for a single one.
        keys: of the statistics, by the label's value; for a single sample under "".
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
        "Tokens, in whole blocks, that admitted requests looked for; on the host, those that the "
        "device did not have.",
        "tier",
        _tiers("device_query_tokens", "query_tokens"),
    ),
    Metric(
        "kvstow_prefix_hit_tokens_total",
        "counter",
        "Tokens of these that were found and used.",
        "tier",
        _tiers("device_hit_tokens", "hit_tokens"),
    ),
    Metric(
        "kvstow_pending_lookups_total",
        "counter",
        "Lookups told to ask again, because what they need was being loaded for another request.",
        "",
        {"": "pending_lookups"},
    ),
    Metric(
        "kvstow_transfer_blocks_total",
        "counter",
        "Blocks whose copies went well and count.",
        "direction",
        _directions("stored_blocks", "loaded_blocks"),
    ),
    Metric(
        "kvstow_transfer_bytes_total",
        "counter",
        "Bytes of transfers that went well, on all ranks.",
        "direction",
        _directions("stored_bytes", "loaded_bytes"),
    ),
    Metric(
        "kvstow_transfer_seconds_total",
        "counter",
        "Time from the submission of transfers that went well until their end was seen; what "
        "overlaps counts for each.",
        "direction",
        _directions("store_seconds", "load_seconds"),
    ),
    Metric(
        "kvstow_transfer_failures_total",
        "counter",
        "Transfers that failed, were late, or were loads that a reset overtook.",
        "direction",
        _directions("failed_stores", "failed_loads"),
    ),
    Metric(
        "kvstow_late_transfers_total",
        "counter",
        "Transfers that were past their deadline.",
        "",
        {"": "late_jobs"},
    ),
    Metric(
        "kvstow_transfers_in_flight",
        "gauge",
        "Transfers under way, those in quarantine not counted.",
        "",
        {"": "jobs_in_flight"},
    ),
    Metric(
        "kvstow_transfers_in_quarantine",
        "gauge",
        "Late transfers that have not ended: their blocks are out of reach.",
        "",
        {"": "quarantined_jobs"},
    ),
    Metric(
        "kvstow_blocks_in_quarantine",
        "gauge",
        "Device blocks that these transfers hold.",
        "",
        {"": "quarantined_blocks"},
    ),
    Metric(
        "kvstow_dropped_blocks_total",
        "counter",
        "Slots' worth of blocks that were due for a store and for which the host had no room.",
        "",
        {"": "dropped_blocks"},
    ),
    Metric(
        "kvstow_evicted_blocks_total",
        "counter",
        "Cached blocks of the device, and slots of the host, that were given up for others.",
        "tier",
        _tiers("device_evicted_blocks", "evicted_blocks"),
    ),
    Metric(
        "kvstow_cached_blocks",
        "gauge",
        "Blocks of the device, and slots of the host, that a lookup can find.",
        "tier",
        _tiers("device_blocks_cached", "resident_blocks"),
    ),
    Metric(
        "kvstow_capacity_tokens",
        "gauge",
        "Tokens of prompts that the tier holds, where every group keeps all of its blocks.",
        "tier",
        _tiers("device_capacity_tokens", "capacity_tokens"),
    ),
    Metric(
        "kvstow_lost_events_total",
        "counter",
        "Events that the events file lacks, because it could not be written.",
        "",
        {"": "lost_events"},
    ),
)
"""All metrics there are."""


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
