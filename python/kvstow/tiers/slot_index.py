"""The index file of a slot file: a header, and one frame per slot.

```
0     magic, version, length of the text; the text: sizes, generation, fingerprint, in JSON
4088  XXH3 of all before
4096  frame of slot 0, frame of slot 1, ...
```

A writer writes the data of a slot before its frame, and syncs neither. A frame whose data is not
what it says is a miss. The header is synced, because a lost header would bring back blocks that a
reset has dropped.
"""

from __future__ import annotations

import errno
import json
import operator
import secrets
import struct
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstow._core import ConfigError, row_digests
from kvstow.tiers.files import Files
from kvstow.tiers.frame import (
    FRAME,
    FRAME_BYTES,
    Context,
    Frames,
    are_of,
    are_sound,
    place_of,
)
from kvstow.tiers.ticket import Bools
from kvstow.tiers.tier import MAX_HASH_BYTES
from kvstow.transfer.mover import Index

VERSION: Final = 2
HEADER_BYTES: Final = 4096
_MAGIC: Final = b"KVSLOTS\n"
_PREFIX: Final = struct.Struct("<8sII")
_DIGEST: Final = struct.Struct("<Q")
_FRAMES_PER_PIECE = 4096


class SlotFileMismatch(ConfigError):
    """A slot file is not what this tier expects: another fingerprint, other sizes, or damage.

    `on_mismatch="reset"` empties it.

    Attributes:
        why: what differs, without the fix that the message adds.
    """

    def __init__(self, why: str, fix: str = "") -> None:
        """Join both to a message."""
        super().__init__(f"{why}; {fix}" if fix else why)
        self.why = why


@dataclass(frozen=True, slots=True)
class Header:
    """What a slot file says of itself.

    Attributes:
        slot_bytes: bytes of a slot.
        num_slots: its slots; 0 while the file is being made.
        generation: random number, part of each frame.
        is_renewed: whether a reset drew the generation. Then its blocks are never warm, because
            weights that changed in place may have made them.
        fingerprint: the fields of the fingerprint.
    """

    slot_bytes: int
    num_slots: int
    generation: int
    is_renewed: bool
    fingerprint: Mapping[str, str | int]

    def encode(self) -> npt.NDArray[np.uint8]:
        """Return the header as one page."""
        fields = {
            "slot_bytes": self.slot_bytes,
            "num_slots": self.num_slots,
            "generation": self.generation,
            "is_renewed": self.is_renewed,
            "fingerprint": dict(self.fingerprint),
        }
        text = json.dumps(fields, separators=(",", ":")).encode()
        page = np.zeros(HEADER_BYTES, np.uint8)
        prefix = _PREFIX.pack(_MAGIC, VERSION, len(text))
        page[: _PREFIX.size + len(text)] = np.frombuffer(prefix + text, np.uint8)
        page[-_DIGEST.size :] = np.frombuffer(_DIGEST.pack(_digest(page)), np.uint8)
        return page


def new_generation() -> int:
    """Return a random number that no earlier generation has had."""
    return secrets.randbits(64)


def is_slot_file(page: npt.NDArray[np.uint8]) -> bool:
    """Return whether a page is a header of any version, sound or damaged."""
    return page[: len(_MAGIC)].tobytes() == _MAGIC


def read_header(path: str, page: npt.NDArray[np.uint8]) -> Header:
    """Decode a page that `is_slot_file`.

    Raises:
        SlotFileMismatch: it is damaged, or of a version that this kvstow does not read.
    """
    fix = "open it with on_mismatch='reset', which empties it"
    _, version, length = _PREFIX.unpack_from(page.tobytes())
    # First, because another version may have another checksum.
    if version != VERSION:
        raise SlotFileMismatch(
            f"{path} has version {version}, this kvstow reads version {VERSION}", fix
        )
    stored = _DIGEST.unpack(page[-_DIGEST.size :].tobytes())[0]
    if len(page) != HEADER_BYTES or _digest(page) != stored:
        raise SlotFileMismatch(f"the header of {path} does not have its checksum", fix)
    try:
        fields = json.loads(page[_PREFIX.size : _PREFIX.size + length].tobytes())
        json.dumps(fields, allow_nan=False)  # else nobody could write them as JSON again
        return Header(
            _checked(fields, "slot_bytes", 1),
            _checked(fields, "num_slots", 0),
            _checked(fields, "generation", 0),
            bool(fields["is_renewed"]),
            dict(fields["fingerprint"].items()),
        )
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise SlotFileMismatch(f"the header of {path} makes no sense ({error!r})", fix) from error


