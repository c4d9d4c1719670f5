"""Models with recurrent states on vLLM's real engine: their hits, and what wrong blocks do.

How a path could serve a wrong state, and the tests that would see it. All of them compare answers.

- A stale or torn state: the engine overwrites the block before or while a store reads it
  (`test_engine_random.py`, where late copies read what the block holds by then).
- A foreign state, of another request or another boundary: the second test here.
- A state that was never computed: a request is preempted or aborted before its step ends, a load
  fails, the engine sleeps (`test_engine_random.py`, which overwrites the memory).

The models differ in what keeps a state: Mamba 1 and 2, gated delta nets, short convolutions. In
Falcon-H1 each layer has a state and attention. Mamba 2 alone has no attention at all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.vllm import models
from tests.vllm.engine import BLOCK_SIZE, TOLERANCE, Answer, Engine, difference, prompts
from tests.vllm.forking import IS_FULL
from tests.vllm.full import kinds

from kvstow import FullAttention, Job, StateSpace

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own, and those of what it imports

# The engines that CI has time for.
IN_CI = [("granite", "async"), ("qwen-next", "sync")]
# A pool that is too small for two prompts of the longest kind at a time, and one for everything.
NUM_BLOCKS, NUM_BLOCKS_ORACLE = 80, 600
# The least damage that counts. LFM2's convolutions remember two tokens, so a lost state of theirs
# changes answers by about 0.01, those of the others by more than 0.1.
LEAST_DAMAGE = 20 * TOLERANCE
# Shorter than a block, at and around block ends, in one chunk and in several.
LENGTHS = (20, 33, 64, 97, 257, 288, 300, 600)
PROMPTS = [
    tokens for at, length in enumerate(LENGTHS) for tokens in prompts(1, length, seed=100 + at)
]
# Some answers reach the end of a block.
NUM_TOKENS = 20 if IS_FULL else 13


@dataclass
class Oracle:
    """A model, and what vLLM answers without kvstow and with room for everything.

    Attributes:
        name: of the model.
        folder: with the model.
        first: the answers to `PROMPTS`, all at once, without any hit.
        second: the answers to `PROMPTS`, one by one, with hits on the device.
        turns: prompts that continue `PROMPTS` and their answers.
        third: the answers to `turns`, one by one, with hits on the device.
        noise: the largest difference between two runs of `PROMPTS` without hits.
    """

    name: str
    folder: Path
    first: list[Answer]
    second: list[Answer]
    turns: list[list[int]]
    third: list[Answer]
    noise: float


kind = kinds(models.HYBRIDS, IN_CI)


@pytest.fixture(scope="module")
def oracle(kind: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    name, _ = kind
    folder = models.make_model(models.HYBRIDS[name], tmp_path_factory.mktemp(name))
    engine = Engine(folder, num_blocks=NUM_BLOCKS_ORACLE)
    try:
        first = engine.generate(PROMPTS, NUM_TOKENS)
        second = one_by_one(engine, PROMPTS)
        turns = [
            [*tokens, *answer.tokens, *prompts(1, 50, seed=200 + at)[0]]
            for at, (tokens, answer) in enumerate(zip(PROMPTS, first, strict=True))
        ]
        third = one_by_one(engine, turns)
        assert engine.llm.reset_prefix_cache()
        noise = difference(engine.generate(PROMPTS[::-1], NUM_TOKENS)[::-1], first)
    finally:
        engine.close()
    print(f"{name}: two uncached runs differ by {noise:.1e}")
    assert noise < TOLERANCE
    assert difference(second, first) < TOLERANCE
    return Oracle(name, folder, first, second, turns, third, noise)


@pytest.fixture(scope="module")
def shared(kind: tuple[str, str], oracle: Oracle) -> Iterator[Engine]:
    engine = Engine(
        oracle.folder,
        num_blocks=NUM_BLOCKS,
        scheduling=kind[1],
        options={"num_cpu_blocks": 900},
    )
    yield engine
    engine.close()


def one_by_one(engine: Engine, asked: list[list[int]], *, reset: bool = False) -> list[Answer]:
    """Answer prompts one after the other; `reset` empties the device's cache before each."""
    answers = []
    for tokens in asked:
        if reset:
            engine.settle()
            assert engine.llm.reset_prefix_cache()
        answers += engine.generate([tokens], NUM_TOKENS)
    return answers


def hits(answers: list[Answer]) -> list[int]:
    return [answer.num_cached for answer in answers]


