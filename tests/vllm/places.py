"""Where the simulated engine keeps the KV of a token, and of which tokens a step writes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.kv_cache_interface import CircularBufferSpec, MambaSpec


def replayed(spec: Any) -> int:
    return int(getattr(spec, "prefix_replay_tokens", 0))  # since vLLM 0.31


def place(spec: Any, table: Sequence[Any], at: int) -> tuple[Any, int | slice]:
    """The block of a token, and the token's place in it."""
    if isinstance(spec, CircularBufferSpec):
        return table[0], at % spec.block_size
    size = spec.block_size
    return table[at // size], slice(None) if isinstance(spec, MambaSpec) else at % size


def written(spec: Any, start: int, end: int) -> list[int]:
    """The tokens of a step whose KV, or the state after them, the step writes."""
    if not isinstance(spec, MambaSpec):
        return list(range(start, end))
    ends = range(start, end - 1) if spec.mamba_cache_mode == "all" else ()
    return [*(at for at in ends if (at + 1) % spec.block_size == 0), end - 1]
