"""The scheduler's demotes and promotes on one tier: begun, polled, and reported once each.

```
begin --> [ running ] --- the tier has let go of the host slots ---> reported by `poll`, once
               |                                                         ^
               +--- the deadline passes --> [ late ] --------------------+   all False
```

How a wrong block could be served, and what prevents it:

- The scheduler gives a host slot to another block while the tier still uses it: a job is reported
  only when its ticket `has_ended`. A late job is not reported before that.
- An interrupt hides the ticket of a job that has begun: the runner learns of each ticket when the
  tier makes it. So the job still counts as running, and its end is a failure.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from kvstow._core import KvstowError, TierJob
from kvstow.closing import Closing
from kvstow.tiers.ticket import TierTicket, tickets_made
from kvstow.tiers.tier import Tier, TierBlocks
from kvstow.transfer import TransferTimeout
from kvstow.transfer.mover import Ints
from kvstow.transfer.ticket import Deadline


class Ended(NamedTuple):
    """The end of a job: what `OffloadScheduler.complete` takes.

    Attributes:
        job_id: the job.
        ok: for each block, whether it arrived and was proven.
    """

    job_id: int
    ok: list[bool]


def blocks_of(job: TierJob, sequence: int) -> TierBlocks:
    """Return what a tier must know of a job.

    Args:
        job: a demote or a promote.
        sequence: number of the write, larger than that of any write before; 0 for a promote.
    """
    return TierBlocks(job.hashes, job.groups, job.parents, job.disk_slots, sequence)


@dataclass(slots=True)
class _Running:
    """A job that `poll` has not reported.

    Attributes:
        num_blocks: its blocks.
        made: the tickets that the tier has made for it. Without one, the tier has begun nothing.
        ticket: what the tier has returned; None if it has raised.
    """

    num_blocks: int
    made: list[TierTicket] = field(default_factory=list)
    ticket: TierTicket | None = None

    @property
    def has_ended(self) -> bool:
        return all(ticket.has_ended for ticket in self.made)

    @property
    def ok(self) -> list[bool]:
        if self.ticket is None:
            return [False] * self.num_blocks
        ok: list[bool] = self.ticket.ok.tolist()
        return ok


class TierRunner(Closing):
    """Runs jobs on a tier, for one thread that begins and polls them.

    Attributes:
        tier: the tier. `close` closes it.
        is_closed: whether `close` has returned. An interrupt may have left the tier open before.
    """

    def __init__(self, tier: Tier) -> None:
        """Begin without jobs."""
        self.tier: Final = tier
        self.is_closed = False
        self._jobs: dict[int, _Running] = {}

    def begin(
        self,
        direction: Literal["demote", "promote"],
        job_id: int,
        blocks: TierBlocks,
        host_slots: Ints,
        *,
        deadline: float | None = None,
    ) -> None:
        """Begin a job. A job that the tier refuses has failed, and `poll` reports it.

        If this raises, for example by Ctrl-C, the job has failed, and `poll` reports its end.

        Args:
            direction: "demote" writes the host slots into the tier, "promote" reads them from it.
            job_id: names the job in `poll`.
            blocks: the blocks, as `Tier.put` takes them.
            host_slots: shape [n], the host slot of each.
            deadline: time of `time.monotonic` after which the job is late; None for none.
        """
        job = self._jobs[job_id] = _Running(len(blocks))
        move = self.tier.put if direction == "demote" else self.tier.get
        with suppress(KvstowError), tickets_made(job.made):
            job.ticket = move(blocks, host_slots, deadline=deadline)

    @property
    def running(self) -> tuple[int, ...]:
        """The jobs that `poll` has not reported, oldest first."""
        return tuple(self._jobs)

    def poll(self) -> list[Ended]:
        """Return the jobs that have ended, each once. Never blocks."""
        ended = [Ended(job_id, job.ok) for job_id, job in self._jobs.items() if job.has_ended]
        for job_id, _ in ended:
            del self._jobs[job_id]
        return ended

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all jobs have ended, late ones too; return whether they have.

        `poll` reports them.

        Args:
            timeout_s: the most seconds to wait; None for no limit.
        """
        deadline = Deadline(timeout_s)
        for job in self._jobs.values():
            for ticket in job.made:
                try:
                    ticket.wait_until_ended(deadline.left_s)
                except TransferTimeout:
                    return False
        return True

    def close(self) -> None:
        """Close the tier, which carries out every job. `poll` reports those that have ended."""
        self.tier.close()
        self.is_closed = True

    def forget_all(self) -> None:
        """Forget the jobs that `poll` has not reported, because nobody asks for their end."""
        self._jobs.clear()
