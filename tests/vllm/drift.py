"""Compares vLLM's sources with what kvstow relies on (`relied_on`), and imports neither.

So it can read any version: an installed package, or unpacked sources.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tests.vllm.relied_on import ORDERS, RELIED_ON

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = ast.ClassDef | Function


class Found(NamedTuple):
    """A definition, and the module in which its names are resolved."""

    module: str
    node: ast.AST


@cache
def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


class Sources:
    """Modules below these folders. The first folder that has a module counts."""

    def __init__(self, *roots: Path) -> None:
        self.roots = roots

    def file(self, module: str) -> Path | None:
        path = module.replace(".", "/")
        candidates = (
            root / name for root in self.roots for name in (f"{path}.py", f"{path}/__init__.py")
        )
        return next((file for file in candidates if file.exists()), None)

    def find(self, module: str, name: str) -> Found | None:
        """Return the definition of a module's name, through imports."""
        file = self.file(module)
        if file is None:
            return None
        for node in reversed(statements(parse(file))):
            if isinstance(node, Definition) and node.name == name:
                return Found(module, node)
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                for alias in node.names:
                    if name == (alias.asname or alias.name):
                        return self.find(node.module, alias.name)
            if name in assigned(node):
                return Found(module, node)
        return None

    def lineage(self, module: str, cls: ast.ClassDef) -> Iterator[tuple[str, ast.ClassDef]]:
        """Yield a class and its bases, as far as these sources have them."""
        yield module, cls
        for base in cls.bases:
            found = self.find(module, base.id) if isinstance(base, ast.Name) else None
            if found is not None and isinstance(found.node, ast.ClassDef):
                yield from self.lineage(found.module, found.node)

    def member(self, module: str, cls: ast.ClassDef, name: str) -> Found | None:
        for owner, node in self.lineage(module, cls):
            found = members(node).get(name)
            if found is not None:
                return Found(owner, found)
        return None


@cache
def statements(module: ast.Module) -> list[ast.stmt]:
    """Return the statements of a module, and those inside its `if` and `try`."""
    found: list[ast.stmt] = []
    for node in module.body:
        found.append(node)
        if isinstance(node, ast.If | ast.Try):
            found += (part for part in ast.walk(node) if isinstance(part, ast.stmt))
    return found


def assigned(node: ast.AST) -> list[str]:
    """Return the names and the attributes of `self` that a statement sets."""
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign | ast.AugAssign):
        targets = [node.target]
    else:
        return []
    names = []
    for target in targets:
        if isinstance(target, ast.Name):
            names.append(target.id)
        elif (
            isinstance(target, ast.Attribute)
            and isinstance(target.value, ast.Name)
            and target.value.id == "self"
        ):
            names.append(target.attr)
    return names


@cache
def members(cls: ast.ClassDef) -> dict[str, ast.AST]:
    """Return the methods and attributes of a class, with those that its methods set."""
    found: dict[str, ast.AST] = {}
    for method in cls.body:
        if isinstance(method, Function):
            for node in ast.walk(method):
                found |= dict.fromkeys(assigned(node), node)
    for node in cls.body:
        if isinstance(node, Function):
            found[node.name] = node
        found |= dict.fromkeys(assigned(node), node)
    return found


def has(node: ast.AST, decorator: str) -> bool:
    return isinstance(node, Definition) and any(
        ast.unparse(found) == decorator for found in node.decorator_list
    )


def is_optional(node: ast.AST) -> bool:
    is_annotated = isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "optional"
    return is_annotated or has(node, "optional")


def parameters(function: Function) -> list[str]:
    args = function.args
    names = [arg.arg for arg in [*args.posonlyargs, *args.args]]
    if args.vararg:
        names.append("*" + args.vararg.arg)
    names += [arg.arg for arg in args.kwonlyargs]
    if args.kwarg:
        names.append("**" + args.kwarg.arg)
    return names


def demanded(function: Function) -> list[str]:
    """Return the parameters that a caller must give."""
    args = function.args
    positional = [arg.arg for arg in [*args.posonlyargs, *args.args]]
    keywords = [
        arg.arg
        for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
        if default is None
    ]
    return positional[: len(positional) - len(args.defaults)] + keywords


