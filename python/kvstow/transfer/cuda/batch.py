"""A part of a job, and the staging memory that holds it for a while."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvstow.transfer.cuda.interface import Stream


@dataclass(slots=True, eq=False)
class Place:
    """A part of the staging memory that holds one batch at a time.

    Attributes:
        address: where it begins on the device.
        stream: the stream of all work on it.
    """

    address: int
    stream: Stream


class Batch(NamedTuple):
    """A part of a job that one place takes at a time.

    Attributes:
        begin: its first position in the job.
        end: the position after its last.
        num_bytes: bytes that its copies carry.
        runs: (address on the host, offset in the place or address on the device, blocks).
        region: the region it belongs to, on the direct path.
    """

    begin: int
    end: int
    num_bytes: int
    runs: Sequence[tuple[int, int, int]]
    region: int = 0
