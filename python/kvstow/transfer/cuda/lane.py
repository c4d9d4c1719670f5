"""One direction between a device and the host: its streams, staging, and the order of its jobs.

A lane, one for stores and one for loads, has two streams, so that the kernel of one batch runs
while the copy engine still carries another, and a ring of staging places between them:

```
store   pack    wait(after)    wait(drained) gather filled!    wait(drained) gather filled! ...
        link                   wait(filled)  copy  drained!    wait(filled)  copy  drained! ...

load    link                   wait(drained) copy filled!      wait(drained) copy filled! ...
        pack    wait(after)    wait(filled) scatter drained!   wait(filled) scatter drained! ...
```

`after` is the compute that fills the blocks, or may still read them; with staging only the kernel
waits for it. Without staging (the direct path) the copy does. `filled` and `drained` belong to a
place: they keep a batch from being read before it is there, and overwritten before it was read.
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
from kvstow.transfer.fork import FORKED, close_in_children
from kvstow.transfer.mover import Event, Index
from kvstow.transfer.order import JobOrder, Turn
from kvstow.transfer.ticket import Ticket, checked_timeout_s, late

__all__ = ["CudaJob", "CudaTicket", "Lane", "Place"]

_FIRST_SLEEP_S, _LONGEST_SLEEP_S = 20e-6, 1e-3


@dataclass(frozen=True, slots=True)
class Place:
    """A part of the staging memory that holds one batch at a time.

    Attributes:
        address: on the device.
        filled: the event of the batch in it being there.
        drained: the event of it having been taken out.
    """

    address: int
    filled: DeviceEvent
    drained: DeviceEvent


@dataclass(slots=True, eq=False)
class CudaJob:
    """A transfer in a lane.

    Attributes:
        targets: the slots or blocks that it writes to.
        owner: the mover that it came through.
        after: what it waits for.
        block_ids: shape [n], int64, in the order in which they are moved.
        host_slots: shape [n], int64, one for each.
        order: of the owner's jobs of this direction.
        ring: where its ids go for the kernels to read.
        enqueue: puts its work on the lane's streams.
        landed: told when all has arrived; returns what is wrong with it.
        is_staged: whether its source is read before the link's copies end.
        ticket: reports its end.
        is_ready: whether its event has happened, or the device will wait for it.
        is_submitted: whether the lane has it.
        turn: of a job that has to wait, what for.
        first: where its ids begin in the ring.
        done: of the two streams: reached, they have carried out all of it.
        error: what it has failed with before it landed.
    """

    targets: Index
    owner: object
    after: Event
    block_ids: Index
    host_slots: Index
    order: JobOrder[CudaJob]
    ring: IdRing
    enqueue: Callable[[CudaJob, Lane], None]
    landed: Callable[[CudaJob], TransferError | None]
    is_staged: bool
    ticket: CudaTicket
    is_ready: bool = False
    is_submitted: bool = False
    turn: Turn | None = None
    first: int = 0
    done: list[DeviceEvent] = field(default_factory=list)
    error: TransferError | None = None


class CudaTicket(Ticket):
    """A ticket that ends when events of the device have been reached."""

    def __init__(self, lane: Lane) -> None:
        """Begin under way."""
        self._lane = lane
        self._has_ended = False
        self._error: TransferError | None = None
        self.is_released = False

    def poll(self) -> bool:
        """Whether the transfer has ended, well or not."""
        if not self._has_ended:
            self._lane.advance()
        return self._has_ended

    def source_released(self) -> bool:
        """Whether the source is read no more: of a store, once its blocks are gathered."""
        return self.poll() or self.is_released

    @property
    def error(self) -> TransferError | None:
        """Why it failed; None while under way and after success."""
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
    """One direction: jobs that may run are launched in the order in which they became so.

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
        # Reentrant: an event that has happened already calls back from within `submit`.
        self._lock = threading.RLock()
        self._waiting: dict[CudaJob, None] = {}  # for their events, or for others that wait
        self._runnable: deque[CudaJob] = deque()
        self._in_flight: deque[CudaJob] = deque()
        # Last, so that nothing is left behind by what fails.
        self._staging = runtime.allocate(staging_bytes * num_places)
        self._places = deque(
            Place(self._staging + i * staging_bytes, filled, drained)
            for i, (filled, drained) in enumerate(events)
        )
        close_in_children(self)

    def submit(self, job: CudaJob) -> None:
        """Queue a job; it is launched as soon as its event and those before it allow."""

        def happened() -> None:
            job.is_ready = True
            if job.is_submitted:  # else whoever submits it sees it ready
                with self._lock:
                    self._release(job)
                    self.advance()

        if isinstance(job.after, CudaEvent):
            job.is_ready = True  # the device will wait for it
        else:
            job.after.add_done_callback(happened)
        with self._lock:
            job.is_submitted = True
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
                while self._runnable and self._take_room(self._runnable[0]):
                    self._launch(self._runnable.popleft())
            except CudaError as error:
                self._lose(error)

    def finish(self, owner: object) -> None:
        """Carry out what may begin of a mover's jobs and fail the others; wait for all of them."""
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
                job.ticket.end(
                    TransferError(
                        "the mover was closed before the transfer began; nothing was copied"
                    )
                )
            self.advance()

    def close_in_child(self) -> None:
        """End every job in a forked child: for it the device is lost, and the parent's alone."""
        self._lock = threading.RLock()  # another thread of the parent may hold the old one
        lost = CudaError(f"the transfer {FORKED}; this one sees no end of it", is_fatal=True)
        self._lose(lost)

    def close(self) -> None:
        """Give the staging memory back, once nothing is in flight."""
        self.runtime.free(self._staging)

    # -- what movers put on the streams ---------------------------------------------------------

    def wait_for(self, after: Event, stream: Stream) -> None:
        """Let a stream wait for what a job waits for; the host has waited for any other event."""
        if isinstance(after, CudaEvent):
            self.runtime.wait(stream, after.handle)

    def next_place(self) -> Place:
        """The place whose turn it is."""
        self._places.rotate(-1)
        return self._places[-1]

    # -- within ---------------------------------------------------------------------------------

    def _release(self, job: CudaJob) -> None:
        """The event of a job has happened: it may run, and those that have waited for it."""
        for one in job.order.release(job):
            del self._waiting[one]
            self._runnable.append(one)

    def _take_room(self, job: CudaJob) -> bool:
        """Take events, and room in the ring; False while there is none of either."""
        try:
            while len(self._spare_events) < len((self.pack, self.link)):
                self._spare_events.append(self.runtime.event())
        except CudaError as error:
            if error.is_fatal or not self._in_flight:
                raise
            return False  # those that are in flight give theirs back
        first = job.ring.take(job.block_ids)
        if first is None:
            return False
        job.first = first
        return True

    def _launch(self, job: CudaJob) -> None:
        job.done = [self._spare_events.pop(), self._spare_events.pop()]
        self._in_flight.append(job)
        interrupt: BaseException | None = None
        try:
            _raise_failure(job.after)
            job.enqueue(job, self)
        except BaseException as error:
            if isinstance(error, CudaError) and error.is_fatal:
                raise
            # Whatever it was, the job has not been carried out, and must not seem to be.
            job.error = _failure(error)
            interrupt = None if isinstance(error, Exception) else error
        # After a refusal too: it ends when what was queued of it has been carried out.
        for event, stream in zip(job.done, (self.pack, self.link), strict=True):
            try:
                self.runtime.record(event, stream)
            except BaseException as error:
                # Once more: one that is not recorded counts as reached, and so would the job.
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
                error = job.error or job.landed(job)
            except Exception as raised:
                error = _failure(raised)
            job.ring.give_back()
            self._spare_events += job.done
            job.ticket.end(error)

    def _is_reached(self, event: DeviceEvent) -> bool:
        try:
            return self.runtime.is_done(event)
        except CudaError as error:
            if error.is_fatal:
                raise
            # Nobody knows, so it is asked again: what is in flight may still write to its blocks.
            return False

    def _lose(self, error: CudaError) -> None:
        """The device is gone: so is every job, and no slot that they would fill is ever shown."""
        if self.runtime.lost is None:
            self.runtime.lost = error
        jobs = [*self._in_flight, *self._runnable, *self._waiting]
        self._in_flight.clear()
        self._runnable.clear()
        self._waiting.clear()
        for job in jobs:
            job.order.abandon()
            job.ticket.end(error)


def _raise_failure(after: Event) -> None:
    """Of an event that has happened; the device waits for its own."""
    if isinstance(after, CudaEvent):
        return
    try:
        after.wait()
    except TransferError:
        raise
    except Exception as error:
        raise TransferError(f"the event a transfer waited for failed: {error!r}") from error


def _failure(error: BaseException) -> TransferError:
    """What a transfer has failed with."""
    if isinstance(error, TransferError):
        return error
    failure = TransferError(f"the transfer failed ({error!r}); the destination is undefined")
    failure.__cause__ = error
    return failure
