"""Prometheus metrics of an engine, an offload scheduler or the vLLM connector.

    from prometheus_client import REGISTRY, start_http_server
    REGISTRY.register(MetricsCollector(engine.stats))
    start_http_server(9400)

`ALL_METRICS` defines every metric. The collector reads the statistics at each
scrape and leaves out the metrics that its source lacks: `OffloadScheduler.stats` has no device tier
and no bytes.
"""

import reprlib
from collections.abc import Callable, Iterator, Mapping
from math import inf
from typing import Final, Literal, NamedTuple, TypeAlias

try:
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
    )
    from prometheus_client.registry import Collector
    from prometheus_client.utils import floatToGoString
except ImportError as error:
    raise ImportError(
        "MetricsCollector needs prometheus_client: pip install 'kvstow[metrics]'", name=error.name
    ) from error

from kvstow._core import ConfigError
from kvstow.observability.histogram import DURATION_BOUNDS_S, SIZE_BOUNDS_BYTES, bucket

Family: TypeAlias = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class Metric(NamedTuple):
    """A metric and the statistics that it exports.

    Attributes:
        name: the name in Prometheus.
        text: the help text in Prometheus.
        keys: the key in `Engine.stats()` by the value of the label; "" for a single sample. Of a
            histogram, the key of the sum.
        bounds: of a histogram, the largest value of each bucket.
    """

    name: str
    text: str
    keys: Mapping[str, str]
    bounds: tuple[float, ...] = ()

    @property
    def kind(self) -> Literal["counter", "gauge", "histogram"]:
        """A counter only rises, and its name ends with `_total`."""
        if self.bounds:
            return "histogram"
        return "counter" if self.name.endswith("_total") else "gauge"

    @property
    def label(self) -> str:
        """The label that distinguishes the samples; empty for a single sample."""
        labels = {
            "device": "tier",
            "store": "direction",
            "request": "reason",
            "wrong": "hint",
            "0": "gib",
            "demote": "direction",
            "late": "reason",
        }
        return labels.get(next(iter(self.keys)), "")


