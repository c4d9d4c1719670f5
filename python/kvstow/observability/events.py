"""Block and transfer events as JSON lines: what an event looks like outside this process.

A line is one event. `event` is its class, `time_s` when it was written, on the clock of whoever
keeps the file; the other fields are the event's own, under their own names:

    BlockStored          medium, group, block_hashes, parent_block_hash, token_ids, extra_keys,
                         block_size
    BlockRemoved         medium, group, block_hashes
    AllBlocksCleared     medium
    TransferInitiated    job_id, direction, num_blocks
    CacheStoreCommitted  job_id, num_blocks
    TransferCompleted    job_id, direction, ok

`medium` is "GPU" (the device) or "CPU" (the host), `direction` "store" or "load". A hash is
hexadecimal, as is whatever else is bytes; what is not known is null. Every TransferInitiated has
one TransferCompleted with its `job_id`, and a store that can be found one CacheStoreCommitted
before that.
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
from typing import Any, Final, TypeAlias

from kvstow._core import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheStoreCommitted,
    ConfigError,
    TransferCompleted,
    TransferInitiated,
)
from kvstow.closing import Closing
from kvstow.transfer.fork import close_in_children

__all__ = ["BlockEvent", "EventFile", "TransferEvent", "event_fields"]

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

_LOG = logging.getLogger(__name__)


def event_fields(event: BlockEvent | TransferEvent) -> dict[str, object]:
    """An event as its line has it, but without the time, and bytes are still bytes."""
    kind = type(event)
    return {"event": kind.__name__} | {name: getattr(event, name) for name in _FIELDS[kind]}


class EventFile(Closing):
    """A file that events are appended to, for one writer.

    Its owner serves requests, so a file that can no longer be written (a full disk, say) is no
    error: it is logged once, the file is given up, and what is lost is counted. What is in it ends
    with a whole line, as far as the system lets it be cut there.

    Attributes:
        path: as it was given.
        num_written: events in the file.
        num_lost: events that were to be written after it was given up.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, clock: Callable[[], float] = time.time
    ) -> None:
        """Open the file, at its end, or make it.

        Args:
            path: in a folder that exists.
            clock: seconds, for `time_s`.

        Raises:
            ConfigError: it cannot be opened, or is neither a regular file nor a character device
                such as /dev/null.
        """
        self.path = os.fspath(path)
        self.num_written = 0
        self.num_lost = 0
        self._clock = clock
        try:
            descriptor = _open(self.path)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the events file {self.path!r} cannot be opened ({error}); name a file in a "
                "folder that exists and can be written"
            ) from error
        self._descriptor: int | None = descriptor
        # Closed with the last name of this object, should nobody call `close`.
        self._finalizer = weakref.finalize(self, _close, descriptor)
        close_in_children(self)

    def write(self, events: Sequence[BlockEvent | TransferEvent]) -> None:
        """Append these, and hand them to the system: once a step is often enough."""
        if not events:
            return
        if self._descriptor is None:
            self.num_lost += len(events)
            return
        time_s = self._clock()
        lines = [
            json.dumps({"time_s": time_s} | event_fields(event), default=_hex) + "\n"
            for event in events
        ]
        try:
            _append(self._descriptor, "".join(lines).encode())
        except OSError as error:
            self.num_lost += len(events)
            self._give_up(error)
        else:
            self.num_written += len(events)

    def close(self) -> None:
        """Close the file; again does nothing. What is written from now on is lost, and counted."""
        self._descriptor = None
        try:
            self._finalizer()  # does nothing the second time
        except OSError as error:
            _LOG.warning("the events file %r may lack its end: %s", self.path, error)

    def close_in_child(self) -> None:
        """Close it in a forked child: its events are not those of the parent's engine."""
        self._descriptor = None
        with suppress(OSError):
            self._finalizer()

    def _give_up(self, error: OSError) -> None:
        _LOG.warning(
            "the events file %r cannot be written and is given up after %d events: %s; make room "
            "and restart to have it again",
            self.path,
            self.num_written,
            error,
        )
        self.close()


def _open(path: str | os.PathLike[str]) -> int:
    """Open a file to append to, without waiting for whoever may read it.

    A pipe is refused: a reader that is slow, or gone, would hold up the engine.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
    descriptor = os.open(path, flags, 0o666)
    try:
        mode = os.fstat(descriptor).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISCHR(mode)):
            raise OSError(errno.EINVAL, "it is a pipe or a block device")
        os.set_blocking(descriptor, True)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _close(descriptor: int) -> None:
    os.close(descriptor)


def _append(descriptor: int, data: bytes) -> None:
    """Write all of it, or cut the file where it began."""
    begin, rest = os.fstat(descriptor).st_size, memoryview(data)
    try:
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    except OSError:
        if len(rest) < len(data):
            with suppress(OSError):
                os.ftruncate(descriptor, begin)
        raise


def _hex(value: Any) -> str:
    # What JSON has no form for. Nothing else than bytes is in an event.
    return bytes(value).hex()
