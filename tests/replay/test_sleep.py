"""Replays that sleep in the middle complete in the same order, and no block is corrupt."""

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.replay.scenario import (
    FULL,
    MIXED,
    SLIDING,
    SMALL_MODELS,
    STATEFUL,
    Checked,
    assert_ended_well,
    comes_back,
    least_device_blocks,
    prepared,
    pushed_out,
    request,
    trace,
    traces,
)

from kvstow.cli import main
from kvstow.engine.ranks import Ranks
from kvstow.replay import BUNDLED_TRACE, ReplayConfig, ReplayEngine, ReplayState, Trace, read_trace
from kvstow.replay.batch import Request
from kvstow.replay.model import ReplayModel
from kvstow.replay.sleeper import Ended, sleep_and_wake
from kvstow.transfer import Ticket

SLOW = 2000.0
"""Bytes per second. A block of 128 bytes takes as long as a dozen steps."""


class Completions(Checked):
    """Records the requests in the order in which they finish."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def finished(self, replay: ReplayState, request: Request) -> None:
        self.done.append(request.name)


def replayed(of: Trace, sleep_at: Sequence[int], **options: Any) -> tuple[list[str], ReplayEngine]:
    """Replay a trace that sleeps at these steps, and return its completions."""
    seen = Completions()
    given: dict[str, Any] = {"device_blocks": 60, "observer": seen} | options
    with prepared(of, sleep_at=sleep_at, **given) as engine:
        engine.run()
        assert_ended_well(engine)
        assert engine.figures.sleeps == len(sleep_at)
        return seen.done, engine


BUSY = trace(
    request(1, [1, 2, 3, 4], output=40),
    request(2, [1, 2, 5, 6, 7], output=10, tail=5),
    request(3, [8, 9], output=70, tail=3),
    request(4, [1, 2, 3, 10], output=25, tail=1),
)
"""Requests that share a prefix, end one after another, and have partial last blocks."""


@pytest.mark.parametrize("model", [FULL, SLIDING, STATEFUL, MIXED], ids=lambda model: model.name)
@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_sleep_before_during_and_after_generation(model: ReplayModel, mode: str) -> None:
    options: dict[str, Any] = {"model": model, "mode": mode, "device_blocks": 200}
    awake, engine = replayed(BUSY, [], **options)
    last = engine.figures.steps
    for sleep_at in [0], [1], [12], [last - 1], [last], [0, 5, 5, 6, 30, last]:
        done, engine = replayed(BUSY, sleep_at, **options)
        assert done == awake, sleep_at
        assert engine.figures.steps == last
        assert engine.figures.moved_blocks > 0 or sleep_at in ([0], [last])


@pytest.mark.parametrize("model", ["full", "gemma-3"])
def test_a_real_trace_completes_in_the_same_order(model: Any) -> None:
    of = read_trace(BUNDLED_TRACE, limit=80)
    done: list[list[str]] = []
    for sleep_at in (), (0, 60, 200, 500, 500, 700):
        seen = Completions()
        config = ReplayConfig(
            device_blocks=6000,
            host_blocks=20_000,
            model=model,
            sleep_at=sleep_at,
            bandwidth_bytes_per_s=float("inf"),
        )
        engine = ReplayEngine(of, config, observer=seen)
        engine.run()
        engine.close()
        assert (engine.verifier.num_corrupt, engine.figures.sleeps) == (0, len(sleep_at))
        done.append(seen.done)
    assert len(done[0]) == 80
    assert done[0] == done[1]


def test_sleep_in_the_middle_of_a_chunked_prefill() -> None:
    """With 24 tokens a step, a chunk ends in the middle of a block."""
    awake, engine = replayed(BUSY, [], max_step_tokens=24)
    for step in range(1, 12):
        done, engine = replayed(BUSY, [step], max_step_tokens=24)
        assert done == awake
        assert engine.figures.moved_blocks > 0


@pytest.mark.parametrize("options", [{}, {"world_size": 3}, {"blocks_per_slot": 2}], ids=str)
def test_sleep_with_stores_and_loads_in_flight(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    goes_on = request(3, [60, 61], output=120, at_s=199.9)
    of = pushed_out(23, goes_on, comes_back(4, at_s=200), comes_back(5, at_s=200.1))
    options = {"device_blocks": 24, "bandwidth_bytes_per_s": SLOW} | options
    awake, engine = replayed(of, [], **options)
    in_flight: set[str] = set()

    def noting(replay: ReplayState) -> list[Ended]:
        in_flight.update(transfer.direction for transfer in replay.kv.transfers)
        return sleep_and_wake(replay)

    monkeypatch.setattr("kvstow.replay.engine.sleep_and_wake", noting)
    for step in range(0, engine.figures.steps + 1, 3):
        done, _ = replayed(of, [step, step], **options)
        assert done == awake, step
    assert in_flight == {"store", "load"}


def test_sleep_with_drafts_pending() -> None:
    awake, _ = replayed(BUSY, [], lookahead_tokens=20)
    done, engine = replayed(BUSY, [1, 7, 8, 20], lookahead_tokens=20)
    assert done == awake
    assert engine.figures.moved_blocks > 0


def test_sleep_with_late_and_failing_copies() -> None:
    of = trace(
        *[
            request(n, [1, 2, 3, *range(10 * n, 10 * n + 3)], output=40, at_s=n / 9)
            for n in range(1, 30)
        ]
    )
    for seed in range(6):
        options: dict[str, Any] = {"faults": seed, "device_blocks": 16}
        done, _ = replayed(of, range(0, 150, 7), bandwidth_bytes_per_s=SLOW, **options)
        assert len(done) == 29


@settings(max_examples=60, deadline=None)
@given(
    of=traces(),
    model=st.sampled_from(SMALL_MODELS),
    sleep_at=st.lists(st.integers(0, 60), min_size=1, max_size=5),
    spare_blocks=st.integers(0, 12),
    world_size=st.integers(1, 2),
    bandwidth=st.sampled_from([float("inf"), SLOW]),
)
@example(BUSY, FULL, [3, 3], 0, 1, SLOW)
def test_any_trace_sleeps_at_any_time(
    of: Trace,
    model: ReplayModel,
    sleep_at: list[int],
    spare_blocks: int,
    world_size: int,
    bandwidth: float,
) -> None:
    seen = Completions()
    with prepared(
        of,
        device_blocks=least_device_blocks(of, model) + spare_blocks,
        model=model,
        sleep_at=sleep_at,
        world_size=world_size,
        bandwidth_bytes_per_s=bandwidth,
        observer=seen,
    ) as engine:
        engine.run()
        assert_ended_well(engine)
        assert sorted(seen.done, key=int) == [str(request.line) for request in of.requests]


def test_a_wake_without_loads_leaves_corrupt_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """This control shows that the check finds blocks that are not loaded."""
    copy = Ranks.copy

    def forgetful(ranks: Ranks, direction: Any, *how: Any) -> list[list[Ticket]]:
        return [] if direction == "load" else copy(ranks, direction, *how)

    monkeypatch.setattr(Ranks, "copy", forgetful)
    with prepared(BUSY, device_blocks=60, sleep_at=[12]) as engine:
        engine.run()
        assert engine.verifier.num_corrupt >= 8


def test_the_old_block_ids_are_wrong_after_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    """This control shows that the check finds a batch that keeps its old block ids."""
    monkeypatch.setattr("kvstow.replay.batch.Batch.replace_blocks", lambda *_: None)
    with prepared(BUSY, device_blocks=60, sleep_at=[12]) as engine:
        engine.run()
        assert engine.verifier.num_corrupt > 0


def test_the_command_sleeps(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["replay", "--limit", "60", "--device-blocks", "1500", "--json"]
    assert main([*options]) == 0
    awake = json.loads(capsys.readouterr().out)
    assert main([*options, "--sleep-at", "0,3,40,40,200"]) == 0
    slept = json.loads(capsys.readouterr().out)
    assert (awake["sleeps"], slept["sleeps"]) == (0, 5)
    assert slept["options"]["sleep_at"] == [0, 3, 40, 40, 200]
    assert slept["moved_blocks"] > 100
    assert (slept["corrupt_blocks"], slept["finished_requests"]) == (0, 60)
    assert slept["verified_blocks"] > awake["verified_blocks"]
    assert main([*options[:-1], "--sleep-at", "3,99999"]) == 0
    assert re.search(r"sleeps +1 +of 2: the replay ends after [\d,]+ st", capsys.readouterr().out)
    assert main(["replay", "--sleep-at", "1,x"]) == 2
    assert "such as 10,20" in capsys.readouterr().err
    assert main(["replay", "--sleep-at", "-1"]) == 2
