"""How much do copies slow the model's work?

One thread keeps steps and copies going. It queues a few steps ahead, with an event after each, so
the device never waits for the host. A matrix product fills the device. A decode-like step is a
captured graph of small kernels, which wait for memory and for launches. Like an engine's it also
copies a few KiB to the device before the graph, and back after it.

Every kind of copies runs between two baselines without copies, several rounds in turn. So neither
the clock of the device nor its warmth favours one kind. A share of the step's time that copies add
is measured against the baselines beside it.
"""

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any, get_args

import numpy as np
from benches.gpu.moves import JOB_BLOCKS, Cache, Job
from benches.gpu.parts import Log, Row
from benches.gpu.rivals import zero_copy_pack

from kvstow.transfer.cuda.interface import Kernel

MATRIX = 4096
DECODE_LAYERS, DECODE_TOKENS = 24, 32
SMALL_INTS = 1024  # copied up and down in each decode-like step, as block tables and tokens are
WARM_S = 2.0
NUM_AHEAD = 8  # steps: longer than the submission of a job
NUM_ROUNDS = 5
# Of the protocol by which other connectors measure.
BACKGROUND_BYTES_PER_S = 2.5 * 2**30
BACKGROUND_BLOCKS = 64
TARGETED = "packed, 2.5 GiB/s"


class Nothing:
    """No copies."""

    copied_bytes = 0

    def advance(self) -> None:
        """Begin ended copies again; never blocks."""

    def close(self) -> None:
        """Wait for all copies."""


class Packed(Nothing):
    """Copies of the mover, one job each way at a time."""

    def __init__(
        self, cache: Cache, *, num_blocks: int = JOB_BLOCKS, bytes_per_s: float = float("inf")
    ) -> None:
        self._jobs = [
            Job(cache, way, shuffled=True, scattered=False, num_blocks=num_blocks, is_beside=True)
            for way in ("store", "load")
        ]
        self._job_bytes, self._bytes_per_s = num_blocks * cache.block_bytes, bytes_per_s
        self._begin_s = time.perf_counter()
        self._begun_bytes = self._job_bytes * len(self._jobs)
        self._tickets = [job.submit() for job in self._jobs]
        self._is_counted = [False] * len(self._jobs)

    def advance(self) -> None:
        due_bytes = self._bytes_per_s * (time.perf_counter() - self._begin_s)
        for i, ticket in enumerate(self._tickets):
            if not ticket.poll():
                continue
            if not self._is_counted[i]:
                self._is_counted[i] = True
                self.copied_bytes += self._job_bytes
            if self._begun_bytes <= due_bytes:
                self._tickets[i] = self._jobs[i].submit()
                self._is_counted[i] = False
                self._begun_bytes += self._job_bytes

    def close(self) -> None:
        for ticket in self._tickets:
            ticket.wait()


class ZeroCopy(Nothing):
    """Copies by kernels on pinned memory, one each way at a time."""

    def __init__(self, cache: Cache) -> None:
        runtime = self._runtime = cache.device.runtime
        self._packs = [zero_copy_pack(cache, way) for way in ("store", "load")]
        self._streams = [runtime.stream() for _ in self._packs]
        self._events = [runtime.event() for _ in self._packs]
        self._job_bytes = JOB_BLOCKS * cache.block_bytes

    def advance(self) -> None:
        runtime = self._runtime
        for i, kernel in enumerate(get_args(Kernel)):
            if runtime.is_done(self._events[i]):
                runtime.launch(kernel, self._packs[i][0], self._streams[i])
                runtime.record(self._events[i], self._streams[i])
                self.copied_bytes += self._job_bytes

    def close(self) -> None:
        for event in self._events:
            self._runtime.synchronize(event)
        for _, free in self._packs:
            free()


