"""Data-parallel engines of `vllm serve`, which step in lockstep behind several API servers."""

from __future__ import annotations

import re
import shutil
import urllib.request
from collections import Counter
from pathlib import Path

import pytest
from tests.vllm import models
from tests.vllm import server as servers_of_tests
from tests.vllm.full import full
from tests.vllm.servers import Server, check, prompts, server

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own, and those of what it imports

NUM_HOST_BLOCKS = 300
PROMPTS = prompts(24)


def check_export(running: Server) -> None:
    """Check that each sample of both engines is exported once, with the tier's size."""
    with urllib.request.urlopen(f"{running.address}/metrics") as reply:
        lines = reply.read().decode().splitlines()
    samples = Counter(line.rpartition(" ")[0] for line in lines if line.startswith("kvstow"))
    assert samples and set(samples.values()) == {1}
    engines = Counter(re.findall(r'engine="(\d)"', "\n".join(samples)))
    assert set(engines) == {"0", "1"} and engines["0"] == engines["1"]
    for engine in engines:
        label = f'engine="{engine}"'
        assert running.metric("kvstow_capacity_blocks", f"{label}.*host") == NUM_HOST_BLOCKS
        assert running.metric("kvstow_disk_mode", label) == 2


@full("starts two servers of two engines and two API servers each")
def test_killed_engines_in_lockstep_come_back_with_their_disks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one engine serves, the other one runs dummy batches, and both copy blocks.

    vLLM does so for a model that has experts, also if none of its layers has them. It cannot
    compute experts of several engines on CPUs.
    """
    monkeypatch.setattr(servers_of_tests, "SERVER", "tests.vllm.serve")
    model = models.make_model(models.LLAMA4, tmp_path / "model")
    options = {
        "num_cpu_blocks": NUM_HOST_BLOCKS,
        "disk_path": str(tmp_path),
        "disk_bytes_to_use": "64MiB",
    }
    flags = ("--data-parallel-size", "2")
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path / "metrics"))
    (tmp_path / "metrics").mkdir()
    with server(model, tmp_path / "first", options, *flags) as running:
        expected = [running.answer(prompt) for prompt in PROMPTS]
        for prompt, answer in zip(PROMPTS, expected, strict=True):
            check(running.answer(prompt), answer)
        check_export(running)
        for engine in (0, 1):
            running.wait_for("kvstow_disk_cached_blocks", 100, f'engine="{engine}"')
        running.end("SIGKILL")
    shutil.rmtree(tmp_path / "metrics")
    (tmp_path / "metrics").mkdir()
    with server(model, tmp_path / "second", options, *flags) as running:
        for prompt, answer in zip(PROMPTS, expected, strict=True):
            check(running.answer(prompt), answer)
        check_export(running)
        for engine in (0, 1):
            assert running.metric("kvstow_disk_hit_tokens_total", f'engine="{engine}"') > 0
