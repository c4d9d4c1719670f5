"""The ratios that observing reports are those of real tiers, and observing changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.vllm.forking import IS_FULL
from tests.vllm.halves import BLOCK_SIZE, FULL, STATE, WINDOW, cache_config
from tests.vllm.simulated import VOCAB_SIZE, Simulated
from tests.vllm.test_metrics import Exported
from tests.vllm.traffic import Traffic

from kvstow import ConfigError, hash_tokens
from kvstow.observability.metrics import SHADOW_KEY
from kvstow.vllm import shadow
from kvstow.vllm.model import Model
from kvstow.vllm.observe import Observer
from kvstow.vllm.options import Options
from kvstow.vllm.shadow import KEPT_TURNS, MAX_TURNS, Checkpoints, ShadowTier
from kvstow.vllm.shadow_slots import SLOT_BYTES

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

FACTORS = (0.5, 1, 2, 4)
HYBRID = (WINDOW,) * 5 + (FULL,)


def traffic(chats: float, num_prompts: int = 300 if IS_FULL else 160) -> Traffic:
    return Traffic(VOCAB_SIZE, 200, 40, chats, num_prompts, seed=3)


def run(engine: Simulated, requests: Traffic) -> int:
    """Serve all prompts; return the blocks that they look up."""
    names: list[str] = []

    def answer(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        new = [f"{len(names) + at}" for at in range(len(prompts))]
        names.extend(new)
        for name, prompt in zip(new, prompts, strict=True):
            engine.add(name, prompt, max_tokens=12)
        engine.settle(3000)
        for name, prompt in zip(new, prompts, strict=True):
            assert engine.answers[name] == engine.right_answer(list(prompt), 12, None)
        return [engine.answers[name] for name in new]

    return sum((len(prompt) - 1) // BLOCK_SIZE for prompt in requests.run(answer, 4))


def gauges(engine: Simulated) -> dict[str, float]:
    observer = engine.connector._observer
    observer._report_at, observer.has_news = 0.0, True
    return dict(observer.gauges(engine.half.num_host_blocks))


def shadow_ratios(found: dict[str, float]) -> list[float]:
    return [value for key, value in found.items() if key.startswith(SHADOW_KEY)]


@pytest.mark.parametrize(
    ("specs", "num_blocks", "num_slots", "chats", "points"),
    [
        ((FULL,), 60, 200, 0.0, 1),
        ((FULL,), 60, 200, 0.5, 1.1),
        (HYBRID, 200, 600, 0.0, 1),
        (HYBRID, 200, 600, 0.5, 2),
        ((STATE, STATE, FULL), 100, 600, 0.0, 1),
        ((STATE, STATE, FULL), 100, 600, 0.5, 1),
    ],
    ids=["full", "full-chats", "windows", "windows-chats", "states", "states-chats"],
)
def test_ratios_are_those_of_real_tiers(
    folder: Path, specs: Any, num_blocks: int, num_slots: int, chats: float, points: float
) -> None:
    """Within about one point; two for a tier of windows with room for ten prompts, four at once."""
    if (specs != HYBRID or not chats) and not IS_FULL:
        pytest.skip("takes minutes: make test-vllm-full")
    engine = Simulated(
        folder, {"observe": True, "num_cpu_blocks": num_slots}, specs=specs, num_blocks=num_blocks
    )
    run(engine, traffic(chats))
    assert engine.worker.arena is None and not engine.worker.movers
    found = gauges(engine)
    alone, *ratios, infinite = shadow_ratios(found)
    assert alone == found["hit_ratio"] and found["shadow_hit_ratio_error"] == 0
    assert ratios == sorted(ratios) and ratios[-1] <= infinite
    for factor, ratio in zip(FACTORS, ratios[:4], strict=True):
        options = {"num_cpu_blocks": int(num_slots * factor)}
        real = Simulated(folder, options, specs=specs, num_blocks=num_blocks)
        num_lookups = run(real, traffic(chats))
        there = gauges(real)
        num_loaded = real.half.offload.stats()["hit_tokens"] / BLOCK_SIZE  # type: ignore[union-attr]
        assert there["hit_ratio"] - there[SHADOW_KEY + "0"] == pytest.approx(
            num_loaded / num_lookups, abs=1e-9
        )
        assert abs(there["hit_ratio"] - ratio) * 100 <= points, (factor, there, ratios)
        # The tier reports the ratio of its own size, beside its real one.
        assert abs(there["hit_ratio"] - shadow_ratios(there)[2]) * 100 <= points


def test_the_log_says_that_there_is_no_tier(folder: Path, log: list[str]) -> None:
    """Also beside options of a tier, which an operator may take for one that works."""
    Simulated(folder, {"observe": True, "cpu_bytes_to_use": "1GiB"})
    (line,) = [line for line in log if "observe is true, so there is no host tier" in line]
    Simulated(folder, {"num_cpu_blocks": 10})
    assert [line] == [line for line in log if "observe is true" in line]


def test_observing_schedules_as_vllm_without_a_connector(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM takes as many steps, hits as many tokens, and waits for nothing."""
    steps = []
    for options in ({"observe": True}, {"observe": True, "num_cpu_blocks": 1}):
        engine = Simulated(folder, options, num_blocks=60)
        asked: list[Any] = []
        lookup = engine.connector.get_num_new_matched_tokens

        def looking(request: Any, num: int, lookup: Any = lookup, asked: Any = asked) -> Any:
            asked.append(lookup(request, num))
            return asked[-1]

        monkeypatch.setattr(engine.connector, "get_num_new_matched_tokens", looking)
        run(engine, traffic(0.5, 40))
        assert set(asked) == {(0, False)}
        assert not engine.connector.has_pending_push_work()
        assert not engine.connector.has_pending_block_frees()
        assert not list(engine.connector.take_events())
        jobs = engine.connector.build_connector_meta(SimpleNamespace(num_scheduled_tokens={}))
        assert not (jobs.loads or jobs.stores or jobs.asks_capacity)
        steps.append(engine.num_steps)
    assert steps[0] == steps[1]