def _checked(fields: Mapping[str, int], name: str, at_least: int) -> int:
    value = operator.index(fields[name])
    if not at_least <= value < 1 << 64:
        raise ValueError(f"{name} is {value}")
    return value


def write_header(files: Files, index: int, header: Header) -> None:
    """Write and sync a header."""
    page = header.encode()
    written = files.write(index, [page], 0)
    if written != len(page):
        raise OSError(errno.EIO, f"{written} of {len(page)} bytes of the header were written")
    files.sync(index)


def read_frames(
    files: Files, index: int, num_slots: int, num_data_slots: int, context: Context
) -> tuple[Frames, int]:
    """Return the frames of all slots, and how many of them did not count.

    Those that did not are zeros, like those of unused slots, and what the file lacks.

    Args:
        files: the file calls.
        index: the index file.
        num_slots: slots of the file.
        num_data_slots: slots of which the data file has any bytes.
        context: what frames that count have in common.
    """
    frames = np.empty(num_slots, FRAME)
    num_dropped = 0
    # In pieces that fit in the processor's cache, so that each is fetched from memory once.
    for begin in range(0, num_slots, _FRAMES_PER_PIECE):
        part = frames[begin : begin + _FRAMES_PER_PIECE]
        rest, offset = part.view(np.uint8), HEADER_BYTES + begin * FRAME_BYTES
        while len(rest):
            num_bytes = files.read(index, [rest], offset)
            if num_bytes <= 0:
                rest[:] = 0
                break
            rest, offset = rest[num_bytes:], offset + num_bytes
        used = part["schema"] != 0
        if used.any():
            warm = are_sound(part) & are_of(part, context)
            warm &= part["slot"] == np.arange(begin, begin + len(part), dtype=np.uint32)
            warm &= (part["hash_bytes"] > 0) & (part["hash_bytes"] <= MAX_HASH_BYTES)
            warm &= (part["parent_bytes"] == 0) | (part["parent_bytes"] == part["hash_bytes"])
            warm[max(0, num_data_slots - begin) :] = False
            dropped = np.flatnonzero(used & ~warm)
            part[dropped] = np.zeros(1, FRAME)
            num_dropped += len(dropped)
    return frames, num_dropped


@dataclass(frozen=True, slots=True, eq=False)
class SlotRecords:
    """What a slot file held when it was opened, oldest write first, as columns.

    Attributes:
        slots: shape [n].
        groups: shape [n].
        sequences: shape [n], ascending.
        hashes: shape [n, width].
        parents: shape [n, width], zeros where there is none.
        has_parent: shape [n].
    """

    slots: npt.NDArray[np.int64]
    groups: npt.NDArray[np.uint32]
    sequences: npt.NDArray[np.uint64]
    hashes: npt.NDArray[np.uint8]
    parents: npt.NDArray[np.uint8]
    has_parent: Bools

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self.slots)

    def some(self, at: slice | Index | Bools) -> SlotRecords:
        """Return the records at these places, in their order."""
        return SlotRecords(*(getattr(self, column.name)[at] for column in fields(self)))

    def keys(self, begin: int, end: int) -> tuple[list[bytes], list[bytes | None]]:
        """Return the hashes and the parents of the blocks from `begin` to before `end`."""
        hashes, parents = self.hashes[begin:end], self.parents[begin:end]
        own = [row.tobytes() for row in hashes]
        known = self.has_parent[begin:end].tolist()
        return own, [row.tobytes() if it else None for row, it in zip(parents, known, strict=True)]


def records_of(frames: Frames) -> SlotRecords:
    """Return the records of frames of which unused ones are zeros."""
    slots = np.flatnonzero(frames["schema"])
    slots = slots[np.argsort(frames["sequence"][slots], kind="stable")]
    widths = frames["hash_bytes"][slots]
    # All hashes of a scheduler have one width. It takes the most common, and drops the others.
    width = int(np.bincount(widths).argmax()) if len(slots) else 0
    slots = slots if np.all(widths == width) else slots[widths == width]
    # As plain bytes, because numpy copies structures field by field.
    rows = frames.view(np.uint8).reshape(len(frames), FRAME_BYTES)[slots]
    used = rows.reshape(-1).view(FRAME)
    return SlotRecords(
        slots,
        used["group"].copy(),
        used["sequence"].copy(),
        rows[:, place_of("hash")][:, :width],
        rows[:, place_of("parent")][:, :width],
        used["parent_bytes"] > 0,
    )


def _digest(page: npt.NDArray[np.uint8]) -> int:
    return int(row_digests(page[None, : -_DIGEST.size], [0])[0])
