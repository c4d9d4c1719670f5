"""How near to its link's peak does a GPU's KV cache move, and how much does that slow compute?

    python3 -m benches.gpu_copy [--quick] [--out FOLDER] [PART ...]     (numpy, torch and cupy)

The parts, each of which takes less than eight minutes:

- `copies`: the peak of the link, with very long copies. Jobs of 512 blocks and at least 256 MiB
  from a layer-major cache, by the size of a block's fragments, and two rivals: a copy call per
  fragment, and a kernel that reads and writes pinned memory itself. The host's time of each job.
- `sweep`: the settings of the mover, and the size from which direct copies pay.
- `interference`: the slow-down of matrix products and of decode-like steps while copies run.
- `batched`: the driver's batched copies, which crash on some drivers. So they come last.

FOLDER (by default benches/results) gets a file per part, which grows with each row, and a file and
a plot of all parts that were measured. A GB is 1e9 bytes. The time is wall time from before the
submission of a job until its ticket has ended. Speeds are medians of several turns. The bytes of
every configuration of `copies` are compared once.

The status is 0 if all targets are met, 1 if bytes are wrong, 4 if only a target is missed, 2 for a
wrong option, and 3 without a GPU.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benches.gpu import interference, moves, rivals, sweep
from benches.gpu.device import Device, no_device
from benches.gpu.parts import Log, Row, read
from benches.gpu.report import print_report, print_sweep, write

PARTS = ("copies", "sweep", "interference", "batched")
SIZES_KIB = (4, 8, 16, 18, 32, 64, 128)
QUICK_KIB = (4, 16, 64)
RESULTS = Path(__file__).parent / "results"
WRONG_BYTES, USAGE, NO_GPU, MISSED = 1, 2, 3, 4


def main(arguments: Sequence[str]) -> int:
    """Measure the parts; see the module for the status."""
    parser = argparse.ArgumentParser(prog="benches.gpu_copy", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and turns")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(PARTS)}")
    asked = parser.parse_args(arguments)
    if unknown := [part for part in asked.parts if part not in PARTS]:
        print(f"there is no part {unknown[0]}; name some of {', '.join(PARTS)}", file=sys.stderr)
        return USAGE
    if (reason := no_device()) is not None:
        print(f"there is no GPU here, so nothing was measured: {reason}")
        return NO_GPU
    device = Device()
    print(device.name, flush=True)
    stem = asked.out / f"gpu-copy-{device.slug}{'-quick' if asked.quick else ''}"
    head = {
        "question": "GB/s, host CPU and slow-down of KV-cache copies",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "quick": asked.quick,
        **device.described(),
    }
    chosen = [part for part in PARTS if not asked.parts or part in asked.parts]
    for part in chosen:
        print(f"\n{part}:", flush=True)
        log = Log(stem, part, head)
        log.end(**MEASURES[part](device, log, is_quick=asked.quick))
    result = combined(stem, head)
    write(result, stem)
    print_report(result)
    if not all(row["verified"] for row in result["moves"]):
        print("WRONG BYTES: see `verified` above")
        return WRONG_BYTES
    judged = [target for target in result["targets"] if target["part"] in chosen]
    return 0 if all(target["met"] for target in judged) else MISSED


def _copies(device: Device, log: Log, *, is_quick: bool) -> Row:
    sizes, num_turns = (QUICK_KIB, 3) if is_quick else (SIZES_KIB, 9)
    peak = device.peak(num_turns)
    log.add({"part": "peak", **peak})
    moved: list[Row] = []
    beside: list[Row] = []
    for kib in sizes:
        with moves.Cache(device, kib << 10) as cache:
            moved += moves.measure(cache, num_turns, log)
            beside += rivals.measure(cache, num_turns, log)
    return {"peak": peak, "moves": moved, "rivals": beside}


def _sweep(device: Device, log: Log, *, is_quick: bool) -> Row:
    found = sweep.measure(device, log, sweep.QUICK if is_quick else sweep.WHOLE)
    print_sweep(found)
    return found


def _interference(device: Device, log: Log, *, is_quick: bool) -> Row:
    with moves.Cache(device, 16 << 10) as cache:
        rows = interference.measure(cache, 200 if is_quick else 1000, log)
    return {"interference": rows}


def _batched(device: Device, log: Log, *, is_quick: bool) -> Row:
    rows = rivals.batched(QUICK_KIB if is_quick else SIZES_KIB, 3 if is_quick else 9)
    log.add(*rows)
    return {"rivals": rows}


MEASURES = {
    "copies": _copies,
    "sweep": _sweep,
    "interference": _interference,
    "batched": _batched,
}


def combined(stem: Path, head: Row) -> Row:
    """Return what all parts have found so far. A part that was not measured has no rows."""
    found = {part: read(stem, part) or {} for part in PARTS}
    copies, slowed = found["copies"], found["interference"].get("interference", [])
    return {
        **head,
        "parts": [part for part in PARTS if found[part].get("is_whole")],
        "peak": copies.get("peak"),
        "moves": copies.get("moves", []),
        "rivals": [*copies.get("rivals", []), *found["batched"].get("rivals", [])],
        "interference": slowed,
        "sweep": {name: found["sweep"].get(name) for name in ("settings", "picked", "paths")},
        "targets": targets(copies, slowed),
    }


def targets(copies: Mapping[str, Any], slowed: Sequence[Row]) -> list[Row]:
    """Return each target with the measured value."""
    found: list[Row] = []

    def add(part: str, name: str, value: float, bound: float, *, at_least: bool) -> None:
        met = value >= bound if at_least else value <= bound
        found.append(
            {
                "part": part,
                "name": name,
                "value": value,
                "bound": bound,
                "at_least": at_least,
                "met": met,
            }
        )

    for row in copies.get("moves", []):
        if row["direction"] == "both":
            continue
        aim = 0.8 if row["slots"] == "scattered" else 0.95 if row["fragment_kib"] >= 8 else 0.9
        name = "{fragment_kib} KiB, {direction}, ids {ids}, slots {slots}: of the peak"
        share = row["gb_per_s"] / copies["peak"][f"{row['direction']}_gb_per_s"]
        add("copies", name.format(**row), share, aim, at_least=True)
        if row["slots"] == "runs":
            name = "{fragment_kib} KiB, {direction}, ids {ids}: ms of host CPU to submit"
            add("copies", name.format(**row), row["submit_cpu_ms"], 1.0, at_least=False)
    for row in slowed:
        if row["copies"] == interference.TARGETED:
            name = f"{row['loop']} beside copies {row['copies']}: slow-down of p99, percent"
            add("interference", name, row["p99_slower_percent"], 5.0, at_least=False)
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