def measure(cache: Cache, num_steps: int, log: Log, warm_s: float = WARM_S) -> list[Row]:
    """Add a row for each loop and kind of copies, and return the rows."""
    loops = {"matrix products": _products(cache), "decode-like steps": _decode(cache)}
    kinds: dict[str, Callable[[], Nothing]] = {
        TARGETED: lambda: Packed(
            cache, num_blocks=BACKGROUND_BLOCKS, bytes_per_s=BACKGROUND_BYTES_PER_S
        ),
        "packed, flat out": lambda: Packed(cache),
        "zero-copy, flat out": lambda: ZeroCopy(cache),
    }
    rows = []
    for loop, step in loops.items():
        _warm(cache, step, warm_s)
        baselines = [_round(cache, step, Nothing, num_steps)]
        found: dict[str, list[Row]] = {name: [] for name in kinds}
        for _ in range(NUM_ROUNDS):
            for name, kind in kinds.items():
                row = _round(cache, step, kind, num_steps)
                baselines.append(_round(cache, step, Nothing, num_steps))
                for at in ("p50", "p99"):
                    beside = statistics.mean(line[f"{at}_ms"] for line in baselines[-2:])
                    row[f"{at}_slower_percent"] = 100 * (row[f"{at}_ms"] / beside - 1)
                found[name].append(row)
        shown = {"none": baselines} | found
        for name, rounds in shown.items():
            row = {"loop": loop, "copies": name}
            row |= {key: statistics.median(line[key] for line in rounds) for key in rounds[0]}
            row["p99_ms_of_rounds"] = [line["p99_ms"] for line in rounds]
            rows.append(row)
            log.add(row)
    return rows


def _warm(cache: Cache, step: Callable[[], None], warm_s: float) -> None:
    """Run steps until the device's clock and its memory have settled."""
    until_s = time.perf_counter() + warm_s
    while time.perf_counter() < until_s:
        step()
        cache.torch.cuda.synchronize()


def _round(
    cache: Cache, step: Callable[[], None], kind: Callable[[], Nothing], num_steps: int
) -> Row:
    """Return the times of steps beside a kind of copies, and the speed of the copies."""
    copier = kind()
    begin_s = time.perf_counter()
    p50_ms, p99_ms = _times(cache, step, copier, num_steps)
    wall_s = time.perf_counter() - begin_s
    copied_bytes = copier.copied_bytes
    copier.close()
    return {"p50_ms": p50_ms, "p99_ms": p99_ms, "gb_per_s": copied_bytes / 1e9 / wall_s}


def _times(
    cache: Cache, step: Callable[[], None], copier: Nothing, num_steps: int
) -> tuple[float, float]:
    """Return (p50, p99) of the steps in ms."""
    torch = cache.torch
    ticks = [torch.cuda.Event(enable_timing=True) for _ in range(num_steps + 1)]
    with torch.cuda.stream(cache.compute):
        for _ in range(NUM_AHEAD):
            step()
        ticks[0].record()
        num_queued = 0
        while num_queued < num_steps or not ticks[-1].query():
            if num_queued < num_steps and (
                num_queued < NUM_AHEAD or ticks[num_queued - NUM_AHEAD].query()
            ):
                step()
                num_queued += 1
                ticks[num_queued].record()
            copier.advance()
    times_ms = [begin.elapsed_time(end) for begin, end in pairwise(ticks)]
    p50_ms, p99_ms = np.percentile(times_ms, [50, 99]).tolist()
    return p50_ms, p99_ms


def _products(cache: Cache) -> Callable[[], None]:
    torch = cache.torch
    left, right = (
        torch.randn(MATRIX, MATRIX, device="cuda:0", dtype=torch.bfloat16) for _ in range(2)
    )
    out = torch.empty_like(left)

    def step() -> None:
        torch.mm(left, right, out=out)

    return step


def _decode(cache: Cache) -> Callable[[], None]:
    """Return a graph of layers between two small copies.

    A layer is a product of few rows with large weights, and small kernels.
    """
    torch = cache.torch
    weights = [
        torch.randn(MATRIX, MATRIX, device="cuda:0", dtype=torch.bfloat16) / MATRIX**0.5
        for _ in range(DECODE_LAYERS)
    ]
    state = torch.randn(DECODE_TOKENS, MATRIX, device="cuda:0", dtype=torch.bfloat16)
    up, down = (torch.zeros(SMALL_INTS, dtype=torch.int32).pin_memory() for _ in range(2))
    tables = torch.zeros(SMALL_INTS, dtype=torch.int32, device="cuda:0")

    def layers() -> None:
        hidden = state
        for weight in weights:
            hidden = torch.nn.functional.layer_norm(hidden, (MATRIX,))
            hidden = torch.nn.functional.silu(hidden @ weight) + hidden

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # as torch requires before a capture
        for _ in range(3):
            layers()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers()
    kept: tuple[Any, ...] = (graph, weights, state)  # keeps alive what the graph reads

    def step() -> None:
        tables.copy_(up, non_blocking=True)
        kept[0].replay()
        down.copy_(tables, non_blocking=True)

    return step
