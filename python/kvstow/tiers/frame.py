"""The frame of a block in a tier: whose KV it is, which block, and what its bytes must be.

```
0    schema, bytes of the hash, bytes of the parent, group
8    length of the data, slot
16   generation, sequence
32   XXH3 of the data
40   digest of the fingerprint
56   hash, then parent, each padded with zeros to 32 bytes
120  XXH3 of all before
```

Numbers are little endian. A frame that is not exactly what the reader expects is a miss. How a
wrong block could pass, and what prevents it:

- Another block's valid frame and data: the frame has the key and the slot.
- Another model, rank, layout or weights: the fingerprint. Weights that changed in place: the
  generation, which a reset draws anew.
- An old frame over new data, new over old, or data torn by a loss of power: the XXH3 of the data.
- A torn or damaged frame: its own XXH3. Zeros are no frame, because their XXH3 is not zero.
"""

from __future__ import annotations

import hashlib
import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstow._core import ConfigError, row_digests
from kvstow.tiers.ticket import Bools
from kvstow.tiers.tier import MAX_HASH_BYTES, Checked

SCHEMA: Final = 2
FINGERPRINT_BYTES: Final = 16
FRAME: Final = np.dtype(
    [
        ("schema", "<u2"),
        ("hash_bytes", "u1"),
        ("parent_bytes", "u1"),
        ("group", "<u4"),
        ("length", "<u4"),
        ("slot", "<u4"),
        ("generation", "<u8"),
        ("sequence", "<u8"),
        ("checksum", "<u8"),
        ("fingerprint", f"V{FINGERPRINT_BYTES}"),
        ("hash", f"V{MAX_HASH_BYTES}"),
        ("parent", f"V{MAX_HASH_BYTES}"),
        ("digest", "<u8"),
    ]
)
FRAME_BYTES: Final = FRAME.itemsize
MAX_LENGTH: Final = 2**32 - 1
MAX_FINGERPRINT_TEXT_BYTES: Final = 3072

# One record per block. numpy has no type for the columns of a structured array.
Frames: TypeAlias = npt.NDArray[Any]
Words: TypeAlias = npt.NDArray[np.uint64]
Sums: TypeAlias = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """All that shapes the bytes of a block: equal fingerprints mean interchangeable KV.

    Name the model, the version of its weights, dtype, layout, block size, groups, rank and world
    size, and how hashes are made. The names and values are kept as text, so that a mismatch can be
    explained.

    Attributes:
        fields: the names and their values.
    """

    fields: Mapping[str, str | int]

    def __post_init__(self) -> None:
        """Raise `ConfigError` if the fields are no such mapping, or too long for a header."""
        fields: object = self.fields
        if not isinstance(fields, Mapping) or not all(isinstance(name, str) for name in fields):
            raise ConfigError(
                f"fields is {reprlib.repr(fields)}; pass a dict of names and values, such as "
                '{"model": "llama", "block_size": 16}'
            )
        try:
            num_bytes = len(self.text.encode())
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"a value of fields is no str or int ({error}); pass one of these for each name"
            ) from error
        if num_bytes > MAX_FINGERPRINT_TEXT_BYTES:
            raise ConfigError(
                f"the fingerprint has {num_bytes} bytes of text, at most "
                f"{MAX_FINGERPRINT_TEXT_BYTES} are allowed; pass a digest of what is long"
            )

    @property
    def text(self) -> str:
        """The fields as JSON, in one fixed order."""
        return json.dumps(dict(self.fields), sort_keys=True, separators=(",", ":"))

    @property
    def digest(self) -> bytes:
        """The first 16 bytes of the text's SHA-256."""
        return hashlib.sha256(self.text.encode()).digest()[:FINGERPRINT_BYTES]

    def difference(self, other: Mapping[str, object]) -> str:
        """Return which fields differ from those of another, for a message: digests come last."""
        differences = [
            f"{name} {other.get(name)!r} is not {self.fields.get(name)!r}"
            for name in sorted({*self.fields, *other})
            if other.get(name) != self.fields.get(name)
        ]
        return ", ".join(sorted(differences, key=len))


@dataclass(frozen=True, slots=True)
class Context:
    """What all frames of a tier have in common.

    Attributes:
        fingerprint: digest of the fingerprint.
        generation: random number that a reset draws anew.
        length: bytes of a block.
    """

    fingerprint: bytes
    generation: int
    length: int


