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
# The tests of such a file share what takes long to make: an engine, a site, a library, a model.
SHARING = (
    "tests/vllm/",
    "tests/docs/test_site.py",
    "tests/examples/test_tiny_model.py",
    "tests/transfer/cuda/test_simulation.py",
)
# The processes of these files are forks of one that has imported vLLM.
SERVERS = "tests/vllm/test_server"


def longest_first(items: list[pytest.Item]) -> None:
    """Sort tests: pytest-xdist begins with files of many tests, and goes on in this order."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))


class SharingScheduling(LoadScopeScheduling):  # type: ignore[misc] # xdist has no types
    """Gives files whose tests share something to one worker.

    All other tests may run on any worker.
    """

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(SERVERS):
            return SERVERS
        file, _, _ = nodeid.partition("::")
        return file if file.startswith(SHARING) else nodeid
