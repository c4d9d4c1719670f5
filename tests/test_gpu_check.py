"""`tests.gpu.check` on steps that need no GPU: results, statuses and the time limit."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from benches.gpu import sweep
from benches.gpu.parts import Row
from tests.gpu import check
from tests.gpu.replay import what_is_wrong

from kvstow.doctor import Finding


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
    commands: dict[str, list[str] | str] = {
        "hang": hang,
        "late": step("print('done')"),
        "none": "no such program",
    }
    assert check.run_all(commands, tmp_path, limit_s=3) == check.FAILED
    assert kinds(tmp_path) == {"hang": "FAILED", "late": "passed", "none": "COULD NOT RUN"}
    assert "begun" in (tmp_path / "hang.log").read_text()
    assert (tmp_path / "late.log").read_text() == "done\n"


def test_status_is_not_0_if_no_step_could_run(tmp_path: Path) -> None:
    assert check.run_all({"none": "no such program"}, tmp_path) == check.NO_GPU


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
        assert check.command_of(name, Path("/tmp/results"))


def test_step_names_what_this_machine_lacks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.setattr(check, "find_spec", lambda _: None)
    assert {name: check.lack(name) for name in check.STEPS if check.lack(name)} == {
        "memcheck": "compute-sanitizer is not on the PATH",
        "racecheck": "compute-sanitizer is not on the PATH",
        "vllm-v1": "this Python has no vllm",
        "vllm-v2": "this Python has no vllm",
    }


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


# -- what stands in the way of every step --------------------------------------------------------


def gpu(status: str = "ok", name: str = "NVIDIA H100", free_bytes: int = 80 << 30) -> Finding:
    return Finding("GPU 0", status, "It says.", figures={"name": name, "free_bytes": free_bytes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("findings", "says"),
    [
        ([gpu()], None),
        ([gpu("broken")], "It says."),
        ([gpu(free_bytes=1 << 30)], "GPU 0 has 1.0 GiB free, and the steps need 3 GiB"),
        ([], "no GPU 0; check nvidia-smi"),
    ],
)
def test_obstacle_is_named_before_any_step(findings: list[Finding], says: str | None) -> None:
    found = check.obstacle(findings)
    assert found is says if says is None else found is not None and says in found


def test_notes_name_a_part_of_a_gpu_and_a_torch_without_one() -> None:
    torch = Finding("torch", "broken", "It is built for CPUs.")
    part = gpu(name="NVIDIA H100 80GB HBM3 MIG 1g.10gb")
    first, second = check.notes([part, torch])
    assert "MIG" in first
    assert "torch does not reach the GPU" in second
    assert check.notes([gpu()]) == []


@pytest.mark.parametrize("package", check.PACKAGES)
def test_missing_package_is_named(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "find_spec", lambda name: None if name == package else object())
    assert check.main([]) == check.NO_GPU
    assert f"has no {package}: install" in capsys.readouterr().out


def test_folder_that_cannot_be_written_is_refused_before_any_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "find_spec", lambda _: object())
    monkeypatch.setattr("kvstow.transfer.cuda.runtime.import_cupy", lambda: None)
    monkeypatch.setattr("kvstow.doctor.diagnose", lambda: [gpu()])
    (tmp_path / "file").write_text("")
    assert check.main(["--out", str(tmp_path / "file" / "folder"), "tests"]) == check.USAGE
    assert "pass another --out" in capsys.readouterr().err


def test_interrupt_ends_the_step(tmp_path: Path) -> None:
    sleep = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    program = (
        "import signal, sys; from pathlib import Path; from tests.gpu import check;"
        # A process that was started in the background ignores it, and so do its children.
        "signal.signal(signal.SIGINT, signal.default_int_handler);"
        f"check.run([sys.executable, '-c', {sleep!r}], Path({str(tmp_path / 'log')!r}), 600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=check.ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": str(check.ROOT)},
    ) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        assert process.wait(60) != 0
    assert not Path(f"/proc/{child}").exists()


def test_signal_that_ends_a_step_is_named(tmp_path: Path) -> None:
    crash = step("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert check.run(crash, tmp_path / "log", 60).says.startswith("ended by signal 11")


# -- the sweep -----------------------------------------------------------------------------------


def row(grid: int, place_mib: int, places: int, *, most: float, worst: float, kib: int = 4) -> Row:
    """Return a setting that reaches `most` GB/s in all cases but one."""
    cases = {f"{way} {num}": most for num in sweep.JOBS for way in sweep.WAYS}
    setting = {"kib": kib, "grid": grid, "place_mib": place_mib, "places": places}
    return setting | cases | {"load 8": worst}


def test_sweep_picks_the_gentlest_of_the_settings_with_a_good_worst_case() -> None:
    rows = [
        row(32, 8, 3, most=100, worst=99),  # its worst case is the best one
        row(16, 16, 2, most=98, worst=98),  # within 3 percent, with fewer thread blocks
        row(16, 8, 3, most=98, worst=98),  # and with less staging memory
        row(4, 8, 3, most=120, worst=50),  # fast, but not in every case
    ]
    best = {16: 98 / 120, 32: 100 / 120, 4: 50 / 99}
    table = sweep.table(rows)
    for found in table:
        assert found["worst_share"] == pytest.approx(best[found["grid"]])
    pick = sweep.picked(table)
    assert (pick["grid"], pick["place_mib"], pick["places"]) == (16, 8, 3)
    assert pick["is_default"] == (sweep.PRESENT == (16, 8, 3))


def test_worst_case_is_over_all_sizes_of_fragments() -> None:
    rows = [
        row(8, 8, 3, most=100, worst=100),
        row(16, 8, 3, most=90, worst=90),
        row(8, 8, 3, most=10, worst=10, kib=64),
        row(16, 8, 3, most=20, worst=20, kib=64),
    ]
    shares = {found["grid"]: found["worst_share"] for found in sweep.table(rows)}
    assert shares == {8: 0.5, 16: 0.9}
    assert sweep.picked(sweep.table(rows))["grid"] == 16
