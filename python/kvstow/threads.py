"""Work for several threads, which an interrupt of the calling thread ends safely.

`concurrent.futures` does not fit: an interrupt can leave the locks of its conditions taken.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")
# How often the caller looks without a wake-up, because an interrupt may have lost one.
_LOOK_S = 0.05


class _Work(Generic[T, R]):
    """Items, each carried out by one thread."""

    def __init__(self, call: Callable[[T], R], items: Iterable[T]) -> None:
        self.call = call
        self.waiting = deque(enumerate(items))
        self.results: dict[int, R] = {}
        self.error: BaseException | None = None
        self.wakes: SimpleQueue[None] = SimpleQueue()
        self._lock = threading.Lock()
        self._num_under_way = 0

    def run(self) -> None:
        """Carry out items until none is left."""
        while True:
            with self._lock:
                if not self.waiting:
                    return
                at, item = self.waiting.popleft()
                self._num_under_way += 1
            try:
                self.results[at] = self.call(item)
            except BaseException as error:
                self.fail(error)
            with self._lock:
                self._num_under_way -= 1
            self.wakes.put(None)

    def fail(self, error: BaseException) -> None:
        """Begin no more items."""
        with self._lock:
            self.error = self.error or error
            self.waiting.clear()

    def is_over(self) -> bool:
        """Return whether no item waits or is being carried out."""
        with self._lock:
            return not self.waiting and not self._num_under_way


def map_on_threads(
    call: Callable[[T], R],
    items: Iterable[T],
    num_threads: int,
    name: str,
    *,
    begin: Callable[[], None] | None = None,
) -> list[R]:
    """Return `call` of each item. Threads make the calls, and each runs `begin` first.

    After an error or an interrupt no further item begins, and this function raises it once no call
    runs any more.

    Raises:
        RuntimeError: the system refuses to start a thread.
    """
    work = _Work(call, items)

    def run() -> None:
        try:
            if begin is not None:
                begin()
        except BaseException as error:
            work.fail(error)
        work.run()

    to_start = iter(range(min(num_threads, len(work.waiting))))
    while True:
        try:
            if work.is_over():
                break
            for _ in to_start:
                threading.Thread(target=run, name=name, daemon=True).start()
            # Not an `except` beside the one below: an interrupt in it would not be caught there.
            with suppress(Empty):
                work.wakes.get(timeout=_LOOK_S)
        except BaseException as error:
            work.fail(error)
    if work.error is not None:
        raise work.error
    return [work.results[at] for at in range(len(work.results))]