def test_statistics_reach_prometheus(folder: Path) -> None:
    engine = Simulated(folder, {"observe": True, "observe_gib": 4})
    run(engine, traffic(0.0, 40))
    observer = engine.connector._observer
    observer._report_at = 0.0
    observer.has_news = True
    stats = engine.connector.get_kv_connector_stats()
    assert stats is not None
    exported = Exported()
    exported.metrics.observe(stats.data, 1)
    exported.metrics.observe(stats.data, 1)  # gauges do not add up
    found = {
        (sample.name, sample.labels.get("gib", "")): sample.value
        for family in exported.registry.collect()
        for sample in family.samples
        if sample.labels["engine"] == "1"
    }
    sizes = ["0", "2", "4", "8", "16", "32", "inf"]
    assert [size for name, size in found if name == "kvstow_shadow_hit_ratio"] == sizes
    for size in sizes:
        assert found["kvstow_shadow_hit_ratio", size] == stats.data[SHADOW_KEY + size]
    assert found["kvstow_shadow_sampling_rate", ""] == 1
    assert found["kvstow_hit_ratio", ""] == found["kvstow_shadow_hit_ratio", "0"]
    assert found["kvstow_shadow_window_seconds", ""] > 0
    total = stats.aggregate(stats)
    assert total.data == stats.data
    # Nothing is reported again soon, nor without news.
    assert engine.connector.get_kv_connector_stats() is None
    observer._report_at = 0.0
    assert engine.connector.get_kv_connector_stats() is None


# -- what counts -----------------------------------------------------------------------------------


class Watched:
    """An observer with its own clock, and requests of vLLM's scheduler."""

    def __init__(self, *specs: Any, **options: Any) -> None:
        self.now_s = 0.0
        groups = Model.of(cache_config(*(specs or (FULL,)))).groups
        model = Model(64, groups, ((),), BLOCK_SIZE)
        self.shadow = ShadowTier(
            model,
            Options(num_cpu_blocks=100, **options),
            world_size=1,
            retention_interval=0,
            clock=lambda: self.now_s,
        )
        # A tier of 100 slots is 1 GiB large.
        self.shadow._tier_gib = self.shadow._gib = 1.0
        self.observer = Observer(self.shadow, None, clock=lambda: self.now_s)

    def request(self, name: str, prompt: Sequence[int], **more: Any) -> Any:
        fields = {
            "num_computed_tokens": 0,
            "num_in_flight_tokens": 0,
            "kv_transfer_params": None,
            "skip_reading_prefix_cache": False,
        }
        return SimpleNamespace(
            request_id=name,
            num_prompt_tokens=len(prompt),
            num_tokens=len(prompt),
            block_hashes=list(hash_tokens(prompt, BLOCK_SIZE)),
            **(fields | more),
        )

    def serve(self, request: Any, num_local: int = 0, num_external: int = 0) -> None:
        self.observer.looked_up(request, num_local)
        self.observer.admitted(request, num_external)
        self.observer.stepped(100, [request.request_id])
        request.num_computed_tokens = request.num_tokens
        self.observer.stepped(100, [])
        self.observer.finished(request)

    def ratios(self, *sizes: str) -> list[float]:
        self.observer._report_at, self.observer.has_news = 0.0, True
        found = self.observer.gauges(100)
        return [found[SHADOW_KEY + size] for size in sizes]


