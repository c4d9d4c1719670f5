"""Forged snapshots: changed fields with a correct checksum."""

from __future__ import annotations

import struct
from typing import Any

import cbor2
import xxhash

PREFIX_BYTES = 16
HEADER_BYTES = 24


def opened(snapshot: bytes) -> Any:
    """Return the fields of a snapshot, by number."""
    return cbor2.loads(snapshot[HEADER_BYTES:])


def sealed(snapshot: bytes, fields: object) -> bytes:
    """Return the snapshot with other fields."""
    body = cbor2.dumps(fields)
    prefix = snapshot[: PREFIX_BYTES - 8] + struct.pack("<Q", len(body))
    seed = xxhash.xxh3_64_intdigest(prefix)
    return prefix + struct.pack("<Q", xxhash.xxh3_64_intdigest(body, seed=seed)) + body
