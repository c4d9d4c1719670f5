"""Jobs in flight, in virtual time: one serial link per direction.

    submitted      started                      lands
        |  link busy  |  bytes / bandwidth        |   `due` hands it out
        v             v                           v
    ----+-------------+---------------------------+----> virtual time

The real copy runs meanwhile in the mover; its ticket is waited for at the landing only, so what a
replay finds does not depend on how fast the machine is.
"""

import heapq
from dataclasses import dataclass, field
from typing import Literal

from kvstow._core import Job
from kvstow.transfer import Ticket

__all__ = ["Flight", "Links"]

Direction = Literal["store", "load"]


@dataclass(order=True, slots=True)
class Flight:
    """One store or load under way; ordered by when it lands, then by when it was planned.

    Attributes:
        lands_s: virtual seconds.
        seat: of a load, the seat of the request that waits for it; -1 of a store.
    """

    lands_s: float
    job_id: int
    direction: Direction = field(compare=False)
    job: Job = field(compare=False)
    ticket: Ticket = field(compare=False)
    seat: int = field(compare=False, default=-1)


class Links:
    """The two directions of the link between device and host, and what is under way on them."""

    def __init__(self, bytes_per_s: float, block_bytes: int) -> None:
        self._block_s = block_bytes / bytes_per_s
        self._free_s: dict[Direction, float] = {"store": 0.0, "load": 0.0}
        self._flights: list[Flight] = []

    def __len__(self) -> int:
        return len(self._flights)

    def submit(
        self, direction: Direction, job: Job, ticket: Ticket, now_s: float, *, seat: int = -1
    ) -> None:
        """A job whose copy was handed to the mover at virtual time `now_s`."""
        lands_s = max(now_s, self._free_s[direction]) + len(job) * self._block_s
        self._free_s[direction] = lands_s
        heapq.heappush(self._flights, Flight(lands_s, job.job_id, direction, job, ticket, seat))

    def due(self, now_s: float) -> Flight | None:
        """Take out the next flight that has landed by `now_s`."""
        if self._flights and self._flights[0].lands_s <= now_s:
            return heapq.heappop(self._flights)
        return None

    def next_landing_s(self) -> float:
        """When the next flight lands; something must be under way."""
        return self._flights[0].lands_s
