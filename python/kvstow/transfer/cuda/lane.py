"""One direction between a device and the host: its streams, its staging memory and its jobs.

A lane carries out either stores or loads. Its staging memory consists of places, each with a stream
of its own. The batches of a job take turns through the places. So the kernel of one batch runs
while the copy engine still carries another:

```
store   place 0   wait(after)  gather copy   gather released! copy   done!
        place 1   wait(after)  gather copy   gather released! copy   done!

load    place 0   wait(after*) copy scatter  copy scatter   done!
        place 1   wait(after*) copy scatter  copy scatter   done!
```

`after` is the compute that fills the blocks, or may still read them. With staging only the kernel
waits for it (after*: the first copy into a place does not wait, its scatter does). Without staging
(the direct path) the copies of a job share one stream, and all wait for it.

What keeps blocks from being stale, torn or mixed up:

- Work of one place runs in the order of its stream. So a batch is read only once it is there, and
  overwritten only once it was read.
- Nothing orders the streams of two places. So a job that writes where an earlier job in flight
  writes waits for that job's `done` events, on each of its streams.
- `released` and `done` are one event per stream that the job uses. They count only together, and
  only once the whole job is queued. While the engine computes, a store is queued bit by bit (see
  `Pace`), and no later job begins before that.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from kvstow._core import TransferError
from kvstow.transfer.cuda.batch import Place
from kvstow.transfer.cuda.interface import CudaError, DeviceEvent, Runtime
from kvstow.transfer.cuda.job import CANCELLED, FIRST_SLEEP_S, CudaJob, CudaTicket
from kvstow.transfer.cuda.pace import Pace
from kvstow.transfer.cuda.runtime import CudaEvent
from kvstow.transfer.fork import FORKED_TRANSFER, close_in_children
from kvstow.transfer.mover import READY
from kvstow.transfer.ticket import NOT_BEGUN, failure

# So long a device may refuse each question before whoever waits for it takes it as lost.
_PATIENCE_S = 10.0


class Lane:
    """One direction of a link. It launches jobs in the order in which they became runnable.

    Attributes:
        runtime: the device.
        refusal: what CUDA answered to the last call, if it refused that.
    """

    def __init__(
        self, runtime: Runtime, staging_bytes: int, num_places: int, pace: Pace | None = None
    ) -> None:
        """Make the streams and allocate the staging memory.

        Args:
            runtime: the device.
            staging_bytes: bytes of a place.
            num_places: number of places.
            pace: of jobs that are submitted while the compute that they wait for still runs.
        """
        self.runtime, self._pace = runtime, pace
        self.refusal: CudaError | None = None
        streams = [runtime.stream() for _ in range(num_places)]
        self._spare_events: list[DeviceEvent] = []
        # Reentrant, because an event that has happened already calls back from within `submit`.
        self._lock = threading.RLock()
        self._num_launched = 0
        self._waiting: dict[CudaJob, None] = {}  # for their event, or for another waiting job
        self._runnable: deque[CudaJob] = deque()
        self._in_flight: deque[CudaJob] = deque()
        # Last, so that a failure leaves no memory allocated.
        self._staging = runtime.allocate(staging_bytes * num_places)
        self._places = deque(
            Place(self._staging + i * staging_bytes, stream) for i, stream in enumerate(streams)
        )
        close_in_children(self)

    def submit(self, job: CudaJob) -> CudaTicket:
        """Queue a job, and return its ticket. The lane launches it once event and order allow.

        If an interrupt is raised, the job does not run later. If the device has begun it, the
        interrupt is raised after the end of what is queued.
        """

        def ready() -> None:
            with self._lock:
                self._release(job)
                self.advance()

        if isinstance(job.after, CudaEvent):
            job.is_ready = True  # the device will wait for it
        else:
            job.watch(ready)
        try:
            with self._lock:
                if job.order.enter(job):
                    self._runnable.append(job)
                else:
                    self._waiting[job] = None
                # The error is of another job. The caller needs the ticket of this one to go on.
                with suppress(Exception):
                    self.advance()
            return job.ticket
        except BaseException:
            # The exit of the lock raises most of these, when the job is queued already. No call
            # comes before the assignment, so no other interrupt prevents it.
            job.error = CANCELLED
            self._end_cancelled(job)
            raise

    def advance(self, *, in_a_hurry: bool = False) -> None:
        """End the jobs that the device has carried out, and launch those that may begin."""
        with self._lock:
            self.refusal = None
            try:
                if self.runtime.lost is not None:
                    raise self.runtime.lost
                with self.runtime.current():
                    self._retire()
                    while job := self._next():
                        if not self._launch(job, in_a_hurry=in_a_hurry):
                            break
            except CudaError as error:
                self.refusal = error
                if error.is_fatal:  # otherwise ask again later: the device may still copy
                    self._lose(error)

    def finish(self, owner: object) -> None:
        """Carry out the jobs of a mover that may begin, fail its other jobs, and wait for all."""
        with self._lock:
            self._wait_while(
                lambda: any(job.owner is owner for job in [*self._in_flight, *self._runnable])
            )
            for job in [job for job in self._waiting if job.owner is owner]:
                job.order.abandon()
                job.ticket.end(TransferError(NOT_BEGUN))
                del self._waiting[job]
            self.advance()

    def close_in_child(self) -> None:
        """Fail every job in a forked child, which cannot use the device of its parent."""
        self._lock = threading.RLock()  # another thread of the parent may hold the old one
        self._lose(CudaError(FORKED_TRANSFER, is_fatal=True))

    def close(self) -> None:
        """Free the staging memory. No job may be in flight."""
        self.runtime.free(self._staging)

    # -- within ---------------------------------------------------------------------------------

    def _release(self, job: CudaJob) -> None:
        """Let the jobs begin that may, now that the event of `job` has happened."""
        for released in job.order.release(job):
            if released in self._waiting:  # not so if an interrupt came right before
                del self._waiting[released]
                self._runnable.append(released)

    def _wait_while(self, is_pending: Callable[[], bool]) -> None:
        """Wait until the device has carried out some jobs, or has long refused all questions."""
        with self._lock:
            answered_s = time.monotonic()
            self.advance(in_a_hurry=True)
            while is_pending():
                if self.refusal is None:
                    self._synchronize()
                    answered_s = time.monotonic()
                elif time.monotonic() - answered_s > _PATIENCE_S:
                    self._lose(_no_answer(self.refusal))
                time.sleep(FIRST_SLEEP_S)  # because a refused call has not waited
                self.advance(in_a_hurry=True)

    def _synchronize(self) -> None:
        """Wait for the first job in flight, unless CUDA refuses to."""
        try:
            for event in self._in_flight[0].done if self._in_flight else ():
                self.runtime.synchronize(event)
        except CudaError as error:
            if error.is_fatal:
                self._lose(error)

    def _end_cancelled(self, job: CudaJob) -> None:
        """Let a cancelled job end. Return after the end of what is queued of it."""
        # A thread puts a job among those in flight before it looks for its error. So it queues
        # nothing of the job unless the job is in flight here.
        while job in self._in_flight:
            try:
                self._wait_while(lambda: job in self._in_flight)
            except BaseException:
                # Another interrupt: the caller may reuse the blocks and slots after this call.
                continue
        if job.turn is not None:
            with self._lock:
                self._release(job)  # its event may never happen, and would hold up later jobs

    def _reserve(self, job: CudaJob) -> bool:
        """Reserve events and room for the sums; return False while either is missing."""
        num_places = min(job.num_places, len(self._places), len(job.batches))
        try:
            while len(self._spare_events) < num_places * (1 + job.is_staged):
                self._spare_events.append(self.runtime.event())
        except CudaError as error:
            if error.is_fatal:
                raise
            if not self._in_flight:  # otherwise jobs in flight give theirs back
                job.ticket.end(error)  # nothing of it is queued
            return False
        if job.sums is not None:
            others = [
                (other.first_sum, len(other.host_slots))
                for other in self._in_flight
                if other.sums is job.sums
            ]
            first = job.sums.room_for(len(job.host_slots), others)
            if first is None:
                return False
            job.first_sum = first
        spare = self._spare_events
        job.done = [spare.pop() for _ in range(num_places)]
        if job.is_staged:
            job.released = [spare.pop() for _ in range(num_places)]
        return True

    def _next(self) -> CudaJob | None:
        """Return the job in flight that is not queued yet, or else the next one that may begin."""
        if self._in_flight and not self._in_flight[-1].is_queued:
            return self._in_flight[-1]
        while self._runnable:
            job = self._runnable[0]
            # It has a serial if an interrupt came right after its append to the jobs in flight.
            if not (job.serial or job.ticket.has_ended):
                if job.error is not None:  # it was cancelled
                    job.ticket.end(job.error)
                elif self._reserve(job):
                    # In this order, so that an interrupt in between does not lose the job.
                    self._in_flight.append(job)
                    self._runnable.popleft()
                    return job
                elif not job.ticket.has_ended:
                    return None
            self._runnable.popleft()
        return None

    def _launch(self, job: CudaJob, *, in_a_hurry: bool) -> bool:
        """Queue a job, or more of it. Return False if its pace holds the rest back."""
        interrupt: BaseException | None = None
        try:
            if not job.has_begun:
                self._begin(job)
            if job.error is None and not self._queue(job, in_a_hurry=in_a_hurry):
                return False
        except BaseException as error:
            if isinstance(error, CudaError) and error.is_fatal:
                raise
            # Whatever was raised, the job was not carried out, and must not seem to be.
            job.error = failure(error)
            interrupt = None if isinstance(error, Exception) else error
        # After a refusal too: the job ends when the device has carried out what was queued of it.
        for event, place in zip(job.done, job.places, strict=False):
            try:
                self.runtime.record(event, place.stream)
            except BaseException as error:
                # Try again: an event that is not recorded counts as reached, and so would the job.
                # If this fails too, the next call tries again, because the job is not queued yet.
                interrupt = interrupt if isinstance(error, Exception) else error
                self.runtime.record(event, place.stream)
        job.is_queued = True
        job.batches, job.after = (), READY  # or the poll that ends the job would free them
        if interrupt is not None:
            raise interrupt
        return True

    def _begin(self, job: CudaJob) -> None:
        """Find out what the work of a job must wait for."""
        self._num_launched += 1
        job.serial = self._num_launched
        job.earlier = self._earlier_writers(job)
        if not isinstance(job.after, CudaEvent):
            job.after.wait()  # has happened, and raises if it failed
        elif self._pace is not None and not self._is_reached(job.after.handle):
            job.is_paced = True
            if len(self._in_flight) == 1:
                self._pace.restart()
        # Last, because an interrupt can lose an error of the above. The next call finds it again.
        job.has_begun = True

    def _queue(self, job: CudaJob, *, in_a_hurry: bool) -> bool:
        """Queue batches, which take turns through the places. Return whether all are queued."""
        pace = None if in_a_hurry or not job.is_paced else self._pace
        if pace is not None:
            pace.refill()
        event = job.after.handle if isinstance(job.after, CudaEvent) else None
        num_batches, num_places = len(job.batches), len(job.done)
        while job.num_queued < num_batches:
            number, after = job.num_queued, None
            batch = job.batches[number]
            if pace is not None and not pace.take(batch.num_bytes):
                return False
            if number == len(job.places) < num_places:  # else it has one, also if tried again
                job.places.append(self._places[0])
                self._places.rotate(-1)
            place = job.places[number % num_places]
            if number < num_places:
                after = event
                for other, written in job.earlier:
                    if other is not place:
                        self.runtime.wait(place.stream, written)
            is_last = number + num_places >= num_batches
            released = job.released[number % num_places] if is_last and job.is_staged else None
            job.queue(job, batch, place, after, released)
            job.num_queued += 1
        return True

    def _earlier_writers(self, job: CudaJob) -> list[tuple[Place, DeviceEvent]]:
        """Return the places, and their events, after which this job may write to its targets."""
        newest = int(job.writers[job.targets].max())
        job.writers[job.targets] = job.serial
        return [
            end
            for other in self._in_flight
            if other.owner is job.owner and other.serial <= newest
            for end in zip(other.places, other.done, strict=False)  # less after a refusal
        ]

    def _retire(self) -> None:
        is_done = self._is_reached
        while self._in_flight:
            job = self._in_flight[0]
            if not (job.is_queued and all(map(is_done, job.done))):
                break
            # The job leaves last, so that after an interrupt the next call ends it.
            if not job.ticket.has_ended:
                try:
                    error = job.error or (None if job.check is None else job.check(job))
                except Exception as raised:
                    error = failure(raised)
                job.ticket.end(error)
            self._in_flight.popleft()
            # An interrupt before this costs new events. No event may be spare twice.
            self._spare_events += [*job.done, *job.released]
        for job in self._in_flight:
            if job.is_staged and not job.ticket.is_released:
                if not (job.is_queued and job.error is None and all(map(is_done, job.released))):
                    break
                job.ticket.is_released = True

    def _is_reached(self, event: DeviceEvent) -> bool:
        try:
            return self.runtime.is_done(event)
        except CudaError as error:
            self.refusal = error
            if error.is_fatal:
                raise
            # Unknown, so ask again later: the job may still write to its blocks.
            return False

    def _lose(self, error: CudaError) -> None:
        """Fail every job after the loss of the device."""
        if self.runtime.lost is None:
            self.runtime.lost = error
        for job in [*self._in_flight, *self._runnable, *self._waiting]:
            job.order.abandon()
            if not job.ticket.has_ended:
                job.ticket.end(error)
        # Last, so that after an interrupt the next call ends the other jobs.
        self._in_flight.clear()
        self._runnable.clear()
        self._waiting.clear()


def _no_answer(refusal: CudaError) -> CudaError:
    """Return the error of a device that has refused each question for too long."""
    error = CudaError(
        f"CUDA has refused each call for {_PATIENCE_S} s, the last so: {refusal}; this process has "
        "lost the device, restart it",
        is_fatal=True,
    )
    error.__cause__ = refusal
    return error
