"""The benches that take a trace answer wrong command lines in a line, as `kvstow` does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from benches import curve, partial_blocks, plan, policies
from benches.traces import run

BENCHES = [curve, partial_blocks, plan, policies]


def exit_status(monkeypatch: pytest.MonkeyPatch, bench: ModuleType, *arguments: str) -> object:
    monkeypatch.setattr(sys, "argv", [bench.__name__, *arguments])
    with pytest.raises(SystemExit) as end:
        run(bench.main)
    return end.value.code


@pytest.mark.parametrize("bench", BENCHES)
def test_help_names_the_question(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_status(monkeypatch, bench, "--help") == 0
    assert bench.__doc__
    assert " ".join(bench.__doc__.splitlines()[0].split()) in capsys.readouterr().out


def test_bench_without_vllm_names_the_command_that_installs_it(tmp_path: Path) -> None:
    absent = 'raise ModuleNotFoundError("No module named \'vllm\'", name="vllm")\n'
    (tmp_path / "vllm.py").write_text(absent)
    found = subprocess.run(
        [sys.executable, "-m", "benches.compare.accounting", "--help"],
        env={"PYTHONPATH": str(tmp_path)},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 1
    assert found.stderr == (
        "No module named 'vllm': this bench needs what `make .venv/.test` installs\n"
    )


@pytest.mark.parametrize("bench", BENCHES)
def test_missing_trace_is_refused_in_a_line(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_status(monkeypatch, bench, "nosuch.jsonl") == 2
    assert capsys.readouterr().err.startswith("kvstow: nosuch.jsonl: cannot be read: ")


def test_partial_blocks_refuses_ids_of_passages_before_it_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = []
    for name, second in (("blocks", [1, 2]), ("passages", [3, 2])):
        names.append(str(tmp_path / f"{name}.jsonl"))
        row = {"timestamp": 0, "input_length": 1024, "output_length": 1}
        rows = [row | {"hash_ids": ids} for ids in ([1, 2], second)]
        Path(names[-1]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert exit_status(monkeypatch, partial_blocks, names[0]) == 0
    assert "blocks.jsonl: 2 prompts of 1,024 tokens" in capsys.readouterr().out
    assert exit_status(monkeypatch, partial_blocks, *names) == 2
    printed = capsys.readouterr()
    assert not printed.out
    [line] = printed.err.splitlines()
    assert line.startswith(f"kvstow: {names[1]}:2: the ids are not chained: id 2 ")
    assert line.endswith("leave this trace out")
    assert "--chain" not in line


def test_partial_blocks_names_no_option_that_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"timestamp": 0, "input_length": 40, "output_length": 1, "hash_ids": [0, 1, 2]}
    trace = tmp_path / "blocks16.jsonl"
    trace.write_text(json.dumps(row) + "\n")
    assert exit_status(monkeypatch, partial_blocks, str(trace)) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "found 3 hash_ids, expected 1 (ceil(40 / 512)). This bench takes blocks of 512" in line
    assert line.endswith("kvstow trace convert --block-size 512")


@pytest.mark.parametrize("form", ["--block-size", "--chain"])
def test_policies_bench_takes_the_option_that_its_error_names(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(policies, "CAPACITIES", [2])
    second = [0, 1, 3] if form == "--block-size" else [1, 0, 3]
    row = {"timestamp": 0, "input_length": 40, "output_length": 1}
    rows = [json.dumps(row | {"hash_ids": ids}) for ids in ([0, 1, 2], second)]
    trace = tmp_path / "mine.jsonl"
    trace.write_text("".join(f"{one}\n" for one in rows))
    assert exit_status(monkeypatch, policies, str(trace)) == 2
    assert form in capsys.readouterr().err
    option = [form, "16"] if form == "--block-size" else [form]
    assert exit_status(monkeypatch, policies, *option, str(trace)) == 0
    num_full = 4 if form == "--block-size" else 6
    assert f"2 requests; 6 blocks, {num_full} of them full" in capsys.readouterr().out


def test_plan_bench_compares_each_policy_with_its_own_replay(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan, "SIZES", ((1024, 2048),))
    for policy, mode in (("lru", "eager"), ("hit-density", "eager"), ("lru", "lazy")):
        assert exit_status(monkeypatch, plan, "--policy", policy, "--mode", mode) == 0
        printed = capsys.readouterr().out
        assert f"conversation_1000.jsonl.gz, full, {policy}, {mode}: planned in " in printed


def test_plan_bench_takes_a_trace_with_blocks_of_another_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan, "SIZES", ((1024, 2048),))
    row = {"input_length": 40, "output_length": 1, "hash_ids": [0, 1, 2]}
    rows = [json.dumps(row | {"timestamp": ms}) for ms in (0, 9000)]
    trace = tmp_path / "blocks16.jsonl"
    trace.write_text("".join(f"{one}\n" for one in rows))
    assert exit_status(monkeypatch, plan, "--block-size", "16", str(trace)) == 0
    *_, sizes = capsys.readouterr().out.splitlines()
    assert sizes.split() == ["1,024", "2,048", "33.33%", "33.33%", "+0.00", "0"]
