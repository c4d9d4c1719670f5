"""A worker thread of a mover, and the jobs that it carries out in the order of their events."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Final

from kvstow._core import StateError, TransferError
from kvstow.transfer.fork import FORKED_TRANSFER, close_in_children
from kvstow.transfer.mover import Event, Index, Mover
from kvstow.transfer.order import JobOrder, OrderedJob
from kvstow.transfer.ticket import NOT_BEGUN, HostTicket, failure

CANCELLED: Final = "the call that submits the transfer was interrupted; nothing was copied"


@dataclass(slots=True, eq=False)
class _Job(OrderedJob):
    work: Callable[[], None]
    ticket: HostTicket


class HostQueue:
    """A thread that carries out jobs whose event has happened; see `JobOrder` for their order.

    `submit` carries out a brief job itself, under the lock, if no job is queued or under way. So no
    other job can begin before it is over, and `stop` waits for it.
    """

    def __init__(self, name: str, num_targets: int) -> None:
        """Begin without a thread; `start` starts it.

        Args:
            name: name of the thread.
            num_targets: slots or blocks that jobs may write to.
        """
        # Not a Condition: an interrupt in its Python code leaves a lock held or loses a wake-up.
        # These two are written in C, and no interrupt divides them.
        self._lock = threading.RLock()
        self._wakes: SimpleQueue[None] = SimpleQueue()
        self._order: JobOrder[_Job] = JobOrder(num_targets)
        self._ready: deque[_Job] = deque()  # whose event has happened, for the thread
        self._queue: deque[_Job] = deque()
        self._under_way: _Job | None = None
        # Each job that is neither ended nor brief. Interrupts and forks lose none of these.
        self._unended: dict[_Job, None] = {}
        self._closing = False
        # A daemon, because the interpreter joins other threads before it stops the queues at exit.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._is_started = False
        # Ends after the last job. Thread.join does not suffice: after an interrupt in it, a thread
        # can be reported as ended while it still copies.
        self._last_job = HostTicket()
        close_in_children(self)

    def start(self) -> None:
        """Start the thread.

        Raises:
            StateError: the system starts no more threads.
        """
        try:
            self._thread.start()
        except RuntimeError as error:
            raise StateError(
                f"the system does not start the thread {self._thread.name} ({error}); raise the "
                "limit of threads (ulimit -u, pids.max of the container)"
            ) from error
        self._is_started = True

    def submit(
        self,
        work: Callable[[], None],
        targets: Index,
        after: Event,
        *,
        is_brief: bool = False,
        ticket: HostTicket | None = None,
    ) -> HostTicket:
        """Queue a job, or carry it out at once; a job without targets has ended already.

        If an interrupt is raised, the job does not run later. If the thread has begun it, the
        interrupt is raised after its end.

        Args:
            work: is called once `after` has happened. If it raises, the transfer has failed. It
                refers to the mover, so a mover that the caller drops still carries it out.
            targets: the slots or blocks that it writes to.
            after: the event that it waits for.
            is_brief: whether it takes less time than to wake the thread.
            ticket: a new ticket for the job, if `work` must ask whether it is cancelled.

        Raises:
            StateError: the queue was stopped.
        """
        ticket = HostTicket() if ticket is None else ticket
        if not len(targets):
            ticket.end(None)
            return ticket
        job = _Job(targets, after, work, ticket)

        def ready() -> None:
            self._report_ready(job)

        job.watch(ready)  # before the job is queued, in case the event refuses the callback
        try:
            with self._lock:
                if self._closing:
                    raise StateError("this mover is closed; build a new one")
                if not self._order.enter(job):
                    self._unended[job] = None
                    return ticket
                if is_brief and not self._queue and self._under_way is None:
                    interrupt = _carry_out(job)
                    if interrupt is not None:
                        raise interrupt
                else:
                    self._wakes.put(None)
                    self._unended[job] = None
                    self._queue.append(job)
        except BaseException:
            # The exit of the lock raises most of these, when the job is queued already. No call
            # comes before the assignment, so no other interrupt prevents it.
            ticket.is_cancelled = True
            self._end_cancelled(job)
            raise
        return ticket

    def stop(self) -> None:
        """Let the thread end after it has carried out all jobs that may run. Does not wait."""
        with self._lock:
            self._closing = True
            self._wakes.put(None)

    def join(self) -> None:
        """Wait for the thread to end."""
        # The garbage collector may run a finalizer on the thread itself.
        if self._is_started and self._thread is not threading.current_thread():
            self._last_job.wait()
            self._thread.join()

    def close_in_child(self) -> None:
        """Fail every job in a forked child, which has no thread to carry it out."""
        self._lock = threading.RLock()  # another thread of the parent may hold the old one
        self._wakes = SimpleQueue()
        self._closing = True
        jobs, self._unended = self._unended, {}
        self._order.abandon()
        self._ready.clear()
        self._queue.clear()
        for job in jobs:
            if not job.ticket.poll():
                job.ticket.end(TransferError(FORKED_TRANSFER))
        if not self._last_job.poll():
            self._last_job.end(None)

    def _report_ready(self, job: _Job) -> None:
        """Let the thread queue the jobs that may run now that the event of `job` has happened.

        The thread does it because an interrupt comes to the main thread only. On that thread it
        could divide the change of the order.
        """
        if not job.ticket.poll():  # otherwise the thread may have ended
            self._ready.append(job)
            self._wakes.put(None)

    def _end_cancelled(self, job: _Job) -> None:
        """Let a cancelled job end. If the thread has begun it, wait for its end."""
        # The thread sets `_under_way` before it asks whether the job is cancelled. So it skips the
        # job unless the job is under way here.
        while self._under_way is job and not job.ticket.poll():
            try:
                job.ticket.wait()
            except BaseException:
                # Its end, or another interrupt: the caller may reuse the blocks after this call.
                continue
        if job.turn is not None:
            self._report_ready(job)  # its event may never happen, and would hold up later jobs

    def _run(self) -> None:
        while (job := self._next()) is not None:
            if job.ticket.is_cancelled:
                job.ticket.end(TransferError(CANCELLED))
            else:
                _carry_out(job)
            # Dropped before the wait for the next job, because the index arrays can be large.
            self._unended.pop(job, None)
            del job
        self._order.abandon()
        for job in self._unended:
            job.ticket.end(TransferError(NOT_BEGUN))
        self._unended.clear()
        self._last_job.end(None)

    def _next(self) -> _Job | None:
        """Wait for a job that may run. When closing, return None if there is none."""
        while True:
            with self._lock:
                while self._ready:
                    self._queue += self._order.release(self._ready.popleft())
                self._under_way = self._queue.popleft() if self._queue else None
                if self._under_way is not None or self._closing:
                    return self._under_way
            self._wakes.get()


class QueuedMover(Mover):
    """A mover that has threads of its own."""

    _is_closed: bool = False

    def _start(self, *queues: HostQueue) -> None:
        """Start the threads, and stop them when the mover is closed or goes.

        Raises:
            StateError: the system starts no more threads; then none of these runs.
        """
        self._queues = queues
        # At interpreter exit too: a thread must not copy while memory is taken down around it. The
        # queues of a mover that was built later stop first.
        self._stop = weakref.finalize(self, _stop, queues)
        try:
            for queue in queues:
                queue.start()
        except BaseException:
            _stop(queues)
            raise

    def close(self) -> None:
        """End every job and join the threads; see `Mover.close`."""
        self._is_closed = True
        _stop(self._queues)  # waits for the threads, even if another thread has called `close`
        # Only now: if an interrupt cuts the close short, the finalizer goes on with it.
        self._stop.detach()

    def _check_open(self) -> None:
        if self._is_closed or not self._stop.alive:
            raise StateError(f"this {type(self).__name__} is closed; build a new one")


def _stop(queues: Sequence[HostQueue]) -> None:
    """Stop queues and wait for their threads; stopping them again does nothing."""
    for queue in queues:
        queue.stop()
    for queue in queues:
        queue.join()


def _carry_out(job: _Job) -> BaseException | None:
    """Run a job's work and end its ticket. Whatever it raises ends the job, not the thread.

    Returns:
        What interrupted this thread. None if the event reports the interrupt of another thread.
    """
    try:
        job.after.wait()
        job.work()
    except BaseException as error:
        job.ticket.end(failure(error))
        return None if isinstance(error, Exception) else error
    job.ticket.end(None)
    return None
