"""Run the parts of a comparison, and print their rows as a table or as JSON."""

import argparse
import json
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import vllm

import kvstow
from kvstow._core import debug_build
from kvstow.bench import machine

from .measure import Row

__all__ = ["Part", "Parts", "machine", "main", "measure", "table"]


class Part(Protocol):
    def run(self) -> list[Row]: ...


Parts: TypeAlias = Sequence[Callable[[int], Part]]


def main(doc: str | None, parts: Parts) -> None:
    """Run the command line. Each part is built with the number of turns."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--turns", type=int, default=15, help="of each side (default %(default)s)")
    args = parser.parse_args()
    if args.turns < 1:
        parser.error(f"--turns is {args.turns}: pass at least 1")
    if debug_build:
        parser.error("this build of kvstow is not optimised: install it in release mode")
    result = measure(parts, args.turns)
    print(json.dumps(result, indent=2) if args.json else table(result))


def measure(parts: Parts, num_turns: int) -> dict[str, object]:
    """Return all rows, and the machine and versions that they were measured with."""
    loads = []
    rows = []
    for part in parts:
        rows += part(num_turns).run()
        loads.append(os.getloadavg()[0])
    return {
        "machine": machine(),
        "load": round(statistics.fmean(loads), 1),
        "python": platform.python_version(),
        "vllm": vllm.__version__,
        "kvstow": kvstow.__version__,
        "turns": num_turns,
        "rows": [row.as_dict() for row in rows],
    }


def table(result: dict[str, Any]) -> str:
    """Return the rows as a table."""
    lines = [
        "kvstow {kvstow} beside vLLM {vllm}, Python {python}, {machine} (load {load}); medians, "
        "{turns} turns".format(**result),
        "",
        f"{'':62} {'vLLM':>8} {'kvstow':>8} {'':7} {'ratio':>6} {'cold':>6}  target",
    ]
    for row in result["rows"]:
        sides = " ".join(f"{row[side]['median']:8.3g}" for side in ("vllm", "kvstow"))
        cold = "" if row["ratio_cold"] is None else f"{row['ratio_cold']:.0f}x"
        target = "" if row["met"] is None else row["target"]
        decimals = 0 if row["ratio"] >= 10 else 1
        missed = "  MISSED" if row["met"] is False else ""
        lines.append(
            f"{row['work']:62} {sides} {row['unit']:7} {row['ratio']:5.{decimals}f}x {cold:>6}  "
            f"{target}{missed}".rstrip()
        )
    return "\n".join(lines)
