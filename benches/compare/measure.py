"""Time two sides that take turns, and compare their times."""

import gc
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Clock:
    """Milliseconds of this thread's processor time, by the name of the work.

    It is not wall-clock time, because other processes interrupt a long call more often than a short
    one. That would make the slower side look slower still.
    """

    def __init__(self) -> None:
        self.samples: defaultdict[str, list[float]] = defaultdict(list)

    def time(self, what: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        start = time.thread_time_ns()
        result = call(*args, **kwargs)
        self.samples[what].append((time.thread_time_ns() - start) / 1e6)
        return result

    def together(self, *whats: str) -> list[float]:
        """Return the sums of several works, sample by sample."""
        return [sum(each) for each in zip(*(self.samples[what] for what in whats), strict=True)]


@dataclass(frozen=True)
class Row:
    """A line of the table: the samples of each side, in the order of their measurement.

    Every `num_per_turn`-th sample is the first after the other side's turn. Then the caches hold
    the data of the other side, as in a server that does other work in between.
    """

    work: str
    vllm: Sequence[float]
    kvstow: Sequence[float]
    num_per_turn: int = 1
    unit: str = "ms"
    target_ratio: float | None = None
    target_most: float | None = None

    def as_dict(self) -> dict[str, object]:
        vllm, kvstow = statistics.median(self.vllm), statistics.median(self.kvstow)
        target, met = None, None
        if self.target_ratio is not None:
            target, met = f">= {self.target_ratio:.3g}x", vllm / kvstow >= self.target_ratio
        elif self.target_most is not None:
            target, met = f"<= {self.target_most:g} {self.unit}", kvstow <= self.target_most
        return {
            "work": self.work,
            "unit": self.unit,
            "vllm": {"median": vllm, "least": min(self.vllm), "samples": len(self.vllm)},
            "kvstow": {"median": kvstow, "least": min(self.kvstow), "samples": len(self.kvstow)},
            "ratio": vllm / kvstow,
            "ratio_cold": self._ratio_cold(),
            "ratio_of_least": min(self.vllm) / min(self.kvstow),
            "target": target,
            "met": met,
        }

    def _ratio_cold(self) -> float | None:
        if self.num_per_turn == 1:
            return None
        vllm, kvstow = self.vllm[:: self.num_per_turn], self.kvstow[:: self.num_per_turn]
        return statistics.median(vllm) / statistics.median(kvstow)


def take_turns(turn: int, first: Callable[[], None], second: Callable[[], None]) -> None:
    """Run both sides. In every other turn the second side goes first."""
    for side in (first, second) if turn % 2 == 0 else (second, first):
        gc.collect()
        side()


def require_same(what: str, vllm: Iterable[int], kvstow: Iterable[int]) -> None:
    """Exit if the two sides did different work, because then their times do not compare."""
    if list(vllm) != list(kvstow):
        sys.exit(f"{what} differ between vLLM and kvstow: the two did not do the same work")
