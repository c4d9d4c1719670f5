"""Does the host mover copy blocks as fast as plain memcpy, and what does a small job cost?

    .venv/bin/python -m benches.host_copy [--mib 192] [--rounds 9] [--json]

Each row copies the same fragments between a device pool in host memory and an arena, in shuffled
order of blocks. A fragment is the part of a block in one layer. The sides take turns, and the best
turn of each counts. All sides but "two threads" run on one thread.

- kvstow: a job of `HostMover`, from its submission to the end of its ticket.
- memcpy: one native loop that calls memcpy for each fragment. The better of two orders counts: that
  of the caller, and by slot.
- numpy, torch: for each layer an indexed copy through a temporary, as Python code would do it.
- two threads: half of the blocks on each of two threads, to decide how many threads a job should
  have. "beside compute" repeats this while torch multiplies matrices on every core. It also shows
  how many multiplications were left, as a share of those without any copy.

The fixed cost is that of jobs of 32 blocks of 64 bytes. "cold" means that 64 MiB were read since
the last job, as in a step of compute.

The conditions: at least 0.9 of memcpy in every row, and at most 20 us for a warm job of 32
blocks.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch

from kvstow._core import BlockCopier, debug_build
from kvstow.bench import machine
from kvstow.transfer import READY, BlockLayout, HostArena, HostMover

Index = npt.NDArray[np.int64]

LAYERS = {4: 64, 16: 64, 64: 32, 128: 16, 512: 8, 2048: 2}  # by KiB of a fragment
LEAST_RATIO, MOST_US = 0.9, 20.0
NUM_BLOCKS, BLOCK_BYTES = 32, 64  # of a job whose fixed cost counts


def best_s(sides: Mapping[str, Callable[[], object]], num_rounds: int) -> dict[str, float]:
    """Let the sides take turns, and return the seconds of the best turn of each."""
    best = dict.fromkeys(sides, float("inf"))
    for _ in range(num_rounds):
        for name, call in sides.items():
            start = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


class Memory:
    """A device pool in host memory, an arena, and shuffled pairs of their blocks."""

    def __init__(self, fragment_kib: int, mib: int) -> None:
        num_layers, fragment_bytes = LAYERS[fragment_kib], fragment_kib << 10
        self.num_blocks = max(2, (mib << 20) // (num_layers * fragment_bytes))
        rng = np.random.default_rng(0)
        shape = (self.num_blocks + 1, fragment_bytes)
        self.device = [np.full(shape, layer, np.uint8) for layer in range(num_layers)]
        self.layout = BlockLayout.from_arrays(self.device)
        self.arena = HostArena(self.num_blocks, self.layout.slot_bytes, num_prefault_threads=1)
        self.num_bytes = self.num_blocks * self.layout.slot_bytes
        self.ids: Index = rng.permutation(self.num_blocks) + 1
        self.slots: Index = rng.permutation(self.num_blocks)
        self.fragments = self.arena.slots.reshape(self.num_blocks, num_layers, fragment_bytes)
        self.copier = BlockCopier(
            [(layer.reshape(-1), fragment_bytes, fragment_bytes) for layer in self.device],
            self.num_blocks + 1,
            self.arena.memory,
            self.arena.slot_stride_bytes,
            self.arena.slot_bytes,
            self.num_blocks,
        )

    def plain(self, direction: str, ids: Index, slots: Index) -> None:
        """Copy with memcpy: a brief job has plain stores, in the order of its pairs."""
        if direction == "store":
            self.copier.store(ids, slots, brief=True)
        else:
            self.copier.load(slots, ids, brief=True)

    def native(self, direction: str, part: slice) -> None:
        if direction == "store":
            self.copier.store(self.ids[part], self.slots[part])
        else:
            self.copier.load(self.slots[part], self.ids[part])

    def with_numpy(self, direction: str) -> None:
        for layer, blocks in enumerate(self.device):
            if direction == "store":
                self.fragments[self.slots, layer] = blocks[self.ids]
            else:
                blocks[self.ids] = self.fragments[self.slots, layer]

    def with_torch(self, direction: str) -> None:
        ids, slots = torch.from_numpy(self.ids), torch.from_numpy(self.slots)
        fragments = torch.from_numpy(self.fragments.view(np.int64))
        for layer, array in enumerate(self.device):
            blocks = torch.from_numpy(array.view(np.int64))
            if direction == "store":
                fragments[:, layer].index_copy_(0, slots, blocks.index_select(0, ids))
            else:
                blocks.index_copy_(0, ids, fragments[:, layer].index_select(0, slots))


def copies(fragment_kib: int, mib: int, num_rounds: int) -> list[dict[str, float | str]]:
    """Return the rows of one size of fragments, for both directions."""
    memory = Memory(fragment_kib, mib)
    rows: list[dict[str, float | str]] = []
    by_slot = np.argsort(memory.slots)
    half = memory.num_blocks // 2
    with HostMover(memory.layout, memory.arena) as mover, ThreadPoolExecutor(2) as pool:

        def on_two_threads(direction: str) -> None:
            parts = slice(0, half), slice(half, None)
            for done in [pool.submit(memory.native, direction, part) for part in parts]:
                done.result()

        def job(direction: str) -> None:
            if direction == "store":
                mover.store(memory.ids, memory.slots, after=READY).wait()
            else:
                mover.load(memory.slots, memory.ids, after=READY).wait()

        def sides(direction: str) -> dict[str, Callable[[], object]]:
            sorted_pairs = memory.ids[by_slot], memory.slots[by_slot]
            return {
                "kvstow": lambda: job(direction),
                "memcpy": lambda: memory.plain(direction, memory.ids, memory.slots),
                "memcpy by slot": lambda: memory.plain(direction, *sorted_pairs),
                "numpy": lambda: memory.with_numpy(direction),
                "torch": lambda: memory.with_torch(direction),
                "two threads": lambda: on_two_threads(direction),
            }

        for direction in ("store", "load"):
            best = best_s(sides(direction), num_rounds)
            speeds = {name: memory.num_bytes / seconds / 1e9 for name, seconds in best.items()}
            memcpy = max(speeds.pop("memcpy"), speeds.pop("memcpy by slot"))
            rows.append(
                {
                    "fragment_kib": fragment_kib,
                    "direction": direction,
                    "memcpy": memcpy,
                    **speeds,
                    "ratio": speeds["kvstow"] / memcpy,
                }
            )
    memory.arena.close()
    return rows


def beside_compute(fragment_kib: int, mib: int, seconds: float) -> list[dict[str, float]]:
    """Return the GB/s of one and two copying threads beside compute, and the compute left."""
    memory = Memory(fragment_kib, mib)
    half = memory.num_blocks // 2
    torch.set_num_threads(torch.get_num_interop_threads())
    matrix, num_products = torch.rand(512, 512), 0

    def measure(parts: list[slice]) -> tuple[float, int]:
        stop, num_copied = threading.Event(), [0] * len(parts)

        def copy(at: int) -> None:
            while not stop.is_set():
                memory.native("store", parts[at])
                num_copied[at] += len(memory.ids[parts[at]]) * memory.layout.slot_bytes

        threads = [threading.Thread(target=copy, args=(at,)) for at in range(len(parts))]
        for thread in threads:
            thread.start()
        num_products, end = 0, time.perf_counter() + seconds
        while time.perf_counter() < end:
            torch.mm(matrix, matrix)
            num_products += 1
        num_bytes = sum(num_copied)
        stop.set()
        for thread in threads:
            thread.join()
        return num_bytes / seconds / 1e9, num_products

    rows: list[dict[str, float]] = []
    for parts in ([], [slice(None)], [slice(0, half), slice(half, None)]):
        speed, num = max(measure(parts) for _ in range(3))
        num_products = num_products or num
        rows.append({"threads": len(parts), "gb_per_s": speed, "compute": num / num_products})
    memory.arena.close()
    return rows


def fixed_cost(num_rounds: int) -> dict[str, float]:
    """Return the microseconds of a job of 32 small blocks, by direction and state of the caches."""
    device = np.ones((10 * NUM_BLOCKS, BLOCK_BYTES), np.uint8)
    layout = BlockLayout.from_arrays([device])
    other = np.ones(64 << 20, np.uint8)
    rng = np.random.default_rng(1)
    ids, slots = rng.permutation(10 * NUM_BLOCKS - 1)[:NUM_BLOCKS] + 1, np.arange(NUM_BLOCKS)
    taken: dict[str, list[float]] = {}
    with HostArena(NUM_BLOCKS, layout.slot_bytes) as arena, HostMover(layout, arena) as mover:
        jobs: dict[str, Callable[[], object]] = {
            "store": lambda: mover.store(ids, slots, after=READY).wait(),
            "load": lambda: mover.load(slots, ids, after=READY).wait(),
        }
        for state, num_jobs in (("warm", 200 * num_rounds), ("cold", 10 * num_rounds)):
            for _ in range(num_jobs):
                for name, job in jobs.items():
                    if state == "cold":
                        other.sum()
                    start = time.perf_counter()
                    job()
                    took_us = (time.perf_counter() - start) * 1e6
                    taken.setdefault(f"{name}, {state}", []).append(took_us)
    return {name: float(np.median(samples)) for name, samples in taken.items()}


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mib", type=int, default=192, help="bytes of a row (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="turns of a side (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    args = parser.parse_args()
    if debug_build:
        parser.error("this build of kvstow is not optimised: install it in release mode")
    torch.set_num_threads(1)
    costs = fixed_cost(args.rounds)
    rows = [row for kib in LAYERS for row in copies(kib, args.mib, args.rounds)]
    compute = beside_compute(64, args.mib, 1.0)
    if args.json:
        result = {"machine": machine(), "rows": rows, "compute": compute, "fixed_us": costs}
        print(json.dumps(result, indent=2))
    else:
        print(f"{machine()}; {args.mib} MiB in each row, GB/s")
        print("  fragment  direction   memcpy   kvstow    ratio    numpy    torch  two threads")
        for row in rows:
            print(
                f"  {row['fragment_kib']:>4} KiB  {row['direction']:9} {row['memcpy']:8.1f} "
                f"{row['kvstow']:8.1f} {row['ratio']:8.2f} {row['numpy']:8.1f} {row['torch']:8.1f} "
                f"{row['two threads']:12.1f}"
            )
        print("\n  beside compute: copying threads, GB/s, share of the compute that is left")
        for left in compute:
            print(f"  {left['threads']:>4} {left['gb_per_s']:10.1f} {left['compute']:10.2f}")
        print(f"\n  a job of {NUM_BLOCKS} blocks of {BLOCK_BYTES} bytes, median us")
        for name, cost_us in costs.items():
            print(f"  {name:12} {cost_us:8.1f}")
    is_fast = all(float(row["ratio"]) >= LEAST_RATIO for row in rows)
    is_cheap = all(cost_us <= MOST_US for name, cost_us in costs.items() if "warm" in name)
    return 0 if is_fast and is_cheap else 1


if __name__ == "__main__":
    sys.exit(main())
