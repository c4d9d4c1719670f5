"""What a scheduler claims of a shared store: blocks that a request lacks, and the store has.

A claim is a slot of the scheduler's index for a block that only the store is known to have. The
tier proves each block that it reads, so a claim that is wrong costs a read and no more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstow._core import OffloadScheduler
from kvstow.tiers.asking import Asker, Question

CLAIMS_PER_SLOT: Final = 8
"""Claims for each slot of the host, unless the user says how many."""


@dataclass(slots=True)
class Lack:
    """The blocks that a request lacks, and the question whether the store has them."""

    hashes: list[bytes]
    groups: npt.NDArray[np.int32]
    parents: list[bytes | None]
    question: Question

    @classmethod
    def ask(
        cls,
        asker: Asker,
        scheduler: OffloadScheduler,
        request_id: str,
        num_local_tokens: int,
        max_tokens: int,
    ) -> Lack | None:
        """Ask the store for what device and host lack; None if they lack nothing."""
        hashes, groups, parents = scheduler.unclaimed(request_id, num_local_tokens, max_tokens)
        if not hashes:
            return None
        question = asker.ask(list(zip(hashes, groups.tolist(), strict=True)))
        return cls(hashes, groups, parents, question)

    def claim(self, scheduler: OffloadScheduler) -> None:
        """Let the scheduler claim what the store has, once the question has an answer."""
        at = np.flatnonzero(self.question.found)
        hashes, parents = [self.hashes[i] for i in at], [self.parents[i] for i in at]
        scheduler.claim(hashes, self.groups[at], parents)
