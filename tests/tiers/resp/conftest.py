"""The host side of tiers that ask simulated servers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.tiers.resp.small import NUM_SLOTS, SLOT_BYTES
from tests.tiers.setup import random_arena

from kvstow.transfer import HostArena


@pytest.fixture
def small_arena() -> Iterator[HostArena]:
    with random_arena(NUM_SLOTS, SLOT_BYTES) as arena:
        yield arena
