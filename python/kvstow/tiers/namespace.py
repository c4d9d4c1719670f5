"""The header before each block in a shared store, and the key that the store finds it by.

```
schema | namespace | group | width, hash | length | XXH3 of the block
```

A block counts only if its header equals, byte for byte, the one that this server would write for
it. So a block of another schema, model, group, key or length is a miss, and so is a torn block. The
header needs no checksum of its own, because the reader knows all of it but the block's.

The key has the schema, too. So servers of two versions share a store without a block of the other.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvstow._core import ConfigError

SCHEMA: Final = 2
NAMESPACE_BYTES: Final = 16
KEY_PREFIX: Final = b"kvstow:"
_FIELDS: Final = struct.Struct("<6sH16sIB32sQQ")
_SUM: Final = struct.Struct("<Q")
HEADER_BYTES: Final = _FIELDS.size


@dataclass(frozen=True, slots=True)
class Namespace:
    """What keeps the blocks of one model apart from all others in a store.

    Attributes:
        digest: 16 bytes, a digest of everything that decides what a block's bytes mean: model,
            weights, layout, dtype, block size, rank and world size, hash algorithm and its start.
    """

    digest: bytes

    def __post_init__(self) -> None:
        """Refuse another size."""
        given: object = self.digest
        if not isinstance(given, bytes) or len(given) != NAMESPACE_BYTES:
            raise ConfigError(
                f"a namespace is {given!r}, expected {NAMESPACE_BYTES} bytes: pass a digest "
                "of the model's identity"
            )

    @property
    def prefix(self) -> bytes:
        """What the store's keys begin with, in every schema."""
        return KEY_PREFIX + self.digest.hex().encode() + b":"

    def key_prefix(self, group: int) -> bytes:
        """Return what the keys of a group's blocks begin with."""
        return self.prefix + b"%d:%d:" % (SCHEMA, group)

    def keys(self, groups: Sequence[int], digests: Sequence[bytes]) -> list[bytes]:
        """Return the store's keys of blocks."""
        prefixes = {group: self.key_prefix(group) for group in set(groups)}
        return [prefixes[group] + digest for group, digest in zip(groups, digests, strict=True)]

    def header(self, group: int, digest: bytes, num_bytes: int, checksum: int) -> bytes:
        """Return the header of a block, whose bytes have this XXH3."""
        width = len(digest)
        return _FIELDS.pack(
            b"kvstow", SCHEMA, self.digest, group, width, digest, num_bytes, checksum
        )

    def checksum(self, header: bytes, group: int, digest: bytes, num_bytes: int) -> int | None:
        """Return the XXH3 that a header names; None unless it is the header of this block."""
        if len(header) != HEADER_BYTES:
            return None
        checksum: int = _SUM.unpack_from(header, HEADER_BYTES - _SUM.size)[0]
        return checksum if header == self.header(group, digest, num_bytes, checksum) else None


def salted(digest: bytes, salt: bytes) -> bytes:
    """Return the digest of a namespace of its own for a model, for each salt."""
    return hashlib.sha256(digest + salt).digest()[:NAMESPACE_BYTES]
