"""One direction between a device and the host: its streams, its staging memory and its jobs.

A lane carries out either stores or loads. It has two streams, so that the kernel of one batch runs
while the copy engine still carries another. Between them is a ring of staging places:

```
store   pack    wait(after)    wait(drained) gather filled!    wait(drained) gather filled! ...
        link                   wait(filled)  copy  drained!    wait(filled)  copy  drained! ...

load    link                   wait(drained) copy filled!      wait(drained) copy filled! ...
        pack    wait(after)    wait(filled) scatter drained!   wait(filled) scatter drained! ...
```

`after` is the compute that fills the blocks, or may still read them. With staging only the kernel
waits for it; without staging (the direct path) the copy does. Each place has the events `filled`
and `drained`. So a batch is read only once it is there, and overwritten only once it was read.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvstow._core import TransferError
from kvstow.transfer.cuda.interface import CudaError, DeviceEvent, Runtime, Stream
from kvstow.transfer.cuda.ring import IdRing
from kvstow.transfer.cuda.runtime import CudaEvent
from kvstow.transfer.fork import FORKED_TRANSFER, close_in_children
from kvstow.transfer.mover import Event, Index
from kvstow.transfer.order import JobOrder, OrderedJob
from kvstow.transfer.ticket import NOT_BEGUN, Ticket, checked_timeout_s, failure, late

_FIRST_SLEEP_S, _LONGEST_SLEEP_S = 20e-6, 1e-3


@dataclass(frozen=True, slots=True)
class Place:
    """A part of the staging memory that holds one batch at a time.

    Attributes:
        address: where it begins on the device.
        filled: event after which the batch is in it.
        drained: event after which the batch was taken out.
    """

    address: int
    filled: DeviceEvent
    drained: DeviceEvent


@dataclass(slots=True, eq=False)
class CudaJob(OrderedJob):
    """A transfer in a lane.

    Attributes:
        owner: the mover that it came through.
        block_ids: shape [n], int64, in the order in which they are moved.
        host_slots: shape [n], int64, one for each.
        order: the order of the owner's jobs of this direction.
        ring: holds its ids for the kernels to read.
        enqueue: puts its work on the lane's streams.
        check: called when all bytes have arrived; returns what is wrong with them.
        is_staged: whether its source is read before the copies of the link end.
        ticket: reports its end.
        first: where its ids begin in the ring.
        done: an event of each stream; the device has carried out the job when both are reached.
        error: why it failed before its bytes arrived.
    """

    owner: object
    block_ids: Index
    host_slots: Index
    order: JobOrder[CudaJob]
    ring: IdRing
    enqueue: Callable[[CudaJob, Lane], None]
    check: Callable[[CudaJob], TransferError | None] | None
    is_staged: bool
    ticket: CudaTicket
    first: int = 0
    done: list[DeviceEvent] = field(default_factory=list)
    error: TransferError | None = None


class CudaTicket(Ticket):
    """A ticket that ends when the device has reached the events of its job."""

    def __init__(self, lane: Lane) -> None:
        """Begin under way."""
        self._lane = lane
        self._has_ended = False
        self._error: TransferError | None = None
        self.is_released = False

    def poll(self) -> bool:
        """Return whether the transfer has ended, well or not."""
        if not self._has_ended:
            self._lane.advance()
        return self._has_ended

    def source_released(self) -> bool:
        """Return whether the transfer reads its source no more; see `Ticket.source_released`.

        A store reads its blocks no more once the kernel has gathered them.
        """
        return self.poll() or self.is_released

    @property
    def error(self) -> TransferError | None:
        """Why the transfer failed; None while it is under way and after success."""
        return self._error if self._has_ended else None

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until the transfer has ended; see `Ticket.wait`."""
        until_s = None if timeout_s is None else time.monotonic() + checked_timeout_s(timeout_s)
        sleep_s = _FIRST_SLEEP_S
        while not self.poll():
            left_s = sleep_s if until_s is None else until_s - time.monotonic()
            if left_s <= 0:
                raise late(timeout_s)
            time.sleep(min(sleep_s, left_s))
            sleep_s = min(2 * sleep_s, _LONGEST_SLEEP_S)
        if self._error is not None:
            raise self._error

    def end(self, error: TransferError | None) -> None:
        """Report the end, once."""
        self._error = error
        self._has_ended = True


