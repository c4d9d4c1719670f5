"""Jobs through the real cupy on the simulated CUDA: bytes, order, and calls."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.transfer.cuda.simulation import library

# What a trial of the design reached. The engine's thread spends some microseconds on each call.
MOST_CALLS = {1: 18, 512: 67}


def test_jobs_of_all_sizes_move_the_right_bytes_with_few_calls(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    if (reason := library.why_not()) is not None:
        pytest.skip(reason)
    folder: Path = tmp_path_factory.getbasetemp() / "simulation"
    folder.mkdir(exist_ok=True)
    ended = library.run(["-m", "tests.transfer.cuda.jobs_on_cupy"], folder)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == "", "accesses that nothing orders"
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    # The first job of each size makes the events that later jobs use again.
    for line in lines[2:4]:
        for way, calls in line["calls"].items():
            num_calls = sum(calls.values())
            assert num_calls <= MOST_CALLS[line["num"]], (way, calls)
            assert calls["cuCtxGetCurrent"] == 2, "once for the event, and once for the job"
            assert "cuCtxSetCurrent" not in calls
            num_batches = 1 if line["num"] == 1 else 9
            assert calls["cuLaunchKernel"] == calls["cudaMemcpyAsync"] == num_batches
