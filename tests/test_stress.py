"""A short run of `tests.stress` with fixed seeds. `make stress` runs for longer."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("seed", [1, 6])
def test_engine_survives_interrupts_forks_and_a_reader(seed: int) -> None:
    command = [sys.executable, "-m", "tests.stress", "--seconds", "3", "--seed", str(seed)]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr[-4000:]
