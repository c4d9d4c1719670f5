"""What does `accelerate` save in vLLM's own scheduler process?

Each row runs the same work of vLLM with vLLM's functions and with kvstow's (`vLLM`, `kvstow`), on
managers and requests of their own. Both must give the same hashes, blocks and tokens.

- The hash row is `Request()` with a prompt, so it includes what vLLM does there besides.
- A decode step is what vLLM's scheduler does for 256 running requests: `schedule()`, and
  `update_from_output()` with one sampled token each. No engine and no model runs.
- The hybrid has a group of full attention and two of sliding windows.
- The lookup finds a prompt that is wholly cached.

Run it from the project's folder: `python -m benches.compare.accelerate [--json]`.
"""

from __future__ import annotations

import functools
import gc
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.vllm import models
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils import hashing
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kvstow import FullAttention, SlidingWindow
from kvstow.vllm import accelerate

from . import report, vllm_side
from .measure import Clock, Row, require_same, take_turns

BLOCK_SIZE = 16
NUM_REQUESTS = 256
NUM_STEPS = BLOCK_SIZE  # of a turn
MAX_MODEL_TOKENS = 2048
HYBRID = (
    FullAttention(block_size=BLOCK_SIZE),
    SlidingWindow(block_size=BLOCK_SIZE, window=128),
    SlidingWindow(block_size=BLOCK_SIZE, window=128),
)
SIDES = ("vllm", "kvstow")


def switch(side: str) -> None:
    """Put the functions of a side in place."""
    if side == "kvstow":
        accelerate.enable()
    else:
        accelerate.disable()


class Sided:
    """Work that both sides do in turns."""

    def __init__(self, num_turns: int) -> None:
        self.num_turns = num_turns
        self.clock = Clock()

    def turns(self, work: Callable[[str], None]) -> None:
        """Do the work on both sides; the first turn warms up."""

        def on(side: str) -> Callable[[], None]:
            def call() -> None:
                switch(side)
                work(side)

            return call

        gc.collect()
        gc.freeze()
        for turn in range(-1, self.num_turns):
            if turn == 0:
                self.clock.samples.clear()
            take_turns(turn, on("vllm"), on("kvstow"))
        gc.unfreeze()
        switch("vllm")

    def row(self, work: str, target: float | None = None, num_per_turn: int = 1) -> Row:
        vllm, kvstow = (self.clock.samples[side] for side in SIDES)
        return Row(work, vllm, kvstow, target_ratio=target, num_per_turn=num_per_turn)


class Hash(Sided):
    """A prompt of 131,072 tokens becomes a request."""

    def __init__(self, num_turns: int, *, algorithm: str = "sha256") -> None:
        super().__init__(num_turns)
        self.algorithm = algorithm
        draw = random.Random(0)
        self.tokens = [draw.randrange(128_000) for _ in range(1 << 17)]
        self.hashes: dict[str, list[bytes]] = {}

    def run(self) -> list[Row]:
        self.turns(self._make)
        if self.hashes["vllm"] != self.hashes["kvstow"]:
            raise SystemExit("the hashes differ between vLLM and kvstow")
        return [self.row(f"{self.algorithm} of a prompt of 131,072 tokens", target=4)]

    def _make(self, side: str) -> None:
        function = getattr(hashing, self.algorithm)
        kv_cache_utils.init_none_hash(function)
        hasher = kv_cache_utils.get_request_block_hasher(BLOCK_SIZE, function)
        request = self.clock.time(side, make_request, "r", self.tokens, hasher)
        self.hashes[side] = request.block_hashes


def make_request(name: str, tokens: list[int], hasher: Any) -> Request:
    params = SamplingParams(max_tokens=MAX_MODEL_TOKENS)
    return Request(name, tokens, params, None, block_hasher=hasher)


@functools.cache
def config() -> Any:
    """Return the configuration of a server; its model has no part in scheduling."""
    with tempfile.TemporaryDirectory() as folder:
        return EngineArgs(
            model=str(models.make_model(models.LLAMA, Path(folder))),
            skip_tokenizer_init=True,
            block_size=BLOCK_SIZE,
            max_model_len=1024,
            max_num_seqs=NUM_REQUESTS,
            max_num_batched_tokens=1 << 17,
        ).create_engine_config()


