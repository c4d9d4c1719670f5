"""How near to its link's peak does a GPU's KV cache move, and how much does that slow compute?

    python3 -m benches.gpu_copy [--quick]        (numpy, torch and cupy; under five minutes)

The benchmark measures, in this order:

- The peak of the link, with very long copies.
- Jobs of 512 blocks and at least 256 MiB from a layer-major cache, by the size of a block's
  fragments, and three rivals: a copy call per fragment, batched copies, and a kernel that
  reads and writes pinned memory itself.
- The host's time to submit a job.
- The slow-down of matrix products and decode-like steps while copies run.

A GB is 1e9 bytes. The time is wall time from before the submission of a job until its ticket has
ended. Speeds are medians of several turns. The bytes of every configuration are compared once.
"""

import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

from benches.gpu import interference, moves, rivals
from benches.gpu.device import Device, no_device
from benches.gpu.report import print_report, write

SIZES_KIB = (4, 8, 16, 18, 32, 64, 128)
QUICK_KIB = (4, 16, 64)
RESULTS = Path(__file__).parent / "results"

Row: TypeAlias = dict[str, Any]


def main(arguments: Sequence[str]) -> int:
    """Return 0 if all targets are met, 1 if one is missed or bytes are wrong, 3 without a GPU."""
    if unknown := set(arguments) - {"--quick"}:
        print(f"benches.gpu_copy: {unknown.pop()} is no option; there is --quick", file=sys.stderr)
        return 2
    if (reason := no_device()) is not None:
        print(f"there is no GPU here, so nothing was measured: {reason}")
        return 3
    is_quick = "--quick" in arguments
    sizes, num_turns = (QUICK_KIB, 3) if is_quick else (SIZES_KIB, 9)
    device = Device()
    print(device.name, flush=True)
    peak = device.peak(num_turns)
    moved: list[Row] = []
    beside: list[Row] = []
    for kib in sizes:
        with moves.Cache(device, kib << 10) as cache:
            moved += moves.measured(cache, num_turns)
            beside += rivals.measured(cache, num_turns)
        print(f"  {kib} KiB: done", flush=True)
    beside += rivals.batched(sizes, num_turns)
    with moves.Cache(device, 16 << 10) as cache:
        slowed = interference.measured(cache, 200 if is_quick else 1000)
    result = {
        "question": "GB/s, host CPU and slow-down of KV-cache copies",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "quick": is_quick,
        **device.described(),
        "peak": peak,
        "moves": moved,
        "rivals": beside,
        "interference": slowed,
        "targets": targets(peak, moved, slowed),
    }
    write(result, RESULTS / f"gpu-copy-{device.slug}{'-quick' if is_quick else ''}")
    print_report(result)
    is_right = all(row["verified"] for row in moved)
    if not is_right:
        print("WRONG BYTES: see `verified` above")
    return 0 if is_right and all(target["met"] for target in result["targets"]) else 1


def targets(peak: Row, moved: Sequence[Row], slowed: Sequence[Row]) -> list[Row]:
    """Return each target with the measured value."""
    found: list[Row] = []

    def add(name: str, value: float, bound: float, *, at_least: bool) -> None:
        met = value >= bound if at_least else value <= bound
        found.append(
            {"name": name, "value": value, "bound": bound, "at_least": at_least, "met": met}
        )

    for row in moved:
        if row["direction"] == "both":
            continue
        aim = 0.8 if row["slots"] == "scattered" else 0.95 if row["fragment_kib"] >= 8 else 0.9
        name = "{fragment_kib} KiB, {direction}, ids {ids}, slots {slots}: of the peak"
        add(
            name.format(**row),
            row["gb_per_s"] / peak[f"{row['direction']}_gb_per_s"],
            aim,
            at_least=True,
        )
        if row["slots"] == "runs":
            name = "{fragment_kib} KiB, {direction}, ids {ids}: ms of host CPU to submit"
            add(name.format(**row), row["submit_cpu_ms"], 1.0, at_least=False)
    for row in slowed:
        if row["copies"] == "packed":
            name = f"{row['loop']} while copying: slow-down of p99, percent"
            add(name, row["p99_slower_percent"], 5.0, at_least=False)
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
