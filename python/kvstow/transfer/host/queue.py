"""Work for one thread: jobs that wait for their events beside the queue, not in it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

from kvstow._core import StateError, TransferError
from kvstow.transfer.fork import FORKED, close_in_children
from kvstow.transfer.mover import Event, Index
from kvstow.transfer.order import JobOrder, Turn
from kvstow.transfer.ticket import HostTicket

__all__ = ["HostQueue", "start_queues", "stop_queues"]


@dataclass(slots=True, eq=False)
class _Job:
    work: Callable[[], None]
    targets: Index
    after: Event
    ticket: HostTicket
    is_ready: bool = False
    is_submitted: bool = False
    turn: Turn | None = None


class HostQueue:
    """A thread that carries out jobs whose event has happened; see `JobOrder` for their order.

    Brief jobs are carried out in `submit`, under the lock, if none is queued or under way: so no
    other can begin before they are over, and `stop` waits for them.
    """

    def __init__(self, name: str, num_targets: int) -> None:
        """Begin without a thread; see `start_queues`.

        Args:
            name: of the thread.
            num_targets: slots or blocks that jobs may write to.
        """
        # No Condition: an interrupt in its Python code leaves a lock held or a wake-up lost. These
        # two are in C, and no interrupt divides them.
        self._lock = threading.RLock()
        self._wakes: SimpleQueue[None] = SimpleQueue()
        self._order: JobOrder[_Job] = JobOrder(num_targets)
        self._queue: deque[_Job] = deque()
        self._under_way: _Job | None = None
        self._closing = False
        # A daemon: the interpreter joins others before it stops the queues at its exit.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._is_started = False
        # Ends with the last job. An interrupt in Thread.join can report a thread as ended while it
        # still copies.
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
                f"the thread {self._thread.name} cannot be started ({error}); raise the limit of "
                "threads (ulimit -u, pids.max of the container)"
            ) from error
        self._is_started = True

    def submit(
        self, work: Callable[[], None], targets: Index, after: Event, *, is_brief: bool = False
    ) -> HostTicket:
        """Queue a job, or carry it out; one without targets has ended already.

        Args:
            work: run once `after` has happened; what it raises, the transfer has failed with. It
                holds the mover: with the last name of that gone, it is still carried out.
            targets: the slots or blocks that it writes to.
            after: what it waits for.
            is_brief: it takes less time than to wake the thread.

        Raises:
            StateError: the queue was stopped.
        """
        ticket = HostTicket()
        job = _Job(work, targets, after, ticket)
        if not len(targets):
            ticket.end(None)
            return ticket

        def happened() -> None:
            job.is_ready = True
            if job.is_submitted:  # else whoever submits it sees it ready
                with self._lock:
                    self._wakes.put(None)
                    self._queue += self._order.release(job)

        # Before it is queued, so that an event that refuses leaves nothing behind.
        after.add_done_callback(happened)
        with self._lock:
            if self._closing:
                raise StateError("this mover is closed; build a new one")
            job.is_submitted = True
            if not self._order.enter(job):
                return ticket
            if is_brief and not self._queue and self._under_way is None:
                error = _carry_out(job)
                ticket.end(error)
                if error is not None and not isinstance(error.__cause__, Exception | None):
                    raise error.__cause__  # an interrupt is this thread's own
            else:
                self._wakes.put(None)
                self._queue.append(job)
        return ticket

    def stop(self) -> None:
        """Let the thread end when it has carried out all jobs that may run; does not wait."""
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
        """End every job in a forked child, where no thread will: the parent carries them out."""
        self._lock = threading.RLock()  # another thread of the parent may hold the old one
        self._wakes = SimpleQueue()
        self._closing = True
        jobs = [*self._order.abandon(), *self._queue]
        if self._under_way is not None:
            jobs.append(self._under_way)
        self._queue.clear()
        for job in jobs:
            if not job.ticket.poll():
                job.ticket.end(TransferError(f"the transfer {FORKED}; this one sees no end of it"))
        if not self._last_job.poll():
            self._last_job.end(None)

    def _run(self) -> None:
        while (job := self._next()) is not None:
            job.ticket.end(_carry_out(job))
            # Not kept while waiting for the next: the index arrays can be large.
            del job
        self._last_job.end(None)

    def _next(self) -> _Job | None:
        """Wait for a job that may run; None, and the waiting ones failed, when closing."""
        abandoned = None
        while abandoned is None:
            with self._lock:
                self._under_way = self._queue.popleft() if self._queue else None
                if self._under_way is not None:
                    return self._under_way
                if self._closing:
                    abandoned = self._order.abandon()
            if abandoned is None:
                self._wakes.get()
        for job in abandoned:
            job.ticket.end(
                TransferError("the mover was closed before the transfer began; nothing was copied")
            )
        return None


def start_queues(queues: Sequence[HostQueue]) -> None:
    """Start the threads of queues that their owner already stops when it goes; or none of them.

    Raises:
        StateError: the system starts no more threads.
    """
    try:
        for queue in queues:
            queue.start()
    except BaseException:
        stop_queues(queues)
        raise


def stop_queues(queues: Sequence[HostQueue]) -> None:
    """Stop queues and wait for their threads; stopping them again does nothing."""
    for queue in queues:
        queue.stop()
    for queue in queues:
        queue.join()


def _carry_out(job: _Job) -> TransferError | None:
    """Run a job's work; whatever goes wrong is the job's error and not the thread's."""
    try:
        job.after.wait()
        job.work()
    except TransferError as error:
        return error
    except BaseException as error:
        failure = TransferError(f"the copy failed ({error!r}); the destination is undefined")
        failure.__cause__ = error
        return failure
    return None
