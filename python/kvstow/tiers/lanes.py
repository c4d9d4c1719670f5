"""Threads that make file calls, of which some may never return.

A call to a dead disk cannot be cancelled. So its thread is abandoned, and another takes its place:

```
lane:  idle --- work begins ---> busy --- the last call returns -----------> idle
                                  |
                                  +-- a call takes too long --> abandoned; its bytes are quarantined
                                      ... the work ends at last --> the thread ends
```

The time counts from the last call that returned. So a piece may take as long as a slow disk needs
for it, and a call that hangs is found all the same. A slow disk gets small calls (`Pace`), which it
returns in time.

Each replacement costs a thread. So with too many bytes or calls in quarantine the lanes go off.
Then no work begins any more, and all work that waits fails.

Puts have lanes of their own: no request waits for a put, but one may wait for a get.

While at least as many jobs wait as there are lanes, a lane joins pieces: those of one job, and of
several jobs. A large call costs little more processor time than a small one, and with large calls
the disk never waits for the threads. A job that is too large to be joined is the next one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Protocol, Self

from kvstow._core import TransferError
from kvstow.tiers.tier import without_thread
from kvstow.transfer.ticket import HostTicket, TransferTimeout

# How often the watch looks at the threads within the time after which a call counts as stuck.
_LOOKS = 4
# How many times each thread may be replaced. A call that syncs the header has no bytes.
_MOST_REPLACED = 32
# Bytes of a call, unless it has less to move. Eight threads that share a disk of 1 MB/s wait 17 s
# for the smallest. After each call a thread may wait 5 ms for Python, so a fast disk gets the
# largest.
_LEAST_BYTES, _MOST_BYTES = 2 << 20, 32 << 20
# Calls grow until one takes this part of the time after which it counts as stuck. The disk may then
# become so many times as slow.
_MARGIN = 16


class Work(Protocol):
    """One piece of work, which ends itself: `run` and `fail` raise nothing."""

    num_bytes: int

    def take_in(self, other: Self) -> bool:
        """Join the piece that follows, of the same job or the next, unless both are too much.

        Returns:
            Whether this piece has it now.
        """

    def run(self) -> None:
        """Carry it out."""

    def fail(self, error: TransferError) -> None:
        """End it without carrying it out."""


@dataclass(slots=True)
class Pace:
    """How many bytes a call may move, so that the disk returns it before it counts as stuck.

    Threads share it without a lock: each value that one of them writes is a valid one.

    Attributes:
        slow_s: seconds of a call after which the next ones are smaller.
        most_bytes: the most bytes of the next call.
    """

    slow_s: float
    most_bytes: int = field(default_factory=lambda: _LEAST_BYTES)

    def note(self, num_bytes: int, took_s: float) -> None:
        """Note how long a call took. Only a large one that was quick makes the next ones larger."""
        if took_s > self.slow_s:
            self.most_bytes = max(_LEAST_BYTES, self.most_bytes // 2)
        elif 2 * took_s < self.slow_s and 2 * num_bytes > self.most_bytes:
            self.most_bytes = min(_MOST_BYTES, 2 * self.most_bytes)

    def slow_down(self) -> None:
        """Begin again with small calls."""
        self.most_bytes = _LEAST_BYTES


@dataclass(slots=True, eq=False)
class _Queue:
    """The jobs that wait for one kind of lane, each as its pieces.

    `jobs` and `first` are written in C, so no interrupt divides what they do.

    Attributes:
        pace: of the calls of these lanes. A disk may read fast and write slowly.
        jobs: the jobs; None wakes a thread.
        first: jobs that come before all of `jobs`.
    """

    pace: Pace
    jobs: SimpleQueue[deque[Work] | None] = field(default_factory=SimpleQueue)
    first: deque[deque[Work]] = field(default_factory=deque)

    def take(self) -> deque[Work] | None:
        """Return the pieces that come next; raise `Empty` if none wait."""
        with suppress(IndexError):
            return self.first.popleft()
        return self.jobs.get_nowait()


@dataclass(slots=True, eq=False)
class _Lane:
    """A thread. Since `since_s` it has had this work, or no call of it has returned."""

    queue: _Queue
    work: Work | None = None
    since_s: float = 0.0
    is_abandoned: bool = False
    end: HostTicket = field(default_factory=HostTicket)


class Lanes:
    """A few threads that carry out puts, and as many for all other work, each in its order.

    Attributes:
        in_flight_bytes: bytes of the work that is under way.
        quarantined_bytes: of these, bytes of calls that have not returned for too long.
        error: why the lanes are off; None while they are not.
    """

    def __init__(
        self,
        num_lanes: int,
        *,
        stuck_after_s: float,
        max_quarantined_bytes: int,
        now: Callable[[], float],
    ) -> None:
        """Start no thread yet.

        Args:
            num_lanes: threads for puts, and as many for all other work.
            stuck_after_s: seconds after which a call counts as one that does not return.
            max_quarantined_bytes: bytes in such calls. With more, the lanes go off.
            now: seconds, as `time.monotonic` gives them.
        """
        self.in_flight_bytes = self.quarantined_bytes = 0
        self.error: TransferError | None = None
        self._num_lanes = num_lanes
        self._max_stuck = 2 * num_lanes * _MOST_REPLACED
        self._stuck_after_s = stuck_after_s
        self._max_quarantined_bytes = max_quarantined_bytes
        self._now = now
        self._lock = threading.RLock()  # written in C, so no interrupt divides what it does
        slow_s = stuck_after_s / _MARGIN
        self._puts, self._others = _Queue(Pace(slow_s)), _Queue(Pace(slow_s))
        self._stop_watch: SimpleQueue[None] = SimpleQueue()
        self._is_stopping = False
        self._lanes: list[_Lane] = []
        self._own = threading.local()  # what each thread is, and its lane

    def start(self) -> None:
        """Start the threads. After an error or an interrupt, the caller calls `abort`.

        Raises:
            StateError: the system starts no more threads.
        """
        try:
            for queue in (self._puts, self._others) * self._num_lanes:
                self._add(queue)
            threading.Thread(target=self._watch, name="kvstow-tier-watch", daemon=True).start()
        except RuntimeError as error:
            raise without_thread(error) from error

    def abort(self) -> None:
        """Let each thread that runs end, before any work was queued. Does not wait."""
        self.stop()
        self._stop_watch.put(None)

    def submit(self, pieces: deque[Work], *, is_put: bool) -> None:
        """Queue all pieces of a job. An interrupt may leave none of them queued.

        Jobs take turns, so that a long one holds up no other. The caller may still take pieces from
        the end. If the lanes are off, all fail at once.
        """
        (self._puts if is_put else self._others).jobs.put(pieces)
        if self.error is not None:
            self._fail_waiting()

    def stop(self) -> None:
        """Let each thread end after all queued work. Does not wait."""
        self._is_stopping = True
        for queue in (self._puts, self._others):
            queue.jobs.put(None)  # wakes a thread

    def join(self) -> bool:
        """Wait until each thread has ended or is abandoned; return whether all have ended."""
        while True:
            with self._lock:
                left = [it for it in self._lanes if not it.is_abandoned and not it.end.poll()]
            if not left:
                break
            try:
                left[0].end.wait(self._stuck_after_s / _LOOKS)
            except TransferTimeout:
                continue
        self._stop_watch.put(None)
        return all(lane.end.poll() for lane in self._lanes)

    @property
    def is_own_thread(self) -> bool:
        """Whether one of these threads asks."""
        return hasattr(self._own, "is_own")

    def most_bytes(self) -> int:
        """Return how many bytes the next call of this thread may move."""
        lane: _Lane = self._own.lane
        return lane.queue.pace.most_bytes

    def note_return(self, num_bytes: int) -> None:
        """Note that a call of this thread has returned, and has moved so many bytes."""
        lane, now_s = self._own.lane, self._now()
        lane.queue.pace.note(num_bytes, now_s - lane.since_s)
        lane.since_s = now_s

    def look_after(self) -> None:
        """Abandon threads whose call has not returned for too long, and replace them."""
        now_s = self._now()
        with self._lock:
            for lane in list(self._lanes):
                work, for_s = lane.work, now_s - lane.since_s
                if work is None or for_s <= self._stuck_after_s or lane.is_abandoned:
                    continue
                lane.is_abandoned = True
                lane.queue.pace.slow_down()
                self.quarantined_bytes += work.num_bytes
                num_stuck, most = sum(it.is_abandoned for it in self._lanes), self._max_stuck
                if self.quarantined_bytes > self._max_quarantined_bytes or num_stuck > most:
                    self._go_off(
                        f"{self.quarantined_bytes} bytes are in {num_stuck} calls that have not "
                        f"returned for {self._stuck_after_s} s, more than "
                        f"{self._max_quarantined_bytes} bytes or {most} calls"
                    )
                    continue
                try:
                    self._add(lane.queue)
                except RuntimeError as error:
                    self._go_off(f"a call does not return, and no more threads start ({error})")
        if self.error is not None:
            self._fail_waiting()

    def close_in_child(self) -> None:
        """Forget the threads in a forked child, which has none of them."""
        self._lock = threading.RLock()
        self._puts, self._others = _Queue(self._puts.pace), _Queue(self._others.pace)
        self._stop_watch = SimpleQueue()
        self._lanes = []

    def _go_off(self, why: str) -> None:
        self.error = self.error or TransferError(
            f"the tier is off because {why}; check the disk, and open the tier again"
        )

    def _fail_waiting(self) -> None:
        assert self.error is not None, "only lanes that are off fail what waits"
        for queue in (self._puts, self._others):
            with suppress(Empty):
                while True:
                    pieces = queue.take()
                    while pieces:
                        with suppress(IndexError):
                            pieces.popleft().fail(self.error)
            if self._is_stopping:
                queue.jobs.put(None)  # in place of one that was taken here

    def _add(self, queue: _Queue) -> None:
        lane = _Lane(queue)
        threading.Thread(target=self._run, args=(lane,), name="kvstow-tier", daemon=True).start()
        self._lanes.append(lane)

    def _next(self, queue: _Queue) -> Work | None:
        """Wait for a piece of work; None to stop, when no work is left."""
        while True:
            try:
                pieces = queue.take()
            except Empty:
                if self._is_stopping:
                    queue.jobs.put(None)  # wakes the next thread
                    return None
                pieces = queue.jobs.get()
            if pieces is None:
                continue
            with suppress(IndexError):
                work = pieces.popleft()
                self._join(queue, work, pieces)
                return work

    def _join(self, queue: _Queue, work: Work, own: deque[Work]) -> None:
        """Let `work` take in what follows, but leave a job for each other lane.

        Args:
            queue: where more jobs wait, and where the rest of its own job goes.
            work: a piece that no thread has begun.
            own: the pieces that follow it in its job.
        """
        pieces = own
        while queue.jobs.qsize() >= self._num_lanes:
            if not pieces:
                try:
                    more = queue.take()
                except Empty:
                    break
                if more is None:
                    queue.jobs.put(None)  # it wakes another thread
                    break
                pieces = more
            with suppress(IndexError):  # an interrupted caller may take its pieces back
                piece = pieces.popleft()
                if not work.take_in(piece):
                    pieces.appendleft(piece)
                    break
        if pieces is own:
            if own:
                queue.jobs.put(own)
        elif pieces:
            queue.first.append(pieces)
            queue.jobs.put(deque())  # wakes a thread, because this one may hang

    def _run(self, lane: _Lane) -> None:
        self._own.is_own, self._own.lane = True, lane
        while (work := self._next(lane.queue)) is not None:
            with self._lock:
                lane.work, lane.since_s = work, self._now()
                self.in_flight_bytes += work.num_bytes
            if self.error is None:
                work.run()
            else:
                work.fail(self.error)
            with self._lock:
                lane.work = None
                self.in_flight_bytes -= work.num_bytes
                if lane.is_abandoned:
                    self.quarantined_bytes -= work.num_bytes
                    self._lanes.remove(lane)
                    break
            del work  # its arrays can be large
        lane.end.end(None)

    def _watch(self) -> None:
        self._own.is_own = True
        while True:
            try:
                self._stop_watch.get(timeout=self._stuck_after_s / _LOOKS)
            except Empty:
                self.look_after()
            else:
                return
