"""What a probe has found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

__all__ = ["Finding", "Status", "survived"]

Status: TypeAlias = Literal["ok", "missing", "broken"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that this machine has, or lacks.

    Attributes:
        name: of the thing.
        status: "ok"; "missing": not there, which is no error; "broken": there, and does not work.
        says: for people.
        advice: what helps, a command where there is one; empty where nothing is needed.
        figures: for programs.
    """

    name: str
    status: Status
    says: str
    advice: str = ""
    figures: Mapping[str, object] = field(default_factory=dict)


def survived(name: str, probe: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """A probe's findings, and one more if it fails; broken installations fail in all ways."""
    try:
        yield from probe()
    except (Exception, SystemExit) as error:
        kind = type(error).__name__
        yield Finding(name, "broken", f"asking for it failed: {kind}: {error}")
