"""The connector exports the metrics of `kvstow.Engine` under the same names."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import prometheus_client
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from kvstow import Engine, FullAttention, hash_tokens
from kvstow.observability.metrics import CONNECTOR_METRICS, MetricsCollector
from kvstow.transfer import READY, BlockLayout
from kvstow.vllm import KVStowConnector
from kvstow.vllm.stats import (
    EACH,
    EXPORTED,
    ConnectorPromMetrics,
    ConnectorStats,
    StatsReporter,
)

BLOCK = 4
Sample = tuple[str, str]  # its name, and the value of kvstow's label


class Exported:
    """The connector's metrics of two engines, in their own registry."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()

        def counter(**options: Any) -> prometheus_client.Counter:
            return prometheus_client.Counter(**options, registry=registry)

        def gauge(multiprocess_mode: str, **options: Any) -> prometheus_client.Gauge:
            assert multiprocess_mode == "mostrecent"
            return prometheus_client.Gauge(**options, registry=registry)

        def histogram(**options: Any) -> prometheus_client.Histogram:
            return prometheus_client.Histogram(**options, registry=registry)

        self.metrics = ConnectorPromMetrics(
            SimpleNamespace(kv_transfer_config=None),
            {
                prometheus_client.Counter: counter,
                prometheus_client.Gauge: gauge,
                prometheus_client.Histogram: histogram,
            },
            ["model_name", "engine"],
            {0: ["a model", "0"], 1: ["a model", "1"]},
        )


def samples(registry: CollectorRegistry, **labels: str) -> dict[Sample, tuple[str, str, float]]:
    """Return the kind, meaning and value of each sample of one engine."""
    found = {}
    for family in registry.collect():
        for sample in family.samples:
            if not sample.name.endswith("_created") and labels.items() <= sample.labels.items():
                own = {name: value for name, value in sample.labels.items() if name not in labels}
                bound = own.pop("le", "")
                [(label, value)] = own.items() or [("", "")]
                meaning = f"{label}: {family.documentation}"
                found[f"{sample.name} {bound}".rstrip(), value] = (
                    family.type,
                    meaning,
                    sample.value,
                )
    return found


def land(engine: Engine) -> None:
    for transfer in engine.transfers:
        transfer.wait()
    engine.poll()


def test_the_connector_exports_the_metrics_of_an_engine_with_equal_values() -> None:
    device = np.zeros((10, BLOCK))
    reporter = StatsReporter(6, clock=lambda: 0.0)
    ours, theirs = Exported(), CollectorRegistry()
    ticks = count()
    with Engine(
        10, 6, [FullAttention(BLOCK)], [BlockLayout.from_arrays([device])],
        clock=lambda: next(ticks) / 1000,
    ) as engine:  # fmt: skip
        theirs.register(MetricsCollector(engine.stats))
        for name in ("first", "again"):
            engine.add(name, hash_tokens(range(16), BLOCK))
            engine.admit(name, 17, 100, after=READY)
            land(engine)  # the load of the second
            engine.computed([name], [16], after=READY)
            land(engine)
            report = reporter.report(engine.scheduler.stats())  # the parts must add up
            assert report is not None
            ours.metrics.observe(report.data, 1)
            engine.finish(name)
            engine.ledger.pool.reset()
        assert reporter.report(engine.scheduler.stats()) is None, "nothing has changed"
        stats = engine.stats()
        assert stats["store_seconds le inf"] == stats["load_seconds le inf"] == 1
        rank = ConnectorStats()
        rank.moved("store", int(stats["stored_bytes"]), stats["store_seconds"])
        rank.moved("load", int(stats["loaded_bytes"]), stats["load_seconds"])
        ours.metrics.observe(rank.data, 1)

        expected = samples(theirs)
    for sample in list(expected):
        if sample[1] == "device" or sample[0] == "kvstow_lost_events_total":
            del expected[sample]
    found = samples(ours.registry, model_name="a model", engine="1")
    own = {metric.name for metric in CONNECTOR_METRICS}
    assert {sample: found[sample] for sample in found if sample[0] not in own} == expected
    assert {name for name, _ in found} >= own
    assert found["kvstow_transfer_bytes_total", "load"][2] == 4 * BLOCK * 8
    assert found["kvstow_prefix_hit_tokens_total", "host"][2] == 16
    assert found["kvstow_transfer_seconds_total", "store"][2] > 0
    # Every sample of the other engine exists and is 0.
    idle = samples(ours.registry, model_name="a model", engine="0")
    assert idle.keys() == found.keys()
    assert not any(value for *_, value in idle.values())


