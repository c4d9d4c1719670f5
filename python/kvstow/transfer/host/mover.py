"""The mover for memory that the CPU can reach: native copies on one thread per direction.

The interpreter lock decides the speed. Beside a main thread that computes in Python, each request
for the lock takes up to the switch interval of 5 ms. In that time 50 MB could be copied. So one
native call makes all copies of a job, and holds no lock. `rust/copy` says how it copies. A job has
one thread, because one that streams already fills the memory's bandwidth: `benches/host_copy.py`.

A brief copy does hold the lock, whichever thread makes it. So a worker would hold up the submitting
thread just as long, and to wake it takes longer than the copy. The submitting thread therefore
carries out a brief job itself if the job need not wait. Its ticket has ended when it is returned.

How a job could leave wrong bytes, and what prevents it:

- The native call refuses an id outside the memory, and memory that both sides share. It checks all
  pairs before it copies the first.
- The copier holds a buffer on each array, so numpy refuses to resize one. Nothing refuses to free
  the storage of a torch tensor, so its owner closes the mover first.
- An interrupt between the copy and the end of its ticket fails the job. A job never ends well
  unless its native call has returned.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt

from kvstow._core import BlockCopier, ConfigError
from kvstow.transfer.arena import HostArena
from kvstow.transfer.host.queue import HostQueue, QueuedMover
from kvstow.transfer.layout import BlockLayout, Region, joined
from kvstow.transfer.mover import Direction, Event, Index
from kvstow.transfer.ticket import Ticket

# A copy of at most this many bytes takes some 50 us. To release the lock takes longer than to hold
# it for that time, and to wake a worker takes longer than the job.
_BRIEF_BYTES = 256 << 10


class HostMover(QueuedMover):
    """Moves blocks between two memories of this process, asynchronously unless the job is brief.

    One thread carries out the stores, another the loads, and neither holds up the other. A brief
    job takes some 50 us. It has ended when it is submitted, if its event has happened and no other
    job of its direction is queued or under way. A ticket reports the release of the source and the
    end together.

    The CPU must be able to read and write the layout's addresses. The mover cannot check that.
    """

    def __init__(self, layout: BlockLayout, arena: HostArena) -> None:
        """Start the threads; see `Mover` for the other errors.

        Raises:
            ConfigError: the layout is of memory on a device, or shares memory with the arena.
            StateError: the system starts no more threads.
        """
        super().__init__(layout, arena)
        if layout.device is not None:
            raise ConfigError(
                f"the layout is of memory on CUDA device {layout.device}, which the CPU cannot "
                "reach; build a CudaMover, or call mover_for"
            )
        self._copier = BlockCopier(
            [
                (_memory(region, layout), region.block_stride_bytes, region.block_bytes)
                for region in joined(layout.regions)
            ],
            layout.num_blocks,
            arena.memory,
            arena.slot_stride_bytes,
            arena.slot_bytes,
            arena.num_slots,
        )
        self._stores = HostQueue("kvstow-store", arena.num_slots)
        self._loads = HostQueue("kvstow-load", layout.num_blocks)
        self._start(self._stores, self._loads)

    def copy_and_sum(self, block_ids: Index, host_slots: Index) -> npt.NDArray[np.uint32]:
        """Copy blocks to slots now, on this thread, and return the CRC-32 of each slot.

        The sum covers all of a slot. No job of this mover may write these slots meanwhile.

        Raises:
            StateError: the mover or its arena is closed.
        """
        self._check_open()
        self.arena.check_open()
        return self._copier.store_with_checksums(block_ids, host_slots)

    def _submit(
        self, direction: Direction, block_ids: Index, host_slots: Index, after: Event
    ) -> Ticket:
        is_brief = len(block_ids) * self.layout.slot_bytes <= _BRIEF_BYTES
        queue, targets = (
            (self._stores, host_slots) if direction == "store" else (self._loads, block_ids)
        )
        work = partial(self._copy, direction, block_ids, host_slots, is_brief)
        return queue.submit(work, targets, after, is_brief=is_brief)

    def _copy(
        self, direction: Direction, block_ids: Index, host_slots: Index, is_brief: bool
    ) -> None:
        if direction == "store":
            self._copier.store(block_ids, host_slots, brief=is_brief)
        else:
            self._copier.load(host_slots, block_ids, brief=is_brief)


def _memory(region: Region, layout: BlockLayout) -> npt.NDArray[np.uint8]:
    """Return the memory of a region, which keeps the layout's owners alive."""
    num_bytes = region.end_address(layout.num_blocks) - region.base_address
    return np.asarray(_Address(region.base_address, num_bytes, layout.owners))


class _Address:
    """Raw memory that numpy can wrap. The array keeps this object alive, and this its owner."""

    def __init__(self, address: int, num_bytes: int, owner: object) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "typestr": "|u1",
            "shape": (num_bytes,),
        }
