"""The mover for a CUDA device: it packs small fragments with a kernel, and copies large ones as is.

An engine's cache is layer-major, so a block lies in many small fragments. A copy call for each
fragment would take longer than its bytes. On the packed path a kernel gathers the blocks of a batch
into staging memory, in the order of their host slots. Then one copy carries each run of consecutive
slots. Loads go the other way. If the fragments are large, the direct path copies each as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import accumulate
from typing import Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstow._core import ConfigError, StateError, TransferError
from kvstow.transfer.arena import HostArena
from kvstow.transfer.cuda.interface import Copies, Pack, Stream
from kvstow.transfer.cuda.kernels import chunk_table
from kvstow.transfer.cuda.lane import CudaJob, CudaTicket, Lane, Place
from kvstow.transfer.cuda.link import CudaLink, cuda_link
from kvstow.transfer.cuda.link_speed import Path, link_speed
from kvstow.transfer.cuda.pinning import chunk_slots
from kvstow.transfer.cuda.ring import SUM_BYTES, IdRing
from kvstow.transfer.layout import BlockLayout, Region, joined
from kvstow.transfer.mover import Direction, Event, Index, Mover
from kvstow.transfer.order import JobOrder
from kvstow.transfer.ticket import Ticket, find_damage

# (address on the host, offset in the staging place, blocks)
_Run: TypeAlias = tuple[int, int, int]

_NO_SUMS: Final = np.zeros(0, dtype=np.uint64)
# Bytes that the kernels move at once. They move unaligned memory byte by byte.
_ACCESS_BYTES = 16
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
        if link is None:
            link = cuda_link(layout.device, arena.slot_stride_bytes)
        if link.runtime.device != layout.device:
            raise ConfigError(
                f"the layout is of CUDA device {layout.device}, but the link of CUDA device "
                f"{link.runtime.device}; build a link for each device"
            )
        self._link, self._runtime, self._verify = link, link.runtime, verify
        self._regions = joined(layout.regions)
        self._offsets = [0, *accumulate(region.block_bytes for region in self._regions)][:-1]
        self.paths = _paths(self._regions, link, "packed" if verify else path)
        self._staging_stride = _staging_stride(layout, arena)
        self._chunk_slots = chunk_slots(arena.slot_stride_bytes, arena.slots_per_run)
        self._batch_blocks = link.staging_bytes // self._staging_stride
        self._sums, self._is_summed = arena.device_sums if verify else (_NO_SUMS, _NO_SUMS)
        self._is_open = True
        with ExitStack() as built:
            self._build(built)
            self._built = built.pop_all()

    def _build(self, built: ExitStack) -> None:
        """Allocate what the kernels read; `close` frees it once no job is in flight."""
        runtime, table = self._runtime, chunk_table(self._regions, self._offsets)
        built.enter_context(self._link.attach(self._staging_stride))
        self._num_chunks = len(table)
        self._chunks = runtime.allocate(table.nbytes)
        built.callback(runtime.free, self._chunks)
        runtime.upload(self._chunks, table.tobytes())
        # No job is larger than its destination's pool, because it names each destination once.
        self._store_ring = IdRing(runtime, self.arena.num_slots, checksums=self._verify)
        built.callback(self._store_ring.close)
        self._load_ring = IdRing(runtime, self.layout.num_blocks, checksums=self._verify)
        built.callback(self._load_ring.close)
        self._store_order: JobOrder[CudaJob] = JobOrder(self.arena.num_slots)
        self._load_order: JobOrder[CudaJob] = JobOrder(self.layout.num_blocks)

    def close(self) -> None:
        """End every job and free the device's memory; see `Mover.close`."""
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
        packed, check = (
            (self._gather, self._keep_sums) if is_store else (self._scatter, self._compare_sums)
        )
        if self._verify and is_store:
            self._is_summed[slots] = 0  # from now on the slots hold something else
        job = CudaJob(
            targets=slots if is_store else ids,
            after=after,
            owner=self,
            block_ids=ids,
            host_slots=slots,
            order=self._store_order if is_store else self._load_order,
            ring=self._store_ring if is_store else self._load_ring,
            enqueue=packed if is_packed else self._copy_directly,
            check=check if self._verify else None,
            is_staged=is_store and is_packed,
            ticket=ticket,
        )
        lane.submit(job)
        return ticket

    # -- the packed path --------------------------------------------------------------------------

    def _gather(self, job: CudaJob, lane: Lane) -> None:
        """Queue the way from blocks to staging, and from staging to slots."""
        runtime = self._runtime
        lane.wait_for(job.after, lane.pack)
        self._zero_sums(job, lane)
        for begin, end, runs in self._batches(job.host_slots):
            place = lane.next_place()
            runtime.wait(lane.pack, place.drained)
            runtime.launch("gather", self._pack(job, begin, end, place), lane.pack)
            runtime.record(place.filled, lane.pack)
            runtime.wait(lane.link, place.filled)
            runtime.copy(self._copies(runs, place, to_host=True), lane.link)
            runtime.record(place.drained, lane.link)
        self._fetch_sums(job, lane.link)

    def _scatter(self, job: CudaJob, lane: Lane) -> None:
        """Queue the way from slots to staging, and from staging to blocks.

        Only the second part waits for the compute.
        """
        runtime = self._runtime
        lane.wait_for(job.after, lane.pack)
        self._zero_sums(job, lane)
        for begin, end, runs in self._batches(job.host_slots):
            place = lane.next_place()
            runtime.wait(lane.link, place.drained)
            runtime.copy(self._copies(runs, place, to_host=False), lane.link)
            runtime.record(place.filled, lane.link)
            runtime.wait(lane.pack, place.filled)
            runtime.launch("scatter", self._pack(job, begin, end, place), lane.pack)
            runtime.record(place.drained, lane.pack)
        self._fetch_sums(job, lane.pack)

    def _batches(self, slots: Index) -> Iterator[tuple[int, int, list[_Run]]]:
        """Yield (begin, end, runs) of each batch, the part of a job that fills a staging place."""
        num, size = len(slots), self._batch_blocks
        begins = np.arange(0, num, size)
        is_first = self._begins_run(slots)
        is_first[begins] = True
        firsts = np.flatnonzero(is_first)
        runs = list(
            zip(
                (self.arena.base_address + slots[firsts] * self.arena.slot_stride_bytes).tolist(),
                (firsts % size * self._staging_stride).tolist(),
                np.diff(firsts, append=num).tolist(),
                strict=True,
            )
        )
        cuts = [*np.searchsorted(firsts, begins).tolist(), len(runs)]
        for batch, begin in enumerate(begins.tolist()):
            yield begin, min(begin + size, num), runs[cuts[batch] : cuts[batch + 1]]

    def _begins_run(self, slots: Index) -> npt.NDArray[np.bool_]:
        """Return which slots begin a run: they do not follow the slot before in a pinned chunk."""
        begins = np.ones(len(slots), dtype=np.bool_)
        begins[1:] = (np.diff(slots) != 1) | (slots[1:] % self._chunk_slots == 0)
        return begins

    def _copies(self, runs: Sequence[_Run], place: Place, *, to_host: bool) -> Copies:
        staged, slots = self._staging_stride, self.arena.slot_stride_bytes
        row_bytes = staged if staged == slots else self.layout.slot_bytes
        if to_host:
            ends = [(host, place.address + offset, num) for host, offset, num in runs]
            return Copies(ends, slots, staged, row_bytes, to_host=True)
        ends = [(place.address + offset, host, num) for host, offset, num in runs]
        return Copies(ends, staged, slots, row_bytes, to_host=False)

    def _pack(self, job: CudaJob, begin: int, end: int, place: Place) -> Pack:
        return Pack(
            chunks=self._chunks,
            num_chunks=self._num_chunks,
            block_ids=job.ring.ids_address(job.first + begin),
            num_blocks=end - begin,
            staging=place.address,
            staging_stride_bytes=self._staging_stride,
            checksums=job.ring.sums_address(job.first + begin),
        )

    # -- checksums --------------------------------------------------------------------------------

    def _zero_sums(self, job: CudaJob, lane: Lane) -> None:
        if self._verify:
            num_bytes = SUM_BYTES * len(job.block_ids)
            self._runtime.zero(job.ring.sums_address(job.first), num_bytes, lane.pack)

    def _fetch_sums(self, job: CudaJob, stream: Stream) -> None:
        """Copy the sums to the host, on a stream that runs after the last kernel."""
        if self._verify:
            to = job.ring.host_sums_address(job.first)
            origin = job.ring.sums_address(job.first)
            num_bytes = SUM_BYTES * len(job.block_ids)
            copies = Copies([(to, origin, 1)], num_bytes, num_bytes, num_bytes, to_host=True)
            self._runtime.copy(copies, stream)

    def _keep_sums(self, job: CudaJob) -> None:
        self._sums[job.host_slots] = job.ring.sums(job.first, len(job.host_slots))
        self._is_summed[job.host_slots] = 1

    def _compare_sums(self, job: CudaJob) -> TransferError | None:
        slots = job.host_slots
        found = job.ring.sums(job.first, len(slots))
        return find_damage(slots, found, self._sums[slots], self._is_summed[slots] != 0)

    # -- the direct path --------------------------------------------------------------------------

    def _copy_directly(self, job: CudaJob, lane: Lane) -> None:
        """Queue one copy per region for each run of blocks that is consecutive on both sides."""
        to_host = lane is self._link.stores
        lane.wait_for(job.after, lane.link)
        ids, slots = job.block_ids, job.host_slots
        breaks = self._begins_run(slots)
        breaks[1:] |= np.diff(ids) != 1
        begins = np.flatnonzero(breaks)[np.cumsum(breaks) - 1]
        for region, offset in zip(self._regions, self._offsets, strict=True):
            # No longer than a place, so that the engine's own copies get in between.
            max_rows = max(1, self._link.staging_bytes // region.block_bytes)
            firsts = np.flatnonzero((np.arange(len(ids)) - begins) % max_rows == 0)
            device = region.base_address + ids[firsts] * region.block_stride_bytes
            host = self.arena.base_address + slots[firsts] * self.arena.slot_stride_bytes + offset
            ends = [
                (host.tolist(), self.arena.slot_stride_bytes),
                (device.tolist(), region.block_stride_bytes),
            ]
            (to, to_pitch), (origin, origin_pitch) = ends if to_host else reversed(ends)
            num_rows = np.diff(firsts, append=len(ids)).tolist()
            runs = list(zip(to, origin, num_rows, strict=True))
            copies = Copies(runs, to_pitch, origin_pitch, region.block_bytes, to_host=to_host)
            self._runtime.copy(copies, lane.link)


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
