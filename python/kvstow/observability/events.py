"""The events file: block and transfer events as JSON lines.

Each line is one event. `event` is its class, and `time_s` is when it was written, on the clock of
the file. The other fields are the attributes of the event:

    BlockStored          medium, group, block_hashes, parent_block_hash, token_ids, extra_keys,
                         block_size
    BlockRemoved         medium, group, block_hashes
    AllBlocksCleared     medium
    TransferInitiated    job_id, direction, num_blocks
    CacheStoreCommitted  job_id, num_blocks
    TransferCompleted    job_id, direction, ok

`medium` is "GPU" (the device), "CPU" (the host) or "STORAGE" (the disk). `direction` is "store" or
"load", or "demote" or "promote" below the host, where blocks are slots. Hashes and other bytes are
hexadecimal. An unknown value is null. Each TransferInitiated has one TransferCompleted with its
`job_id`. A job whose blocks lookup can find has one CacheStoreCommitted before that, unless it is a
load.
"""

import errno
import json
import logging
import os
import stat
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, TypeAlias

from kvstow._core import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheStoreCommitted,
    ConfigError,
    TransferCompleted,
    TransferInitiated,
)
from kvstow.arguments import is_path, read_clock
from kvstow.closing import Closing
from kvstow.transfer.fork import close_in_children

BlockEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared
TransferEvent: TypeAlias = TransferInitiated | CacheStoreCommitted | TransferCompleted

_FIELDS: Final[dict[type[BlockEvent | TransferEvent], tuple[str, ...]]] = {
    BlockStored: (
        "medium",
        "group",
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "extra_keys",
        "block_size",
    ),
    BlockRemoved: ("medium", "group", "block_hashes"),
    AllBlocksCleared: ("medium",),
    TransferInitiated: ("job_id", "direction", "num_blocks"),
    CacheStoreCommitted: ("job_id", "num_blocks"),
    TransferCompleted: ("job_id", "direction", "ok"),
}

logger = logging.getLogger(__name__)


def event_fields(event: BlockEvent | TransferEvent) -> dict[str, object]:
    """Return the fields of an event's line, without the time; bytes are not converted."""
    kind = type(event)
    return {"event": kind.__name__} | {name: getattr(event, name) for name in _FIELDS[kind]}


class EventFile(Closing):
    """A file to which one writer appends events.

    The writer serves requests, so a file that cannot be written (a full disk, say) raises no error.
    The events file logs the problem once, gives the file up, and counts the events that it loses.
    It cuts off a line that was written in part, if the system allows. If a writer was killed within
    a line, the next event begins on a line of its own.

    Attributes:
        path: the path of the file.
        num_written: number of events in the file.
        num_lost: number of events that could not be written.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, clock: Callable[[], float] = time.time
    ) -> None:
        """Open the file at its end, or create it.

        Args:
            path: a file in a folder that exists.
            clock: returns the finite seconds for `time_s`.

        Raises:
            ConfigError: `path` is no path, or the file cannot be opened, or it is neither a regular
                file nor a character device such as /dev/null.
        """
        if not is_path(path):
            raise ConfigError(f"the path of the events file is {path!r}: pass the name of a file")
        self.path = os.fspath(path)
        self.num_written = 0
        self.num_lost = 0
        self._clock = clock
        try:
            descriptor = open_to_append(self.path)
        except OSError as error:
            raise ConfigError(
                f"the events file {self.path!r} cannot be opened ({error}): name a file in a "
                "folder that exists and can be written"
            ) from error
        self._descriptor: int | None = descriptor
        # Closes the file with the last reference to this object if nobody calls `close`.
        self._finalizer = weakref.finalize(self, _close, descriptor)
        close_in_children(self)
        # A writer that was killed may have left the beginning of a line.
        self._before = b"\n" if _ends_within_a_line(self.path) else b""

    def write(self, events: Sequence[BlockEvent | TransferEvent]) -> None:
        """Append these events, and pass them to the operating system. Once a step is enough.

        Raises:
            ConfigError: the clock returns no finite seconds. The file is unchanged.
        """
        if not events:
            return
        if self._descriptor is None:
            self.num_lost += len(events)
            return
        time_s = read_clock(self._clock)
        lines = [
            json.dumps({"time_s": time_s} | event_fields(event), default=bytes.hex) + "\n"
            for event in events
        ]
        try:
            append_all(self._descriptor, self._before + "".join(lines).encode())
        except OSError as error:
            self.num_lost += len(events)
            self._give_up(error)
        else:
            self._before = b""
            self.num_written += len(events)

    def close(self) -> None:
        """Close the file; a second call does nothing. Later events count as lost."""
        self._descriptor = None
        try:
            self._finalizer()  # a second call does nothing
        except OSError as error:
            logger.warning("kvstow: the events file %r may lack its end: %s", self.path, error)

    def close_in_child(self) -> None:
        """Close the file in a forked child, whose events do not belong in the parent's file."""
        self._descriptor = None
        with suppress(OSError):
            self._finalizer()

    def _give_up(self, error: OSError) -> None:
        logger.warning(
            "kvstow: the events file %r cannot be written after %d events (%s), so later events "
            "are missing. Make room, and restart to get events again",
            self.path,
            self.num_written,
            error,
        )
        self.close()


def open_to_append(path: str | os.PathLike[str]) -> int:
    """Return the descriptor of a file to append to.

    A pipe is an error, because a slow reader would hold up the engine.

    Raises:
        OSError: the file cannot be opened, or is neither a regular file nor a character device.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise OSError(errno.EINVAL, "it is a pipe or a socket") from None
        raise
    try:
        mode = os.fstat(descriptor).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISCHR(mode)):
            raise OSError(errno.EINVAL, "it is a pipe or a block device")
        os.set_blocking(descriptor, True)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _ends_within_a_line(path: str) -> bool:
    if not os.path.isfile(path):
        return False
    try:
        with open(path, "rb") as file:
            file.seek(-1, os.SEEK_END)
            return not file.read().endswith(b"\n")
    except OSError:  # the file is empty, or this process may only write it
        return False


def _close(descriptor: int) -> None:
    os.close(descriptor)


def append_all(descriptor: int, data: bytes) -> None:
    """Write all of the data, or cut the file off where the data began.

    The data stays if another process has written behind its beginning, because its lines would go.

    Raises:
        OSError: not all of it could be written.
    """
    rest = memoryview(data)
    begin: int | None = None
    try:
        while rest:
            rest = rest[os.write(descriptor, rest) :]
            if rest and begin is None:
                begin = _position(descriptor) - (len(data) - len(rest))
    except OSError:
        if begin is not None:
            _cut_off(descriptor, begin, len(data) - len(rest))
        raise


def _position(descriptor: int) -> int:
    """Return where the last write has ended. A device may have no such place."""
    try:
        return os.lseek(descriptor, 0, os.SEEK_CUR)
    except OSError:
        return -1


def _cut_off(descriptor: int, begin: int, num_bytes: int) -> None:
    """Remove the end of a file if it is `num_bytes` long and this descriptor has written it."""
    with suppress(OSError):
        if _position(descriptor) == os.fstat(descriptor).st_size == begin + num_bytes:
            os.ftruncate(descriptor, begin)
