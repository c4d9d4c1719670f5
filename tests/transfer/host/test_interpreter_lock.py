"""The copies of the host mover release the interpreter lock."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from tests.transfer.host.memory import Observed, Setup


@contextmanager
def lock_given_only_when_released() -> Iterator[None]:
    """Let another thread run only where the holder of the lock releases it."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)


# numpy treats many short rows and few long rows differently.
@pytest.mark.parametrize("block_bytes", [256, 4096, 65_536])
@pytest.mark.parametrize("order", ["shuffled", "rising"])
def test_copies_run_without_the_interpreter_lock(block_bytes: int, order: str) -> None:
    """Observe a half-done copy, which is impossible if the copying thread keeps the lock.

    Every read of the state below is one that a worker allowed by letting go of the lock inside
    numpy. How often is a matter of luck on a busy machine, hence more than one try.
    """
    num_blocks = (24 << 20) // block_bytes
    made = Setup(num_blocks, num_blocks, block_bytes, num_regions=1)
    ids, slots = np.arange(1, num_blocks), np.arange(num_blocks - 1)
    if order == "shuffled":
        ids = np.random.default_rng(3).permutation(ids)
    wanted = {"scattering"} if order == "rising" else {"gathering", "scattering"}
    first, last = made.arena.slots[0], made.arena.slots[num_blocks - 2]
    seen: set[str] = set()
    with made.mover as mover, made.arena:
        for _ in range(20):
            made.arena.slots[:] = 0
            made.device[0][1:, 0] = 1
            event = Observed()
            with lock_given_only_when_released():
                ticket = mover.store(ids, slots, after=event)
                while not ticket.poll():
                    if event.passed and not first[0]:
                        seen.add("gathering")
                    elif first[0] and not last[0]:
                        seen.add("scattering")
                    time.sleep(0)
            ticket.wait(0)
            if wanted <= seen:
                break
    assert wanted <= seen