METRICS: Final = (
    Metric(
        "kvstow_prefix_query_tokens_total",
        "Tokens, in whole blocks, that admitted requests looked up. The host tier counts only "
        "those that the device lacks.",
        {"device": "device_query_tokens", "host": "query_tokens"},
    ),
    Metric(
        "kvstow_prefix_hit_tokens_total",
        "Looked-up tokens taken from the tier instead of recomputed. A load from the host counts "
        "when it begins, also if it fails later.",
        {"device": "device_hit_tokens", "host": "hit_tokens"},
    ),
    Metric(
        "kvstow_pending_lookups_total",
        "Lookups deferred because another request or a tier below the host brings the blocks.",
        {"": "pending_lookups"},
    ),
    Metric(
        "kvstow_transfer_blocks_total",
        "Blocks that successful transfers copied, once for all ranks.",
        {"store": "stored_blocks", "load": "loaded_blocks"},
    ),
    Metric(
        "kvstow_transfer_bytes_total",
        "Bytes that successful transfers copied, on all ranks together.",
        {"store": "stored_bytes", "load": "loaded_bytes"},
    ),
    Metric(
        "kvstow_transfer_seconds_total",
        "Seconds from submission until kvstow saw the end, summed over successful transfers, also "
        "those that overlap.",
        {"store": "store_seconds", "load": "load_seconds"},
    ),
    Metric(
        "kvstow_transfer_failures_total",
        "Transfers that failed or were late, and loads in flight when the host tier was reset, "
        "counted when the last copy has ended.",
        {"store": "failed_stores", "load": "failed_loads"},
    ),
    Metric(
        "kvstow_late_transfers_total",
        "Transfers that missed their deadline, counted at once.",
        {"": "late_jobs"},
    ),
    Metric(
        "kvstow_transfers_in_flight",
        "Transfers in flight, those in quarantine excluded.",
        {"": "jobs_in_flight"},
    ),
    Metric(
        "kvstow_transfers_in_quarantine",
        "Transfers that missed their deadline and have not ended yet.",
        {"": "quarantined_jobs"},
    ),
    Metric(
        "kvstow_blocks_in_quarantine",
        "Device blocks of transfers in quarantine, also those that a store has read.",
        {"": "quarantined_blocks"},
    ),
    Metric(
        "kvstow_dropped_blocks_total",
        "Host slots not stored because the tier had no room.",
        {"": "dropped_blocks"},
    ),
    Metric(
        "kvstow_rare_blocks_total",
        "Host slots not stored because fewer requests than store_threshold had seen them.",
        {"": "rare_blocks"},
    ),
    Metric(
        "kvstow_throttled_blocks_total",
        "Host slots not stored because earlier stores held as many device blocks as they may.",
        {"": "throttled_blocks"},
    ),
    Metric(
        "kvstow_damaged_blocks_total",
        "Host slots dropped because a load found damaged bytes.",
        {"": "damaged_blocks"},
    ),
    Metric(
        "kvstow_evicted_blocks_total",
        "Cached blocks that the tier evicted.",
        {"device": "device_evicted_blocks", "host": "evicted_blocks"},
    ),
    Metric(
        "kvstow_cached_blocks",
        "Blocks that a lookup can find.",
        {"device": "device_blocks_cached", "host": "resident_blocks"},
    ),
    Metric(
        "kvstow_capacity_blocks",
        "Blocks of the tier, the null block excluded.",
        {"device": "device_capacity_blocks", "host": "capacity_blocks"},
    ),
    Metric(
        "kvstow_capacity_tokens",
        "Prompt tokens that fit if every group keeps all of its blocks.",
        {"device": "device_capacity_tokens", "host": "capacity_tokens"},
    ),
    Metric(
        "kvstow_lost_events_total",
        "Events missing from the events file.",
        {"": "lost_events"},
    ),
)
"""The metrics that `kvstow.Engine` and the vLLM connector export under the same names."""

HISTOGRAMS: Final = (
    Metric(
        "kvstow_transfer_duration_seconds",
        "Seconds of each successful transfer, from submission until kvstow saw the end.",
        {"store": "store_seconds", "load": "load_seconds"},
        DURATION_BOUNDS_S,
    ),
    Metric(
        "kvstow_transfer_size_bytes",
        "Bytes of each successful transfer.",
        {"store": "stored_bytes", "load": "loaded_bytes"},
        SIZE_BOUNDS_BYTES,
    ),
)
"""The histograms that `kvstow.Engine` and the vLLM connector export under the same names."""

