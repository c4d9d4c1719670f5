"""The order of one mover's jobs in one direction: jobs with a common target keep theirs.

A job that waits for its event must not hold up other jobs, or one event that never happens would
stop all transfers. But if two jobs write to the same slot (or block), the later one must be last.

```
submitted   A -> 1 2     waits for its event
            B -> 3       may run: no target of A's
            C -> 2 4     waits for A, whether or not its own event has happened
            D -> 4       waits for C
```
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from kvstow.transfer.mover import Event, Index


@dataclass(slots=True)
class Turn:
    """What a waiting job waits for, and which jobs wait for it.

    Attributes:
        serial: its number among the jobs that had to wait.
        num_before: waiting jobs that it waits for.
        followers: serials of the waiting jobs that wait for it.
    """

    serial: int
    num_before: int
    followers: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class OrderedJob:
    """What decides when a job may run.

    Attributes:
        targets: the slots or blocks that it writes to.
        after: the event that it waits for.
        is_ready: whether its event has happened, or the device will wait for it.
        is_submitted: whether it has entered its `JobOrder`.
        turn: None unless it had to wait.
    """

    targets: Index
    after: Event
    is_ready: bool = field(default=False, kw_only=True)
    is_submitted: bool = field(default=False, kw_only=True)
    turn: Turn | None = field(default=None, kw_only=True)

    def watch(self, on_ready: Callable[[], None]) -> None:
        """Call `on_ready` when the event happens after the job has entered its order."""

        def happened() -> None:
            self.is_ready = True
            if self.is_submitted:  # otherwise `enter` finds the job ready
                on_ready()

        self.after.add_done_callback(happened)


J = TypeVar("J", bound=OrderedJob)


class JobOrder(Generic[J]):
    """The jobs that wait, for their event or for another job. Its owner holds a lock."""

    def __init__(self, num_targets: int) -> None:
        """Begin without jobs.

        Args:
            num_targets: slots or blocks that jobs may write to.
        """
        # For each target the serial of the last job that had to wait and writes there, even if that
        # job waits no more. The array takes no memory until a job has to wait, because nothing
        # reads or writes it before.
        self._last = np.zeros(num_targets, dtype=np.int64)
        self._waiting: dict[int, tuple[J, Turn]] = {}
        self._num_serials = 0

    def enter(self, job: J) -> bool:
        """Return whether the job may run now. If not, `release` returns it when it may."""
        job.is_submitted = True
        earlier = self._earlier(job) if self._waiting else []
        if job.is_ready and not earlier:
            return True
        self._num_serials += 1
        job.turn = Turn(self._num_serials, len(earlier))
        # An interrupt may end this at any line. Before the job waits, only followers know it, and
        # `release` passes over it. Once it waits, each earlier job knows it, and it cannot be lost.
        # A later job that finds its serial finds it waiting, so none overtakes the earlier jobs.
        for turn in earlier:
            turn.followers.append(job.turn.serial)
        self._waiting[job.turn.serial] = job, job.turn
        self._last[job.targets] = job.turn.serial
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
            candidate, turn = self._waiting[serial]
            if candidate.is_ready and not turn.num_before:
                del self._waiting[serial]
                released.append(candidate)
                for follower in turn.followers:
                    if follower in self._waiting:  # not so if an interrupt ended its `enter`
                        self._waiting[follower][1].num_before -= 1
                        candidates.append(follower)
        return released

    def abandon(self) -> list[J]:
        """Forget the jobs that wait, and return them."""
        waiting, self._waiting = self._waiting, {}
        return [job for job, _ in waiting.values()]

    def _earlier(self, job: J) -> list[Turn]:
        """Return the turns of the last waiting jobs that write where this job writes.

        Still earlier jobs come before those, so this job need not wait for them itself.
        """
        # Not numpy's unique: its first call imports numpy.ma, in the middle of a step.
        serials = sorted(set(self._last[job.targets].tolist()))
        return [self._waiting[serial][1] for serial in serials if serial in self._waiting]
