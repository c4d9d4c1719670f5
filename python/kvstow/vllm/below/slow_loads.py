"""Which loads from a tier below the host `skip_slow_loads` leaves out, by two measured speeds.

```
            the tiers below add nothing
  asking --+-----------------------------> forgotten
           | loading is slower
           +-----------------------------> skipped
           | else, and one slow load in 16
           +-----------------------------> loading --- the host has it, or too late ---> over
```

Both speeds are tokens per second that one request gets:

- **Loading**: the tokens that a request found on the host after its wait and not before, and the
  seconds of the wait. The wait begins with the question to a store, so it contains the answer, the
  queue of promotes, the reads, and vLLM's steps meanwhile. A load that fails brings no token, and
  its seconds count. A store that has nothing of a request is not slow: that wait does not count,
  and `shared_ask_timeout_s` bounds it.
- **Computing**: the largest chunk of a prompt in a step, and the seconds of the step. Decodes of
  other requests slow a chunk down, so their time counts. The end of a prompt counts only if it has
  `min_promote_tokens`, because a step with few tokens takes longer for each.

Loads from the host itself are not skipped. They run beside vLLM's steps at the speed of the link,
which no other server slows down, and a promoted block needs one too.

How a wrong block could be served: a skip reads nothing. The request goes on as one whose
`promote_timeout_s` is over.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Literal
from weakref import WeakKeyDictionary

from vllm.v1.request import Request

logger = logging.getLogger("vllm." + __name__)

LOADS_PER_PROBE: Final = 16
"""While loads are slow, one of so many takes place, and begins a new average."""
# What a sample leaves of those before it.
_KEPT: Final = 15 / 16
# Steps under way: more than any of vLLM's pipelines has.
_MAX_STEPS: Final = 64


@dataclass(slots=True)
class Speed:
    """A moving average: tokens, and the seconds that they took."""

    num_tokens: float = 0.0
    seconds: float = 0.0

    def add(self, num_tokens: int, seconds: float) -> None:
        """Add a sample."""
        self.num_tokens = self.num_tokens * _KEPT + num_tokens
        self.seconds = self.seconds * _KEPT + seconds

    def is_below(self, other: Speed) -> bool:
        """Whether this speed is lower. A speed without samples is neither lower nor higher."""
        return self.num_tokens * other.seconds < other.num_tokens * self.seconds

    def __str__(self) -> str:
        """Return tokens per second."""
        return f"{self.num_tokens / self.seconds if self.seconds else 0.0:.0f} tokens/s"


@dataclass(slots=True)
class _Wait:
    """A request's wait for the tier.

    Attributes:
        end: the tokens up to which it looks up. With another end, a new wait begins.
        since: when it began.
        num_host_tokens: what the host had when it was decided.
        num_tokens: what the tier added to that.
        is_probe: it takes place although loads are slow.
    """

    end: int
    since: float
    state: Literal["asking", "loading", "skipped", "over"] = "asking"
    num_host_tokens: int = 0
    num_tokens: int = 0
    is_probe: bool = False


@dataclass(frozen=True, slots=True)
class _Chunk:
    """The largest chunk of a prompt in a step that was scheduled at `since`."""

    request: Request
    num_tokens: int
    end: int
    since: float

    @property
    def is_computed(self) -> bool:
        """Whether its step was processed, unless the request has lost its tokens."""
        return bool(
            self.request.num_computed_tokens - self.request.num_in_flight_tokens >= self.end
        )


class SlowLoads:
    """Measures both speeds, and decides once for each request.

    Attributes:
        loading: the speed of loads.
        computing: the speed of prefills.
        num_skipped_tokens: tokens that the tier had and requests computed.
    """

    def __init__(self, name: str, min_tokens: int, clock: Callable[[], float]) -> None:
        """Begin without speeds, so that the first requests load.

        Args:
            name: of the tier, for messages.
            min_tokens: the fewest tokens that a request loads.
            clock: seconds, monotonic.
        """
        self.loading, self.computing = Speed(), Speed()
        self.num_skipped_tokens = 0
        self._name, self._min_tokens, self._clock = name, min_tokens, clock
        self._waits: WeakKeyDictionary[Request, _Wait] = WeakKeyDictionary()
        self._num_slow = 0
        self._is_slow = False
        self._chunks: deque[_Chunk] = deque(maxlen=_MAX_STEPS)
        self._processed_at = 0.0

    # -- loads ----------------------------------------------------------------------------------

    def asks(self, request: Request, end: int) -> None:
        """Note that a request waits for an answer of the store."""
        self._wait(request, end)

    def may_load(
        self, request: Request, end: int, tier_hits: Callable[[], tuple[int, int]]
    ) -> bool:
        """Whether a request may wait for a promote; decide it the first time.

        Args:
            request: the request.
            end: the tokens up to which it looks up.
            tier_hits: returns what `OffloadScheduler.tier_hits` returns of it.
        """
        wait = self._wait(request, end)
        if wait.state == "asking":
            wait.num_host_tokens, num_tokens = tier_hits()
            wait.num_tokens = num_tokens - wait.num_host_tokens
            if not wait.num_tokens:
                del self._waits[request]
                return True
            self._decide(wait)
        return wait.state != "skipped"

    def _wait(self, request: Request, end: int) -> _Wait:
        wait = self._waits.get(request)
        if wait is None or wait.end != end:  # a session goes on, or was preempted
            wait = self._waits[request] = _Wait(end, self._clock())
        return wait

    def _decide(self, wait: _Wait) -> None:
        is_slow = self.loading.is_below(self.computing)
        if is_slow != self._is_slow:
            self._is_slow = is_slow
            what = "compute what it holds" if is_slow else "load again"
            logger.info(
                "kvstow: a request gets %s from the %s tier and computes %s, so requests %s",
                self.loading,
                self._name,
                self.computing,
                what,
            )
        self._num_slow += is_slow
        wait.is_probe = is_slow and self._num_slow % LOADS_PER_PROBE == 0
        if is_slow and not wait.is_probe:
            wait.state = "skipped"
            self.num_skipped_tokens += wait.num_tokens
        else:
            wait.state = "loading"

    def found(self, request: Request, num_tokens: int) -> None:
        """Note that a lookup has found a hit of so many tokens, so that a wait for it is over."""
        wait = self._waits.get(request)
        if wait is None or wait.state != "loading":
            return
        wait.state = "over"
        if wait.is_probe:
            self.loading = Speed()
        num_loaded = min(max(0, num_tokens - wait.num_host_tokens), wait.num_tokens)
        self.loading.add(num_loaded, self._clock() - wait.since)

    # -- prefills -------------------------------------------------------------------------------

    def scheduled(self, requests: Iterable[tuple[Request, int]]) -> None:
        """Take the requests of a step, with the tokens that it computes of each."""
        largest, num_most = None, 1  # a decode computes one
        for request, num_tokens in requests:
            num_left = request.num_tokens - request.num_computed_tokens
            num_new = min(num_tokens, num_left)
            is_short = num_new == num_left and num_new < self._min_tokens
            if num_new > num_most and not is_short:
                largest, num_most = request, num_new
        if largest is not None:
            end = largest.num_computed_tokens + num_most
            self._chunks.append(_Chunk(largest, num_most, end, self._clock()))

    def processed(self) -> None:
        """Note that a step was processed. vLLM does not say which, and some it leaves out."""
        began, self._processed_at = self._processed_at, self._clock()
        done = [at for at, chunk in enumerate(self._chunks) if chunk.is_computed]
        if not done:
            return
        chunk = self._chunks[done[-1]]
        for _ in range(done[-1] + 1):  # those before it have lost their request
            self._chunks.popleft()
        # With asynchronous scheduling, a step runs after the one before it.
        self.computing.add(chunk.num_tokens, self._processed_at - max(chunk.since, began))
