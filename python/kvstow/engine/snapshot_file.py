"""The file that an engine sleeps in, and that a new process starts from.

```
0          magic, version, length of the header, checksum of version, length and header
20         header, in JSON: whose KV it is, where the parts lie, their checksums
4 KiB * n  ledger, scheduler, engine: the accounting; per rank, which slots are used, and their
           checksums
4 KiB * m  the slots of the first rank, as its arena holds them; then those of the others
```

Numbers are little endian, checksums are CRC-32. Unused slots are holes. The writer writes under
another name in the same folder, syncs the file, and then renames it. A writer that is killed at any
moment leaves the old file or the new one. No code in a file is executed or unpickled.
"""

from __future__ import annotations

import errno
import json
import operator
import os
import stat
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstow._core import SnapshotError
from kvstow.closing import Closing
from kvstow.engine.replacing import replacing, sync_folder
from kvstow.threads import map_on_threads
from kvstow.transfer import HostArena
from kvstow.transfer.arena import SLOT_ALIGNMENT_BYTES, slot_stride_bytes
from kvstow.transfer.verified import have_device_sums

VERSION: Final = 1
_MAGIC: Final = b"KVSTOW\r\n"
_PREFIX: Final = struct.Struct("<8sIII")
_MAX_HEADER_BYTES = 64 << 20
# Bytes of consecutive slots that are checked and written at a time.
_CHUNK_BYTES = 32 << 20
_NUM_THREADS = 2
_SECTIONS = ("ledger", "scheduler", "engine")
# Errors that numbers and names of a wrong type, or out of bounds, can cause.
_NONSENSE = (
    ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError
)  # fmt: skip

_FIXES: Final = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "raise the quota",
    errno.EFBIG: "raise the limit of file sizes (ulimit -f)",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.EACCES: "give this process the right to write there",
    errno.EPERM: "give this process the right to write there",
    errno.EROFS: "mount the file system for writing",
    errno.ENAMETOOLONG: "use shorter names",
}
_NO_FOLDER: Final = (errno.ENOENT, errno.ENOTDIR)


class Place(Enum):
    """Where an engine sleeps, if not in a file."""

    HOST = "host"
    """In this process: its host memory stays."""


HOST: Final = Place.HOST
To: TypeAlias = Literal[Place.HOST] | str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Model:
    """The model whose KV a snapshot holds. No other model may use it.

    Attributes:
        identity: name of the model and of whatever shapes its KV, which the user chooses.
        weights_version: version of its weights.
    """

    identity: str = ""
    weights_version: str = ""


@dataclass(frozen=True, slots=True)
class Image:
    """The accounting of a sleeping engine, as bytes.

    Attributes:
        model: the model whose KV it is.
        ledger: what `BlockLedger.snapshot` returned.
        scheduler: what `OffloadScheduler.snapshot` returned.
        engine: what the engine itself knows, in JSON.
        num_requests: number of requests.
        num_tokens: tokens granted to them.
        num_blocks: blocks that a lookup finds on the host.
    """

    model: Model
    ledger: bytes
    scheduler: bytes
    engine: bytes
    num_requests: int
    num_tokens: int
    num_blocks: int


def write_snapshot(
    path: str | os.PathLike[str],
    image: Image,
    arenas: Sequence[HostArena],
    used_slots: npt.NDArray[np.integer],
    block_bytes: Sequence[Sequence[int]] = (),
) -> None:
    """Write a snapshot file. It replaces a file of this name once it is complete.

    Args:
        path: the name.
        image: the accounting.
        arenas: the host memory, one arena per rank.
        used_slots: slots of the arenas that hold anything, ascending. If an arena knows the
            checksum of a slot, the file gets that one, so that damage since then is found.
        block_bytes: bytes of a block, per rank and group. With them, damage is found too where
            kernels have summed up a block.

    Raises:
        SnapshotError: the path names a folder, a device, a pipe or a socket. Or the file cannot be
            written, and the old file keeps the name. Or the file is written, but its folder cannot
            be synced.
    """
    path = Path(path)
    try:
        _check_replaceable(path)
        with replacing(path) as file:
            _write(file, image, arenas, used_slots, block_bytes or [[]] * len(arenas))
    except OSError as error:
        fix = _FIXES.get(error.errno or 0, "check the disk")
        if error.errno in _NO_FOLDER and not os.path.isdir(path.parent):
            fix = f"create the folder {path.parent}"
        raise SnapshotError(
            f"{path} cannot be written: {error.strerror or error}. A file that had this name is "
            f"unchanged; {fix}, or pass another path"
        ) from error
    try:
        sync_folder(path.parent)
    except OSError as error:
        raise SnapshotError(
            f"{path} is written, but its folder cannot be synced ({error.strerror or error}): a "
            "loss of power may bring back the file that had this name; pass another path"
        ) from error


