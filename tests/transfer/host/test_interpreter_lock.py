"""The copies of the host mover release the interpreter lock."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from tests.transfer.host.memory import LONG_S, Observed, Setup

from kvstow._core import BlockCopier


@contextmanager
def lock_given_only_when_released() -> Iterator[None]:
    """Let another thread run only where the holder of the lock releases it."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)


@pytest.mark.parametrize("block_bytes", [256, 4096, 65_536])
@pytest.mark.parametrize("order", ["shuffled", "rising"])
@pytest.mark.parametrize("direction", ["store", "load"])
def test_copies_run_without_the_interpreter_lock(
    block_bytes: int, order: str, direction: str
) -> None:
    """Count the turns of this thread while a copy is half done.

    If the copying thread kept the lock, this thread would get none. How many it gets is a matter of
    luck on a busy machine, hence as many tries as it takes.
    """
    num_blocks = (24 << 20) // block_bytes
    made = Setup(num_blocks, num_blocks, block_bytes, num_regions=1)
    ids, slots = np.arange(1, num_blocks), np.arange(num_blocks - 1)
    if order == "shuffled":
        ids = np.random.default_rng(3).permutation(ids)
    # The copies go from the first slot to the last.
    num_turns, targets = 0, made.arena.slots if direction == "store" else made.device[0]
    ends = slots[[0, -1]] if direction == "store" else ids[[0, -1]]
    first, last = targets[ends[0]], targets[ends[1]]
    with made.mover as mover, made.arena:
        deadline_s = time.monotonic() + LONG_S
        while not num_turns and time.monotonic() < deadline_s:
            made.arena.slots[:, 0] = made.device[0][:, 0] = 1
            targets[:] = 0
            event = Observed()
            with lock_given_only_when_released():
                if direction == "store":
                    ticket = mover.store(ids, slots, after=event)
                else:
                    ticket = mover.load(slots, ids, after=event)
                while not ticket.poll():
                    num_turns += int(first[0] != 0 and last[0] == 0)
                    time.sleep(0)
            ticket.wait(0)
            assert first[0] == last[0] == 1
    assert num_turns > 0


@pytest.mark.parametrize("call", ["store", "load", "store_with_checksums"])
def test_native_call_releases_the_interpreter_lock(call: str) -> None:
    # The blocks are copied so often that this thread gets a turn on any machine.
    num_bytes, num_pairs = 1 << 20, 2000
    blocks, slots = np.ones(2 * num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
    copier = BlockCopier([(blocks, num_bytes, num_bytes)], 2, slots, num_bytes, num_bytes, 1)
    pairs = [1] * num_pairs, [0] * num_pairs
    states: list[str] = []
    num_turns = 0

    def copy() -> None:
        states.append("begun")
        getattr(copier, call)(*(reversed(pairs) if call == "load" else pairs))
        states.append("ended")

    with lock_given_only_when_released():
        thread = threading.Thread(target=copy)
        thread.start()
        while "ended" not in states:
            num_turns += "begun" in states
            time.sleep(0)
    thread.join()
    assert num_turns > 0
