"""What the CUDA mover asks of a device: memory, streams, events, copies and two kernels.

It is all that the mover sees of one, so that a test can put in its place one that carries out the
queued work in any order that CUDA allows. `kvstow.transfer.cuda.runtime` has the real one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstow._core import TransferError

__all__ = [
    "Copies",
    "CudaError",
    "DeviceEvent",
    "MappedMemory",
    "Pack",
    "Runtime",
    "Stream",
]

# Opaque to all but the runtime that made them.
Stream: TypeAlias = Any
DeviceEvent: TypeAlias = Any


class CudaError(TransferError):
    """CUDA refused a call, or a copy failed.

    Attributes:
        is_fatal: the process has lost the device: every later call fails, it must be restarted.
    """

    def __init__(self, message: str, *, is_fatal: bool) -> None:
        """Say what happened, and whether anything can work after it."""
        super().__init__(message)
        self.is_fatal = is_fatal


@dataclass(frozen=True, slots=True)
class MappedMemory:
    """Pinned host memory that the device reads where it lies.

    Attributes:
        host: shape [num_bytes], uint8.
        device_address: where kernels find it.
    """

    host: npt.NDArray[np.uint8]
    device_address: int


@dataclass(frozen=True, slots=True)
class Pack:
    """The arguments of one gather or scatter; the kernels' source says what they mean.

    Attributes:
        chunks: device address of a table of `CHUNK_DTYPE`.
        num_chunks: entries of it.
        block_ids: device address of `num_blocks` int32.
        num_blocks: blocks to move.
        staging: device address of the first block's place.
        staging_stride_bytes: from a block's place to the next.
        checksums: device address of `num_blocks` uint64 that are added to; 0 for none.
    """

    chunks: int
    num_chunks: int
    block_ids: int
    num_blocks: int
    staging: int
    staging_stride_bytes: int
    checksums: int


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies between device and host, each of equal rows.

    Attributes:
        runs: (to, origin, num_rows), addresses of the first rows.
        to_pitch_bytes: from row to row, where they go.
        origin_pitch_bytes: from row to row, where they are.
        row_bytes: of a row.
        to_host: whether they go to the host.
    """

    runs: Sequence[tuple[int, int, int]]
    to_pitch_bytes: int
    origin_pitch_bytes: int
    row_bytes: int
    to_host: bool


class Runtime(Protocol):
    """One device; every call may raise `CudaError`.

    Attributes:
        device: its number.
        identity: which device this is, and with which driver.
        pci_bus_id: where it is plugged in, as /sys/bus/pci/devices names it.
        lost: what the context was lost to; None while it works.
    """

    device: int
    identity: str
    pci_bus_id: str
    lost: CudaError | None

    def stream(self) -> Stream:
        """A new stream, which does not wait for the legacy one."""

    def event(self) -> DeviceEvent:
        """A new event, which counts as reached until it is recorded."""

    def record(self, event: DeviceEvent, stream: Stream) -> None:
        """Let the event stand for all that is queued on the stream by now."""

    def wait(self, stream: Stream, event: DeviceEvent) -> None:
        """Let what is queued on the stream from now on wait for what the event stands for now."""

    def is_done(self, event: DeviceEvent) -> bool:
        """Whether what the event stands for has happened."""

    def synchronize(self, event: DeviceEvent) -> None:
        """Block until it has."""

    def allocate(self, num_bytes: int) -> int:
        """Device memory."""

    def free(self, address: int) -> None:
        """Give device memory back; of a device that is lost it is gone already."""

    def allocate_mapped(self, num_bytes: int) -> MappedMemory:
        """Pinned host memory that kernels can read."""

    def free_mapped(self, memory: MappedMemory) -> None:
        """Give it back; see `free`."""

    def upload(self, address: int, data: bytes) -> None:
        """Write device memory, and return when that is done."""

    def zero(self, address: int, num_bytes: int, stream: Stream) -> None:
        """Queue the zeroing of device memory."""

    def copy(self, copies: Copies, stream: Stream) -> None:
        """Queue copies, in their order; what lies between the rows of one is not touched."""

    def gather(self, pack: Pack, stream: Stream) -> None:
        """Queue the kernel that copies blocks to staging."""

    def scatter(self, pack: Pack, stream: Stream) -> None:
        """Queue the kernel that copies staging to blocks."""

    def register(self, address: int, num_bytes: int) -> None:
        """Pin host memory."""

    def unregister(self, address: int) -> None:
        """Unpin it; see `free`."""