def test_a_request_counts_once_and_at_its_admission() -> None:
    it = Watched()
    first = it.request("a", range(48))
    for num_local in (0, 16, 32):
        it.observer.looked_up(first, num_local)  # vLLM has no room yet
    assert it.observer.gauges(100) == {}
    it.observer.admitted(first, 0)
    assert it.ratios("0", "inf") == [1, 1], "two of two blocks, one token left to compute"
    it.observer.looked_up(first, 0)  # preempted
    it.observer.admitted(first, 0)
    assert it.ratios("0", "inf") == [1, 1]
    never = it.request("b", range(48))
    it.observer.looked_up(never, 0)
    it.observer.finished(never)
    assert it.ratios("0", "inf") == [1, 1]
    it.observer.finished(first)
    assert not it.observer._seen


def test_blocks_enter_the_tier_when_they_are_computed() -> None:
    it = Watched()
    first = it.request("a", range(49))
    it.observer.looked_up(first, 0)
    it.observer.admitted(first, 0)
    it.serve(it.request("early", range(49)))  # it computes, too
    assert it.ratios("inf") == [0]
    it.serve(it.request("late", range(49)))
    assert it.ratios("inf") == [3 / 9]
    # The blocks of its answer enter at its end.
    first.num_computed_tokens = first.num_tokens = 66
    first.block_hashes = list(hash_tokens(range(66), BLOCK_SIZE))
    it.observer.finished(first)
    it.serve(it.request("next turn", range(66)))
    assert it.ratios("inf") == [7 / 13]


def test_a_step_looks_only_at_the_requests_of_the_step_before() -> None:
    """Thousands may be loading meanwhile: to look at each of 4,000 took up to 3 ms a step."""
    it = Watched()
    loading, first = it.request("loading", range(49)), it.request("first", range(49, 98))
    for request in (loading, first):
        it.observer.looked_up(request, 0)
        it.observer.admitted(request, 0)
    del loading.num_computed_tokens  # to read it is an error, which ends the shadow tier
    it.observer.stepped(100, {"first": 49})
    first.num_computed_tokens = 49
    it.observer.stepped(100, {})
    it.observer.stepped(100, {})
    again = it.request("again", range(49, 98))
    it.observer.looked_up(again, 0)
    it.observer.admitted(again, 0)
    assert it.ratios("inf") == [3 / 9]
    it.observer.stepped(100, {"loading": 1})
    loading.num_computed_tokens = 49
    it.observer.stepped(100, {"again": 1})
    assert list(it.shadow._computing) == ["again"]


def test_only_what_was_computed_enters_the_tier() -> None:
    it = Watched()
    aborted = it.request("a", range(49))
    it.observer.looked_up(aborted, 0)
    it.observer.admitted(aborted, 0)
    aborted.num_computed_tokens, aborted.num_in_flight_tokens = 48, 8
    it.observer.finished(aborted)
    it.serve(it.request("b", range(49)))
    assert it.ratios("inf") == [2 / 6]


def test_hints_and_options_say_what_enters_the_tier() -> None:
    it = Watched(offload_prompt_only=True)
    hint = {"kvstow": {"store": False}}
    it.serve(it.request("a", range(49), kv_transfer_params=hint))
    it.serve(it.request("b", range(49)))
    assert it.ratios("inf") == [0]
    chat = it.request("c", range(17))
    it.observer.looked_up(chat, 0)
    it.observer.admitted(chat, 0)
    chat.num_computed_tokens = 33
    chat.block_hashes = list(hash_tokens(range(100, 133), BLOCK_SIZE))
    it.observer.finished(chat)
    it.serve(it.request("d", range(100, 133)))
    assert it.ratios("inf") == [(1 + 1) / 9]


