"""The queues and threads of a shared tier, and the end of its jobs.

```
put                   -> [bounded queue] -> threads of puts  -> worker.carry_out, part by part
get, contains, delete -> [queue] ---------> other threads ---> worker.carry_out, part by part
```

Puts have threads of their own, so that no request waits for them. A thread takes a part from its
job. So an interrupted caller can take back the parts that no thread has, and the job still ends.

A thread that waits knows only its queue and its worker. So a tier that its user drops goes, with
its host memory. One on Mooncake stays after its first job until it is closed: its workers have it,
because Mooncake has registered that memory.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Final, Literal, Protocol, TypeAlias

import numpy as np

from kvstow._core import ConfigError, StateError, TransferError
from kvstow.arguments import checked_int
from kvstow.tiers.breaker import LOG_EVERY_S
from kvstow.tiers.namespace import Namespace
from kvstow.tiers.sums import ArenaSums
from kvstow.tiers.ticket import Bools, TierTicket
from kvstow.tiers.tier import Checked, Mode, SharedTier, TierStats, count_end, without_thread
from kvstow.transfer import HostArena
from kvstow.transfer.fork import FORKED, close_in_children
from kvstow.transfer.mover import Index

logger = logging.getLogger(__name__)

Operation: TypeAlias = Literal["put", "get", "contains", "delete"]

DEFAULT_TIMEOUT_S: Final = 5.0
DEFAULT_QUEUED_BYTES: Final = 256 << 20
BLOCKS_PER_PART: Final = 16
_KEYS_PER_PART: Final = 8192
_MAX_THREADS: Final = 64
_MAX_TIMEOUT_S: Final = 86400.0
# Of the time up to a deadline, what the store has. Then the job still ends in time, with the blocks
# that have arrived. A late job loses them all, and on a slow network they would never arrive.
_OF_DEADLINE: Final = 0.9


@dataclass(slots=True, eq=False)
class Job:
    """One call, until all of its parts have ended.

    Attributes:
        operation: what is asked.
        blocks: the blocks.
        host_slots: the host slot of each; empty for calls without host slots.
        until_s: the time of `time.monotonic` after which no thread goes on.
        namespace: whose blocks they are.
        ticket: what the caller has.
        parts: the parts that no thread has taken.
        tier: carries it out, also if its user has dropped the tier.
        num_left: blocks of parts that have not ended.
        ok: the answers.
        error: why blocks failed together, if any did.
    """

    operation: Operation
    blocks: Checked
    host_slots: Index
    until_s: float
    namespace: Namespace
    ticket: TierTicket
    parts: deque[range]
    tier: QueuedTier
    num_left: int = field(init=False)
    ok: Bools = field(init=False)
    error: TransferError | None = None

    def __post_init__(self) -> None:
        """Begin without an answer."""
        self.num_left = len(self.blocks)
        self.ok = np.zeros(len(self.blocks), np.bool_)


class Worker(Protocol):
    """What one thread has of its own, such as connections."""

    def carry_out(self, job: Job, part: range) -> None:
        """Do a part of a job, and write `job.ok` for it.

        Raises:
            TransferError: why blocks failed together. The others may be well.
        """

    def hand_over(self, start: Callable[[], None]) -> bool:
        """Return whether another thread goes on with this worker; then this one ends.

        Args:
            start: starts the other thread. It is called soon, unless this returns False. If the
                system starts no thread until the tier is closed, `close` ends the jobs that wait.
        """

    def close(self) -> None:
        """Let go of everything, also after an error. The worker may be used again."""


class QueuedTier(SharedTier):
    """A shared tier whose calls block, on threads of its own.

    A subclass calls `start` at the end of its `__init__`.

    Attributes:
        timeout_s: the most seconds for a job without a deadline.
        namespace: whose blocks the next job is about.
        blocks_per_part: blocks of a put or a get that a thread carries out at a time.
        sums: the checksums that movers keep of the host slots.
    """

    def __init__(
        self,
        arena: HostArena,
        namespace: bytes,
        *,
        timeout_s: float,
        num_threads: int,
        max_queued_bytes: int,
    ) -> None:
        """Check the arguments.

        Args:
            arena: the host side.
            namespace: 16 bytes, a digest of all that decides what a block's bytes mean.
            timeout_s: the most seconds for a job without a deadline.
            num_threads: threads for puts, and as many for all other calls.
            max_queued_bytes: bytes of puts that may wait. More puts fail at once.

        Raises:
            ConfigError: a wrong argument.
            StateError: the arena is closed.
        """
        super().__init__(arena)
        self.namespace = Namespace(namespace)
        self.blocks_per_part = BLOCKS_PER_PART
        self.sums: Final = ArenaSums(arena)
        self.timeout_s: Final = checked_job_timeout_s(timeout_s)
        self._num_threads = checked_int("num_threads", num_threads, 1, _MAX_THREADS, "pass 1 to 4")
        self._max_queued_bytes = checked_int(
            "max_queued_bytes", max_queued_bytes, self.slot_bytes, 2**63 - 1, "pass a block or more"
        )
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._num_queued = 0  # blocks of puts that have not ended
        self._queued: set[Job] = set()
        self._is_closed = self._is_forked = False
        self._report_s = 0.0  # when the log may have the next traceback
        # Each job stands in its queue once for each of its parts.
        self._puts: SimpleQueue[Job | None] = SimpleQueue()
        self._others: SimpleQueue[Job | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads. After an error none is left, and the tier is closed.

        Raises:
            StateError: the system starts no more threads.
        """
        close_in_children(self)
        queues = self._puts, self._others
        self._drop = weakref.finalize(self, _end_threads, queues, self._num_threads)
        self._drop.atexit = False
        try:
            self._start_threads()
        except BaseException as error:  # an interrupt, too
            self.close()
            if not isinstance(error, RuntimeError):
                raise
            raise without_thread(error) from error

    def _start_threads(self) -> None:
        for queue in (self._puts, self._others):
            for _ in range(self._num_threads):
                self._start_thread(queue, self._worker())

    def _start_thread(self, queue: SimpleQueue[Job | None], worker: Worker) -> None:
        name = f"kvstow-{type(self).__name__}"
        thread = threading.Thread(target=_run, args=(queue, worker), name=name, daemon=True)
        thread.start()
        # Without those that have handed over, of which there may be one for each long call.
        self._threads = [*(one for one in self._threads if one.is_alive()), thread]

    # -- what the caller's thread does -----------------------------------------------------------

    @property
    def mode(self) -> Mode:
        """What the tier still does. A server that fails may come back, so this stays on."""
        return "off" if self._is_closed else "on"

    @property
    def error(self) -> TransferError | None:
        """Why the tier is off; None, because a server that fails may come back."""
        return None

    def rename(self, namespace: bytes) -> None:
        """Use another namespace for jobs from now on. Those under way keep theirs."""
        self.namespace = Namespace(namespace)

    def stats(self) -> TierStats:
        """Return what the tier has done, and what it does now."""
        with self._lock:
            return TierStats(**self._counts)

    def _put(self, blocks: Checked, host_slots: Index, deadline: float | None) -> TierTicket:
        limit = self._max_queued_bytes
        with self._lock:
            num_bytes = (self._num_queued + len(blocks)) * self.slot_bytes
            is_refused = num_bytes > limit
            if is_refused:
                self._counts["failed_puts"] += len(blocks)
        if is_refused:
            why = f"{num_bytes} bytes of puts would wait, more than max_queued_bytes, {limit}"
            ticket = TierTicket(len(blocks), deadline)
            ticket.end(None, TransferError(why))
            ticket.announce()
            return ticket
        return self._begin("put", blocks, host_slots, deadline)

    def _get(self, blocks: Checked, host_slots: Index, deadline: float | None) -> TierTicket:
        return self._begin("get", blocks, host_slots, deadline)

    def _contains(self, blocks: Checked, deadline: float | None) -> TierTicket:
        return self._begin("contains", blocks, np.empty(0, np.int64), deadline)

    def _delete(self, blocks: Checked) -> TierTicket:
        return self._begin("delete", blocks, np.empty(0, np.int64), None)

    def _begin(
        self, operation: Operation, blocks: Checked, host_slots: Index, deadline: float | None
    ) -> TierTicket:
        job: Job | None = None
        ticket = TierTicket(len(blocks), deadline)
        try:
            ticket.announce()
            now_s = time.monotonic()
            until_s = now_s + self.timeout_s
            if ticket.deadline is not None:
                until_s = now_s + _OF_DEADLINE * (ticket.deadline - now_s)
            size = self.blocks_per_part if operation in ("put", "get") else _KEYS_PER_PART
            parts = [range(at, min(at + size, len(blocks))) for at in range(0, len(blocks), size)]
            job = Job(
                operation, blocks, host_slots, until_s, self.namespace, ticket, deque(parts), self
            )
            if not parts:
                ticket.end(job.ok)
            queue = self._others
            if operation == "put":
                queue = self._puts
                with self._lock:
                    self._queued.add(job)
                    self._num_queued += job.num_left
            for _ in parts:
                queue.put(job)
            if self._is_closed:  # by another thread meanwhile, so perhaps no thread takes the job
                self._take_back(ticket, job)
        except BaseException:  # an interrupt, at any line: take back what no thread has begun
            self._take_back(ticket, job)
            raise
        return ticket

    def _take_back(self, ticket: TierTicket, job: Job | None) -> None:
        """End what no thread has begun of a job whose begin was interrupted, or came too late."""
        if job is None or not len(job.blocks):
            ticket.end()
            return
        with self._lock:
            self._num_queued = sum(queued.num_left for queued in self._queued)
        why = "the tier was closed" if self._is_closed else "the call was interrupted"
        with suppress(IndexError):
            while True:
                self._end_part(job, job.parts.pop(), TransferError(why))

    def close(self) -> None:
        """Carry out every job, each up to its deadline, and stop.

        A thread whose call does not return is given up after twice `timeout_s`. Its ticket does not
        end. What no thread has begun by then fails.
        """
        if self._is_forked:
            return
        self._is_closed = True
        _end_threads((self._puts, self._others), self._num_threads)
        until_s = time.monotonic() + 2 * self.timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        self._fail_waiting()
        # A finalizer has nothing left to do. Python would ignore Ctrl-C in it.
        self._drop.detach()

    def _fail_waiting(self) -> None:
        """Fail what no thread has begun, because the threads hang or the system starts none."""
        error = TransferError("the tier was closed, and no thread had begun the job")
        for queue in (self._puts, self._others):
            with suppress(Empty):
                while True:
                    job = queue.get_nowait()
                    while job is not None and job.parts:
                        with suppress(IndexError):  # a thread was faster
                            self._end_part(job, job.parts.popleft(), error)
        _end_threads((self._puts, self._others), self._num_threads)  # of which some were taken here

    def close_in_child(self) -> None:
        """Become unusable in a forked child, which has none of the threads."""
        self._is_closed = self._is_forked = True
        self._lock = threading.Lock()  # another thread of the parent may hold the old one

    def _check_open(self) -> None:
        name = type(self).__name__
        if self._is_forked:
            raise StateError(f"this {name} {FORKED}; build a new one in the child")
        if self._is_closed:
            raise StateError(f"this {name} is closed; build a new one")

    # -- what the threads do ---------------------------------------------------------------------

    @abstractmethod
    def _worker(self) -> Worker:
        """Return what a thread works with."""

    def count_wrong(self, num_blocks: int) -> None:
        """Count blocks that were not what they should be."""
        with self._lock:
            self._counts["mismatched_blocks"] += num_blocks

    def carry_out(self, job: Job, queue: SimpleQueue[Job | None], worker: Worker) -> bool:
        """Do a part of a job, and return whether another thread goes on with the worker."""
        error: TransferError | None = None
        try:
            part = job.parts.popleft()
        except IndexError:  # the caller has taken it back
            return False
        try:
            if time.monotonic() >= job.until_s:
                raise TransferError("the job was late before a thread began it")
            worker.carry_out(job, part)
        except TransferError as known:
            error = known
        except Exception as unexpected:
            if time.monotonic() >= self._report_s:
                self._report_s = time.monotonic() + LOG_EVERY_S
                logger.exception("kvstow: the shared tier failed; please report this")
            # Only the type, because the text of an error may contain a password.
            name = type(unexpected).__name__
            error = TransferError(f"the shared tier failed ({name}); the log has the traceback")
            worker.close()
        self._end_part(job, part, error)
        return worker.hand_over(lambda: self._start_thread(queue, worker))

    def _end_part(self, job: Job, part: range, error: TransferError | None) -> None:
        with self._lock:
            job.error = job.error or error
            job.num_left -= len(part)
            is_last = not job.num_left
            if job in self._queued:
                self._num_queued -= len(part)
            if is_last:
                self._queued.discard(job)
        if not is_last:
            return
        job.ticket.end(job.ok, job.error)
        num_ok = int(job.ticket.ok.sum())
        with self._lock:
            num_failed = len(job.blocks) - num_ok
            count_end(self._counts, job.operation, num_ok, num_failed, self.slot_bytes)


def _run(queue: SimpleQueue[Job | None], worker: Worker) -> None:
    while (job := queue.get()) is not None:
        if job.tier.carry_out(job, queue, worker):
            return
        del job  # and with it the tier
    worker.close()


def _end_threads(queues: Iterable[SimpleQueue[Job | None]], num_threads: int) -> None:
    """Let the threads end after what is queued. Does not wait."""
    for queue in queues:
        for _ in range(num_threads):
            queue.put(None)


def checked_job_timeout_s(timeout_s: float) -> float:
    """Return the most seconds for a job, as a float.

    Raises:
        ConfigError: it is no number above 0 and up to a day. The system refuses to wait for ages.
    """
    given: object = timeout_s
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    if not is_number or not 0 < timeout_s <= _MAX_TIMEOUT_S:
        raise ConfigError(
            f"timeout_s is {given!r}, outside 0 to {_MAX_TIMEOUT_S:g}: pass some seconds"
        )
    return float(timeout_s)
