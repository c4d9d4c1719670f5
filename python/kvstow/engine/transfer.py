"""The copies of one job, on all ranks."""

from dataclasses import dataclass, field

from kvstow._core import Job
from kvstow.transfer import Ticket
from kvstow.transfer.mover import Direction
from kvstow.transfer.ticket import outcome


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """The copies of one job, in flight or ended.

    Attributes:
        job: the blocks and slots that it copies.
        direction: "store" copies to the host, "load" copies to the device.
        num_bytes: bytes of all its copies, on all ranks.
        begin_s: when it was submitted, on the engine's clock.
        request_id: the request that a load is for. None for a store.
        num_tokens: length of the prefix that is on the device once a load has landed.
        rank_tickets: per rank, one ticket for each group that has copies.
    """

    job: Job
    direction: Direction
    num_bytes: int
    begin_s: float
    request_id: str | None = None
    num_tokens: int = 0
    rank_tickets: list[list[Ticket]] = field(default_factory=list)

    @property
    def tickets(self) -> list[Ticket]:
        """Tickets of all ranks, rank by rank."""
        return [ticket for tickets in self.rank_tickets for ticket in tickets]

    def poll(self) -> bool:
        """Return whether all copies have ended, well or not. Never blocks."""
        return all(ticket.poll() for ticket in self.tickets)

    def source_released(self) -> bool:
        """Return whether no copy reads its source any more, on any rank. Never blocks."""
        return all(ticket.source_released() for ticket in self.tickets)

    def outcomes(self) -> list[bool | list[bool]]:
        """Wait for all copies; return per rank what `OffloadScheduler.complete` takes as `ok`."""
        return [outcome(tickets, self.job.host_slots) for tickets in self.rank_tickets]

    def wait(self) -> bool:
        """Wait for all copies; return whether all went well."""
        return all(result is True for result in self.outcomes())
