"""An engine without the connector in a process of its own, which gives the reference answers.

It schedules synchronously, caches no prefix and has room for every request. So it never loads,
preempts or hits a cache.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.vllm.engine import Answer, Engine

_engine: Engine


class Reference:
    """Answers prompts with greedy tokens, each prompt once."""

    def __init__(self, model: Path, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._known: dict[tuple[int, ...], Future[Answer]] = {}
        runner = os.environ["KVSTOW_MODEL_RUNNER"]
        os.environ["KVSTOW_MODEL_RUNNER"] = "v1"
        try:
            # Forked by a server that has imported vLLM once, and runs no engine.
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["tests.vllm.engine"])
            self._pool = ProcessPoolExecutor(1, context, _start, (model,))
            self.ask(range(3, 40))
        finally:
            os.environ["KVSTOW_MODEL_RUNNER"] = runner

    def ask(self, prompt: Sequence[int]) -> Future[Answer]:
        """Begin to answer a prompt with `num_tokens` tokens."""
        key = tuple(prompt)
        if key not in self._known:
            self._known[key] = self._pool.submit(_answer, key, self._num_tokens)
        return self._known[key]

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def _start(model: Path) -> None:
    global _engine  # noqa: PLW0603 - the process has one
    from tests.vllm.engine import Engine  # noqa: PLC0415 - not in the process that asks

    _engine = Engine(model, num_blocks=400, enable_prefix_caching=False)


def _answer(prompt: tuple[int, ...], num_tokens: int) -> Answer:
    [answer] = _engine.generate([prompt], num_tokens)
    return answer
