"""Random lives of an `Engine` with a disk tier whose file calls fail, lie, or return late.

Every token that a request reads is compared. An engine ends now and then, and another one goes on
with its files. `KVSTOW_SEEDS=N` runs N lives of each shape, and `KVSTOW_SEED=N` repeats one.
"""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.engine_loop import BLOCK, SHAPES, Loop, turns
from tests.tiers.damage import all_proven
from tests.tiers.faults import READ_FAULTS, WRITE_FAULTS, Faulty
from tests.tiers.setup import LONG_S, SLOT_BYTES

from kvstow import DiskOptions, Engine, hash_tokens
from kvstow.tiers import SlotFile
from kvstow.tiers.slot_store import SlotStore

NUM_TURNS = 1000
NUM_LIVES = int(os.environ.get("KVSTOW_SEEDS", "2"))
NUM_DISK_BLOCKS = 40
# Of so many lives, some hit a faulty disk and meet each fault.
NUM_FOR_ALL = 100


class DiskLoop(Loop):
    """A loop over an engine with a disk tier, which ends and begins again.

    Attributes:
        num_disk_hits: tokens that came from the disk.
    """

    def __init__(self, seed: int, folder: Path, files: Faulty, rate: float, **shape: Any) -> None:
        chances = random.Random(seed)
        num_ranks = shape.get("world_size", 1)
        disk = [
            SlotFile(
                folder / f"rank {rank}",
                SlotFile.bytes_for(NUM_DISK_BLOCKS, SLOT_BYTES),
                on_mismatch="reset",
            )
            for rank in range(num_ranks)
        ]
        choices: dict[str, Any] = {
            "admit": chances.choice(["all", "returned"]),
            "policy": chances.choice(["lru", "hit-density"]),
            "min_promote_tokens": chances.choice([0, 8]),
            "max_blocks_in_flight": chances.choice([2, 64]),
            "promote_timeout_s": chances.choice([0.05, None]),
            "timeout_s": chances.choice([0.002, 20.0]),
            "flush_s": chances.choice([0.0, 1.0]),
        }
        if not rate:  # the disk must be hit
            choices |= {"admit": "all", "min_promote_tokens": 0, "timeout_s": None}
        options = DiskOptions("a model", "1", **choices)
        self.num_disk_hits = 0
        self.files, self.rate = files, rate
        # One failed write ends all others, and with them most of what may be wrong.
        files.without = chances.choice([frozenset(), frozenset({"fail", "full"})])
        self.options = shape | {"disk": disk, "disk_options": options}
        super().__init__(seed, num_host_blocks=10, folder=folder, **self.options)
        self.files.rate = rate

    def turn(self) -> None:
        chance = self.chances.random()
        if chance < 0.005:
            self.begin_again()
        elif chance < 0.025:
            self.files.hang_again()
        elif chance < 0.035:
            self.files.release()
        else:
            super().turn()

    def sleep(self) -> None:
        self.files.release()
        rate, self.files.rate = self.files.rate, 0.0  # it opens the files again
        super().sleep()
        self.files.rate = rate

    def begin_again(self) -> None:
        """End the engine, and go on with another one that finds its files."""
        self.files.release()
        while self.launched:
            self.run_one()
        self.close()
        self.files.rate = 0.0
        self.memory = self.new_memory(self.engine.ledger.pool.num_blocks)
        own = {"windows", "states", "num_blocks"}
        given = {name: value for name, value in self.options.items() if name not in own}
        num_blocks = self.engine.ledger.pool.num_blocks
        self.engine = Engine(num_blocks, 10, self.groups, self.layouts, **given)
        for name, request in self.requests.items():
            request.num_done = 0
            request.num_hashed = len(request.tokens) // BLOCK * BLOCK
            self.engine.add(name, hash_tokens(request.tokens, BLOCK))
        self.files.rate = self.rate

    def serve_all(self) -> None:
        self.files.release()
        super().serve_all()

    def close(self) -> None:
        self.num_disk_hits += int(self.engine.stats()["disk_hit_tokens"])
        super().close()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rate", [0.0, 0.2], ids=["sound disk", "faulty disk"])
def test_no_request_reads_kv_that_is_not_its_own(
    shape: str, rate: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_disk_hits, faults = 0, Counter[str]()
    for life in range(10 * NUM_LIVES):
        if life >= NUM_LIVES and (num_disk_hits or rate):
            break
        seed = int(os.environ.get("KVSTOW_SEED") or random.SystemRandom().randrange(2**32))
        print(f"seed {seed}")
        folder = tmp_path / str(life)
        before = held()
        hits, injected = live(seed, folder, rate, monkeypatch, **SHAPES[shape])
        num_disk_hits, faults = num_disk_hits + hits, faults + injected
        end_s = time.monotonic() + LONG_S
        while left := held() - before:  # threads end by themselves
            assert time.monotonic() < end_s, f"seed {seed}: {dict(left)} are left"
            time.sleep(0.001)
        shutil.rmtree(folder)
    print(f"{life} lives, {num_disk_hits} tokens from the disk, faults {dict(faults)}")
    assert num_disk_hits > 0 or (rate and NUM_LIVES < NUM_FOR_ALL)
    if rate and NUM_LIVES >= NUM_FOR_ALL:
        assert faults.keys() == {*READ_FAULTS, *WRITE_FAULTS}


def held() -> Counter[str]:
    """Return the threads and the open files of this process, but no images of sleeps.

    An image stays open until nothing refers to its arena.
    """
    names = [thread.name for thread in threading.enumerate()]
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that lists them
            names.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return Counter(name for name in names if "/image" not in name)


def live(
    seed: int, folder: Path, rate: float, monkeypatch: pytest.MonkeyPatch, **shape: Any
) -> tuple[int, Counter[str]]:
    """Let one engine after another live over the same files.

    Returns the tokens from the disk, and how often each fault was injected.
    """
    folder.mkdir()
    files = Faulty(seed, 0.0)
    monkeypatch.setattr("kvstow.tiers.slot_file.Files", lambda: files)
    loop = DiskLoop(seed, folder, files, rate, **shape)
    try:
        turns(loop, NUM_TURNS)
        assert loop.num_checked > 100
        loop.begin_again()
        loop.serve_all()
    finally:
        files.release()
        loop.engine.close()
    loop.close()
    return loop.num_disk_hits, Counter(files.faults)


def test_random_life_detects_a_disk_that_checks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SlotStore, "_are_proven", all_proven)
    monkeypatch.setattr(SlotStore, "_fit", staticmethod(lambda found, _: np.ones(len(found), bool)))
    # Faults that only checks find: others would close the tier before it is hit.
    monkeypatch.setattr("tests.tiers.faults.READ_FAULTS", ("flip", "other block"))
    monkeypatch.setattr("tests.tiers.faults.WRITE_FAULTS", ("lose", "tear", "elsewhere"))
    with pytest.raises(AssertionError, match="that is not its own"):
        for seed in range(300):  # one in five to ten lives reads a wrong block
            live(seed, tmp_path / str(seed), 0.2, monkeypatch)
