"""What does `lazy_offload` cost kvstow's scheduler half, compared with eager stores?

A lazy store waits until a block is near the front of vLLM's queue of free blocks, within a horizon
that grows with `max_model_len`. The device is full, so each prompt evicts as many blocks as it
takes, and both modes store as many. One half for each mode has its own `KVCacheManager`, and the
halves take turns. The times include only the calls of the connector, as in
`benches.compare.connector`.

Run it from the project's folder: `python -m benches.compare.lazy`.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from time import perf_counter
from typing import ParamSpec, TypeVar

from kvstow import FullAttention
from kvstow.vllm.connector import GATHERED_TOKENS
from kvstow.vllm.model import Model
from kvstow.vllm.options import Options
from kvstow.vllm.scheduler import SchedulerHalf
from kvstow.vllm.tier import HostTier

from . import vllm_side
from .connector import our_report
from .vllm_side import Request, SchedulerOutput

BLOCK_SIZE = 16
GROUPS = (FullAttention(block_size=BLOCK_SIZE),)
NUM_DEVICE_BLOCKS = 80_000
CHUNK_TOKENS = 2_048
NUM_TOKENS = 8_192
NUM_DECODED = 32
# Horizons in tokens: what the next step may take, and the longest prompt.
MAX_MODEL_TOKENS = (4_096, 131_072, 1_048_576)
NUM_MEASURED = 60

P = ParamSpec("P")
T = TypeVar("T")


class Mode:
    """A scheduler half over a device that prompts fill one after the other."""

    def __init__(self, name: str, horizon_blocks: int) -> None:
        self.name = name
        self.manager = vllm_side.manager(NUM_DEVICE_BLOCKS, GROUPS)
        num_host_blocks = 2 * NUM_DEVICE_BLOCKS
        options = Options(num_cpu_blocks=num_host_blocks, lazy_offload=horizon_blocks > 0)
        tier = HostTier(
            Model(NUM_DEVICE_BLOCKS, GROUPS, ((),), BLOCK_SIZE),
            options,
            world_size=1,
            horizon_blocks=horizon_blocks,
            gathered_tokens=GATHERED_TOKENS,
        )
        self.half = SchedulerHalf(tier)
        self.half.bind(self.manager)
        self.half.create_tier(num_host_blocks)
        self.num_stored = 0
        self.seconds = 0.0

    def prompt(self, request: Request) -> float:
        """Compute a prompt, decode some tokens, and return the seconds of the connector."""
        self.seconds, manager = 0.0, self.manager
        self._time(self.half.lookup, request, 0)
        manager.allocate_slots(request, CHUNK_TOKENS)
        self._time(self.half.allocated, request, manager.get_blocks(request.request_id), 0)
        table = manager.get_block_ids(request.request_id)
        self._step(vllm_side.step([(request, table)], num_tokens=CHUNK_TOKENS), request)
        for num_tokens in [CHUNK_TOKENS] * (NUM_TOKENS // CHUNK_TOKENS - 1) + [1] * NUM_DECODED:
            if num_tokens == 1:
                request.append_output_token_ids(request.num_tokens)
            blocks = manager.allocate_slots(request, num_tokens).get_block_ids(allow_none=True)
            running = [(request, blocks)]
            self._step(vllm_side.step(running=running, num_tokens=num_tokens), request)
        self._time(self.half.finished, request)
        manager.free(request)
        return self.seconds

    def _step(self, output: SchedulerOutput, request: Request) -> None:
        jobs = self._time(self.half.build, output)
        (num_tokens,) = output.num_scheduled_tokens.values()
        request.num_computed_tokens += num_tokens
        self._time(self.half.processed, our_report(jobs, None))
        self.num_stored += sum(len(copies.block_ids) for copies in jobs.stores)

    def _time(self, call: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        began = perf_counter()
        result = call(*arguments, **named)
        self.seconds += perf_counter() - began
        return result


def main() -> None:
    """Print a table."""
    modes = [Mode("eager", 0)]
    for max_tokens in MAX_MODEL_TOKENS:
        horizon = -(-(max_tokens + CHUNK_TOKENS) // BLOCK_SIZE)
        modes.append(Mode(f"lazy, max_model_len {max_tokens:,}", horizon))
    num_fill = NUM_DEVICE_BLOCKS * BLOCK_SIZE // NUM_TOKENS + 20
    samples: dict[str, list[float]] = {mode.name: [] for mode in modes}
    before = {}
    for at in range(num_fill + NUM_MEASURED):
        if at == num_fill:
            gc.collect()
            gc.freeze()
            before = {mode.name: mode.num_stored for mode in modes}
        for mode in modes:
            request = vllm_side.request(f"prompt-{at}", NUM_TOKENS + 1, BLOCK_SIZE)
            samples[mode.name].append(mode.prompt(request))
    print(
        f"time of the scheduler half for a prompt of {NUM_TOKENS:,} tokens in chunks of "
        f"{CHUNK_TOKENS:,}, and {NUM_DECODED} decoded\n"
    )
    eager = statistics.median(samples["eager"][num_fill:])
    for mode in modes:
        median = statistics.median(samples[mode.name][num_fill:])
        stored = (mode.num_stored - before[mode.name]) / NUM_MEASURED
        print(
            f"{mode.name:32} {median * 1e6:8.0f} us  {median / eager:5.2f} of eager  "
            f"{stored:6.0f} blocks stored"
        )


if __name__ == "__main__":
    main()
