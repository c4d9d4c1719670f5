"""The rivals of the mover: a copy call per fragment, batched calls, and kernels on pinned memory.

The batched calls run in a separate process (`benches.gpu.batch`), because they crash on some
drivers.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
from benches.gpu.device import seconds
from benches.gpu.moves import JOB_BLOCKS, Cache
from benches.gpu.parts import Log, Row

from kvstow.transfer.cuda.interface import Copies, Kernel, Pack
from kvstow.transfer.cuda.kernels import MAX_BLOCKS, chunk_table, ids_for_launch

BATCH_LIMIT_S = 90
NAMES = {
    "call-per-fragment": "cudaMemcpyAsync per fragment",
    "batched": "cuMemcpyBatchAsync",
    "zero-copy": "kernel on pinned memory",
}


def measure(cache: Cache, num_turns: int, log: Log) -> list[Row]:
    """Add and return rows of the calls per fragment and of the zero-copy kernel."""
    rows = []
    for direction in ("store", "load"):
        rows.append(
            _row(cache, "call-per-fragment", direction, *_per_fragment(cache, direction), 3)
        )
        rows.append(_row(cache, "zero-copy", direction, *_zero_copy(cache, direction), num_turns))
    log.add(*rows)
    return rows


def batched(sizes_kib: Iterable[int], num_turns: int) -> list[dict[str, Any]]:
    """Return rows of the driver's batched copies, those before a crash if it crashes."""
    command = [sys.executable, "-m", "benches.gpu.batch", str(num_turns), *map(str, sizes_kib)]
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=BATCH_LIMIT_S, check=False
        )
        output, why = ended.stdout, f"ended with status {ended.returncode}: {ended.stderr[-300:]}"
        is_whole = ended.returncode == 0
    except subprocess.TimeoutExpired as late:
        printed: object = late.stdout  # bytes, even with text=True
        output = printed.decode() if isinstance(printed, bytes) else str(printed or "")
        why, is_whole = f"was still running after {BATCH_LIMIT_S} s", False
    rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    if not is_whole:
        rows.append({"rival": "batched", "failed": f"the process of the batched copies {why}"})
    return rows


def _row(
    cache: Cache,
    rival: str,
    direction: str,
    work: Callable[[], None],
    close: Callable[[], None],
    num_turns: int,
) -> dict[str, Any]:
    wall_s = seconds(work, num_turns)
    close()
    return {
        "part": "rivals",
        "rival": rival,
        "fragment_kib": cache.fragment_bytes >> 10,
        "direction": direction,
        "gb_per_s": JOB_BLOCKS * cache.block_bytes / 1e9 / wall_s,
    }


def fragments(cache: Cache, direction: str) -> tuple[list[int], list[int]]:
    """Return the addresses (on the host, on the device) of every fragment of a job."""
    ids = np.array(cache.ids(direction, shuffled=True), dtype=np.int64)
    slots = np.array(cache.slots(direction, scattered=False), dtype=np.int64)
    host = cache.arena.base_address + slots * cache.arena.slot_stride_bytes
    regions, offsets = cache.layout.regions, cache.layout.offsets
    ends = (
        [host + offset for offset in offsets],
        [region.base_address + ids * region.block_stride_bytes for region in regions],
    )
    on_host, on_device = (np.concatenate(part).tolist() for part in ends)
    return on_host, on_device


def _per_fragment(cache: Cache, direction: str) -> tuple[Callable[[], None], Callable[[], None]]:
    runtime, size = cache.device.runtime, cache.fragment_bytes
    stream, event = runtime.stream(), runtime.event()
    host, device = fragments(cache, direction)
    to, origin = (host, device) if direction == "store" else (device, host)
    runs = [(a, b, 1) for a, b in zip(to, origin, strict=True)]
    copies = Copies(runs, size, size, size, to_host=direction == "store")

    def work() -> None:
        runtime.copy(copies, stream)
        runtime.record(event, stream)
        runtime.synchronize(event)

    return work, lambda: None


def _zero_copy(cache: Cache, direction: str) -> tuple[Callable[[], None], Callable[[], None]]:
    runtime = cache.device.runtime
    stream, event = runtime.stream(), runtime.event()
    pack, close = zero_copy_pack(cache, direction)
    kernel: Kernel = "gather" if direction == "store" else "scatter"

    def work() -> None:
        runtime.launch(kernel, pack, stream)
        runtime.record(event, stream)
        runtime.synchronize(event)

    return work, close


def zero_copy_pack(cache: Cache, direction: str) -> tuple[Pack, Callable[[], None]]:
    """Return the kernels' arguments with the pinned arena as staging, and what frees them."""
    runtime, arena = cache.device.runtime, cache.arena
    api = cache.device.cupy.cuda.runtime
    table = chunk_table(cache.layout.regions, cache.layout.offsets)
    chunks = runtime.allocate(table.nbytes)
    runtime.upload(chunks, table.tobytes())
    ids = np.zeros(MAX_BLOCKS, dtype=np.int32)
    ids[:JOB_BLOCKS] = cache.ids(direction, shuffled=True)
    first = cache.slots(direction, scattered=False)[0]
    mapped = int(api.pointerGetAttributes(arena.base_address).devicePointer)
    pack = Pack(
        chunks=chunks,
        num_chunks=len(table),
        block_ids=ids_for_launch(ids),
        num_blocks=JOB_BLOCKS,
        staging=mapped + first * arena.slot_stride_bytes,
        staging_stride_bytes=arena.slot_stride_bytes,
        checksums=0,
    )

    return pack, partial(runtime.free, chunks)


def speeds(rows: Sequence[dict[str, Any]], rival: str, direction: str) -> dict[int, float]:
    """GB/s by KiB of a fragment."""
    return {
        row["fragment_kib"]: row["gb_per_s"]
        for row in rows
        if row["rival"] == rival and row.get("direction") == direction  # a failure has none
    }
