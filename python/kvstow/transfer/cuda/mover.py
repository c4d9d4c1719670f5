"""The mover for a CUDA device: it packs small fragments with a kernel, and copies large ones as is.

An engine's cache is layer-major, so a block lies in many small fragments. A copy call for each
fragment would take longer than its bytes. On the packed path a kernel gathers the blocks of a batch
into staging memory, in the order of their host slots. Then one copy carries each run of consecutive
slots. Loads go the other way. If the fragments are large, the direct path copies each as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import accumulate, pairwise
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from kvstow._core import ConfigError, StateError, TransferError
from kvstow.transfer.arena import HostArena
from kvstow.transfer.cuda.batch import Batch, Place
from kvstow.transfer.cuda.interface import Copies, DeviceEvent, Kernel, Pack, Runtime
from kvstow.transfer.cuda.job import CudaJob, CudaTicket
from kvstow.transfer.cuda.kernels import MAX_BLOCKS, MAX_TURNS, chunk_table, ids_for_launch
from kvstow.transfer.cuda.link import CudaLink, cuda_link, links_lock
from kvstow.transfer.cuda.link_speed import Path, link_speed
from kvstow.transfer.cuda.pinning import chunk_slots
from kvstow.transfer.cuda.sums import SUM_BYTES, SumRing
from kvstow.transfer.layout import BlockLayout, Region, joined
from kvstow.transfer.mover import Direction, Event, Index, Mover
from kvstow.transfer.order import JobOrder
from kvstow.transfer.ticket import Ticket, find_damage

_NO_SUMS: Final = np.zeros(0, dtype=np.uint64)
# Bytes that the kernels move at once. They move unaligned memory byte by byte.
_ACCESS_BYTES = 16
# The kernels are this many times as fast as the link: on an H100 447 GB/s of 54.
_KERNEL_PER_LINK = 8
# Up to this share of a slot, to copy the padding too is cheaper than to leave it out.
_MAX_PADDING = 1 / 16


class CudaMover(Mover):
    """Moves blocks between a CUDA device and host memory, ordered by events of the device.

    Pass a `CudaEvent` as `after` if you can: the device then waits for it, and the mover launches
    the job at once. It launches a job with another event after that has happened. No thread polls:
    jobs advance when the caller polls or waits for a ticket, or submits another job.

    Attributes:
        paths: the path of stores and of loads.
    """

    def __init__(
        self,
        layout: BlockLayout,
        arena: HostArena,
        *,
        link: CudaLink | None = None,
        path: Path | Literal["auto"] = "auto",
        verify: bool = False,
    ) -> None:
        """Upload the layout; see `Mover` for the errors.

        Args:
            layout: memory on a CUDA device.
            arena: host memory. Use `pinned_arena`: copies to other memory are slow and block the
                caller.
            link: the link of this device; by default the one that all its movers share.
            path: "auto" chooses by the measured speed of the link, see `LinkSpeed`.
            verify: let the kernels sum up each block at its store and at its load. A load of other
                bytes than were stored fails with `ChecksumMismatch`. Needs the packed path.

        Raises:
            ConfigError: cupy or the device is missing; the layout is not on a CUDA device, or not
                on that of the link; a block is not aligned to 16 bytes, or larger than a staging
                place; or `verify` with the direct path.
            CudaError: the device has no memory left.
        """
        super().__init__(layout, arena)
        if layout.device is None:
            raise ConfigError(
                "the layout is of CPU memory; pass it to HostMover, or build it from tensors on a "
                "CUDA device (BlockLayout.from_tensors)"
            )
        if path not in ("auto", "packed", "direct"):
            raise ConfigError(f"path is {path!r}; choose 'auto', 'packed' or 'direct'")
        if verify and path == "direct":
            raise ConfigError(
                "verify needs the packed path, whose kernels sum up what they move; leave out "
                "path='direct'"
            )
        _check_alignment(layout)
        if link is not None and link.runtime.device != layout.device:
            raise ConfigError(
                f"the layout is of CUDA device {layout.device}, but the link of CUDA device "
                f"{link.runtime.device}; build a link for each device"
            )
        self._verify = verify
        self._regions = joined(layout.regions)
        self._offsets = [0, *accumulate(region.block_bytes for region in self._regions)][:-1]
        self._staging_stride = _staging_stride(layout, arena)
        self._slot_stride = arena.slot_stride_bytes
        # Bytes that a copy carries of each row, unless the whole run is one piece.
        self._row_bytes = layout.slot_bytes
        if self._staging_stride == self._slot_stride:
            self._row_bytes = self._staging_stride
        self._chunk_slots = chunk_slots(arena.slot_stride_bytes, arena.slots_per_run)
        self._sums, self._is_summed = arena.device_sums if verify else (_NO_SUMS, _NO_SUMS)
        self._is_open = True
        with ExitStack() as built:
            with links_lock:
                if link is None:
                    link = cuda_link(layout.device, arena.slot_stride_bytes)
                built.enter_context(link.attach(self._staging_stride))
            self._link = link
            self._runtime: Runtime = link.runtime
            self.paths = _paths(self._regions, link, "packed" if verify else path)
            self._build(built)
            self._built = built.pop_all()

    def _build(self, built: ExitStack) -> None:
        """Allocate what the kernels read; `close` frees it once no job is in flight."""
        runtime, table = self._runtime, chunk_table(self._regions, self._offsets)
        self._num_chunks = len(table)
        self._batch_blocks = min(
            self._link.staging_bytes // self._staging_stride,
            MAX_BLOCKS,
            MAX_TURNS // self._num_chunks,
        )
        self._chunks = runtime.allocate(table.nbytes)
        built.callback(runtime.free, self._chunks)
        runtime.upload(self._chunks, table.tobytes())
        # No job is larger than its destination's pool, because it names each destination once.
        num_targets = self.arena.num_slots, self.layout.num_blocks
        self._store_order, self._load_order = (JobOrder[CudaJob](num) for num in num_targets)
        self._slot_writers, self._block_writers = (
            np.zeros(num, dtype=np.int64) for num in num_targets
        )
        self._store_sums = self._load_sums = None
        if self._verify:
            self._store_sums, self._load_sums = (
                self._sum_ring(built, capacity) for capacity in num_targets
            )

    def _sum_ring(self, built: ExitStack, capacity: int) -> SumRing:
        ring = SumRing(self._runtime, capacity)
        built.callback(ring.close)
        return ring

    def close(self) -> None:
        """End every job and free the device's memory; see `Mover.close`.

        If CUDA refuses each question about the copies for 10 s, the device counts as lost. Then
        every job fails, and the memory stays allocated.
        """
        self._is_open = False
        # First, so that an interrupt leaves the memory allocated while jobs are in flight.
        self._link.finish(self)
        self._built.close()

    def _check_open(self) -> None:
        if not self._is_open:
            raise StateError("this CudaMover is closed; build a new one")
        if self._runtime.lost is not None:
            raise self._runtime.lost

    # -- jobs -----------------------------------------------------------------------------------

    def _submit(
        self, direction: Direction, block_ids: Index, host_slots: Index, after: Event
    ) -> Ticket:
        is_store = direction == "store"
        is_packed = self.paths[direction] == "packed"
        lane = self._link.stores if is_store else self._link.loads
        ticket = CudaTicket(lane)
        if len(block_ids) == 0:
            ticket.end(None)
            return ticket
        order = np.argsort(host_slots, kind="stable")  # by slot, so that runs of slots are long
        ids, slots = block_ids[order], host_slots[order]
        if is_packed:
            batches, queue = (
                self._packed(slots, is_store=is_store),
                self._store if is_store else self._load,
            )
        else:
            batches, queue = self._direct(ids, slots), self._copy_directly
        # Zeros behind the ids, because a launch always takes `MAX_BLOCKS`.
        padded = np.zeros(len(ids) + MAX_BLOCKS, dtype=np.int32)
        padded[: len(ids)] = ids
        job = CudaJob(
            targets=slots if is_store else ids,
            after=after,
            owner=self,
            block_ids=padded,
            host_slots=slots,
            order=self._store_order if is_store else self._load_order,
            writers=self._slot_writers if is_store else self._block_writers,
            sums=self._store_sums if is_store else self._load_sums,
            batches=batches,
            num_places=len(batches) if is_packed else 1,
            queue=queue,
            check=(self._keep_sums if is_store else self._compare_sums) if self._verify else None,
            is_staged=is_store and is_packed,
            ticket=ticket,
        )
        if self._verify and is_store:
            self._is_summed[slots] = 0  # from now on the slots hold something else
        return lane.submit(job)

    # -- the packed path --------------------------------------------------------------------------

    def _packed(self, slots: Index, *, is_store: bool) -> list[Batch]:
        """Return the batches of a job, each of which fits a staging place."""
        num = len(slots)
        cuts = _cuts(num, self._batch_blocks, is_store=is_store)
        begins = self._begins_run(slots)
        begins[cuts[:-1]] = True
        positions = np.flatnonzero(begins)
        hosts = (self.arena.base_address + slots[positions] * self._slot_stride).tolist()
        firsts = positions.tolist()
        lasts = [*firsts[1:], num]
        stride, batches, run = self._staging_stride, [], 0
        for begin, end in pairwise(cuts):
            runs = []
            while run < len(firsts) and firsts[run] < end:
                offset = (firsts[run] - begin) * stride
                runs.append((hosts[run], offset, lasts[run] - firsts[run]))
                run += 1
            batches.append(Batch(begin, end, (end - begin) * stride, runs))
        return batches

    def _begins_run(self, slots: Index) -> npt.NDArray[np.bool_]:
        """Return which slots begin a run: they do not follow the slot before in a pinned chunk."""
        begins = np.ones(len(slots), dtype=np.bool_)
        begins[1:] = (slots[1:] != slots[:-1] + 1) | (slots[1:] % self._chunk_slots == 0)
        return begins

    def _store(
        self,
        job: CudaJob,
        batch: Batch,
        place: Place,
        after: DeviceEvent | None,
        released: DeviceEvent | None,
    ) -> None:
        """Queue the way from blocks to staging, and from staging to slots."""
        runtime, address = self._runtime, place.address
        if after is not None:
            runtime.wait(place.stream, after)
        self._launch("gather", job, batch, place)
        if released is not None:
            runtime.record(released, place.stream)
        runs = [(host, address + offset, num) for host, offset, num in batch.runs]
        copies = Copies(runs, self._slot_stride, self._staging_stride, self._row_bytes, True)
        runtime.copy(copies, place.stream)

    def _load(
        self,
        job: CudaJob,
        batch: Batch,
        place: Place,
        after: DeviceEvent | None,
        released: DeviceEvent | None,
    ) -> None:
        """Queue the way from slots to staging, and from staging to blocks.

        Only the second part waits for the compute.
        """
        runtime, address = self._runtime, place.address
        runs = [(address + offset, host, num) for host, offset, num in batch.runs]
        copies = Copies(runs, self._staging_stride, self._slot_stride, self._row_bytes, False)
        runtime.copy(copies, place.stream)
        if after is not None:
            runtime.wait(place.stream, after)
        self._launch("scatter", job, batch, place)

    def _launch(self, kernel: Kernel, job: CudaJob, batch: Batch, place: Place) -> None:
        """Queue a kernel, and with `verify` what zeroes its sums and what fetches them."""
        begin, num, stream, sums = batch.begin, batch.end - batch.begin, place.stream, 0
        if job.sums is not None:
            sums = job.sums.device_address(job.first_sum + begin)
            self._runtime.zero(sums, SUM_BYTES * num, stream)
        ids = ids_for_launch(job.block_ids[begin:])
        self._runtime.launch(
            kernel,
            Pack(
                self._chunks, self._num_chunks, ids, num, place.address, self._staging_stride, sums
            ),
            stream,
        )
        if job.sums is not None:
            size = SUM_BYTES * num
            to = job.sums.host_address(job.first_sum + begin)
            self._runtime.copy(Copies([(to, sums, 1)], size, size, size, True), stream)

    # -- checksums --------------------------------------------------------------------------------

    def _keep_sums(self, job: CudaJob) -> None:
        self._sums[job.host_slots] = self._sums_of(job)
        self._is_summed[job.host_slots] = 1

    def _compare_sums(self, job: CudaJob) -> TransferError | None:
        slots = job.host_slots
        return find_damage(
            slots, self._sums_of(job), self._sums[slots], self._is_summed[slots] != 0
        )

    def _sums_of(self, job: CudaJob) -> npt.NDArray[np.uint64]:
        assert job.sums is not None
        return job.sums.sums(job.first_sum, len(job.host_slots))

    # -- the direct path --------------------------------------------------------------------------

    def _direct(self, ids: Index, slots: Index) -> list[Batch]:
        """Return a batch per region, with a run for blocks that are consecutive on both sides."""
        breaks = self._begins_run(slots)
        breaks[1:] |= np.diff(ids) != 1
        begins = np.flatnonzero(breaks)[np.cumsum(breaks) - 1]
        batches = []
        for number, (region, offset) in enumerate(zip(self._regions, self._offsets, strict=True)):
            # No longer than a place, so that the engine's own copies get in between.
            max_rows = max(1, self._link.staging_bytes // region.block_bytes)
            firsts = np.flatnonzero((np.arange(len(ids)) - begins) % max_rows == 0)
            device = region.base_address + ids[firsts] * region.block_stride_bytes
            host = self.arena.base_address + slots[firsts] * self._slot_stride + offset
            num_rows = np.diff(firsts, append=len(ids))
            runs = list(zip(host.tolist(), device.tolist(), num_rows.tolist(), strict=True))
            batches.append(Batch(0, len(ids), len(ids) * region.block_bytes, runs, number))
        return batches

    def _copy_directly(
        self,
        job: CudaJob,
        batch: Batch,
        place: Place,
        after: DeviceEvent | None,
        released: DeviceEvent | None,
    ) -> None:
        if after is not None:
            self._runtime.wait(place.stream, after)
        region = self._regions[batch.region]
        device, host, size = region.block_stride_bytes, self._slot_stride, region.block_bytes
        if job.order is self._store_order:
            copies = Copies(batch.runs, host, device, size, True)
        else:
            runs = [(to, origin, num) for origin, to, num in batch.runs]
            copies = Copies(runs, device, host, size, False)
        self._runtime.copy(copies, place.stream)


def _cuts(num: int, size: int, *, is_store: bool) -> list[int]:
    """Return where the batches of `num` blocks begin, and where the last one ends.

    Nothing hides the first kernel of a store, or the last one of a load. So that batch is small: a
    share of a place that takes about as long to copy as a whole place takes to gather.
    """
    small = max(1, size // _KERNEL_PER_LINK)
    first = small if num >= 2 * small else 0
    cuts = sorted({0, *range(first, num, size), num})
    return cuts if is_store else [num - cut for cut in reversed(cuts)]


def _check_alignment(layout: BlockLayout) -> None:
    for position, region in enumerate(layout.regions):
        for name in ("base_address", "block_stride_bytes"):
            if (number := getattr(region, name)) % _ACCESS_BYTES:
                raise ConfigError(
                    f"regions[{position}] has a {name} of {number}, not a multiple of the "
                    f"{_ACCESS_BYTES} bytes that the kernels move at once; allocate the cache so "
                    f"that every block begins at a multiple of {_ACCESS_BYTES} bytes"
                )


def _paths(
    regions: Sequence[Region], link: CudaLink, path: Path | Literal["auto"]
) -> dict[Direction, Path]:
    if path != "auto":
        return {"store": path, "load": path}
    speed = link_speed(link.runtime)
    fragment_bytes = min(region.block_bytes for region in regions)
    return {
        "store": speed.path("store", fragment_bytes),
        "load": speed.path("load", fragment_bytes),
    }


def _staging_stride(layout: BlockLayout, arena: HostArena) -> int:
    """Return the bytes from one block to the next in staging memory.

    It is that of the host slots, so that a run of slots is one copy. But slots may be much larger
    than blocks, where groups of several block sizes share an arena: then blocks lie close together.
    """
    padding = arena.slot_stride_bytes - layout.slot_bytes
    if padding <= _MAX_PADDING * layout.slot_bytes:
        return arena.slot_stride_bytes
    return -(-layout.slot_bytes // _ACCESS_BYTES) * _ACCESS_BYTES
