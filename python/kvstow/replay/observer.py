"""What can be seen of a replay from outside, while it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from kvstow.engine import Transfer
    from kvstow.replay.batch import Request
    from kvstow.replay.engine import ReplayEngine

__all__ = ["Observer"]


class Observer:
    """Told what the engine does, as it does it; this base class ignores it all."""

    def published(
        self,
        engine: ReplayEngine,
        seats: npt.NDArray[np.int64],
        tokens: npt.NDArray[np.int64],
    ) -> None:
        """These seats have computed so many tokens, and full blocks among them are published."""

    def looked_up(
        self, engine: ReplayEngine, request: Request, device_tokens: int, host_tokens: int
    ) -> None:
        """A waiting request found this much of its prefix, and was admitted if that fitted."""

    def landed(self, engine: ReplayEngine, transfer: Transfer) -> None:
        """The copies of a job landed, and ledger and scheduler know."""

    def finished(self, engine: ReplayEngine, request: Request) -> None:
        """A request has computed everything, and left."""

    def stepped(self, engine: ReplayEngine) -> None:
        """A step was computed, and what it made due was handed to the mover."""