def test_requests_that_read_no_cache_are_not_counted() -> None:
    it = Watched()
    it.serve(it.request("a", range(49), skip_reading_prefix_cache=True))
    assert it.observer.gauges(100).keys() == {"shadow_window_seconds", "shadow_sampling_rate"}
    it.serve(it.request("b", range(49)))
    assert it.ratios("inf") == [1]


def test_hits_of_the_host_count_in_the_real_ratio() -> None:
    it = Watched()
    it.serve(it.request("a", range(65)), num_local=16, num_external=32)
    assert it.ratios("0", "inf") == [0.25, 0.25]
    it.observer.has_news, it.observer._report_at = True, 0.0
    assert it.observer.gauges(100)["hit_ratio"] == 0.75


def test_a_reset_empties_the_tier_and_keeps_the_counts() -> None:
    it = Watched()
    for name in ("a", "b"):
        it.serve(it.request(name, range(49)))
    assert it.ratios("inf") == [0.5]
    computing = it.request("computing", range(49))
    it.observer.looked_up(computing, 0)
    it.observer.admitted(computing, 0)
    it.observer.emptied()
    it.observer.stepped(100, ["computing"])
    computing.num_computed_tokens = computing.num_tokens
    it.observer.stepped(100, [])
    it.serve(it.request("c", range(49)))
    assert it.ratios("inf") == [6 / 12], "the hit of `computing`, no hit after the reset"


@pytest.mark.parametrize("keeps", [False, True])
def test_a_reset_of_vllm_reaches_the_shadow_tier(folder: Path, keeps: bool) -> None:
    for options in ({"observe": True}, {"num_cpu_blocks": 100}):
        engine = Simulated(folder, {**options, "preserve_on_sleep": keeps})
        for name in ("a", "b"):
            engine.add(name, range(1, 41), max_tokens=2)
            engine.settle()
            assert engine.scheduler.reset_prefix_cache(reset_connector=True)
        assert shadow_ratios(gauges(engine))[-1] == (0.5 if keeps else 0)


def test_old_requests_lose_weight_and_unused_blocks_are_forgotten() -> None:
    it = Watched(observe_half_life_s=100.0)
    it.serve(it.request("a", range(49)))
    it.serve(it.request("b", range(49)))
    it.now_s = 150
    it.serve(it.request("c", range(1000, 1049)))
    it.serve(it.request("d", range(49)))
    # a missed and b hit at weight 1/2, c missed and d hit at weight 1.
    assert it.ratios("inf") == [1.5 / 3]
    it.observer.has_news, it.observer._report_at = True, 0.0
    assert it.observer.gauges(100)["shadow_window_seconds"] == 100 / 2 + 50
    it.now_s += 100 * (KEPT_TURNS + 1)
    it.serve(it.request("e", range(49)))
    assert it.ratios("inf")[0] < 1e-6
    it.now_s += 100 * 10 * MAX_TURNS
    it.serve(it.request("f", range(49)))
    assert it.ratios("inf") == [pytest.approx(0)]
    assert it.shadow._curve.num_unique == 3


def test_hits_of_a_window_end_where_prompts_end_or_part() -> None:
    it = Watched(WINDOW, FULL)
    it.serve(it.request("a", range(101)))
    it.serve(it.request("b", [*range(64), *range(200, 240)]))
    assert it.ratios("inf") == [0], "no window is kept at 64 tokens"
    it.serve(it.request("c", [*range(64), *range(300, 340)]))
    assert it.ratios("inf") == [4 / 18], "now there is"
    it.serve(it.request("again", range(101)))
    assert it.ratios("inf") == [10 / 24]


@pytest.mark.parametrize("spec", [WINDOW, STATE], ids=["window", "state"])
def test_a_model_without_full_attention_has_ratios_once_a_prompt_is_computed(spec: Any) -> None:
    it = Watched(spec)
    first = it.request("a", range(100))
    it.observer.looked_up(first, 0)
    it.observer.admitted(first, 0)
    assert "hit_ratio" not in it.observer.gauges(100)
    it.now_s += 1
    it.serve(first)
    it.serve(it.request("again", range(100)))
    assert it.ratios("0", "1", "inf") == [0, 0.5, 0.5]