CONNECTOR_METRICS: Final = (
    Metric(
        "kvstow_postponed_blocks_total",
        "Blocks that lazy mode put off to the next step because stores held as many device blocks "
        "as they may, counted each time. vLLM may overwrite them before.",
        {"": "postponed_blocks"},
    ),
    Metric(
        "kvstow_skipped_blocks_total",
        "Blocks not stored because of their request (`store: false`), or as generated tokens "
        "(`offload_prompt_only`).",
        {"request": "unwanted_blocks", "generated": "generated_blocks"},
    ),
    Metric(
        "kvstow_request_hints_total",
        "Hints that requests gave. A request counts again after a preemption or a failed load.",
        {
            "wrong": "wrong_hints",
            "store": "store_hints",
            "max_load_tokens": "max_load_tokens_hints",
            "priority": "priority_hints",
        },
    ),
    Metric(
        "kvstow_disk_hit_tokens_total",
        "Prompt tokens hit on the host because the disk had brought them.",
        {"": "disk_hit_tokens"},
    ),
    Metric(
        "kvstow_disk_blocks_total",
        "Slots that demotes wrote to the disk and promotes read from it.",
        {"demote": "demoted_blocks", "promote": "promoted_blocks"},
    ),
    Metric(
        "kvstow_disk_bytes_total",
        "Bytes that demotes wrote and promotes read, on all ranks together.",
        {"demote": "demoted_bytes", "promote": "promoted_bytes"},
    ),
    Metric(
        "kvstow_disk_failed_blocks_total",
        "Slots whose demote or promote failed, was late, or found damage.",
        {"demote": "failed_demotes", "promote": "failed_promotes"},
    ),
    Metric(
        "kvstow_disk_mismatched_blocks_total",
        "Blocks read from a slot file that were not what had been written.",
        {"": "disk_mismatched_blocks"},
    ),
    Metric(
        "kvstow_disk_dropped_blocks_total",
        "Slots for which a demote found no room on the disk, or a promote on the host.",
        {"": "disk_dropped"},
    ),
    Metric(
        "kvstow_disk_evicted_blocks_total",
        "Slots that the disk tier evicted.",
        {"": "disk_evicted_blocks"},
    ),
    Metric(
        "kvstow_disk_cached_blocks",
        "Slots of the disk tier that hold a block.",
        {"": "disk_resident_blocks"},
    ),
    Metric(
        "kvstow_disk_capacity_blocks",
        "Slots of the disk tier. 0 without one.",
        {"": "disk_capacity_blocks"},
    ),
    Metric(
        "kvstow_disk_mode",
        "2: the disk tier reads and writes. 1: it only reads. 0: it is opening, a disk has "
        "failed, or there is none.",
        {"": "disk_mode"},
    ),
    Metric(
        "kvstow_shared_hit_tokens_total",
        "Prompt tokens hit on the host because the shared store had brought them. 0 with a disk "
        "too: kvstow_disk_hit_tokens_total counts them then.",
        {"": "shared_hit_tokens"},
    ),
    Metric(
        "kvstow_shared_asked_blocks_total",
        "Blocks that the server asked the store for. A block counts again for another request, "
        "unless its answer is at most a second old.",
        {"": "shared_asked_blocks"},
    ),
    Metric(
        "kvstow_shared_found_blocks_total",
        "Blocks asked for that the store said it had.",
        {"": "shared_found_blocks"},
    ),
    Metric(
        "kvstow_shared_questions_total",
        "Questions to the store, also those not asked after failures. Requests that ask for the "
        "same blocks at once share one.",
        {"": "shared_questions"},
    ),
    Metric(
        "kvstow_shared_unanswered_questions_total",
        "Questions without an answer: late, so the request went on, or failed, or not asked after "
        "failures. A late question that then fails counts twice.",
        {"late": "shared_late_questions", "failed": "shared_failed_questions"},
    ),
    Metric(
        "kvstow_shared_blocks_total",
        "Blocks that demotes put into the store and promotes got from it.",
        {"demote": "shared_demoted_blocks", "promote": "shared_promoted_blocks"},
    ),
    Metric(
        "kvstow_shared_bytes_total",
        "Bytes that demotes put and promotes got, on all ranks together.",
        {"demote": "shared_demoted_bytes", "promote": "shared_promoted_bytes"},
    ),
    Metric(
        "kvstow_shared_failed_blocks_total",
        "Blocks whose demote or promote failed, was late, found no room in the queue, or found "
        "something else.",
        {"demote": "shared_failed_demotes", "promote": "shared_failed_promotes"},
    ),
    Metric(
        "kvstow_shared_mismatched_blocks_total",
        "Blocks got from the store that were not what was asked for.",
        {"": "shared_mismatched_blocks"},
    ),
    Metric(
        "kvstow_shared_dropped_blocks_total",
        "Blocks for which a promote found no room on the host.",
        {"": "shared_dropped"},
    ),
    Metric(
        "kvstow_shared_known_blocks",
        "Blocks that this server knows the store to have. 0 with a disk too: "
        "kvstow_disk_cached_blocks counts them then.",
        {"": "shared_resident_blocks"},
    ),
    Metric(
        "kvstow_shared_mode",
        "2: there is a shared tier, also while its store fails. 0: there is none.",
        {"": "shared_mode"},
    ),
    Metric(
        "kvstow_skipped_load_tokens_total",
        "Prompt tokens that requests computed because loads from a tier below the host took "
        "longer (`skip_slow_loads`).",
        {"": "skipped_load_tokens"},
    ),
    Metric(
        "kvstow_hit_ratio",
        "Share of the blocks of prompts that came from the device or the host, in the window.",
        {"": "hit_ratio"},
    ),
    Metric(
        "kvstow_shadow_hit_ratio_error",
        "Largest standard error of kvstow_shadow_hit_ratio. 0 while the sampling rate is 1.",
        {"": "shadow_hit_ratio_error"},
    ),
    Metric(
        "kvstow_shadow_sampling_rate",
        "Share of the blocks that kvstow watches for kvstow_shadow_hit_ratio.",
        {"": "shadow_sampling_rate"},
    ),
    Metric(
        "kvstow_shadow_window_seconds",
        "Length of the window of the ratios. A second counts half after observe_half_life_s.",
        {"": "shadow_window_seconds"},
    ),
)
"""More metrics of the vLLM connector. An engine exports those of its tiers below the host."""


