"""A plugin of pytest that runs tests/gpu on the simulated GPU, and fails tests without order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.transfer.cuda.simulation import device_torch
from tests.transfer.cuda.simulation.library import violations
from tests.transfer.cuda.simulation.program import fix_link_speed

device_torch.install()
fix_link_speed()


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
