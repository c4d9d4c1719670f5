"""The figures of a replay as JSON and as a table, where the bundled slice shows none of them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.replay.scenario import BLOCK, comes_back, prepared, pushed_out, request, trace

from kvstow.replay import ReplayEngine, ReplayState, Trace, figures_json
from kvstow.replay.report import figures_rows

REAL_BYTES_PER_TOKEN = 131_072  # of Llama-3.1-8B


def rows_of(replay: ReplayState) -> dict[str, tuple[str, str]]:
    """Return the number and the explanation of each row."""
    return {name: (number, text) for rows in figures_rows(replay) for name, number, text in rows}


def conversations(num: int) -> Trace:
    """Return a trace whose prompts come back after others have taken their blocks."""
    prompts = [list(range(100 * at, 100 * at + 6)) for at in range(num)]
    return trace(
        *(
            request(line, ids, output=BLOCK + 1, at_s=float(line))
            for line, ids in enumerate([*prompts, *prompts, *prompts], 1)
        )
    )


def run(engine: ReplayEngine) -> dict[str, tuple[str, str]]:
    engine.run()
    return rows_of(engine)


def test_table_has_the_jobs_that_failed_and_the_loads_that_were_late() -> None:
    with prepared(
        conversations(12), device_blocks=20, faults=9, bandwidth_bytes_per_s=20_000
    ) as engine:
        rows = run(engine)
        figures = engine.figures
        num_stores, num_loads = figures.failed_stores, figures.failed_loads
        assert len({num_stores, num_loads, figures.late_loads, 0}) == 4, "choose another seed"
        assert rows["failed"] == (f"{num_stores} / {num_loads}", "store / load jobs")
        assert rows["late loads"] == (f"{figures.late_loads}", "of these missed their deadline")
        assert rows["faults"][0] == "9"


def test_table_has_failed_loads_without_a_failed_store() -> None:
    with prepared(trace(request(1, [1])), device_blocks=8) as engine:
        run(engine)
        assert "failed" not in rows_of(engine)
        engine.figures.failed_loads = 3
        assert rows_of(engine)["failed"][0] == "0 / 3"


@pytest.mark.parametrize(
    ("sleep_at", "number", "text"),
    [([2], "1", "blocks woke under other ids"), ([2, 10**6], "1", "of 2: the replay ends after ")],
)
def test_table_has_the_sleeps(sleep_at: Sequence[int], number: str, text: str) -> None:
    with prepared(conversations(2), device_blocks=40, sleep_at=sleep_at) as engine:
        found, explanation = run(engine)["sleeps"]
        assert found == number
        assert text in explanation


def test_size_of_the_host_counts_all_blocks_of_a_slot() -> None:
    with prepared(
        conversations(4), device_blocks=40, host_blocks=4096, blocks_per_slot=2
    ) as engine:
        rows = run(engine)
        gib = 4096 * 2 * BLOCK * REAL_BYTES_PER_TOKEN / 2**30
        assert rows["evicted, host"] == ("0", f"from 4,096 slots ({gib:.1f} GiB), lru")
        assert rows["blocks per slot"][0] == "2"


def test_table_has_the_time_between_first_and_last_arrival() -> None:
    of = trace(request(1, [1], at_s=70), request(2, [2], at_s=73))
    with prepared(of, device_blocks=8) as engine:
        number, text = run(engine)["requests"]
        assert (number, text) == ("2", "of 2 finished, which arrive within 3 s")


def test_times_of_the_accounting_are_percentiles_of_the_steps() -> None:
    with prepared(trace(request(1, [1])), device_blocks=8) as engine:
        engine.figures.accounting_us = [float(us) for us in range(1001)]
        assert figures_json(engine)["accounting_us_per_step"] == {"p50": 500.0, "p99": 990.0}
        text = "a step at the median, 990 us at p99"
        assert rows_of(engine)["accounting"] == ("500 us", text)
        engine.figures.accounting_us = []
        assert figures_json(engine)["accounting_us_per_step"] == {"p50": 0.0, "p99": 0.0}


def test_loaded_and_stored_bytes_have_their_own_rows() -> None:
    with prepared(pushed_out(8, comes_back(3, at_s=200)), device_blocks=9) as engine:
        rows = run(engine)
        figures = engine.figures
        assert 0 < figures.bytes_loaded < figures.bytes_stored
        assert rows["blocks stored"][0] == f"{figures.stored_blocks}"
        assert rows["blocks loaded"][0] == f"{figures.loaded_blocks}"
