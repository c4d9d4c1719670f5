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
from typing import Generic, TypeVar

import numpy as np

from kvstow.transfer.mover import Index

__all__ = ["JobOrder", "OrderedJob"]


@dataclass(slots=True, eq=False, kw_only=True)
class OrderedJob:
    """What the order of a job depends on.

    Attributes:
        targets: the slots or blocks that it writes to.
        is_ready: whether its event has happened.
        serial: its number among the jobs that had to wait; 0 for none.
        num_before: waiting jobs that it waits for.
        followers: waiting jobs that wait for it.
    """

    targets: Index
    is_ready: bool = False
    serial: int = 0
    num_before: int = 0
    followers: list[OrderedJob] = field(default_factory=list)


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
        self._waiting: dict[int, J] = {}
        self._num_serials = 0

    def enter(self, job: J) -> bool:
        """Whether the job may run now; if not, `release` returns it when it may."""
        earlier = self._earlier(job) if self._waiting else []
        if job.is_ready and not earlier:
            return True
        self._num_serials += 1
        job.serial, job.num_before = self._num_serials, len(earlier)
        for one in earlier:
            one.followers.append(job)
        self._last[job.targets] = job.serial
        self._waiting[job.serial] = job
        return False

    def release(self, job: J) -> list[J]:
        """Return the jobs that may run now that the event of `job` has happened, in their order."""
        job.is_ready = True
        released: list[J] = []
        candidates = deque([job.serial])
        while candidates:
            one = self._waiting.get(candidates.popleft())
            if one is not None and one.is_ready and not one.num_before:
                del self._waiting[one.serial]
                released.append(one)
                for follower in one.followers:
                    follower.num_before -= 1
                    candidates.append(follower.serial)
        return released

    def abandon(self) -> list[J]:
        """Forget the jobs that wait, and return them."""
        waiting, self._waiting = self._waiting, {}
        return list(waiting.values())

    def _earlier(self, job: J) -> list[J]:
        """The last waiting jobs that write where this one does; others wait before those."""
        serials = np.unique(self._last[job.targets]).tolist()
        return [self._waiting[serial] for serial in serials if serial in self._waiting]
