"""Faults of which CI injects some, because injecting each takes minutes."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import TypeVar

IS_FULL = os.environ.get("KVSTOW_FAULTS") == "full"

_Case = TypeVar("_Case")


def sampled(cases: Sequence[_Case], share: float) -> list[_Case]:
    """Return a random share of the cases in their order, or all with `KVSTOW_FAULTS=full`.

    It prints the seed of its choice, and `KVSTOW_SEED` repeats it.
    """
    num = len(cases) if IS_FULL else min(max(1, round(len(cases) * share)), len(cases))
    if num == len(cases):
        return list(cases)
    seed = int(os.environ.get("KVSTOW_SEED") or random.SystemRandom().randrange(2**32))
    print(f"KVSTOW_SEED={seed} chooses {num} of {len(cases)} faults")
    chosen = sorted(random.Random(seed).sample(range(len(cases)), num))
    return [cases[at] for at in chosen]
