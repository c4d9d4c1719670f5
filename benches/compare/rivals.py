"""How does kvstow's accounting compare with other programs' in large, shuffled, full pools?

Each side serves the same prompts in a pool of the same size, and all sides take turns. The table
has nanoseconds a block, as medians of rounds. A round is 8,192 blocks (fewer in a small pool): one
long prompt, or many of 64 blocks. The columns from vLLM on go through Python, as engines do. Those
before it are called from Rust (`benches/rivals/`). In Python the time is the thread's processor
time. In Rust it is wall-clock time, so run this on an idle machine.

- floor: random cache lines that any hash table over blocks must touch, prefetched, and nothing
  else (`benches/common/floor.rs`).
- kvbm-logical and mistral.rs: their crates. kvbm-logical has no lookup without references, so its
  lookup takes and drops them.
- vLLM: its `KVCacheManager`. It takes request objects and returns block objects.
- SGLang: the Rust tree of its wheel, alone. It compares tokens and needs no hashes. The last line
  says what these cost the others. It keeps one node for each prompt here, so a free changes one
  number. Its lookup returns a node, and its admission also collects the indices. There is no
  allocator: the tree gets the evicted indices again.
- kvstow: `BlockLedger`. "+ add" includes `BlockLedger.add` of the `Hashes` that `hash_tokens`
  returns, "+ list" that of a list of bytes.

The work of a row:

- lookup: find the blocks of a cached prompt that was freed a quarter of the pool's blocks ago.
- evict, publish: allocate a prompt's blocks, all of which hold other keys, and publish them.
- clean, publish: the same in a pool without keys.
- free: drop a prompt's references.
- admit a hit: look up a cached prompt and take a reference on each block.

Run `make bench-rivals`, which installs the rivals into `.rivals/` and then calls this. The table
leaves out a side that is not there, and says why.
"""

import argparse
import functools
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one core for each side

import kvstow
from kvstow._core import debug_build

from .report import machine
from .rival_sides import (
    FOLDER,
    NUM_ROUND_BLOCKS,
    Clock,
    KvstowSide,
    Prompts,
    SglangSide,
    Shape,
    Side,
    SideMissing,
    VllmSide,
)

OPERATIONS = ("lookup", "evict, publish", "clean, publish", "free", "admit a hit")
COLUMNS = (
    "floor", "kvstow core", "kvbm-logical", "mistral.rs",
    "vLLM", "SGLang", "kvstow", "+ add", "+ list",
)  # fmt: skip
PROGRAM = FOLDER / "target" / "release" / "kvstow-rivals"

SHAPES = [
    Shape(name, num_blocks, num_prompt_blocks, is_shuffled)
    for name, num_blocks, is_shuffled in (
        ("8k ordered", 1 << 13, False),
        ("32k shuffled", 1 << 15, True),
        ("256k shuffled", 1 << 18, True),
        ("1M shuffled", 1 << 20, True),
    )
    for num_prompt_blocks in (8_192, 64)
]

Times = defaultdict[tuple[str, str], list[float]]


