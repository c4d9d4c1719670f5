"""The blocks that the requests of a trace look up and fill, as an engine caches them.

    prompt     |block|block|block|ti     a partial last block is never cached
    generated                      l|block|block|      cached, but no other request has them

The trace does not say which prompts contain generated tokens, so nobody hits generated blocks. They
take memory, because an engine caches and stores them like others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstow._core import ConfigError, hash_tokens
from kvstow.plan.traces import PlanRequest, PlanTrace
from kvstow.texts import counted

_ALGORITHM: Final = "xxhash_cbor"
_FIRST_GENERATED: Final = 1 << 63  # above every id of a trace
_SECONDS_PER_HOUR: Final = 3600


@dataclass(frozen=True)
class Workload:
    """The requests of a trace as chains of keys, one key for each full block.

    Attributes:
        block_tokens: tokens per block.
        prompts: the keys of each prompt's full blocks.
        num_generated: number of full blocks that each request fills beyond its prompt's.
        prompt_tokens: tokens of each prompt.
        total_tokens: tokens of each prompt and its output.
        hours: time from the first arrival to the last.
    """

    block_tokens: int
    prompts: list[list[int]]
    num_generated: list[int]
    prompt_tokens: list[int]
    total_tokens: list[int]
    hours: float

    @cached_property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(self.prompt_tokens)

    def hit_ratio(self, num_blocks: float) -> float:
        """Return the share of the prompt tokens that these blocks hold."""
        return num_blocks * self.block_tokens / self.num_prompt_tokens

    @cached_property
    def num_lookups(self) -> list[int]:
        """Blocks of each prompt that a hit can bring: one token is left to compute."""
        return [max(0, tokens - 1) // self.block_tokens for tokens in self.prompt_tokens]

    @cached_property
    def num_blocks(self) -> int:
        """Full blocks of all prompts."""
        return sum(map(len, self.prompts))

    @cached_property
    def num_filled(self) -> int:
        """Full blocks of all prompts and outputs."""
        return self.num_blocks + sum(self.num_generated)

    @cached_property
    def prompts_alone(self) -> Workload:
        """The full blocks of the prompts, each looked up whole, without outputs."""
        tokens = [len(prompt) * self.block_tokens + 1 for prompt in self.prompts]
        none = [0] * len(self.prompts)
        return Workload(self.block_tokens, self.prompts, none, tokens, tokens, self.hours)

    @cached_property
    def num_unique(self) -> int:
        """Different full blocks of all prompts."""
        return len(np.unique(self.prompt_keys[0]))

    @cached_property
    def prompt_keys(self) -> tuple[npt.NDArray[np.uint64], list[int]]:
        """The keys of all prompts, and where each begins, as `HitCurve.add_all` takes them."""
        return _flat(self.prompts)

    @cached_property
    def all_keys(self) -> tuple[npt.NDArray[np.uint64], list[int]]:
        """The keys of all prompts and outputs, and where each request begins."""
        firsts = accumulate(self.num_generated, initial=_FIRST_GENERATED)
        return _flat(
            [
                [*prompt, *range(first, first + number)]
                for prompt, number, first in zip(
                    self.prompts, self.num_generated, firsts, strict=False
                )
            ]
        )

    @cached_property
    def digests(self) -> list[Sequence[bytes]]:
        """The digests of each request's full blocks, as `OffloadScheduler.add` takes them."""
        return [
            _digests(index, prompt, number)
            for index, (prompt, number) in enumerate(
                zip(self.prompts, self.num_generated, strict=True)
            )
        ]


def build_workload(trace: PlanTrace, block_tokens: int) -> Workload:
    """Return the workload of a trace, in blocks of a multiple of the trace's block size.

    Raises:
        ConfigError: no prompt fills a block.
    """
    step = block_tokens // trace.block_size
    is_one_namespace = len({one.namespace for one in trace.requests}) == 1
    prompts: list[list[int]] = []
    generated: list[int] = []
    for one in trace.requests:
        request = one.request
        num_full = request.prompt_tokens // block_tokens
        ids = request.trace_ids[: num_full * step]
        if trace.is_content or not is_one_namespace:
            keys = _chained(one, ids)[step - 1 :: step]
        else:  # an id names all blocks before it, too
            keys = list(ids[step - 1 :: step])
        prompts.append(keys)
        generated.append(request.total_tokens // block_tokens - num_full)
    if not any(prompts):
        raise ConfigError(
            f"no prompt of {', '.join(trace.names)} fills a block of "
            f"{counted(block_tokens, 'token')}, so "
            "nothing can be cached: plan for longer prompts or smaller blocks"
        )
    first, last = trace.requests[0], trace.requests[-1]
    return Workload(
        block_tokens,
        prompts,
        generated,
        [one.request.prompt_tokens for one in trace.requests],
        [one.request.total_tokens for one in trace.requests],
        (last.arrival_s - first.arrival_s) / _SECONDS_PER_HOUR,
    )


def _chained(one: PlanRequest, ids: tuple[int, ...]) -> list[int]:
    """Return a key per id that names all ids before it, and the namespace."""
    extra = [(one.namespace,), *[None] * (len(ids) - 1)][: len(ids)]
    digests = hash_tokens(ids, 1, algorithm=_ALGORITHM, extra_keys=extra)
    # The top bit is that of generated blocks.
    return [int.from_bytes(digest[:8], "big") >> 1 for digest in digests]


def _digests(index: int, prompt: list[int], num_generated: int) -> Sequence[bytes]:
    digests = hash_tokens(prompt, 1, algorithm=_ALGORITHM)
    return digests + hash_tokens(
        range(num_generated),
        1,
        algorithm=_ALGORITHM,
        parent=digests[-1] if digests else None,
        extra_keys=[("generated", index)] * num_generated,
    )


def _flat(requests: list[list[int]]) -> tuple[npt.NDArray[np.uint64], list[int]]:
    keys = np.fromiter(chain.from_iterable(requests), dtype=np.uint64)
    return keys, list(accumulate(map(len, requests), initial=0))
