"""Time two sides that take turns, and compare their times."""

import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvstow.bench import Clock, take_turns

__all__ = ["Clock", "Row", "require_same", "take_turns"]


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


def require_same(what: str, vllm: Iterable[int], kvstow: Iterable[int]) -> None:
    """Exit if the two sides did different work, because then their times do not compare."""
    if list(vllm) != list(kvstow):
        sys.exit(f"{what} differ between vLLM and kvstow: the two did not do the same work")
