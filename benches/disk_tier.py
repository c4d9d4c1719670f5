"""How fast is a slot file, beside vLLM's `fs` tier and beside a plain copy?

    .venv/bin/python -m benches.disk_tier FOLDER [--mib 512] [--rounds 5] [--json]

All sides move host slots with direct I/O, and read what they wrote. They take turns, and the best
turn of each counts. From the second turn on, kvstow and plain write over slots that have blocks, as
in a full slot file. The first fill is slower, and never the best turn. vLLM makes new files in each
turn. Processor time is that of the whole process, user and system.

- kvstow: jobs of 16 blocks, or of one, on a `SlotFile` with its four threads and its checksums.
- vllm: jobs of as many blocks for the functions of its `fs` tier, on its pool of 2 x 16 threads. A
  file holds one block. Nothing is checked. The slots lie in vLLM's own `SharedOffloadRegion`.
- vllm-arena: the same in the arena of kvstow, whose pages have 2 MiB where the system gives them.
  Direct I/O pins each page, so it costs less there. No condition names this side.
- plain: `os.pwritev` and `os.preadv` of as many blocks in one call, on four threads, in the places
  of kvstow's own file: files that lie elsewhere on a disk of a cloud differ by half in speed.
  Nothing is checked.
- plain-sum: the same with the checksum that kvstow takes of each block: what remains is kvstow's
  own cost. No condition names this side.

The last row opens a file with a million slots that all hold a block.

The conditions, for jobs of 16 blocks: kvstow writes at 1.5 of vLLM's speed and 0.9 of the plain
copy's, and reads at 0.9 of the faster one's. It takes a fifth of vLLM's processor time to write,
and no more to read. The million slots are open within 0.5 s.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvstow._core import row_digests
from kvstow.bench import machine
from kvstow.tiers import Fingerprint, SlotFile, TierBlocks
from kvstow.tiers.frame import FRAME, FRAME_BYTES, new_frames, seal, words_of
from kvstow.tiers.slot_index import HEADER_BYTES
from kvstow.tiers.tier import Checked
from kvstow.transfer import HostArena

NUM_THREADS: Final = 4
SLOTS: Final = "slots"
MODEL: Final = Fingerprint({"model": "bench"})
Jobs = list[range]


def hashes(num: int) -> list[bytes]:
    return [at.to_bytes(32, "little") for at in range(num)]


class Kvstow:
    """A slot file."""

    def __init__(self, folder: Path, arena: HostArena) -> None:
        num, size = arena.num_slots, arena.slot_bytes
        file = SlotFile(folder / SLOTS, SlotFile.bytes_for(num, size), num_threads=NUM_THREADS)
        self.tier = file.open(arena, MODEL)
        self.hashes = hashes(num)
        self.is_direct = self.tier.is_direct

    def write(self, jobs: Jobs) -> None:
        self._move(self.tier.put, jobs)

    def read(self, jobs: Jobs) -> None:
        self._move(self.tier.get, jobs)

    def _move(self, call: Callable[..., Any], jobs: Jobs) -> None:
        tickets = []
        for job in jobs:
            at = np.arange(job.start, job.stop)
            zeros = np.zeros(len(job), np.int64)
            blocks = TierBlocks(self.hashes[job.start : job.stop], zeros, None, at, 1)
            tickets.append(call(blocks, at))
        for ticket in tickets:
            ticket.wait()
            assert ticket.ok.all()

    def forget(self) -> None:
        """Do nothing: a slot is written again in its place."""

    def close(self) -> None:
        self.tier.close()


class VllmInArena:
    """The functions of vLLM's `fs` tier, on its threads."""

    def __init__(self, folder: Path, arena: HostArena) -> None:
        from vllm.v1.kv_offload.tiering.fs import io, thread_pool  # noqa: PLC0415 - slow to import

        self.io, self.size = io, arena.slot_bytes
        self.pool = thread_pool.DualQueueThreadPool(16, 16)
        self.view = arena.memory.data
        self.folder = folder / type(self).__name__
        # As the tier does: at most 4,096 folders of 256.
        self.paths = [
            str(self.folder / f"{at % 4096:03x}" / f"{at % 256:02x}_g0" / f"{at:064x}.bin")
            for at in range(arena.num_slots)
        ]
        self.is_direct = io.probe_o_direct(str(folder))

    def write(self, jobs: Jobs) -> None:
        self._move(self.io.batch_store_block, self.pool.enqueue_store, jobs)

    def read(self, jobs: Jobs) -> None:
        self._move(self.io.batch_load_block, self.pool.enqueue_load, jobs)

    def _move(self, call: Callable[..., Any], enqueue: Callable[..., Any], jobs: Jobs) -> None:
        for number, job in enumerate(jobs):
            paths = self.paths[job.start : job.stop]
            offsets = [at * self.size for at in job]

            def task(paths: list[str] = paths, offsets: list[int] = offsets) -> None:
                call(paths, self.view, offsets, self.size, self.is_direct)
                # The native call of vLLM 0.32 gives away a reference to None that it does not own.
                # Before Python 3.12, a process ends when None has none left.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(None))

            enqueue(number, 1, [task])
        self.pool.wait_idle()
        done = self.pool.get_finished()
        assert len(done) == len(jobs)
        assert all(ok for _, ok, _ in done)

    def forget(self) -> None:
        """Remove the files, because the tier does not write a block that is there."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        self.pool.shutdown()
        self.forget()


class Vllm(VllmInArena):
    """The same on host memory as vLLM's worker takes it."""

    def __init__(self, folder: Path, arena: HostArena) -> None:
        from vllm.v1.kv_offload.cpu.shared_offload_region import (  # noqa: PLC0415
            SharedOffloadRegion,
        )

        super().__init__(folder, arena)
        name, num = f"kvstow-bench-{os.getpid()}", arena.num_slots
        self.region = SharedOffloadRegion(name, num, None, self.size, self.size)
        self.view = self.region.create_kv_memoryview()
        np.frombuffer(self.view, np.uint8)[:] = arena.memory

    def close(self) -> None:
        super().close()
        del self.view
        self.region.cleanup()


