"""Time sides that take turns, and name the machine."""

from __future__ import annotations

import gc
import os
import platform
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_NUM_EMPTY: Final = 1001


class Clock:
    """Milliseconds of this thread's processor time, by the name of the work.

    It is not wall-clock time, because other processes interrupt a long call more often than a short
    one. That would make the slower side look slower still.

    To read the clock is a call of the system, which takes as long as a brief work. So what the
    clock shows for no work is subtracted, as measured beforehand.
    """

    def __init__(self) -> None:
        self.samples: defaultdict[str, list[float]] = defaultdict(list)
        self._own_ms = 0.0
        for _ in range(_NUM_EMPTY):
            self.time("nothing", lambda: None)
        self._own_ms = median(self.samples.pop("nothing"))

    def time(self, what: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function, and note its time under a name."""
        start = time.thread_time_ns()
        result = call(*args, **kwargs)
        took_ms = (time.thread_time_ns() - start) / 1e6
        self.samples[what].append(max(0.0, took_ms - self._own_ms))
        return result

    def together(self, *whats: str) -> list[float]:
        """Return the sums of several works, sample by sample."""
        return [sum(each) for each in zip(*(self.samples[what] for what in whats), strict=True)]


def take_turns(turn: int, first: Callable[[], None], second: Callable[[], None]) -> None:
    """Run both sides. In every other turn the second side goes first."""
    for side in (first, second) if turn % 2 == 0 else (second, first):
        gc.collect()
        side()


def machine() -> str:
    """Return the number of cores and the processor, without the host name."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()}-core machine, {models[0] if models else platform.machine()}"
