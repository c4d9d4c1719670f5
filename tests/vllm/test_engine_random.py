"""vLLM's real engine under random operations: every answer equals that of an engine without kvstow.

`KVSTOW_SEEDS=N` runs N seeds for each engine, from `KVSTOW_SEED` on. A failure prints its seed and
the shortest sequence of operations that still fails.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.tiers.damage import all_proven
from tests.vllm import models
from tests.vllm.engine import Engine
from tests.vllm.full import skip_unless_in_ci
from tests.vllm.halves_below import folder_on_disk
from tests.vllm.movers import Unsteady
from tests.vllm.random_run import NUM_TOKENS, Different, Run, describe
from tests.vllm.reference import Reference
from tests.vllm.runner import RUNNER
from tests.vllm.unsteady_disk import below

from kvstow.tiers.slot_store import SlotStore
from kvstow.transfer import Event, Mover, Ticket

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own, and those of what it imports

MODELS: dict[str, tuple[dict[str, object], int]] = {
    "llama": (models.LLAMA, 36),
    "mistral": (models.MISTRAL, 36),
    "llama4": (models.LLAMA4, 140),
    "gemma": (models.GEMMA, 75),
    "gemma-3n": (models.GEMMA_3N, 75),
    "granite": (models.GRANITE, 60),
    "qwen-next": (models.QWEN_NEXT, 60),
}
# vLLM's CPU engine cannot run drafts with recurrent states: their copies are written in Triton.
WITHOUT_DRAFTS = ("granite", "qwen-next")
# Others read the tokens, too, or scale what their own layer of embeddings returns.
WITH_EMBEDDINGS = ("llama", "mistral")
# The engines that CI has time for.
IN_CI = [
    ("llama", "sync", "plain"),
    ("llama", "async", "drafts"),
    ("gemma", "async", "plain"),
]
FIRST_SEED = int(os.environ.get("KVSTOW_SEED", "1"))
SEEDS = range(FIRST_SEED, FIRST_SEED + int(os.environ.get("KVSTOW_SEEDS", "1")))
NUM_OPERATIONS = int(os.environ.get("KVSTOW_OPERATIONS", "100"))
# Each attempt starts a new engine, because an engine that has failed cannot go on.
MAX_ATTEMPTS = int(os.environ.get("KVSTOW_ATTEMPTS", "6"))


class Bench:
    """An engine that is started again after a failure, and the reference for its answers."""

    def __init__(self, folder: Path, kind: Sequence[str], reference: Reference, disk: Path) -> None:
        self.folder = folder
        self.kind = kind
        self.reference = reference
        self.counts: Counter[str] = Counter()
        self.disk = disk
        (self.disk / "weights").write_text("one")
        model, _, drafts = kind
        self.embeddings: torch.Tensor | None = None
        if model in WITH_EMBEDDINGS and drafts == "plain":
            self.embeddings = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
        self.engine = self._start()

    def _start(self) -> Engine:
        model, scheduling, drafts = self.kind
        settings: dict[str, Any] = {"enable_prompt_embeds": self.embeddings is not None}
        if drafts == "drafts":
            # vLLM has another drafter for asynchronous scheduling.
            is_gpu = scheduling == "async" and RUNNER == "v1"
            settings["speculative_config"] = {
                "method": "ngram_gpu" if is_gpu else "ngram",
                "num_speculative_tokens": 3,
                "prompt_lookup_min": 1,
                "prompt_lookup_max": 3,
            }
        engine = Engine(
            self.folder,
            num_blocks=MODELS[model][1],
            options={
                "num_cpu_blocks": 300,
                "preserve_on_sleep": True,
                "verify": "checksum",
                "disk_path": str(self.disk),
                "disk_bytes_to_use": "400MiB",
                "min_promote_tokens": 0,
                "weights_version_path": str(self.disk / "weights"),
            },
            scheduling=scheduling,
            scheduling_policy="priority",
            **settings,
        )
        engine.settle()  # the disk learns of its ranks
        return engine

    def renew(self) -> None:
        self.engine.close()
        self.engine = self._start()

    def run(
        self,
        seed: int,
        operations: Sequence[tuple[str, int]] | None,
        *,
        lazy: bool,
        mover: Any,
        num_disk_slots: Sequence[int | None] = (None, 80, 1000),
        num_host_blocks: Sequence[int] = (12, 100, 300),
    ) -> Run:
        """Make one run. Its errors have the operations that were begun."""
        engine = self.engine
        run = Run(engine, self.reference, seed, self.embeddings)
        if operations is None:
            operations = run.operations(NUM_OPERATIONS)
        begun: list[tuple[str, int]] = []
        before, clock = engine.half.tier.options, engine.half.tier.clock
        Unsteady.slow = Unsteady.failing = 0.0
        slots = run.dice.choice(num_disk_slots)
        sizes = num_host_blocks if slots is None else [12, 30]
        try:
            engine.half.tier.options = replace(
                before,
                load_timeout_s=1e4,
                lazy_offload=lazy,
                preserve_on_sleep=run.dice.random() < 0.8,
                offload_prompt_only=run.dice.random() < 0.2,
                store_threshold=run.dice.choice([1, 1, 1, 2]),
                eviction_policy=run.dice.choice(["lru", "hit-density"]),
            )
            engine.half.tier.clock = lambda: float(run.num_steps)
            with below(engine, slots), engine.movers(mover):
                engine.start_over(run.dice.choice(sizes))
                for operation in operations:
                    begun.append(operation)
                    run.perform(*operation)
                run.end()
                run.counts["promoted"] += engine.half.stats().get("promoted_blocks", 0)
        except BaseException as error:
            error.add_note(describe(begun))
            error.begun = begun  # type: ignore[attr-defined]
            raise
        finally:
            engine.half.tier.options, engine.half.tier.clock = before, clock
        return run

    def play(self, seed: int, *, lazy: bool) -> Run:
        """Make one run, and if it fails, look for shorter runs that fail as well."""
        try:
            return self.run(seed, None, lazy=lazy, mover=Unsteady)
        except Exception as error:
            failed, shortest = error, error.begun  # type: ignore[attr-defined]
        size, start = max(len(shortest) // 2, 1), 0
        for _ in range(MAX_ATTEMPTS):
            self.renew()
            if start >= len(shortest) - 1:
                size, start = max(size // 2, 1), 0
            shorter = shortest[:start] + shortest[start + size :]
            try:
                self.run(seed, shorter, lazy=lazy, mover=Unsteady)
                start += size
            except Exception as error:
                failed, shortest = error, error.begun  # type: ignore[attr-defined]
        self.renew()
        raise AssertionError(
            f"seed {seed} fails on {'-'.join(self.kind)}, {'lazy' if lazy else 'eager'}: {failed}\n"
            f"the shortest failing sequence, {len(shortest)} operations: "
            f"{describe(shortest)}\nKVSTOW_SEED={seed} repeats it"
        ) from failed


@pytest.fixture(
    scope="module",
    params=itertools.product(MODELS, ["sync", "async"], ["plain", "drafts"]),
    ids="-".join,
)
def bench(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    kind: tuple[str, str, str] = request.param
    name, _, drafts = kind
    if name in WITHOUT_DRAFTS and drafts == "drafts":
        pytest.skip("vLLM's CPU engine has no drafts for recurrent states")
    skip_unless_in_ci(kind, IN_CI)
    folder = models.make_model(MODELS[name][0], tmp_path_factory.mktemp(name))
    with closing(Reference(folder, NUM_TOKENS)) as reference, folder_on_disk() as disk:
        bench = Bench(folder, kind, reference, disk)
        yield bench
        bench.engine.close()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
def test_every_answer_equals_the_reference(bench: Bench, lazy: bool, seed: int) -> None:
    run = bench.play(seed, lazy=lazy)
    print(f"seed {seed}: {run.num_steps} steps, {dict(run.counts)}, {bench.engine.stats()}")
    bench.counts += run.counts
    assert run.counts["answers"] > 0
    assert bench.engine.stats()["jobs_in_flight"] == 0


def test_the_runs_slept_and_hit(bench: Bench) -> None:
    """Check that the runs before this test slept and hit; a single seed need not do both."""
    print(dict(bench.counts))
    assert bench.counts["asleep"] > 0 and bench.counts["cached"] > 0, dict(bench.counts)


class Damaging(Unsteady):
    """Zeroes one layer of one host block of each load, and loads without verification."""

    def load(self, host_slots: Any, block_ids: Any, *, after: Event) -> Ticket:
        layout = self.mover.layout
        start = layout.offsets[-1]
        end = start + layout.regions[-1].block_bytes // len(layout.owners)
        self.mover.arena.slots[host_slots[len(host_slots) // 2], start:end] = 0
        unchecked: Mover = self.mover._mover  # type: ignore[attr-defined] # a VerifiedMover
        return unchecked.load(host_slots, block_ids, after=after)


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
def test_damaged_blocks_change_answers(bench: Bench, lazy: bool) -> None:
    """The negative control of the comparison."""
    steps = [("add", 1), ("step", 2), ("add", 3), ("step", 4)] * 30
    operations = [(kind, 10 * at + number) for at, (kind, number) in enumerate(steps)]
    with pytest.raises(Different):
        bench.run(
            1, operations, lazy=lazy, mover=Damaging, num_disk_slots=[None], num_host_blocks=[300]
        )
    bench.renew()


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
def test_damaged_slots_of_the_file_change_answers(
    bench: Bench, lazy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control of the disk: without its comparison, damage reaches answers."""
    monkeypatch.setattr(SlotStore, "_are_proven", all_proven)
    steps = [("add", 1), ("step", 2), ("add", 3), ("step", 4), ("rot", 5), ("step", 6)] * 30
    operations = [(kind, 10 * at + number) for at, (kind, number) in enumerate(steps)]
    with pytest.raises(Different):  # a window needs few blocks, so one run may miss them
        for seed in range(1, 6):
            bench.run(
                seed,
                operations,
                lazy=lazy,
                mover=Unsteady,
                num_disk_slots=[1000],
                num_host_blocks=[60],
            )
    bench.renew()
