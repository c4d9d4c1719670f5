"""The hooks through which tests, the progress bar and the HTML report watch a replay."""

import numpy as np
import numpy.typing as npt

from kvstow.engine import Transfer
from kvstow.replay.batch import Request
from kvstow.replay.state import ReplayState


class Observer:
    """The engine calls a method for each thing that happens; those of this base do nothing."""

    def published(
        self,
        replay: ReplayState,
        seats: npt.NDArray[np.int64],
        tokens: npt.NDArray[np.int64],
    ) -> None:
        """A step published the full blocks among the first `tokens` of each seat."""

    def looked_up(
        self, replay: ReplayState, request: Request, device_tokens: int, host_tokens: int
    ) -> None:
        """A waiting request found this many tokens, and is admitted if its blocks fit."""

    def landed(self, replay: ReplayState, transfer: Transfer) -> None:
        """A transfer ended, and ledger and scheduler know the result."""

    def finished(self, replay: ReplayState, request: Request) -> None:
        """A request computed its last token and left."""

    def stepped(self, replay: ReplayState) -> None:
        """A step was computed, and its stores were submitted."""


class Observers(Observer):
    """Calls the methods of several observers in turn."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def published(
        self,
        replay: ReplayState,
        seats: npt.NDArray[np.int64],
        tokens: npt.NDArray[np.int64],
    ) -> None:
        """Pass the call on."""
        for observer in self._observers:
            observer.published(replay, seats, tokens)

    def looked_up(
        self, replay: ReplayState, request: Request, device_tokens: int, host_tokens: int
    ) -> None:
        """Pass the call on."""
        for observer in self._observers:
            observer.looked_up(replay, request, device_tokens, host_tokens)

    def landed(self, replay: ReplayState, transfer: Transfer) -> None:
        """Pass the call on."""
        for observer in self._observers:
            observer.landed(replay, transfer)

    def finished(self, replay: ReplayState, request: Request) -> None:
        """Pass the call on."""
        for observer in self._observers:
            observer.finished(replay, request)

    def stepped(self, replay: ReplayState) -> None:
        """Pass the call on."""
        for observer in self._observers:
            observer.stepped(replay)
