"""Damage to a slot file, and a slot file that does not see it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kvstow.tiers.frame import Frames
from kvstow.tiers.slot_store import SlotStore
from kvstow.tiers.ticket import Bools
from kvstow.transfer.mover import Index


def flip(path: Path, at: int) -> None:
    """Flip a bit of the byte at `at`."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


def all_proven(_: SlotStore, host: Index, __: Frames) -> Bools:
    """Stand for `SlotStore._are_proven` in negative controls: compare no data."""
    return np.ones(len(host), np.bool_)
