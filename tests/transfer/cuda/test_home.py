"""cupy for a user who may not write the home folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_WITHOUT_A_HOME = """
from kvstow import ConfigError
from kvstow.doctor.gpu import cupy_findings
from kvstow.transfer.cuda.runtime import import_cupy

try:
    import_cupy()
except ConfigError as error:
    print(error)
for num_devices in (1, 0):
    (finding,) = cupy_findings(13000, num_devices, anew=False)
    print(finding.status, finding.says, finding.advice)
"""


def test_cupy_without_a_folder_for_kernels_names_the_variable(tmp_path: Path) -> None:
    """A container that runs as another user often has no home folder that this user may write."""
    pytest.importorskip("cupy")
    home = tmp_path / "file"
    home.touch()
    environment = {name: it for name, it in os.environ.items() if name != "CUPY_CACHE_DIR"}
    ended = subprocess.run(
        [sys.executable, "-c", _WITHOUT_A_HOME],
        env=environment | {"HOME": str(home)},
        capture_output=True,
        text=True,
        check=True,
    )
    error, with_gpu, without = ended.stdout.splitlines()
    for line in (error, with_gpu, without):
        assert f"cupy does not load ([Errno 20] Not a directory: '{home}/.cupy" in line
        assert "set CUPY_CACHE_DIR to a folder that this user may create or write" in line
    assert with_gpu.startswith("broken ")
    assert without.startswith("missing "), "without a GPU, kvstow needs no cupy"
