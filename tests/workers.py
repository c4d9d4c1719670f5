"""Which worker of pytest-xdist runs which test."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling


class ByFileOfEngines(LoadScopeScheduling):  # type: ignore[misc] # xdist has no types
    """Gives each file of engines to one worker, because its tests share an engine.

    All other tests may run on any worker.
    """

    def _split_scope(self, nodeid: str) -> str:
        file, _, _ = nodeid.partition("::")
        return file if file.startswith("tests/vllm/") else nodeid
