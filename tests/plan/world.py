"""Small workloads, and a model whose blocks have few bytes."""

from __future__ import annotations

import random
from collections.abc import Sequence

from kvstow import FullAttention, SlidingWindow, StateSpace
from kvstow.geometry import Geometry, KvGroup
from kvstow.geometry.layout import Attention
from kvstow.plan import Workload

BLOCK = 16
BLOCK_BYTES = 4096
FULL: Sequence[Attention] = (FullAttention(BLOCK),)
SLIDING: Sequence[Attention] = (SlidingWindow(BLOCK, 40), FullAttention(BLOCK))
STATEFUL: Sequence[Attention] = (StateSpace(BLOCK), FullAttention(BLOCK))


def geometry(attentions: Sequence[Attention] = FULL, *, block_tokens: int = BLOCK) -> Geometry:
    groups = tuple(KvGroup(attention, 1, BLOCK_BYTES) for attention in attentions)
    return Geometry("tiny", "float16", groups, block_tokens, 1, 1, 256, ("4,096 bytes",))


def workload(
    prompts: Sequence[Sequence[int]], *, tail: int = 1, generated: Sequence[int] = ()
) -> Workload:
    """Return a workload of these keys; each prompt ends with `tail` tokens of another block."""
    numbers = list(generated) or [0] * len(prompts)
    tokens = [len(prompt) * BLOCK + tail for prompt in prompts]
    return Workload(
        BLOCK,
        [list(prompt) for prompt in prompts],
        numbers,
        tokens,
        [count + number * BLOCK for count, number in zip(tokens, numbers, strict=True)],
        1.0,
    )


def random_workload(
    seed: int, *, num_requests: int = 60, longest: int = 12, tail: int = 0
) -> Workload:
    """Return prompts that grow from a few roots, with outputs of a few blocks.

    Each prompt has a block of its own at its end, so that a lookup of all but the last token finds
    no less than one of the whole prompt.
    """
    print(f"seed {seed}")
    chances = random.Random(seed)
    number = iter(range(1, 10**6))
    known: list[list[int]] = [[next(number)] for _ in range(3)]
    prompts: list[list[int]] = []
    for _ in range(num_requests):
        old = chances.choice(known)
        kept = old[: chances.randint(1, min(len(old), longest - 1))]
        num_new = chances.randint(1, longest - len(kept))
        prompt = kept + [next(number) for _ in range(num_new)]
        known.append(prompt)
        prompts.append(prompt)
    generated = [chances.choice([0, 0, 1, 3]) for _ in prompts]
    return workload(prompts, tail=tail, generated=generated)
