"""`accelerate` on vLLM's real engine: tokens, log-probabilities and blocks stay the same.

Without a connector, no copy ends at a random moment. So each engine has the same batches as its
twin, and everything must be equal to the last bit, the order of the free queue included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.vllm import models
from tests.vllm.engine import BLOCK_SIZE, TOLERANCE, Answer, Engine, difference, prompts
from tests.vllm.full import full

import kvstow
from kvstow.vllm import accelerate
from kvstow.vllm.accelerate import allocation, hashing

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own, and those of what it imports

full = full("starts two more engines")

# Each prompt twice, so that the second may hit the blocks of the first.
PROMPTS = [tokens for tokens in prompts(6, 300) for _ in range(2)]
# The tokens repeat, so that n-gram drafts find a match.
REPEATING = [tokens[:150] + tokens[:150] for tokens in PROMPTS]
NUM_ROUNDS = 2
NUM_HIT = (300 - 1) // BLOCK_SIZE * BLOCK_SIZE
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (models.LLAMA, {"num_blocks": 40}),
    "llama, async": (models.LLAMA, {"num_blocks": 40, "scheduling": "async"}),
    "gemma": (models.GEMMA, {"num_blocks": 100}),
    "gemma, async": (models.GEMMA, {"num_blocks": 100, "scheduling": "async"}),
    "drafts": (
        models.LLAMA,
        {
            "num_blocks": 40,
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 3,
                "prompt_lookup_max": 4,
                "prompt_lookup_min": 2,
            },
        },
    ),
}


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    yield
    accelerate.disable()


def run(engine: Engine, asked: list[list[int]]) -> tuple[list[list[Answer]], list[list[int]]]:
    """Return the answers of both rounds, and the order of the free queue after each."""
    answers, queues = [], []
    for _ in range(NUM_ROUNDS):
        answers.append(engine.generate(asked, max_tokens=2 * BLOCK_SIZE))
        queue = engine.core.scheduler.kv_cache_manager.block_pool.free_block_queue
        queues.append([block.block_id for block in queue.get_all_free_blocks()])
    return answers, queues


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The numbers of early exits and of calls of `hash_tokens`."""
    found: Counter[str] = Counter()
    changes_nothing, hash_tokens = allocation._changes_nothing, kvstow.hash_tokens

    def counting_exits(*args: Any) -> bool:
        is_exit = changes_nothing(*args)
        found["exits"] += is_exit
        return is_exit

    def counting_hashes(*args: Any, **named: Any) -> Any:
        found["hashes"] += 1
        return hash_tokens(*args, **named)

    monkeypatch.setattr(allocation, "_changes_nothing", counting_exits)
    monkeypatch.setattr(hashing, "hash_tokens", counting_hashes)
    return found


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[full] if case != "llama" else []) for case in CASES]
)
def test_answers_and_blocks_are_the_same(case: str, tmp_path: Path, counts: Counter[str]) -> None:
    config, settings = CASES[case]
    folder = models.make_model(config, tmp_path)
    asked = REPEATING if case == "drafts" else PROMPTS
    both = []
    for is_fast in (False, True):
        if is_fast:
            assert not counts
            accelerate.enable()
        engine = Engine(folder, **settings)
        try:
            both.append(run(engine, asked))
        finally:
            engine.close()
    assert counts["exits"] > len(asked) * BLOCK_SIZE and counts["hashes"] > NUM_ROUNDS * len(asked)
    assert both[0] == both[1]
    assert any(answer.num_cached for answers in both[0][0] for answer in answers)


def test_the_option_makes_the_engine_faster(folder: Path, counts: Counter[str]) -> None:
    """The answers of the first round are computed, those of the second come from the host."""
    asked = PROMPTS[::2]
    options = {"num_cpu_blocks": 400, "accelerate": True}
    engine = Engine(folder, num_blocks=40, options=options)
    try:
        first = engine.generate(asked)
        engine.settle()
        second = engine.generate(asked)
        engine.settle()
    finally:
        engine.close()
    assert [answer.num_cached for answer in first + second] == [0] * 6 + [NUM_HIT] * 6
    assert difference(first, second) < TOLERANCE
    assert counts["exits"] and counts["hashes"]
