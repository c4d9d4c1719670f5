"""vLLM servers in processes that a test ends, and how their answers are compared."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.vllm.server import END_S, _tail, _wait_until_gone, _wait_until_healthy, end, launch

NUM_TOKENS, BLOCK_SIZE = 300, 32
NUM_HIT = (NUM_TOKENS - 1) // BLOCK_SIZE * BLOCK_SIZE
TOLERANCE = 1e-4


class Server:
    """A server of which a test ends the processes."""

    def __init__(
        self,
        model: Path,
        log: Path,
        options: dict[str, Any] | None,
        *flags: str,
        module: str = "kvstow.vllm",
    ) -> None:
        connector = None
        if options is not None:
            connector = {"kv_connector_module_path": module, "kv_connector_extra_config": options}
        self.log = log
        self.process, self.address = launch(model, log, connector, flags)
        try:
            _wait_until_healthy(self.address, self.process, log)
        except BaseException:
            self.kill()
            raise

    def answer(self, prompt: list[int]) -> tuple[list[str], list[float], int]:
        """Return the tokens and the log-probabilities of a greedy answer, and the tokens hit."""
        body = {
            "prompt": prompt,
            "max_tokens": 8,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 1,
        }
        request = urllib.request.Request(
            f"{self.address}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            found = json.load(reply)
        [choice] = found["choices"]
        hit = (found["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        return choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"], hit

    def metric(self, name: str, label: str = "") -> float:
        with urllib.request.urlopen(f"{self.address}/metrics") as reply:
            text = reply.read().decode()
        found = re.findall(rf"^{name}\{{.*{label}.*\}} (\S+)$", text, re.MULTILINE)
        assert found, f"{name} is not exported"
        return sum(map(float, found))

    def wait_for(self, name: str, least: float, label: str = "") -> None:
        until = time.monotonic() + END_S
        while self.metric(name, label) < least:
            assert time.monotonic() < until, f"{name} stays below {least}:\n{_tail(self.log)}"
            time.sleep(0.2)

    def end(self, way: str) -> None:
        """End the processes by SIGTERM or SIGKILL."""
        if way == "SIGKILL":
            self.kill()
            return
        end(self.process, self.log)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        _wait_until_gone(self.process.pid, self.log)


@contextmanager
def server(
    model: Path, log: Path, options: dict[str, Any] | None, *flags: str, **more: str
) -> Iterator[Server]:
    running = Server(model, log, options, *flags, **more)
    try:
        yield running
    finally:
        running.kill()


def prompts(num: int) -> list[list[int]]:
    dice = random.Random(5)
    return [[dice.randrange(3, 1000) for _ in range(NUM_TOKENS)] for _ in range(num)]


def check(found: Any, expected: Any) -> None:
    assert found[0] == expected[0]
    assert max(abs(a - b) for a, b in zip(found[1], expected[1], strict=True)) < TOLERANCE
