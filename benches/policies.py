"""Which eviction policy gives a host tier more hits on a request trace?

    .venv/bin/python -m benches.policies [--block-size TOKENS] [--chain] TRACE...

`--chain` is for traces whose ids name passages. A name with "ragpulse" needs no option.

The bench is pure accounting through the public `OffloadScheduler`. Requests come one after the
other, there is no device cache, and jobs end at once. For each request, the bench looks up its
blocks, loads those that it finds, and stores the rest. A hit is a block of the longest prefix that
the tier holds. The hit ratio is the share of hits in all blocks of the trace.

The table has two forms. "all blocks" counts the partial tail of a prompt as a block, as the authors
of the traces do. "full blocks" leaves it out, because an engine stores full blocks only.

A policy beside LRU must meet a condition. On both Mooncake traces it has a hit ratio at least 1
point higher at 5,000, 7,500 and 10,000 blocks, and it is nowhere more than 0.5 points lower.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import numpy as np
from benches.traces import add_form, names_passages, parser, run

import kvstow
from kvstow.engine import Policy
from kvstow.replay import Trace, read_trace

BLOCK_SIZE = 16
GROUPS = (kvstow.FullAttention(block_size=BLOCK_SIZE),)
CAPACITIES = sorted({*range(1_000, 20_000, 1_000), 7_500, *range(20_000, 100_001, 5_000)})
REQUIRED_AT = (5_000, 7_500, 10_000)
REQUIRED_POINTS, ALLOWED_POINTS = 1.0, -0.5


class Requests:
    """The prompts of a trace as chained digests, computed once for all runs."""

    def __init__(self, trace: Trace, *, full_blocks: bool) -> None:
        self.num_blocks = 0
        self.prompts: list[kvstow.Hashes] = []
        for request in trace.requests:
            num_blocks = len(request.trace_ids)
            if full_blocks:
                num_blocks = min(num_blocks, request.prompt_tokens // trace.block_size)
            ids = request.trace_ids[:num_blocks]
            digests = kvstow.hash_tokens(ids, 1, algorithm="xxhash_cbor")  # an id is a block
            self.prompts.append(kvstow.Hashes(digests, BLOCK_SIZE))
            self.num_blocks += num_blocks

    def hit_ratio(self, policy: Policy, num_host_blocks: int) -> float:
        """Return the hit ratio of a tier with this many slots, in percent."""
        tier = kvstow.OffloadScheduler(num_host_blocks, GROUPS, policy=policy)
        blocks = np.arange(1, 1 + max(map(len, self.prompts)), dtype=np.int32)
        num_hits = 0
        for hashes in self.prompts:
            num_blocks, num_tokens = len(hashes), len(hashes) * BLOCK_SIZE
            tier.add("request", hashes)
            found = tier.lookup("request", 0, num_tokens) or 0
            if found:
                num_found = found // BLOCK_SIZE
                num_hits += num_found
                tier.complete(tier.load("request", found, [blocks[:num_found]]).job_id)
            job = tier.store(["request"], [num_tokens], blocks[:num_blocks], [0, num_blocks])
            if job is not None:
                tier.complete(job.job_id)
            tier.finish("request")
        tier.check()
        return num_hits / self.num_blocks * 100


def compare(path: Path, block_size: int, chain: bool) -> Iterator[str]:
    """Print a trace's table, and yield each expectation that fails."""
    trace = read_trace(path, chain=names_passages(path, chain), block_size=block_size)
    forms = [Requests(trace, full_blocks=full_blocks) for full_blocks in (False, True)]
    print(f"\n{path.name}: {len(trace.requests):,} requests; ", end="")
    print(f"{forms[0].num_blocks:,} blocks, {forms[1].num_blocks:,} of them full")
    others = [policy for policy in get_args(Policy) if policy != "lru"]
    heading = f"{'lru':>12}" + "".join(f"{policy:>14}{'points':>9}" for policy in others)
    print(f"{'':9}{'all blocks':>{len(heading)}}{'full blocks':>{len(heading)}}")
    print(f"{'capacity':>9}{heading * 2}", flush=True)  # a line takes a minute
    for capacity in CAPACITIES:
        line = f"{capacity:9,}"
        must_gain = capacity in REQUIRED_AT and "mooncake" in path.name
        least = REQUIRED_POINTS if must_gain else ALLOWED_POINTS
        for requests in forms:
            lru = requests.hit_ratio("lru", capacity)
            line += f"{lru:11.2f}%"
            for policy in others:
                ratio = requests.hit_ratio(policy, capacity)
                line += f"{ratio:13.2f}%{ratio - lru:+9.2f}"
                if ratio - lru < least:
                    yield f"{path.name}: {policy} at {capacity:,}: {ratio - lru:+.2f}"
        print(line, flush=True)


def main() -> int:
    options = parser(__doc__)
    add_form(options)
    given = options.parse_args()
    failures = [
        failure
        for name in given.traces
        for failure in compare(Path(name), given.block_size, given.chain)
    ]
    print("\nThe condition does not hold:" if failures else "\nThe condition holds.")
    print("\n".join(failures))
    return 1 if failures else 0


if __name__ == "__main__":
    run(main)
