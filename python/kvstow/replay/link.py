"""Transfers in flight in virtual time: one serial link per direction.

    submitted      started                      lands
        |  link busy  |  bytes / bandwidth        |   `due` returns it
        v             v                           v
    ----+-------------+---------------------------+----> virtual time

The movers make the real copies meanwhile, and the replay waits for them only at the landing. So its
figures do not depend on the speed of the machine.
"""

import heapq
import math
from collections.abc import Sequence

import numpy as np

from kvstow.engine import Transfer
from kvstow.replay.faults import FaultyTicket


class Links:
    """The two directions of the link between device and host, and the transfers on them.

    Attributes:
        bytes_per_s: bandwidth of each direction.
    """

    def __init__(self, block_bytes: Sequence[int], bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._block_s = np.array(block_bytes) / bytes_per_s
        self._free_s = {"store": 0.0, "load": 0.0}
        # A heap ordered by landing time, then by job.
        self._flights: list[tuple[float, int, Transfer]] = []
        self._deadlines_s: list[float] = []

    def __len__(self) -> int:
        return len(self._flights)

    def submit(self, transfer: Transfer, now_s: float, *, deadline_s: float | None = None) -> None:
        """Start a transfer at virtual time `now_s`; the delays of its tickets are added."""
        direction, job = transfer.direction, transfer.job
        copies_s = float(np.diff(job.offsets) @ self._block_s)
        lands_s = max(now_s, self._free_s[direction]) + copies_s
        self._free_s[direction] = lands_s
        lands_s += max(
            (ticket.delay_s for ticket in transfer.tickets if isinstance(ticket, FaultyTicket)),
            default=0.0,
        )
        heapq.heappush(self._flights, (lands_s, job.job_id, transfer))
        if deadline_s is not None:
            heapq.heappush(self._deadlines_s, deadline_s)

    def due(self, now_s: float) -> Transfer | None:
        """Remove and return the next transfer that has landed by `now_s`, or None."""
        if self._flights and self._flights[0][0] <= now_s:
            return heapq.heappop(self._flights)[2]
        return None

    def land_all(self) -> tuple[list[Transfer], float]:
        """Remove all transfers, and return them in landing order with the last landing time."""
        flights = [heapq.heappop(self._flights) for _ in range(len(self._flights))]
        return [flight[2] for flight in flights], flights[-1][0] if flights else 0.0

    def next_moment_s(self, now_s: float) -> float:
        """Return when the next transfer lands or misses its deadline; infinity if none is left."""
        while self._deadlines_s and self._deadlines_s[0] < now_s:
            heapq.heappop(self._deadlines_s)
        moments_s = [flight[0] for flight in self._flights[:1]]
        # A load is late only after its deadline.
        moments_s += [math.nextafter(late_s, math.inf) for late_s in self._deadlines_s[:1]]
        return min(moments_s, default=math.inf) if self._flights else math.inf
