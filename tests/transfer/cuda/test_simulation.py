"""The real cupy on a simulated CUDA, which checks launches, copies and order."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from tests.transfer.cuda.simulation import library

PROGRAM = "tests.transfer.cuda.simulation.program"
# The kernel is slower on a CPU than any copy, so the measured speeds are not those of a GPU.
NEEDS_A_GPU = "test_measured_speeds_are_plausible"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if (reason := library.why_not()) is not None:
        pytest.skip(reason)
    return tmp_path_factory.mktemp("simulation")


def expect_success(ended: subprocess.CompletedProcess[str], seed: int) -> None:
    assert ended.returncode == 0, f"seed {seed}:\n{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}"


@pytest.mark.parametrize("seed", range(2))
def test_round_trip(folder: Path, seed: int) -> None:
    ended = library.run(["-m", PROGRAM, "tests.gpu.small_round_trip"], folder, seed=seed)
    expect_success(ended, seed)
    assert "equal" in ended.stdout
    assert ended.stderr == ""


def test_tests_of_the_mover_pass(folder: Path) -> None:
    tests = "tests/transfer/cuda/simulated"
    ended = library.run(["-m", "pytest", "-p", "no:cacheprovider", "-q", tests], folder)
    expect_success(ended, 0)
    assert "skipped" not in ended.stdout
    assert int(re.findall(r"(\d+) passed", ended.stdout)[0]) > 200


def test_tests_that_need_a_gpu_pass(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs them as on a GPU: the first step of `make gpu-check`, after what it finds out itself."""
    options = f"-p tests.transfer.cuda.simulation.plugin -k 'not {NEEDS_A_GPU}'"
    monkeypatch.setenv("PYTEST_ADDOPTS", options)
    out = folder / "check"
    ended = library.run(["-m", PROGRAM, "tests.gpu.check", "--out", str(out), "tests"], folder)
    expect_success(ended, 0)
    assert "skipped" not in ended.stdout
    assert int(re.findall(r"(\d+) passed", ended.stdout)[0]) > 100
    assert "GPU 0: ok, Simulated GPU with 8.0 GiB" in ended.stdout
    assert json.loads((out / "check.json").read_text())["tests"]["kind"] == "passed"
    assert (out / "tests.xml").exists()


def test_every_left_out_wait_and_wrong_argument_is_reported(folder: Path) -> None:
    command = ["-m", PROGRAM, "tests.transfer.cuda.simulation.mutations"]
    # This seed makes a slow device. On a fast one the host sees that events are reached, and then
    # many orders need no wait.
    ended = library.run(command, folder, seed=0)
    expect_success(ended, 0)
    assert "MISSED" not in ended.stdout


@pytest.mark.parametrize("seed", range(2))
def test_two_devices_in_one_process(folder: Path, seed: int) -> None:
    command = ["-m", PROGRAM, "tests.transfer.cuda.simulation.two_devices"]
    ended = library.run(command, folder, seed=seed)
    expect_success(ended, seed)
    assert "MISSED" not in ended.stdout
