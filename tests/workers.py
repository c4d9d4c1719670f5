"""Which worker of pytest-xdist runs which test, and when."""

from __future__ import annotations

import pytest
from xdist.scheduler import LoadScopeScheduling

# These take minutes. At the end one worker would wait for the other.
LONG = (
    "tests/vllm/test_server",
    "tests/vllm/test_engine",
    "tests/transfer/cuda/test_simulation.py",
)


def longest_first(items: list[pytest.Item]) -> None:
    """Sort tests: pytest-xdist begins with files of many tests, and goes on in this order."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))


class ByFileOfEngines(LoadScopeScheduling):  # type: ignore[misc] # xdist has no types
    """Gives each file of engines to one worker, because its tests share an engine.

    All other tests may run on any worker.
    """

    def _split_scope(self, nodeid: str) -> str:
        file, _, _ = nodeid.partition("::")
        return file if file.startswith("tests/vllm/") else nodeid
