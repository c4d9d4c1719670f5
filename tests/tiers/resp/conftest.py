"""The host side of tiers that ask simulated servers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from tests.tiers.resp.small import NUM_SLOTS, SLOT_BYTES

from kvstow.transfer import HostArena


@pytest.fixture
def small_arena() -> Iterator[HostArena]:
    with HostArena(NUM_SLOTS, SLOT_BYTES) as arena:
        shape = (NUM_SLOTS, SLOT_BYTES)
        arena.slots[:] = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
        yield arena
