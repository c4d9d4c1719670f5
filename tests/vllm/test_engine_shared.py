"""vLLM's real engines on one store, one after the other: what the first computed, others load.

`test_server_shared` has servers that run beside each other. Here the checks can be switched off, so
that wrong values must change the answers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.tiers.resp.server import Server as Store
from tests.vllm import models
from tests.vllm.engine import BLOCK_SIZE, DAMAGE, TOLERANCE, Answer, Engine, difference, prompts
from tests.vllm.full import kinds
from tests.vllm.sharing import AnySum, redis_of

from kvstow.tiers.namespace import HEADER_BYTES

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own, and those of what it imports

# Each test starts several engines.
IN_CI = [("llama", "async")]
PROMPTS = prompts(6, 300)
NUM_HIT = (300 - 1) // BLOCK_SIZE * BLOCK_SIZE
# Blocks of the device, and of the host.
MODELS: dict[str, tuple[dict[str, object], int, int]] = {
    "llama": (models.LLAMA, 80, 80),
    "gemma": (models.GEMMA, 100, 200),
    "granite": (models.GRANITE, 80, 80),
}


kind = kinds(MODELS, IN_CI)


def start(folder: Path, kind: tuple[str, str], store: Store, **more: Any) -> Engine:
    _, num_blocks, num_host_blocks = MODELS[kind[0]]
    options = {
        "num_cpu_blocks": num_host_blocks,
        "shared": store.url,
        "min_promote_tokens": 0,
        "promote_timeout_s": 60,
        "shared_ask_timeout_s": 20,
        "shared_timeout_s": 60,
        **more,
    }
    return Engine(folder, num_blocks=num_blocks, scheduling=kind[1], options=options)


def answers(engine: Engine) -> tuple[list[Answer], int]:
    """Answer the prompts, and return how many blocks came from the store."""
    before = engine.half.stats().get("shared_promoted_blocks", 0)
    found = engine.generate(PROMPTS)
    engine.settle()
    engine.check_idle()
    return found, engine.half.stats()["shared_promoted_blocks"] - before


def damage_all(store: Store) -> None:
    """Flip bits of every block behind its frame."""
    redis = redis_of(store)
    for key in redis.scan_iter("kvstow:*"):
        framed = bytearray(redis.get(key))
        for at in range(HEADER_BYTES + 3, len(framed), 64):
            framed[at] ^= 0x7F
        redis.set(key, bytes(framed))


def test_what_one_engine_computed_the_next_loads(
    kind: tuple[str, str],
    store: Store,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = models.make_model(MODELS[kind[0]][0], tmp_path_factory.mktemp(kind[0]))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    engine = start(folder, kind, store)
    expected, num_loaded = answers(engine)
    assert num_loaded == 0 and not any(each.num_cached for each in expected)
    engine.close()

    engine = start(folder, kind, store)
    found, num_loaded = answers(engine)
    assert num_loaded > 0 and all(each.num_cached > 0 for each in found)
    if kind[0] == "llama":
        assert all(each.num_cached == NUM_HIT for each in found)
    assert difference(found, expected) < TOLERANCE
    # New weights in place, or a sleep: nothing of before is read.
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    found, num_loaded = answers(engine)
    assert num_loaded == 0 and not any(each.num_cached for each in found)
    assert difference(found, expected) < TOLERANCE
    engine.close()

    damage_all(store)
    with monkeypatch.context() as control:
        control.setattr("kvstow.tiers.namespace.Namespace.checksum", lambda *_: AnySum())
        engine = start(folder, kind, store)
        found, num_loaded = answers(engine)
        assert num_loaded > 0, "the control reads what is damaged"
        assert difference(found, expected) > DAMAGE
        engine.close()

    # The control has put nothing, because the index says that the store has all.
    engine = start(folder, kind, store)
    found, num_loaded = answers(engine)
    assert num_loaded == 0 and not any(each.num_cached for each in found)
    assert engine.half.stats()["shared_failed_promotes"] > 0
    assert difference(found, expected) < TOLERANCE
    engine.close()
