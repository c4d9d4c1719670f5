"""Late, failing and lost copies, chosen by a seed: no block is corrupt, and the replay ends."""

import json
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.replay.scenario import (
    BLOCK,
    SMALL_MODELS,
    assert_ended_well,
    least_device_blocks,
    prepared,
    traces,
)
from tests.sampled import IS_FULL

from kvstow import Engine, JobEnd, Transfer, cli
from kvstow.replay import BUNDLED_TRACE, ReplayConfig, ReplayEngine, Trace, read_trace
from kvstow.replay.model import ReplayModel

SMALL = ["--limit", "150", "--device-blocks", "700", "--host-blocks", "3000", "--model", "jamba"]


def replayed(seed: int, model: str = "full", *, limit: int = 150) -> ReplayEngine:
    device_blocks = 350 if model == "full" else 700
    config = ReplayConfig(device_blocks=device_blocks, host_blocks=3000, model=model, faults=seed)
    engine = ReplayEngine(read_trace(BUNDLED_TRACE, limit=limit), config)
    try:
        engine.run()
    finally:
        engine.close()
    return engine


SEEDS = [("full", 3), *product(["gemma-3", "gpt-oss", "jamba"], [0])]
MORE_SEEDS = [("full", 4), *product(["gemma-3", "gpt-oss", "jamba"], [1])]


@pytest.mark.parametrize(("model", "seed"), SEEDS + MORE_SEEDS * IS_FULL)
def test_a_replay_with_faults_has_no_corrupt_block(seed: int, model: str) -> None:
    limit = 300 if model == "full" else 150
    engine = replayed(seed, model, limit=limit)

    figures, stats = engine.figures, engine.kv.stats()
    assert figures.finished_requests == limit
    assert engine.verifier.num_corrupt == 0
    num_asked = figures.device_hits + figures.host_hits + figures.recomputed_blocks
    assert num_asked == engine.trace.num_blocks
    assert (figures.failed_stores, figures.failed_loads) == (
        stats["failed_stores"],
        stats["failed_loads"],
    )
    assert figures.late_loads == stats["late_jobs"]
    # Each kind of fault happened, and some loads succeeded.
    assert figures.failed_stores > 4
    assert figures.failed_loads > figures.late_loads > 0
    assert figures.loaded_blocks > 5
    assert (stats["requests"], stats["jobs_in_flight"], stats["quarantined_jobs"]) == (0, 0, 0)
    assert stats["device_blocks_free"] == engine.config.device_blocks - 1
    engine.kv.check()


@settings(max_examples=40)
@given(
    of=traces(),
    model=st.sampled_from(SMALL_MODELS),
    seed=st.integers(0, 10_000),
    spare_blocks=st.sampled_from([0, 3, 20]),
    host_blocks=st.sampled_from([5, 20, 500]),
    max_step_tokens=st.sampled_from([7, BLOCK, 8192]),
    bandwidth=st.sampled_from([100.0, 1e4, float("inf")]),
)
def test_any_trace_with_any_faults_replays_to_its_end(
    of: Trace,
    model: ReplayModel,
    seed: int,
    spare_blocks: int,
    host_blocks: int,
    max_step_tokens: int,
    bandwidth: float,
) -> None:
    needed = least_device_blocks(of, model, max_step_tokens=max_step_tokens)
    with prepared(
        of,
        model=model,
        device_blocks=needed + spare_blocks,
        host_blocks=host_blocks,
        max_step_tokens=max_step_tokens,
        bandwidth_bytes_per_s=bandwidth,
        faults=seed,
    ) as engine:
        engine.run()

        assert_ended_well(engine)


def test_a_seed_determines_the_run() -> None:
    def outcome(seed: int) -> list[object]:
        figures = replayed(seed, "jamba", limit=60).figures
        return [figures.steps, figures.failed_stores, figures.failed_loads, figures.virtual_seconds]

    first = outcome(7)
    assert outcome(7) == first != outcome(8)


def test_table_and_json_show_the_seed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay", *SMALL, "--faults", "31"]) == 0
    table = capsys.readouterr().out
    assert "31   seed of the late, failing and lost copies" in table
    assert "of these missed their deadline" in table

    assert cli.main(["replay", *SMALL, "--faults", "31", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["options"]["faults"] == 31
    assert found["late_loads"] > 0


# -- without the mechanism ---------------------------------------------------------------------


def test_a_failed_load_that_counts_as_good_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def outcomes(transfer: Transfer) -> list[bool | list[bool]]:
        return [True for _ in real_outcomes(transfer)]

    real_outcomes = Transfer.outcomes
    monkeypatch.setattr(Transfer, "outcomes", outcomes)

    assert replayed(1, "jamba").verifier.num_corrupt > 0


def test_blocks_freed_before_a_late_copy_ends_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def expire(engine: Engine) -> list[str]:
        before = {
            transfer.job.job_id for transfer in engine.transfers if transfer not in given_away
        }
        failed = really_expire(engine)
        for transfer in engine.transfers:
            if transfer.job.job_id in before and transfer.request_id in failed:
                engine.ledger.pool.unpin(transfer.job.block_ids)
                given_away.append(transfer)
        return failed

    def end(engine: Engine, transfer: Transfer) -> JobEnd:
        if transfer in given_away:
            engine.ledger.pool.pin(transfer.job.block_ids)
        return really_end(engine, transfer)

    given_away: list[Transfer] = []
    really_expire, really_end = Engine.expire, Engine.end
    monkeypatch.setattr(Engine, "expire", expire)
    monkeypatch.setattr(Engine, "end", end)

    assert sum(replayed(seed, "jamba").verifier.num_corrupt for seed in range(3)) > 0
    assert given_away
