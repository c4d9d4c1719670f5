"""The folder tree keeps its promises: who may import whom, no circles, and no file too long.

The head of each folder (`__init__.py`, `mod.rs`) has a line `May import: a, b.`. These tests read
that line and every import below it, those inside functions and for typing included.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PYTHON = ROOT / "python"
CORE = ROOT / "rust" / "core"
MAX_LINES = 450
MAX_FUNCTION_LINES = 70
# Longer files, each of which states its one idea at its head.
LONG_FILES = {
    "python/kvstow/engine/engine.py",  # one public class, half of it docstrings
    "rust/core/offload/tier/policy/hit_density_tests.rs",  # tests of one policy, and its model
}

Graph = Mapping[str, set[str]]


def may_import(head: str) -> set[str]:
    """Return the names that a folder's head allows."""
    found = re.search(r"May import: (.+?)\.(?:\s|$)", head, flags=re.DOTALL)
    assert found, f"no line 'May import: ...' in:\n{head}"
    text = " ".join(found[1].replace("//!", " ").split())
    return set() if text.startswith("nothing") else set(text.replace("`", "").split(", "))


def circle(graph: Graph) -> list[str]:
    """Return the files of a circle, or nothing."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


# -- Python ------------------------------------------------------------------------------------

MODULES = {
    ".".join(path.relative_to(PYTHON).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PYTHON.rglob("*.py"))
}


def imports(module: str) -> Iterator[str]:
    """Yield each module of kvstow that a module imports."""
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            both = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else str(node.module) for name in both]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "kvstow" and name != module)


PYTHON_GRAPH = {module: set(imports(module)) for module in MODULES}
PACKAGES = [module for module, path in MODULES.items() if path.name == "__init__.py"]


@pytest.mark.parametrize("package", [name for name in PACKAGES if name != "kvstow"])
def test_a_package_imports_only_what_its_head_names(package: str) -> None:
    head = ast.get_docstring(ast.parse(MODULES[package].read_text())) or ""
    allowed = may_import(head)
    inner = [name for name in PACKAGES if name.startswith(f"{package}.")]
    used = {
        name
        for module in MODULES
        if (module == package or module.startswith(f"{package}."))
        and not any(module == it or module.startswith(f"{it}.") for it in inner)
        for name in PYTHON_GRAPH[module]
        if name != package and not name.startswith(f"{package}.")
    }
    refused = {
        name
        for name in used
        if not any(name == it or name.startswith(f"{it}.") for it in allowed if it != "kvstow")
        and not (name == "kvstow" and "kvstow" in allowed)
    }
    assert not refused, f"{package} may import {sorted(allowed)}"
    idle = {it for it in allowed if not any(n == it or n.startswith(f"{it}.") for n in used)}
    assert not idle, f"{package} imports nothing of these: delete them from its head"


def test_python_files_form_no_circle() -> None:
    assert circle(PYTHON_GRAPH) == []


def test_only_one_folder_imports_vllm() -> None:
    for module, path in MODULES.items():
        if not module.startswith("kvstow.vllm"):
            tree = ast.walk(ast.parse(path.read_text()))
            found = [
                node
                for node in tree
                if (isinstance(node, ast.Import) and node.names[0].name.split(".")[0] == "vllm")
                or (isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "vllm")
            ]
            assert not found, f"{module} imports vllm"


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Yield each function with its number of lines, its docstring not counted."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first, last = node.lineno, node.end_lineno or node.lineno
            text = node.body[0]
            if isinstance(text, ast.Expr) and ast.get_docstring(node) is not None:
                last -= (text.end_lineno or text.lineno) - text.lineno + 1
            yield node.name, last - first + 1


def test_no_python_function_is_too_long() -> None:
    long = {
        f"{module}.{name}": num_lines
        for module, path in MODULES.items()
        for name, num_lines in functions(path)
        if num_lines > MAX_FUNCTION_LINES
    }
    assert long == {}


# -- Rust --------------------------------------------------------------------------------------


def rust_module(path: Path) -> tuple[str, ...]:
    parts = path.relative_to(CORE).with_suffix("").parts
    return parts[:-1] if parts[-1] in {"mod", "lib"} else parts


RUST = {
    rust_module(path): path
    for path in sorted(CORE.rglob("*.rs"))
    if not any(part.endswith("tests") for part in rust_module(path))
}


def paths_of(tree: str) -> Iterator[tuple[str, ...]]:
    """Yield the paths of a use tree: `a::{b, c::d}` has a::b and a::c::d."""
    tree = tree.strip()
    head, brace, rest = tree.partition("{")
    if not brace:
        yield tuple(part.split(" as ")[0].strip() for part in tree.split("::"))
        return
    start = tuple(part.strip() for part in head.split("::") if part.strip())
    depth, part = 0, ""
    for letter in rest[: rest.rindex("}")] + ",":
        depth += (letter == "{") - (letter == "}")
        if letter == "," and depth == 0:
            if part.strip():
                yield from ((*start, *path) for path in paths_of(part))
            part = ""
        else:
            part += letter


def rust_imports(module: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield each module of the core that a file uses."""
    text = re.sub(r"//.*", "", RUST[module].read_text())
    trees = re.findall(r"\buse ([^;]+);", text)
    trees += re.findall(r"\b((?:crate|super)(?:::\w+)+)", re.sub(r"\buse [^;]+;", "", text))
    for tree in trees:
        for first, *rest in paths_of(tree):
            bases = {"crate": (), "self": module, "super": module[:-1]}
            path: tuple[str, ...] = bases.get(first, module)
            if first not in bases and (*module, first) not in RUST:
                continue  # another crate's
            for part in rest if first in bases else (first, *rest):
                if part == "super":
                    path = path[:-1]
                elif (*path, part) in RUST:
                    path = (*path, part)
                else:
                    break
            if path != module:
                yield path