class Plain:
    """Large calls, and nothing else, in the file of `Kvstow`, whose slots hold the same bytes."""

    def __init__(self, folder: Path, arena: HostArena) -> None:
        self.memory, self.size = arena.memory, arena.slot_bytes
        self.file = os.open(folder / SLOTS, os.O_RDWR | os.O_DIRECT)
        self.pool = ThreadPoolExecutor(NUM_THREADS)
        self.is_direct = True

    def write(self, jobs: Jobs) -> None:
        self._move(os.pwritev, jobs)

    def read(self, jobs: Jobs) -> None:
        self._move(os.preadv, jobs)

    def _move(self, call: Callable[..., int], jobs: Jobs) -> None:
        for _ in self.pool.map(partial(self._move_run, call), jobs):
            pass

    def _move_run(self, call: Callable[..., int], job: range) -> None:
        begin, end = job.start * self.size, job.stop * self.size
        assert call(self.file, [self.memory[begin:end]], begin) == end - begin

    def forget(self) -> None:
        """Do nothing: it writes in place."""

    def close(self) -> None:
        self.pool.shutdown()
        os.close(self.file)


class PlainSum(Plain):
    """The same with a checksum of each block: before a write, and after a read."""

    def _move_run(self, call: Callable[..., int], job: range) -> None:
        rows, at = self.memory.reshape(-1, self.size), np.arange(job.start, job.stop)
        if call is os.pwritev:
            row_digests(rows, at)
        super()._move_run(call, job)
        if call is os.preadv:
            row_digests(rows, at)


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measured(
    folder: Path, block_bytes: int, run: int, mib: int, rounds: int
) -> Iterator[dict[str, Any]]:
    """Yield a row for each side: GB/s and microseconds of processor time a block."""
    num = max(run, (mib << 20) // block_bytes // run * run)
    jobs = [range(at, at + run) for at in range(0, num, run)]
    with HostArena(num, block_bytes) as arena:
        # One block of noise for all is enough, because no side compresses.
        arena.memory.reshape(num, -1)[:] = np.random.default_rng(0).integers(
            0, 256, block_bytes, np.uint8
        )
        kinds: dict[str, Any] = {
            "kvstow": Kvstow,
            "vllm": Vllm,
            "vllm-arena": VllmInArena,
            "plain": Plain,
            "plain-sum": PlainSum,
        }
        sides = {name: kind(folder, arena) for name, kind in kinds.items()}
        best: dict[tuple[str, str], tuple[float, float]] = {}
        for _ in range(rounds):
            for name, side in sides.items():
                side.forget()
                for what in ("write", "read"):
                    begin_s, begin_cpu_s = time.perf_counter(), cpu_s()
                    getattr(side, what)(jobs)
                    wall_s, used_s = time.perf_counter() - begin_s, cpu_s() - begin_cpu_s
                    old = best.get((name, what), (float("inf"), float("inf")))
                    best[name, what] = (min(old[0], wall_s), min(old[1], used_s))
        for (name, what), (wall_s, used_s) in best.items():
            yield {
                "side": name,
                "what": what,
                "block_kib": block_bytes >> 10,
                "blocks_per_job": run,
                "gb_per_s": round(num * block_bytes / wall_s / 1e9, 3),
                "cpu_us_per_block": round(used_s / num * 1e6, 1),
                "direct": sides[name].is_direct,
            }
        for side in sides.values():
            side.close()
    for path in folder.iterdir():
        path.unlink()


def open_s(folder: Path, num_slots: int, rounds: int) -> float:
    """Return the seconds to open a file whose slots all hold a block, and to list them."""
    slot_bytes = 4096
    file = SlotFile(folder / SLOTS, SlotFile.bytes_for(num_slots, slot_bytes))
    with HostArena(1, slot_bytes) as arena:
        with file.open(arena, MODEL) as tier:
            context = tier._store.context
        blocks = Checked(
            hashes(num_slots), 32, np.zeros(num_slots, np.uint32), None, np.arange(num_slots), 1
        )
        frames = new_frames(blocks, context)
        seal(frames, np.zeros(num_slots, np.uint64))
        with (folder / f"{SLOTS}.index").open("r+b") as index:
            index.seek(HEADER_BYTES)
            index.write(words_of(frames).tobytes())
        times = []
        for _ in range(rounds):
            begin_s = time.perf_counter()
            with file.open(arena, MODEL) as tier:
                assert len(tier.records()) == num_slots
                times.append(time.perf_counter() - begin_s)
    for path in folder.iterdir():
        path.unlink()
    assert FRAME.itemsize == FRAME_BYTES
    return min(times)


def misses(rows: list[dict[str, Any]], seconds: float) -> list[str]:
    """Return the conditions that do not hold."""
    found = []
    for kib in sorted({row["block_kib"] for row in rows}):
        own = {
            (row["side"], row["what"]): row
            for row in rows
            if row["block_kib"] == kib and row["blocks_per_job"] > 1
        }
        speed = {key: row["gb_per_s"] for key, row in own.items()}
        cpu = {key: row["cpu_us_per_block"] for key, row in own.items()}
        write, read = ("kvstow", "write"), ("kvstow", "read")
        fastest = max(speed["vllm", "read"], speed["plain", "read"])
        conditions = {
            "writes at 1.5 of vLLM's speed": speed[write] >= 1.5 * speed["vllm", "write"],
            "writes at 0.9 of a plain copy's speed": speed[write] >= 0.9 * speed["plain", "write"],
            "reads at 0.9 of the faster one's speed": speed[read] >= 0.9 * fastest,
            "writes with a fifth of vLLM's CPU": cpu[write] <= cpu["vllm", "write"] / 5,
            "reads with no more than vLLM's CPU": cpu[read] <= cpu["vllm", "read"],
        }
        found += [f"{kib} KiB: {name}" for name, holds in conditions.items() if not holds]
    if seconds > 0.5:
        found.append("opens a million slots within 0.5 s")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="an existing folder on the disk")
    parser.add_argument("--mib", type=int, default=512, help="bytes of a turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slots", type=int, default=1_000_000, help="slots of the last row")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as made:
        folder = Path(made)
        rows = [
            row
            for block_bytes in (128 << 10, 2 << 20)
            for run in (16, 1)
            for row in measured(folder, block_bytes, run, options.mib, options.rounds)
        ]
        seconds = open_s(folder, options.slots, options.rounds)
    missed = misses(rows, seconds)
    if options.json:
        result = {
            "machine": machine(),
            "rows": rows,
            "open": {"slots": options.slots, "seconds": round(seconds, 3)},
            "missed": missed,
        }
        print(json.dumps(result, indent=2))
        return bool(missed)
    print("block KiB  blocks/job  what   side         GB/s    CPU us/block")
    for row in rows:
        print(
            f"{row['block_kib']:9}  {row['blocks_per_job']:10}  {row['what']:5}  {row['side']:10}  "
            f"{row['gb_per_s']:5.2f}   {row['cpu_us_per_block']:8.1f}"
            f"{'' if row['direct'] else '   through the page cache'}"
        )
    print(f"open {options.slots:,} slots: {seconds:.3f} s")
    for name in missed:
        print("MISSED:", name)
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
