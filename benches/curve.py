"""What does a curve cost, and how far is a sampled one off?

    .venv/bin/python -m benches.curve [--block-size TOKENS] [--chain] TRACE...

`--chain` is for traces whose ids name passages. A name with "ragpulse" needs no option.

Three questions:

1. How long does an exact curve of a whole trace take, for all capacities? Required: 5 s. How long
   does one of ten million lookups take? Required: 30 s and 1 GiB for the whole process.
2. How large is the error of a curve that watches at most 1,000, 8,000 or 32,000 keys? 20 seeds, 40
   capacities from 5 % to 200 % of the distinct blocks. Required: 1 point of hit ratio at 32,000.
3. What does a looked-up block cost an online curve, beside the lookup in the host tier itself? And
   what does it cost a connector that observes, which looks each block up once and makes it recent
   three times?

Times are of the processor. Every id of a trace is a block, partial tails included.
"""

import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import accumulate, chain
from pathlib import Path
from statistics import median

import numpy as np
from benches.traces import add_form, names_passages, parser, run

import kvstow
from kvstow import HitCurve, clairvoyant_hits
from kvstow.replay import read_trace

SEEDS = 20
MAX_KEYS = (1_000, 8_000, 32_000)
NUM_CAPACITIES = 40
REQUIRED_POINTS = 1.0
REQUIRED_SECONDS = 5.0
LARGE_LOOKUPS = 10_000_000
LARGE_SECONDS, LARGE_GIB = 30.0, 1.0
ONLINE_BYTES = 32 * 2**20


class Requests:
    """The prompts of a trace as digests and as chained 64-bit keys."""

    def __init__(self, path: Path, block_size: int, chains: bool) -> None:
        trace = read_trace(path, chain=names_passages(path, chains), block_size=block_size)
        ids = [request.trace_ids for request in trace.requests]
        self.prompts = [kvstow.hash_tokens(prompt, 1, algorithm="xxhash_cbor") for prompt in ids]
        self.name = path.name
        keys = (int.from_bytes(digest[:8]) for digest in chain.from_iterable(self.prompts))
        self.keys = np.fromiter(keys, dtype=np.uint64)
        self.offsets = np.array(list(accumulate(map(len, ids), initial=0)))


def exact_curve(requests: Requests) -> Iterator[str]:
    """Print what the exact curve takes; yields what does not hold."""
    start = time.process_time()
    curve = HitCurve()
    curve.add_all(requests.keys, requests.offsets)
    curve.hits(np.arange(curve.largest_capacity + 1))
    seconds = time.process_time() - start
    start = time.process_time()
    clairvoyant_hits(
        requests.keys, requests.offsets, np.linspace(1, curve.num_unique, 100, dtype=int)
    )
    bound_seconds = time.process_time() - start
    print(
        f"{requests.name}: {curve.num_requests:,} requests, {curve.num_lookups:,} lookups, "
        f"{curve.num_unique:,} distinct blocks: {seconds:.2f} s for all capacities, "
        f"{curve.memory_bytes / 2**20:.1f} MiB; the clairvoyant bound at 100 capacities: "
        f"{bound_seconds:.2f} s"
    )
    if seconds > REQUIRED_SECONDS:
        yield f"{requests.name}: {seconds:.1f} s"


def sampled_errors(requests: Requests) -> Iterator[str]:
    """Print a row per bound; yields what does not hold."""
    exact = HitCurve()
    exact.add_all(requests.keys, requests.offsets)
    shares = np.linspace(0.05, 2, NUM_CAPACITIES)
    capacities = (shares * exact.num_unique).astype(np.int64)
    expected = exact.hits(capacities)
    for max_keys in MAX_KEYS:
        points, reported, rates = [], [], []
        for seed in range(SEEDS):
            curve = HitCurve(max_keys=max_keys, seed=seed)
            curve.add_all(requests.keys, requests.offsets)
            points.append(np.abs(curve.hits(capacities) - expected) / curve.num_lookups * 100)
            reported.append(curve.errors(capacities) * 100)
            rates.append(1 / curve.rate)
        worst = float(np.max(points))
        print(
            f"{max_keys:10,} {f'1/{median(rates):.0f}':>8} {np.median(points):9.2f} "
            f"{np.quantile(points, 0.95):9.2f} {worst:9.2f} {np.median(reported):10.2f}"
        )
        if max_keys == MAX_KEYS[-1] and worst > REQUIRED_POINTS:
            yield f"{requests.name}: {worst:.2f} points with {max_keys:,} keys"