def test_sizes_of_several_groups_are_simulated_as_far_as_memory_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    it = Watched(WINDOW, FULL)
    it.observer.stepped(100, [])
    assert it.shadow._slots is not None and len(it.shadow._slots.hits) == 5
    monkeypatch.setattr(shadow, "CURVE_BYTES", (50 + 100 + 200) * SLOT_BYTES)
    small = Watched(WINDOW, FULL)
    small.observer.stepped(100, [])
    assert small.shadow._slots is not None and len(small.shadow._slots.hits) == 3
    one_group = Watched(FULL)
    one_group.observer.stepped(100, [])
    assert one_group.shadow._slots is None, "the curve is exact"


def test_sizes_of_several_groups_are_those_of_real_tiers() -> None:
    """A prompt of 6 blocks takes 6 slots, and 2 for its window: 7 prompts have 56 slots."""
    it = Watched(WINDOW, FULL)
    prompts = [range(1000 * at, 1000 * at + 97) for at in range(7)]
    for at, prompt in enumerate(prompts * 2):
        it.serve(it.request(str(at), prompt))
    assert it.ratios("0.5", "1") == [0, 0.5]
    assert it.shadow._slots is not None and not it.shadow._slots._running
    running = it.request("running", prompts[0])
    it.observer.looked_up(running, 0)
    it.observer.admitted(running, 0)
    it.observer.emptied()
    it.observer.stepped(100, ["running"])
    running.num_computed_tokens = running.num_tokens
    it.observer.stepped(100, [])
    it.observer.finished(running)
    it.serve(it.request("after", prompts[1]))
    # 7 prompts of 14 were hits before the reset, then one of two.
    assert it.ratios("1") == [8 / 16]


@pytest.mark.parametrize(
    ("specs", "retention", "per_key", "slots"),
    [
        ((FULL,), 0, 1, 0),
        ((FULL, WINDOW, WINDOW), 0, 1, 4),
        ((FULL, WINDOW, WINDOW), None, 3, 0),
        ((FULL, WINDOW), 64, 1.5, 2),
        ((FULL, STATE, STATE), 0, 1, 2),
    ],
)
def test_slots_of_a_prompt(specs: Any, retention: int | None, per_key: float, slots: int) -> None:
    model = Model(64, Model.of(cache_config(*specs)).groups, ((),), BLOCK_SIZE)
    checkpoints = Checkpoints(model, retention)
    keys = [bytes([at]) for at in range(10)]
    assert checkpoints.slots_per_key == per_key
    assert checkpoints.retain(keys, 8) == slots
    assert checkpoints.retain(keys, 8) == 0
    ends = {0: [8], None: None, 64: [4, 8]}[retention]
    assert checkpoints.ends(keys) == (None if specs == (FULL,) else ends)


def test_an_error_turns_the_shadow_tier_off_and_serving_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    engine = Simulated(folder, {"num_cpu_blocks": 100})

    def fail(*args: Any) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(ShadowTier, "admitted", fail)
    for name in ("a", "b"):
        engine.add(name, range(1, 41), max_tokens=2)
        engine.settle()
        assert engine.answers[name] == engine.right_answer(list(range(1, 41)), 2, None)
    assert gauges(engine) == {}
    assert sum("ShadowTier is off" in line for line in log) == 1
    assert engine.half.offload is not None, "the host tier is not concerned"


@pytest.mark.parametrize(
    "options",
    [
        {"observe": 1},
        {"observe_gib": 0},
        {"observe_gib": "4"},
        {"observe_gib": float("inf")},
        {"observe_half_life_s": -1},
        {"record_trace": ""},
        {"record_trace_bytes": 1000},
    ],
    ids=str,
)
def test_wrong_options_are_refused(options: dict[str, object]) -> None:
    [name] = options
    with pytest.raises(ConfigError, match=name):
        Options.parse(options)


def test_reports_come_once_a_second() -> None:
    it = Watched()
    it.now_s = 100
    it.observer.has_news = True
    assert it.observer.gauges(0) == {}, "the ranks have not reported their memory"
    it.serve(it.request("a", range(49)))
    assert it.observer.gauges(100)
    it.serve(it.request("b", range(49)))
    assert it.observer.gauges(100) == {}
    it.now_s += 1
    assert it.observer.gauges(100)["hit_ratio"] == 0
    it.now_s += 1
    assert it.observer.gauges(100) == {}, "nothing has happened"