def expected_frames(blocks: Checked, context: Context) -> Frames:
    """Return the frames that these blocks should have, as far as `match` compares them.

    Args:
        blocks: the blocks of a job.
        context: what all frames have in common.
    """
    frames = np.zeros(len(blocks), FRAME)
    frames["schema"] = SCHEMA
    frames["hash_bytes"] = blocks.width
    frames["group"] = blocks.groups
    frames["length"] = context.length
    frames["slot"] = 0 if blocks.slots is None else blocks.slots
    frames["generation"] = context.generation
    frames["fingerprint"] = np.void(context.fingerprint)
    frames["hash"] = _padded(blocks.hashes, blocks.width)
    return frames


def new_frames(blocks: Checked, context: Context) -> Frames:
    """Return the frames of blocks to write, without checksums and digests."""
    frames = expected_frames(blocks, context)
    frames["sequence"] = blocks.sequence
    if blocks.parents is not None:
        parents, none = blocks.parents, bytes(blocks.width)
        frames["parent_bytes"] = [0 if parent is None else blocks.width for parent in parents]
        frames["parent"] = _padded([parent or none for parent in parents], blocks.width)
    return frames


def words_of(frames: Frames) -> Words:
    """Return a view of contiguous frames as numbers, which numpy moves and compares fast."""
    return frames.view(np.uint64).reshape(len(frames), FRAME_BYTES // 8)


def taken(words: Words, at: npt.NDArray[np.int64]) -> Frames:
    """Return copies of the frames at these positions of `words_of` frames."""
    frames: Frames = words[at].reshape(-1).view(FRAME)
    return frames


def seal(frames: Frames, checksums: Sums) -> None:
    """Write the checksums of the data into frames, and then the digest of each."""
    frames["checksum"] = checksums
    frames["digest"] = _digests(frames)


def are_sound(frames: Frames) -> Bools:
    """Return which frames have this schema and are undamaged."""
    sound: Bools = (frames["schema"] == SCHEMA) & (frames["digest"] == _digests(frames))
    return sound


def place_of(field: str) -> slice:
    """Return which bytes of a frame a field has."""
    kind, begin = FRAME.fields[field]  # type: ignore[index, misc]
    return slice(begin, begin + kind.itemsize)


def are_of(frames: Frames, context: Context) -> Bools:
    """Return which frames have this fingerprint, generation and length."""
    of: Bools = frames["generation"] == context.generation
    of &= frames["length"] == context.length
    words = words_of(frames)
    first = place_of("fingerprint").start // 8
    for word, expected in enumerate(np.frombuffer(context.fingerprint, "<u8"), first):
        of &= words[:, word] == expected
    return of


def _key_mask() -> Words:
    """Return ones where the frames of one block, in one slot, are equal."""
    frame = np.zeros(1, FRAME)
    row = frame.view(np.uint8)
    names = ("schema", "hash_bytes", "group", "length", "slot", "generation", "fingerprint", "hash")
    for name in names:
        row[place_of(name)] = 0xFF
    return words_of(frame)


_KEY_MASK = _key_mask()


def match(frames: Frames, expected: Frames) -> Bools:
    """Return which frames are of the expected block, whatever their sequence, parent and data."""
    differences = (words_of(frames) ^ words_of(expected)) & _KEY_MASK
    fits: Bools = np.bitwise_or.reduce(differences, axis=1) == 0
    return fits


def _digests(frames: Frames) -> Sums:
    rows = frames.view(np.uint8).reshape(len(frames), FRAME_BYTES)
    return row_digests(rows[:, : FRAME_BYTES - 8], np.arange(len(frames)))


def _padded(digests: Sequence[bytes], width: int) -> npt.NDArray[np.void]:
    """Return digests of one width, each padded with zeros, as one array."""
    joined = b"".join(digests)
    if width < MAX_HASH_BYTES:
        rows = np.zeros((len(digests), MAX_HASH_BYTES), np.uint8)
        rows[:, :width] = np.frombuffer(joined, np.uint8).reshape(len(digests), width)
        joined = rows.tobytes()
    return np.frombuffer(joined, f"V{MAX_HASH_BYTES}")
