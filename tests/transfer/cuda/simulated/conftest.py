"""Tests of one process that has the real cupy on the simulated CUDA.

`test_simulation.py` starts that process. Without it pytest collects nothing here, because the
simulation stays installed to the end of a process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.transfer.cuda.simulation import library

from kvstow.transfer.cuda import link, link_speed, runtime

collect_ignore_glob = [] if library.LIBRARY in os.environ else ["test_*.py"]


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Begin with devices that nothing has used, and end with all accesses in order."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(
        link_speed, "measure", lambda _: link_speed.LinkSpeed(5e10, 4e10, 2e-6, 5e11, 5e-7)
    )
    monkeypatch.setattr(runtime, "_runtimes", {})
    monkeypatch.setattr(link, "_links", {})
    library.forget_contexts()
    library.violations()
    yield
    library.by_hand(False)
    library.drop(None)
    library.machine()
    library.library().simulation_repair()
    assert not (found := library.violations()), found[0]
