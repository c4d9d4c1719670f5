"""The file calls of a slot file, in one object, so that a test can wrap them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from functools import partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

# The stub of os.preadv does not know that arrays are buffers.
Buffers: TypeAlias = list[npt.NDArray[np.uint8]]


class Files:
    """The system's own file calls. Each raises `OSError`, as the system does."""

    # No methods of Python are around these two, for `open_next` and `close_last`.
    open = staticmethod(partial(os.open, mode=0o600))
    close = staticmethod(os.close)

    def protect(self, file: int) -> None:
        """Let only the owner read and write a file, if the file system can tell users apart."""
        with contextlib.suppress(OSError):
            if os.fstat(file).st_mode & 0o077:
                os.fchmod(file, 0o600)

    def lock(self, file: int) -> None:
        """Lock a file for this process, or raise `BlockingIOError` at once."""
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def holder(self, file: int) -> int | None:
        """Return the process that has locked a file; None if the system does not say."""
        found = os.fstat(file)
        device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}"
        try:
            with open("/proc/locks", encoding="ascii") as lines:
                locks = [line.split()[1:6] for line in lines]
        except (OSError, ValueError):
            return None
        for kind, _, _, process, place in locks:
            # Of a process that has ended, a child may have the lock.
            if (kind, place) == ("FLOCK", f"{device}:{found.st_ino}"):
                return int(process) if os.path.exists(f"/proc/{process}") else None
        return None

    def set_direct(self, file: int, is_direct: bool) -> None:
        """Choose whether reads and writes of a descriptor bypass the page cache."""
        flags = fcntl.fcntl(file, fcntl.F_GETFL)
        flags = flags | os.O_DIRECT if is_direct else flags & ~os.O_DIRECT
        fcntl.fcntl(file, fcntl.F_SETFL, flags)

    def read(self, file: int, buffers: Buffers, offset: int) -> int:
        """Read into buffers; return the number of bytes."""
        return os.preadv(file, buffers, offset)  # type: ignore[arg-type]

    def write(self, file: int, buffers: Buffers, offset: int) -> int:
        """Write buffers; return the number of bytes."""
        return os.pwritev(file, buffers, offset)  # type: ignore[arg-type]

    def sync(self, file: int) -> None:
        """Make everything written to a file survive a loss of power."""
        os.fsync(file)

    def allocate(self, file: int, num_bytes: int) -> None:
        """Reserve the space of a file's first `num_bytes`, and grow the file to them."""
        os.posix_fallocate(file, 0, num_bytes)

    def truncate(self, file: int, num_bytes: int) -> None:
        """Cut a file, or grow it without space."""
        os.ftruncate(file, num_bytes)

    def stat(self, path: str) -> os.stat_result | None:
        """Return the state of a file, or of a link itself; None if the name does not exist."""
        try:
            return os.lstat(path)
        except FileNotFoundError:
            return None

    def is_at(self, file: int, path: str) -> bool:
        """Return whether a path names an open file."""
        found = self.stat(path)
        return found is not None and os.path.samestat(found, os.fstat(file))

    def remove(self, path: str) -> None:
        """Remove a file."""
        os.unlink(path)

    def space(self, folder: str) -> tuple[int, int]:
        """Return the bytes of the file system, and those that are free."""
        found = os.statvfs(folder)
        return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize

    def file_system(self, folder: str) -> str:
        """Return the type of the file system that holds a folder, for example "ext4".

        Empty if the system does not say.
        """
        try:
            with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as lines:
                mounts = [line.split(" ")[1:3] for line in lines]
        except (OSError, ValueError):
            return ""
        parts = os.path.realpath(folder).split("/")
        best, found = 0, ""
        for escaped, kind in mounts:
            name = escaped.encode("utf-8", "surrogateescape")
            # This decodes an escape, and each byte of a letter that is not ASCII, to one character.
            mount = os.fsdecode(name.decode("unicode_escape").encode("latin-1"))
            point = mount.rstrip("/").split("/")
            # A later mount hides an earlier one at the same place.
            if parts[: len(point)] == point and len(point) >= best:
                best, found = len(point), kind
        return found

    def now(self) -> float:
        """Return the time on the clock of deadlines, in seconds."""
        return time.monotonic()


def open_next(files: Files, path: str, flags: int, descriptors: list[int]) -> int:
    """Open a file, put its descriptor at the end of a list, and return it.

    No interrupt comes between the two, see `close_last`.
    """
    descriptors.extend(map(files.open, (path,), (flags,)))
    return descriptors[-1]


def close_last(files: Files, descriptors: list[int]) -> None:
    """Take the last descriptor from a list, and close it.

    No interrupt comes between the two, because the interpreter runs no code of Python there. If one
    did, the descriptor would stay open, or a second close would hit another file of its number.
    """
    any(map(files.close, map(list.pop, (descriptors,))))
