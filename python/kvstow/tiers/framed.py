"""The header before each block in a shared store, and the key that the store finds it by.

```
schema | namespace | group | width, hash | length | CRC-32 of the block | CRC-32 of all this
```

A block counts only if its header equals, byte for byte, the one that this server would write for
it. So a block of another schema, model, group, key or length is a miss, and so is a torn block.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from dataclasses import dataclass
from typing import Final

from kvstow._core import ConfigError

SCHEMA: Final = b"kvstow\x00\x01"
NAMESPACE_BYTES: Final = 16
KEY_PREFIX: Final = b"kvstow:"
_FIELDS: Final = struct.Struct("<8s16sIB32sQI")
_SUM: Final = struct.Struct("<I")
HEADER_BYTES: Final = _FIELDS.size + _SUM.size


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
        """What the store's keys begin with."""
        return KEY_PREFIX + self.digest.hex().encode() + b":"

    def key(self, group: int, digest: bytes) -> bytes:
        """Return the store's key of a block."""
        return self.prefix + b"%d:" % group + digest

    def header(self, group: int, digest: bytes, num_bytes: int, checksum: int) -> bytes:
        """Return the header of a block, whose bytes have this CRC-32."""
        width = len(digest)
        fields = _FIELDS.pack(SCHEMA, self.digest, group, width, digest, num_bytes, checksum)
        return fields + _SUM.pack(zlib.crc32(fields))

    def checksum(self, header: bytes, group: int, digest: bytes, num_bytes: int) -> int | None:
        """Return the CRC-32 that a header names; None unless it is the header of this block."""
        if len(header) != HEADER_BYTES:
            return None
        checksum: int = _SUM.unpack_from(header, _FIELDS.size - _SUM.size)[0]
        return checksum if header == self.header(group, digest, num_bytes, checksum) else None


def salted(digest: bytes, salt: bytes) -> bytes:
    """Return the digest of a namespace of its own for a model, for each salt."""
    return hashlib.sha256(digest + salt).digest()[:NAMESPACE_BYTES]
