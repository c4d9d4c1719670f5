"""A transfer in a lane, and the ticket that its caller gets."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from kvstow._core import TransferError
from kvstow.transfer.cuda.batch import Batch, Place
from kvstow.transfer.cuda.interface import CudaError, DeviceEvent
from kvstow.transfer.cuda.sums import SumRing
from kvstow.transfer.mover import Index
from kvstow.transfer.order import JobOrder, OrderedJob
from kvstow.transfer.ticket import Ticket, checked_timeout_s, late

FIRST_SLEEP_S: Final = 20e-6
LONGEST_SLEEP_S: Final = 1e-3
# Made before any interrupt, because a second interrupt could prevent a call. Nobody has the tickets
# that it ends, so they may share it.
CANCELLED: Final = TransferError("the call that submits the transfer was interrupted")


@dataclass(slots=True, eq=False)
class CudaJob(OrderedJob):
    """A transfer in a lane.

    Attributes:
        owner: the mover that it came through.
        block_ids: int32, at least shape [n], in the order in which they are moved. A launch takes
            more than it needs, so zeros may follow.
        host_slots: shape [n], int64, one for each.
        order: the order of the owner's jobs of this direction.
        writers: for each target of the owner, the serial of the last job launched that writes it.
        sums: memory for its checksums; None without.
        batches: its parts, until all are queued.
        num_places: most places that it uses.
        queue: puts a batch on the stream of a place. The stream waits for the first event, if there
            is one, before the batch touches the blocks. It records the second after that.
        check: called when all bytes have arrived; returns what is wrong with them.
        is_staged: whether its source is read before the copies of the link end.
        ticket: reports its end.
        first_sum: where its sums begin.
        serial: its number among the jobs of the lane; 0 before its launch.
        has_begun: whether its event has not failed, and `earlier` is complete.
        is_paced: whether it keeps to the lane's pace.
        earlier: the places, and their events, after which it may write to its targets.
        num_queued: batches that are queued.
        is_queued: whether all are queued, or none will follow after an error.
        places: those it uses.
        released: an event of each place; all sources are read when all are reached.
        done: an event of each place; the device has carried out the job when all are reached.
        error: why it failed before its bytes arrived. No more of it is queued then.
    """

    owner: object
    block_ids: npt.NDArray[np.int32]
    host_slots: Index
    order: JobOrder[CudaJob]
    writers: npt.NDArray[np.int64]
    sums: SumRing | None
    batches: Sequence[Batch]
    num_places: int
    queue: Callable[[CudaJob, Batch, Place, DeviceEvent | None, DeviceEvent | None], None]
    check: Callable[[CudaJob], TransferError | None] | None
    is_staged: bool
    ticket: CudaTicket
    first_sum: int = 0
    serial: int = 0
    has_begun: bool = False
    is_paced: bool = False
    earlier: list[tuple[Place, DeviceEvent]] = field(default_factory=list)
    num_queued: int = 0
    is_queued: bool = False
    places: list[Place] = field(default_factory=list)
    released: list[DeviceEvent] = field(default_factory=list)
    done: list[DeviceEvent] = field(default_factory=list)
    error: TransferError | None = None


class _Lane(Protocol):
    """The lane of a ticket's job; see `Lane`."""

    refusal: CudaError | None

    def advance(self) -> None:
        """End the jobs that the device has carried out, and launch those that may begin."""


class CudaTicket(Ticket):
    """A ticket that ends when the device has reached the events of its job.

    Attributes:
        has_ended: whether `end` has reported the end.
        is_released: whether the device reads the source no more, while the job is in flight.
    """

    def __init__(self, lane: _Lane) -> None:
        """Begin under way."""
        self._lane = lane
        self.has_ended = False
        self._error: TransferError | None = None
        self.is_released = False

    def poll(self) -> bool:
        """Return whether the transfer has ended, well or not."""
        if not self.has_ended:
            self._lane.advance()
        return self.has_ended

    def source_released(self) -> bool:
        """Return whether the transfer reads its source no more; see `Ticket.source_released`.

        A store reads its blocks no more once the kernel has gathered them.
        """
        return self.poll() or self.is_released

    @property
    def error(self) -> TransferError | None:
        """Why the transfer failed; None while it is under way and after success."""
        return self._error if self.has_ended else None

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until the transfer has ended; see `Ticket.wait`."""
        until_s = None if timeout_s is None else time.monotonic() + checked_timeout_s(timeout_s)
        sleep_s = FIRST_SLEEP_S
        while not self.poll():
            left_s = sleep_s if until_s is None else until_s - time.monotonic()
            if left_s <= 0:
                raise late(timeout_s) from self._lane.refusal
            time.sleep(min(sleep_s, left_s))
            sleep_s = min(2 * sleep_s, LONGEST_SLEEP_S)
        if self._error is not None:
            raise self._error

    def end(self, error: TransferError | None) -> None:
        """Report the end, once."""
        self._error = error
        self.has_ended = True
