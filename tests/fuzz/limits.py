"""Limits for a parser under test: memory, and a time after which it counts as hung."""

from __future__ import annotations

import contextlib
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

MAX_MORE_BYTES = 1 << 30
# A parser needs milliseconds. Only one that hangs takes as long, on the busiest machine.
HUNG_S = 120


@contextlib.contextmanager
def limits() -> Iterator[None]:
    """Let a huge allocation fail with `MemoryError`, and a hang with `TimeoutError`."""
    kept = resource.getrlimit(resource.RLIMIT_AS)
    [pages] = [int(text) for text in Path("/proc/self/statm").read_text().split()[:1]]
    most = pages * resource.getpagesize() + MAX_MORE_BYTES

    def hung(_number: int, _frame: object) -> None:
        raise TimeoutError(f"the parser has not ended after {HUNG_S} s")

    handler = signal.signal(signal.SIGALRM, hung)
    resource.setrlimit(resource.RLIMIT_AS, (most, kept[1]))
    signal.alarm(HUNG_S)
    try:
        yield
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, kept)
        signal.signal(signal.SIGALRM, handler)
