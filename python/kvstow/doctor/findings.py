"""The findings of a check."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Status: TypeAlias = Literal["ok", "missing", "broken"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that this machine has or lacks.

    Attributes:
        name: name of the thing.
        status: "ok"; "missing": the machine lacks it, which is no error; "broken": the machine has
            it, and it does not work.
        says: what the check found and what that means, as a sentence.
        advice: what to do about it, with a command if there is one; empty if nothing is needed.
        figures: what the check found, for programs.
    """

    name: str
    status: Status
    says: str
    advice: str = ""
    figures: Mapping[str, object] = field(default_factory=dict)


def run_check(name: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """Yield the findings of a check, and one more if it raises.

    A broken installation may raise any error, even `SystemExit`.
    """
    try:
        yield from check()
    except (Exception, SystemExit) as error:
        yield Finding(name, "broken", f"The check failed with {type(error).__name__}: {error}.")