SHADOW_KEY: Final = "shadow_hit_ratio "
"""The key of a shadow tier's hit ratio, which its size in GiB follows."""

SHADOW_HIT_RATIO: Final = Metric(
    "kvstow_shadow_hit_ratio",
    "Share of the blocks of prompts that the device and a host tier of this many GiB would have "
    "hit, in the window. 0: the device alone. inf: no bound.",
    {size: SHADOW_KEY + size for size in ("0", "SIZE", "inf")},
)
"""A metric of the vLLM connector. The sizes depend on the options."""

ALL_METRICS: Final = (*METRICS, *HISTOGRAMS, *CONNECTOR_METRICS, SHADOW_HIT_RATIO)


class MetricsCollector(Collector):
    """Exports statistics to a `prometheus_client` registry, at each scrape.

    A registry takes only one collector, so give each engine of a process a registry of its own.

    Args:
        stats: `Engine.stats` or `OffloadScheduler.stats`. The scrape may call it from any thread,
            for as long as the collector is registered.

    Raises:
        ConfigError: `stats` is not callable.
    """

    def __init__(self, stats: Callable[[], Mapping[str, float]]) -> None:
        given: object = stats
        if not callable(given):
            raise ConfigError(
                f"stats is {reprlib.repr(given)}, expected a callable: pass engine.stats itself, "
                "without calling it"
            )
        self._stats = stats

    def describe(self) -> Iterator[Family]:
        """Yield the metrics, whose names let a registry refuse a second collector."""
        return self.collect()

    def collect(self) -> Iterator[Family]:
        """Yield the metrics with their present values."""
        stats = self._stats()
        # Those of the disk tier are among the connector's, whose other keys an engine lacks.
        for metric in (*METRICS, *CONNECTOR_METRICS):
            labels = [metric.label] if metric.label else []
            family_of = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = family_of(metric.name, metric.text, labels=labels)
            for value, key in metric.keys.items():
                if key in stats:
                    family.add_metric([value] if labels else [], stats[key])
            if family.samples:
                yield family
        for metric in HISTOGRAMS:
            histogram = HistogramMetricFamily(metric.name, metric.text, labels=[metric.label])
            for value, key in metric.keys.items():
                if key in stats:
                    bounds = (*metric.bounds, inf)
                    counts = [stats[bucket(key, bound)] for bound in bounds]
                    buckets = list(zip(map(_written, bounds), counts, strict=True))
                    histogram.add_metric([value], buckets, stats[key])
            if histogram.samples:
                yield histogram


def _written(bound: float) -> str:
    # As prometheus_client writes the bounds of its own histograms, which vLLM uses.
    return str(floatToGoString(bound))  # type: ignore[no-untyped-call]
