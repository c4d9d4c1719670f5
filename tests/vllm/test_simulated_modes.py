"""Random engines in modes of vLLM's scheduler that few tests switch on: no request reads wrong KV.

Answers stop at tokens and at repetitions, or fill `max_model_len`. Requests are aborted while their
step runs. The engine pauses, holds prefills back as data-parallel ones do, or has a pipeline, whose
steps overlap more. `KVSTOW_SEEDS=N` runs N seeds from `KVSTOW_SEED` on.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from tests.vllm import simulated
from tests.vllm.halves import BLOCK_SIZE, FULL, WINDOW
from tests.vllm.simulated import VOCAB_SIZE, Simulated, WrongKV, tokens
from tests.vllm.test_simulated import HarshLife
from vllm import version as vllm_version
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RepetitionDetectionParams, SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.sched.utils import check_sequence_repetition
from vllm.v1.request import Request

from kvstow.vllm.connector import _hashes_sessions_correctly
from kvstow.vllm.transfers import Transfers

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

FIRST_SEED = int(os.environ.get("KVSTOW_SEED", "1"))
SEEDS = range(FIRST_SEED, FIRST_SEED + int(os.environ.get("KVSTOW_SEEDS", "6")))
KNOWN = inspect.signature(EngineArgs).parameters
REPETITION = RepetitionDetectionParams(max_pattern_size=3, min_pattern_size=1, min_count=2)
# The steps that overlap, and the stages of the pipeline.
MODES = {"sync": (1, 1), "async": (2, 1), "stages": (2, 2), "async stages": (3, 2)}


@dataclass
class Modes(Simulated):
    """An engine in one of `MODES`, which may hold prefills back."""

    mode: str = "sync"
    eagle: bool = False
    throttles: bool = False
    aborted: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_in_flight = MODES[self.mode][0]
        with pytest.MonkeyPatch.context() as patch:
            if self.mode == "stages":
                patch.setattr(simulated, "AsyncScheduler", Scheduler)
            super().__post_init__()
        # Only Model Runner V2 has both stages and asynchronous steps.
        self.scheduler.use_v2_model_runner = self.mode == "async stages"

    def _config(self) -> Any:
        config = super()._config()
        config.parallel_config.pipeline_parallel_size = MODES[self.mode][1]
        config.scheduler_config.async_scheduling = self.mode.startswith("async")
        if self.eagle:
            config.speculative_config.method = "eagle"
        return config

    def step(self) -> bool:
        schedule = self.scheduler.schedule
        with pytest.MonkeyPatch.context() as patch:
            if self.throttles and self.dice.random() < 0.6:
                patch.setattr(self.scheduler, "schedule", lambda: schedule(True))
            return super().step()

    def _update(self) -> None:
        for name in self.aborted:
            self.abort(name)
        self.aborted.clear()
        super()._update()


class ModesLife(HarshLife):
    """Answers end early, and the engine pauses."""

    def __init__(self, engine: Modes, seed: int) -> None:
        super().__init__(engine, seed)
        self.modes = engine
        self.stops: dict[str, tuple[list[int], bool]] = {}
        self.max_tokens = engine.scheduler.max_model_len

    def add(self) -> None:
        if len(self.engine.requests) > 8:
            return
        name, prompt = f"r{next(self.names)}", self._prompt()[: self.max_tokens - 2]
        salt = self.dice.choice([None, None, "pepper"])
        self.asked[name] = prompt, self.dice.choice([1, 2, 5, 20, 60]), salt
        self._ask(name, prompt, self.asked[name][1], salt=salt, priority=self.dice.randrange(3))

    def _ask(self, name: str, prompt: list[int], max_tokens: int, **settings: Any) -> None:
        stops = self.dice.sample(range(VOCAB_SIZE), self.dice.choice([0, 0, 3, 20]))
        repeats = self.dice.random() < 0.1
        self.stops[name] = stops, repeats
        params = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            stop_token_ids=stops or None,
            repetition_detection=REPETITION if repeats else None,
        )
        salt = settings.pop("salt", None)
        request = Request(
            name, prompt, params, None, cache_salt=salt, block_hasher=self.engine._hash, **settings
        )
        self.engine.scheduler.add_request(request)

    def session(self) -> None:
        if sum(request.resumable for request in self.engine.requests.values()) < 2:
            self.sessions.append(f"s{next(self.names)}")
            self._chunk(self.sessions[-1], self._prompt()[: self.max_tokens - 100])

    def chunk(self) -> None:
        alive = [name for name in self.sessions if name in self.engine.requests]
        if not alive:
            return
        session = self.engine.requests[name := self.dice.choice(alive)]
        # vLLM does not compare the length of a session with `max_model_len`.
        if session.num_tokens < self.max_tokens - 100 and not session.streaming_queue:
            self._chunk(name, tokens(self.dice.choice([16, 32, 7]), self.dice.randrange(50)))

    def _chunk(self, name: str, chunk: list[int]) -> None:
        self._ask(name, chunk, self.dice.choice([1, 2, 10, 30]), resumable=True)

    def abort(self) -> None:
        """Abort a request, perhaps while its step runs."""
        name = self.dice.choice([*self.engine.requests, "unknown"])
        self.asked.pop(name, None)
        if name in self.sessions:
            self.sessions.remove(name)
        (self.modes.aborted.append if self.dice.random() < 0.5 else self.engine.abort)(name)

    def pause(self) -> None:
        scheduler = self.engine.scheduler
        scheduler.set_pause_state(self.dice.choice([PauseState.PAUSED_ALL, PauseState.PAUSED_NEW]))
        for _ in range(self.dice.choice([3, 12, 40])):
            getattr(self, self.dice.choice(["step", "step", "copy", "add", "abort"]))()
        if not self.engine.steps and self.dice.random() < 0.3:
            with contextlib.suppress(RuntimeError):  # loads hold blocks
                scheduler.reset_prefix_cache(reset_running_requests=True)
        scheduler.set_pause_state(PauseState.UNPAUSED)

    def go(self, num_happenings: int, *without: str) -> None:
        kinds = ["add"] * 6 + ["step"] * 16 + ["copy"] * 8 + ["session", "chunk"] * 3
        kinds += ["abort", "reset", "pause"]
        self.live(num_happenings, [kind for kind in kinds if kind not in without])
        for name, (prompt, num_tokens, salt) in self.asked.items():
            right = self._right(name, prompt, num_tokens, salt)
            assert self.engine.answers.get(name, []) == right, name
        self.num_host_tokens = self.engine.ask_for_all()
        self.engine.check_at_rest()

    def _right(
        self, name: str, prompt: Sequence[int], num_tokens: int, salt: str | None
    ) -> list[int]:
        stops, repeats = self.stops[name]
        answer: list[int] = []
        for _ in range(min(num_tokens, self.max_tokens - len(prompt))):
            answer.append(self.engine.next([*prompt, *answer], salt))
            if answer[-1] in stops or (repeats and check_sequence_repetition(answer, REPETITION)):
                break
        return answer


def engine_of(folder: Path, seed: int) -> Modes:
    """Return an engine whose model and settings depend on the seed."""
    dice = random.Random(seed)
    mode = dice.choice(list(MODES))
    with_drafts = mode != "stages" and dice.random() < 0.5
    wide = {"block_size": 2 * BLOCK_SIZE, "head_size": FULL.head_size // 2}
    large = replace(FULL, **wide, head_size_v=FULL.head_size // 2)
    specs = dice.choice([(FULL,), (FULL, WINDOW), (WINDOW,), (large, WINDOW)])
    settings: dict[str, Any] = {
        "scheduling_policy": dice.choice(["fcfs", "priority"]),
        "max_num_batched_tokens": dice.choice([37, 64, 200]),
        "long_prefill_token_threshold": dice.choice([0, 20]),
        "long_prefill_token_threshold_adaptive": dice.random() < 0.3,
        "watermark": dice.choice([0.0, 0.1]),
        "scheduler_reserve_full_isl": dice.random() < 0.5,
        "max_num_active_seqs": dice.choice([None, 2]),
        "prefill_schedule_interval": dice.choice([1, 3]),
        "max_model_len": dice.choice([180, 512]),
    }
    if dice.random() < 0.5:
        settings["kv_events_config"] = {"enable_kv_cache_events": True, "publisher": "null"}
    options = {
        "num_cpu_blocks": dice.choice([25, 400]),
        "lazy_offload": dice.random() < 0.4,
        "verify": "checksum",
        "load_timeout_s": 10.0,
        "preserve_on_sleep": dice.random() < 0.3,
    }
    return Modes(
        folder,
        options,
        specs,
        num_blocks=dice.choice([26, 40]) * len(specs) + 10,
        drafts=with_drafts,
        seed=seed,
        settings={name: value for name, value in settings.items() if name in KNOWN},
        mode=mode,
        eagle=with_drafts and dice.random() < 0.5,
        throttles=dice.random() < 0.3,
    )


def live(folder: Path, seed: int) -> None:
    engine = engine_of(folder, seed)
    version = vllm_version.__version_tuple__[:2]
    stores_sessions = _hashes_sessions_correctly(
        version, has_drafts=engine.drafts, has_states=False
    )
    try:
        # Where kvstow does not store sessions, vLLM itself may serve wrong KV to them.
        ModesLife(engine, seed).go(400, *(() if stores_sessions else ("session", "chunk")))
    except AssertionError as error:
        error.add_note(f"KVSTOW_SEED={seed} repeats it")
        raise
    finally:
        engine.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_requests_read_their_own_kv_in_rare_modes(folder: Path, seed: int) -> None:
    live(folder, seed)


def test_without_references_of_stores_wrong_kv_is_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control."""
    monkeypatch.setattr(Transfers, "_hold", lambda *_: None)
    with pytest.raises(WrongKV):
        for seed in range(5, 11):
            live(folder, seed)
