"""vLLM's engine in this process, so that tests can look into the connector.

It runs on the CPU, and on a GPU where vLLM is built for one.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from packaging.version import Version
from tests.vllm.forking import inspect_here
from tests.vllm.models import HYBRIDS, VOCAB_SIZE
from tests.vllm.runner import RUNNER
from tests.vllm.setting import CONNECTOR, ENVIRONMENT

os.environ.update(ENVIRONMENT, VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")

import torch
import vllm
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.distributed.kv_transfer import (
    ensure_kv_transfer_shutdown,
    get_kv_transfer_group,
)
from vllm.platforms import current_platform
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.core.sched.interface import PauseState

from kvstow.transfer import Mover
from kvstow.vllm import KVStowConnector, identity
from kvstow.vllm.scheduler import SchedulerHalf
from kvstow.vllm.worker import WorkerHalf

try:
    from vllm.triton_utils import dispatcher
except ImportError:  # vLLM before 0.32 does not inspect imported objects
    dispatcher = None

# Other tests may have loaded torch already, which reads the environment once. Compilation by torch
# starts a C++ compiler, and takes an engine 20 seconds.
torch.set_num_threads(1)
torch._dynamo.config.disable = True
inspect_here()

BLOCK_SIZE = 32
_numbers = itertools.count()
ON_GPU = current_platform.is_cuda()
if os.environ.get("KVSTOW_GPU") == "required" and not ON_GPU:
    raise RuntimeError(f"vLLM {vllm.__version__} is not built for a GPU, or reaches none")
# Correct runs differ by 1e-5 at most, because batch shapes differ. One damaged block makes 0.5.
TOLERANCE = 1e-4
DAMAGE = 0.01
# In float32 as on the CPU, of which vLLM's other backends have no kernels. Engines follow each
# other in one process, and none needs the rest of the memory.
_GPU_SETTINGS = {"attention_backend": "TRITON_ATTN", "gpu_memory_utilization": 0.2}
REST_S = 60.0
"""Seconds in which copies must have landed, also on a busy machine with a slow disk."""
IDLE_S = 0.001
"""What vLLM's engine sleeps after a step without tokens. Without it, other threads starve."""


@dataclass(frozen=True)
class Answer:
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    num_cached: int


def prompts(num_prompts: int, num_tokens: int, seed: int = 1) -> list[list[int]]:
    choose = random.Random(seed)
    return [
        [choose.randrange(3, VOCAB_SIZE) for _ in range(num_tokens)] for _ in range(num_prompts)
    ]


def difference(found: Sequence[Answer], expected: Sequence[Answer]) -> float:
    """Return the largest difference of log-probabilities; infinity if tokens differ."""
    worst = 0.0
    for a, b in zip(found, expected, strict=True):
        if a.tokens != b.tokens:
            return float("inf")
        worst = max(worst, *(abs(x - y) for x, y in zip(a.logprobs, b.logprobs, strict=True)))
    return worst


def answer(output: Any) -> Answer:
    [sequence] = output.outputs
    chosen = zip(sequence.logprobs, sequence.token_ids, strict=True)
    return Answer(
        tuple(sequence.token_ids),
        tuple(step[token].logprob for step, token in chosen),
        output.num_cached_tokens,
    )


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    """Return parameters for an answer of exactly `max_tokens` tokens with log-probabilities."""
    return SamplingParams(
        temperature=0,
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        logprobs=1,
        **more,
    )


def poison(worker: WorkerHalf) -> None:
    """Overwrite the device's whole cache with values that no model computes."""
    for layout in worker._layouts:
        for tensor in layout.owners:
            assert isinstance(tensor, torch.Tensor)
            # A recurrent layer's tensor has bytes, and leaves out their padding.
            torch.empty(0, device=tensor.device).set_(tensor.untyped_storage()).fill_(1e4)