def test_the_host_gives_the_hits_of_a_large_device_cache(engine: Engine, oracle: Oracle) -> None:
    first = engine.generate(PROMPTS, NUM_TOKENS)
    assert difference(first, oracle.first) < TOLERANCE
    second = one_by_one(engine, PROMPTS, reset=True)
    assert hits(second) == hits(oracle.second)
    assert sum(hits(second)) > 0
    assert difference(second, oracle.first) < TOLERANCE
    third = one_by_one(engine, oracle.turns, reset=True)
    assert hits(third) == hits(oracle.third)
    assert difference(third, oracle.third) < TOLERANCE


def test_prompts_hit_the_beginning_that_they_share(engine: Engine) -> None:
    """The device has lost it. The host shows where they part, so vLLM keeps the state there."""
    shared = prompts(1, 170, seed=400)[0]
    asked = [shared + tokens for tokens in prompts(5, 130, seed=401)]
    expected = []
    for tokens in asked:
        engine.start_over()
        expected += engine.generate([tokens], NUM_TOKENS)
    engine.start_over()
    answers = one_by_one(engine, asked, reset=True)
    end = 170 // BLOCK_SIZE * BLOCK_SIZE
    if not any(isinstance(group, FullAttention) for group in engine.half.tier.model.groups):
        end = 0  # without attention nothing shows it
    assert hits(answers) == [0, 0, end, end, end]
    assert difference(answers, expected) < TOLERANCE


Change = Callable[[Any, list[list[int]]], None]


@contextmanager
def before_loads(engine: Engine, change: Change) -> Iterator[None]:
    """Call `change` before each load with the host memory and each group's slots."""
    transfers, arena = engine.half.transfers, engine.worker.arena
    assert arena is not None
    memory, begin = arena.slots, transfers.begin_load

    def begin_load(job: Job, blocks: Any, request_id: str) -> None:
        slots, bounds = job.host_slots.tolist(), itertools.pairwise(job.offsets.tolist())
        change(memory, [slots[start:end] for start, end in bounds])
        begin(job, blocks, request_id)

    transfers.begin_load = begin_load  # type: ignore[method-assign]
    try:
        yield
    finally:
        del transfers.begin_load


def loaded(engine: Engine, tokens: list[int], change: Change) -> list[Answer]:
    """Answer a prompt from the host, after a change of what is loaded."""
    engine.settle()
    assert engine.llm.reset_prefix_cache()
    with before_loads(engine, change):
        return engine.generate([tokens], NUM_TOKENS)


def slots_of(engine: Engine, tokens: list[int]) -> list[list[int]]:
    """Return per group the host slots from which a prompt is loaded."""
    seen: list[list[int]] = []
    loaded(engine, tokens, lambda memory, slots: seen.extend(slots))
    assert len(seen) == len(engine.half.tier.model.groups)
    return seen


def test_a_wrong_block_changes_answers(engine: Engine, oracle: Oracle) -> None:
    """The negative controls: the comparisons see each kind of wrong block."""
    at = LENGTHS.index(300)
    tokens, expected = PROMPTS[at], [oracle.first[at]]
    stranger = prompts(1, 300, seed=300)[0]
    engine.generate([tokens[:170], tokens, stranger], NUM_TOKENS)
    own, earlier, foreign = (slots_of(engine, each) for each in (tokens, tokens[:170], stranger))
    arena = engine.worker.arena
    assert arena is not None
    for g, group in enumerate(engine.half.tier.model.groups):
        before = arena.slots[own[g]].copy()
        damages = {"zeroed": 0 * before, "of another prompt": arena.slots[foreign[g]].copy()}
        if isinstance(group, StateSpace):
            assert len(own[g]) == len(earlier[g]) == 1
            damages["of another boundary"] = arena.slots[earlier[g]].copy()
        else:
            damages["one of another prompt"] = before.copy()
            damages["one of another prompt"][2] = arena.slots[foreign[g][2]]
        for name, damage in {"none": before, **damages}.items():

            def change(
                memory: Any, slots: list[list[int]], g: int = g, damage: Any = damage
            ) -> None:
                assert slots == own
                memory[slots[g]] = damage

            answers = loaded(engine, tokens, change)
            arena.slots[own[g]] = before
            assert hits(answers) == [299 // BLOCK_SIZE * BLOCK_SIZE]
            found = difference(answers, expected)
            print(f"{oracle.name}, group {g}, {name}: {found:.3g}")
            assert found < TOLERANCE if name == "none" else found > LEAST_DAMAGE, name
