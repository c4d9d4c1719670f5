"""The table, the file of figures, and an SVG plot of GB/s by the size of a fragment."""

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from math import log2
from pathlib import Path
from typing import Any

from benches.gpu.rivals import NAMES, speeds

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 620, 340, 56, 40, 44
LEGEND = 210
COLOURS = ("#1b6ca8", "#c8553d", "#6a8d3a", "#8a5fa8", "#777777")


def write(result: Mapping[str, Any], stem: Path) -> None:
    """Write STEM.json and STEM.svg."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result, indent=1, allow_nan=False) + "\n"
    stem.with_name(stem.name + ".json").write_text(text, encoding="utf-8")
    print(f"written: {stem}.json")
    if result["moves"]:
        stem.with_name(stem.name + ".svg").write_text(plot(result), encoding="utf-8")
        print(f"written: {stem}.svg")


def print_report(result: Mapping[str, Any]) -> None:
    """Print the measurements of all parts, and the targets."""
    peak = result["peak"]
    print(f"\n{result['device']}, driver {result['driver']}, CUDA {result['driver_cuda']}")
    if peak is not None:
        print(
            f"link peak {peak['store_gb_per_s']:.1f} GB/s store, {peak['load_gb_per_s']:.1f} load, "
            f"{peak['both_gb_per_s']:.1f} both at once\n"
        )
        print("  KiB  way    ids         slots       GB/s  of peak  CPU ms  bytes")
    for row in result["moves"]:
        of_peak = row["gb_per_s"] / peak[f"{row['direction']}_gb_per_s"]
        print(
            f"{row['fragment_kib']:5}  {row['direction']:5}  {row['ids']:10}  {row['slots']:9}"
            f" {row['gb_per_s']:6.1f}  {of_peak:7.3f}  {row['submit_cpu_ms']:6.2f}"
            f"  {'right' if row['verified'] else 'WRONG'}"
        )
    if result["rivals"]:
        print("\nbeside it, ids shuffled, slots in runs, GB/s:")
    for row in result["rivals"]:
        if "failed" in row:
            print(f"  {NAMES[row['rival']]}: {row['failed']}")
        else:
            print(
                f"{row['fragment_kib']:5} KiB  {row['direction']:5}  {row['gb_per_s']:6.1f}"
                f"  {NAMES[row['rival']]}"
            )
    if result["interference"]:
        print("\nwhile copies run both ways, against the baselines beside each round:")
    for row in result["interference"]:
        slower = "".join(
            f"  {at} {row[f'{at}_ms']:.3f} ms ({row.get(f'{at}_slower_percent', 0):+.1f}%)"
            for at in ("p50", "p99")
        )
        print(f"  {row['loop']:17}  {row['copies']:19}  {row['gb_per_s']:6.1f} GB/s{slower}")
    missed = [target for target in result["targets"] if not target["met"]]
    num = len(result["targets"])
    print(f"\n{num - len(missed)} of {num} targets met")
    for target in missed:
        sign = ">=" if target["at_least"] else "<="
        print(f"  MISSED  {target['name']}: {target['value']:.3f}, not {sign} {target['bound']:g}")


def print_sweep(found: Mapping[str, Any]) -> None:
    """Print the best settings of the mover, the one to pick, and the paths."""
    print("\n grid  place MiB  places  share of the best speed in its worst case")
    for row in found["settings"][:10]:
        print(f"{row['grid']:5}  {row['place_mib']:9}  {row['places']:6}  {row['worst_share']:.3f}")
    pick = found["picked"]
    print(
        f"pick grid {pick['grid']}, {pick['places']} places of {pick['place_mib']} MiB: "
        f"{'the defaults' if pick['is_default'] else 'CHANGE THE DEFAULTS'}"
    )
    print("\n  KiB  way    path             GB/s  host ms")
    for row in found["paths"]:
        print(
            f"{row['kib']:5}  {row['way']:5}  {row['path']:13}  {row['gb_per_s']:6.1f}"
            f"  {row['host_ms']:7.2f}"
        )
    for way, num_bytes in found["link_speed"].items():
        print(f"today {way}s are direct from {num_bytes / 1024:.0f} KiB")


def plot(result: Mapping[str, Any]) -> str:
    """Return an SVG with stores on the left and loads on the right."""
    parts = list(_panels(result))
    width = 2 * WIDTH + LEGEND
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" '
        f'font-family="sans-serif" font-size="12">\n'
        f'<rect width="{width}" height="{HEIGHT}" fill="white"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _panels(result: Mapping[str, Any]) -> Iterator[str]:
    for panel, direction in enumerate(("store", "load")):
        lines = _lines(result, direction)
        sizes = sorted({size for speeds in lines.values() for size in speeds})
        most = 1.1 * max(
            result["peak"][f"{direction}_gb_per_s"],
            *(speed for speeds in lines.values() for speed in speeds.values()),
        )
        first, last = log2(sizes[0]), max(log2(sizes[-1]), log2(sizes[0]) + 1)

        def x(size: int, first: float = first, last: float = last, panel: int = panel) -> float:
            share = (log2(size) - first) / (last - first)
            return panel * WIDTH + LEFT + share * (WIDTH - LEFT - 30)

        def y(speed: float, most: float = most) -> float:
            return HEIGHT - BOTTOM - speed / most * (HEIGHT - BOTTOM - TOP)

        title = f"{result['device']}: {direction}, GB/s by KiB of a fragment"
        yield f'<text x="{x(sizes[0])}" y="20" font-size="14">{escape(title)}</text>'
        peak = result["peak"][f"{direction}_gb_per_s"]
        for speed, dash in ((0.0, ""), (peak, ' stroke-dasharray="4 4"')):
            yield (
                f'<path d="M{x(sizes[0]):.1f} {y(speed):.1f}H{x(sizes[-1]):.1f}" '
                f'stroke="#999"{dash}/>'
            )
            yield f'<text x="{x(sizes[0]) - 48:.1f}" y="{y(speed) + 4:.1f}">{speed:.1f}</text>'
        for size in sizes:
            yield (
                f'<text x="{x(size):.1f}" y="{HEIGHT - BOTTOM + 18}" '
                f'text-anchor="middle">{size}</text>'
            )
        for (name, points), colour in zip(lines.items(), COLOURS, strict=False):
            path = "L".join(f"{x(s):.1f} {y(v):.1f}" for s, v in sorted(points.items()))
            yield f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
            for size, speed in points.items():
                yield f'<circle cx="{x(size):.1f}" cy="{y(speed):.1f}" r="3" fill="{colour}"/>'
            if panel == 1:
                at = TOP + 20 * list(lines).index(name)
                yield f'<text x="{2 * WIDTH}" y="{at}" fill="{colour}">{escape(name)}</text>'


def _lines(result: Mapping[str, Any], direction: str) -> dict[str, dict[int, float]]:
    """Return GB/s by KiB of a fragment, for each line."""
    rows: Sequence[Mapping[str, Any]] = result["moves"]
    lines = {
        f"kvstow, slots {slots}": {
            row["fragment_kib"]: row["gb_per_s"]
            for row in rows
            if (row["direction"], row["ids"], row["slots"]) == (direction, "shuffled", slots)
        }
        for slots in ("runs", "scattered")
    }
    for rival, name in NAMES.items():
        lines[name] = speeds(result["rivals"], rival, direction)
    return {name: points for name, points in lines.items() if points}
