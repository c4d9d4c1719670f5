"""Opening of a slot file: what is refused, what is kept, and what is emptied.

```
no file                         create both, all or nothing
both, header and sizes fit      warm: keep what the frames prove; grow or shrink to max_bytes
both, but a reset drew          empty, whatever its fingerprint: its blocks may be of weights
  the generation                that are gone
both, but another fingerprint,  refuse, or with on_mismatch="reset" empty
  slot size or version, or a
  damaged header
anything that kvstow did not    refuse
  make
```

To empty a file, a new generation is drawn and synced. The first bytes that reach the disk are the
header's, so a file that was not made whole is known as one of kvstow's.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from kvstow._core import ConfigError, StateError
from kvstow.tiers.files import Files, close_last, open_next
from kvstow.tiers.frame import FRAME, FRAME_BYTES, Context, Fingerprint, Frames
from kvstow.tiers.slot_index import (
    HEADER_BYTES,
    Header,
    SlotFileMismatch,
    is_slot_file,
    new_generation,
    read_frames,
    read_header,
    write_header,
)

INDEX_SUFFIX: Final = ".index"
_ORPHANS: Final = (
    "A killed vLLM server may leave processes named VLLM::EngineCore and VLLM::Worker: end them"
)
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK
_NEW = _FLAGS | os.O_CREAT | os.O_EXCL
_IN_MEMORY = {"tmpfs", "ramfs", "hugetlbfs"}
_NETWORK = {
    "afs", "beegfs", "ceph", "cifs", "coda", "gpfs", "lustre", "nfs", "nfs4", "pvfs2", "smb3",
    "smbfs", "wekafs", "fuse.blobfuse2", "fuse.ceph", "fuse.ceph-fuse", "fuse.gcsfuse",
    "fuse.geesefs", "fuse.glusterfs", "fuse.goofys", "fuse.juicefs", "fuse.rclone", "fuse.s3fs",
    "fuse.sshfs",
}  # fmt: skip
_PROBE_BYTES = 4096


@dataclass(slots=True, eq=False)
class Opened:
    """An open slot file.

    Attributes:
        data: descriptor of the data file.
        index: descriptor of the index file, which holds the lock.
        header: the header as it is on the disk.
        context: what all new frames have in common.
        frames: the frames of all slots, zeros where a slot holds nothing.
        not_direct: why reads and writes go through the page cache; None if they do not.
        num_dropped: frames that were not kept because they were damaged or foreign.
    """

    data: int
    index: int
    header: Header
    context: Context
    frames: Frames
    not_direct: str | None
    num_dropped: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a tier expects of its file.

    Attributes:
        path: the data file.
        max_bytes: bytes of both files together, at most.
        slot_bytes: bytes of a slot.
        fingerprint: whose KV it holds.
        may_reset: whether to empty a file that does not fit.
    """

    path: str
    max_bytes: int
    slot_bytes: int
    fingerprint: Fingerprint
    may_reset: bool

    @property
    def num_slots(self) -> int:
        """Slots that fit."""
        return (self.max_bytes - HEADER_BYTES) // (self.slot_bytes + FRAME_BYTES)

    def new_header(self) -> Header:
        """Return the header of an empty file."""
        fields = self.fingerprint.fields
        return Header(self.slot_bytes, self.num_slots, new_generation(), False, fields)


def index_bytes(num_slots: int) -> int:
    """Return the bytes of an index file."""
    return HEADER_BYTES + num_slots * FRAME_BYTES


def open_slot_file(files: Files, wanted: Wanted, undo: contextlib.ExitStack) -> Opened:
    """Open or create a slot file.

    Args:
        files: the file calls.
        wanted: what to open.
        undo: gets what undoes it, each as soon as there is something to undo.

    Raises:
        ConfigError: the place is unsuitable, too small, or holds something else.
        SlotFileMismatch: it holds blocks of something else, and `may_reset` is False.
        StateError: another process, or another tier of this one, has it open.
    """
    check_place(files, wanted.path, wanted.max_bytes, wanted.slot_bytes)
    try:
        return _Opening(files, wanted, undo).run()
    except OSError as error:
        raise explained(wanted.path, error) from error


