"""A new file that takes the place of an old one when it is complete."""

import errno
import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_TEMPORARY = ".kvstow-tmp"


@contextmanager
def replacing(path: Path) -> Iterator[int]:
    """Open a new file. It gets the name `path` when it is complete; after an error it is removed.

    Files that killed writers left behind are removed first. A writer that lives locks its file.
    """
    file, name = _new_file(path)
    try:
        yield file
        os.fsync(file)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
    finally:
        os.close(file)


def _new_file(path: Path) -> tuple[int, str]:
    """Return a new, locked file beside `path`, and its name.

    No other writer removes a locked file.
    """
    prefix = f".{path.name}."
    _remove_left_over(path.parent, prefix)
    while True:
        file, name = tempfile.mkstemp(_TEMPORARY, prefix, path.parent)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file).st_nlink:
                return file, name
        except BaseException:
            os.close(file)
            with suppress(OSError):
                os.unlink(name)
            raise
        os.close(file)  # another writer removed it before this one locked it


def _remove_left_over(folder: Path, prefix: str) -> None:
    with os.scandir(folder) as entries:
        names = [
            entry.path
            for entry in entries
            if entry.name.startswith(prefix) and entry.name.endswith(_TEMPORARY)
        ]
    for name in names:
        with suppress(OSError):
            file = os.open(name, os.O_RDWR)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(name)
            finally:
                os.close(file)


def sync_folder(folder: Path) -> None:
    """Make the new name survive a loss of power too."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    except OSError as error:
        # Some network file systems cannot sync a folder, and keep its names in other ways.
        if error.errno not in {errno.EINVAL, errno.ENOTSUP}:
            raise
    finally:
        os.close(file)
