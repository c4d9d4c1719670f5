"""A mover for each test."""

from collections.abc import Iterator

import pytest
from tests.transfer.host.memory import Setup


@pytest.fixture
def setup() -> Iterator[Setup]:
    made = Setup(num_blocks=8, num_slots=6, block_bytes=24, num_regions=3)
    yield made
    made.mover.close()
    made.arena.close()
