"""Parse sizes in bytes, such as `32GiB`, and write them."""

from __future__ import annotations

import operator
import re
from fractions import Fraction
from typing import Final

from kvstow._core import ConfigError

_UNITS: Final = {"": 1, "B": 1} | {
    prefix + suffix: base**power
    for base, suffix in ((1000, "B"), (1024, "IB"))
    for power, prefix in enumerate("KMGTP", start=1)
}
_SIZE: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")
_MAX_DIGITS: Final = 40  # Longer numbers are no size, and slow to convert.
_MAX_BYTES: Final = 2**63 - 1


def parse_bytes(value: object, *, name: str = "size") -> int:
    """Return a number of bytes.

    Units are binary (`KiB`, `MiB`, `GiB`, `TiB`, `PiB`) or decimal (`kB`, `MB`, `GB`, `TB`, `PB`),
    in upper or lower case. The result is rounded down: `0.1GiB` is 107,374,182 bytes.

        >>> parse_bytes("32GiB"), parse_bytes("512MB"), parse_bytes(1e9)
        (34359738368, 512000000, 1000000000)

    Args:
        value: a string such as `"32GiB"`, an integer, or a whole float.
        name: the option, for the error message.

    Raises:
        ConfigError: `value` is not a size, or not 1 to 2^63 - 1 bytes.
    """
    num_bytes = _from_text(name, value) if isinstance(value, str) else _from_number(name, value)
    if not 1 <= num_bytes <= _MAX_BYTES:
        raise ConfigError(f"{name} is {_shown(value)}; it must be 1 to 2^63 - 1 bytes")
    return num_bytes


def _from_text(name: str, text: str) -> int:
    match = _SIZE.fullmatch(text)
    factor = _UNITS.get(match[2].upper()) if match else None
    if match is None or factor is None or len(match[1]) > _MAX_DIGITS:
        raise _refused(name, text)
    num_bytes = Fraction(match[1]) * factor
    if not match[2] and num_bytes.denominator != 1:
        raise _refused(name, text)
    return int(num_bytes)


def _from_number(name: str, value: object) -> int:
    if isinstance(value, float) and value.is_integer():  # neither infinity nor NaN
        return int(value)
    try:
        if not isinstance(value, bool):
            return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        pass
    raise _refused(name, value)


def _refused(name: str, value: object) -> ConfigError:
    return ConfigError(
        f"{name} is {_shown(value)}, which is not a size: pass a number of bytes, or a number with "
        "a unit: kB, MB, GB, TB, PB (powers of 1000) or KiB, MiB, GiB, TiB, PiB (powers of 1024)"
    )


def _shown(value: object) -> str:
    try:
        shown = repr(value)
    except ValueError:  # Python does not print integers of thousands of digits
        return "an integer of thousands of digits"
    return shown if len(shown) <= 2 * _MAX_DIGITS else f"{shown[:_MAX_DIGITS]}..."


def format_bytes(num_bytes: int) -> str:
    """Return a number of bytes for people, in GiB, or in MiB below one GiB."""
    unit, power = ("GiB", 30) if num_bytes >= 2**30 else ("MiB", 20)
    return f"{num_bytes / 2**power:,.2f} {unit}"
