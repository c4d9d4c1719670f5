"""What does the connector cost vLLM's real engine, and what does it save?

The bench runs the engine in this process: on a CPU with the tests' small Llama model and as many
threads as the tests, on a GPU with a model of the shape of Llama-3.1-8B.

- The share of a step: the bench times every step of the engine, and every method of both halves
  that vLLM calls. 32 requests come in, their prompts are computed chunk by chunk, and then all
  decode. The copies run in the movers' threads, so no call includes them. Other work on the machine
  lengthens the steps more than the calls, so the shortest tenth of the steps has its own line. The
  host tier has room for one round of requests, and the first round warms up. So it is full, as in
  a server that has run for a while: each store evicts as many blocks as it takes, and no copy meets
  memory that was never written, whose page faults would take longer than the copy.
  With `--observe` the connector has no host tier and only watches. Then this is all that runs.
- The second round: a prompt comes again, and the device's pool no longer has it. The engine loads
  it from the host, or computes it because the host tier was emptied too. The bench reports the time
  to first token of both, in turns, with the connector on. The answers must be equal. On a GPU that
  shows little: the weights of the large model are vLLM's dummies, which hardly look at the cache.
  The tests compare the answers of models that do.

  These are wall-clock times. On a loaded machine compare the least times, too.

Run it from the project's folder: `python -m benches.compare.engine`.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import vllm
from tests.vllm import models
from tests.vllm.engine import BLOCK_SIZE as CPU_BLOCK_SIZE
from tests.vllm.engine import ON_GPU, TOLERANCE, Engine, difference, prompts
from vllm import SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

import kvstow
from kvstow._core import debug_build
from kvstow.bench import machine

NUM_REQUESTS = 32
MOST_PERCENT = 3.0
MOST_OBSERVING_PERCENT = 1.0
LLAMA_8B = models.LLAMA | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "rope_theta": 500_000.0,
    "num_hidden_layers": 32,
}
GPU_SETTINGS: dict[str, Any] = {
    "load_format": "dummy",
    "dtype": "bfloat16",
    "block_size": 16,
    "gpu_memory_utilization": 0.9,
    "attention_backend": None,  # vLLM's choice
    "enforce_eager": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    "scheduling": "async",  # vLLM's default on a GPU
}
BLOCK_SIZE = GPU_SETTINGS["block_size"] if ON_GPU else CPU_BLOCK_SIZE
# Of prompts that come again, and the tokens of the longest step.
LENGTHS, STEP_TOKENS = ((1_000, 4_000, 16_000), 8192) if ON_GPU else ((1_000, 3_000), 512)


def timed_methods(connector: Any) -> list[str]:
    """Return the methods of the connector interface, those of the base class included."""
    names = {
        name
        for base in type(connector).__mro__
        if issubclass(base, KVConnectorBase_V1)
        for name, value in vars(base).items()
        if callable(value) and not name.startswith("__") and not isinstance(value, classmethod)
    }
    return sorted(name for name in names if not name.startswith("_"))


class Calls:
    """Seconds in the connector's methods. A method that another method calls counts once."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.is_inside = False

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def wrap(self, half: str, connector: Any) -> None:
        for name in timed_methods(connector):
            call = getattr(connector, name)
            setattr(connector, name, functools.partial(self._timed, f"{half} {name}", call))

    def _timed(self, what: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.is_inside:
            return call(*args, **kwargs)
        self.is_inside = True
        start = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            self.seconds[what] += time.perf_counter() - start
            self.is_inside = False


@contextmanager
def running(**settings: Any) -> Iterator[Engine]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if ON_GPU:
            (folder / "config.json").write_text(json.dumps(LLAMA_8B))
            settings |= GPU_SETTINGS
        else:
            models.make_model(models.LLAMA, folder)
        engine = Engine(folder, **settings)
        try:
            yield engine
        finally:
            engine.close()


def share(num_rounds: int, *, observe: bool = False) -> list[str]:
    """Return the lines about the share of the connector's calls in a step."""
    most_percent = MOST_OBSERVING_PERCENT if observe else MOST_PERCENT
    num_tokens, num_decoded = 512, 96
    # The engine samples the last token of each request and does not compute it.
    num_full = NUM_REQUESTS * ((num_tokens + num_decoded - 1) // BLOCK_SIZE)
    lines = ["", "share of the connector's calls, both halves, in a step of 32 requests", ""]
    with running(
        num_blocks=NUM_REQUESTS * (num_tokens + num_decoded) // BLOCK_SIZE + 64,
        options={"num_cpu_blocks": num_full, "observe": observe},
        max_num_seqs=NUM_REQUESTS,
        max_num_batched_tokens=512,
    ) as engine:
        calls = Calls()
        calls.wrap("scheduler", engine.connector)
        calls.wrap("worker", get_kv_transfer_group())
        steps: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        for at in range(num_rounds + 1):
            if at == 1:
                steps.clear()  # the first round warms up
                calls.seconds.clear()
            for name, tokens in enumerate(prompts(NUM_REQUESTS, num_tokens, seed=at + 1)):
                sampling = SamplingParams(
                    temperature=0, max_tokens=num_decoded, ignore_eos=True, detokenize=False
                )
                engine.llm.llm_engine.add_request(
                    f"{at}-{name}", {"prompt_token_ids": tokens}, sampling
                )
            while engine.llm.llm_engine.has_unfinished_requests():
                kind = _kind(engine)
                before, start = calls.total, time.perf_counter()
                engine.llm.llm_engine.step()
                steps[kind].append((time.perf_counter() - start, calls.total - before))
            engine.settle()
        if not observe and engine.stats()["stored_blocks"] != num_full * (num_rounds + 1):
            sys.exit("the connector did not store all computed blocks")
        for kind in ("prompts come in", "all decode"):
            lines += _share_lines(kind, steps[kind], most_percent)
        num_steps = sum(len(each) for each in steps.values())
        lines += ["", "of it, per step:"]
        for what, seconds in sorted(calls.seconds.items(), key=lambda item: -item[1])[:6]:
            lines.append(f"  {what:40} {seconds / num_steps * 1e6:8.1f} us")
    return lines


def _kind(engine: Engine) -> str:
    """Return the kind of the next step."""
    requests = engine.core.scheduler.requests.values()
    if any(request.num_computed_tokens < request.num_prompt_tokens for request in requests):
        return "prompts come in"
    return "all decode" if len(requests) == NUM_REQUESTS else "some are finished"


def _share_lines(kind: str, steps: list[tuple[float, float]], most_percent: float) -> list[str]:
    steps = sorted(steps)
    lines = []
    for which, some in (("all", steps), ("shortest tenth", steps[: max(1, len(steps) // 10)])):
        step, calls = (1e3 * statistics.fmean(each) for each in zip(*some, strict=True))
        percent = 100 * calls / step
        missed = "  MISSED" if percent > most_percent else ""
        lines.append(
            f"  {kind + ', ' + which:32} {len(some):4} steps, mean {step:6.1f} ms, connector "
            f"{calls:5.2f} ms: {percent:4.2f}%  <= {most_percent:g}%{missed}"
        )
    return lines


def second_round(num_turns: int) -> list[str]:
    """Return the lines about prompts that come again: loaded from the host, or computed."""
    lines = ["", "time to first token of a prompt that comes again, medians", ""]
    longest = max(LENGTHS)
    with running(
        # Stores may hold three quarters of the pool.
        num_blocks=2 * longest // BLOCK_SIZE,
        options={"num_cpu_blocks": 2 * longest // BLOCK_SIZE},
        max_model_len=longest + 72,
        max_num_batched_tokens=STEP_TOKENS,
    ) as engine:
        for num_tokens in LENGTHS:
            (prompt,) = prompts(1, num_tokens, seed=num_tokens)
            loaded: list[float] = []
            computed: list[float] = []
            expected = engine.generate([prompt], max_tokens=1)
            for turn in range(num_turns + 1):
                for side in (loaded, computed)[:: 1 if turn % 2 else -1]:
                    if side is computed:
                        engine.start_over()
                    else:
                        engine.generate([prompt], max_tokens=1)
                        engine.settle()
                        assert engine.llm.reset_prefix_cache()
                    num_loaded = -engine.stats()["loaded_blocks"]
                    start = time.perf_counter()
                    answers = engine.generate([prompt], max_tokens=1)
                    seconds = time.perf_counter() - start
                    num_loaded += engine.stats()["loaded_blocks"]
                    num_wanted = 0 if side is computed else (num_tokens - 1) // BLOCK_SIZE
                    if num_loaded != num_wanted:
                        sys.exit(f"{num_loaded} blocks were loaded, not {num_wanted}")
                    if difference(answers, expected) > TOLERANCE:
                        sys.exit("the answers of loaded and of computed blocks differ")
                    if turn:  # the first one warms up
                        side.append(seconds * 1e3)
            ratio = statistics.median(computed) / statistics.median(loaded)
            lines.append(
                f"  {num_tokens:5,} tokens: computed {statistics.median(computed):7.1f} ms (least "
                f"{min(computed):.1f}), loaded {statistics.median(loaded):7.1f} ms (least "
                f"{min(loaded):.1f}): {ratio:.1f}x" + ("  MISSED" if ratio <= 1 else "")
            )
    return lines


def device() -> str:
    """Return what the engine runs on."""
    if not ON_GPU:
        return "CPU engine"
    name = torch.cuda.get_device_name(0)
    return f"{name}, a model of Llama-3.1-8B's shape, not compiled, with graphs for decoding"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="rounds of 32 requests")
    parser.add_argument("--turns", type=int, default=9, help="turns of loading and of computing")
    parser.add_argument("--observe", action="store_true", help="only the share, with `observe`")
    args = parser.parse_args()
    if debug_build:
        parser.error("this build of kvstow is not optimised: build it in release mode")
    before = os.getloadavg()[0]
    lines = share(args.rounds, observe=args.observe)
    if not args.observe:
        lines += second_round(args.turns)
    print(
        f"kvstow {kvstow.__version__} in vLLM {vllm.__version__}, {device()}, Python "
        f"{platform.python_version()}, {machine()} (load {before:.1f} to {os.getloadavg()[0]:.1f})"
    )
    print("\n".join(lines))


if __name__ == "__main__":
    main()