RUST_GRAPH = {module: set(rust_imports(module)) for module in RUST}


@pytest.mark.parametrize(
    "folder", [module for module, path in RUST.items() if path.name == "mod.rs"], ids="::".join
)
def test_a_rust_folder_uses_only_what_its_head_names(folder: tuple[str, ...]) -> None:
    head = "\n".join(
        line for line in RUST[folder].read_text().splitlines() if line.startswith("//!")
    )
    allowed = may_import(head)
    outside = {
        path
        for module in RUST
        if module[: len(folder)] == folder
        for path in RUST_GRAPH[module]
        if path[: len(folder)] != folder and path != folder[: len(path)]
    }
    # A folder names its siblings, and of the folders above it those at the crate's root.
    parent = folder[:-1]
    used = {
        path[len(parent)] if path[: len(parent)] == parent and len(path) > len(parent) else path[0]
        for path in outside
    }
    assert used - allowed == set(), f"{'::'.join(folder)} may import {sorted(allowed)}"
    assert allowed - used == set(), "it uses nothing of these: delete them from its head"


def test_rust_files_form_no_circle() -> None:
    # A folder's head and its files share private types, as Rust means them to: not an arrow.
    graph = {
        "::".join(module): {"::".join(path) for path in paths if path != module[:-1]}
        for module, paths in RUST_GRAPH.items()
        if RUST[module].name not in {"mod.rs", "lib.rs"}
    }
    assert circle(graph) == []


def test_the_guide_names_each_folder() -> None:
    """A reader who opens the code finds each folder in the table of CONTRIBUTING.md."""
    guide = (ROOT / "CONTRIBUTING.md").read_text().split("## Send a change")[0]
    heads = [*PYTHON.glob("kvstow/*/__init__.py"), *CORE.glob("*/mod.rs")]
    folders = [head.parent for head in heads] + [file.parent for file in ROOT.glob("rust/*/lib.rs")]
    names = [f"| `{folder.relative_to(ROOT)}/` |" for folder in sorted(folders)]
    assert not [name for name in names if name not in guide]


def test_use_trees_are_read_whole() -> None:
    found = list(paths_of("super::{self, a::{B, c as d}, super::e::*}"))
    assert found == [
        ("super", "self"),
        ("super", "a", "B"),
        ("super", "a", "c"),
        ("super", "super", "e", "*"),
    ]


def test_a_circle_is_found() -> None:
    assert circle({"a": {"b"}, "b": {"c"}}) == []
    assert set(circle({"a": {"b"}, "b": {"c"}, "c": {"a"}})) == {"a", "b", "c"}


# -- both --------------------------------------------------------------------------------------


def test_no_file_is_too_long() -> None:
    files = [*PYTHON.rglob("*.py"), *(ROOT / "rust").rglob("*.rs"), *PYTHON.rglob("*.cu")]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    assert {name for name, length in lengths.items() if length > MAX_LINES} == LONG_FILES
