"""`help()` shows the docstrings of the stub: the binary and `_core.pyi` hold the same text."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import kvstow
from kvstow import _core

STUB = Path(kvstow.__file__).with_name("_core.pyi")
# Both names are constants, which have no docstring of their own.
CONSTANTS = {"__version__", "debug_build"}


def is_public(name: str) -> bool:
    return not name.startswith("_")


def docstrings_of_stub(text: str) -> dict[str, str | None]:
    """Map each public name of the stub to its docstring, members as "Class.name"."""

    def walk(parent: ast.Module | ast.ClassDef, prefix: str) -> Iterator[tuple[str, str | None]]:
        for node in parent.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and is_public(node.name):
                yield prefix + node.name, ast.get_docstring(node)
                if isinstance(node, ast.ClassDef):
                    yield from walk(node, f"{node.name}.")

    module = ast.parse(text)
    return {"": ast.get_docstring(module), **dict(walk(module, ""))}


def docstrings_of_binary(module: ModuleType) -> dict[str, str | None]:
    """Map each public name of the module to what `help()` shows, members as "Class.name"."""
    found = {"": inspect.getdoc(module)}
    for name in set(module.__all__) - CONSTANTS:
        value = getattr(module, name)
        found[name] = inspect.getdoc(value)
        if inspect.isclass(value):
            members = filter(is_public, vars(value))
            found |= {f"{name}.{member}": inspect.getdoc(vars(value)[member]) for member in members}
    return found


@pytest.fixture(scope="module")
def stub() -> dict[str, str | None]:
    return docstrings_of_stub(STUB.read_text())


@pytest.fixture(scope="module")
def binary() -> dict[str, str | None]:
    return docstrings_of_binary(_core)


def test_stub_and_binary_have_equal_public_names(
    stub: dict[str, str | None], binary: dict[str, str | None]
) -> None:
    assert stub.keys() == binary.keys()


def test_every_public_name_has_a_docstring(stub: dict[str, str | None]) -> None:
    assert [name for name, text in stub.items() if not text] == []


def test_help_shows_the_docstrings_of_the_stub(
    stub: dict[str, str | None], binary: dict[str, str | None]
) -> None:
    differences = {name: (text, binary.get(name)) for name, text in stub.items()}
    assert {name: both for name, both in differences.items() if both[0] != both[1]} == {}
