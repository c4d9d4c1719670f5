"""A patch replaces functions of vLLM if all source that it depends on is known.

A replacement repeats what vLLM's functions do, so a change of any of them may make it wrong.
`reads` lists these functions, and `known` the digests of their source in the versions of vLLM that
the replacement was compared with.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Patch:
    """Replacements for functions of vLLM.

    Attributes:
        what: what becomes faster, for the log.
        replacements: for each name of a function, `module:name` or `module:Class.name`, what
            makes the replacement from vLLM's function.
        reads: the functions whose behaviour the replacements repeat, by module. A version without
            one of them has an empty source there.
        known: digests of the source of all `reads`, each with the versions of vLLM that have it.
    """

    what: str
    replacements: Mapping[str, Callable[[Any], Any]]
    reads: Mapping[str, tuple[str, ...]]
    known: Mapping[str, str]
    _undo: list[tuple[Any, str, Any]] = field(default_factory=list)

    @property
    def is_on(self) -> bool:
        """Whether the replacements are in place."""
        return bool(self._undo)

    def paths(self) -> Iterator[tuple[str, str]]:
        """Yield the module and the name of each function in `reads`."""
        for module, names in self.reads.items():
            for name in names:
                yield module, name

    def apply(self) -> str | None:
        """Replace the functions unless they are replaced. Return the reason if it cannot."""
        if self.is_on:
            return None
        try:
            sources = [source(*path) for path in self.paths()]
            places = [(*_owner(path), make) for path, make in self.replacements.items()]
            originals = [vars(owner)[name] for owner, name, _ in places]
            # A plug-in may have replaced a function where another module has imported it.
            are_known = all(_text(original) in sources for original in originals)
        except (AttributeError, ImportError, KeyError, OSError, TypeError) as error:
            return f"its source cannot be read ({error})"
        found = digest(sources)
        if found not in self.known or not are_known:
            return f"its source is of no version that kvstow knows ({found[:12]})"
        for (owner, name, make), original in zip(places, originals, strict=True):
            is_class_method = isinstance(original, classmethod)
            made = make(original.__func__ if is_class_method else original)
            setattr(owner, name, classmethod(made) if is_class_method else made)
            self._undo.append((owner, name, original))
        return None

    def undo(self) -> None:
        """Put vLLM's functions back, if they are replaced."""
        while self._undo:
            setattr(*self._undo.pop())


def digest(sources: Iterable[str]) -> str:
    """Return one digest for several sources."""
    return hashlib.sha256("\0".join(sources).encode()).hexdigest()


def source(module: str, name: str) -> str:
    """Return the source of a function that is in place now, or "" if there is none of this name.

    Raises:
        OSError: the function has no source.
        AttributeError: the name belongs to something else.
    """
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = vars(found).get(part)
        if found is None:
            return ""
    return _text(found)


def _text(function: Any) -> str:
    # Of its code, because `inspect` would look through a wrapper that another plug-in has made.
    return inspect.getsource(getattr(function, "__func__", function).__code__)


def _owner(path: str) -> tuple[Any, str]:
    module, _, names = path.partition(":")
    owner: Any = importlib.import_module(module)
    *classes, name = names.split(".")
    for cls in classes:
        owner = getattr(owner, cls)
    return owner, name
