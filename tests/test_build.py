"""Two builds of one version have two names."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import kvstow
from kvstow import __version__
from kvstow.build import build_id, version_and_build

PACKAGE = Path(kvstow.__file__).parent


def run(folder: Path, *arguments: str) -> str:
    """Run kvstow from the package in a folder."""
    code = "import sys; from kvstow.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": str(folder)},  # found before what is installed
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_a_changed_file_is_another_build(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "kvstow", ignore=shutil.ignore_patterns("__pycache__"))
    same = run(tmp_path, "--version")
    assert re.fullmatch(rf"kvstow, version {re.escape(__version__)}, build {build_id()}\n", same), (
        same
    )
    assert run(tmp_path, "--version") == same, "compiled files must not count"
    for path in (tmp_path / "kvstow" / "sizes.py", tmp_path / "kvstow" / "engine" / "engine.py"):
        path.write_text(path.read_text() + "# changed in place\n")
        changed = run(tmp_path, "--version")
        assert changed != same
        same = changed


def test_results_name_the_build() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvstow", "plan", "--model", "qwen3-8b", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout)["kvstow"] == version_and_build()
