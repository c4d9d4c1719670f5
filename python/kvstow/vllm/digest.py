"""The digest by which two servers compare a setting without its text, or the file that it names."""

from __future__ import annotations

import hashlib
from pathlib import Path

from kvstow import ConfigError


def digest_of(value: object) -> str:
    """Return a digest of what a value says of itself."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:32]


def content_named(name: str, path: str) -> bytes:
    """Return the content of the file that a setting of vLLM's names.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{name} is {path!r}, which cannot be read ({error.strerror}): make it readable, or "
            "remove the tier below the host"
        ) from error
