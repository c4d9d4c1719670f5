"""What would hits inside a block gain?

    .venv/bin/python -m benches.partial_blocks TRACE...

A hit ends at a block boundary, so a prompt computes the rest of the block that it shares with an
earlier prompt: at most `block - 1` tokens, and half of that on average. vLLM can copy the shared
part of a last block (`--prefix-match-unit`), for models with recurrent state only.

The cache of this program never evicts, so a hit depends on the block size alone. A trace names
blocks of 512 tokens. For larger blocks the program counts the hits. For every size it gives the
bound: a prompt loses less than a block. The figures are shares of all prompt tokens. Traces in the
content form do not fit, because their ids name passages of any length: the program refuses them.
"""

from pathlib import Path

from benches.traces import parser, run

import kvstow
from kvstow.replay import Trace, read_trace

UNIT = 512
SMALL = (16, 32, 64)
FACTORS = (1, 2, 4, 8, 16)


def hit_tokens(trace: Trace, factor: int) -> int:
    """Return the prompt tokens that earlier prompts computed, in whole blocks of `factor` units."""
    seen: set[int] = set()
    num_hit_tokens = 0
    for request in trace.requests:
        # Ids name all tokens up to theirs, so the last id of a block names the block.
        ids = request.trace_ids[: request.prompt_tokens // UNIT]
        ends = ids[factor - 1 :: factor]
        num_hit = next((at for at, end in enumerate(ends) if end not in seen), len(ends))
        num_hit_tokens += num_hit * factor * UNIT
        seen.update(ends)
    return num_hit_tokens


def read(name: str) -> Trace:
    """Return a trace whose ids name blocks of equal size."""
    try:
        return read_trace(name)
    except kvstow.ConfigError as error:
        if "pass --block-size" in str(error):
            problem = str(error).partition(": pass --block-size")[0]
            raise kvstow.ConfigError(
                f"{problem}. This bench takes blocks of {UNIT} tokens only: convert the token ids "
                f"with kvstow trace convert --block-size {UNIT}"
            ) from None
        if "the ids are not chained" not in str(error):
            raise
        problem = str(error).partition(". Pass --chain")[0]
        raise kvstow.ConfigError(
            f"{problem}. Ids of passages do not say how many tokens two prompts share: leave this "
            "trace out"
        ) from None


def report(name: str, trace: Trace) -> None:
    """Print the table of one trace."""
    num_tokens = sum(request.prompt_tokens for request in trace.requests)
    num_requests = len(trace.requests)
    print(f"\n{name}: {num_requests:,} prompts of {num_tokens / num_requests:,.0f} tokens")
    print("block     hit tokens   a hit inside the block adds at most")
    for block in SMALL:
        print(f"{block:>5}                   {num_requests * (block - 1) / num_tokens:>8.2%}")
    for factor in FACTORS:
        share = hit_tokens(trace, factor) / num_tokens
        most = num_requests * (factor * UNIT - 1) / num_tokens
        gain = hit_tokens(trace, 1) / num_tokens - share
        counted = f", of which hits at every {UNIT} tokens add {gain:.2%}" if factor > 1 else ""
        print(f"{factor * UNIT:>5}     {share:>8.2%}      {min(most, 1 - share):>8.2%}{counted}")


def main() -> int:
    names = parser(__doc__).parse_args().traces
    for name, trace in [(Path(name).name, read(name)) for name in names]:
        report(name, trace)
    return 0


if __name__ == "__main__":
    run(main)
