from pathlib import Path

import pytest
from hypothesis import settings

# An example has no deadline, because other work on the cores would make it fail. A failure prints
# the blob for `@reproduce_failure`, because CI does not keep the example database.
settings.register_profile("kvstow", deadline=None, print_blob=True)
settings.load_profile("kvstow")

_VLLM = Path(__file__).parent / "vllm"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep each file of engines on one worker, because its tests share an engine.

    All other tests may run on any worker.
    """
    for item in items:
        if item.path.is_relative_to(_VLLM):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
