"""vLLM's engine in another process sleeps: there vLLM itself waits, twice, before it resets caches.

`test_engine_sleep` has both modes in the process of the tests.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tests.vllm import models
from tests.vllm.forking import IS_FULL
from tests.vllm.server import START_S, start, wait_for_end
from tests.vllm.servers import TOLERANCE
from tests.vllm.setting import SERVED

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own, and those of what it imports


@pytest.mark.parametrize("mode", ["lazy", *(["eager"] if IS_FULL else [])])
def test_an_engine_in_another_process_sleeps(tmp_path: Path, mode: str) -> None:
    model = models.make_model(models.LLAMA, tmp_path / "model")
    log, events = tmp_path / "log", tmp_path / "events.jsonl"
    arguments = [str(model), str(events), mode]
    process = start("tests.vllm.sleeper", arguments, os.environ | SERVED, log)
    assert wait_for_end(process, log, START_S) == 0, log.read_text()[-4000:]
    (line,) = [line for line in log.read_text().splitlines() if line.startswith('{"expected"')]
    printed = json.loads(line)
    assert printed["loads"] >= 2 * len(printed["expected"])
    for (tokens, logprobs), (others, theirs) in zip(
        printed["expected"], printed["found"], strict=True
    ):
        assert tokens == others
        assert max(abs(a - b) for a, b in zip(logprobs, theirs, strict=True)) < TOLERANCE
