"""The connector behind the real server, checked by the script that operators run."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from examples import check_server
from tests.examples import monitoring
from tests.vllm.forking import IS_FULL
from tests.vllm.full import full
from tests.vllm.server import MAX_NUM_BATCHED_TOKENS, served

from kvstow.observability.metrics import SHADOW_HIT_RATIO
from kvstow.vllm.stats import EACH, EXPORTED

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own, and those of what it imports

# Prompts that exceed the device's cache, and enough for preemptions; or the script's defaults.
NUM_TC3, NUM_TC5 = (100, 300) if IS_FULL else (30, 40)
# Room for all prompts of TC3, and of TC5 with their answers.
NUM_HOST_BLOCKS = 4000 if IS_FULL else 1500


def check(address: str, *arguments: str) -> int:
    """Check as an operator does, with a lower tolerance: float32 answers agree closely."""
    return check_server.main(
        [
            address,
            *("--max-num-batched-tokens", str(MAX_NUM_BATCHED_TOKENS)),
            *("--prompt-tokens", "300", "--answer-tokens", "48"),
            *("--tolerance", "1e-3", "--tie", "1e-3", "--timeout", "300"),
            *("--tc3", str(NUM_TC3), "--tc5", str(NUM_TC5)),
            *arguments,
        ]
    )


def status_of(address: str, hints: dict[str, object]) -> int:
    """Return the HTTP status of a request with these hints."""
    body = {"prompt": [5, 6, 7], "max_tokens": 1, "kv_transfer_params": {"kvstow": hints}}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(body).encode(), headers
    )
    try:
        with urllib.request.urlopen(request) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        assert "did you mean 'store'" in json.load(error)["error"]["message"]
        return error.code


def test_the_server_passes_the_five_cases(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = tmp_path / "events.jsonl"
    options = {"num_cpu_blocks": NUM_HOST_BLOCKS, "events_path": str(events)}
    with served(folder, tmp_path / "log", kv_connector_extra_config=options) as address:
        assert status_of(address, {"store": False}) == 200
        assert status_of(address, {"stroe": False}) == 400
        status = check(address, "--events", str(events))
        printed = capsys.readouterr().out
        with urllib.request.urlopen(f"{address}/metrics") as reply:
            metrics = reply.read().decode()
    with capsys.disabled():
        print(f"\n{printed}", end="")
    check_export(metrics)
    assert status == 0
    assert re.findall(r"^(TC\d) passed", printed, re.MULTILINE) == list(check_server.CASES)
    samples = re.findall(
        r'^kvstow_(\w+)\{.*?(?:(?:direction|tier)="(\w+)".*?)?\} (\S+)$', metrics, re.MULTILINE
    )
    counted = {f"{name} {label}".rstrip(): float(value) for name, label, value in samples}
    # The second round of TC3 alone loads most of the 9 whole blocks of each prompt.
    stored, loaded = (counted[f"transfer_blocks_total {way}"] for way in ("store", "load"))
    assert loaded >= NUM_TC3 * 9 * 0.8
    assert counted["prefix_hit_tokens_total host"] >= loaded
    assert counted["transfer_bytes_total store"] / stored == 65536
    assert counted["transfer_failures_total store"] == counted["transfer_failures_total load"] == 0
    # Under the load of TC5 some tokens came from the host, too.
    (loaded,) = re.findall(r"^TC5 .* ([\d,]+) tokens from the host", printed, re.MULTILINE)
    assert int(loaded.replace(",", "")) > 0
    # Every transfer has ended when the server has stopped, too.
    assert check_server.check_events(events)


def check_export(metrics: str) -> None:
    """Compare the names in a server's export with kvstow's metrics, and with what operators ask."""
    exported = set(re.findall(r"^# TYPE (\S+)", metrics, re.MULTILINE))
    # prometheus_client also exports when each counter was made.
    ours = {name for name in exported if re.match(r"kvstow.*(?<!_created)$", name)}
    defined = {metric.name for metric, _ in (*EXPORTED.values(), *EACH.values())}
    assert ours == defined | {SHADOW_HIT_RATIO.name}
    asked = [rule["expr"] for rule in monitoring.rules()] + monitoring.expressions()
    of_vllm = {
        monitoring.family(name)
        for expression in asked
        for name in monitoring.names(expression)
        if name.startswith("vllm")
    }
    assert of_vllm and of_vllm <= exported


@full("starts a second server")
def test_two_data_parallel_engines_each_have_a_tier(folder: Path, tmp_path: Path) -> None:
    """A prompt may come back to the engine that has not computed it, so some rounds miss."""
    options = {"num_cpu_blocks": NUM_HOST_BLOCKS}
    flags = ("--data-parallel-size", "2")
    with served(folder, tmp_path / "log", flags, kv_connector_extra_config=options) as address:
        assert check(address, "--case=TC1", "--case=TC2", "--case=TC3") == 0
        with urllib.request.urlopen(f"{address}/metrics") as reply:
            metrics = reply.read().decode()
    loaded = re.findall(
        r'^kvstow_transfer_blocks_total\{.*direction="load".*engine="(\d)".*\} (\S+)$|'
        r'^kvstow_transfer_blocks_total\{.*engine="(\d)".*direction="load".*\} (\S+)$',
        metrics,
        re.MULTILINE,
    )
    by_engine = {one or other: float(a or b) for one, a, other, b in loaded}
    assert set(by_engine) == {"0", "1"} and all(by_engine.values()), metrics


@full("starts a second server")
def test_damage_to_loaded_blocks_fails_the_check(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The negative control: an equal server with one loaded block in ten damaged."""
    connector: dict[str, Any] = {
        "kv_connector": "DamagingConnector",
        "kv_connector_module_path": "tests.vllm.damaging_connector",
        "kv_connector_extra_config": {"num_cpu_blocks": NUM_HOST_BLOCKS},
    }
    cases = ("TC1", "TC2", "TC3", "TC5")
    with served(folder, tmp_path / "log", **connector) as address:
        assert check(address, *(f"--case={case}" for case in cases), "--tc5=40") == 1
    printed = capsys.readouterr().out
    wrong = re.findall(r"^(TC\d) FAILED .* differ by more than a tie", printed, re.MULTILINE)
    assert {"TC3", "TC5"} <= set(wrong), printed