def _check_replaceable(path: Path) -> None:
    """Refuse what is neither missing, nor a regular file or a symbolic link."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(mode):
        raise SnapshotError(
            f"{path} is a folder; pass the path of a file in it, such as {path}/engine.kvstow"
        )
    if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
        raise SnapshotError(
            f"{path} is a device, a pipe or a socket, which a file must not replace; pass the path "
            "of a file"
        )


def _write(
    file: int,
    image: Image,
    arenas: Sequence[HostArena],
    used_slots: npt.NDArray[np.integer],
    block_bytes: Sequence[Sequence[int]],
) -> None:
    sections = {name: getattr(image, name) for name in _SECTIONS}
    # Their length is known, their content comes last.
    sections |= {f"slots-{rank}": bytes(8 * len(used_slots)) for rank in range(len(arenas))}
    num_bytes = len(_header(image, sections, arenas, len(used_slots)))
    base = _aligned(_PREFIX.size + num_bytes)
    for rank, arena in enumerate(arenas):
        offset = base + _places(sections, arenas)[f"arena-{rank}"]
        crcs = _write_slots(file, offset, arena, used_slots)
        # After the checksums, so that damage in between shows. One of these is of no bytes.
        crcs[_are_damaged(arena, used_slots, block_bytes[rank])] ^= 1
        slots = used_slots.astype("<u4").tobytes() + crcs.astype("<u4").tobytes()
        sections[f"slots-{rank}"] = slots
    os.ftruncate(file, base + _places(sections, arenas)["end"])
    for name, data in sections.items():
        _write_at(file, data, base + _places(sections, arenas)[name])
    header = _header(image, sections, arenas, len(used_slots))
    assert len(header) == num_bytes, "checksums are as long as their placeholders"
    sealed = struct.pack("<II", VERSION, num_bytes)
    prefix = _PREFIX.pack(_MAGIC, VERSION, num_bytes, zlib.crc32(header, zlib.crc32(sealed)))
    _write_at(file, prefix + header, 0)


def _header(
    image: Image, sections: dict[str, bytes], arenas: Sequence[HostArena], num_used: int
) -> bytes:
    places = _places(sections, arenas)
    return json.dumps(
        {
            "identity": image.model.identity,
            "weights_version": image.model.weights_version,
            "num_requests": image.num_requests,
            "num_tokens": image.num_tokens,
            "num_blocks": image.num_blocks,
            "num_bytes": places["end"],
            "sections": {
                name: [places[name], len(data), f"{zlib.crc32(data):08x}"]
                for name, data in sections.items()
            },
            "arenas": [
                {
                    "offset": places[f"arena-{rank}"],
                    "num_slots": arena.num_slots,
                    "num_used": num_used,
                    "slot_bytes": arena.slot_bytes,
                    "slots_per_run": arena.slots_per_run,
                }
                for rank, arena in enumerate(arenas)
            ],
        }
    ).encode()


def _places(sections: dict[str, bytes], arenas: Sequence[HostArena]) -> dict[str, int]:
    """Return where each part begins, and the end, from the first 4 KiB after the header on."""
    places, end = {}, 0
    for name, data in sections.items():
        places[name] = end
        end += len(data)
    for rank, arena in enumerate(arenas):
        places[f"arena-{rank}"] = end = _aligned(end)
        end += arena.num_bytes
    places["end"] = end
    return places


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES


def _write_slots(
    file: int, offset: int, arena: HostArena, slots: npt.NDArray[np.integer]
) -> npt.NDArray[np.uint32]:
    """Write slots to their places, from `offset` on, and return their checksums."""
    stride, known = arena.slot_stride_bytes, arena.checksums
    per_chunk = max(1, _CHUNK_BYTES // stride)
    breaks = np.flatnonzero(np.diff(slots) != 1) + 1
    runs = [run for run in np.split(slots, breaks) if len(run)]
    chunks = [run[at : at + per_chunk] for run in runs for at in range(0, len(run), per_chunk)]

    def write(chunk: npt.NDArray[np.integer]) -> npt.NDArray[np.integer]:
        begin, end = int(chunk[0]) * stride, (int(chunk[-1]) + 1) * stride
        _write_at(file, arena.memory[begin:end].data, offset + begin)
        # The system begins to write it to the disk, and does not cache it.
        os.posix_fadvise(file, offset + begin, end - begin, os.POSIX_FADV_DONTNEED)
        crcs: npt.NDArray[np.int64] = known[chunk]
        crcs[crcs < 0] = arena.compute_checksums(chunk[crcs < 0])
        return crcs

    # Neither checksums nor system calls hold the interpreter lock.
    parts = map_on_threads(write, chunks, _NUM_THREADS, "kvstow-snapshot")
    return np.concatenate([np.empty(0, np.uint32), *parts], dtype=np.uint32, casting="unsafe")


def _are_damaged(
    arena: HostArena, slots: npt.NDArray[np.integer], block_bytes: Sequence[int]
) -> npt.NDArray[np.bool_]:
    """Return which slots differ from the sum that kernels have recorded, whatever their group."""
    damaged: npt.NDArray[np.bool_] = np.full(len(slots), any(block_bytes))
    for num_bytes in set(block_bytes):
        at = np.flatnonzero(damaged)
        damaged[at] = ~have_device_sums(arena, slots[at].astype(np.int64), [num_bytes] * len(at))
    return damaged


def _write_at(file: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written


@dataclass(frozen=True, slots=True)
class _Arena:
    """The slots of one rank in a file."""

    offset: int
    num_slots: int
    slot_bytes: int
    slots_per_run: int
    used: npt.NDArray[np.int64]
    crcs: npt.NDArray[np.int64]


def _open(path: str, flags: int) -> int:
    """Open a file. The opening of a pipe does not wait for a writer."""
    return os.open(path, flags | os.O_NONBLOCK)


class SnapshotFile(Closing):
    """A snapshot file, checked except for its slots, which are compared when they are read.

    Use it as a context manager, or call `close`. Arenas that were mapped stay.

    Attributes:
        path: the file.
        image: the accounting.
        version: version of the format.
        num_bytes: bytes of the file, holes included.
        num_used_slots: slots that hold anything, of all ranks.
        slot_bytes: bytes of a slot, per rank.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Read and check everything but the slots.

        Raises:
            SnapshotError: no such file, not a kvstow snapshot, a file that was cut off or damaged,
                or one of a version that this kvstow does not read.
        """
        self.path = Path(path)
        try:
            # A file object closes itself if an interrupt prevents that `close` is called.
            self._file = open(self.path, "rb", buffering=0, opener=_open)  # noqa: SIM115
        except OSError as error:
            raise SnapshotError(f"{self.path} cannot be read: {error.strerror}") from error
        with ExitStack() as opened:
            opened.callback(self.close)
            try:
                self._read()
            except OSError as error:
                raise SnapshotError(f"{self.path} cannot be read: {error.strerror}") from error
            except _NONSENSE as error:
                raise self._damaged(f"its header makes no sense ({error!r})") from error
            opened.pop_all()
        self.num_used_slots = sum(len(arena.used) for arena in self._arenas)
        self.slot_bytes = [arena.slot_bytes for arena in self._arenas]

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def map_arenas(self) -> Iterator[HostArena]:
        """Yield each rank's slots as host memory, copy-on-write, with checksums of the used ones.

        Nothing is read yet, so the used slots are `unproven`.
        """
        for part in self._arenas:
            arena = HostArena(
                part.num_slots,
                part.slot_bytes,
                slots_per_run=part.slots_per_run,
                file=(self._file.fileno(), part.offset),
            )
            arena.checksums[part.used] = part.crcs
            arena.unproven = arena.checksums >= 0
            yield arena

    def damaged_slots(self) -> list[tuple[int, int]]:
        """Read all slots, and return (rank, slot) of each that differs from its checksum."""
        wrong = []
        for rank, arena in enumerate(self.map_arenas()):
            with arena:
                used = np.flatnonzero(arena.checksums >= 0)
                damaged = used[arena.compute_checksums(used) != arena.checksums[used]]
                wrong += [(rank, slot) for slot in damaged.tolist()]
        return wrong

    def _damaged(self, what: str) -> SnapshotError:
        return SnapshotError(f"{self.path} is damaged: {what}. Start without it, or from a copy")

    def _read(self) -> None:
        file = self._file.fileno()
        size = os.fstat(file).st_size
        prefix = os.pread(file, _PREFIX.size, 0)
        if len(prefix) < _PREFIX.size or not prefix.startswith(_MAGIC):
            raise SnapshotError(
                f"{self.path} is not a kvstow snapshot (kvstow tier info shows files of a tier)"
            )
        _, self.version, header_bytes, crc = _PREFIX.unpack(prefix)
        if self.version != VERSION:
            raise SnapshotError(
                f"{self.path} has version {self.version}, this kvstow reads version {VERSION}: "
                "read it with the kvstow that wrote it"
            )
        header = os.pread(file, min(header_bytes, _MAX_HEADER_BYTES), _PREFIX.size)
        sealed = zlib.crc32(struct.pack("<II", self.version, header_bytes))
        if len(header) != header_bytes or zlib.crc32(header, sealed) != crc:
            raise self._damaged("its header does not match its checksum")
        fields = json.loads(header)
        json.dumps(fields, allow_nan=False)  # else nobody could write them as JSON again
        base = _aligned(_PREFIX.size + header_bytes)
        self.num_bytes = base + fields["num_bytes"]
        if size != self.num_bytes:
            raise self._damaged(f"it has {size} bytes, {self.num_bytes} were written")
        sections = {
            name: self._section(name, base + place, num_bytes, int(crc, 16))
            for name, (place, num_bytes, crc) in fields["sections"].items()
        }
        self.image = Image(
            Model(fields["identity"], fields["weights_version"]),
            sections["ledger"],
            sections["scheduler"],
            sections["engine"],
            num_requests=fields["num_requests"],
            num_tokens=fields["num_tokens"],
            num_blocks=fields["num_blocks"],
        )
        self._arenas = [
            self._arena(base, one, sections[f"slots-{rank}"])
            for rank, one in enumerate(fields["arenas"])
        ]
        if not self._arenas:
            raise self._damaged("it has slots of no rank")

    def _section(self, name: str, place: int, num_bytes: int, crc: int) -> bytes:
        if not 0 <= place <= place + num_bytes <= self.num_bytes:
            raise self._damaged(f"its part {name!r} lies outside the file")
        data = os.pread(self._file.fileno(), num_bytes, place)
        if len(data) != num_bytes or zlib.crc32(data) != crc:
            raise self._damaged(f"its part {name!r} does not match its checksum")
        return data

    def _arena(self, base: int, fields: dict[str, int], slots: bytes) -> _Arena:
        used, crcs = np.frombuffer(slots, dtype="<u4").astype(np.int64).reshape(2, -1)
        names = ("offset", "num_slots", "slot_bytes", "slots_per_run")
        place, num_slots, slot_bytes, per_run = [operator.index(fields[name]) for name in names]
        if min(num_slots, slot_bytes, per_run) < 1 or num_slots % per_run:
            raise self._damaged("it has no slots, or a size below 1")
        end = base + place + num_slots * slot_stride_bytes(slot_bytes, per_run)
        if place < 0 or end > self.num_bytes or (base + place) % SLOT_ALIGNMENT_BYTES:
            raise self._damaged("its slots lie outside the file")
        if np.any(np.diff(used) < 1) or np.any(used >= num_slots):
            raise self._damaged("it names a slot twice, or a slot that does not exist")
        return _Arena(base + place, num_slots, slot_bytes, per_run, used, crcs)
