"""The real cupy on a simulated CUDA, which checks launches, copies and order."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.transfer.cuda.simulation import library


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if (reason := library.why_not()) is not None:
        pytest.skip(reason)
    return tmp_path_factory.mktemp("simulation")


@pytest.mark.parametrize("seed", range(2))
def test_round_trip(folder: Path, seed: int) -> None:
    ended = library.run(["-m", "tests.gpu.small_round_trip"], folder, seed=seed)
    assert ended.returncode == 0, f"seed {seed}:\n{ended.stderr}"
    assert "equal" in ended.stdout
    assert ended.stderr == ""
