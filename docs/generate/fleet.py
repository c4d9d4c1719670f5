"""The plot and the table of a fleet: `python -m docs.generate.fleet` writes the plot.

`benches/results/fleet-conversation.json` has the output of `kvstow replay --servers 1,2,4,8
--host-blocks 5000 --json` for both routings.
"""

import json
from pathlib import Path
from typing import Any, Final

from docs.generate.plot import Lines

ROOT: Final = Path(__file__).parents[2]
RESULT: Final = ROOT / "benches" / "results" / "fleet-conversation.json"
PLOT: Final = ROOT / "docs" / "images" / "fleet" / "hits.svg"


def result() -> dict[str, dict[str, Any]]:
    """Return the figures of each routing."""
    found: dict[str, dict[str, Any]] = json.loads(RESULT.read_text())
    return found


def plot() -> str:
    """Return the text of the plot."""

    def points(routing: str, kind: str) -> list[tuple[float, float]]:
        rows = result()[routing]["rows"]
        return [(float(row["servers"]), 100 * row[kind]["hit_ratio"]) for row in rows]

    series = []
    for kind, name in ("shared", "shared tier"), ("alone", "alone"):
        # Equal lines would hide each other, so one stands for both.
        routings: dict[tuple[tuple[float, float], ...], list[str]] = {}
        for routing in result():
            routings.setdefault(tuple(points(routing, kind)), []).append(routing)
        series += [(f"{name}, {' and '.join(same)}", line) for line, same in routings.items()]
    return Lines("Prompt blocks that were not computed", "servers", series).svg()


def table() -> str:
    """Return the rows of the table in `docs/how-to/shared.md`."""
    lines = []
    for routing, figures in result().items():
        for row in figures["rows"]:
            alone, shared = row["alone"], row["shared"]
            lines.append(
                f"| {routing} | {row['servers']} | {alone['hit_ratio']:.1%} | "
                f"{shared['hit_ratio']:.1%} | {shared['shared_hits']:,} | {shared['puts']:,} |"
            )
    return "\n".join(lines)


def per_request() -> dict[str, float]:
    """Return what a request costs the store, in blocks: in the largest fleet, round-robin."""
    figures = result()["round-robin"]
    shared = figures["rows"][-1]["shared"]
    return {
        name: shared[name] / figures["requests"] for name in ("asked_keys", "puts", "shared_hits")
    }


def main() -> None:
    """Write the plot."""
    PLOT.write_text(plot())


if __name__ == "__main__":
    main()
