"""The steps of `make gpu-check`: all that only a GPU can show, one after the other.

    python3 -m tests.gpu.check

The steps run under this Python, which has numpy, torch, cupy and pytest. They need no network. The
status is 0 if no step failed, and the output names the steps that could not run. It is 1 if a step
failed, and 3 if there is no GPU and so nothing was checked.
"""

import filecmp
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import kvstow
from kvstow import ConfigError
from kvstow.doctor import diagnose
from kvstow.transfer.cuda.runtime import import_cupy

ROOT = Path(__file__).parents[2]
FAILED, NO_GPU = 1, 3
STEP_LIMIT_S = 900

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


def main() -> int:
    """Run the steps; see the module."""
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
    program = [sys.executable, "-m"]
    steps: dict[str, list[str]] = {"tests": program + PYTEST}
    if (sanitizer := shutil.which("compute-sanitizer")) is not None:
        for tool, options in SANITIZERS.items():
            command = [sanitizer, "--tool", tool, "--error-exitcode", "9", *options, *program]
            steps[f"compute-sanitizer {tool}"] = [*command, "tests.gpu.small_round_trip"]
    steps["benches.gpu_copy"] = [*program, "benches.gpu_copy"]
    steps["replay --mover cuda"] = [*program, "tests.gpu.replay"]
    results = {name: run(name, command) for name, command in steps.items()}
    if sanitizer is None:
        results["compute-sanitizer"] = "COULD NOT RUN: it is not on the PATH"
    print("\nmake gpu-check:")
    for name, result in results.items():
        print(f"  {name}: {result}")
    return FAILED if any(result.startswith("FAILED") for result in results.values()) else 0


def run(name: str, command: list[str]) -> str:
    """Run a step, and return its result as text."""
    print(f"\n== {name}", flush=True)
    begin_s = time.monotonic()
    try:
        # Without a GPU the tests fail instead of being skipped.
        environment = {**os.environ, "KVSTOW_GPU": "required"}
        status = subprocess.run(
            command, cwd=ROOT, env=environment, check=False, timeout=STEP_LIMIT_S
        ).returncode
    except subprocess.TimeoutExpired:
        return f"FAILED: still running after {STEP_LIMIT_S} s"
    took = f"{time.monotonic() - begin_s:.0f} s"
    return f"passed ({took})" if status == 0 else f"FAILED with status {status} ({took})"


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
    sys.exit(main())
