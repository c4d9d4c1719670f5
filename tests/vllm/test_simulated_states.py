"""Random engines with recurrent states and drafts: no request may read a wrong state.

No engine on a CPU runs drafts with states, so a simulated worker keeps the states as vLLM's does
(`SimulatedStates`). `KVSTOW_SEEDS=N` runs N seeds from `KVSTOW_SEED` on.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.vllm.halves import BLOCK_SIZE, FULL, STATE, WINDOW
from tests.vllm.simulated import NUM_DRAFTS, WrongKV, tokens
from tests.vllm.simulated_states import HAS_CHECKPOINTS, SimulatedStates
from tests.vllm.test_simulated import TRUNKS, HarshLife
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec

from kvstow.vllm.steps import Steps
from kvstow.vllm.tracked import TrackedRequest

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

FIRST_SEED = int(os.environ.get("KVSTOW_SEED", "1"))
SEEDS = range(FIRST_SEED, FIRST_SEED + int(os.environ.get("KVSTOW_SEEDS", "8")))
CHUNKED = ChunkedLocalAttentionSpec(
    block_size=BLOCK_SIZE,
    num_kv_heads=1,
    head_size=8,
    dtype=torch.float32,
    attention_chunk_size=3 * BLOCK_SIZE,
)


class StatesLife(HarshLife):
    """Prompts often end with a block."""

    def _prompt(self) -> list[int]:
        num_blocks = self.dice.randrange(2, 10)
        length = self.dice.choice(
            [self.dice.randrange(20, 150), BLOCK_SIZE * num_blocks, BLOCK_SIZE * num_blocks + 1]
        )
        prompt = self.dice.choice(TRUNKS)[:length]
        if self.dice.random() < 0.5:
            prompt = prompt + tokens(self.dice.randrange(1, 40), self.dice.randrange(4))
        return prompt


def engine_of(folder: Path, seed: int) -> SimulatedStates:
    """Return an engine whose model and settings depend on the seed."""
    dice = random.Random(seed)
    with_drafts, with_eagle = dice.choice([(False, False), (True, False), (True, True)])
    state = replace(STATE, num_speculative_blocks=NUM_DRAFTS if with_drafts else 0)
    if dice.random() < 0.5:
        alignment = dice.choice([1, BLOCK_SIZE])
        if HAS_CHECKPOINTS:  # the dice fall as with other vLLMs
            state = replace(
                state, num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=alignment
            )
    wide = {"block_size": 2 * BLOCK_SIZE, "head_size": FULL.head_size // 2}
    specs = dice.choice(
        [
            (FULL, state),
            (state, state, FULL),
            (FULL, WINDOW, state),
            (FULL, CHUNKED, state),
            (FULL, replace(state, block_size=2 * BLOCK_SIZE)),
            (FULL, replace(state, block_size=4 * BLOCK_SIZE)),
            (replace(FULL, **wide, head_size_v=FULL.head_size // 2), state),
        ]
    )
    with_eagle = with_eagle and CHUNKED not in specs  # vLLM refuses both
    return SimulatedStates(
        folder,
        {
            "num_cpu_blocks": dice.choice([25, 60, 400, 400]),
            "lazy_offload": dice.random() < 0.4,
            "verify": "checksum",
            "load_timeout_s": 10.0,
            **dice.choice([{}, {}, {"store_threshold": 2}, {"max_store_blocks_in_flight": 2}]),
        },
        specs,
        num_blocks=dice.choice([26, 30, 40]) * len(specs) + 10,
        num_in_flight=dice.choice([1, 2]),
        drafts=with_drafts,
        seed=seed,
        settings={
            "scheduling_policy": dice.choice(["fcfs", "priority"]),
            "max_num_batched_tokens": dice.choice([37, 48, 64, 100, 200]),
            "long_prefill_token_threshold": dice.choice([0, 0, 20, 32]),
        },
        eagle=with_eagle,
        draft_groups=[specs.index(FULL)] if with_eagle and FULL in specs else [],
        unit=dice.choice([None, None, BLOCK_SIZE // 2]),
        keeps_junctions=dice.random() < 0.3,
        retention=dice.choice([0, 0, None, 4 * BLOCK_SIZE]),
    )


def live(folder: Path, seed: int) -> int:
    """Let things happen to an engine, and return the tokens that were loaded afterwards."""
    engine = engine_of(folder, seed)
    life = StatesLife(engine, seed)
    try:
        life.go(400, "session", "chunk")
    except AssertionError as error:
        error.add_note(f"KVSTOW_SEED={seed} repeats it")
        raise
    finally:
        engine.close()
    return life.num_host_tokens


def _skip_no_state(_: Steps, __: object) -> None:
    """Leave the keys of states that no step writes."""


def _all_ids(_: TrackedRequest, __: int, blocks: Sequence[KVCacheBlock], ___: object) -> list[int]:
    """Take each block of a window or state for the one of its hash."""
    return [block.block_id for block in blocks]


@pytest.mark.parametrize("seed", SEEDS)
def test_requests_with_drafts_read_their_own_states(folder: Path, seed: int) -> None:
    print(f"KVSTOW_SEED={seed}")
    live(folder, seed)


@pytest.mark.skipif(not HAS_CHECKPOINTS, reason="this vLLM writes no checkpoints")
@pytest.mark.parametrize(
    ("owner", "name", "guard", "seeds"),
    [
        (Steps, "evict_skipped", _skip_no_state, [126, 157, 120]),
        (TrackedRequest, "window_ids", _all_ids, [33, 35]),
    ],
)
def test_without_a_guard_a_wrong_state_is_found(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
    guard: Callable[..., object],
    seeds: list[int],
) -> None:
    """The negative control."""
    monkeypatch.setattr(owner, name, guard)
    with pytest.raises(WrongKV):
        for seed in seeds:
            live(folder, seed)
