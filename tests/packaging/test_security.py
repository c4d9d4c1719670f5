"""SECURITY.md names tests that exist, and what it says of dependencies holds."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
POLICY = (ROOT / "SECURITY.md").read_text()
REGISTRY = "registry+https://github.com/rust-lang/crates.io-index"


def test_each_threat_names_tests_that_exist() -> None:
    rows = re.findall(r"^\| (?!threat|---)(.*?) \| .*? \| (.*?) \|$", POLICY, re.MULTILINE)
    assert len(rows) >= 10
    for threat, shown_by in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)(?:::(test_\w+))?`", shown_by)
        assert named, f"no test shows: {threat}"
        for file, test in named:
            assert f"def {test}" in (ROOT / file).read_text(), f"{file} has no {test}"


def test_only_one_crate_may_have_unsafe_code() -> None:
    workspace = tomllib.loads((ROOT / "Cargo.toml").read_text())
    assert workspace["workspace"]["lints"]["rust"]["unsafe_code"] == "forbid"
    manifests = {
        path: tomllib.loads(path.read_text())
        for path in (*ROOT.glob("rust/*/Cargo.toml"), ROOT / "benches/Cargo.toml")
    }
    manifests[ROOT / "Cargo.toml"] = workspace
    free = [
        path.parent.name for path, one in manifests.items() if one["lints"] != {"workspace": True}
    ]
    assert free == ["copy"]


def test_every_crate_comes_from_the_registry() -> None:
    packages = tomllib.loads((ROOT / "Cargo.lock").read_text())["package"]
    own = {package["name"] for package in packages if "source" not in package}
    assert own == {"kvstow-benches", "kvstow-bindings", "kvstow-copy", "kvstow-core"}
    for package in packages:
        if package["name"] not in own:
            assert package["source"] == REGISTRY and package["checksum"], package["name"]


def test_every_crate_has_a_licence_that_deny_toml_allows() -> None:
    """A part of `make deny`, which needs a tool that CI lacks."""
    allowed = set(tomllib.loads((ROOT / "deny.toml").read_text())["licenses"]["allow"])
    packages = crates()["packages"]
    assert len(packages) > 50
    wrong = {one["name"]: one["license"] for one in packages if not fits(one["license"], allowed)}
    assert wrong == {}


@cache
def crates() -> dict[str, Any]:
    """Return the crates of the workspace, and what each needs."""
    listed = subprocess.run(
        ["cargo", "metadata", "--format-version", "1", "--locked"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    found = json.loads(listed.stdout)
    assert isinstance(found, dict)
    return found


def test_the_wheel_brings_the_notices_of_the_crates_in_it() -> None:
    packages = {one["id"]: one for one in crates()["packages"]}
    needs = {node["id"]: node["deps"] for node in crates()["resolve"]["nodes"]}
    (root,) = (id for id, one in packages.items() if one["name"] == "kvstow-bindings")
    linked, waiting = set(), [root]
    while waiting:
        id = waiting.pop()
        if id in linked or "proc-macro" in packages[id]["targets"][0]["kind"]:
            continue
        linked.add(id)
        waiting += [
            need["pkg"]
            for need in needs[id]
            if any(kind["kind"] is None for kind in need["dep_kinds"])
        ]
    # BSL-1.0 asks for no notice in compiled code, and LICENSE is that of Apache-2.0.
    needing = {
        packages[id]["name"]
        for id in linked
        if not fits(packages[id]["license"], {"Apache-2.0", "BSL-1.0"})
    }
    named = re.findall(
        r"^# (.*): [\w.-]+$", (ROOT / "LICENSE-THIRD-PARTY").read_text(), re.MULTILINE
    )
    given = {name for names in named for name in names.split(", ")}
    assert needing <= given and "numpy" in needing
    assert given <= {one["name"] for one in packages.values()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license-files"] == ["LICENSE", "LICENSE-THIRD-PARTY"]


def fits(expression: str, allowed: set[str]) -> bool:
    """Whether the allowed licences satisfy an expression of alternatives, each without brackets."""
    for bracket in re.findall(r"\((.*?)\)", expression):
        expression = expression.replace(
            f"({bracket})", next(iter(allowed)) if fits(bracket, allowed) else "refused"
        )
    alternatives = re.split(r" OR |/", expression)
    return any(set(parts.split(" AND ")) <= allowed for parts in alternatives)


def test_licences_are_read_as_alternatives() -> None:
    assert fits("MIT/Apache-2.0", {"MIT"}) and fits("GPL-3.0 OR MIT", {"MIT"})
    assert fits("(MIT OR GPL-3.0) AND Unicode-3.0", {"MIT", "Unicode-3.0"})
    assert not fits("(MIT OR GPL-3.0) AND Unicode-3.0", {"MIT"})
    assert not fits("GPL-3.0", {"MIT"})


def test_bundled_data_has_its_licence_beside_it() -> None:
    data = ROOT / "python" / "kvstow" / "replay" / "data"
    licence = (data / "LICENSE.md").read_text()
    bundled = [path.name for path in data.iterdir() if path.suffix == ".gz"]
    assert bundled and all(name in licence for name in bundled)
    assert "Apache-2.0" in licence
