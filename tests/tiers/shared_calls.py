"""Random calls to a shared tier, which must serve no wrong block, also when the store fails."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt
from tests.tiers.setup import digest_of

from kvstow.tiers import SharedTier, TierBlocks

NUM_SLOTS, SLOT_BYTES, NUM_KEYS = 48, 9000, 24
NUM_SEEDS: Final = int(os.environ.get("KVSTOW_SEEDS", "12"))
SEEDS: Final = (
    [int(os.environ["KVSTOW_SEED"])] if "KVSTOW_SEED" in os.environ else list(range(NUM_SEEDS))
)


def bytes_of(key: int) -> npt.NDArray[np.uint8]:
    """Return the bytes of a key. A chain of hashes never names two contents."""
    return np.random.default_rng(key).integers(0, 256, SLOT_BYTES, dtype=np.uint8)


class Calls:
    """One seed's calls.

    Attributes:
        num_hits: blocks that came back.
    """

    def __init__(
        self, seed: int, tier: SharedTier, late: Callable[[], None] = lambda: None
    ) -> None:
        """Take a tier over an arena of `NUM_SLOTS` slots.

        Args:
            seed: draws the calls.
            tier: what to call.
            late: is called after the end of each get.
        """
        self.random, self.late = random.Random(seed), late
        self.tier, self.arena = tier, tier.arena
        self.num_hits = 0

    def step(self) -> None:
        """Make one call, wait for its end, and check what it did."""
        keys = self.random.sample(range(NUM_KEYS), self.random.randint(1, 20))
        slots = self.random.sample(range(NUM_SLOTS), len(keys))
        blocks = TierBlocks([digest_of(key) for key in keys], [key % 3 for key in keys])
        deadline = self.random.choice([None, time.monotonic() + self.random.uniform(0.001, 0.3)])
        kind = self.random.choice(["put", "put", "get", "get", "contains", "delete"])
        if kind == "put":
            for key, slot in zip(keys, slots, strict=True):
                self.arena.slots[slot] = bytes_of(key)
            ticket = self.tier.put(blocks, slots, deadline=deadline)
        elif kind == "get":
            ticket = self.tier.get(blocks, slots, deadline=deadline)
        elif kind == "contains":
            ticket = self.tier.contains(blocks, deadline=deadline)
        else:
            ticket = self.tier.delete(blocks)
        begin_s = time.monotonic()
        ticket.wait(20)
        while not ticket.has_ended:
            assert time.monotonic() - begin_s < 20, "the job does not end"
            time.sleep(0.0005)
        if kind != "get":
            return
        for key, slot, ok in zip(keys, slots, ticket.ok.tolist(), strict=True):
            if ok:
                self.num_hits += 1
                assert (self.arena.slots[slot] == bytes_of(key)).all(), f"key {key} is wrong"
        kept = self.arena.slots[slots].copy()
        time.sleep(0.002)
        self.late()
        assert (self.arena.slots[slots] == kept).all(), "bytes arrive after the end"
