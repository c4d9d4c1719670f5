"""Questions to a shared store: which blocks has it? Their asker never waits.

The scheduler asks once for each request, and then polls. A thread of its own asks the store.

```
ask -> [cache] -- knows all --------------------------------> answered
          | else
          +--> [queue] --> thread, one call for a question --> answered, and cached for a while
          |                        ... too late for it ------> nothing found; cached all the same
          +--> [question under way for the same keys] -------> shares its answer
```

An answer is only a hint, because a `get` proves each block. How it could still do harm, and what
prevents it:

- An answer is older than a reset: `reset` empties the cache, and earlier questions find nothing.
- Blocks of another model: the store is asked under this model's namespace.
- A dead store holds up every request: after failures in a row nothing is asked for a while.
- No thread starts: the question finds nothing, and the next one tries again.
- Memory grows: the cache, the queue and each question are bounded.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Final, NamedTuple, Protocol, TypeAlias

from kvstow._core import KvstowError, StateError, TransferError
from kvstow.arguments import check_seconds, checked_int
from kvstow.closing import Closing
from kvstow.tiers.breaker import Breaker, with_times
from kvstow.tiers.tier import SharedTier, TierBlocks
from kvstow.transfer.fork import FORKED, close_in_children

logger = logging.getLogger(__name__)

Key: TypeAlias = tuple[bytes, int]
"""The hash of a block, and its group."""

DEFAULT_WAIT_S: Final = 0.05
DEFAULT_CALL_S: Final = 1.0
DEFAULT_KEEP_S: Final = 1.0
MAX_KEYS: Final = 8192
DEFAULT_CACHED_KEYS: Final = 1 << 17
_MAX_QUEUED_KEYS: Final = 1 << 17
# A connection may take as long as this.
_CONNECT_S: Final = 5.0
# Its first answer shows whether a URL and a password are right.
_SILENT: Final = (
    "kvstow: the shared tier does not answer at the start (%s). Requests go on without it, and it "
    "is asked again as they come"
)
# What `connect` asks for: no block has this key.
_NO_BLOCK: Final[Key] = (bytes(32), 0)


class Answer(NamedTuple):
    """What a store has.

    Attributes:
        found: for each key whether the store has it.
        error: why blocks may be missing there, such as a server that is gone; None if none is.
    """

    found: Sequence[bool]
    error: KvstowError | None = None


class Store(Protocol):
    """Who answers. One thread uses it, and it may block."""

    def found(self, keys: Sequence[Key], limit_s: float) -> Answer:
        """Return which of the keys the store has, within `limit_s` seconds.

        Raises:
            KvstowError: the store did not answer.
        """

    def close(self) -> None:
        """Close the connection to the store."""


def ask_tier(tier: SharedTier, keys: Sequence[Key], limit_s: float) -> Answer:
    """Return which of the keys a shared tier has; see `Store.found`."""
    blocks = TierBlocks([digest for digest, _ in keys], [group for _, group in keys])
    ticket = tier.contains(blocks, deadline=time.monotonic() + limit_s)
    ticket.wait()
    if ticket.is_late:
        raise TransferError(f"the shared tier did not answer within {limit_s:g} s")
    # It may concern one of several servers. The tier itself leaves that one alone for a while.
    return Answer(ticket.ok.tolist(), ticket.error)


@dataclass(slots=True)
class AskerStats:
    """What an asker has done since it was built.

    Attributes:
        questions: questions to the store.
        asked_keys: their keys.
        found_keys: of these, keys that the store had.
        late_questions: requests that went on without an answer.
        failed_questions: questions that the store did not answer, or not for all keys.
        refused_questions: questions that were not asked, because the store had failed, because too
            many waited, or because the system started no thread.
    """

    questions: int = 0
    asked_keys: int = 0
    found_keys: int = 0
    late_questions: int = 0
    failed_questions: int = 0
    refused_questions: int = 0

    def named(self) -> dict[str, int]:
        """Return them under the names of `Engine.stats` and of the metrics."""
        return {
            "shared_asked_blocks": self.asked_keys,
            "shared_found_blocks": self.found_keys,
            "shared_questions": self.questions + self.refused_questions,
            "shared_late_questions": self.late_questions,
            "shared_failed_questions": self.failed_questions + self.refused_questions,
        }


@dataclass(slots=True, eq=False)
class _Call:
    """One call to the store, which several questions may share. Without keys it only connects."""

    keys: list[Key]
    epoch: int
    until_s: float
    found: frozenset[Key] = frozenset()
    has_ended: bool = False


class Question:
    """What one request asks. Only the thread that asked uses it."""

    def __init__(self, asker: Asker, keys: Sequence[Key]) -> None:
        self._asker, self._keys = asker, keys
        self._epoch, self._until_s = asker.epoch, math.inf
        self._known: set[Key] = set()
        self._calls: list[_Call] = []
        self._answer: list[bool] | None = None

    def poll(self) -> bool:
        """Return whether there is an answer. Never blocks. True from the deadline on."""
        if self._answer is not None:
            return True
        asker = self._asker
        if self._epoch != asker.epoch:
            self._answer = [False] * len(self._keys)
            return True
        is_late = not all(call.has_ended for call in self._calls)
        if is_late and asker.clock() < self._until_s:
            return False
        asker.stats.late_questions += is_late
        found = self._known.union(*(call.found for call in self._calls))
        self._answer = [key in found for key in self._keys]
        self._calls.clear()
        return True

    @property
    def found(self) -> list[bool]:
        """For each key whether the store has it, as far as it is known.

        Raises:
            StateError: there is no answer yet.
        """
        if not self.poll():
            raise StateError("the store has not answered yet; call poll() until it is True")
        return list(self._answer or ())


class Asker(Closing):
    """Asks a shared store which blocks it has, on a thread of its own.

    One thread calls all methods. The asker's thread opens the store, at the first question or at
    `connect`.

    Attributes:
        clock: seconds, as `time.monotonic` gives them.
        breaker: whether the store may be asked.
        stats: what was done. Another thread may read it.
        epoch: number of resets.
    """

    def __init__(  # noqa: PLR0913 - options, each with a default
        self,
        connect: Callable[[], Store],
        *,
        wait_s: float = DEFAULT_WAIT_S,
        call_s: float = DEFAULT_CALL_S,
        keep_s: float = DEFAULT_KEEP_S,
        max_cached_keys: int = DEFAULT_CACHED_KEYS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Connect to nothing yet.

        Args:
            connect: opens the store, in the asker's thread.
            wait_s: the most seconds that a request waits for an answer.
            call_s: the most seconds that the store may take, and never less than `wait_s`. An
                answer that comes too late for its request still serves those after it.
            keep_s: seconds for which an answer is kept.
            max_cached_keys: the most answers that are kept.
            clock: what all these seconds are measured with.

        Raises:
            ConfigError: a time that is not above 0, or a number of keys that is not.
        """
        for name, seconds in (("wait_s", wait_s), ("call_s", call_s), ("keep_s", keep_s)):
            check_seconds(name, seconds)
        fix = "pass how many answers to keep"
        self._max_cached = checked_int("max_cached_keys", max_cached_keys, 1, 2**31 - 1, fix)
        self._connect, self.clock = connect, clock
        self._wait_s, self._call_s, self._keep_s = wait_s, max(wait_s, call_s), keep_s
        self.breaker: Final = Breaker(clock=clock)
        self.stats: Final = AskerStats()
        self.epoch = 0
        self._lock = threading.Lock()
        # Until when each answer holds, the oldest first, and what it is.
        self._cache: OrderedDict[Key, tuple[float, bool]] = OrderedDict()
        self._under_way: dict[Key, _Call] = {}
        self._queue: SimpleQueue[_Call | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closed = self._is_forked = False
        close_in_children(self)
        weakref.finalize(self, self._queue.put, None).atexit = False

    def ask(self, keys: Sequence[Key]) -> Question:
        """Begin to ask which of the keys the store has. Never blocks.

        Only the first `MAX_KEYS` keys are asked for. The others count as not found.

        Raises:
            StateError: the asker is closed, or belongs to the parent process.
        """
        self._check_open()
        question, now_s = Question(self, keys), self.clock()
        new: list[Key] = []
        with self._lock:
            for key in dict.fromkeys(keys[:MAX_KEYS]):
                until_s, is_there = self._cache.get(key, (-math.inf, False))
                if now_s < until_s:
                    if is_there:
                        question._known.add(key)
                elif (call := self._under_way.get(key)) is None:
                    new.append(key)
                elif call not in question._calls:
                    question._calls.append(call)
            if new and (call := self._begin(new, now_s)) is not None:
                question._calls.append(call)
        question._until_s = min((call.until_s for call in question._calls), default=now_s)
        return question

    def connect(self) -> None:
        """Begin to connect, so that the first question need not wait for it. Never blocks.

        If the store does not answer, the log says so before the first request.

        Raises:
            StateError: as `ask`.
        """
        self._check_open()
        with self._lock:
            self._queue_call(_Call([], self.epoch, math.inf))

    def reset(self) -> None:
        """Forget every answer, also those that are still to come."""
        with self._lock:
            self.epoch += 1
            self._cache.clear()
            self._under_way.clear()

    def close(self) -> None:
        """Stop the thread. Questions without an answer find nothing.

        After an interrupt, call it again.
        """
        if self._is_forked:
            return
        self._is_closed = True
        self.reset()
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(2 * self._call_s)
            self._thread = None  # a thread that hangs is waited for once

    def close_in_child(self) -> None:
        """Become unusable in a forked child, which has no such thread."""
        self._is_closed = self._is_forked = True
        self._lock = threading.Lock()  # another thread of the parent may hold the old one

    def _check_open(self) -> None:
        if self._is_forked:
            raise StateError(f"this Asker {FORKED}; build a new one in the child")
        if self._is_closed:
            raise StateError("this Asker is closed; build a new one")

    def _begin(self, keys: list[Key], now_s: float) -> _Call | None:
        """Queue a call for keys. None if the store is not to be asked now."""
        if len(self._under_way) + len(keys) > _MAX_QUEUED_KEYS or not self.breaker.may_try():
            self.stats.refused_questions += 1
            return None
        call = _Call(keys, self.epoch, now_s + self._wait_s)
        try:
            self._under_way.update(dict.fromkeys(keys, call))
            is_queued = self._queue_call(call)
        except BaseException:  # an interrupt, at any line: perhaps no thread has the call
            self._forget(call)
            raise
        if is_queued:
            return call
        self._forget(call)
        self.stats.refused_questions += 1
        return None

    def _queue_call(self, call: _Call) -> bool:
        """Queue a call; return False if the system starts no thread for it."""
        if self._thread is None:
            # Known only once it runs. After an interrupt in between, the next call starts another.
            given = self._queue, weakref.ref(self)
            thread = threading.Thread(target=_run, args=given, name="kvstow-asker", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                if self.breaker.failed():
                    logger.warning(
                        "kvstow: the system does not start the thread that asks the shared tier "
                        "(%s), whose blocks are recomputed meanwhile. Raise the limit of threads "
                        "(ulimit -u, pids.max of the container)",
                        error,
                    )
                return False
            self._thread = thread
        self._queue.put(call)
        return True

    # -- what the thread does --------------------------------------------------------------------

    def answer(self, call: _Call, store: Store | None) -> Store | None:
        """Ask the store, which is opened if there is none yet, and return it."""
        if call.epoch != self.epoch or self.clock() >= call.until_s:
            # No question waits for it. Each sees that itself: it is late, or of before a reset.
            with self._lock:
                self._forget(call)
            return store
        try:
            store = store or self._connect()
            if call.keys:
                answer = store.found(call.keys, self._call_s)
            else:
                answer = store.found([_NO_BLOCK], max(self._call_s, _CONNECT_S))
        except Exception as error:
            self._end(call, None)
            if not isinstance(error, KvstowError):
                logger.exception("kvstow: the shared tier failed; please report this")
            num_times = self.breaker.failed()
            if not call.keys:
                logger.warning(_SILENT, error)
            elif num_times:
                logger.warning(
                    "kvstow: the shared tier does not say what it has (%s). It is asked again "
                    "after some seconds, and its blocks are recomputed meanwhile",
                    with_times(error, num_times),
                )
            return store
        self._end(call, answer)
        if answer.error is not None and not call.keys:
            logger.warning(_SILENT, answer.error)
        # After an error only a hit shows that one of several servers answers.
        has_answered = answer.error is None or any(answer.found)
        if has_answered and self.breaker.succeeded():
            logger.warning("kvstow: the shared tier says again what it has")
        return store

    def _forget(self, call: _Call) -> None:
        """Let later questions for its keys ask anew. The caller holds the lock."""
        for key in call.keys:
            if self._under_way.get(key) is call:
                del self._under_way[key]

    def _end(self, call: _Call, answer: Answer | None) -> None:
        """Note the answer to a call; None for a call that has failed."""
        # A call without keys has asked for one all the same.
        answers = [] if answer is None else answer.found[: len(call.keys)]
        pairs = [] if answer is None else list(zip(call.keys, answers, strict=True))
        with self._lock:
            if call.keys:
                self.stats.questions += 1
                self.stats.asked_keys += len(call.keys)
                self.stats.failed_questions += answer is None or answer.error is not None
            self._forget(call)
            if call.epoch == self.epoch:
                until_s = self.clock() + self._keep_s
                for key, is_there in pairs:
                    self._cache[key] = until_s, bool(is_there)
                    self._cache.move_to_end(key)
                while len(self._cache) > self._max_cached:
                    self._cache.popitem(last=False)
                call.found = frozenset(key for key, is_there in pairs if is_there)
                self.stats.found_keys += len(call.found)
            call.has_ended = True


def _run(queue: SimpleQueue[_Call | None], known: weakref.ref[Asker]) -> None:
    """Carry out calls. While it waits for one, it keeps no asker that its user drops."""
    store: Store | None = None
    while (call := queue.get()) is not None and (asker := known()) is not None:
        store = asker.answer(call, store)
        del asker
    queue.put(None)  # ends a thread that an interrupt has hidden
    if store is not None:
        store.close()
