"""The speed of a tier below the host: jobs of one block, and of many, there and back.

Each run has a namespace and keys of its own, so it meets no block of a server. It deletes its
blocks at the end. Every byte that comes back is compared.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstow._core import TransferError
from kvstow.tiers import Tier, TierBlocks, TierTicket
from kvstow.tiers.ticket import tickets_made

Slots: TypeAlias = npt.NDArray[np.int64]
JOBS: Final = (1, 32)
"""Blocks of a job."""
NUM_SLOTS: Final = 2 * JOBS[-1]
"""Host slots that the measurement needs: to write from, and to read into."""
_HASH_BYTES: Final = 32
_Action: TypeAlias = Literal["put", "get"]
_ACTIONS: Final[tuple[_Action, ...]] = ("put", "get")


@dataclass(frozen=True, slots=True)
class TierRow:
    """The times of one kind of job.

    Attributes:
        action: "put" writes to the tier, and "get" reads from it.
        num_blocks: blocks of a job.
        median_ms: median time of a job, from its submission to its end.
        gb_per_s: speed of the fastest job.
        num_failed: blocks that the tier did not keep or return, in all jobs.
        num_wrong: blocks that came back with other bytes, in all jobs.
    """

    action: _Action
    num_blocks: int
    median_ms: float
    gb_per_s: float
    num_failed: int
    num_wrong: int


def measure_tier(tier: Tier, num_turns: int, *, has_slots: bool) -> list[TierRow]:
    """Return two rows for each size of a job.

    Args:
        tier: an open tier, whose arena has `NUM_SLOTS` host slots.
        num_turns: jobs of each kind. One more warms up.
        has_slots: whether the tier has places of its own, as a file. A shared store has none.
    """
    half = NUM_SLOTS // 2
    rows = tier.arena.memory.reshape(tier.num_host_slots, tier.slot_bytes)
    draw = np.random.default_rng(0)
    rows[:half] = draw.integers(0, 256, (half, tier.slot_bytes), dtype=np.uint8)
    found: list[TierRow] = []
    for number in JOBS:
        here, there = np.arange(number), np.arange(number) + half
        times: dict[_Action, list[float]] = {"put": [], "get": []}
        num_failed: dict[_Action, int] = {"put": 0, "get": 0}
        num_wrong = 0
        for sequence in range(num_turns + 1):
            hashes = [os.urandom(_HASH_BYTES) for _ in range(number)]
            slots = here if has_slots else None
            blocks = TierBlocks(hashes, [0] * number, slots=slots, sequence=sequence)
            rows[half:] = 0
            with _deleted_at_end(tier, blocks):
                put_s, kept = _timed(tier.put, blocks, here)
                get_s, ok = _timed(tier.get, blocks, there)
            times["put"].append(put_s)
            times["get"].append(get_s)
            num_failed["put"] += number - int(kept.sum())
            num_failed["get"] += number - int(ok.sum())
            num_wrong += int((rows[there][ok] != rows[here][ok]).any(axis=1).sum())
        for name in _ACTIONS:
            best = number * tier.slot_bytes / min(times[name][1:]) / 1e9
            wrong = num_wrong if name == "get" else 0
            took_ms = median(times[name][1:]) * 1e3
            found.append(TierRow(name, number, took_ms, best, num_failed[name], wrong))
    return found


def check_tier(tier: Tier) -> None:
    """Put a block into a store and delete it, so that a store that fails is not measured.

    Raises:
        TransferError: the store has not kept the block: its message says why.
    """
    blocks = TierBlocks([os.urandom(_HASH_BYTES)], [0])
    with _deleted_at_end(tier, blocks):
        ticket = tier.put(blocks, np.arange(1))
        ticket.wait()
        if not ticket.ok.all():
            raise ticket.error or TransferError("the store has not kept a block: see its log")


@contextmanager
def _deleted_at_end(tier: Tier, blocks: TierBlocks) -> Iterator[None]:
    """Delete blocks in the end, also after an interrupt, when no put can bring them back."""
    tickets: list[TierTicket] = []
    try:
        with tickets_made(tickets):
            yield
    finally:
        for ticket in tickets:
            ticket.wait_until_ended()
        tier.delete(blocks).wait()


def _timed(
    call: Callable[[TierBlocks, Slots], TierTicket], blocks: TierBlocks, host_slots: Slots
) -> tuple[float, npt.NDArray[np.bool_]]:
    """Return the seconds until a job has ended, and which blocks it served."""
    begin = time.perf_counter()
    ticket = call(blocks, host_slots)
    ticket.wait()
    return time.perf_counter() - begin, ticket.ok