def explained(path: str, error: OSError) -> ConfigError:
    """Return the error of a file call that failed while a slot file was opened."""
    fixes = {
        errno.EACCES: "give this process the right to read and write there, or pass another path",
        errno.EPERM: "give this process the right to read and write there, or pass another path",
        errno.EROFS: "mount the file system for writing, or pass another path",
        errno.ENOSPC: "free some space, or lower max_bytes",
        errno.EDQUOT: "raise the quota, or lower max_bytes",
        errno.EFBIG: "lower max_bytes to what the file system and ulimit -f allow",
        errno.ELOOP: "pass the path that the link names",
        errno.ENOENT: "create the folder, or pass another path",
        errno.ENOTDIR: "pass a path in a folder",
        errno.EMFILE: "raise the limit of open files (ulimit -n)",
    }
    fix = fixes.get(error.errno or 0, "check the disk, or pass another path")
    return ConfigError(f"the slot file {path} cannot be opened ({error.strerror or error}); {fix}")


def check_place(files: Files, path: str, max_bytes: int, slot_bytes: int) -> None:
    """Refuse a place that holds something else, or cannot hold a slot file. Writes nothing.

    Raises:
        ConfigError: the place is unsuitable, or too small.
    """
    try:
        _check_place(files, path, max_bytes, slot_bytes)
    except OSError as error:
        raise explained(path, error) from error


def _check_place(files: Files, path: str, max_bytes: int, slot_bytes: int) -> None:
    least = HEADER_BYTES + slot_bytes + FRAME_BYTES
    if max_bytes < least:
        raise ConfigError(
            f"max_bytes is {max_bytes}, but the header and one slot of {slot_bytes} bytes take "
            f"{least}; raise it"
        )
    folder = os.path.dirname(path) or "."
    of_folder = files.stat(os.path.realpath(folder))  # a link to it may belong to another user
    if of_folder is None:
        raise ConfigError(f"the folder {folder} does not exist; create it, or pass another path")
    for name in (path, path + INDEX_SUFFIX):
        found = files.stat(name)
        if found is not None:
            _check_file(name, found, of_folder)
    _check_file_system(files, folder, max_bytes)


def _check_file(name: str, found: os.stat_result, of_folder: os.stat_result) -> None:
    """Refuse what is no regular file, or belongs to somebody else."""
    if not stat.S_ISREG(found.st_mode):
        kinds = {
            stat.S_IFLNK: "a symbolic link",
            stat.S_IFDIR: "a folder",
            stat.S_IFBLK: "a device",
            stat.S_IFCHR: "a device",
        }
        kind = kinds.get(stat.S_IFMT(found.st_mode), "a pipe or a socket")
        raise ConfigError(
            f"{name} is {kind}, but a slot file must be a regular file; pass the path of one, or "
            "of none yet"
        )
    # The owner of a folder can replace its files anyway. Some volumes belong to one user, whoever
    # writes to them.
    if found.st_uid not in {os.geteuid(), of_folder.st_uid}:
        raise ConfigError(
            f"{name} belongs to user {found.st_uid}, who may read and replace the KV in it; give "
            f"it to user {os.geteuid()}, as whom this process runs, or pass another path"
        )


def check_kind(files: Files, folder: str) -> None:
    """Refuse a file system that is memory, or whose bytes lie on other machines.

    Raises:
        ConfigError: the folder is on such a file system.
    """
    kind = files.file_system(folder)
    if kind in _IN_MEMORY:
        raise ConfigError(
            f"{folder} is on {kind}, which is memory and not a disk; pass a path on a disk, or "
            "give the host tier that memory"
        )
    if kind in _NETWORK:
        raise ConfigError(
            f"{folder} is on {kind}, where a lock or a call may hang; pass a path on a local disk"
        )


def _check_file_system(files: Files, folder: str, max_bytes: int) -> None:
    """Refuse a file system that is no local disk, or too small."""
    check_kind(files, folder)
    total, _ = files.space(folder)
    if max_bytes > total:
        raise ConfigError(
            f"max_bytes is {max_bytes:,}, but the file system of {folder} has {total:,} bytes; "
            "lower it"
        )


