"""Losses of power: no wrong block comes back, and no confirmed reset is undone.

`KVSTOW_TIER_CUTS` sets the number of seeds, and `KVSTOW_TIER_SEED` the first.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.tiers.damage import all_proven
from tests.tiers.power import PowerLoss

from kvstow.tiers.files import Files
from kvstow.tiers.slot_index import Header
from kvstow.tiers.slot_store import SlotStore

NUM_SEEDS = int(os.environ.get("KVSTOW_TIER_CUTS", "40"))
FIRST = int(os.environ.get("KVSTOW_TIER_SEED", "0"))
NUM_PROCESSES = 8


def seed_of(seed: int, folder: Path) -> PowerLoss:
    own = folder / str(seed)
    own.mkdir()
    found = PowerLoss(seed, own)
    found.run(NUM_PROCESSES)
    for file in own.iterdir():
        file.unlink()
    return found


def test_no_loss_of_power_brings_back_a_wrong_block(tmp_path: Path) -> None:
    num_right = num_renewed = 0
    for seed in range(FIRST, FIRST + NUM_SEEDS):
        print("seed", seed)
        found = seed_of(seed, tmp_path)
        assert found.num_wrong == 0, f"seed {seed}: {found.num_wrong} wrong blocks"
        num_right += found.num_right
        num_renewed += found.num_renewed
    print("right blocks", num_right, "losses of power after a reset", num_renewed)
    assert num_right > 10 * NUM_SEEDS
    assert num_renewed > NUM_SEEDS // 4


def num_wrong(folder: Path) -> int:
    return sum(seed_of(seed, folder).num_wrong for seed in range(30))


def test_without_checksums_torn_blocks_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SlotStore, "_are_proven", all_proven)
    assert num_wrong(tmp_path) > 0


def test_without_the_sync_of_the_header_a_reset_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_header(files: Files, index: int, header: Header) -> None:
        files.write(index, [header.encode()], 0)

    monkeypatch.setattr("kvstow.tiers.slot_calls.write_header", write_header)
    monkeypatch.setattr("kvstow.tiers.opening.write_header", write_header)
    assert num_wrong(tmp_path) > 0
