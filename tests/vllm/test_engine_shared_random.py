"""vLLM's real engine on a store under random operations: every answer equals the reference.

The store outlives the engine's runs, so each run loads what those before it have put. Jobs are late
and fail, and values in the store are damaged. `KVSTOW_SEEDS=N` runs N seeds from `KVSTOW_SEED` on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.tiers.resp.server import Server as Store
from tests.vllm import models
from tests.vllm.engine import Engine
from tests.vllm.full import skip_unless_in_ci
from tests.vllm.movers import Unsteady
from tests.vllm.random_run import NUM_TOKENS, Different, Run, describe
from tests.vllm.reference import Reference
from tests.vllm.sharing import AnySum, redis_of
from tests.vllm.unsteady_disk import UnsteadyRunner

from kvstow.tiers.namespace import HEADER_BYTES
from kvstow.vllm.below.shared import SharedTier
from kvstow.vllm.below.slow_loads import SlowLoads

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own, and those of what it imports

FIRST_SEED = int(os.environ.get("KVSTOW_SEED", "1"))
SEEDS = range(FIRST_SEED, FIRST_SEED + int(os.environ.get("KVSTOW_SEEDS", "1")))
NUM_OPERATIONS = int(os.environ.get("KVSTOW_OPERATIONS", "100"))
# The model, the way of scheduling, and blocks of the device. CI has time for the first.
KINDS: dict[str, tuple[dict[str, object], str, int]] = {
    "llama": (models.LLAMA, "async", 36),
    "gemma": (models.GEMMA, "sync", 75),
    "granite": (models.GRANITE, "async", 60),
}


class Bench:
    """An engine on a store, and the reference for its answers."""

    def __init__(self, folder: Path, kind: str, store: Store) -> None:
        config, scheduling, num_blocks = KINDS[kind]
        model = models.make_model(config, folder)
        self.store = store
        self.reference = Reference(model, NUM_TOKENS)
        (folder / "version").write_text("one")
        options = {
            "num_cpu_blocks": 300,
            "preserve_on_sleep": True,
            "verify": "checksum",
            "weights_version_path": str(folder / "version"),
            "shared": store.url,
            "shared_ask_timeout_s": 20,
            "shared_timeout_s": 60,
            "min_promote_tokens": 0,
        }
        self.engine = Engine(
            model,
            num_blocks=num_blocks,
            options=options,
            scheduling=scheduling,
            scheduling_policy="priority",
        )
        self.engine.settle()  # the tier learns of its ranks

    def close(self) -> None:
        self.engine.close()
        self.reference.close()

    @property
    def below(self) -> SharedTier:
        below = self.engine.half.tier.below
        assert isinstance(below, SharedTier)
        return below

    @contextmanager
    def unsteady(self, run: Run) -> Iterator[None]:
        """Let jobs be late and fail, let clocks count steps, and in some runs skip slow loads."""
        tier, worker, below = self.engine.half.tier, self.engine.worker.below, self.below
        assert worker is not None
        before = tier.options, tier.clock, below.options, below.clock, worker._runner
        tier.options = replace(
            tier.options, load_timeout_s=1e4, preserve_on_sleep=run.dice.random() < 0.8
        )
        below.options = replace(tier.options, promote_timeout_s=50)
        tier.clock = below.clock = lambda: float(run.num_steps)
        worker._runner = UnsteadyRunner(worker._runner)
        if run.dice.random() < 0.3:
            below.slow_loads = SlowLoads(below.name, 0, below.clock)
        try:
            yield
        finally:
            if below.slow_loads is not None:
                run.counts["skipped"] = below.slow_loads.num_skipped_tokens
            below.slow_loads = None
            tier.options, tier.clock, below.options, below.clock, worker._runner = before

    def run(
        self, seed: int, operations: Sequence[tuple[str, int]] | None, num_host: Sequence[int]
    ) -> Run:
        """Make one run, as a server that has just started with the weights of the others."""
        run = Run(self.engine, self.reference, seed)
        if operations is None:
            kinds = run.kinds | {"spoil": 1}
            names = run.dice.choices(list(kinds), list(kinds.values()), k=NUM_OPERATIONS)
            operations = [(name, at) for at, name in enumerate(names)]
        Unsteady.slow = Unsteady.failing = 0.0
        self.below.questions.salt = b""
        begun: list[tuple[str, int]] = []
        mover: Any = Unsteady
        try:
            with self.unsteady(run), self.engine.movers(mover):
                self.engine.start_over(run.dice.choice(num_host))
                for name, at in operations:
                    begun.append((name, at))
                    if name == "spoil":
                        spoil(self.store, 0.1)
                    else:
                        run.perform(name, at)
                run.end()
        except BaseException as error:
            error.add_note(f"KVSTOW_SEED={seed}: {describe(begun)}")
            raise
        run.counts["loaded"] = self.engine.half.stats()["shared_promoted_blocks"]
        return run


def spoil(store: Store, share: float) -> None:
    """Flip bits in a share of the blocks of the store, behind their frames."""
    redis = redis_of(store)
    keys = sorted(redis.scan_iter("kvstow:*"))
    for key in Unsteady.dice.sample(keys, int(len(keys) * share)):
        framed = bytearray(redis.get(key))
        for at in range(HEADER_BYTES + Unsteady.dice.randrange(64), len(framed), 64):
            framed[at] ^= 0x7F
        redis.set(key, bytes(framed))


@pytest.fixture(scope="module", params=KINDS)
def bench(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    skip_unless_in_ci((request.param,), [("llama",)])
    folder = tmp_path_factory.mktemp(request.param)
    with Store(folder, "--maxmemory", "500mb") as store, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        bench = Bench(folder, request.param, store)
        yield bench
        bench.close()


@pytest.mark.parametrize("num_host", [12, 30, 300])
@pytest.mark.parametrize("seed", SEEDS)
def test_every_answer_equals_the_reference(bench: Bench, seed: int, num_host: int) -> None:
    run = bench.run(seed, None, [num_host])
    print(f"seed {seed}: {run.num_steps} steps, {dict(run.counts)}")
    assert run.counts["answers"] > 0
    assert bench.engine.stats()["jobs_in_flight"] == 0


def test_a_spoiled_store_changes_answers_if_nobody_looks(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control, with blocks that a run of few faults has put."""
    steps = [("add", 1), ("step", 2), ("add", 3), ("step", 4)] * 30
    operations = [(kind, 10 * at + number) for at, (kind, number) in enumerate(steps)]
    bench.run(1, operations, [300])
    assert bench.run(1, operations, [300]).counts["loaded"] > 0
    spoil(bench.store, 1.0)
    monkeypatch.setattr("kvstow.tiers.namespace.Namespace.checksum", lambda *_: AnySum())
    with pytest.raises(Different):
        bench.run(1, operations, [300])
