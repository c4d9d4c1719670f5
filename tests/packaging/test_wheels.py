"""The wheels and the sdist of `make wheels` install into clean environments, and work there."""

from __future__ import annotations

import email
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DIST = os.environ.get("KVSTOW_DIST")
UV = Path(sys.prefix) / "bin" / "uv"
# `make test-wheels` unpacks Debian's there.
DEBIAN = ROOT / ".venv" / "debian"
QEMU = DEBIAN / "usr" / "bin" / "qemu-aarch64-static"
ARCHITECTURES = ("aarch64", "x86_64")
MAX_BYTES = 2_000_000
OLDEST_GLIBC = "2_17"
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

pytestmark = pytest.mark.skipif(DIST is None, reason="needs the wheels: make test-wheels")


def run(*command: str | Path, **environment: str) -> str:
    """Run a command outside the clone, and without the Python settings of this process."""
    done = subprocess.run(
        command,
        env=CLEAN | environment,
        capture_output=True,
        check=False,
        text=True,
        cwd="/",
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def wheel(architecture: str) -> Path:
    (found,) = Path(DIST or "").glob(f"kvstow-*_{architecture}.whl")
    return found.resolve()


def sdist() -> Path:
    (found,) = Path(DIST or "").glob("kvstow-*.tar.gz")
    return found.resolve()


@cache
def program() -> tuple[str, str]:
    """Return the example of the README, and what it prints."""
    text = (ROOT / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (output,) = re.findall(r"It prints\n\n```text\n(.*?)```", text, re.DOTALL)
    return code, output


def check(*python: str | Path, **environment: str) -> None:
    """Run the README's example, and replay and verify some requests."""
    code, output = program()
    assert run(*python, "-c", code, **environment) == output
    replayed = run(*python, "-m", "kvstow", "replay", "--limit", "20", "--json", **environment)
    figures = json.loads(replayed)
    assert figures["corrupt_blocks"] == 0 < figures["verified_blocks"], figures


def pythons() -> list[str]:
    """Return an interpreter of each version from 3.11 on that is here."""
    if DIST is None:
        return []
    # pyenv puts only some of its versions on the path, behind scripts of its own.
    folders = [str(folder) for folder in (Path.home() / ".pyenv" / "versions").glob("*/bin")]
    folders += [name for name in os.environ["PATH"].split(os.pathsep) if "shims" not in name]
    listed = run(
        *(UV, "python", "list", "--only-installed", "--output-format", "json"),
        PATH=os.pathsep.join(folders),
    )
    found = {}
    for one in json.loads(listed):
        version = (one["version_parts"]["major"], one["version_parts"]["minor"])
        if one["implementation"] == "cpython" and version >= (3, 11):
            found[version] = one["path"]
    assert found
    return [found[version] for version in sorted(found)]


@pytest.mark.parametrize("python", pythons())
def test_the_wheel_works_in_a_clean_environment(python: str, tmp_path: Path) -> None:
    run(UV, "venv", "--quiet", "--python", python, tmp_path / "env")
    own = tmp_path / "env" / "bin" / "python"
    run(UV, "pip", "install", "--quiet", "--python", own, wheel("x86_64"))
    check(own)
    assert "kvstow" in run(tmp_path / "env" / "bin" / "kvstow", "--version")


def test_the_wheel_works_with_the_oldest_packages_that_it_allows(tmp_path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *extras["metrics"], *extras["plot"], *extras["redis"]]
    oldest = [need.replace(">=", "==") for need in needed]
    assert all(re.fullmatch(r"[\w-]+==[\d.]+", one) for one in oldest), oldest
    run(UV, "venv", "--quiet", "--python", pythons()[0], tmp_path / "env")
    own = tmp_path / "env" / "bin" / "python"
    run(UV, "pip", "install", "--quiet", "--python", own, wheel("x86_64"), *oldest)
    check(own)
    command = f"{own} -m kvstow"
    plan = f"{command} plan --limit 20 --model qwen3-8b --device-gib 20 --html {tmp_path}/plan.html"
    for quiet in (f"{command} replay --limit 20", plan, f"{command} doctor"):
        assert run("sh", "-c", f"{quiet} 2>&1 >/dev/null") == ""
    run("sh", "-c", f"{plan} --png {tmp_path}/plan.png")


def test_the_sdist_builds_and_works(tmp_path: Path) -> None:
    run(UV, "venv", "--quiet", "--python", sys.executable, tmp_path / "env")
    own = tmp_path / "env" / "bin" / "python"
    run(UV, "pip", "install", "--quiet", "--python", own, sdist())
    check(own)


@pytest.mark.skipif(not QEMU.exists(), reason="no qemu for aarch64: make test-wheels fetches it")
def test_the_aarch64_wheel_works_under_emulation(tmp_path: Path) -> None:
    run(
        *(UV, "pip", "install", "--quiet", "--python", sys.executable, "--only-binary", ":all:"),
        *("--python-platform", "aarch64-manylinux_2_28", "--python-version", "3.11"),
        *("--target", tmp_path, wheel("aarch64")),
    )
    root = DEBIAN / "aarch64"
    python = (QEMU, "-L", root, root / "usr" / "bin" / "python3.11")
    machine = run(*python, "-c", "import platform; print(platform.machine())")
    assert machine == "aarch64\n"
    check(*python, PYTHONPATH=str(tmp_path))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_wheel_is_small_and_fits_old_systems_and_every_python(architecture: str) -> None:
    file = wheel(architecture)
    assert file.stat().st_size < MAX_BYTES
    _, version, python, abi, platforms = file.stem.split("-")
    assert (python, abi) == ("cp311", "abi3")
    assert f"manylinux_{OLDEST_GLIBC}_{architecture}" in platforms.split(".")
    cargo = tomllib.loads((ROOT / "Cargo.toml").read_text())
    assert version == cargo["workspace"]["package"]["version"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_wheel_names_its_requirements_and_licences_and_parts(architecture: str) -> None:
    with zipfile.ZipFile(wheel(architecture)) as archive:
        names = archive.namelist()
        (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
        metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
        (parts,) = [name for name in names if name.startswith(f"{info}/sboms/")]
        bill = json.loads(archive.read(parts))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = [text for text in metadata.get_all("Requires-Dist", []) if "extra ==" not in text]
    assert len(required) == len(project["dependencies"])
    assert metadata["Requires-Python"] == project["requires-python"]
    assert set(metadata.get_all("Provides-Extra", [])) == set(project["optional-dependencies"])
    licences = {f"{info}/licenses/{name}" for name in project["license-files"]}
    assert licences | {"kvstow/replay/data/LICENSE.md", "kvstow/py.typed"} <= set(names)
    crates = {part["name"] for part in bill["components"]}
    assert {"kvstow-core", "kvstow-copy", "pyo3", "sha2"} <= crates
    assert "criterion" not in crates, "what only tests use is no part of the wheel"