def _install_kernels(model: Path, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Install what vLLM's CPU engine lacks for the model; return the settings that it needs."""
    kind = json.loads((model / "config.json").read_text())["model_type"]
    if ON_GPU or kind not in {config["model_type"] for config in HYBRIDS.values()}:
        return {}
    if Version(vllm.__version__) < Version("0.32"):
        pytest.skip(f"vLLM {vllm.__version__}'s CPU build has no float32 kernels for {kind}")
    from tests.vllm import hybrid_kernels  # noqa: PLC0415 - older vLLM lacks what it replaces

    return hybrid_kernels.install(kind, patch)


def _vars(value: object) -> Mapping[str, Any]:
    found: Any = vars(value)
    return found if type(found) in (dict, MappingProxyType) else {}


class _Immediate:
    """A CUDA stream or event on a machine without CUDA, where copies end before they return."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., bool]:
        return lambda *args, **kwargs: True


def _schedule_asynchronously(patch: pytest.MonkeyPatch) -> None:
    """Let vLLM schedule a step while the step before it runs, as it does by default on GPUs.

    vLLM's CPU platform switches this off. The scheduler and the queue of batches are vLLM's. This
    function replaces only the streams, events and pinned memory of the model runner.
    """
    check = CpuPlatform.check_and_update_config.__func__
    zeros = torch.zeros

    def checked(cls: type, config: Any) -> None:
        check(cls, config)
        config.scheduler_config.async_scheduling = True

    def unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return zeros(*args, **kwargs)

    patch.setattr(CpuPlatform, "check_and_update_config", classmethod(checked))
    patch.setattr(torch, "zeros", unpinned)
    patch.setattr(torch.cuda, "Event", _Immediate)
    patch.setattr(torch.cuda, "Stream", _Immediate)
    patch.setattr(torch.cuda, "current_stream", _Immediate)
    patch.setattr(torch.cuda, "stream", lambda stream: nullcontext())


class Engine:
    """An engine with a small pool: prompts fall out of it between rounds."""

    def __init__(
        self,
        model: Path,
        *,
        num_blocks: int,
        options: dict[str, Any] | None = None,
        scheduling: str = "sync",
        **settings: Any,
    ) -> None:
        self._patch = pytest.MonkeyPatch()
        # vLLM collects garbage at each start and end, which takes a second for all that lives
        # already. It freezes its engine, too, and at the end unfreezes everything.
        gc.freeze()
        self._patch.setattr(gc, "freeze", lambda: None)
        self._patch.setattr(gc, "unfreeze", lambda: None)
        # vLLM inspects all imported objects, and fails at an object of llvmlite that claims to have
        # a `__dict__`. With n-gram drafts no second engine could start.
        if dispatcher is not None:
            self._patch.setattr(dispatcher, "vars", _vars, raising=False)
        if ON_GPU:
            settings = _GPU_SETTINGS | {"async_scheduling": scheduling == "async"} | settings
        elif scheduling == "async":
            _schedule_asynchronously(self._patch)
        # Tests write their models in this process.
        self._patch.setattr(identity, "process_began", lambda: float("inf"))
        settings = _install_kernels(model, self._patch) | settings
        if options is not None:
            ensure_kv_transfer_shutdown()  # an engine whose test has failed is still open
            settings["kv_transfer_config"] = CONNECTOR | {"kv_connector_extra_config": options}
        defaults: dict[str, Any] = {
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "enforce_eager": True,
            "block_size": BLOCK_SIZE,
            "num_gpu_blocks_override": num_blocks,
            "max_model_len": 1024,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 256,
            "enable_prefix_caching": True,
            "disable_log_stats": True,
            "seed": 0,
        }
        assert (os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1") == (RUNNER == "v2")
        try:
            self.llm = LLM(model=str(model), **(defaults | settings))
        except BaseException:
            self._patch.undo()
            raise
        self.core = self.llm.llm_engine.engine_core.engine_core
        self._rest_when_idle()
        assert (self.core.batch_queue is not None) == (scheduling == "async")

    def _rest_when_idle(self) -> None:
        """Sleep after a step without tokens, as vLLM does where its engine is a process."""
        step = self.core.step_fn

        def stepping() -> tuple[Any, bool]:
            outputs, has_computed = step()
            if not has_computed and self.core.scheduler.has_requests():
                time.sleep(IDLE_S)
            return outputs, has_computed

        self.core.step_fn = stepping

    @property
    def connector(self) -> KVStowConnector:
        connector = self.core.scheduler.connector
        assert isinstance(connector, KVStowConnector)
        return connector

    @property
    def half(self) -> SchedulerHalf:
        half = self.connector._scheduler
        assert half is not None
        return half

    @property
    def worker(self) -> WorkerHalf:
        connector = get_kv_transfer_group()
        assert isinstance(connector, KVStowConnector)
        return connector._worker

    def generate(
        self,
        asked: Sequence[Sequence[int]],
        max_tokens: int = 8,
        lora_request: Any = None,
        hints: Sequence[dict[str, Any]] | None = None,
        **prompt: Any,
    ) -> list[Answer]:
        """Answer these prompts; `hints` has those of each request."""
        params: Any = greedy(max_tokens)
        if hints is not None:
            given = [{"kv_transfer_params": {"kvstow": hint}} for hint in hints]
            params = [greedy(max_tokens, extra_args=args) for args in given]
        outputs = self.llm.generate(
            [{"prompt_token_ids": list(tokens), **prompt} for tokens in asked],
            params,
            use_tqdm=False,
            lora_request=lora_request,
        )
        return [answer(output) for output in outputs]

    def begin(
        self, asked: Sequence[Sequence[int]], max_tokens: int = 8, lora_request: Any = None
    ) -> None:
        """Add requests, which `step` and `finish` then run."""
        self.answers: dict[str, Answer] = {}
        self.names = [f"{at}-{next(_numbers)}" for at in range(len(asked))]
        for name, tokens in zip(self.names, asked, strict=True):
            prompt = {"prompt_token_ids": list(tokens)}
            self.llm.llm_engine.add_request(
                name, prompt, greedy(max_tokens), lora_request=lora_request
            )

    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            for output in self.llm.llm_engine.step():
                if output.finished:
                    self.answers[output.request_id] = answer(output)

    def finish(self) -> list[Answer]:
        """Step until all requests of `begin` are answered, and return the answers."""
        for _ in range(10_000):
            if len(self.answers) == len(self.names):
                return [self.answers[name] for name in self.names]
            self.step(1)
        raise AssertionError("the engine does not come to an end")

    def sleep(self) -> None:
        """Do what `sleep(level=1, mode="keep")` does: finish all work, then reset the caches."""
        self.core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        self.settle()
        self.core.pause_scheduler("keep", clear_cache=True)
        poison(self.worker)

    def wake(self) -> None:
        self.core.resume_scheduler()

    def settle_loads(self) -> None:
        """Step until no load is under way."""
        transfers = self.half.transfers.in_flight
        while any(transfer.direction == "load" for transfer in transfers.values()):
            self.step(1)

    @property
    def has_windows(self) -> bool:
        """Whether the model has sliding windows."""
        return any(self.half.tier.model.is_window)

    def num_computed_tokens(self) -> int:
        """Return the computed tokens of all requests."""
        return sum(request.num_computed_tokens for request in self.core.scheduler.requests.values())

    def has_work(self) -> bool:
        """Whether vLLM would go on stepping for requests, transfers or a step under way."""
        return bool(self.core.scheduler.has_requests() or self.core.batch_queue)

    def settle(self) -> None:
        """Step until no transfer is under way."""
        end_s = time.monotonic() + REST_S
        while self.has_work():
            self.llm.llm_engine.step()
            # A disk may take seconds, and steps without a token take no time.
            assert time.monotonic() < end_s, "the engine does not come to rest"

    def check_idle(self) -> None:
        """Check that no transfer and no request is left, and that every block is free."""
        assert self.half.offload is not None
        self.half.offload.check()
        assert not self.half.transfers.in_flight
        assert not self.half.requests.tracked and not self.half.requests.due
        pool = self.core.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        assert all(block.ref_cnt == 0 for block in pool.blocks if not block.is_null)

    def start_over(self, num_host_blocks: int | None = None) -> None:
        """Empty both tiers, and give the host tier `num_host_blocks` blocks."""
        self.settle()
        self.check_idle()
        assert self.llm.reset_prefix_cache()
        assert self.worker.arena is not None
        # From here on, options that a test has changed have an effect.
        self.half.bind(self.core.scheduler.kv_cache_manager)
        self.half.create_tier(num_host_blocks or self.worker.arena.num_slots)
        self.connector._reporter = None  # it has the counts of the earlier tier

    def change_options(self, patch: pytest.MonkeyPatch, **changes: Any) -> None:
        """Give the scheduler half other options until the end of the test."""
        tier = self.half.tier
        patch.setattr(tier, "options", replace(tier.options, **changes))

    def stats(self) -> dict[str, int]:
        assert self.half.offload is not None
        return self.half.offload.stats()

    @contextmanager
    def movers(self, change: Callable[[Mover], Mover]) -> Iterator[None]:
        """Replace the movers for a while."""
        worker = self.worker
        original = worker.movers
        changed = {mover: change(mover) for mover in original}
        worker.movers = [changed[mover] for mover in original]
        try:
            yield
        finally:
            worker.movers = original

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm, self.core
        ensure_kv_transfer_shutdown()
        cleanup_dist_env_and_memory()  # collects garbage
        self._patch.undo()
