"""Memory that several processes of one machine map, for ranks that keep one copy of equal KV.

```
creator   create --- HostArena(shared=...) --- handle ------------------------+--- close
others                                         open --- HostArena(shared=...) +--- close
                                                              all have mapped it
```

The memory has no name: the others open the creator's descriptor below /proc. So no file outlives
the processes, however they end, and the limit of /dev/shm (64 MiB in many containers) does not
apply. The memory goes with its last mapping, whichever process ends first.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from typing import Self

from kvstow._core import StateError
from kvstow.closing import Closing

_WAY_OUT = "run the ranks as one user in one container whose processes see each other in /proc"


@dataclass(frozen=True)
class SharedHandle:
    """How another process finds the memory, and how it knows that it found the right one."""

    pid: int
    descriptor: int
    identity: tuple[int, int]


class SharedMemory(Closing):
    """A descriptor of the memory. An arena that has mapped it no longer needs the descriptor.

    Attributes:
        descriptor: of this process.
        is_creator: whether this process created the memory.
    """

    def __init__(self, descriptor: int, *, is_creator: bool) -> None:
        """Take over an open descriptor; call `create` or `open` instead."""
        self.descriptor, self.is_creator = descriptor, is_creator
        self._is_open = True

    @classmethod
    def create(cls, num_bytes: int) -> Self:
        """Return new memory that holds zeros. A page takes no memory until it is first touched.

        Raises:
            StateError: the system has no memory without a name (Linux has it), or refuses it.
        """
        try:
            memory = cls(os.memfd_create("kvstow-host-tier"), is_creator=True)
        except (OSError, AttributeError) as error:
            way_out = "allow memfd_create in the container's seccomp profile"
            if getattr(error, "errno", None) in {errno.EMFILE, errno.ENFILE}:
                way_out = "raise the limit of open files (ulimit -n, or fs.file-max of the system)"
            raise StateError(
                f"the system refused memory that several processes map ({error}); {way_out}"
            ) from error
        try:
            os.ftruncate(memory.descriptor, num_bytes)
        except (OSError, OverflowError) as error:
            memory.close()
            raise StateError(
                f"the system refused {num_bytes} bytes ({num_bytes / 2**30:.1f} GiB) of memory "
                f"that several processes map ({error}); ask for less"
            ) from error
        return memory

    @classmethod
    def open(cls, handle: SharedHandle) -> Self:
        """Return the memory of another process, which still has its descriptor open.

        Raises:
            StateError: this process cannot reach it, or finds other memory there.
        """
        path = f"/proc/{handle.pid}/fd/{handle.descriptor}"
        try:
            memory = cls(os.open(path, os.O_RDWR | os.O_CLOEXEC), is_creator=False)
        except OSError as error:
            raise StateError(
                f"{path}, the host memory of another rank, cannot be opened ({error}); {_WAY_OUT}"
            ) from error
        if memory.identity != handle.identity:
            found = memory.identity
            memory.close()
            raise StateError(
                f"{path} is file {found}, expected the host memory of another rank "
                f"({handle.identity}); {_WAY_OUT}"
            )
        return memory

    @property
    def identity(self) -> tuple[int, int]:
        """Device and inode, which no other open file of the machine has."""
        status = os.fstat(self.descriptor)
        return status.st_dev, status.st_ino

    @property
    def handle(self) -> SharedHandle:
        """What another process needs for `open`. Valid until this process closes the memory."""
        return SharedHandle(os.getpid(), self.descriptor, self.identity)

    def close(self) -> None:
        """Close the descriptor; arenas keep the memory."""
        if self._is_open:
            self._is_open = False
            os.close(self.descriptor)
