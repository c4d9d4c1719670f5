"""vLLM's real engine sleeps in the middle of its work, and wakes without its KV cache.

The CPU engine has no sleep mode. The tests make the calls of `sleep` and `wake_up` themselves:
pause, keep the requests, reset the caches, and resume. In between they overwrite the memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from tests.vllm import models
from tests.vllm.engine import (
    DAMAGE,
    TOLERANCE,
    Engine,
    difference,
    prompts,
)
from tests.vllm.full import skip_unless_in_ci
from tests.vllm.movers import Forgetful
from vllm.v1.request import RequestStatus

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own, and those of what it imports

MODELS: dict[str, tuple[dict[str, object], int, int]] = {
    "llama": (models.LLAMA, 60, 400),
    "gemma": (models.GEMMA, 130, 450),
    "granite": (models.GRANITE, 80, 500),
    "qwen-next": (models.QWEN_NEXT, 80, 500),
}
PROMPTS = prompts(3, 300)
NUM_TOKENS = 24


@pytest.fixture(scope="module", params=itertools.product(MODELS, ["sync", "async"]), ids="-".join)
def shared(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    name, scheduling = request.param
    skip_unless_in_ci(request.param)
    config, num_blocks, num_host_blocks = MODELS[name]
    engine = Engine(
        models.make_model(config, tmp_path_factory.mktemp(name)),
        num_blocks=num_blocks,
        scheduling=scheduling,
        options={"num_cpu_blocks": num_host_blocks, "preserve_on_sleep": True},
    )
    yield engine
    engine.close()


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
# Sleep in the chunks of the first prompt, of the second, and three times during generation.
@pytest.mark.parametrize("num_steps", [[1], [3], [6, 5, 1]], ids=str)
def test_generation_continues_after_a_sleep(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, num_steps: list[int], lazy: bool
) -> None:
    expected = engine.generate(PROMPTS, NUM_TOKENS)
    engine.change_options(monkeypatch, lazy_offload=lazy)
    engine.start_over()
    engine.begin(PROMPTS, NUM_TOKENS)
    for num in num_steps:
        engine.step(num)
        loaded, known = engine.stats()["loaded_blocks"], engine.num_computed_tokens()
        engine.sleep()
        assert engine.num_computed_tokens() == 0, "the device has lost all KV"
        engine.wake()
        engine.step(1)
        # vLLM caches a window only where a hit can end: in the middle of a prompt, nowhere.
        if known > 300 or not engine.has_windows:
            engine.settle_loads()
            assert engine.stats()["loaded_blocks"] > loaded, "blocks must come back from the host"
    answers = engine.finish()
    assert difference(answers, expected) < TOLERANCE
    scheduler = engine.core.scheduler
    assert not scheduler.finished_recving_kv_req_ids and not scheduler.failed_recving_kv_req_ids


def test_without_preserve_on_sleep_requests_recompute(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = engine.generate(PROMPTS, NUM_TOKENS)
    engine.change_options(monkeypatch, preserve_on_sleep=False)
    engine.start_over()
    engine.begin(PROMPTS, NUM_TOKENS)
    engine.step(8)
    engine.sleep()
    assert engine.stats()["resident_blocks"] == 0
    engine.wake()
    answers = engine.finish()
    assert engine.stats()["loaded_blocks"] == 0
    assert difference(answers, expected) < TOLERANCE


def test_a_missing_load_changes_answers(engine: Engine) -> None:
    """The negative control: the memory is overwritten, so the answers need the loads."""
    expected = engine.generate(PROMPTS, NUM_TOKENS)
    engine.start_over()
    engine.begin(PROMPTS, NUM_TOKENS)
    engine.step(8)
    engine.sleep()
    engine.wake()
    with engine.movers(Forgetful):  # type: ignore[arg-type]
        answers = engine.finish()
    assert difference(answers, expected) > DAMAGE


def test_loads_in_flight_at_a_sleep_are_repeated(engine: Engine) -> None:
    expected = engine.generate(PROMPTS, NUM_TOKENS)
    engine.settle()
    assert engine.llm.reset_prefix_cache()
    engine.begin(PROMPTS, NUM_TOKENS)
    engine.step(1)
    waiting = [request.status for request in engine.core.scheduler.requests.values()]
    assert RequestStatus.WAITING_FOR_REMOTE_KVS in waiting
    engine.sleep()
    engine.wake()
    loaded = engine.stats()["loaded_blocks"]
    answers = engine.finish()
    assert engine.stats()["loaded_blocks"] > loaded
    assert difference(answers, expected) < TOLERANCE
    scheduler = engine.core.scheduler
    assert not scheduler.finished_recving_kv_req_ids and not scheduler.failed_recving_kv_req_ids


def test_a_load_of_half_the_pool_does_not_block_its_request(engine: Engine) -> None:
    """vLLM reserves blocks for a load that was taken back, so it would not admit it again."""
    asked = prompts(1, 990, seed=2)
    expected = engine.generate(asked, NUM_TOKENS)
    engine.settle()
    assert engine.llm.reset_prefix_cache()
    engine.begin(asked, NUM_TOKENS)
    while not engine.core.scheduler.finished_recving_kv_req_ids:
        engine.step(1)
    engine.sleep()
    engine.wake()
    assert difference(engine.finish(), expected) < TOLERANCE