class Server:
    """vLLM's scheduler with running requests, and a model that samples a token for each."""

    def __init__(self, num_blocks: int, groups: Any) -> None:
        cache = vllm_side.cache_config(num_blocks, groups)
        config().cache_config.num_gpu_blocks = num_blocks
        self.scheduler = Scheduler(
            config(),
            cache,
            StructuredOutputManager(config()),
            block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
        )
        kv_cache_utils.init_none_hash(hashing.sha256)
        hasher = kv_cache_utils.get_request_block_hasher(BLOCK_SIZE, hashing.sha256)
        for at in range(NUM_REQUESTS):
            draw = random.Random(at)
            tokens = [draw.randrange(128_000) for _ in range(256 + at)]
            self.scheduler.add_request(make_request(f"request-{at}", tokens, hasher))
        self.step()
        if len(self.scheduler.running) != NUM_REQUESTS:
            raise SystemExit("not all requests run")

    def step(self) -> None:
        output = self.scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        sampled = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=[[at] for at in range(len(names))],
        )
        self.scheduler.update_from_output(output, sampled)

    def state(self) -> dict[str, list[Any]]:
        manager = self.scheduler.kv_cache_manager
        return {
            "free blocks": vllm_side.free_order(manager),
            "block tables": [
                id
                for request in self.scheduler.running
                for id in vllm_side.block_ids(manager.get_blocks(request.request_id))
            ],
            "hashes": [h for request in self.scheduler.running for h in request.block_hashes],
        }


class Decode(Sided):
    """Steps of 256 decoding requests. In each step a sixteenth of them fills a block."""

    def __init__(self, num_turns: int, *, is_hybrid: bool) -> None:
        super().__init__(num_turns)
        groups = HYBRID if is_hybrid else HYBRID[:1]
        many = "s" if is_hybrid else ""
        self.work = f"a decode step of {NUM_REQUESTS} requests, {len(groups)} group{many}"
        self.target = 1 / 0.60 if is_hybrid else 1 / 0.70
        if (num_turns + 1) * NUM_STEPS > 512 - BLOCK_SIZE:
            raise SystemExit(f"--turns is {num_turns}: at most 30, or requests reach 1024 tokens")
        num_blocks = NUM_REQUESTS * len(groups) * 1024 // BLOCK_SIZE
        self.servers = {}
        for side in SIDES:
            switch(side)
            self.servers[side] = Server(num_blocks, groups)
        switch("vllm")

    def run(self) -> list[Row]:
        self.turns(self._steps)
        theirs, ours = (self.servers[side].state() for side in SIDES)
        for what, expected in theirs.items():
            require_same(what, expected, ours[what])
        return [self.row(self.work, self.target, num_per_turn=NUM_STEPS)]

    def _steps(self, side: str) -> None:
        for _ in range(NUM_STEPS):
            self.clock.time(side, self.servers[side].step)


class Lookup(Sided):
    """A prompt of 8,192 blocks that is wholly cached."""

    def __init__(self, num_turns: int) -> None:
        super().__init__(num_turns)
        self.request = vllm_side.request("cached", 8_192 * BLOCK_SIZE + 1, BLOCK_SIZE)
        self.manager = vllm_side.manager(8_200, HYBRID[:1])
        self.manager.allocate_slots(self.request, self.request.num_tokens)
        self.found: dict[str, Any] = {}

    def run(self) -> list[Row]:
        self.turns(self._find)
        require_same("blocks found", *(self.found[side] for side in SIDES))
        return [self.row("lookup of 8,192 cached blocks")]

    def _find(self, side: str) -> None:
        find = self.manager.get_computed_blocks
        blocks, _, _ = self.clock.time(side, find, self.request)
        self.found[side] = blocks.get_block_ids()[0]


def cbor(num_turns: int) -> Hash:
    return Hash(num_turns, algorithm="sha256_cbor")


def hybrid(num_turns: int) -> Decode:
    return Decode(num_turns, is_hybrid=True)


def full(num_turns: int) -> Decode:
    return Decode(num_turns, is_hybrid=False)


if __name__ == "__main__":
    report.main(__doc__, [Hash, cbor, Lookup, full, hybrid])
