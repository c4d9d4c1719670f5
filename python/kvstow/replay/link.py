"""Jobs in flight, in virtual time: one serial link per direction.

    submitted      started                      lands
        |  link busy  |  bytes / bandwidth        |   `due` hands it out
        v             v                           v
    ----+-------------+---------------------------+----> virtual time

The real copies run meanwhile in the movers, one for each group; their tickets are waited for at the
landing only, so what a replay finds does not depend on how fast the machine is.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import numpy as np

from kvstow._core import Job, TransferError
from kvstow.transfer import READY, Mover, Ticket

__all__ = ["Flight", "Links"]

Direction = Literal["store", "load"]


@dataclass(order=True, slots=True)
class Flight:
    """One store or load under way; ordered by when it lands, then by when it was planned.

    Attributes:
        lands_s: virtual seconds.
        tickets: one for each group that has copies.
        num_bytes: of all copies.
        seat: of a load, the seat of the request that waits for it; -1 of a store.
        num_tokens: of a load, how many the request is spared to compute.
    """

    lands_s: float
    job_id: int
    direction: Direction = field(compare=False)
    job: Job = field(compare=False)
    tickets: list[Ticket] = field(compare=False)
    num_bytes: int = field(compare=False)
    seat: int = field(compare=False, default=-1)
    num_tokens: int = field(compare=False, default=0)

    def copied(self) -> bool:
        """Wait for all of the copies to end; whether they went well."""
        return all([_went_well(ticket) for ticket in self.tickets])


def _went_well(ticket: Ticket) -> bool:
    try:
        ticket.wait()
    except TransferError:
        return False
    return True


class Links:
    """The two directions of the link between device and host, and what is under way on them.

    Attributes:
        movers: by group.
        bytes_per_s: of each direction.
    """

    def __init__(self, movers: Sequence[Mover], bytes_per_s: float) -> None:
        self.movers = list(movers)
        self.bytes_per_s = bytes_per_s
        self._block_bytes = np.array([mover.layout.slot_bytes for mover in movers])
        self._block_s = self._block_bytes / bytes_per_s
        self._free_s: dict[Direction, float] = {"store": 0.0, "load": 0.0}
        self._flights: list[Flight] = []

    def __len__(self) -> int:
        return len(self._flights)

    def close(self) -> None:
        """Stop the movers."""
        for mover in self.movers:
            mover.close()

    def store(self, job: Job, now_s: float) -> None:
        """Submit a store at virtual time `now_s`."""
        tickets = [
            self.movers[group].store(job.block_ids[part], job.host_slots[part], after=READY)
            for group, part in _parts(job)
        ]
        self._submit("store", job, tickets, now_s)

    def load(self, job: Job, now_s: float, *, seat: int, num_tokens: int) -> None:
        """Submit a load for the request in this seat."""
        tickets = [
            self.movers[group].load(job.host_slots[part], job.block_ids[part], after=READY)
            for group, part in _parts(job)
        ]
        flight = self._submit("load", job, tickets, now_s)
        flight.seat, flight.num_tokens = seat, num_tokens

    def _submit(
        self, direction: Direction, job: Job, tickets: list[Ticket], now_s: float
    ) -> Flight:
        num_copies = np.diff(job.offsets)
        lands_s = max(now_s, self._free_s[direction]) + float(num_copies @ self._block_s)
        self._free_s[direction] = lands_s
        num_bytes = int(num_copies @ self._block_bytes)
        flight = Flight(lands_s, job.job_id, direction, job, tickets, num_bytes)
        heapq.heappush(self._flights, flight)
        return flight

    def due(self, now_s: float) -> Flight | None:
        """Take out the next flight that has landed by `now_s`."""
        if self._flights and self._flights[0].lands_s <= now_s:
            return heapq.heappop(self._flights)
        return None

    def next_landing_s(self) -> float:
        """When the next flight lands; something must be under way."""
        return self._flights[0].lands_s


def _parts(job: Job) -> list[tuple[int, slice]]:
    """The groups that have copies in a job, and which they are."""
    ends = pairwise(job.offsets.tolist())
    return [(group, slice(*part)) for group, part in enumerate(ends) if part[0] < part[1]]
