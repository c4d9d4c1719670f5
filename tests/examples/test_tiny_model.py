"""The model of `examples/tiny_model.py` is what the pages say, and its answers depend on its KV."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.examples.monitoring import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvstow import cli

pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tiny")
    script = ROOT / "examples" / "tiny_model.py"
    done = subprocess.run(
        [sys.executable, script, made], capture_output=True, check=False, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "4 KiB of KV per token" in done.stdout
    return made


def test_a_plan_finds_the_bytes_per_token(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        cli.main(["plan", "--limit", "20", "--model", str(folder / "config.json"), "--json"]) == 0
    )
    assert json.loads(capsys.readouterr().out)["model"]["bytes_per_token"] == 4096


def test_an_option_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["tiny_model.py", "--help"])
    with pytest.raises(SystemExit, match="FOLDER"):
        runpy.run_path(str(ROOT / "examples" / "tiny_model.py"), run_name="__main__")
    assert list(tmp_path.iterdir()) == []


def test_each_token_of_the_prompt_changes_the_answer(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = list(range(10, 110))
    assert tokenizer.encode(" ".join(f"t{token}" for token in prompt)) == prompt
    changed = [[*prompt[:at], 500, *prompt[at + 1 :]] for at in (0, 50, 98)]
    with torch.no_grad():
        logits = model(torch.tensor([prompt, *changed])).logits[:, -1].float()
    spread = logits.std(dim=1).mean()
    assert torch.all((logits[1:] - logits[0]).abs().amax(dim=1) > 0.05 * spread)
