"""Everything that only a GPU can show, one step after the other: what `make gpu-check` runs.

    python3 -m tests.gpu.check

It takes the Python that it runs under as it is, with numpy, torch, cupy and pytest, and needs no
network. Status 0: every step that could run has passed, and those that could not are named; 1: one
has failed; 3: there is no GPU, so nothing was checked.
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

# Of pytest, what needs neither the project's configuration, which makes errors of the warnings that
# other versions of torch and cupy give, nor the plugins of its other tests.
PYTEST = [
    *("pytest", "-c", "/dev/null", "--rootdir", str(ROOT), "--confcutdir", "tests/gpu"),
    *("--import-mode=importlib", "-p", "no:cacheprovider", "-W", "default", "-q", "-ra"),
    "tests/gpu",
]
# Kernels are what is looked at. What CUDA refuses the mover sees for itself, and cupy asks for some
# things only to find out whether they are there.
SANITIZERS = {"memcheck": ["--report-api-errors", "no"], "racecheck": []}


def main() -> int:
    """Run the steps; see the module."""
    try:
        import_cupy()
    except ConfigError as error:
        print(f"no GPU: nothing was checked ({error})")
        return NO_GPU
    if stale := stale_files():
        print(f"the kvstow that is checked is of other sources than these: {stale[0]}; make wheel")
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
    """Run a step; what came of it."""
    print(f"\n== {name}", flush=True)
    begin_s = time.monotonic()
    try:
        # Tests that are skipped would show nothing.
        environment = {**os.environ, "KVSTOW_GPU": "required"}
        status = subprocess.run(
            command, cwd=ROOT, env=environment, check=False, timeout=STEP_LIMIT_S
        ).returncode
    except subprocess.TimeoutExpired:
        return f"FAILED: still running after {STEP_LIMIT_S} s"
    took = f"{time.monotonic() - begin_s:.0f} s"
    return f"passed ({took})" if status == 0 else f"FAILED with status {status} ({took})"


def stale_files() -> list[str]:
    """Python and CUDA files of the package that differ from this checkout's."""
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
