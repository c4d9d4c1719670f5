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
    if IS_FULL:
        return
    left_out = [i for i in items if i.name.endswith(LARGEST) and ITS_LAYOUT not in i.name]
    assert len(left_out) == 8, "the names of the round trips have changed"
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