@dataclass
class Schedule:
    """The order of requests. `Schedule` in `benches/rivals/src/main.rs` has the same."""

    shape: Shape
    num_published: int = 0

    def __post_init__(self) -> None:
        shape = self.shape
        self.num_resident = shape.num_blocks // shape.num_prompt_blocks
        most = min(NUM_ROUND_BLOCKS // shape.num_prompt_blocks, self.num_resident // 4)
        self.num_per_round = max(most, 1)
        self.num_held = self.num_resident // 4
        self.num_prompts = 2 * (self.num_resident + self.num_per_round)

    @property
    def is_full(self) -> bool:
        return self.num_published >= self.num_resident

    @property
    def num_fill_rounds(self) -> int:
        return self.num_resident // self.num_per_round

    def round(self, sides: Sequence[Side], times: Times) -> None:
        start = self.num_published
        new = [at % self.num_prompts for at in range(start, start + self.num_per_round)]
        old = [(at - 2 * self.num_held) % self.num_prompts for at in new]
        num_free = min(max(start + len(new) - self.num_held, 0), len(new))
        num_blocks = len(new) * self.shape.num_prompt_blocks
        for side in sides:
            clock = _clock(times, side.name, num_blocks)
            side.publish(new, "evict, publish" if self.is_full else "clean, publish", clock)
            side.free(num_free, clock if self.is_full else _untimed)
            if self.is_full:
                side.look_up(old, clock)
                side.admit(old, clock)
        self.num_published += self.num_per_round


def _clock(times: Times, column: str, num_blocks: int) -> Clock:
    """Return a function that calls, and adds the nanoseconds a block to the samples of a column."""

    def clock(what: str, call: Callable[[], object]) -> None:
        begin = time.thread_time_ns()
        call()
        times[column, what].append((time.thread_time_ns() - begin) / num_blocks)

    return clock


def _untimed(_what: str, call: Callable[[], object]) -> None:
    call()


class Program:
    """The sides in Rust, in a process of their own."""

    def __init__(self, shape: Shape) -> None:
        if not PROGRAM.exists():
            raise SideMissing("kvstow core, floor, kvbm-logical, mistral.rs", "not built")
        order = "shuffled" if shape.is_shuffled else "ordered"
        self.process = subprocess.Popen(
            [PROGRAM, str(shape.num_blocks), str(shape.num_prompt_blocks), order],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate()

    def call(self, line: str, times: Times) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        while answer := self.process.stdout.readline().strip():
            name, _, figures = answer.partition(": ")
            whats = (OPERATIONS[2], OPERATIONS[1], OPERATIONS[3], OPERATIONS[0], OPERATIONS[4])
            for what, figure in zip(whats, figures.split(), strict=True):
                if figure != "-":
                    times[name, what].append(float(figure))
        if self.process.poll() is not None:
            sys.exit(f"{PROGRAM.name} has ended: its message is above")


def measure(shape: Shape, num_rounds: int) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Return medians by column and operation, and the sides that are missing."""
    schedule = Schedule(shape)
    missing: list[str] = []
    sides: list[Side] = []
    times: Times = defaultdict(list)
    prompts = Prompts(shape, schedule.num_prompts)
    kinds: list[Callable[[Prompts], Side]] = [VllmSide, SglangSide, KvstowSide]
    with ExitStack() as stack:
        program = None
        try:
            program = stack.enter_context(Program(shape))
        except SideMissing as error:
            missing.append(str(error))
        for kind in kinds:
            try:
                sides.append(kind(prompts))
            except SideMissing as error:
                missing.append(str(error))
        gc.collect()
        gc.freeze()

        def episode(num_full_rounds: int, times: Times) -> None:
            """Fill the pools, serve, and empty them."""
            for _ in range(schedule.num_fill_rounds + num_full_rounds):
                schedule.round(sides, times)
                if program is not None:
                    program.call("round", times)
            for side in sides:
                side.reset()
            if program is not None:
                program.call("reset", times)
            schedule.num_published = 0

        episode(0, defaultdict(list))  # the first use of a page takes long, once
        episode(max(num_rounds, schedule.num_fill_rounds // 4), times)
        for _ in range(-(-num_rounds // schedule.num_fill_rounds) - 1):
            episode(max(num_rounds // 4, 1), times)
        gc.unfreeze()
    for name, first in (("+ add", "add"), ("+ list", "add a list")):
        for what in OPERATIONS:
            num_kvstow = times.get(("kvstow", what), [])
            added = times.get(("kvstow", first), [])
            if num_kvstow and added and what != "free":
                more = statistics.median(added)
                times[name, what] = [each + more for each in num_kvstow]
    medians = {
        column: {
            what: statistics.median(times[column, what])
            for what in OPERATIONS
            if times.get((column, what))
        }
        for column in COLUMNS
    }
    return medians, missing


def hashing(num_turns: int) -> dict[str, float]:
    """Return nanoseconds to hash a block of 16 tokens, from a list of ints."""
    tokens = list(range(100_000, 100_000 + 16 * NUM_ROUND_BLOCKS))
    found = {}
    for algorithm in ("sha256", "sha256_cbor", "xxhash_cbor"):
        call = functools.partial(kvstow.hash_tokens, tokens, 16, algorithm=algorithm)
        samples = []
        for _ in range(num_turns):
            begin = time.thread_time_ns()
            call()
            samples.append((time.thread_time_ns() - begin) / NUM_ROUND_BLOCKS)
        found[algorithm] = statistics.median(samples)
    return found


def table(shape: Shape, medians: dict[str, dict[str, float]]) -> str:
    lines = [
        f"pool of {shape.name}, full, prompts of {shape.num_prompt_blocks:,} blocks",
        " " * 16 + " ".join(f"{column:>12}" for column in COLUMNS),
    ]
    for what in OPERATIONS:
        figures = [medians[column].get(what) for column in COLUMNS]
        cells = ["" if figure is None else _three_digits(figure) for figure in figures]
        lines.append((f"{what:16}" + " ".join(f"{cell:>12}" for cell in cells)).rstrip())
    return "\n".join(lines)


def _three_digits(figure: float) -> str:
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--rounds", type=int, default=32, help="at least (default %(default)s)")
    parser.add_argument("--only", help="measure only pools whose name has this text")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds is {args.rounds}: pass at least 1")
    if debug_build:
        parser.error("this build of kvstow is not optimised: install it in release mode")
    head = f"Python {platform.python_version()}, {machine()}, load {os.getloadavg()[0]:.1f}"
    results = []
    missing: list[str] = []
    if not args.json:
        print(f"nanoseconds a block, medians; {head}", flush=True)
    for shape in SHAPES:
        if args.only and args.only not in shape.name:
            continue
        medians, missing = measure(shape, args.rounds)
        results.append({"pool": shape.name, "prompt": shape.num_prompt_blocks, "ns": medians})
        if not args.json:
            print(f"\n{table(shape, medians)}", flush=True)
    hashes = hashing(args.rounds)
    if args.json:
        print(json.dumps({"machine": head, "rows": results, "hash": hashes, "missing": missing}))
        return
    costs = ", ".join(f"{_three_digits(cost)} ({name})" for name, cost in hashes.items())
    print(f"\nhash_tokens of a list, once for a prompt: {costs}")
    for line in missing:
        print(f"left out: {line}")


if __name__ == "__main__":
    main()
