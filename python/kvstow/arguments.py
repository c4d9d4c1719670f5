"""Checks of arguments that more than one part of kvstow makes."""

import operator
import os
import reprlib
from collections.abc import Callable
from math import inf, isfinite
from numbers import Real
from typing import TypeGuard

from kvstow._core import ConfigError


def is_path(given: object) -> TypeGuard[str | os.PathLike[str]]:
    """Return whether `given` may name a file: a str, or a path object that holds one.

    Bytes are no path. Neither is a text that no system call takes, for a null character or a lone
    surrogate.
    """
    try:
        path: object = os.fspath(given)  # type: ignore[call-overload]
        return isinstance(path, str) and b"\0" not in os.fsencode(path)
    except (TypeError, UnicodeEncodeError):
        return False


def is_for_shell(path: str | os.PathLike[str]) -> bool:
    """Return whether a path begins with what only a shell replaces: ~ or a variable."""
    return os.fspath(path).startswith(("~", "$"))


def read_clock(clock: Callable[[], float]) -> float:
    """Return the seconds on a clock that the user has passed.

    Raises:
        ConfigError: the clock returns no finite number.
    """
    now_s: object = clock()
    if not (isinstance(now_s, Real) and isfinite(now_s)):
        raise ConfigError(f"the clock says {now_s!r}, expected finite seconds: pass another")
    return float(now_s)


def check_seconds(name: str, seconds: float) -> None:
    """Refuse what is no number of seconds above 0.

    Raises:
        ConfigError: it is no number, not above 0, or has no end.
    """
    if not isinstance(seconds, Real) or not 0 < seconds < inf:
        raise ConfigError(f"{name} is {seconds!r}: pass a number of seconds above 0")


def checked_int(name: str, value: object, low: int, high: int, fix: str) -> int:
    """Return `value` as an int from `low` to `high`.

    Raises:
        ConfigError: `value` is not such an integer; the message ends with `fix`.
    """
    try:
        # bool is an int to Python, and always a mistake here.
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None:
        raise ConfigError(f"{name} must be an integer, got {reprlib.repr(value)}; {fix}")
    if not low <= number <= high:
        raise ConfigError(f"{name} is {number}, outside {low} to {high}; {fix}")
    return number
