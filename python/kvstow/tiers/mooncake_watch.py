"""Calls to Mooncake Store that take long, and how the rest of the machine bears them.

A call waits for its transfers in a loop that never sleeps, for up to 60 s. If the other side stands
still, the thread takes a whole processor, from the engine too:

```
begin --> under way --- long ---> its thread gets the lowest priority --- returns --> spent
                  +--- long and late ---> no other call moves blocks until it returns
```

A thread cannot raise its priority again, and gives it to the threads that it starts. So a spent one
ends, and the watch starts another in its place. If the system starts none, the watch tries again
until it is closed. Then the tier fails the jobs that wait.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from kvstow._core import TransferError

LONG_S: Final = 0.2
_LOWEST_PRIORITY: Final = 19


def lower_priority(thread_id: int) -> None:
    """Give a thread of this process the lowest priority. Linux has one for each thread."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread_id, _LOWEST_PRIORITY)


@dataclass(slots=True, eq=False)
class _Call:
    """A call that is under way.

    Attributes:
        thread_id: the system's number of its thread.
        begin_s: when it began.
        until_s: when nobody waits for it any more.
        is_long: whether its thread has the lowest priority.
    """

    thread_id: int
    begin_s: float
    until_s: float
    is_long: bool = False


class CallWatch:
    """Looks at the calls that are under way, on a thread of its own. Any thread may use it."""

    def __init__(
        self,
        *,
        long_s: float = LONG_S,
        clock: Callable[[], float] = time.monotonic,
        lower: Callable[[int], None] = lower_priority,
    ) -> None:
        """Begin without calls.

        Args:
            long_s: seconds after which a call is long.
            clock: seconds, as `time.monotonic` gives them.
            lower: gives a thread the lowest priority.
        """
        self._long_s, self._clock, self._lower = long_s, clock, lower
        self._lock = threading.Lock()
        self._calls: list[_Call] = []
        self._starts: list[Callable[[], None]] = []
        self._is_closed = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstow-mooncake-watch", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Start what is to be started soon, and end the thread. No priority changes any more."""
        with self._lock:
            self._is_closed = True
        self._wake.set()
        if self._thread.is_alive():  # not if the system did not start it
            self._thread.join()

    def let_end(self) -> None:
        """Let the thread end soon. Takes no lock, because a finalizer may call it anywhere."""
        self._is_closed = True

    def soon(self, start: Callable[[], None]) -> bool:
        """Let the watch's thread call `start`, which starts a thread; return False if it is closed.

        `start` may raise `RuntimeError`, because the system starts no thread. Then it is called
        again, until the watch is closed.
        """
        with self._lock:
            if not self._is_closed:
                self._starts.append(start)
            return not self._is_closed

    def refuse_beside_late(self) -> None:
        """Raise if a long call is late, because another may stand still as well.

        A short call that is late began late, because its job had waited for a thread.

        Raises:
            TransferError: one is late.
        """
        now_s = self._clock()
        with self._lock:
            is_late = any(
                max(call.until_s, call.begin_s + self._long_s) <= now_s for call in self._calls
            )
        if is_late:
            raise TransferError("a call to Mooncake has not returned in time, and no other begins")

    @contextmanager
    def watched(self, until_s: float, spend: Callable[[], None]) -> Iterator[None]:
        """Watch a call of this thread.

        Args:
            until_s: when nobody waits for it any more.
            spend: called after the call, in this thread, if it has got the lowest priority.
        """
        call = _Call(threading.get_native_id(), self._clock(), until_s)
        with self._lock:
            self._calls.append(call)
        try:
            yield
        finally:
            # Under the lock, so that no thread gets the lowest priority after its call.
            with self._lock:
                self._calls.remove(call)
            if call.is_long:
                spend()

    def look(self) -> None:
        """Give the threads of long calls the lowest priority."""
        with self._lock:
            now_s = self._clock()
            for call in self._calls:
                if not call.is_long and now_s - call.begin_s >= self._long_s:
                    self._lower(call.thread_id)
                    call.is_long = True

    def _run(self) -> None:
        while not self._is_closed:
            self._wake.wait(self._long_s / 2)
            self.look()
            self._start_all()
        self._start_all()  # what came before the close

    def _start_all(self) -> None:
        """Call what is to be called soon. What raises comes again, unless the watch is closed."""
        with self._lock:
            starts, self._starts = self._starts, []
        for start in starts:
            try:
                start()
            except RuntimeError:
                self.soon(start)