def test_counters_of_several_ranks_add_up_and_gauges_do_not() -> None:
    total = ConnectorStats()
    for seconds in (0.25, 0.5, 1.5):
        rank = ConnectorStats()
        rank.moved("store", 100, seconds, num_ranks=3)
        total.aggregate(rank)
        total.aggregate(ConnectorStats(data={"resident_blocks": 7}))
    assert total.reduce() == {"stored_bytes": 300, "store_seconds": 0.75, "resident_blocks": 7}
    assert total.data["store_seconds each"] == [0.25, 0.5, 1.5]
    assert total.data["stored_bytes each"] == [100, 100, 100]
    assert total.data.keys() <= EXPORTED.keys() | EACH.keys()


def test_tier_that_is_off_holds_nothing_and_keeps_its_size() -> None:
    reporter = StatsReporter(128, clock=lambda: 0.0)
    sizes = {"capacity_tokens": 2048, "hit_tokens": 64}
    assert reporter.report(sizes | {"resident_blocks": 90, "quarantined_blocks": 9}) is not None
    left = reporter.report({"quarantined_blocks": 3})
    assert left is not None
    assert left.data == {"resident_blocks": 0, "quarantined_blocks": 3}
    ended = reporter.report({"quarantined_blocks": 0})
    assert ended is not None
    assert ended.data == {"quarantined_blocks": 0}
    assert reporter.report({"quarantined_blocks": 0}) is None
    assert StatsReporter(128).report({}) is None, "a server that only observes has no tier"


def test_gauges_are_reported_again_each_second() -> None:
    """A slow API server may export the gauges of a step after another one has those of the next."""
    now = [0.0]
    reporter = StatsReporter(128, clock=lambda: now[0])
    stats = {"hit_tokens": 64, "disk_mode": 2, "quarantined_blocks": 0}
    gauges = {"disk_mode": 2, "quarantined_blocks": 0, "capacity_blocks": 128}
    for seconds, expected in ((0, gauges | {"hit_tokens": 64}), (0.9, None), (0.1, gauges)):
        now[0] += seconds
        report = reporter.report(stats)
        assert (None if report is None else report.data) == expected


def test_loggers_that_get_the_same_statistics_do_not_add_to_each_other() -> None:
    """vLLM gives each of its loggers the same dictionary."""
    sent: list[dict[str, Any]] = [{"hit_tokens": 16}, {"hit_tokens": 32}]
    loggers: list[Any] = [None, None]
    for data in sent:
        for at, total in enumerate(loggers):
            new = KVStowConnector.build_kv_connector_stats(data)
            loggers[at] = new if total is None else total.aggregate(new)
    assert [total.reduce() for total in loggers] == [{"hit_tokens": 48}] * 2
    assert sent == [{"hit_tokens": 16}, {"hit_tokens": 32}]


def test_a_second_engine_of_a_process_takes_over_the_metrics() -> None:
    """vLLM makes the metrics anew, as it may after an engine that was shut down."""
    for value in (3, 5):
        metrics = ConnectorPromMetrics(
            SimpleNamespace(kv_transfer_config=None),
            {Counter: Counter, Gauge: Gauge, Histogram: Histogram},
            ["model_name", "engine"],
            {0: ["a model", "0"]},
        )
        metrics.observe({"stored_blocks": value}, 0)
    found = samples(REGISTRY, model_name="a model", engine="0")
    assert found["kvstow_transfer_blocks_total", "store"][2] == 5
