"""Engine processes that are killed at random moments: the next one finds the disk warm.

`KVSTOW_TIER_KILLS` sets the number of kills.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.engine.disk_life import NUM_DISK_BLOCKS

ROOT = Path(__file__).parents[2]
NUM_KILLS = int(os.environ.get("KVSTOW_TIER_KILLS", "3"))
NUM_FIRST = 10  # requests after a warm start whose hits count
LEAST_KEPT = 0.95


def live_and_die(folder: Path, seed: int) -> list[list[str]]:
    """Kill an engine's process at a random moment, and return the lines that it printed."""
    chances = random.Random(seed)
    arguments = [sys.executable, "-m", "tests.engine.disk_life", str(folder), str(seed)]
    lines = []
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        for _ in range(NUM_FIRST + 2 + chances.randrange(150)):
            if not (line := child.stdout.readline()):
                pytest.fail(f"seed {seed}: {child.stderr.read()}")
            lines.append(line.split())
        time.sleep(chances.random() * 0.01)
        child.kill()
        lines += [line.split() for line in child.stdout if line.endswith("\n")]
    return lines


def test_killed_engine_finds_its_disk_warm(tmp_path: Path) -> None:
    first_seed = random.SystemRandom().randrange(2**31)
    print("seed", first_seed)
    num_held = num_asked = num_loaded = 0
    worst = 1.0
    for kill in range(1 + NUM_KILLS):
        lines = live_and_die(tmp_path, first_seed + kill)
        word, num_warm = lines[0][0], int(float(lines[0][1]))
        assert word == "warm"
        if num_held:
            worst = min(worst, num_warm / num_held)
            assert num_warm >= LEAST_KEPT * num_held, f"{num_warm} of {num_held} blocks are left"
            served = lines[1 : 1 + NUM_FIRST]
            num_asked += sum(int(line[1]) for line in served)
            num_loaded += sum(int(line[2]) for line in served)
        num_held = int(float(lines[-1][3]))
        assert num_held <= NUM_DISK_BLOCKS
    print(
        f"{NUM_KILLS} kills: at least {worst:.1%} of the blocks are left, and the first "
        f"{NUM_FIRST} requests take {num_loaded / num_asked:.1%} of their tokens from the disk"
    )
    assert num_loaded > 0
