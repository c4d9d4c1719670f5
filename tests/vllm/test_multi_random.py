"""kvstow beside a connector that loads and fails: no block has a key of KV that it does not hold.

vLLM lets a request read what another connector did not load, and compute wrong KV from it. So here
a wrong read does not fail, unlike in `test_simulated.py`. What the request then computes is wrong.
No later request may find that on the device or on the host. `KVSTOW_SEEDS=N` runs N lives of each
kind, from `KVSTOW_SEED` on.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.vllm.halves import FULL, WINDOW, reraise
from tests.vllm.neighbour import Neighbour, World
from tests.vllm.setting import CONNECTOR
from tests.vllm.simulated import Simulated, WrongKV, tokens
from tests.vllm.test_simulated import Life
from vllm.v1.core.kv_cache_utils import KVCacheBlock, make_block_hash_with_group_id
from vllm.v1.request import Request

from kvstow.vllm.requests import Requests
from kvstow.vllm.tracked import TrackedRequest

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

FIRST_SEED = int(os.environ.get("KVSTOW_SEED", "1"))
SEEDS = range(FIRST_SEED, FIRST_SEED + int(os.environ.get("KVSTOW_SEEDS", "3")))
NEIGHBOUR = {
    "kv_connector": "Neighbour",
    "kv_connector_module_path": "tests.vllm.neighbour",
    "kv_role": "kv_both",
}


@dataclass
class Beside(Simulated):
    """An engine with a `MultiConnector`."""

    own_at: int = 0
    policy: str = "recompute"
    num_wrong_reads: int = 0
    before_update: Callable[[], None] = lambda: None
    # By vLLM's key: the KV of its block.
    known: dict[Any, np.ndarray[Any, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parts: list[dict[str, Any]] = [NEIGHBOUR]
        parts.insert(self.own_at, CONNECTOR | {"kv_connector_extra_config": self.options})
        self.settings["kv_transfer_config"] = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": self.policy,
            "kv_connector_extra_config": {"connectors": parts},
        }
        super().__post_init__()
        self.half._turn_off = reraise  # type: ignore[method-assign]
        begin_store = self.half.transfers.begin_store

        def checked(job: Any, blocks: list[KVCacheBlock]) -> None:
            stored = set(job.block_ids.tolist())
            self.check_keys([block for block in blocks if block.block_id in stored])
            begin_store(job, blocks)

        self.half.transfers.begin_store = checked  # type: ignore[method-assign]

    def _hash(self, request: Request) -> Any:
        new = super()._hash(request)
        first = len(request.block_hashes)
        values = self.values(
            request.all_token_ids[: 16 * (first + len(new or ()))], request.cache_salt
        )
        for at, block_hash in enumerate(new or (), first):
            own = np.array(values[16 * at : 16 * (at + 1)])
            for group in range(len(self.specs)):
                self.known[make_block_hash_with_group_id(block_hash, group)] = own ^ group
        return new

    def _check(self, request: Request, values: list[int], end: int) -> bool:
        try:
            return super()._check(request, values, end)
        except WrongKV:
            self.num_wrong_reads += 1
            return False

    def _update(self) -> None:
        self.before_update()
        super()._update()
        pool = self.scheduler.kv_cache_manager.block_pool
        self.check_keys([block for block in pool.blocks if not block.ref_cnt])

    def check_keys(self, blocks: list[KVCacheBlock]) -> None:
        """Check that these blocks hold the KV of their keys."""
        for block in blocks:
            if block.block_hash is not None:
                found = self.kv[16][block.block_id, :, 0]
                if (found != self.known[block.block_hash]).any():
                    raise WrongKV(f"step {self.num_steps}: {block} holds {found.tolist()}")


class Episodes(Life):
    """Several requests share each new prompt, and some end while their step is under way."""

    engine: Beside

    def __init__(self, engine: Beside, seed: int) -> None:
        super().__init__(engine, seed)
        self.trunks = [tokens(200, 1000)]
        # Older vLLM itself keeps keys of what a session has dropped.
        self.has_sessions = self.dice.random() < 0.3 and engine.half.requests.stores_sessions
        self.aborting = self.dice.choice([0, 0.05, 0.2])
        engine.before_update = self._abort_perhaps

    def _abort_perhaps(self) -> None:
        """Abort a request while its step is under way."""
        if self.engine.requests and self.dice.random() < self.aborting:
            self.abort()

    def episode(self) -> None:
        self.trunks.append(tokens(200, 1000 + len(self.trunks)))
        for _ in range(self.dice.choice([1, 2, 2, 3])):
            self.add()

    def _prompt(self) -> list[int]:
        trunk = self.dice.choice(self.trunks[-2:])[: self.dice.choice([64, 100, 130, 140])]
        return trunk + tokens(self.dice.choice([5, 20, 40]), 50 + self.dice.randrange(2))


def begin(folder: Path, seed: int, kind: str) -> Episodes:
    """Return a life of this seed, which has not begun."""
    dice = random.Random(f"{kind} {seed}")
    is_hybrid = dice.random() < 0.25
    settings: dict[str, Any] = {}
    if dice.random() < 0.5:
        settings["scheduling_policy"] = "priority"
    if dice.random() < 0.3:
        settings["long_prefill_token_threshold"] = 32
    engine = Beside(
        folder,
        {"num_cpu_blocks": dice.choice([60, 400]), "lazy_offload": dice.random() < 0.4},
        specs=(FULL, WINDOW) if is_hybrid else (FULL,),
        num_blocks=dice.choice([40, 60]) * (1 + is_hybrid),
        num_in_flight=1 if kind == "sync" else dice.choice([1, 2]),
        seed=seed,
        settings=settings,
        own_at=dice.randrange(2),
        policy=dice.choice(["recompute", "recompute", "recompute", "fail"]),
    )
    if dice.random() < 0.5:
        engine.half.tier.gathered_tokens = 0
    idle, failing = dice.choice([0.1, 0.5]), dice.choice([0.3, 0.7])
    # vLLM takes no failure within a step for a model with several groups. If steps overlap, it then
    # schedules tokens that do not exist.
    may_fail_now = not (is_hybrid or engine.num_in_flight > 1)
    Neighbour.world = World(engine, dice, kind, idle, failing, failing * may_fail_now)
    return Episodes(engine, seed)


def live(life: Episodes) -> None:
    """Live, and check answers as far as vLLM promises them, the device and the host."""
    engine = life.engine
    kinds = ["episode"] * 2 + ["add"] * 3 + ["step"] * 10 + ["copy"] * 6 + ["abort", "reset"]
    if life.has_sessions:
        kinds += ["session", "chunk"] * 2
    life.live(300, kinds)
    engine.before_update = lambda: None
    is_exact = not engine.settings.get("long_prefill_token_threshold")
    for name, (prompt, num_tokens, salt) in life.asked.items():
        answer, right = engine.answers.get(name, []), engine.right_answer(prompt, num_tokens, salt)
        if engine.policy == "fail":
            right = right[: len(answer)]
        assert answer == right or not is_exact, name
    Neighbour.world.idle = 1
    life.num_host_tokens = engine.ask_for_all()
    engine.check_at_rest()
    engine.close()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["sync", "async", "mixed"])
def test_no_request_finds_what_another_connector_did_not_load(
    folder: Path, kind: str, seed: int
) -> None:
    life = begin(folder, seed, kind)
    print(f"KVSTOW_SEED={seed} repeats this life")
    live(life)
    counts = dict(Neighbour.world.counts)
    print(
        f"{life.engine.num_wrong_reads} wrong reads, {counts}, {life.num_host_tokens} from the host"
    )


def _only_withhold(requests: Requests, block_ids: Collection[int]) -> None:
    for request_id, tracked in requests.tracked.items():
        table = requests.tier.tables[0].get(request_id, ())
        tracked.is_stale |= any(block.block_id in block_ids for block in table)


def _count_too_soon(tracked: TrackedRequest, *args: Any) -> int:
    given, tracked.num_given_tokens = tracked.num_given_tokens, 0
    try:
        return num_cached_tokens(tracked, *args)
    finally:
        tracked.num_given_tokens = given


num_cached_tokens = TrackedRequest.num_cached_tokens
# The seeds of lives that need the guard, of which each vLLM has one.
WITHOUT: dict[str, tuple[tuple[int, ...], type, str, Callable[..., Any]]] = {
    "eviction at an end": ((21, 16, 3), Requests, "evict_unproven", lambda *_: None),
    "distrust": ((16,), Requests, "distrust", lambda *_: None),
    "eviction by distrust": ((15, 16), Requests, "distrust", _only_withhold),
    "wait for the outcome": ((6,), TrackedRequest, "num_cached_tokens", _count_too_soon),
    "search for shared blocks": ((28, 59), Requests, "_find_unproven", lambda *_: None),
}


@pytest.mark.parametrize("guard", WITHOUT)
def test_without_a_guard_a_block_has_a_key_of_other_kv(
    folder: Path, guard: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative controls. Each of these lives is well with the guard."""
    seeds, where, name, without = WITHOUT[guard]
    for seed in seeds:
        live(begin(folder, seed, "sync"))
        with monkeypatch.context() as patch:
            patch.setattr(where, name, without)
            try:
                live(begin(folder, seed, "sync"))
            except WrongKV:
                return
    pytest.fail(f"no life of the seeds {seeds} needs it")
