"""A disk tier beside a held sleep image, and beside `store_threshold`, in random turns.

`KVSTOW_SEEDS=N` runs N lives of each mixture, and `KVSTOW_SEED=N` repeats one.
"""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest
from tests.accounting.mixtures import Flight, World

NUM_TURNS = 2000
NUM_LIVES = int(os.environ.get("KVSTOW_SEEDS", "12"))
# Of so many lives, some meet everything.
NUM_FOR_ALL = 100
# Whether the device sleeps, and `store_threshold`.
MIXTURES = {"a sleep image": (True, 1), "a threshold": (False, 2), "both": (True, 2)}


@pytest.mark.parametrize("mixture", MIXTURES)
def test_no_request_reads_a_block_that_is_not_its_own(mixture: str) -> None:
    sleeps, threshold = MIXTURES[mixture]
    counts: Counter[str] = Counter()
    for _ in range(NUM_LIVES):
        seed = int(os.environ.get("KVSTOW_SEED") or random.SystemRandom().randrange(2**32))
        print(f"seed {seed}")
        world = World(seed, sleeps=sleeps, threshold=threshold)
        world.live(NUM_TURNS)
        counts += world.counts
    print(dict(counts))
    met = {"loaded", "promote", "demote"}
    if sleeps:
        met |= {"wakes", "snapshots"}
    if sleeps and NUM_LIVES >= NUM_FOR_ALL:
        met |= {"promote beside an image", "demote beside an image", "load beside an image"}
    assert met <= counts.keys() or NUM_LIVES == 1


class EarlyWorld(World):
    """Reports a promote before its copy has taken place."""

    def report(self, flight: Flight, rank: int) -> None:
        if flight.direction == "promote":
            flight.left[rank].clear()
        super().report(flight, rank)


class ReleasedWorld(World):
    """Releases an image while the device sleeps, and so lets its slots go."""

    def hold(self) -> None:
        is_new = self.image is None
        super().hold()
        if is_new and self.image is not None:
            self.scheduler.release_image()

    def image_places(self) -> list[int] | None:
        return [place for _, place in self.placed]


@pytest.mark.parametrize(
    ("world", "sleeps", "what"),
    [(EarlyWorld, False, "reads a block"), (ReleasedWorld, True, "lost (a block|an image)")],
)
def test_a_fault_is_detected(world: type[World], sleeps: bool, what: str) -> None:
    with pytest.raises(AssertionError, match=what):
        for seed in range(100):
            world(seed, sleeps=sleeps, threshold=2).live(NUM_TURNS)