def make_direct(files: Files, data: int) -> str | None:
    """Let reads and writes of a data file bypass the page cache, or return why they do not."""
    page = np.frombuffer(mmap.mmap(-1, _PROBE_BYTES), np.uint8)
    try:
        files.set_direct(data, True)
        files.read(data, [page], 0)
    except OSError as error:
        files.set_direct(data, False)
        return f"the file system refuses direct I/O ({error.strerror or error})"
    return None


def in_use(files: Files, index: int, path: str, advice: str) -> str:
    """Return the message about a locked file: where it is in use, and the way out."""
    holder = files.holder(index)
    if holder == os.getpid():
        return f"{path} is in use in this process; {advice}"
    where = "here or in another process" if holder is None else f"in process {holder}"
    return f"{path} is in use {where}; {advice}. {_ORPHANS}"


class _Opening:
    """One opening, and what undoes it."""

    def __init__(self, files: Files, wanted: Wanted, undo: contextlib.ExitStack) -> None:
        self._files = files
        self._wanted = wanted
        self._undo = undo
        self._index_path = wanted.path + INDEX_SUFFIX
        self._opened: list[int] = []
        undo.callback(self._close_all)  # the first, so it comes last, because it ends the lock

    def run(self) -> Opened:
        """Open both files, and make them what is wanted."""
        files, wanted = self._files, self._wanted
        had_index = files.stat(self._index_path) is not None
        if not had_index and files.stat(wanted.path) is not None:
            raise self._foreign(f"{self._index_path} does not exist")
        index = self._open_index(is_new=not had_index)
        # Only now, because until the lock another process may have opened and closed the file.
        had_data = files.stat(wanted.path) is not None
        found = self._found(index, has_data=had_data)
        files.protect(index)  # a copy from a backup may be readable for all
        self._check_space()
        empty = wanted.new_header()
        if found is None:
            # From here on the data file is known as kvstow's, even if this process is killed.
            write_header(files, index, replace(empty, num_slots=0))
        elif found.num_slots > wanted.num_slots:
            write_header(files, index, replace(found, num_slots=wanted.num_slots))
        data = self._open(wanted.path, _FLAGS) if had_data else self._create_data()
        files.protect(data)
        # First, because the data may grow: both files together never exceed max_bytes.
        self._cut(index, self._index_path, index_bytes(wanted.num_slots))
        data_bytes = self._resize(data, wanted.path, wanted.num_slots * wanted.slot_bytes)
        self._resize(index, self._index_path, index_bytes(wanted.num_slots))
        header = replace(found or empty, num_slots=wanted.num_slots)
        if header != found:
            write_header(files, index, header)
        if not had_data:
            self._sync_folder()
        context = Context(wanted.fingerprint.digest, header.generation, header.slot_bytes)
        frames, num_dropped = np.zeros(header.num_slots, FRAME), 0
        if found is not None:
            num_data_slots = data_bytes // header.slot_bytes  # fewer if the data was cut off
            frames, num_dropped = read_frames(
                files, index, header.num_slots, num_data_slots, context
            )
        not_direct = make_direct(files, data)
        return Opened(data, index, header, context, frames, not_direct, num_dropped)

    def _open_index(self, *, is_new: bool) -> int:
        """Open the index file, and lock it."""
        index = self._open(self._index_path, _NEW if is_new else _FLAGS)
        try:
            self._files.lock(index)
        except BlockingIOError as error:
            advice = "close the other one, or give each process and each rank a path of its own"
            raise StateError(in_use(self._files, index, self._wanted.path, advice)) from error
        if not self._files.is_at(index, self._index_path):
            raise StateError(
                f"{self._index_path} was removed or replaced while it was opened; open it again"
            )
        if is_new:
            # Only now, because another process may have opened and locked the new index first. An
            # empty index that an interrupt leaves alone is opened as a new one.
            self._on_failure(self._files.remove, self._index_path)
        return index

    def _found(self, index: int, *, has_data: bool) -> Header | None:
        """Return the header of a file that is warm, or None for one that is to be emptied."""
        # One byte more than a header, because an index that still lacks its header never has it.
        page = np.zeros(HEADER_BYTES + 1, np.uint8)
        num_bytes = self._files.read(index, [page], 0)
        page = page[:HEADER_BYTES]
        if not page.any() and not has_data and num_bytes <= HEADER_BYTES:
            return None
        if not is_slot_file(page):
            raise self._foreign(f"{self._index_path} does not begin as an index does")
        try:
            header = read_header(self._index_path, page)
            # Whatever the fingerprint of such a file, it has no block that could be wrong.
            if header.num_slots == 0 or header.is_renewed or not has_data:
                return None
            self._check_fit(header)
        except SlotFileMismatch:
            if self._wanted.may_reset:
                return None
            raise
        return header

    def _check_fit(self, header: Header) -> None:
        wanted = self._wanted
        fix = "pass another path, or on_mismatch='reset' to empty it"
        if header.fingerprint != dict(wanted.fingerprint.fields):
            difference = wanted.fingerprint.difference(header.fingerprint)
            raise SlotFileMismatch(
                f"{wanted.path} holds blocks of something else ({difference})", fix
            )
        if header.slot_bytes != wanted.slot_bytes:
            raise SlotFileMismatch(
                f"{wanted.path} has slots of {header.slot_bytes} bytes, not {wanted.slot_bytes}",
                fix,
            )

    def _foreign(self, why: str) -> ConfigError:
        return ConfigError(
            f"{self._wanted.path} is not a slot file of kvstow ({why}); pass another path, or "
            "remove the file yourself"
        )

    def _check_space(self) -> None:
        """Refuse what cannot fit, before anything grows."""
        wanted = self._wanted
        folder = os.path.dirname(wanted.path) or "."
        _, free = self._files.space(folder)
        need = wanted.num_slots * wanted.slot_bytes + index_bytes(wanted.num_slots)
        for name in (wanted.path, self._index_path):
            found = self._files.stat(name)
            need -= 0 if found is None else found.st_blocks * 512
        if need > free:
            raise ConfigError(
                f"max_bytes is {wanted.max_bytes:,}, which takes {need:,} more bytes, but the file "
                f"system of {folder} has {free:,} free; lower it, or free some space"
            )

    def _create_data(self) -> int:
        """Create the data file, so that an interrupt at any line does not leave it behind.

        Left without its index, it would be refused as a file of the user.
        """
        may_be_new = True

        def remove() -> None:
            if may_be_new:
                self._files.remove(self._wanted.path)

        self._on_failure(remove)
        try:
            return self._open(self._wanted.path, _NEW)
        except OSError:  # it is not new: another program may have created it just now
            may_be_new = False
            raise

    def _open(self, path: str, flags: int) -> int:
        return open_next(self._files, path, flags, self._opened)

    def _close_all(self) -> None:
        while self._opened:
            with contextlib.suppress(OSError):
                close_last(self._files, self._opened)

    def _resize(self, file: int, path: str, new_bytes: int) -> int:
        """Give a file its size, with the space reserved, and return the old size."""
        old_bytes = self._cut(file, path, new_bytes)
        if old_bytes < new_bytes:
            self._on_failure(self._files.truncate, file, old_bytes)
        if not self._is_reserved(path, new_bytes):
            self._files.allocate(file, new_bytes)
        return old_bytes

    def _is_reserved(self, path: str, num_bytes: int) -> bool:
        """Return whether a file has its size and its space already.

        Where a file system reserves no space, the system reads or writes each page instead, which
        takes as long as the file is large.
        """
        found = self._files.stat(path)
        return found is not None and min(found.st_size, found.st_blocks * 512) >= num_bytes

    def _cut(self, file: int, path: str, new_bytes: int) -> int:
        """Cut off what a file has beyond `new_bytes`, and return the old size."""
        found = self._files.stat(path)
        old_bytes = 0 if found is None else found.st_size
        if old_bytes > new_bytes:
            self._files.truncate(file, new_bytes)
        return old_bytes

    def _sync_folder(self) -> None:
        """Make the names of new files survive a loss of power."""
        self._files.sync(self._open(os.path.dirname(self._wanted.path) or ".", os.O_RDONLY))
        close_last(self._files, self._opened)

    def _on_failure(self, call: Callable[..., object], *arguments: object) -> None:
        def undo() -> None:
            with contextlib.suppress(OSError):
                call(*arguments)

        self._undo.callback(undo)
