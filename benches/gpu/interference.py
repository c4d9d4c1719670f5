"""How much do copies at full speed, both ways, slow the model's work?

One thread keeps both going. It queues steps well ahead, with an event after each, and begins a copy
again when it ends. So the device never waits for the host. A matrix product fills the device. A
decode-like step, a captured graph of small kernels, waits for memory and for launches.
"""

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any, get_args

import numpy as np
from benches.gpu.moves import JOB_BLOCKS, Cache, Job
from benches.gpu.rivals import zero_copy_pack

from kvstow.transfer.cuda.interface import Kernel

MATRIX = 4096
DECODE_LAYERS, DECODE_TOKENS = 24, 32
NUM_WARM, NUM_AHEAD = 20, 64  # steps: some ms of work, far longer than the submission of a job


class Nothing:
    """No copies."""

    num_jobs = 0

    def advance(self) -> None:
        """Begin ended copies again; never blocks."""

    def close(self) -> None:
        """Wait for all copies."""


class Packed(Nothing):
    """Copies of the mover, one job each way at a time."""

    def __init__(self, cache: Cache) -> None:
        self._jobs = [Job(cache, way, shuffled=True, scattered=False) for way in ("store", "load")]
        self._tickets = [job.submit() for job in self._jobs]

    def advance(self) -> None:
        for i, ticket in enumerate(self._tickets):
            if ticket.poll():
                self._tickets[i] = self._jobs[i].submit()
                self.num_jobs += 1

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

    def advance(self) -> None:
        runtime = self._runtime
        for i, kernel in enumerate(get_args(Kernel)):
            if runtime.is_done(self._events[i]):
                runtime.launch(kernel, self._packs[i][0], self._streams[i])
                runtime.record(self._events[i], self._streams[i])
                self.num_jobs += 1

    def close(self) -> None:
        for event in self._events:
            self._runtime.synchronize(event)
        for _, free in self._packs:
            free()


def measured(cache: Cache, num_steps: int) -> list[dict[str, Any]]:
    """Return a row for each loop and kind of copies."""
    rows = []
    loops = {"matrix products": _products(cache), "decode-like steps": _decode(cache)}
    kinds: dict[str, Callable[[], Nothing]] = {
        "none": Nothing,
        "packed": lambda: Packed(cache),
        "zero-copy": lambda: ZeroCopy(cache),
    }
    for loop, step in loops.items():
        alone: tuple[float, float] | None = None
        for name, kind in kinds.items():
            copier = kind()
            begin_s = time.perf_counter()
            p50_ms, p99_ms = _times(cache, step, copier, num_steps)
            copied = copier.num_jobs * JOB_BLOCKS * cache.block_bytes
            wall_s = time.perf_counter() - begin_s
            copier.close()
            alone = alone or (p50_ms, p99_ms)
            rows.append(
                {
                    "loop": loop,
                    "copies": name,
                    "gb_per_s": copied / 1e9 / wall_s,
                    "p50_ms": p50_ms,
                    "p99_ms": p99_ms,
                    "p50_slower_percent": 100 * (p50_ms / alone[0] - 1),
                    "p99_slower_percent": 100 * (p99_ms / alone[1] - 1),
                }
            )
    return rows


def _times(
    cache: Cache, step: Callable[[], None], copier: Nothing, num_steps: int
) -> tuple[float, float]:
    """Return (p50, p99) of the steps in ms."""
    torch = cache.torch
    stream = torch.cuda.Stream()
    ticks = [torch.cuda.Event(enable_timing=True) for _ in range(num_steps + 1)]
    with torch.cuda.stream(stream):
        for _ in range(NUM_WARM):
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
    """Return a graph of layers: two products of few rows with large weights, and small kernels."""
    torch = cache.torch
    weights = [
        torch.randn(MATRIX, MATRIX, device="cuda:0", dtype=torch.bfloat16) / MATRIX**0.5
        for _ in range(DECODE_LAYERS)
    ]
    state = torch.randn(DECODE_TOKENS, MATRIX, device="cuda:0", dtype=torch.bfloat16)

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
    kept = (graph, weights, state)  # keeps alive what the graph reads

    def step() -> None:
        kept[0].replay()

    return step
