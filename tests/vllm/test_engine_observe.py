"""Observing on the real engine: the ratio of a real tier is what was reported before it existed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.vllm import models
from tests.vllm.engine import BLOCK_SIZE, TOLERANCE, Answer, Engine, difference
from tests.vllm.full import full
from tests.vllm.traffic import Traffic

from kvstow.observability.metrics import SHADOW_KEY

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # vLLM's own, and those of what it imports
    full("takes minutes"),
]
FACTORS = (0.5, 1, 2, 4)
# Six groups: five windows and one of full attention.
GEMMA = models.GEMMA | {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
}


def run(
    folder: Path, num_blocks: int, options: dict[str, Any] | None
) -> tuple[list[Answer], float, dict[str, float]]:
    """Return the answers, the share of hit blocks, and the statistics."""
    engine = Engine(folder, num_blocks=num_blocks, options=options)
    answers: list[Answer] = []

    def answer(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        new = engine.generate(prompts, max_tokens=4)
        answers.extend(new)
        if options is not None:
            engine.settle()
        return [list(each.tokens) for each in new]

    try:
        requests = Traffic(models.VOCAB_SIZE, 300, 20, chats=0.0, num_prompts=100, seed=5)
        num_lookups = sum(
            (len(prompt) - 1) // BLOCK_SIZE for prompt in requests.run(answer, at_once=4)
        )
        found: dict[str, float] = {}
        if options is not None:
            observer = engine.connector._observer
            observer._report_at, observer.has_news = 0.0, True
            found = dict(observer.gauges(engine.half.num_host_blocks))
            assert bool(options.get("observe")) == (engine.worker.arena is None)
    finally:
        engine.close()
    num_hits = sum(each.num_cached // BLOCK_SIZE for each in answers)
    return answers, num_hits / num_lookups, found


@pytest.mark.parametrize(
    ("config", "num_blocks", "num_slots"),
    [
        pytest.param(models.LLAMA, 50, 60, id="llama"),
        pytest.param(GEMMA, 200, 200, id="gemma"),
    ],
)
def test_ratios_are_those_of_real_tiers(
    config: dict[str, object], num_blocks: int, num_slots: int, tmp_path: Path
) -> None:
    """Within one point."""
    folder = models.make_model(config, tmp_path)
    expected, alone, _ = run(folder, num_blocks, None)
    observed = {"observe": True, "num_cpu_blocks": num_slots}
    answers, ratio, found = run(folder, num_blocks, observed)
    assert answers == expected, "tokens, log-probabilities and hits"
    ratios = [value for key, value in found.items() if key.startswith(SHADOW_KEY)]
    assert ratio == alone == pytest.approx(ratios[0]) == pytest.approx(found["hit_ratio"])
    for factor, shadow in zip(FACTORS, ratios[1:], strict=False):
        answers, real, there = run(folder, num_blocks, {"num_cpu_blocks": int(num_slots * factor)})
        assert difference(answers, expected) < TOLERANCE
        assert there["hit_ratio"] == pytest.approx(real)
        print(f"{factor} x {num_slots} slots: {shadow:.4f} reported, {real:.4f} found")
        assert abs(real - shadow) * 100 <= 1, (factor, shadow, real)
