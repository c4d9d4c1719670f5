"""Puts that wait together, so that one thread of a slot file joins them."""

from __future__ import annotations

import os
import random
import threading
import time
from typing import Final, TypeAlias

from tests.tiers.setup import (
    LONG_S,
    NUM_SLOTS,
    SLOT_BYTES,
    Here,
    blocks_of,
    bytes_of,
    key_of,
    rows_of,
    wait_until_busy,
)

from kvstow.tiers import SlotTier, TierTicket
from kvstow.tiers.files import Buffers

Jobs: TypeAlias = list[tuple[list[int], list[int], TierTicket]]

KEYS: Final = [key_of(number) for number in range(NUM_SLOTS)]


class Gated(Here):
    """Calls that wait for `gate`, and count. Data writes fail with `error`."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.sizes: list[int] = []
        self.error = 0

    def read(self, file: int, buffers: Buffers, offset: int) -> int:
        assert self.gate.wait(LONG_S)
        self.sizes.append(sum(map(len, buffers)))
        return super().read(file, buffers, offset)

    def write(self, file: int, buffers: Buffers, offset: int) -> int:
        assert self.gate.wait(LONG_S)
        num_bytes = sum(map(len, buffers))
        if num_bytes >= SLOT_BYTES:
            self.sizes.append(num_bytes)
            if self.error:
                raise OSError(self.error, os.strerror(self.error))
        return super().write(file, buffers, offset)


def hold_puts(files: Gated, tier: SlotTier) -> TierTicket:
    """Let the only thread of puts wait in a write of the last block."""
    files.gate.clear()
    held = tier.put(blocks_of(KEYS[-1:], [NUM_SLOTS - 1]), [NUM_SLOTS - 1])
    wait_until_busy(tier)
    return held


def hold_gets(files: Gated, tier: SlotTier) -> TierTicket:
    """Let the only thread of gets wait in a read of the last block into the last host slot."""
    files.gate.clear()
    held = tier.get(blocks_of(KEYS[-1:], [NUM_SLOTS - 1]), [tier.num_host_slots - 1])
    wait_until_busy(tier)
    return held


def put_many(tier: SlotTier, seed: int, *, late: frozenset[int] = frozenset()) -> Jobs:
    """Queue puts of all other blocks, from host slots and into slots in random orders.

    Returns:
        The blocks, the slots and the ticket of each job.
    """
    choose = random.Random(seed)
    rest = range(NUM_SLOTS - 1)
    numbers, slots, host = (choose.sample(rest, len(rest)) for _ in range(3))
    rows = rows_of(tier)
    jobs: Jobs = []
    while numbers:
        num = choose.randint(1, 4)
        part = [[column.pop() for _ in range(min(num, len(column)))] for column in (numbers, slots)]
        of_host = [host.pop() for _ in part[0]]
        for number, at in zip(part[0], of_host, strict=True):
            rows[at] = bytes_of(KEYS[number])
        blocks = blocks_of([KEYS[number] for number in part[0]], part[1])
        deadline = time.monotonic() - 1 if len(jobs) in late else None
        jobs.append((part[0], part[1], tier.put(blocks, of_host, deadline=deadline)))
    return jobs
