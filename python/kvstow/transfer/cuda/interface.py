"""What the CUDA mover needs of a device: memory, streams, events, copies and two kernels.

The mover uses a device through this interface only. So a test can put a simulated GPU in its place,
which carries out the queued work in any order that CUDA allows. `kvstow.transfer.cuda.runtime` has
the real device.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstow._core import TransferError

# Only the runtime that made one looks into it.
Stream: TypeAlias = Any
DeviceEvent: TypeAlias = Any
Kernel: TypeAlias = Literal["gather", "scatter"]


class CudaError(TransferError):
    """CUDA refused a call, or a copy failed.

    Attributes:
        is_fatal: whether the process has lost the device. Then every later call fails, and the
            process must restart.
    """

    def __init__(self, message: str, *, is_fatal: bool) -> None:
        """Take the message, and whether the device is lost."""
        super().__init__(message)
        self.is_fatal = is_fatal


@dataclass(frozen=True, slots=True)
class MappedMemory:
    """Pinned host memory that kernels read without a copy.

    Attributes:
        host: shape [num_bytes], uint8.
        device_address: its address for kernels.
    """

    host: npt.NDArray[np.uint8]
    device_address: int


class Pack(NamedTuple):
    """The arguments of one gather or scatter; see `pack.cu`.

    Attributes:
        chunks: device address of a table of `CHUNK_DTYPE`.
        num_chunks: entries of the table.
        block_ids: an `IDS_DTYPE`, which the call copies: its first `num_blocks` ids are used.
        num_blocks: blocks to move, at most `MAX_BLOCKS`.
        staging: device address of the first block's place.
        staging_stride_bytes: bytes from one block's place to the next.
        checksums: device address of `num_blocks` uint64, to which the kernel adds; 0 for none.
    """

    chunks: int
    num_chunks: int
    block_ids: np.void
    num_blocks: int
    staging: int
    staging_stride_bytes: int
    checksums: int


class Copies(NamedTuple):
    """Copies between device and host, each of equal rows.

    Attributes:
        runs: (to, origin, num_rows), with the addresses of the first rows.
        to_pitch_bytes: bytes from row to row at the destination.
        origin_pitch_bytes: bytes from row to row at the source.
        row_bytes: bytes of a row.
        to_host: whether the destination is the host.
    """

    runs: Sequence[tuple[int, int, int]]
    to_pitch_bytes: int
    origin_pitch_bytes: int
    row_bytes: int
    to_host: bool


class Runtime(Protocol):
    """One device; every call may raise `CudaError`.

    `record`, `wait`, `is_done`, `zero`, `copy` and `launch` need the device to be current: the
    caller makes it so once for many calls, with `current`.

    Attributes:
        device: number of the device.
        identity: name of this very device with this driver.
        pci_bus_id: its name in /sys/bus/pci/devices.
        lost: the error that lost the context; None while it works.
    """

    device: int
    identity: str
    pci_bus_id: str
    lost: CudaError | None

    def current(self) -> AbstractContextManager[object]:
        """Return a context in which the device is current in this thread."""

    def stream(self) -> Stream:
        """Return a new stream, which does not wait for the legacy stream."""

    def event(self) -> DeviceEvent:
        """Return a new event, which counts as reached until it is recorded."""

    def record(self, event: DeviceEvent, stream: Stream) -> None:
        """Let the event stand for all work that is on the stream now."""

    def wait(self, stream: Stream, event: DeviceEvent) -> None:
        """Let later work on the stream wait for what the event stands for now."""

    def is_done(self, event: DeviceEvent) -> bool:
        """Return whether the work that the event stands for is done."""

    def synchronize(self, event: DeviceEvent) -> None:
        """Block until the work that the event stands for is done."""

    def allocate(self, num_bytes: int) -> int:
        """Allocate device memory, and return its address."""

    def free(self, address: int) -> None:
        """Free device memory. Does nothing after the loss of the device, which freed it."""

    def allocate_mapped(self, num_bytes: int) -> MappedMemory:
        """Allocate pinned host memory that kernels can read."""

    def free_mapped(self, memory: MappedMemory) -> None:
        """Free mapped memory; see `free`."""

    def upload(self, address: int, data: bytes) -> None:
        """Write device memory, and return when it is written."""

    def zero(self, address: int, num_bytes: int, stream: Stream) -> None:
        """Queue work that zeroes device memory."""

    def copy(self, copies: Copies, stream: Stream) -> None:
        """Queue copies in their order. They do not touch what lies between rows."""

    def launch(self, kernel: Kernel, pack: Pack, stream: Stream) -> None:
        """Queue a kernel: "gather" copies blocks to staging, "scatter" copies staging to blocks."""

    def register(self, address: int, num_bytes: int) -> None:
        """Pin host memory."""

    def unregister(self, address: int) -> None:
        """Unpin host memory; see `free`."""
