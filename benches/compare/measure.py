"""Timing two sides that take turns, and comparing what they took."""

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
    """Milliseconds of this thread's processor time, by what was timed.

    Not time on the wall: where others want the processor too, they take it away from a long call
    and seldom from a short one, and the slower side would look slower still.
    """

    def __init__(self) -> None:
        self.samples: defaultdict[str, list[float]] = defaultdict(list)

    def time(self, what: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        start = time.thread_time_ns()
        result = call(*args, **kwargs)
        self.samples[what].append((time.thread_time_ns() - start) / 1e6)
        return result

    def together(self, *whats: str) -> list[float]:
        """What several of them took, one after the other."""
        return [sum(each) for each in zip(*(self.samples[what] for what in whats), strict=True)]


@dataclass(frozen=True)
class Row:
    """One line of the table: what each side took, in the order in which it was measured.

    Every `num_per_turn`-th sample is the first after the other side's turn: then the caches hold
    the other's data, as in a server where other work comes between.
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
            target, met = f">= {self.target_ratio:g}x", vllm / kvstow >= self.target_ratio
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
    """Runs both, the second one first in every other turn."""
    for side in (first, second) if turn % 2 == 0 else (second, first):
        gc.collect()
        side()


def require_same(what: str, vllm: Iterable[int], kvstow: Iterable[int]) -> None:
    """Refuses to compare the times of two sides that have not done the same."""
    if list(vllm) != list(kvstow):
        sys.exit(f"{what} differ between vLLM and kvstow: the two did not do the same work")