def online_cost(requests: Requests) -> None:
    """Print ns per looked-up block: of the tier's lookup alone, and of each curve's `add`."""
    num_blocks = len(requests.keys)
    tier = kvstow.OffloadScheduler(100_000, [kvstow.FullAttention(block_size=1)])
    seconds = 0.0
    blocks = np.arange(1, 1 + max(map(len, requests.prompts)), dtype=np.int32)
    for hashes in requests.prompts:
        start = time.process_time()
        tier.add("request", hashes)
        found = tier.lookup("request", 0, len(hashes)) or 0
        seconds += time.process_time() - start
        if found:
            tier.complete(tier.load("request", found, [blocks[:found]]).job_id)
        job = tier.store(["request"], [len(hashes)], blocks[: len(hashes)], [0, len(hashes)])
        if job is not None:
            tier.complete(job.job_id)
        tier.finish("request")
    cells = [f"{seconds / num_blocks * 1e9:12.0f}"]
    for bounds in ({"max_bytes": ONLINE_BYTES}, {"max_keys": 32_000}, {"max_keys": 1_000}):
        curve = HitCurve(**bounds)
        start = time.process_time()
        for hashes in requests.prompts:
            curve.add(hashes)
        cells.append(f"{(time.process_time() - start) / num_blocks * 1e9:12.0f}")
    curve = HitCurve(max_bytes=ONLINE_BYTES)
    start = time.process_time()
    for hashes in requests.prompts:
        curve.insert(hashes[: curve.lookup(hashes)])
        curve.insert(hashes)
        curve.insert(hashes)
    cells.append(f"{(time.process_time() - start) / num_blocks * 1e9:12.0f}")
    print("".join(cells))


def large_curve() -> int:
    """Build a curve of ten million lookups in this process, and print what it takes."""
    rng = np.random.default_rng(1)
    length, num_requests = 50, LARGE_LOOKUPS // 50
    # A request repeats an earlier one's first half, or all of it, or is new.
    roots = np.where(
        rng.random(num_requests) < 0.4,
        (rng.random(num_requests) ** 2 * np.arange(num_requests)).astype(np.int64),
        np.arange(num_requests),
    )
    tails = np.where(rng.random(num_requests) < 0.3, roots, np.arange(num_requests))
    depths = np.arange(length)
    keys = np.where(depths < length // 2, roots[:, None], tails[:, None] + num_requests)
    keys = (keys * length + depths).astype(np.uint64).ravel()
    offsets = np.arange(0, LARGE_LOOKUPS + 1, length)
    start = time.process_time()
    curve = HitCurve()
    curve.add_all(keys, offsets)
    hits = curve.hits(np.arange(0, curve.largest_capacity, 1000))
    seconds = time.process_time() - start
    gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{curve.num_lookups:,} lookups, {curve.num_unique:,} distinct blocks, "
        f"{hits[-1]:,} hits: {seconds:.1f} s, {gib:.2f} GiB for the whole process"
    )
    return int(seconds > LARGE_SECONDS or gib > LARGE_GIB)


def main() -> int:
    if sys.argv[1:] == ["--large"]:  # the process of question 1 that has nothing else
        return large_curve()
    options = parser(__doc__)
    add_form(options)
    given = options.parse_args()
    traces = [Requests(Path(name), given.block_size, given.chain) for name in given.traces]
    failures: list[str] = []
    print("Exact curves\n")
    for requests in traces:
        failures += exact_curve(requests)
    command = [sys.executable, "-m", "benches.curve", "--large"]
    if subprocess.run(command, check=False).returncode:
        failures.append("ten million lookups")
    print(f"\nSampled curves: points of hit ratio, {SEEDS} seeds, {NUM_CAPACITIES} capacities")
    for requests in traces:
        print(f"\n{requests.name}")
        print(
            f"{'max_keys':>10} {'rate':>8} {'median':>9} {'95 %':>9} {'worst':>9} {'reported':>10}"
        )
        failures += sampled_errors(requests)
    print("\nOnline: ns per looked-up block\n")
    heads = ("tier", "32 MiB", "32,000 keys", "1,000 keys", "observe")
    print("".join(f"{head:>12}" for head in heads))
    for requests in traces:
        online_cost(requests)
    print("\nThe conditions do not hold:" if failures else "\nThe conditions hold.")
    print("\n".join(failures))
    return 1 if failures else 0


if __name__ == "__main__":
    run(main)
