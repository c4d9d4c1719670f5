"""How long does a prompt take to its first token: computed, from host memory, and from the disk?

    .venv/bin/python -m benches.ttft [--turns N]

vLLM's real CPU engine answers one prompt again and again, in this process and on one thread. Before
each answer, other prompts push it out of the device's pool, and then out of the host tier too:

- computed: the request reads no cache.
- host: the device has lost the prompt, and every block is loaded from host memory.
- disk: the host has lost it too. Every block is read from the slot file, checked, and loaded.

The three take turns, and the medians of the turns count. Each answer must be that of an engine
without a connector. Direct I/O bypasses the page cache, where the file system allows it; the first
line says whether it does.

A model on a GPU computes far more tokens per second than a core, and its disks and links are faster
as well. So take the ratios of this table as those of this machine.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import vllm
from tests.vllm import models
from tests.vllm.engine import (
    BLOCK_SIZE,
    TOLERANCE,
    Answer,
    Engine,
    answer,
    difference,
    greedy,
    prompts,
)
from tests.vllm.halves_below import folder_on_disk

import kvstow
from kvstow._core import debug_build
from kvstow.bench import machine
from kvstow.vllm.below.disk_worker import DiskWorker

LENGTHS = (1_000, 3_000)
SOURCES = ("computed", "host", "disk")
# 21 million parameters, and 8 KiB of KV per token.
MODEL = models.LLAMA | {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_hidden_layers": 8,
}
# Blocks of a device with room for one prompt, and of a host with room for four.
NUM_DEVICE = max(LENGTHS) // BLOCK_SIZE + 8
NUM_HOST = 4 * (max(LENGTHS) // BLOCK_SIZE + 1)
NUM_OTHERS = 6


@contextmanager
def running(folder: Path, disk: Path | None) -> Iterator[Engine]:
    options = None
    if disk is not None:
        options = {
            "num_cpu_blocks": NUM_HOST,
            "disk_path": str(disk),
            "disk_bytes_to_use": "1GiB",
            "promote_timeout_s": 60,
        }
    engine = Engine(
        folder,
        num_blocks=NUM_DEVICE,
        options=options,
        max_model_len=max(LENGTHS) + BLOCK_SIZE,
        max_num_batched_tokens=512,
    )
    try:
        yield engine
    finally:
        engine.close()


class Turns:
    """The answers to one prompt, from each source in turn."""

    def __init__(self, engine: Engine, num_tokens: int, expected: Answer) -> None:
        self.engine, self.expected = engine, expected
        (self.prompt,) = prompts(1, num_tokens, num_tokens)
        self.others = prompts(NUM_OTHERS, max(LENGTHS), 1)
        self.num_blocks = (num_tokens - 1) // BLOCK_SIZE
        self.seconds: dict[str, list[float]] = {source: [] for source in SOURCES}

    def run(self, num_turns: int) -> None:
        for turn in range(num_turns + 1):
            for at in range(len(SOURCES)):
                source = SOURCES[(at + turn) % len(SOURCES)]
                seconds = self._answer(source)
                if turn:  # the first one warms up
                    self.seconds[source].append(seconds)

    def _answer(self, source: str) -> float:
        """Push the prompt out of what lies above its source; return the time to its answer."""
        engine = self.engine
        engine.generate([self.prompt], max_tokens=1)
        engine.settle()
        for other in self.others[: NUM_OTHERS if source == "disk" else 2]:
            engine.generate([other], max_tokens=1)
            engine.settle()
        names = ("loaded_blocks", "promoted_blocks")
        before = engine.half.stats()
        begin = time.perf_counter()
        [output] = engine.llm.generate(
            [{"prompt_token_ids": self.prompt}],
            greedy(1, skip_reading_prefix_cache=source == "computed"),
            use_tqdm=False,
        )
        seconds = time.perf_counter() - begin
        after = engine.half.stats()
        moved = tuple(after[name] - before[name] for name in names)
        loaded = 0 if source == "computed" else self.num_blocks
        if moved != (loaded, self.num_blocks if source == "disk" else 0):
            sys.exit(f"{source}: {moved} blocks were loaded and promoted, not {self.num_blocks}")
        if difference([answer(output)], [self.expected]) > TOLERANCE:
            sys.exit(f"{source}: the answer differs from that of an engine without a connector")
        return seconds

    def row(self) -> tuple[str, ...]:
        medians = {source: statistics.median(times) for source, times in self.seconds.items()}
        cells = [f"{len(self.prompt):,} tokens"]
        for source, times in self.seconds.items():
            cells.append(f"{1e3 * medians[source]:.0f} ms (least {1e3 * min(times):.0f})")
        cells += [f"{medians['computed'] / medians[source]:.1f}x" for source in ("host", "disk")]
        return tuple(cells)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--turns", type=int, default=9, help="turns of each source")
    num_turns = parser.parse_args().turns
    if debug_build:
        parser.error("this build of kvstow is not optimised: build it in release mode")
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as made, folder_on_disk() as disk:
        folder = models.make_model(MODEL, Path(made))
        with running(folder, None) as engine:
            asked = [prompts(1, length, length) for length in LENGTHS]
            expected = [engine.generate(each, max_tokens=1)[0] for each in asked]
        with running(folder, disk) as engine:
            worker = engine.worker.below
            assert isinstance(worker, DiskWorker), "the engine has a disk"
            not_direct, slot_bytes = worker.file.not_direct, worker.tier.slot_bytes
            sides = [Turns(engine, *each) for each in zip(LENGTHS, expected, strict=True)]
            for side in sides:
                side.run(num_turns)
    print(
        f"kvstow {kvstow.__version__} in vLLM {vllm.__version__}, CPU engine, Python "
        f"{platform.python_version()}, {machine()} (load {before:.1f} to {os.getloadavg()[0]:.1f})"
        f"\ndirect I/O: {not_direct or 'yes'}; {slot_bytes >> 10} KiB a block of {BLOCK_SIZE} "
        f"tokens; medians of {num_turns} turns\n"
    )
    head = ("prompt", *SOURCES, "computed / host", "computed / disk")
    rows = [head, *(side.row() for side in sides)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)))
    is_slower = any(
        statistics.median(side.seconds["computed"]) <= statistics.median(side.seconds[source])
        for side in sides
        for source in ("host", "disk")
    )
    return int(is_slower)


if __name__ == "__main__":
    sys.exit(main())
