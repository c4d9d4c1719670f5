"""vLLM's real engine before a slow store: what it computes instead, and the answers."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.tiers.resp.proxy import Faults, Proxy
from tests.tiers.resp.server import Server as Store
from tests.vllm.engine import BLOCK_SIZE, TOLERANCE, Answer, Engine, difference, prompts
from tests.vllm.full import skip_unless_in_ci

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own, and those of what it imports

PROMPTS = prompts(5, 300)
NEW, STORED = PROMPTS[:1], PROMPTS[1:]
NUM_HIT = (300 - 1) // BLOCK_SIZE * BLOCK_SIZE
CHUNK = 256  # of the engine
PAUSE_S = 0.01  # for each 4 KiB: much slower than the engine on a busy machine


def start(folder: Path, url: str, scheduling: str, *, skips: bool) -> Engine:
    options = {
        "num_cpu_blocks": 80,
        "shared": url,
        "min_promote_tokens": 64,
        "skip_slow_loads": skips,
        "promote_timeout_s": 60,
        "shared_ask_timeout_s": 20,
        "shared_timeout_s": 60,
    }
    return Engine(folder, num_blocks=80, scheduling=scheduling, options=options)


def answers(engine: Engine, asked: list[list[int]]) -> list[Answer]:
    """Answer prompts in turn."""
    engine.settle()
    found = []
    for tokens in asked:
        found += engine.generate([tokens])
        engine.settle()
    engine.check_idle()
    return found


@pytest.mark.parametrize("scheduling", ["sync", "async"])
def test_an_engine_computes_what_a_slow_store_has_with_equal_answers(
    folder: Path, store: Store, scheduling: str
) -> None:
    skip_unless_in_ci((scheduling,), [("async",)])
    engine = start(folder, store.url, scheduling, skips=False)
    expected = answers(engine, STORED)
    assert not any(each.num_cached for each in expected)
    engine.close()

    with Proxy(store.port, seed=1) as proxy:
        url = f"redis://127.0.0.1:{proxy.port}"
        engine = start(folder, url, scheduling, skips=True)
        assert not any(each.num_cached for each in answers(engine, NEW))
        below = engine.half.tier.below
        assert below is not None and below.slow_loads is not None
        assert below.slow_loads.computing.num_tokens == CHUNK, "the end of the prompt is short"
        proxy.faults = Faults(pause=1.0, pause_s=PAUSE_S)
        found = answers(engine, STORED)
        assert [each.num_cached for each in found] == [NUM_HIT] + [0] * (len(STORED) - 1)
        assert difference(found, expected) < TOLERANCE
        stats = engine.half.stats()
        assert stats["skipped_load_tokens"] == (len(STORED) - 1) * NUM_HIT
        assert stats["shared_promoted_blocks"] == NUM_HIT // BLOCK_SIZE
        engine.close()

        # The negative control: without the option the store serves all, however slowly.
        engine = start(folder, url, scheduling, skips=False)
        found = answers(engine, STORED[:1])
        assert [each.num_cached for each in found] == [NUM_HIT]
        assert difference(found, expected[:1]) < TOLERANCE
        engine.close()
