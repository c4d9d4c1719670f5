"""Options as fields of a dataclass, and how each is read from what users write.

Each reader takes the name of an option and what the user wrote, and returns its value or raises
`ConfigError`.
"""

from __future__ import annotations

import difflib
import operator
import sys
from collections.abc import Callable, Collection
from dataclasses import field, fields
from reprlib import repr as short_repr
from typing import Any, TypeAlias, TypeVar

from kvstow import ConfigError
from kvstow.arguments import is_for_shell, is_path
from kvstow.sizes import parse_bytes

MIN_TRACE_BYTES = 1 << 20
# A client may choose a name of any length, and the search for a similar one takes long.
_MAX_NAME = 100

Reader: TypeAlias = Callable[[str, object], Any]
_T = TypeVar("_T")


def option(default: _T, read: Reader) -> _T:
    """Return a field with this default, whose value `read` takes from what the user wrote."""
    made: Any = field(default=default, metadata={"read": read})
    return made  # type: ignore[no-any-return]


def read_option(cls: type, where: str, name: str, value: object) -> Any:
    """Return the value of the field of `cls` that a user wrote as `where.name`.

    Raises:
        ConfigError: `cls` has no such field (the message names the nearest one), or it cannot have
            this value.
    """
    readers = {known.name: known.metadata["read"] for known in fields(cls)}
    if name not in readers:
        raise ConfigError(f"{where} has no option {short_repr(name)}: {hint_at(name, readers)}")
    return readers[name](f"{where}.{name}", value)


def read_size(name: str, value: object) -> int:
    """Return a number of bytes, or the bytes of a text such as "32GiB"."""
    return parse_bytes(value, name=name)


def read_size_or_zero(name: str, value: object) -> int:
    """Return a number of bytes as `read_size` does, or 0."""
    return 0 if value == 0 and not isinstance(value, bool) else read_size(name, value)


def read_count(least: int, most: int | None = None) -> Reader:
    """Return a reader of whole numbers from `least` to `most`."""
    rule = f"a whole number of at least {least}" + (f" and at most {most}" if most else "")

    def read(name: str, value: object) -> int:
        try:
            is_whole = isinstance(value, float) and value.is_integer()
            whole: Any = int(value) if is_whole else value  # type: ignore[call-overload]
            number = -1 if isinstance(value, bool) else operator.index(whole)
        except TypeError:
            number = -1
        if number < least or (most is not None and number > most):
            raise _refused(name, value, rule)
        return number

    return read


def read_flag(name: str, value: object) -> bool:
    """Return true or false."""
    if not isinstance(value, bool):
        raise _refused(name, value, "true or false")
    return value


def read_number_of(unit: str) -> Reader:
    """Return a reader of finite numbers above 0."""

    def read(name: str, value: object) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value <= sys.float_info.max:  # type: ignore[operator]
            raise _refused(name, value, f"a finite number of {unit} above 0")
        return float(value)  # type: ignore[arg-type]

    return read


read_seconds = read_number_of("seconds")


def read_trace_bytes(name: str, value: object) -> int:
    """Return a number of bytes for a trace, as `read_size` does."""
    num_bytes = read_size(name, value)
    if num_bytes < MIN_TRACE_BYTES:
        raise _refused(name, value, f"at least {MIN_TRACE_BYTES} bytes")
    return num_bytes


def read_text(name: str, value: object) -> str:
    """Return a text that is not empty, and that C code does not cut off at a null character."""
    if not isinstance(value, str) or not value or "\0" in value:
        raise _refused(name, value, "a text that is not empty and has no null character")
    return value


def read_names(name: str, value: object) -> str:
    """Return a text as `read_text` does, or an empty one."""
    return "" if value == "" else read_text(name, value)


def read_path(name: str, value: object) -> str:
    """Return a text that can name a file.

    The flag stands between single quotes, where no shell replaces ~ or a variable.
    """
    text = read_text(name, value)
    if not is_path(text):
        raise _refused(name, value, "the name of a file")
    if is_for_shell(text):
        raise _refused(name, value, f"a whole path, because nothing replaces {text[0]} here")
    return text


def read_url(name: str, value: object) -> str:
    """Return a text with a scheme. The message of an error does not show it: it may be a secret."""
    if not isinstance(value, str) or "://" not in value:
        raise ConfigError(f"{name} is no URL: write redis://HOST:PORT or mooncake://HOST:PORT")
    return value


def hint_at(name: str, known: Collection[str]) -> str:
    """Return which known name the user may have meant, or all that are known."""
    near = difflib.get_close_matches(name[:_MAX_NAME], known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(known)}"


def read_choice(*choices: str) -> Reader:
    """Return a reader of one of these texts."""

    def read(name: str, value: object) -> str:
        if not (isinstance(value, str) and value in choices):
            raise _refused(name, value, f"one of {', '.join(choices)}")
        return str(value)

    return read


def _refused(name: str, value: object, rule: str) -> ConfigError:
    return ConfigError(f"{name} is {short_repr(value)}, and it must be {rule}")
