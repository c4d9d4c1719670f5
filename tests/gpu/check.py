"""The steps of `make gpu-check`: all that only a GPU can show, one after the other.

    python3 -m tests.gpu.check [--out FOLDER] [STEP ...]

The steps run under this Python, which has numpy, torch, cupy and pytest. They need no network. Name
steps to run only those. Each step has eight minutes. FOLDER (by default gpu-check-results) gets
what each step prints and measures as it goes, and check.json after each step.

The status is 0 if every step passed, and the output names the steps that could not run. It is 1 if
a step FAILED: wrong bytes, a crash, or no end. It is 4 if steps only MISSED a target. It is 2 for
an unknown step, and 3 if nothing was checked, because there is no GPU or no step could run.
"""

import argparse
import filecmp
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import kvstow
from kvstow import ConfigError
from kvstow.doctor import diagnose
from kvstow.transfer.cuda.runtime import import_cupy

ROOT = Path(__file__).parents[2]
FAILED, USAGE, NO_GPU, MISSED = 1, 2, 3, 4
STEP_LIMIT_S = 480

# Without the project's configuration, which turns warnings of other versions of torch and cupy into
# errors, and without the plugins of the project's other tests.
PYTEST = [
    *("pytest", "-c", "/dev/null", "--rootdir", str(ROOT), "--confcutdir", "tests/gpu"),
    *("--import-mode=importlib", "-p", "no:cacheprovider", "-W", "default", "-q", "-ra"),
    "tests/gpu",
]
# Only the kernels count. The mover handles calls that CUDA refuses, and cupy makes some calls
# only to find out whether a feature exists.
SANITIZERS = {"memcheck": ["--report-api-errors", "no"], "racecheck": []}
# In the order in which they run. What may crash the driver comes last.
STEPS = ("tests", "replay", *SANITIZERS, "copies", "sweep", "interference", "batched")

Kind = Literal["passed", "MISSED", "FAILED", "COULD NOT RUN"]


@dataclass(frozen=True)
class Result:
    """How a step ended."""

    kind: Kind
    says: str
    seconds: float = 0.0


def main(arguments: Sequence[str]) -> int:
    """Run the steps; see the module."""
    parser = argparse.ArgumentParser(prog="tests.gpu.check", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "gpu-check-results")
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"one of {', '.join(STEPS)}")
    asked = parser.parse_args(arguments)
    if unknown := [step for step in asked.steps if step not in STEPS]:
        print(f"there is no step {unknown[0]}; name some of {', '.join(STEPS)}", file=sys.stderr)
        return USAGE
    try:
        import_cupy()
    except ConfigError as error:
        print(f"nothing was checked, because there is no GPU ({error})")
        return NO_GPU
    if stale := stale_files():
        print(f"{stale[0]} of the wheel differs from these sources; run make wheel")
        return FAILED
    for finding in diagnose():
        print(f"{finding.name}: {finding.status}, {finding.says}")
    folder = asked.out.absolute()
    chosen = [step for step in STEPS if not asked.steps or step in asked.steps]
    return run_all({step: command_of(step, folder) for step in chosen}, folder)


def command_of(step: str, folder: Path) -> list[str] | None:
    """Return what runs a step; None if this machine cannot."""
    program = [sys.executable, "-m"]
    if step == "tests":
        return [*program, *PYTEST, f"--junitxml={folder / 'tests.xml'}"]
    if step == "replay":
        return [*program, "tests.gpu.replay"]
    if step in SANITIZERS:
        sanitizer = shutil.which("compute-sanitizer")
        if sanitizer is None:
            return None
        options = ["--tool", step, "--error-exitcode", "9", *SANITIZERS[step]]
        return [sanitizer, *options, *program, "tests.gpu.small_round_trip"]
    return [*program, "benches.gpu_copy", "--out", str(folder), step]


def run_all(
    commands: Mapping[str, list[str] | None], folder: Path, limit_s: float = STEP_LIMIT_S
) -> int:
    """Run the steps, write their results to the folder as they come, and return the status."""
    folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, Result] = {}
    for name, command in commands.items():
        print(f"\n== {name}", flush=True)
        if command is None:
            results[name] = Result("COULD NOT RUN", "compute-sanitizer is not on the PATH")
        else:
            results[name] = run(command, folder / f"{name}.log", limit_s)
        written = {step: asdict(result) for step, result in results.items()}
        (folder / "check.json").write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    print(f"\nmake gpu-check, with results in {folder}:")
    for name, result in results.items():
        print(f"  {name}: {result.kind}, {result.says}")
    kinds = {result.kind for result in results.values()}
    for kind, status in (("FAILED", FAILED), ("MISSED", MISSED), ("passed", 0)):
        if kind in kinds:
            return status
    return NO_GPU


def run(command: list[str], log: Path, limit_s: float) -> Result:
    """Run a step with its output here and in a file."""
    begin_s = time.monotonic()
    # Without a GPU the tests fail instead of being skipped.
    environment = {**os.environ, "KVSTOW_GPU": "required", "PYTHONUNBUFFERED": "1"}
    is_late = threading.Event()
    with (
        log.open("w", encoding="utf-8") as file,
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as step,
    ):

        def end() -> None:
            is_late.set()
            os.killpg(step.pid, signal.SIGKILL)  # with its children, which hold the pipe open

        timer = threading.Timer(limit_s, end)
        timer.start()
        assert step.stdout is not None
        for line in step.stdout:
            print(line, end="", flush=True)
            file.write(line)
            file.flush()
        timer.cancel()
        status = step.wait()
    took_s = time.monotonic() - begin_s
    if is_late.is_set():
        return Result("FAILED", f"still running after {limit_s:g} s", took_s)
    if status == MISSED:
        return Result("MISSED", f"a target, in {took_s:.0f} s; all bytes are right", took_s)
    kind: Kind = "FAILED" if status else "passed"
    return Result(kind, f"status {status} in {took_s:.0f} s", took_s)


def stale_files() -> list[str]:
    """Return the Python and CUDA files of the package that differ from this checkout."""
    sources, package = ROOT / "python" / "kvstow", Path(kvstow.__file__).parent
    names = [
        path.relative_to(sources) for kind in ("py", "cu") for path in sources.rglob(f"*.{kind}")
    ]
    return [
        str(name)
        for name in sorted(names)
        if not (package / name).exists()
        or not filecmp.cmp(sources / name, package / name, shallow=False)
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
