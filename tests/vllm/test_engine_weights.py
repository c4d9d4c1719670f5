"""vLLM's real engine loads other weights in place while blocks go up and down.

vLLM loads the weights of another model of the same shape, and then resets its caches, as a trainer
lets it do. From then on every answer is that of the new weights. In each scene a copy of the old
weights' blocks is under way at that moment, and ends later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.tiers.resp.server import Server as Store
from tests.vllm import models
from tests.vllm.engine import DAMAGE, REST_S, TOLERANCE, Answer, Engine, difference, prompts
from tests.vllm.full import full
from tests.vllm.halves_below import folder_on_disk
from tests.vllm.movers import ChangedMover, LateTicket

from kvstow.transfer import Event, Mover, Ticket
from kvstow.vllm import KVStowConnector

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # vLLM's own, and those of what it imports
    full("starts 14 engines"),
]

*PROMPTS, FRESH = prompts(5, 300)
# Room for three prompts on the device, and for two on the host.
NUM_DEVICE, NUM_HOST = 40, 24
Below = dict[str, Any]


class Weights:
    """Two models of one shape, and the answers of each."""

    def __init__(self, folder: Path) -> None:
        self.folders = [
            models.make_model(models.LLAMA, folder / f"weights {seed}", seed) for seed in range(2)
        ]
        self.answers = []
        for each in self.folders:
            engine = Engine(each, num_blocks=NUM_DEVICE)
            self.answers.append(one_by_one(engine, [*PROMPTS, FRESH]))
            engine.close()


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return Weights(tmp_path_factory.mktemp("weights"))


@pytest.fixture(params=["disk", "shared"])
def below(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Below]:
    """The options of a tier below the host."""
    with ExitStack() as opened:
        if request.param == "disk":
            disk = opened.enter_context(folder_on_disk())
            yield {"disk_path": str(disk), "disk_bytes_to_use": "200MiB"}
        else:
            store = opened.enter_context(Store(tmp_path, "--maxmemory", "500mb"))
            yield {"shared": store.url, "shared_ask_timeout_s": 20, "shared_timeout_s": 60}


@contextmanager
def running(weights: Weights, below: Below, **more: Any) -> Iterator[Engine]:
    options = {
        "num_cpu_blocks": NUM_HOST,
        "min_promote_tokens": 0,
        "promote_timeout_s": 60,
        "load_timeout_s": 60,
        **below,
        **more,
    }
    engine = Engine(weights.folders[0], num_blocks=NUM_DEVICE, options=options)
    try:
        yield engine
        engine.settle()
        engine.check_idle()
    finally:
        engine.close()


@contextmanager
def running_with_version(weights: Weights, below: Below, version: Path) -> Iterator[Engine]:
    """An engine with blocks of the old weights, which reads their version from a file."""
    version.write_text("old")
    more: Any = {"preserve_on_sleep": True, "weights_version_path": str(version)}
    with running(weights, below, **more) as engine:
        one_by_one(engine, PROMPTS)
        yield engine


def one_by_one(engine: Engine, asked: list[list[int]]) -> list[Answer]:
    answers = []
    for tokens in asked:
        answers += engine.generate([tokens])
        if engine.core.scheduler.connector is not None:
            engine.settle()
    return answers


class Held:
    """Holds up the copies of one direction.

    Attributes:
        copies: what the test calls later, so that they begin.
    """

    def __init__(self, engine: Engine, direction: str, patch: pytest.MonkeyPatch) -> None:
        worker = engine.worker.below
        assert worker is not None
        self.copies: list[Callable[[], None]] = []
        self._direction, self._begin = direction, worker._runner.begin
        if direction == "load":
            late = [_LateLoads(mover, self.copies) for mover in engine.worker.movers]
            patch.setattr(engine.worker, "movers", late)
        else:
            patch.setattr(worker._runner, "begin", self._begin_later)

    def _begin_later(self, way: Any, *args: Any, **more: Any) -> None:
        begin = partial(self._begin, way, *args, **more)
        if way == self._direction:
            self.copies.append(begin)
        else:
            begin()


class _LateLoads(ChangedMover):
    def __init__(self, mover: Mover, copies: list[Callable[[], None]]) -> None:
        super().__init__(mover)
        self._copies = copies

    def load(self, host_slots: Any, block_ids: Any, *, after: Event) -> Ticket:
        late = LateTicket(lambda: self.mover.load(host_slots, block_ids, after=after))
        self._copies.append(late.go)
        return late


def step_until(engine: Engine, is_reached: Callable[[], object]) -> None:
    """Step until a copy is held up."""
    end_s = time.monotonic() + REST_S
    while not is_reached():
        engine.step(1)
        assert time.monotonic() < end_s, "no such copy begins"
        time.sleep(0.0001)


def change_weights(
    engine: Engine, weights: Weights, new: int, direction: str, version: Path | None = None
) -> list[Answer]:
    """Change the weights while a copy is under way; return what a request in flight answers.

    A request waits for promotes and loads. A demote is of a request that has been answered. The
    version is a file in which the new weights are named before they are loaded.
    """
    asked = [FRESH] if direction == "demote" else [PROMPTS[at] for at in ASKED[direction]]
    assert engine.llm.reset_prefix_cache(), "the device must ask the host"
    with pytest.MonkeyPatch.context() as patch:
        held = Held(engine, direction, patch)
        engine.begin(asked)
        if direction == "demote":
            assert difference(engine.finish(), weights.answers[1 - new][-1:]) < TOLERANCE
            step_until(engine, lambda: held.copies and not engine.half.transfers.in_flight)
        step_until(engine, lambda: held.copies)
        if version is not None:
            version.write_text("new")
        engine.llm.collective_rpc(
            "reload_weights", kwargs={"weights_path": str(weights.folders[new])}
        )
        is_reset = engine.llm.reset_prefix_cache(reset_connector=True)
        for go in held.copies:
            go()
    found = engine.finish()
    engine.settle()
    # While a load holds blocks of the device, vLLM resets only the connector.
    assert is_reset == (direction != "load")
    if not is_reset:
        assert engine.llm.reset_prefix_cache(reset_connector=True)
    return found


def live(engine: Engine, weights: Weights, direction: str, new: int) -> None:
    """Change the weights while there are blocks of the old ones in all tiers."""
    old = 1 - new
    assert difference(one_by_one(engine, PROMPTS), weights.answers[old][:-1]) < TOLERANCE
    found = change_weights(engine, weights, new, direction)
    for at in ASKED[direction]:
        assert difference(found, weights.answers[new][at : at + 1]) < TOLERANCE
    # The scene of the demote is the first to ask for the fresh prompt, and the last scene.
    asked = [*PROMPTS, FRESH] if direction == "demote" else PROMPTS
    found = one_by_one(engine, asked)
    assert difference(found, weights.answers[new][: len(asked)]) < TOLERANCE
    hit = [at for at, each in enumerate(found) if each.num_cached]
    assert hit in ([], ASKED[direction]), direction
    # The tier is on again, and has the blocks of the new weights.
    found = one_by_one(engine, PROMPTS)
    assert any(each.num_cached for each in found)
    assert difference(found, weights.answers[new][:-1]) < TOLERANCE


# Which prompt a request asks for: the first fell off the host, and the last is there.
ASKED = {"promote": [0], "load": [3], "demote": []}


def test_no_answer_comes_from_blocks_of_the_old_weights(weights: Weights, below: Below) -> None:
    with running(weights, below) as engine:
        for at, direction in enumerate(ASKED, 1):
            live(engine, weights, direction, at % 2)


@pytest.mark.parametrize("direction", ASKED)
def test_without_a_reset_an_answer_comes_from_blocks_of_the_old_weights(
    weights: Weights, below: Below, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: kvstow ignores the reset."""
    monkeypatch.setattr(KVStowConnector, "reset_cache", lambda _: True)
    with running(weights, below) as engine:
        one_by_one(engine, PROMPTS)
        found = change_weights(engine, weights, 1, direction)
        at = ASKED[direction]
        if direction == "demote":
            found, at = one_by_one(engine, [FRESH]), [len(PROMPTS)]
        assert found[0].num_cached > 0
        assert difference(found, [weights.answers[1][each] for each in at]) > DAMAGE


