"""Diffusion models: what a request that only reads its canvas leaves has no right KV.

Such a model guesses a whole canvas of tokens, step by step, and then computes their KV in one more
step (commit). A request with `diffusion_read_only` ends before that step. vLLM has versions that
give its blocks the hashes of the guessed tokens all the same.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.vllm import simulated
from tests.vllm.simulated import Simulated, tokens
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

CANVAS = 16

diffusion = pytest.importorskip("vllm.config.diffusion", reason="since vLLM 0.31")
schedulers = pytest.importorskip("vllm.v1.core.sched.diffusion_scheduler")

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own


@dataclass
class Diffusion(Simulated):
    """An engine whose requests guess a canvas in one step, and compute its KV in the next."""

    guessed: set[str] = field(default_factory=set)

    def _config(self) -> Any:
        config = super()._config()
        config.model_config.__dict__["is_diffusion"] = True
        config.diffusion_config = diffusion.DiffusionConfig(canvas_length=CANVAS)
        return config

    def ask(self, name: str, prompt: list[int], *, read_only: bool = False) -> None:
        params = SamplingParams(
            temperature=0,
            max_tokens=CANVAS,
            ignore_eos=True,
            extra_args={"diffusion_read_only": True} if read_only else None,
        )
        self.scheduler.add_request(
            Request(name, list(prompt), params, None, block_hasher=self._hash)
        )

    def _compute(self, name: str, num_tokens: int, output: SchedulerOutput) -> list[int]:
        request = self.scheduler.requests[name]
        in_flight = self.sampled.setdefault(name, deque())
        known = [*request.all_token_ids]
        for sampled in in_flight:
            known += sampled.tokens
        start = request.num_computed_tokens - num_tokens
        start -= sum(sampled.num_rejected for sampled in in_flight)
        is_guess = bool(output.scheduled_spec_decode_tokens.get(name))
        canvas = self.right_answer(known, CANVAS, None) if is_guess else []
        values = self.values(known + canvas, None)
        assert request.sampling_params is not None
        reads_only = bool(request.sampling_params.extra_args)
        is_commit = name in self.guessed and not reads_only
        if name not in self.guessed or is_commit:  # else the step is discarded
            self._check(request, values, start)
        if is_guess and not is_commit:
            values[len(known) :] = [-2] * CANVAS
            self.guessed.add(name)
        else:
            self.guessed.discard(name)
        for group in range(len(self.specs)):
            self._write(request, group, values, start, start + num_tokens, 0)
        new = canvas if is_commit or reads_only else []
        num_rejected = CANVAS - len(new) if is_guess else 0
        in_flight.append(simulated._Sampled(num_tokens, new, num_rejected))
        return new


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
def test_no_block_of_a_canvas_that_was_only_read_is_served(
    folder: Path, lazy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another prompt goes on from the answer. What a model has committed is served."""
    monkeypatch.setattr(simulated, "AsyncScheduler", schedulers.DiffusionAsyncScheduler)
    options = {"num_cpu_blocks": 60, "lazy_offload": lazy}
    engine = Diffusion(folder, options, num_blocks=12, num_in_flight=2)
    prompt = tokens(63, 1)
    later = [*prompt, *engine.right_answer(prompt, CANVAS, None), *tokens(20, 2)]
    for read_only, num_hit in ((True, 48), (False, 64)):
        for is_from_host in (False, True):
            engine.ask("first", prompt, read_only=read_only)
            engine.settle()
            if is_from_host:
                assert engine.scheduler.reset_prefix_cache()
            assert engine.half.offload is not None
            before = engine.half.offload.stats()["hit_tokens"]
            engine.ask("later", later)
            engine.settle()
            num_loaded = engine.half.offload.stats()["hit_tokens"] - before
            assert num_loaded == (num_hit if is_from_host else 0)
            assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert engine.answers["first"] == 4 * later[len(prompt) : len(prompt) + CANVAS]
    assert engine.answers["later"] == 4 * engine.right_answer(later, CANVAS, None)
    engine.close()