class Lane:
    """One direction of a link. It launches jobs in the order in which they became runnable.

    Attributes:
        runtime: the device.
        pack: the stream of the kernels.
        link: the stream of the copies.
    """

    def __init__(self, runtime: Runtime, staging_bytes: int, num_places: int) -> None:
        """Make the streams and allocate the staging memory."""
        self.runtime = runtime
        self.pack = runtime.stream()
        self.link = runtime.stream()
        events = [(runtime.event(), runtime.event()) for _ in range(num_places)]
        self._spare_events: list[DeviceEvent] = []
        # Reentrant, because an event that has happened already calls back from within `submit`.
        self._lock = threading.RLock()
        self._waiting: dict[CudaJob, None] = {}  # for their event, or for another waiting job
        self._runnable: deque[CudaJob] = deque()
        self._in_flight: deque[CudaJob] = deque()
        # Last, so that a failure leaves no memory allocated.
        self._staging = runtime.allocate(staging_bytes * num_places)
        self._places = deque(
            Place(self._staging + i * staging_bytes, filled, drained)
            for i, (filled, drained) in enumerate(events)
        )
        close_in_children(self)

    def submit(self, job: CudaJob) -> None:
        """Queue a job. The lane launches it as soon as its event and earlier jobs allow."""

        def ready() -> None:
            with self._lock:
                for released in job.order.release(job):
                    del self._waiting[released]
                    self._runnable.append(released)
                self.advance()

        if isinstance(job.after, CudaEvent):
            job.is_ready = True  # the device will wait for it
        else:
            job.watch(ready)
        with self._lock:
            if job.order.enter(job):
                self._runnable.append(job)
            else:
                self._waiting[job] = None
            self.advance()

    def advance(self) -> None:
        """End the jobs that the device has carried out, and launch those that may begin."""
        with self._lock:
            try:
                if self.runtime.lost is not None:
                    raise self.runtime.lost
                self._retire()
                while self._runnable and self._reserve(self._runnable[0]):
                    self._launch(self._runnable.popleft())
            except CudaError as error:
                self._lose(error)

    def finish(self, owner: object) -> None:
        """Carry out the jobs of a mover that may begin, fail its other jobs, and wait for all."""
        with self._lock:
            self.advance()
            while any(job.owner is owner for job in [*self._in_flight, *self._runnable]):
                try:
                    for event in self._in_flight[0].done:
                        self.runtime.synchronize(event)
                except CudaError as error:
                    self._lose(error)
                self.advance()
            for job in [job for job in self._waiting if job.owner is owner]:
                job.order.abandon()
                del self._waiting[job]
                job.ticket.end(TransferError(NOT_BEGUN))
            self.advance()

    def close_in_child(self) -> None:
        """Fail every job in a forked child, which cannot use the device of its parent."""
        self._lock = threading.RLock()  # another thread of the parent may hold the old one
        self._lose(CudaError(FORKED_TRANSFER, is_fatal=True))

    def close(self) -> None:
        """Free the staging memory. No job may be in flight."""
        self.runtime.free(self._staging)

    # -- what movers put on the streams ---------------------------------------------------------

    def wait_for(self, after: Event, stream: Stream) -> None:
        """Let a stream wait for a job's event, unless the host has waited for it."""
        if isinstance(after, CudaEvent):
            self.runtime.wait(stream, after.handle)

    def next_place(self) -> Place:
        """Return the place whose turn it is."""
        self._places.rotate(-1)
        return self._places[-1]

    # -- within ---------------------------------------------------------------------------------

    def _reserve(self, job: CudaJob) -> bool:
        """Reserve two events and room in the ring; return False while either is missing."""
        try:
            while len(self._spare_events) < len((self.pack, self.link)):
                self._spare_events.append(self.runtime.event())
        except CudaError as error:
            if error.is_fatal or not self._in_flight:
                raise
            return False  # jobs in flight give theirs back
        first = job.ring.reserve(job.block_ids)
        if first is None:
            return False
        job.first = first
        return True

    def _launch(self, job: CudaJob) -> None:
        job.done = [self._spare_events.pop(), self._spare_events.pop()]
        self._in_flight.append(job)
        interrupt: BaseException | None = None
        try:
            if not isinstance(job.after, CudaEvent):
                job.after.wait()  # has happened, and raises if it failed
            job.enqueue(job, self)
        except BaseException as error:
            if isinstance(error, CudaError) and error.is_fatal:
                raise
            # Whatever was raised, the job was not carried out, and must not seem to be.
            job.error = failure(error)
            interrupt = None if isinstance(error, Exception) else error
        # After a refusal too: the job ends when the device has carried out what was queued of it.
        for event, stream in zip(job.done, (self.pack, self.link), strict=True):
            try:
                self.runtime.record(event, stream)
            except BaseException as error:
                # Try again: an event that is not recorded counts as reached, and so would the job.
                interrupt = interrupt if isinstance(error, Exception) else error
                self.runtime.record(event, stream)
        if interrupt is not None:
            raise interrupt

    def _retire(self) -> None:
        is_done = self._is_reached
        for job in self._in_flight:
            if job.is_staged and not job.ticket.is_released:
                if not is_done(job.done[0]):
                    break
                job.ticket.is_released = True
        while self._in_flight:
            job = self._in_flight[0]
            if not all(map(is_done, job.done)):
                break
            self._in_flight.popleft()
            try:
                error = job.error or (None if job.check is None else job.check(job))
            except Exception as raised:
                error = failure(raised)
            job.ring.free_oldest()
            self._spare_events += job.done
            job.ticket.end(error)

    def _is_reached(self, event: DeviceEvent) -> bool:
        try:
            return self.runtime.is_done(event)
        except CudaError as error:
            if error.is_fatal:
                raise
            # Unknown, so ask again later: the job may still write to its blocks.
            return False

    def _lose(self, error: CudaError) -> None:
        """Fail every job after the loss of the device."""
        if self.runtime.lost is None:
            self.runtime.lost = error
        jobs = [*self._in_flight, *self._runnable, *self._waiting]
        self._in_flight.clear()
        self._runnable.clear()
        self._waiting.clear()
        for job in jobs:
            job.order.abandon()
            job.ticket.end(error)
