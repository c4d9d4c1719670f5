"""Compare the metrics with figures that are counted in another way."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from docs.generate import reference
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric as PrometheusMetric
from prometheus_client.parser import text_string_to_metric_families
from tests.movers import ManualMover
from tests.replay.scenario import BLOCK as REPLAY_BLOCK
from tests.replay.scenario import comes_back, prepared, pushed_out

from kvstow import (
    AdmissionState,
    ConfigError,
    Engine,
    FullAttention,
    OffloadScheduler,
    hash_tokens,
)
from kvstow.engine import counts
from kvstow.observability.histogram import SIZE_BOUNDS_BYTES, Histogram, bucket
from kvstow.observability.metrics import ALL_METRICS, HISTOGRAMS, METRICS, MetricsCollector
from kvstow.replay import (
    BUNDLED_TRACE,
    Observer,
    ReplayConfig,
    ReplayEngine,
    ReplayState,
    read_trace,
)
from kvstow.replay.batch import Request
from kvstow.transfer import READY, BlockLayout

BLOCK = 4
BLOCK_BYTES = 2 * BLOCK * 8  # both ranks
DOCUMENT = list(range(16))  # 4 blocks


def exported(collector: MetricsCollector) -> list[PrometheusMetric]:
    """Return the families of a fresh registry, as Prometheus reads them."""
    registry = CollectorRegistry()
    registry.register(collector)
    return list(text_string_to_metric_families(generate_latest(registry).decode()))


def scraped(collector: MetricsCollector) -> dict[str, float]:
    """Return every sample of a fresh registry except the buckets, by `name` or `name label`."""
    families = exported(collector)
    kinds = {metric.name.removesuffix("_total"): metric.kind for metric in ALL_METRICS}
    assert all(family.documentation for family in families)
    assert {family.name: family.type for family in families}.items() <= kinds.items()
    samples = [
        sample
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    ]
    assert len(samples) == len({(sample.name, *sample.labels.values()) for sample in samples})
    return {
        " ".join([sample.name.removeprefix("kvstow_"), *sample.labels.values()]): sample.value
        for sample in samples
    }


class Script:
    """An engine of two ranks with its own clock, and the metrics that it should have."""

    def __init__(self, num_host_blocks: int) -> None:
        self.now_s = 100.0
        layouts = [[BlockLayout.from_arrays([np.zeros((10, BLOCK))])] for _ in range(2)]
        self.kv = Engine(
            10, num_host_blocks, [FullAttention(BLOCK)], layouts,
            world_size=2, load_timeout_s=60.0, clock=lambda: self.now_s, mover=ManualMover,
        )  # fmt: skip
        self.collector = MetricsCollector(self.kv.stats)
        self.expected: dict[str, float] = dict.fromkeys(scraped(self.collector), 0.0)
        capacity = {"device": 9 * BLOCK, "host": num_host_blocks * BLOCK}
        self.expect(
            **{f"capacity_tokens {tier}": num for tier, num in capacity.items()},
            **{f"capacity_blocks {tier}": num // BLOCK for tier, num in capacity.items()},
        )

    def expect(self, **changes: float) -> None:
        """Assert that these metrics changed by these amounts, and that no other changed."""
        for name, change in changes.items():
            self.expected[name] += change
        assert scraped(self.collector) == self.expected

    def admit(self, name: str, tokens: list[int]) -> AdmissionState:
        self.kv.add(name, hash_tokens(tokens, BLOCK))
        return self.kv.admit(name, len(tokens), 100, after=READY).state

    def end(self, which: str, *, fail: bool = False) -> None:
        """End the last store, or load, of both ranks."""
        for rank, mover in enumerate(self.kv.movers):
            assert isinstance(mover, ManualMover)
            ticket = getattr(mover, which)[-1]
            ticket.fail() if fail and rank else ticket.land()
        self.kv.poll()


def test_no_counter_falls_when_the_clock_steps_back() -> None:
    it = Script(num_host_blocks=6)
    with it.kv:
        it.admit("first", [*DOCUMENT, 5])
        it.kv.computed(["first"], [17], after=READY)
        before = scraped(it.collector)
        it.now_s -= 3600
        it.end("stores")
        after = scraped(it.collector)
        assert after["transfer_blocks_total store"] == 4
        assert after["transfer_seconds_total store"] == before["transfer_seconds_total store"] == 0
        assert after["transfer_duration_seconds_count store"] == 1
        assert after["transfer_duration_seconds_sum store"] == 0


def test_each_metric_changes_at_the_right_call_by_the_right_amount() -> None:
    it = Script(num_host_blocks=6)
    kv = it.kv
    with kv:
        assert it.admit("first", [*DOCUMENT, 5]) is AdmissionState.RUNS
        it.expect(**{"prefix_query_tokens_total device": 16})

        kv.computed(["first"], [17], after=READY)
        it.expect(
            transfers_in_flight=1,
            **{"prefix_query_tokens_total host": 16, "cached_blocks device": 4},
        )
        it.now_s += 2.5
        it.end("stores")
        it.expect(
            transfers_in_flight=-1,
            **{
                "transfer_blocks_total store": 4,
                "transfer_bytes_total store": 4 * BLOCK_BYTES,
                "transfer_seconds_total store": 2.5,
                "transfer_duration_seconds_count store": 1,
                "transfer_duration_seconds_sum store": 2.5,
                "transfer_size_bytes_count store": 1,
                "transfer_size_bytes_sum store": 4 * BLOCK_BYTES,
                "cached_blocks host": 4,
            },
        )
        kv.finish("first")

        # The request hits two blocks on the device, and the host is asked for nothing.
        assert it.admit("hit", [*DOCUMENT[:8], 9, 9, 9]) is AdmissionState.RUNS
        it.expect(**{"prefix_query_tokens_total device": 8, "prefix_hit_tokens_total device": 8})
        kv.finish("hit")

        assert kv.ledger.pool.reset()
        it.expect(**{"cached_blocks device": -4})
        assert it.admit("loads", [*DOCUMENT, 6]) is AdmissionState.LOADS
        it.expect(
            transfers_in_flight=1,
            **{
                "prefix_query_tokens_total device": 16,
                "prefix_query_tokens_total host": 16,
                "prefix_hit_tokens_total host": 16,
            },
        )
        assert it.admit("waits", [*DOCUMENT, 7]) is AdmissionState.PENDING
        it.expect(pending_lookups_total=1)
        kv.finish("waits")
        it.now_s += 0.25
        it.end("loads")
        it.expect(
            transfers_in_flight=-1,
            **{
                "transfer_blocks_total load": 4,
                "transfer_bytes_total load": 4 * BLOCK_BYTES,
                "transfer_seconds_total load": 0.25,
                "transfer_duration_seconds_count load": 1,
                "transfer_duration_seconds_sum load": 0.25,
                "transfer_size_bytes_count load": 1,
                "transfer_size_bytes_sum load": 4 * BLOCK_BYTES,
                "cached_blocks device": 4,
            },
        )
        kv.finish("loads")

        # A second document evicts two slots of the host, and nothing on the device.
        other = list(range(50, 66))
        assert it.admit("other", [*other, 5, 5, 5, 5]) is AdmissionState.RUNS
        # Of 9 blocks 4 hold the first document, and the other 5 are allocated.
        it.expect(**{"prefix_query_tokens_total device": 16})
        kv.computed(["other"], [16], after=READY)
        it.expect(
            transfers_in_flight=1,
            **{
                "prefix_query_tokens_total host": 16,
                "evicted_blocks_total host": 2,
                "cached_blocks host": -2,
                "cached_blocks device": 4,
            },
        )
        it.now_s += 7
        it.end("stores", fail=True)
        it.expect(transfers_in_flight=-1, **{"transfer_failures_total store": 1})
        kv.finish("other")
        it.expect()

        # A third document evicts the least recently used blocks of the device.
        assert it.admit("third", list(range(70, 86))) is AdmissionState.RUNS
        it.expect(
            **{
                "prefix_query_tokens_total device": 12,
                "evicted_blocks_total device": 3,
                "cached_blocks device": -3,
            }
        )
        kv.finish("third")

        # The load of the first document's two blocks on the host misses its deadline.
        assert kv.ledger.pool.reset()
        it.expected["cached_blocks device"] = 0
        assert it.admit("late", [*DOCUMENT, 8]) is AdmissionState.LOADS
        it.expect(
            transfers_in_flight=1,
            **{
                "prefix_query_tokens_total device": 16,
                "prefix_query_tokens_total host": 16,
                "prefix_hit_tokens_total host": 8,
            },
        )
        it.now_s += 61
        assert kv.poll().failed == ["late"]
        it.expect(
            transfers_in_flight=-1,
            transfers_in_quarantine=1,
            blocks_in_quarantine=2,
            late_transfers_total=1,
        )
        it.end("loads")
        it.expect(
            transfers_in_quarantine=-1,
            blocks_in_quarantine=-2,
            **{"transfer_failures_total load": 1},
        )
        kv.finish("late")


def test_a_histogram_counts_each_transfer_up_to_its_bound() -> None:
    it = Script(num_host_blocks=6)
    with it.kv as kv:
        it.admit("one", [*DOCUMENT, 5])
        kv.computed(["one"], [17], after=READY)
        it.now_s += 0.5  # a bound, which its bucket includes
        it.end("stores")
        families = {family.name: family.samples for family in exported(it.collector)}
    buckets = {
        sample.labels["le"]: sample.value
        for sample in families["kvstow_transfer_duration_seconds"]
        if sample.name.endswith("_bucket") and sample.labels["direction"] == "store"
    }
    assert (buckets["0.25"], buckets["0.5"], buckets["1.0"], buckets["+Inf"]) == (0, 1, 1, 1)


def test_a_value_beyond_every_bound_counts() -> None:
    sizes = Histogram("stored_bytes", SIZE_BOUNDS_BYTES)
    sizes.observe(SIZE_BOUNDS_BYTES[-1] + 1)
    assert sizes.stats()[bucket("stored_bytes", SIZE_BOUNDS_BYTES[-1])] == 0
    assert sizes.stats()["stored_bytes le inf"] == 1


def test_blocks_that_find_no_host_slot_count_as_dropped() -> None:
    it = Script(num_host_blocks=2)
    with it.kv as kv:
        it.admit("large", [*DOCUMENT, 5])
        kv.computed(["large"], [17], after=READY)
        kv.finish("large")
        assert scraped(it.collector)["dropped_blocks_total"] == 4 - 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_lost_events_are_counted() -> None:
    layouts = [BlockLayout.from_arrays([np.zeros((10, BLOCK))])]
    with Engine(10, 10, [FullAttention(BLOCK)], layouts, events_path="/dev/full") as kv:
        collector = MetricsCollector(kv.stats)
        kv.add("one", hash_tokens(DOCUMENT, BLOCK))
        kv.admit("one", 16, 16, after=READY)
        kv.ledger.cache("one", 16)
        assert scraped(collector)["lost_events_total"] == 0
        kv.poll()
        assert scraped(collector)["lost_events_total"] == 1


def test_a_scheduler_exports_only_the_statistics_that_it_has() -> None:
    scheduler = OffloadScheduler(4, [FullAttention(BLOCK)])
    found = scraped(MetricsCollector(scheduler.stats))
    assert found["capacity_tokens host"] == 16
    assert "prefix_query_tokens_total host" in found
    assert not [name for name in found if "device" in name or "bytes" in name]


class Tally(Observer):
    """Counts hit tokens from what the replay looks up."""

    def __init__(self) -> None:
        self.hit_tokens = [0, 0]

    def looked_up(
        self, replay: ReplayState, request: Request, device_tokens: int, host_tokens: int
    ) -> None:
        state = replay.kv._state.requests[request.name].state
        if state != "added":
            self.hit_tokens[0] += device_tokens
            self.hit_tokens[1] += host_tokens


@pytest.mark.parametrize("seed", [None, 4])
def test_the_metrics_of_a_replay_equal_its_figures(seed: int | None) -> None:
    tally = Tally()
    config = ReplayConfig(device_blocks=350, host_blocks=1500, faults=seed)
    replay = ReplayEngine(read_trace(BUNDLED_TRACE, limit=150), config, observer=tally)
    try:
        replay.run()
        found = scraped(MetricsCollector(replay.kv.stats))
    finally:
        replay.close()
    figures = replay.figures
    assert found["transfer_blocks_total load"] == figures.loaded_blocks > 0
    assert found["transfer_bytes_total load"] == figures.bytes_loaded
    assert found["transfer_bytes_total store"] == figures.bytes_stored
    assert found["transfer_failures_total load"] == figures.failed_loads
    assert found["transfer_failures_total store"] == figures.failed_stores
    assert found["late_transfers_total"] == figures.late_loads
    num_cached = replay.kv.ledger.pool.num_cached
    assert found["evicted_blocks_total device"] == figures.published - num_cached > 0
    hits = [found[f"prefix_hit_tokens_total {tier}"] for tier in ("device", "host")]
    assert hits == tally.hit_tokens
    for tier, num_hit in zip(("device", "host"), hits, strict=True):
        assert 0 < num_hit < found[f"prefix_query_tokens_total {tier}"]


def test_the_host_is_asked_only_for_tokens_that_the_device_lacks() -> None:
    """Two of the four prompts begin with the first prompt, which the device has evicted."""
    of = pushed_out(8, comes_back(3, at_s=200), comes_back(4, at_s=300))
    with prepared(of, device_blocks=9) as replay:
        replay.run()
        found = scraped(MetricsCollector(replay.kv.stats))
    # The last token of a prompt is always computed, so its last block is not looked up.
    assert found["prefix_query_tokens_total device"] == (3 + 6 + 4 + 4) * REPLAY_BLOCK
    assert found["prefix_hit_tokens_total device"] == 4 * REPLAY_BLOCK
    assert found["prefix_query_tokens_total host"] == (3 + 6 + 4) * REPLAY_BLOCK
    assert found["prefix_hit_tokens_total host"] == 4 * REPLAY_BLOCK


# -- names and texts ---------------------------------------------------------------------------


def test_metric_names_are_unique_and_follow_the_conventions() -> None:
    names = [metric.name for metric in ALL_METRICS]
    assert len(set(names)) == len(names)
    for metric in ALL_METRICS:
        assert re.fullmatch(r"kvstow_[a-z]+(_[a-z]+)*", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert (metric.label == "") == (list(metric.keys) == [""])
        assert metric.text.endswith(".")


def test_an_engine_has_every_statistic_that_a_metric_exports() -> None:
    it = Script(num_host_blocks=2)
    with it.kv as kv:
        keys = [key for metric in METRICS for key in metric.keys.values()]
        buckets = [
            bucket(key, bound)
            for metric in HISTOGRAMS
            for key in metric.keys.values()
            for bound in metric.bounds
        ]
        assert {*keys, *buckets} <= kv.stats().keys()
        assert len({*keys, *buckets}) == len(keys) + len(buckets)


def test_a_metric_exports_every_statistic_of_the_scheduler() -> None:
    scheduler = OffloadScheduler(1, [FullAttention(16)])
    exported = {key for metric in ALL_METRICS for key in metric.keys.values()}
    # Blocks of stores in flight: kvstow_transfers_in_flight tells operators enough.
    assert set(scheduler.stats()) - exported == {"storing_blocks"}


def test_the_documentation_lists_every_metric() -> None:
    cells = r"^\| `(kvstow_\w+)` \| (.*?) \| (.*?) \|$"
    rows = re.findall(cells, reference.metrics(), re.MULTILINE)
    expected = [
        (
            metric.name,
            f"`{metric.label}`: {', '.join(metric.keys)}" if metric.label else "",
            metric.text,
        )
        for metric in ALL_METRICS
    ]
    assert rows == expected


def test_collector_refuses_what_it_cannot_call() -> None:
    scheduler = OffloadScheduler(1, [FullAttention(16)])
    wrongs: list[Any] = [scheduler, scheduler.stats()]
    for wrong in wrongs:
        with pytest.raises(ConfigError, match=r"stats is .*: pass engine.stats itself"):
            MetricsCollector(wrong)


def test_a_registry_refuses_a_second_collector() -> None:
    """Else its page has each metric twice."""
    stats = OffloadScheduler(4, [FullAttention(BLOCK)]).stats
    registry = CollectorRegistry()
    registry.register(MetricsCollector(stats))
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        registry.register(MetricsCollector(stats))


def test_import_without_prometheus_client_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['prometheus_client'] = None; "
        "from kvstow.observability import MetricsCollector"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ImportError: MetricsCollector needs prometheus_client: pip install 'kvstow[metrics]'"
    )


def test_an_engine_counts_on_over_a_wake_what_the_metrics_export_as_counters() -> None:
    """A figure of the wrong kind in `HostCounts` would be too high after a wake, or fall."""
    counters = {key for one in METRICS if one.kind == "counter" for key in one.keys.values()}
    stats = OffloadScheduler(8, [FullAttention(BLOCK)]).stats()
    assert stats.keys() - counters == counts._GAUGES
