"""The order of the jobs of one mover in one direction: those with a common destination keep theirs.

A job that waits for its event must hold up no other, or one event that never happens would end all
transfers. But of two jobs that write to the same slot (or block) the later one must be last.

```
submitted   A -> 1 2     waits for its event
            B -> 3       may run                      no destination of A's
            C -> 2 4     waits for A                  whether its own event has happened or not
            D -> 4       waits for C
```
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np

from kvstow.transfer.mover import Index

__all__ = ["JobOrder", "OrderedJob", "Turn"]


@dataclass(slots=True)
class Turn:
    """Of a job that has to wait, what for.

    Attributes:
        serial: its number among the jobs that had to wait.
        num_before: waiting jobs that it waits for.
        followers: serials of the waiting jobs that wait for it.
    """

    serial: int
    num_before: int
    followers: list[int] = field(default_factory=list)


class OrderedJob(Protocol):
    """What the order of a job depends on.

    Attributes:
        targets: the slots or blocks that it writes to.
        is_ready: whether its event has happened.
        turn: None unless it had to wait.
    """

    targets: Index
    is_ready: bool
    turn: Turn | None


J = TypeVar("J", bound=OrderedJob)


class JobOrder(Generic[J]):
    """The jobs that wait, for their event or for another job. Its owner holds a lock."""

    def __init__(self, num_targets: int) -> None:
        """Begin without jobs.

        Args:
            num_targets: slots or blocks that jobs may write to.
        """
        # Per target the last waiting job that writes there; jobs that wait no more stay named.
        # Nothing reads or writes it, and so it takes no memory, until a job has to wait.
        self._last = np.zeros(num_targets, dtype=np.int64)
        self._waiting: dict[int, tuple[J, Turn]] = {}
        self._num_serials = 0

    def enter(self, job: J) -> bool:
        """Whether the job may run now; if not, `release` returns it when it may."""
        earlier = self._earlier(job) if self._waiting else []
        if job.is_ready and not earlier:
            return True
        self._num_serials += 1
        job.turn = Turn(self._num_serials, len(earlier))
        for one in earlier:
            one.followers.append(job.turn.serial)
        self._last[job.targets] = job.turn.serial
        self._waiting[job.turn.serial] = job, job.turn
        return False

    def release(self, job: J) -> list[J]:
        """Return the jobs that may run now that the event of `job` has happened, in their order."""
        job.is_ready = True
        released: list[J] = []
        candidates = deque([] if job.turn is None else [job.turn.serial])
        while candidates:
            serial = candidates.popleft()
            if serial not in self._waiting:
                continue
            one, turn = self._waiting[serial]
            if one.is_ready and not turn.num_before:
                del self._waiting[serial]
                released.append(one)
                for follower in turn.followers:
                    self._waiting[follower][1].num_before -= 1
                    candidates.append(follower)
        return released

    def abandon(self) -> list[J]:
        """Forget the jobs that wait, and return them."""
        waiting, self._waiting = self._waiting, {}
        return [job for job, _ in waiting.values()]

    def _earlier(self, job: J) -> list[Turn]:
        """The last waiting jobs that write where this one does; others wait before those."""
        # Not numpy's unique: its first call imports numpy.ma, in the middle of a step.
        serials = sorted(set(self._last[job.targets].tolist()))
        return [self._waiting[serial][1] for serial in serials if serial in self._waiting]