def drift(sources: Sources) -> list[str]:
    """Return a line with a name for each thing that differs from what kvstow relies on."""
    found = [
        drifted
        for module, definition in listed()
        for drifted in compare(sources, module, definition)
    ]
    for module, function, names, why in ORDERS:
        found += _order(sources, module, function, names, why)
    return found + list(_group_key(sources))


def listed() -> list[tuple[str, Definition]]:
    """Return the classes and functions of `RELIED_ON` with their modules."""
    return [
        (module, definition)
        for module, stub in RELIED_ON.items()
        for definition in ast.parse(stub).body
        if isinstance(definition, Definition)
    ]


def compare(sources: Sources, module: str, expected: Definition) -> Iterator[str]:
    where = f"{module}.{expected.name}"
    actual = sources.find(module, expected.name)
    if actual is None:
        if not is_optional(expected):
            yield f"{where} is gone"
    elif isinstance(expected, Function):
        yield from _function(where, expected, actual.node)
    elif isinstance(actual.node, ast.ClassDef):
        yield from _class(sources, where, expected, actual.module, actual.node)
    else:
        yield f"{where} is no class any more"


def _class(
    sources: Sources, where: str, expected: ast.ClassDef, module: str, cls: ast.ClassDef
) -> Iterator[str]:
    for name, node in members(expected).items():
        member = sources.member(module, cls, name)
        if member is None:
            if not is_optional(node):
                yield f"{where}.{name} is gone"
        elif isinstance(node, Function):
            yield from _function(f"{where}.{name}", node, member.node)
    overridden = {name for name, node in members(expected).items() if has(node, "override")}
    if overridden:
        for _, base in sources.lineage(module, cls):
            for name, node in members(base).items():
                if has(node, "abstractmethod") and name not in overridden:
                    yield f"{where}.{name} is abstract, and kvstow does not have it"


def _function(where: str, expected: Function, actual: ast.AST) -> Iterator[str]:
    wanted = parameters(expected)
    if not isinstance(actual, Function):
        yield f"{where} is no function any more"
        return
    given = parameters(actual)
    if has(expected, "override"):
        fits = given == wanted
    else:
        fits = given[: len(wanted)] == wanted and set(demanded(actual)) <= set(wanted)
    if not fits:
        yield f"{where} takes ({', '.join(given)}), not ({', '.join(wanted)})"


def _order(
    sources: Sources, module: str, path: str, names: tuple[str, ...], why: str
) -> Iterator[str]:
    where = f"{module}.{path}"
    cls, _, method = path.partition(".")
    actual = sources.find(module, cls)
    if actual is not None and method and isinstance(actual.node, ast.ClassDef):
        actual = sources.member(actual.module, actual.node, method)
    if actual is None:
        yield f"{where} is gone ({why})"
        return
    last = (0, 0)
    for name in names:
        places = mentions(actual.node, name)
        if not places:
            yield f"{where} has no {name} ({why})"
        elif places[0] < last:
            yield f"{where} has {name} too early in {' -> '.join(names)} ({why})"
        if places:
            last = places[-1]


def _group_key(sources: Sources) -> Iterator[str]:
    """Check that a key in vLLM's pool ends in the group, by running only that function of vLLM."""
    module, name = "vllm.v1.core.kv_cache_utils", "make_block_hash_with_group_id"
    found = sources.find(module, name)
    if found is None:
        yield f"{module}.{name} is gone"
        return
    scope: dict[str, Any] = {"BlockHash": bytes, "BlockHashWithGroupId": bytes}
    exec(ast.unparse(found.node), scope)
    if (key := scope[name](b"hash", 258)) != b"hash\0\0\1\2":
        yield f"{module}.{name} makes {key!r}, not the hash and four bytes, the highest first"


@cache
def mentions(node: ast.AST, name: str) -> list[tuple[int, int]]:
    """Return the places of a name, also as the last part of an attribute, in source order."""
    texts = (
        (ast.unparse(part), (part.end_lineno or 0, part.end_col_offset or 0))
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute | ast.Name)
    )
    return sorted(place for text, place in texts if text == name or text.endswith("." + name))
