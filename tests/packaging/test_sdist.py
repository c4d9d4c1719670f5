"""Cargo takes the lock file of an sdist, which lacks a crate of the workspace."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_cargo_takes_the_lock_file_of_an_sdist(tmp_path: Path) -> None:
    """`make test-wheels` builds a real sdist, which needs a tool that CI lacks."""
    shutil.copytree(ROOT / "rust", tmp_path / "rust")
    shutil.copy(ROOT / "Cargo.lock", tmp_path)
    text = (ROOT / "Cargo.toml").read_text()
    # maturin leaves out the members that the bindings do not need, and the default ones.
    members = re.sub(r"^default-members.*\n", "", text.replace('"benches", ', ""), flags=re.M)
    assert len(tomllib.loads(members)["workspace"]["members"]) == 2
    (tmp_path / "Cargo.toml").write_text(members)

    maturin = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["maturin"]
    done = subprocess.run(
        [
            "cargo",
            "metadata",
            "--format-version",
            "1",
            *["--locked"] * maturin.get("locked", False),
        ],
        cwd=tmp_path,
        capture_output=True,
        check=False,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    pinned = (ROOT / "Cargo.lock").read_text().strip().split("\n\n")
    kept = (tmp_path / "Cargo.lock").read_text().strip().split("\n\n")
    assert set(kept) < set(pinned), "cargo may drop crates, and changes no version"
