"""The steps of `make gpu-check`: all that only a GPU can show, one after the other.

    python3 -m tests.gpu.check [--out FOLDER] [STEP ...]

The steps run under this Python, which has numpy, torch, cupy and pytest. They need no network. The
program first looks for what would make every step fail, and says what helps. Name steps to run only
those. Each step has eight minutes. FOLDER (by default gpu-check-results) gets what each step prints
and measures as it goes, and check.json after each step.

The status is 0 if every step passed, and the output names the steps that could not run. It is 1 if
a step FAILED: wrong bytes, a crash, or no end. It is 4 if steps only MISSED a target. It is 2 for
an unknown step, and for a folder that it cannot write to. It is 3 if nothing was checked: there is
no GPU, a package is missing, the GPU does not work, or no step could run.
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
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    # Later imports of kvstow come after the check that its packages are there.
    from kvstow.doctor import Finding

ROOT = Path(__file__).parents[2]
FAILED, USAGE, NO_GPU, MISSED = 1, 2, 3, 4
STEP_LIMIT_S = 480
PACKAGES = ("numpy", "torch", "cupy", "pytest")
# A cache of two jobs of 256 MiB, as much again while torch fills it, staging of 256 MiB, two copies
# of 256 MiB each way, and what torch and CUDA take for themselves.
NEEDED_BYTES = 3 << 30

# Without the project's configuration, which turns warnings of other versions of torch and cupy into
# errors.
PYTEST = [
    *("pytest", "-c", "/dev/null", "--rootdir", str(ROOT), "--import-mode=importlib"),
    *("-p", "no:cacheprovider", "-W", "default", "-q", "-ra"),
]
# Only the kernels count. The mover handles calls that CUDA refuses, and cupy makes some calls
# only to find out whether a feature exists.
SANITIZERS = {"memcheck": ["--report-api-errors", "no"], "racecheck": []}
# The connector in vLLM's engine, by the model runner.
RUNNERS = {"vllm-v1": "v1", "vllm-v2": "v2"}
# In the order in which they run. What may crash the driver comes last.
STEPS = ("tests", "replay", *SANITIZERS, *RUNNERS, "copies", "sweep", "interference", "batched")

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
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        print(f"nothing was checked, because {sys.executable} has no {', '.join(missing)}: install")
        print("them for CUDA (pip install 'cupy-cuda13x[ctk]', or cupy-cuda12x[ctk]), or name")
        print("another Python: make gpu-check PYTHON=...")
        return NO_GPU
    from kvstow import ConfigError  # noqa: PLC0415
    from kvstow.doctor import diagnose  # noqa: PLC0415
    from kvstow.transfer.cuda.runtime import import_cupy  # noqa: PLC0415

    try:
        import_cupy()
    except ConfigError as error:
        print(f"nothing was checked: {error}")
        return NO_GPU
    if stale := stale_files():
        print(f"{stale[0]} of the wheel differs from these sources; run make wheel")
        return FAILED
    return examined(diagnose(), asked.out.absolute(), asked.steps)


def examined(findings: "Sequence[Finding]", folder: Path, steps: Sequence[str]) -> int:
    """Run the steps unless a finding of `kvstow doctor` stands in their way."""
    for finding in findings:
        advice = f" ({finding.advice})" if finding.advice else ""
        print(f"{finding.name}: {finding.status}, {finding.says}{advice}")
    for note in notes(findings):
        print(f"NOTE: {note}")
    if reason := obstacle(findings):
        print(f"nothing was checked: {reason}")
        return NO_GPU
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "check.json").touch()
    except OSError as error:
        print(f"cannot write to {folder} ({error}); pass another --out", file=sys.stderr)
        return USAGE
    chosen = [step for step in STEPS if not steps or step in steps]
    return run_all({step: lack(step) or command_of(step, folder) for step in chosen}, folder)


def obstacle(findings: "Sequence[Finding]") -> str | None:
    """Return why every step would fail on GPU 0, which they use; None if none does."""
    for finding in findings:
        if finding.name == "GPU 0":
            if finding.status == "broken":
                return finding.says
            free = finding.figures["free_bytes"]
            assert isinstance(free, int)
            if free < NEEDED_BYTES:
                return (
                    f"GPU 0 has {free / 2**30:.1f} GiB free, and the steps need "
                    f"{NEEDED_BYTES >> 30} GiB; end other programs on it, or choose another GPU "
                    "with CUDA_VISIBLE_DEVICES"
                )
            return None
    return "kvstow doctor found no GPU 0; check nvidia-smi and CUDA_VISIBLE_DEVICES"


def notes(findings: "Sequence[Finding]") -> list[str]:
    """Return what does not stop the steps, but changes what they show."""
    found = []
    for finding in findings:
        if finding.name == "GPU 0" and " MIG " in str(finding.figures.get("name")):
            found.append(
                "GPU 0 is a part of a GPU (MIG), which shares the link with the other parts. So "
                "wrong bytes count, but MISSED targets say nothing about the whole GPU."
            )
        if finding.name == "GPU 0 pinning" and finding.status == "broken":
            found.append("CUDA does not pin memory, so copies will miss their targets.")
        if finding.name == "torch" and finding.status != "ok":
            found.append("torch does not reach the GPU, so the tests and benchmarks will fail.")
    return found


def lack(step: str) -> str | None:
    """Return why this machine cannot run a step; None if it can."""
    if step in SANITIZERS and shutil.which("compute-sanitizer") is None:
        return "compute-sanitizer is not on the PATH"
    needed = ("vllm", "hypothesis") if step in RUNNERS else ()
    missing = [name for name in needed if find_spec(name) is None]
    return f"this Python has no {missing[0]}" if missing else None


def command_of(step: str, folder: Path) -> list[str]:
    """Return what runs a step."""
    program = [sys.executable, "-m"]
    if step == "tests":
        # Without the plugins of the project's other tests.
        chosen = ["--confcutdir", "tests/gpu", "tests/gpu"]
        return [*program, *PYTEST, f"--junitxml={folder / 'tests.xml'}", *chosen]
    if step == "replay":
        return [*program, "tests.gpu.replay"]
    if step in RUNNERS:
        chosen = ["tests/vllm/test_engine.py", "-k", "llama"]
        return ["env", f"KVSTOW_MODEL_RUNNER={RUNNERS[step]}", *program, *PYTEST, *chosen]
    if step in SANITIZERS:
        options = ["--tool", step, "--error-exitcode", "9", *SANITIZERS[step]]
        return ["compute-sanitizer", *options, *program, "tests.gpu.small_round_trip"]
    return [*program, "benches.gpu_copy", "--out", str(folder), step]


def run_all(
    commands: Mapping[str, list[str] | str], folder: Path, limit_s: float = STEP_LIMIT_S
) -> int:
    """Run the steps, write their results to the folder as they come, and return the status."""
    folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, Result] = {}
    for name, command in commands.items():
        print(f"\n== {name}", flush=True)
        if isinstance(command, str):
            results[name] = Result("COULD NOT RUN", command)
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
        try:
            for line in step.stdout:
                print(line, end="", flush=True)
                file.write(line)
                file.flush()
            status = step.wait()
        except BaseException:  # Ctrl-C reaches only this process
            end()
            step.wait()
            raise
        finally:
            timer.cancel()
    took_s = time.monotonic() - begin_s
    if is_late.is_set():
        return Result("FAILED", f"still running after {limit_s:g} s", took_s)
    if status == MISSED:
        return Result("MISSED", f"a target, in {took_s:.0f} s; all bytes are right", took_s)
    if status < 0:
        return Result("FAILED", f"ended by signal {-status} after {took_s:.0f} s", took_s)
    kind: Kind = "FAILED" if status else "passed"
    return Result(kind, f"status {status} in {took_s:.0f} s", took_s)


def stale_files() -> list[str]:
    """Return the Python and CUDA files of the package that differ from this checkout."""
    import kvstow  # noqa: PLC0415

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
