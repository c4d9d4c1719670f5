"""The connector in modes that change what a request asks, or what keys its blocks.

Each test starts an engine of its own. All run only in `make test-vllm-full`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.vllm import models, vision
from tests.vllm.engine import (
    BLOCK_SIZE,
    TOLERANCE,
    Answer,
    Engine,
    answer,
    difference,
    greedy,
    prompts,
)
from tests.vllm.full import full
from vllm.sampling_params import StructuredOutputsParams

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # vLLM's own, and those of what it imports
    full("starts an engine for each test"),
]

PROMPTS, OTHERS = prompts(4, 300), prompts(6, 300, seed=2)
NUM_HIT = (300 - 1) // BLOCK_SIZE * BLOCK_SIZE


@contextmanager
def running(folder: Path, scheduling: str, **settings: Any) -> Iterator[Engine]:
    """Run an engine, and check at its end that nothing is left in it."""
    defaults: dict[str, Any] = {"num_blocks": 40, "options": {"num_cpu_blocks": 400}}
    engine = Engine(folder, scheduling=scheduling, **(defaults | settings))
    try:
        yield engine
        engine.settle()
        if settings.get("options", True) is not None:
            engine.check_idle()
    finally:
        engine.close()


def ask(engine: Engine, asked: list[dict[str, Any]], **sampling: Any) -> list[Answer]:
    """Ask the prompts, and let their blocks land on the host and fall out of the device."""
    outputs = engine.llm.generate(asked, greedy(12, **sampling), use_tqdm=False)
    engine.settle()
    engine.generate(OTHERS)
    engine.settle()
    return [answer(output) for output in outputs]


def plain(asked: list[list[int]]) -> list[dict[str, Any]]:
    return [{"prompt_token_ids": tokens} for tokens in asked]


def hits(answers: list[Answer]) -> list[int]:
    return [each.num_cached for each in answers]


@pytest.mark.parametrize("scheduling", ["sync", "async"])
def test_requests_with_equal_tokens_and_other_images_share_no_block(
    tmp_path: Path, scheduling: str
) -> None:
    folder = vision.make_vision_model(tmp_path)

    def with_image(seed: int) -> list[dict[str, Any]]:
        images = {"multi_modal_data": {"image": vision.image(seed)}}
        return [each | images for each in plain(PROMPTS)]

    settings: dict[str, Any] = {
        "skip_tokenizer_init": False,
        "limit_mm_per_prompt": {"image": 1},
        "max_num_batched_tokens": 512,
    }
    with running(folder, scheduling, options=None, **settings) as engine:
        first, second = (ask(engine, with_image(seed)) for seed in (1, 2))
    assert difference(first, second) > 0.01, "the images must matter"
    with running(folder, scheduling, **settings) as engine:
        for seed, expected in ((1, first), (2, second)):
            cold, warm = (ask(engine, with_image(seed)) for _ in range(2))
            assert hits(cold) == [0] * len(PROMPTS)
            # vLLM puts eight image tokens before the prompt's own.
            assert hits(warm) == [(308 - 1) // BLOCK_SIZE * BLOCK_SIZE] * len(PROMPTS)
            assert difference(cold, expected) < TOLERANCE
            assert difference(warm, expected) < TOLERANCE


@pytest.mark.parametrize("scheduling", ["sync", "async"])
def test_prompts_of_other_embeddings_share_no_block(folder: Path, scheduling: str) -> None:
    """vLLM gives such prompts zeros for tokens. They are equal up to one embedding each."""
    first = torch.randn(300, models.HIDDEN_SIZE, generator=torch.Generator().manual_seed(0))
    asked = [{"prompt_embeds": first}]
    for at in (40, 250):
        asked.append({"prompt_embeds": first.clone()})
        asked[-1]["prompt_embeds"][at] += 1.0
    settings: dict[str, Any] = {"enable_prompt_embeds": True}
    with running(folder, scheduling, options=None, **settings) as engine:
        expected = ask(engine, asked)
    assert difference(expected[:1], expected[1:2]) > 0.01, "the embeddings must matter"
    with running(folder, scheduling, **settings) as engine:
        cold, warm = (ask(engine, asked) for _ in range(2))
        assert hits(warm) == [NUM_HIT] * len(asked)
        assert max(difference(cold, expected), difference(warm, expected)) < TOLERANCE
        assert hits(ask(engine, plain([[0] * 300]))) == [0]


@pytest.mark.parametrize("scheduling", ["sync", "async"])
def test_structured_output_is_equal_after_a_load(folder: Path, scheduling: str) -> None:
    grammar = {"structured_outputs": StructuredOutputsParams(regex="(t[1-9]){40}")}
    settings: dict[str, Any] = {"skip_tokenizer_init": False}
    with running(folder, scheduling, options=None, **settings) as engine:
        free = ask(engine, plain(PROMPTS))
        expected = ask(engine, plain(PROMPTS), **grammar)
    allowed = set(range(1, 10))
    assert all(set(each.tokens) <= allowed for each in expected)
    assert not all(set(each.tokens) <= allowed for each in free), "the grammar must matter"
    with running(folder, scheduling, **settings) as engine:
        for num_hit in (0, NUM_HIT):
            answers = ask(engine, plain(PROMPTS), **grammar)
            assert hits(answers) == [num_hit] * len(PROMPTS)
            assert difference(answers, expected) < TOLERANCE


@pytest.mark.parametrize("scheduling", ["sync", "async"])
def test_a_request_for_prompt_logprobs_computes_and_its_blocks_are_stored(
    folder: Path, scheduling: str
) -> None:
    """vLLM reads no cache for such a request, because a hit has no log-probabilities."""
    with running(folder, scheduling, options=None) as engine:
        expected = ask(engine, plain(PROMPTS))
    with running(folder, scheduling) as engine:
        for _ in range(2):
            answers = ask(engine, plain(PROMPTS), prompt_logprobs=1)
            assert hits(answers) == [0] * len(PROMPTS)
            assert difference(answers, expected) < TOLERANCE
        answers = ask(engine, plain(PROMPTS))
        assert hits(answers) == [NUM_HIT] * len(PROMPTS)
        assert difference(answers, expected) < TOLERANCE


@pytest.mark.parametrize("scheduling", ["sync", "async"])
def test_requests_that_priorities_preempt_come_back_from_the_host(
    folder: Path, scheduling: str
) -> None:
    """Later requests have a higher priority. As answers grow, they take blocks of earlier ones."""
    asked, num_tokens = prompts(8, 280, seed=3), 64
    with running(folder, scheduling, options=None, num_blocks=200) as engine:
        expected = engine.generate(asked, num_tokens)
    settings: dict[str, Any] = {"scheduling_policy": "priority", "max_model_len": 512}
    with running(folder, scheduling, num_blocks=30, **settings) as engine:
        core, requests = engine.llm.llm_engine, engine.core.scheduler.requests
        answers: dict[str, Answer] = {}
        num_preempted = 0

        def step() -> None:
            nonlocal num_preempted
            ended = [output for output in core.step() if output.finished]
            answers.update((output.request_id, answer(output)) for output in ended)
            num_preempted += sum(request.num_preemptions for request in requests.values())

        for at, tokens in enumerate(asked):
            core.add_request(
                f"{at}", {"prompt_token_ids": tokens}, greedy(num_tokens), priority=len(asked) - at
            )
            for _ in range(3):
                step()
        for _ in range(2_000):
            if len(answers) == len(asked):
                break
            step()
        found = [answers[f"{at}"] for at in range(len(asked))]
        assert difference(found, expected) < TOLERANCE
        assert num_preempted > 0, "nothing was preempted"
        assert engine.stats()["loaded_blocks"] > 0
