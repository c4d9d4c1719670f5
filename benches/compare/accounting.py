"""How much quicker than vLLM's own block accounting is kvstow's, doing the same work?

Both sides do the same requests in one process, taking turns, and must come to the same block ids: a
rival that does something else is no rival. vLLM's side is its `KVCacheManager`, called as its
scheduler calls it. What is counted, and what is not:

- Block hashes are vLLM's own (`request.block_hashes`), made beforehand and counted on neither side.
  vLLM reads them where they are; kvstow is handed them (`BlockLedger.add`, and `extend` as blocks
  fill), so rows come with and without that call. `BlockPool.lookup` takes them anew in each call.
- vLLM takes request objects and returns block objects, kvstow takes request ids and returns arrays
  of block ids. Making ids of the objects is not counted; a step has a row in which it is.
- The pools are full of other prompts' blocks, so that an allocation evicts; "nothing cached" is
  right after a reset. Once the free queues are in order, as in a server that has just started,
  and once they are shuffled, as in one that has long been up.
- The garbage collector is on, as in production. What was made before the measurement is frozen, as
  vLLM's engine does when it starts, and each turn begins with a collection that is not timed.
- Events and statistics are off on both sides.
- What the rows of the host tier count beyond that stands in `offload`.

Medians count. "cold" is the ratio of the medians of each turn's first: the other side's turn has
just been through the caches, as other work has in a server.

Run it from the project's folder: `python -m benches.compare.accounting [--json]`.
"""

import argparse
import functools
import json
import os
import platform
import statistics
from pathlib import Path
from typing import Any

import vllm

import kvstow
from kvstow._core import debug_build

from .decode import Decode
from .million import Million
from .offload import OffloadDecode, OffloadPrompts
from .prompts import ONE_GROUP, THREE_GROUPS, Prompts


def measure(num_turns: int) -> dict[str, object]:
    """All rows, and what they were measured on."""
    loads = []
    rows = []
    parts = (
        functools.partial(Prompts, groups=ONE_GROUP, capacity=1, shuffled=False),
        functools.partial(Prompts, groups=ONE_GROUP, capacity=4, shuffled=False),
        functools.partial(Prompts, groups=ONE_GROUP, capacity=4, shuffled=True),
        functools.partial(Prompts, groups=THREE_GROUPS, capacity=1, shuffled=False),
        functools.partial(Prompts, groups=THREE_GROUPS, capacity=4, shuffled=True),
        Decode,
        functools.partial(OffloadPrompts, capacity=1),
        functools.partial(OffloadPrompts, capacity=4),
        OffloadDecode,
        Million,
    )
    for part in parts:
        rows += part(num_turns).run()
        loads.append(os.getloadavg()[0])
    return {
        "machine": _machine(),
        "load": round(statistics.fmean(loads), 1),
        "python": platform.python_version(),
        "vllm": vllm.__version__,
        "kvstow": kvstow.__version__,
        "turns": num_turns,
        "rows": [row.as_dict() for row in rows],
    }


def table(result: dict[str, Any]) -> str:
    """The rows for people."""
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
        missed = "  MISSED" if row["met"] is False else ""
        lines.append(
            f"{row['work']:62} {sides} {row['unit']:7} {row['ratio']:5.0f}x {cold:>6}  "
            f"{target}{missed}".rstrip()
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--turns", type=int, default=15, help="of each side (default %(default)s)")
    args = parser.parse_args()
    if args.turns < 1:
        parser.error(f"--turns {args.turns}: at least 1")
    if debug_build:
        parser.error("this build of kvstow is not optimised: install it in release mode")
    result = measure(args.turns)
    print(json.dumps(result, indent=2) if args.json else table(result))


def _machine() -> str:
    """The machine in words, without its name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()}-core machine, {models[0] if models else platform.machine()}"


if __name__ == "__main__":
    main()
