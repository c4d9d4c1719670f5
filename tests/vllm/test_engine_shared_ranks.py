"""Engines of two ranks on one store: each rank's part of a block has a name of its own there.

How a wrong block could be served, and what each test does about it:

- A rank finds another block under its name, and the other rank finds the right one: every rank
  proves its part, and a block counts only if all have theirs.
- A rank finds the other rank's part of the block: the namespace in the frame has the rank.
- An engine of one rank reads parts of blocks: it has other names.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.tiers.resp.server import Server as Store
from tests.vllm.engine import BLOCK_SIZE, DAMAGE, TOLERANCE, Answer, Engine, difference, prompts
from tests.vllm.full import full
from tests.vllm.setting import CONNECTOR
from tests.vllm.sharing import redis_of

from kvstow.tiers.namespace import Namespace
from kvstow.vllm import identity

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # vLLM's own, and those of what it imports
    full("starts five engines"),
]

PROMPTS = prompts(6, 300)
NUM_HIT = (300 - 1) // BLOCK_SIZE * BLOCK_SIZE
NUM_BLOCKS = NUM_HIT // BLOCK_SIZE
NUM_RANKS = 2
OPTIONS = {
    "num_cpu_blocks": 80,
    "min_promote_tokens": 0,
    "promote_timeout_s": 60,
    "shared_ask_timeout_s": 20,
    "shared_timeout_s": 60,
}


@pytest.fixture(autouse=True)
def _place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # By default vLLM wants a memory node for each rank.
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@contextmanager
def running(
    folder: Path, store: Store, *, num_ranks: int = NUM_RANKS, module: str = "kvstow.vllm"
) -> Iterator[Engine]:
    transfer = CONNECTOR | {
        "kv_connector_module_path": module,
        "kv_connector_extra_config": OPTIONS | {"shared": store.url},
    }
    settings: dict[str, Any] = {"kv_transfer_config": transfer, "tensor_parallel_size": num_ranks}
    # Ranks are other processes. They share nothing if they began while files might still change.
    shared_from = identity.last_change(str(folder), folder) + identity._FRESH_S + 0.1
    time.sleep(max(0.0, shared_from - time.time()))
    engine = Engine(folder, num_blocks=80, **settings)
    try:
        yield engine
        engine.settle()
        engine.check_idle()
    finally:
        engine.close()


class Parts:
    """What the store has of each prompt, by rank.

    Attributes:
        prefixes: what the keys of each rank begin with.
        values: for each prompt and each rank, the blocks by their key.
    """

    def __init__(self, engine: Engine, store: Store) -> None:
        engine.settle()  # the tier learns of its ranks
        below: Any = engine.half.tier.below
        names = below.questions.namespaces(below._ranks)
        self.prefixes = [Namespace(names[rank]).prefix for rank in range(NUM_RANKS)]
        self.values: list[list[dict[bytes, bytes]]] = []
        self._redis = redis_of(store)

    def note(self) -> None:
        """Note what a prompt has put."""
        known = {key for ranks in self.values for own in ranks for key in own}
        self.values.append(
            [
                {key: self._redis.get(key) for key in {*self._redis.keys(prefix + b"*")} - known}
                for prefix in self.prefixes
            ]
        )
        assert [len(own) for own in self.values[-1]] == [NUM_BLOCKS] * NUM_RANKS

    def set(self, key: bytes, value: bytes) -> None:
        self._redis.set(key, value)

    def damage_one_rank(self) -> None:
        """Give rank 1 other valid blocks: of another prompt, of rank 0, and only one of many.

        The first prompts stay as they are.
        """
        _, _, swapped, ranked, single, _ = self.values
        for key, value in zip(swapped[1], self.values[0][1].values(), strict=True):
            self.set(key, value)
        for key in ranked[1]:
            other = self.prefixes[0] + key[len(self.prefixes[1]) :]
            self.set(key, ranked[0][other])
        key, other = sorted(single[1])[:2]
        self.set(key, single[1][other])


def answers(engine: Engine) -> list[Answer]:
    found = []
    for prompt in PROMPTS:
        found += engine.generate([prompt])
        engine.settle()
    return found


def test_two_ranks_load_what_two_others_computed(folder: Path, store: Store) -> None:
    with running(folder, store) as first:
        parts, expected = Parts(first, store), []
        for prompt in PROMPTS:
            expected += first.generate([prompt])
            first.settle()
            parts.note()
        assert not any(each.num_cached for each in expected)

    with running(folder, store) as second:
        found = answers(second)
        assert [each.num_cached for each in found] == [NUM_HIT] * len(PROMPTS)
        assert second.half.stats()["shared_promoted_blocks"] == NUM_BLOCKS * len(PROMPTS)
        assert difference(found, expected) < TOLERANCE

    with running(folder, store, num_ranks=1) as alone:
        assert not any(each.num_cached for each in answers(alone))

    parts.damage_one_rank()
    # What is not proven changes the answers, although rank 0 has the right parts of all blocks.
    with running(folder, store, module="tests.vllm.unproven_connector") as control:
        found = answers(control)
        assert [each.num_cached for each in found] == [NUM_HIT] * len(PROMPTS)
        assert difference(found[:2], expected[:2]) < TOLERANCE
        for at in (2, 3, 4):
            assert difference(found[at : at + 1], expected[at : at + 1]) > DAMAGE

    with running(folder, store) as third:
        found = answers(third)
        assert difference(found, expected) < TOLERANCE
        hits = [each.num_cached for each in found]
        assert hits[:4] + hits[5:] == [NUM_HIT, NUM_HIT, 0, 0, NUM_HIT]
        assert hits[4] < NUM_HIT and hits[4] % BLOCK_SIZE == 0
        assert third.half.stats()["shared_failed_promotes"] == 2 * NUM_BLOCKS + 1
