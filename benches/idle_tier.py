"""What does a tier below the host add to a scheduler's step in which it has nothing to do?

    .venv/bin/python -m benches.idle_tier [--steps 4000] [--json]

Scheduler halves of the connector take turns, step by step: without a tier below the host, with a
disk, with a shared store, with both, and with both and `skip_slow_loads`. Each has 256 requests,
which compute one token in a step. No request fills a block, so nothing is stored, demoted or
promoted. The time is that of the two calls of a step: the end of scheduling, and the reports of the
workers. vLLM's own work is no part of it.

The condition: a tier adds at most 20 us to the least time, a thousandth of a step of 20 ms.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from typing import Any, Final

import numpy as np
from benches.compare import vllm_side
from benches.compare.vllm_side import KVConnectorOutput

from kvstow import FullAttention
from kvstow.bench import machine
from kvstow.tiers import SlotRecords
from kvstow.vllm.messages import LowerReport, StepReports
from kvstow.vllm.model import Model
from kvstow.vllm.options import Options
from kvstow.vllm.scheduler import SchedulerHalf
from kvstow.vllm.tier import HostTier

NUM_REQUESTS: Final = 256
NUM_BLOCKS: Final = 1024
# So large that no request fills one.
BLOCK_SIZE: Final = 1 << 16
MOST_ADDED_US: Final = 20.0
DISK: Final[dict[str, Any]] = {"disk_path": "/unused", "disk_bytes_to_use": 1 << 30}
SHARED: Final[dict[str, Any]] = {"shared": "redis://127.0.0.1:1"}
TIERS: Final[dict[str, dict[str, Any]]] = {
    "none": {},
    "disk": DISK,
    "shared": SHARED,
    "both": {**DISK, **SHARED},
    "skips": {**DISK, **SHARED, "skip_slow_loads": True},
}


class Side:
    """A scheduler half whose tiers are open, and its requests."""

    def __init__(self, **tier: Any) -> None:
        group = FullAttention(block_size=BLOCK_SIZE)
        self.manager = vllm_side.manager(NUM_BLOCKS, (group,))
        model = Model(NUM_BLOCKS, (group,), ((),), BLOCK_SIZE)
        options = Options(num_cpu_blocks=NUM_BLOCKS, **tier)
        self.half = SchedulerHalf(HostTier(model, options, world_size=1, horizon_blocks=0))
        self.half.bind(self.manager)
        self.requests = [
            vllm_side.request(f"request-{at}", 8, BLOCK_SIZE) for at in range(NUM_REQUESTS)
        ]
        below = {0: LowerReport(4096, "on", num_slots=NUM_BLOCKS, fingerprint=bytes(16))}
        self._report(StepReports(capacities={0: NUM_BLOCKS}, below=below if tier else {}))
        if "disk_path" in tier:
            below[0].records = (0, _no_records())
            self._report(StepReports(below=below))
        assert self.half.offload is not None
        assert self.half.offload.disk_mode == ("on" if tier else None)
        for request in self.requests:
            assert self.half.lookup(request, 0) == 0
            assert self.manager.allocate_slots(request, request.num_tokens) is not None
            blocks = self.manager.get_blocks(request.request_id)
            self.half.allocated(request, blocks, 0)
        self.step(is_first=True)

    def _report(self, reports: StepReports | None) -> None:
        self.half.processed(KVConnectorOutput(kv_connector_worker_meta=reports))

    def step(self, *, is_first: bool = False) -> float:
        """Compute a token of each request, and return the seconds of the connector's calls."""
        given = []
        for request in self.requests:
            allocated = None
            if not is_first:
                table = self.manager.allocate_slots(request, 1)
                allocated = table.get_block_ids(allow_none=True)
            given.append((request, allocated))
        if is_first:
            tables = [self.manager.get_block_ids(each.request_id) for each in self.requests]
            output = vllm_side.step(
                new=list(zip(self.requests, tables, strict=True)),
                num_tokens=self.requests[0].num_tokens,
            )
        else:
            output = vllm_side.step(running=given)
        begin_s = time.perf_counter()
        jobs = self.half.build(output)
        middle_s = time.perf_counter()
        assert not jobs.stores
        assert not jobs.loads
        for request in self.requests:
            request.num_computed_tokens += request.num_tokens if is_first else 1
            request.append_output_token_ids(0)
        again_s = time.perf_counter()
        self._report(None)
        return middle_s - begin_s + time.perf_counter() - again_s


def _no_records() -> SlotRecords:
    none = np.empty(0, np.int64)
    keys = np.empty((0, 32), np.uint8)
    return SlotRecords(
        none, none.astype(np.uint32), none.astype(np.uint64), keys, keys, none.astype(np.bool_)
    )


def main() -> int:
    """Print the table, and return 1 if the condition is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    sides = {name: Side(**tier) for name, tier in TIERS.items()}
    times: dict[str, list[float]] = {name: [] for name in sides}
    gc.collect()
    gc.freeze()
    order = list(sides)
    for at in range(options.steps):
        for name in order[at % len(order) :] + order[: at % len(order)]:
            times[name].append(1e6 * sides[name].step())
    rows = {
        name: {"least_us": min(each), "median_us": statistics.median(each)}
        for name, each in times.items()
    }
    least_us = rows["none"]["least_us"]
    missed = [name for name, row in rows.items() if row["least_us"] > least_us + MOST_ADDED_US]
    if options.json:
        print(json.dumps({"machine": machine(), "rows": rows, "missed": missed}))
        return int(bool(missed))
    print(machine())
    print(f"a step of {NUM_REQUESTS} requests, in us")
    for name, row in rows.items():
        added_us = row["least_us"] - least_us
        print(
            f"tier below: {name:7} least {row['least_us']:6.1f}  median {row['median_us']:6.1f}"
            f"  adds {added_us:.1f} to the least"
        )
    for name in missed:
        print(f"MISSED: {name} adds at most {MOST_ADDED_US} us")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
