"""The digest by which two servers compare a setting without its text, or the file that it names."""

from __future__ import annotations

import hashlib
from pathlib import Path

from kvstow import ConfigError


def digest_of(value: object) -> str:
    """Return a digest of what a value says of itself."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:32]


def content_named(
    name: str, path: str, way_out: str = "make it readable, or remove the tier below the host"
) -> bytes:
    """Return the content of the file that a setting names.

    Args:
        name: the setting, for the error message.
        path: the file.
        way_out: what to do if it cannot be read.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{name} is {path!r}, which cannot be read ({error.strerror}): {way_out}"
        ) from error


def weights_named(path: str, option: str = "") -> bytes:
    """Return what the file of `weights_version_path` says, which names the weights.

    Args:
        path: the file.
        option: where the option is, for the error message.

    Raises:
        ConfigError: it cannot be read.
    """
    way_out = "write a line that names the weights to this file, readable for each worker"
    return content_named(f"{option}weights_version_path", path, way_out)
