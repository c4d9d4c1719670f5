"""Random mixtures of jobs, faults and damage: a tier may lose blocks, and never returns wrong ones.

`KVSTOW_TIER_SEEDS` sets the number of seeds, and `KVSTOW_TIER_SEED` the first.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.tiers.damage import all_proven
from tests.tiers.mixture import Mixture
from tests.tiers.setup import SLOT_BYTES

from kvstow.tiers import frame, lanes, slot_index, slot_store
from kvstow.tiers.slot_calls import SlotCalls
from kvstow.tiers.slot_pieces import Joined, Part
from kvstow.tiers.slot_store import SlotStore
from kvstow.tiers.ticket import Bools
from kvstow.transfer.mover import Index

NUM_SEEDS = int(os.environ.get("KVSTOW_TIER_SEEDS", "200"))
FIRST = int(os.environ.get("KVSTOW_TIER_SEED", "0"))
NUM_STEPS = 30
# A fault of which too few are injected proves nothing.
EXPECTED_FAULTS = {
    "fail", "full", "flip", "other block", "lose", "tear", "elsewhere", "short", "slow", "hang",
    "flip data", "flip index", "flip header", "cut data", "cut index", "move", "crash", "clock",
    "join puts", "join gets", "stop",
}  # fmt: skip


def test_no_seed_returns_a_wrong_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults: Counter[str] = Counter()
    num_right = 0

    def joined(parts: list[Part]) -> Joined:
        if len(parts) > 1:
            faults[f"join {parts[0][0].kind}s"] += 1
        return Joined(parts)

    def written(calls: SlotCalls, slots: Index, host: Index, **checks: Any) -> int:
        num_written = write_data(calls, slots, host, **checks)
        if num_written < len(slots):
            faults["stop"] += 1
        return num_written

    write_data = SlotCalls.write_data
    monkeypatch.setattr(SlotCalls, "write_data", written)
    monkeypatch.setattr(slot_store, "Joined", joined)
    for seed in range(FIRST, FIRST + NUM_SEEDS):
        print("seed", seed)
        # A call moves a part of a slot, or one slot, or a few, or all.
        least_bytes = [SLOT_BYTES // 2, SLOT_BYTES, 2 * SLOT_BYTES, 2 << 20][seed % 4]
        monkeypatch.setattr(lanes, "_LEAST_BYTES", least_bytes)
        monkeypatch.setattr(lanes, "_MOST_BYTES", 4 * least_bytes)
        folder = tmp_path / str(seed)
        folder.mkdir()
        outcome = Mixture(seed, folder).run(NUM_STEPS)
        assert outcome.num_wrong == 0, f"seed {seed}: {outcome.num_wrong} wrong blocks"
        num_right += outcome.num_right
        faults.update(outcome.faults)
        for file in folder.iterdir():
            file.unlink()
    print("right blocks", num_right, "faults", dict(faults))
    assert num_right > 5 * NUM_SEEDS
    assert NUM_SEEDS < 100 or faults.keys() >= EXPECTED_FAULTS


def num_wrong(folder: Path) -> int:
    """Return how many wrong blocks the first seeds return."""
    total = 0
    for seed in range(40):
        (folder / str(seed)).mkdir()
        total += Mixture(seed, folder / str(seed)).run(NUM_STEPS).num_wrong
    return total


def test_without_checksums_damage_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SlotStore, "_are_proven", all_proven)
    assert num_wrong(tmp_path) > 0


def test_without_keys_other_blocks_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def used(found: frame.Frames, _: frame.Frames) -> Bools:
        is_used: Bools = found["schema"] != 0
        return is_used

    monkeypatch.setattr(SlotStore, "_fit", staticmethod(used))
    assert num_wrong(tmp_path) > 0


def test_without_generations_old_weights_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_store, "new_generation", lambda: 7)
    monkeypatch.setattr(slot_index, "new_generation", lambda: 7)
    monkeypatch.setattr("kvstow.tiers.opening.new_generation", lambda: 7)
    assert num_wrong(tmp_path) > 0
