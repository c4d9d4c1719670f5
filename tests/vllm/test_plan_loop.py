"""A plan of a recorded trace says what a host tier of the recommended size then hits.

The loop: serve with `observe` and `record_trace`, plan for the trace, and serve with the flag that
the plan prints. CI closes it on vLLM's scheduler with a simulated model, at several sizes. The full
target closes it on vLLM's server, with the commands of the tutorial.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from examples import documents
from tests.docs.pages import ROOT, blocks
from tests.vllm.full import full
from tests.vllm.halves import BLOCK_SIZE
from tests.vllm.models import LLAMA, make_model
from tests.vllm.server import served, words_of
from tests.vllm.simulated import Simulated

from kvstow import cli
from kvstow.vllm.options import Options

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own, and those of what it imports

PAGE = ROOT / "docs" / "tutorials" / "plan.md"
NUM_BLOCKS = 100
# One layer with one head of 8 values in 32 bits, as the simulated model.
SHAPE = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


# -- vLLM's scheduler with a simulated model -------------------------------------------------------


def serve(engine: Simulated, prompts: list[list[int]]) -> dict[str, float]:
    """Serve prompts one after the other; return the shares of tokens that each tier had."""
    for at, prompt in enumerate(prompts):
        engine.add(str(at), prompt, max_tokens=4)
        engine.settle(3000)
        assert engine.answers[str(at)] == engine.right_answer(prompt, 4, None)
    observer = engine.connector._observer
    shadow = observer.shadow
    assert shadow is not None
    # Before the connector closes, its statistics have the hits of both tiers.
    offload = engine.half.offload
    num_host = 0 if offload is None else offload.stats()["hit_tokens"]
    num_all = int(shadow._num_hits) * BLOCK_SIZE
    num_tokens = sum(map(len, prompts))
    return {
        "hit_ratio": num_all / num_tokens,
        "device_hit_ratio": (num_all - num_host) / num_tokens,
        "host_hit_ratio": num_host / num_tokens,
    }


def test_plan_of_a_recorded_trace_is_what_tiers_then_hit(folder: Path, tmp_path: Path) -> None:
    """At four sizes, the one that the printed flag sets among them."""
    trace, config, report = (tmp_path / name for name in ("trace.jsonl", "config.json", "plan"))
    config.write_text(json.dumps(SHAPE))
    # The simulated model has fewer tokens than the script draws from.
    prompts = [[token % 50 for token in prompt] for prompt in documents.prompts()]
    observed = Simulated(
        folder, {"observe": True, "record_trace": str(trace)}, num_blocks=NUM_BLOCKS
    )
    alone = serve(observed, prompts)
    observed.connector.shutdown()

    flags = ["--block-size", str(BLOCK_SIZE), "--model", str(config), "--dtype", "float32"]
    sizes = [f"--host-gib={number * 4096 / 2**30}" for number in (150, 250, 400, 600)]
    asked = [*flags, "--device-blocks", str(NUM_BLOCKS), *sizes, "--json-file", str(report)]
    assert cli.main(["plan", str(trace), *asked]) == 0
    made = json.loads(report.read_text())
    ratios = [row["host_hit_ratio"] for row in made["sizes"]]
    assert min(after - before for before, after in pairwise(ratios)) > 0.02
    assert alone["host_hit_ratio"] == 0

    given = json.loads(shlex.split(made["recommendations"][0]["flag"])[1])
    recommended = Options.parse(given["kv_connector_extra_config"]).cpu_bytes_to_use
    assert recommended in {row["host_gib"] * 2**30 for row in made["sizes"]}
    for row in made["sizes"]:
        options = {"cpu_bytes_to_use": int(row["host_gib"] * 2**30)}
        found = serve(Simulated(folder, options, num_blocks=NUM_BLOCKS), prompts)
        print(row["host_gib"], found)
        # Copies hold device blocks, so the device may hit a little less.
        assert abs(found["device_hit_ratio"] - alone["device_hit_ratio"]) <= 0.01
        for name, ratio in found.items():
            assert abs(ratio - row[name]) <= 0.01, name


# -- vLLM's server ---------------------------------------------------------------------------------


def flags_of(command: str) -> dict[str, str]:
    """Return the flags of a `vllm serve MODEL` command, by name."""
    words = shlex.split(command.replace("\\\n", ""))
    assert words[:3] == ["vllm", "serve", "MODEL"]
    return dict(zip(words[3::2], words[4::2], strict=True))


def asked(command: str, address: str) -> str:
    """Run the script of a command of the page, and return its output."""
    words = shlex.split(command)
    assert words[0] == "python" and words[2] == "http://localhost:8000"
    done = subprocess.run(
        [sys.executable, ROOT / words[1], address], capture_output=True, check=True, text=True
    )
    return done.stdout


def percentages(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"(\d+\.\d)%", text)]


@full("starts two servers")
def test_commands_of_the_tutorial_close_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Each figure that the page shows is what the commands print, within one point."""
    monkeypatch.chdir(tmp_path)
    # The model of the page has four layers.
    folder = make_model(LLAMA | {"num_hidden_layers": 4}, tmp_path / "model")
    page = [block.text.rstrip("\n") for block in blocks(PAGE) if block.language in {"sh", "text"}]
    observe, ask, alone, _, plan, table, paste, again, together = page
    flags = flags_of(observe)
    transfer = json.loads(flags.pop("--kv-transfer-config"))
    with served(folder, tmp_path / "observed", words_of(flags), **transfer) as address:
        found_alone = asked(ask, address)
    assert found_alone.splitlines()[0] == alone.splitlines()[0]

    words = shlex.split(plan.partition("\n")[2].replace("MODEL", str(folder)))
    assert words.pop(0) == "kvstow"
    capsys.readouterr()
    assert cli.main([*words, "--dtype", "float32", "--json-file", "plan.json"]) == 0
    printed = capsys.readouterr().out
    rows = re.findall(r"^[> ] +8 +\d+( +\d+\.\d%){3}", printed, re.MULTILINE)
    assert len(rows) > 3
    for line in table.splitlines():
        assert any(row.startswith(line) for row in printed.splitlines()), (line, printed)
    assert shlex.split(paste)[-1] == shlex.split(printed.splitlines()[-1])[-1]

    flags = flags_of(paste)
    transfer = json.loads(flags.pop("--kv-transfer-config"))
    with served(folder, tmp_path / "paste", words_of(flags), **transfer) as address:
        found_together = asked(again, address)
    made = json.loads(Path("plan.json").read_text())
    size = made["recommendations"][0]["host_gib"]
    [row] = [row for row in made["sizes"] if row["host_gib"] == size]
    planned = [100 * row[f"{name}hit_ratio"] for name in ("device_", "host_", "")]
    print(found_alone, found_together, planned)
    *parts, both = percentages(found_together)
    assert both == pytest.approx(planned[-1], abs=1)
    # Copies hold the tail of a request longer than its head, which costs the device a block.
    words[words.index("--device-blocks") + 1] = "63"
    fewer = [*words, "--dtype", "float32", "--host-gib", str(size), "--json-file", "fewer.json"]
    assert cli.main(fewer) == 0
    [row] = json.loads(Path("fewer.json").read_text())["sizes"]
    planned = [100 * row[f"{name}hit_ratio"] for name in ("device_", "host_")]
    assert parts == pytest.approx(planned, abs=1)
    assert percentages(found_together) == pytest.approx(percentages(together), abs=1)
    assert percentages(found_alone) == pytest.approx(percentages(alone), abs=1)
