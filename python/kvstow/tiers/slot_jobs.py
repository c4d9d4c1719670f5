"""The jobs of a slot file, and which slots they have in use."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstow._core import TransferError
from kvstow.tiers.frame import Context, Frames, taken, words_of
from kvstow.tiers.ticket import Bools, TierTicket
from kvstow.transfer.mover import Index

Kind: TypeAlias = Literal["put", "get", "delete", "renew"]


@dataclass(slots=True, eq=False)
class Job:
    """Blocks to write, read or drop.

    Attributes:
        kind: what to do.
        frames: shape [n], the frames that the blocks have or should have.
        slots: shape [n], their slots, which ascend after `keep`.
        host: shape [n], their host slots; none for other kinds than put and get.
        context: the generation in which the job began.
        ticket: reports the end.
        at: shape [n], where each block is in the ticket.
        ok: what the ticket will report, for all of its blocks.
        is_begun: whether the end of its pieces, or `SlotStore._begin`, ends it.
        num_left: pieces that have not ended.
        num_mismatched: blocks that a get found to be something else.
        error: why blocks failed together.
    """

    kind: Kind
    frames: Frames
    slots: Index
    host: Index
    context: Context
    ticket: TierTicket
    at: Index = field(init=False)
    ok: Bools = field(init=False)
    is_begun: bool = False
    num_left: int = 0
    num_mismatched: int = 0
    error: TransferError | None = None

    def __post_init__(self) -> None:
        """Begin with no block done."""
        self.at = np.arange(len(self.slots))
        self.ok = np.zeros(self.ticket.num_blocks, np.bool_)

    def keep(self, free: Bools) -> None:
        """Leave out the blocks that are not free, and sort the others by their slots."""
        if free.all() and (self.slots[1:] > self.slots[:-1]).all():
            return
        at = np.flatnonzero(free)
        self.at = at = at[np.argsort(self.slots[at], kind="stable")]
        self.frames, self.slots = taken(words_of(self.frames), at), self.slots[at]
        if len(self.host):
            self.host = self.host[at]


class Marks:
    """Which places are in use: each by one writer, or by any number of readers."""

    def __init__(self, num_places: int) -> None:
        """Begin with none in use."""
        self._uses: npt.NDArray[np.int16] = np.zeros(num_places, np.int16)  # -1: a writer

    def are_free(self, places: Index, *, to_write: bool) -> Bools:
        """Return which of these places another user may take."""
        uses = self._uses[places]
        return uses == 0 if to_write else uses >= 0

    def take(self, places: Index, *, to_write: bool) -> None:
        """Take free places, each named once."""
        self._uses[places] += -1 if to_write else 1

    def release(self, places: Index, *, to_write: bool) -> None:
        """Give places back."""
        self._uses[places] -= -1 if to_write else 1

    def clear(self) -> None:
        """Give all places back."""
        self._uses.fill(0)
