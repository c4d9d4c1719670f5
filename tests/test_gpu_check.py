"""`tests.gpu.check` on steps that need no GPU: results, statuses and the time limit."""

import json
import sys
from pathlib import Path

import pytest
from tests.gpu import check
from tests.gpu.replay import what_is_wrong


def step(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def kinds(folder: Path) -> dict[str, str]:
    results = json.loads((folder / "check.json").read_text())
    return {name: result["kind"] for name, result in results.items()}


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [([0, 0], 0), ([0, 4], check.MISSED), ([4, 1], check.FAILED), ([9, 0], check.FAILED)],
)
def test_status_tells_a_missed_target_from_a_failure(
    tmp_path: Path, statuses: list[int], expected: int
) -> None:
    commands = {str(n): step(f"raise SystemExit({status})") for n, status in enumerate(statuses)}
    assert check.run_all(commands, tmp_path) == expected
    words = {0: "passed", 4: "MISSED"}
    assert list(kinds(tmp_path).values()) == [words.get(status, "FAILED") for status in statuses]


def test_step_that_does_not_end_fails_and_later_steps_run(tmp_path: Path) -> None:
    # The child holds the output open, after its parent was killed.
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    hang = step(f"print('begun', flush=True)\n{child}\nimport time; time.sleep(600)")
    commands = {"hang": hang, "late": step("print('done')"), "none": None}
    assert check.run_all(commands, tmp_path, limit_s=3) == check.FAILED
    assert kinds(tmp_path) == {"hang": "FAILED", "late": "passed", "none": "COULD NOT RUN"}
    assert "begun" in (tmp_path / "hang.log").read_text()
    assert (tmp_path / "late.log").read_text() == "done\n"


def test_status_is_not_0_if_no_step_could_run(tmp_path: Path) -> None:
    assert check.run_all({"none": None}, tmp_path) == check.NO_GPU


def test_results_of_earlier_steps_are_there_while_a_later_one_runs(tmp_path: Path) -> None:
    look = f"import json; print(list(json.load(open({str(tmp_path / 'check.json')!r}))))"
    assert check.run_all({"one": step("pass"), "two": step(look)}, tmp_path) == 0
    assert (tmp_path / "two.log").read_text() == "['one']\n"


def test_unknown_step_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(["tests", "swep"]) == check.USAGE
    assert "there is no step swep; name some of tests," in capsys.readouterr().err


def test_steps_run_in_their_order_and_the_risky_rival_last() -> None:
    assert check.STEPS[-1] == "batched"
    for name in check.STEPS:
        command = check.command_of(name, Path("/tmp/results"))
        assert command is None or isinstance(command, list)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, None),
        ({"corrupt_blocks": 2}, "2 blocks are corrupt"),
        ({"loaded_blocks": 0}, "no block was loaded"),
        ({"verified_blocks": 0}, "no block was verified"),
    ],
)
def test_replay_that_shows_nothing_fails(changed: dict[str, int], why: str | None) -> None:
    figures = {"corrupt_blocks": 0, "loaded_blocks": 3, "verified_blocks": 3} | changed
    found = what_is_wrong(figures)
    assert found is why if why is None else found is not None and why in found
