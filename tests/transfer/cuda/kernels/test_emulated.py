"""The kernels' source on a CPU stores each byte to its place, once, and no other byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.transfer.cuda.kernels.checks import CHECKS
from tests.transfer.cuda.kernels.emulation import (
    OPTIMISED,
    SANITISED,
    Grid,
    Kernels,
    Launch,
    aligned_bytes,
)

from kvstow.transfer.cuda import kernels as package
from kvstow.transfer.cuda.kernels import CHUNK_DTYPE

SOURCE = Path(package.__file__).with_name("pack.cu")


@pytest.fixture(scope="module", params=[OPTIMISED, SANITISED], ids=["optimised", "sanitised"])
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    return Kernels(SOURCE, tmp_path_factory.mktemp("kernels"), request.param)


@pytest.mark.parametrize("check", CHECKS)
def test_kernels(
    kernels: Kernels, check: Callable[[Kernels], None], capfd: pytest.CaptureFixture[str]
) -> None:
    check(kernels)
    # The sanitiser prints what it finds, and goes on.
    assert capfd.readouterr().err == ""


def test_sanitiser_reports(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    device, staging = aligned_bytes(64, rng), aligned_bytes(64, rng)
    table = np.array([(device.ctypes.data, 64, 0, 64)], dtype=CHUNK_DTYPE)
    sums = np.zeros(17, dtype=np.uint8)[1:].view(np.uint64)
    launch = Launch(table, [0], staging.ctypes.data, 64, sums)
    Kernels(SOURCE, tmp_path, SANITISED).run(True, launch, Grid(1, 32), device, staging)
    assert "misaligned address" in capfd.readouterr().err


def test_kernels_without_blocks_touch_nothing(kernels: Kernels) -> None:
    device, staging = np.ones(64, dtype=np.uint8), np.zeros(64, dtype=np.uint8)
    table = np.array([(device.ctypes.data, 64, 0, 64)], dtype=CHUNK_DTYPE)
    launch = Launch(table, [], staging.ctypes.data, 64)
    assert not kernels.run(True, launch, Grid(2, 64), device, staging).any()
