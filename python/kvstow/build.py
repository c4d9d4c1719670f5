"""Which build of kvstow this is.

Until a release, and between releases, many builds have one version. The digest of what is installed
tells them apart. It needs no step of the build and no repository, and it also changes with a file
that somebody edited in place.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Final

from kvstow._core import __version__

_FOLDER: Final = Path(__file__).parent
_SUFFIXES: Final = frozenset({".py", ".so"})
_DIGITS: Final = 12


@cache
def build_id() -> str:
    """Return the first 12 hexadecimal digits of the SHA-256 of the package's code.

    It covers the name and the content of each Python file and of the extension module. It reads
    them, some 3 MB, at the first call.

    Raises:
        OSError: a file of the package cannot be read.
    """
    digest = hashlib.sha256()
    for path in sorted(_FOLDER.rglob("*")):
        if path.suffix in _SUFFIXES:
            content = path.read_bytes()
            digest.update(f"{path.relative_to(_FOLDER).as_posix()}\0{len(content)}\0".encode())
            digest.update(content)
    return digest.hexdigest()[:_DIGITS]


def version_and_build() -> str:
    """Return the version and the build in words: `0.1.0, build 3f9a0c51d2be`.

    A package that lies in an archive, or whose files cannot be read, has the version alone.
    """
    try:
        return f"{__version__}, build {build_id()}"
    except OSError:
        return __version__
