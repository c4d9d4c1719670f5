"""Measure the wall time of the accounting, without the copies."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvstow.transfer import BlockLayout, CudaMover, Event, HostArena, HostMover, Mover, Ticket
from kvstow.transfer.mover import Ints


class Stopwatch:
    """A context manager that adds up the wall time spent in it."""

    def __init__(self) -> None:
        # When the measurement began or went on; None outside of the context.
        self._since_ns: int | None = None
        self._total_ns = 0

    def __enter__(self) -> None:
        self._since_ns = time.perf_counter_ns()

    def __exit__(self, *_: object) -> None:
        if self._since_ns is not None:
            self._total_ns += time.perf_counter_ns() - self._since_ns
        self._since_ns = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave this part out of the measurement. Outside of the context, do nothing."""
        if self._since_ns is None:
            yield
            return
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()

    def take_us(self) -> float:
        """Return the microseconds added up since the last call."""
        total_ns, self._total_ns = self._total_ns, 0
        return total_ns / 1000


class _Untimed(Mover):
    """A mover whose submissions the stopwatch leaves out."""

    def __init__(self, layout: BlockLayout, arena: HostArena, watch: Stopwatch) -> None:
        super().__init__(layout, arena)
        self._watch = watch

    def store(self, block_ids: Ints, host_slots: Ints, *, after: Event) -> Ticket:
        """Store as any mover, without the stopwatch."""
        with self._watch.paused():
            return super().store(block_ids, host_slots, after=after)

    def load(self, host_slots: Ints, block_ids: Ints, *, after: Event) -> Ticket:
        """Load as any mover, without the stopwatch."""
        with self._watch.paused():
            return super().load(host_slots, block_ids, after=after)


class UntimedHostMover(_Untimed, HostMover):
    """Moves blocks in host memory."""


class UntimedCudaMover(_Untimed, CudaMover):
    """Moves blocks of a CUDA device."""
