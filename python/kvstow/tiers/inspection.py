"""A slot file as it lies on the disk, without a host arena: what it holds, and whether it is sound.

How it could misreport or spoil a file, and what prevents that:

- A server writes meanwhile, so a block looks damaged: everything except `info` takes the lock.
- A reset is undone by a loss of power, and blocks of old weights come back: it draws a new
  generation and syncs the header, as a tier does.
- The page cache hides damage of the disk: reads bypass it where the file system allows that.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from kvstow._core import ConfigError, row_digests
from kvstow.tiers.files import Files
from kvstow.tiers.frame import FRAME_BYTES, Context, Fingerprint, Frames, taken, words_of
from kvstow.tiers.opening import INDEX_SUFFIX, in_use, index_bytes, make_direct
from kvstow.tiers.slot_calls import SlotCalls, Unbounded
from kvstow.tiers.slot_index import (
    HEADER_BYTES,
    Header,
    is_slot_file,
    new_generation,
    read_frames,
    read_header,
    write_header,
)
from kvstow.transfer.mover import Index

_BATCH_BYTES = 4 << 20
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK
_OR_SNAPSHOT = " (kvstow snapshot info shows the file of a sleeping engine)"


@dataclass(frozen=True, slots=True)
class Verified:
    """What the data of a slot file proved to be.

    Attributes:
        num_sound: blocks whose bytes are those that were written.
        bad_slots: slots whose bytes are others, or cannot be read.
        error: the last read that failed; None if none did.
    """

    num_sound: int
    bad_slots: list[int]
    error: OSError | None = None


@dataclass(slots=True, eq=False)
class Inspection:
    """A slot file that is open for an inspection.

    Attributes:
        path: the data file.
        header: its header.
        frames: shape [n], the frames of the slots that hold a block.
        num_dropped: frames that do not count, because they are damaged, foreign, or of an earlier
            generation.
        num_bytes: bytes of both files.
        bytes_on_disk: bytes that the file system has given to both.
        is_cut: whether a file ends before the last slot, or its frame, does.
    """

    path: str
    header: Header
    frames: Frames
    num_dropped: int
    num_bytes: int
    bytes_on_disk: int
    is_cut: bool
    _files: Files = field(repr=False)
    _index: int = field(repr=False)

    @property
    def num_warm(self) -> int:
        """Blocks that a tier of this fingerprint finds when it opens the file."""
        return 0 if self.header.is_renewed else len(self.frames)

    def verify(self) -> Verified:
        """Read every block, and compare it with its checksum.

        Raises:
            OSError: the data file cannot be opened.
        """
        slot_bytes = self.header.slot_bytes
        per_batch = max(1, _BATCH_BYTES // slot_bytes)
        memory = np.frombuffer(mmap.mmap(-1, per_batch * slot_bytes), np.uint8)
        rows = memory.reshape(per_batch, slot_bytes)
        data = self._files.open(self.path, os.O_RDONLY | _FLAGS)
        try:
            make_direct(self._files, data)
            calls = SlotCalls(self._files, data, -1, rows, Unbounded())
            slots: Index = self.frames["slot"].astype(np.int64)
            bad: list[int] = []
            last: OSError | None = None
            for begin in range(0, len(slots), per_batch):
                at = np.arange(begin, min(begin + per_batch, len(slots)))
                host = at - begin
                arrived, error = calls.read_data(
                    slots[at], host, report=lambda _: None, may_go_on=lambda: True
                )
                last = error or last
                sound = row_digests(rows, host) == self.frames["checksum"][at]
                bad += slots[at[~(arrived & sound)]].tolist()
            return Verified(len(slots) - len(bad), bad, last)
        finally:
            self._files.close(data)

    def reset(self) -> None:
        """Drop every block, durably. The file keeps its size and its fingerprint.

        Raises:
            OSError: the new header cannot be written.
        """
        header = replace(self.header, generation=new_generation(), is_renewed=False)
        write_header(self._files, self._index, header)


@contextmanager
def inspected(
    path: str, *, to_lock: bool, to_write: bool = False, files: Files | None = None
) -> Iterator[Inspection]:
    """Open a slot file for an inspection.

    Args:
        path: the data file.
        to_lock: whether to refuse a file that is in use, and to keep others out meanwhile.
        to_write: whether `reset` follows.
        files: the file calls, for tests.

    Raises:
        ConfigError: it is not a slot file, or it is in use.
        SlotFileMismatch: its header is damaged, or of another version.
        OSError: it cannot be read.
    """
    files = files or Files()
    try:
        index = files.open(path + INDEX_SUFFIX, (os.O_RDWR if to_write else os.O_RDONLY) | _FLAGS)
    except FileNotFoundError as error:
        if path.endswith(INDEX_SUFFIX):
            raise ConfigError(
                f"{path} is the index of a slot file: pass {path.removesuffix(INDEX_SUFFIX)}"
            ) from error
        raise ConfigError(
            f"{path} is not a slot file ({path + INDEX_SUFFIX} does not exist); pass the path that "
            f"the tier was opened with{_OR_SNAPSHOT}"
        ) from error
    try:
        if to_lock:
            _lock(files, index, path)
        yield _read(files, index, path)
    finally:
        files.close(index)


def _lock(files: Files, index: int, path: str) -> None:
    try:
        files.lock(index)
    except BlockingIOError as error:
        raise ConfigError(
            in_use(files, index, path, "stop what uses it, because this command needs it alone")
        ) from error


def _read(files: Files, index: int, path: str) -> Inspection:
    page = np.zeros(HEADER_BYTES, np.uint8)
    files.read(index, [page], 0)
    if not is_slot_file(page):
        raise ConfigError(
            f"{path} is not a slot file ({path + INDEX_SUFFIX} does not begin as an index does); "
            f"pass the path that the tier was opened with{_OR_SNAPSHOT}"
        )
    header = read_header(path + INDEX_SUFFIX, page)
    found = [files.stat(name) for name in (path, path + INDEX_SUFFIX)]
    data_size, index_size = (0 if it is None else it.st_size for it in found)
    num_frames = min(header.num_slots, max(0, index_size - HEADER_BYTES) // FRAME_BYTES)
    fingerprint = Fingerprint(header.fingerprint).digest
    frames, num_dropped = read_frames(
        files,
        index,
        num_frames,
        data_size // header.slot_bytes,
        Context(fingerprint, header.generation, header.slot_bytes),
    )
    is_data_cut = data_size < header.num_slots * header.slot_bytes
    is_index_cut = index_size < index_bytes(header.num_slots)
    on_disk = sum(0 if it is None else it.st_blocks * 512 for it in found)
    used = np.flatnonzero(frames["schema"])
    return Inspection(
        path,
        header,
        taken(words_of(frames), used),
        num_dropped,
        data_size + index_size,
        on_disk,
        is_data_cut or is_index_cut,
        files,
        index,
    )