@pytest.mark.parametrize("is_written", [True, False], ids=["version", "the old version"])
def test_a_reset_keeps_the_blocks_of_weights_whose_version_is_the_same(
    weights: Weights, below: Below, tmp_path: Path, *, is_written: bool
) -> None:
    """Who changes weights writes their version first. The control forgets it."""
    version = tmp_path / "version"
    with running_with_version(weights, below, version) as engine:
        named = version if is_written else None
        found = change_weights(engine, weights, 1, "promote", named)
        assert (difference(found, weights.answers[1][:1]) < TOLERANCE) == is_written


@pytest.mark.parametrize("is_written", [True, False], ids=["version", "the old version"])
def test_a_reset_of_the_device_alone_keeps_no_blocks_of_a_version_that_was(
    weights: Weights, below: Below, tmp_path: Path, *, is_written: bool
) -> None:
    """Without `reset_connector` vLLM tells no connector of the reset."""
    version = tmp_path / "version"
    with running_with_version(weights, below, version) as engine:
        if is_written:
            version.write_text("new")
        engine.llm.collective_rpc(
            "reload_weights", kwargs={"weights_path": str(weights.folders[1])}
        )
        assert engine.llm.reset_prefix_cache()
        found = one_by_one(engine, PROMPTS)
        assert (difference(found, weights.answers[1][:-1]) < TOLERANCE) == is_written
