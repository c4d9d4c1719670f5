"""A plugin of pytest that runs tests/gpu on the simulated GPU, and fails tests without order.

CI runs the largest size for one layout of the cache only. `KVSTOW_FAULTS=full` runs it for all.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from tests.sampled import IS_FULL
from tests.transfer.cuda.simulation import device_torch
from tests.transfer.cuda.simulation.library import violations
from tests.transfer.cuda.simulation.program import fix_link_speed

device_torch.install()
gc.freeze()  # so that each collection looks at new objects only, not at all of torch
fix_link_speed()
LARGEST, ITS_LAYOUT = "-131072]", "[halves-"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    largest = [item for item in items if item.name.endswith(LARGEST)]
    left_out = [item for item in largest if ITS_LAYOUT not in item.name]
    if IS_FULL or left_out == largest:  # without this layout, as if only some tests are named
        return
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def orders(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test in which nothing orders two accesses; a test of a missing wait must have some."""
    violations()
    yield
    found = violations()
    if "does_not_wait" in request.node.name:
        assert found, "this test leaves out a wait, and the simulation saw no access without order"
    else:
        assert not found, "\n".join(found)
