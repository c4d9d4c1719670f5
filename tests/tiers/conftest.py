"""What several test files of tiers set up."""

from collections.abc import Iterator

import pytest
from tests.tiers.setup import new_arena

from kvstow.transfer import HostArena


@pytest.fixture
def arena() -> Iterator[HostArena]:
    with new_arena() as opened:
        yield opened
