"""The mover for memory that the CPU can reach: vectorised copies on one thread per direction.

What decides its speed is how often a worker must ask for the interpreter lock back: beside a main
thread that computes in Python each time costs up to the switch interval, 5 ms, as long as 50 MB
take to copy. So all regions of a job are copied by the same few numpy calls, each over many rows,
none of which holds the lock: the index arrays are made by the submitting thread, and the worker
only copies.

A brief copy holds the lock whichever thread makes it, so a worker would hold up the submitting
thread just as long, and waking it takes longer than the copy. Where such a job need wait for
nothing, the submitting thread makes the copy itself, and its ticket has ended when it gets it.

One call can reach every region because rows are addressed by base + stride + index, as a device
kernel would: memory is viewed as one array of overlapping rows, `unit` bytes apart, where `unit`
divides every stride and every distance between regions.

```
address     base                base + unit * k
rows        |-row_bytes-|           |-row_bytes-|
                |-row_bytes-|  ...      the rows in between are never named
```
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from kvstow._core import ConfigError, StateError
from kvstow.transfer.arena import HostArena
from kvstow.transfer.host.queue import HostQueue, start_queues, stop_queues
from kvstow.transfer.layout import BlockLayout, Region
from kvstow.transfer.mover import Event, Index, Mover
from kvstow.transfer.ticket import Ticket

# A gather passes through a temporary of this size. Larger ones ask for the lock less often; above
# about 24 MiB glibc maps and unmaps it anew each time, and its page faults cost more than the copy.
CHUNK_BYTES = 16 << 20
# Up to this a copy is so short (some 50 us) that giving the lock away costs more than holding it,
# and a job so short that waking a worker for it costs more than carrying it out.
_BRIEF_BYTES = 256 << 10
# So many blocks of a brief job are copied one by one, at about a microsecond each: after a step of
# compute the caches hold none of the code that plans for many, which then takes 100 us and more.
_FEW_BLOCKS = 16
# numpy lets go of the lock in a flat indexed copy only above 500 items. Shorter rows than this are
# always more than 500 items when they are more than `_BRIEF_BYTES`, and a flat copy is faster.
_SHORT_ROW_BYTES = 512
# numpy refuses an array whose rows, counted one by one though they overlap, exceed 2**63 bytes.
_MAX_VIEW_BYTES = 2**62

_Memory = npt.NDArray[np.uint8] | npt.NDArray[np.void]


class HostMover(Mover):
    """Moves blocks between two memories of this process, asynchronously unless the job is brief.

    One thread carries out the stores, another the loads; neither holds up the other. A brief job,
    of some 50 us, whose event has happened and that waits for no other job of its direction, is
    over when it is submitted. A ticket reports the release of the
    source and the end together. The layout's addresses must be readable and writable by the CPU:
    nothing can check that here.
    """

    def __init__(self, layout: BlockLayout, arena: HostArena) -> None:
        """Start the threads; see `Mover` for the errors.

        Raises:
            ConfigError: the layout is of memory on a device.
            StateError: the system starts no more threads.
        """
        super().__init__(layout, arena)
        if layout.device is not None:
            raise ConfigError(
                f"the layout lies on CUDA device {layout.device}, which no HostMover reaches; "
                "build a CudaMover, or let mover_for choose"
            )
        host = tuple(
            Region(arena.base_address + offset, arena.slot_stride_bytes, region.block_bytes)
            for offset, region in zip(layout.offsets, layout.regions, strict=True)
        )
        self._sides = [
            (
                _Rows([layout.regions[r] for r in members], layout.num_blocks, layout.owners),
                _Rows([host[r] for r in members], arena.num_slots, arena.slots),
            )
            for members in _clusters((layout.regions, layout.num_blocks), (host, arena.num_slots))
        ]
        self._stores = HostQueue("kvstow-store", arena.num_slots)
        self._loads = HostQueue("kvstow-load", layout.num_blocks)
        queues = self._stores, self._loads
        # Also at interpreter exit: a thread must not copy while memory is taken down around it.
        self._stop = weakref.finalize(self, stop_queues, queues)
        start_queues(queues)

    def close(self) -> None:
        """End every job and join the threads; see `Mover.close`."""
        self._stop()
        # Another thread may have called first: wait for the workers all the same.
        stop_queues((self._stores, self._loads))

    def _check_open(self) -> None:
        if not self._stop.alive:
            raise StateError("this HostMover is closed; build a new one")

    def _submit_store(self, block_ids: Index, host_slots: Index, after: Event) -> Ticket:
        ids, slots, is_brief = self._ordered(block_ids, host_slots)
        copies = [c for device, host in self._sides for c in _plan(host, slots, device, ids)]
        return self._stores.submit(partial(self._run, copies), slots, after, is_brief=is_brief)

    def _submit_load(self, host_slots: Index, block_ids: Index, after: Event) -> Ticket:
        ids, slots, is_brief = self._ordered(block_ids, host_slots)
        copies = [c for device, host in self._sides for c in _plan(device, ids, host, slots)]
        return self._loads.submit(partial(self._run, copies), ids, after, is_brief=is_brief)

    def _run(self, copies: Sequence[_Copy]) -> None:
        for copy in copies:
            copy.run()

    def _ordered(self, block_ids: Index, host_slots: Index) -> tuple[Index, Index, bool]:
        """The pairs, by slot unless they are brief, and whether they are.

        So runs are long, and the arena is walked in one direction.
        """
        if len(block_ids) * self._layout.slot_bytes <= _BRIEF_BYTES:
            return block_ids, host_slots, True
        order = np.argsort(host_slots)
        return block_ids[order], host_slots[order], False


@dataclass(slots=True)
class _Copy:
    """One call: rows `source_rows` of `source`, or all of it, into rows `target_rows`."""

    target: _Memory
    target_rows: Index | int
    source: _Memory
    source_rows: Index | int | None

    def run(self) -> None:
        """Copy. Both halves run without the interpreter lock, unless they are brief."""
        rows = self.source if self.source_rows is None else self.source[self.source_rows]
        self.target[self.target_rows] = rows


class _Rows:
    """Rows of equal size in several regions, all reached through one array.

    Attributes:
        flat: shape [num_units], one item per row; no inner loop, for short rows.
        wide: shape [num_units, row_bytes], uint8; its copies never hold the interpreter lock.
        blocks: shape [num_blocks, num_regions], an item per row; None if not evenly spaced.
        num_regions: rows that make up one block here.
        row_bytes: bytes of one row.
    """

    def __init__(self, regions: Sequence[Region], num_blocks: int, owner: object) -> None:
        """View the memory of regions that are alike in `block_bytes`."""
        base, unit, num_units = _extent(regions, num_blocks)
        self._unit_bytes = unit
        self._starts = np.array([(r.base_address - base) // unit for r in regions], dtype=np.int64)
        self._strides = np.array([r.block_stride_bytes // unit for r in regions], dtype=np.int64)
        self.num_regions = len(regions)
        self.row_bytes = regions[0].block_bytes
        shape, strides = (num_units, self.row_bytes), (unit, 1)
        self.wide: npt.NDArray[np.uint8] = np.asarray(_Address(base, "|u1", shape, strides, owner))
        self.flat: npt.NDArray[np.void] = np.asarray(
            _Address(base, f"|V{self.row_bytes}", shape[:1], strides[:1], owner)
        )
        spacings = np.diff(self._starts)
        self._is_even = bool(
            np.all(spacings == spacings[:1]) and np.all(self._strides == self._strides[0])
        )
        self.blocks = self._blocks(num_blocks)

    def rows(self, positions: Index) -> Index:
        """The rows of these blocks, shape [n, num_regions]."""
        return positions[:, None] * self._strides + self._starts

    def _blocks(self, num_blocks: int) -> npt.NDArray[np.void] | None:
        if not self._is_even:
            return None
        first, stride = int(self._starts[0]), int(self._strides[0])
        return np.lib.stride_tricks.as_strided(
            self.flat[first:],
            shape=(num_blocks, self.num_regions),
            strides=(stride * self._unit_bytes, self._spacing_bytes),
        )

    @property
    def _spacing_bytes(self) -> int:
        """From one region to the next, where they are evenly spaced."""
        is_one = self.num_regions == 1
        return 0 if is_one else int(self._starts[1] - self._starts[0]) * self._unit_bytes

    def stretch(self, first: int, step: int, num_blocks: int) -> npt.NDArray[np.uint8] | None:
        """Blocks first, first + step, ... as a view of shape [num_blocks, num_regions, row_bytes].

        None where the regions are not evenly spaced, so that no single view covers them.
        """
        if not self._is_even:
            return None
        unit, stride = self._unit_bytes, int(self._strides[0])
        return np.lib.stride_tricks.as_strided(
            self.wide[first * stride + int(self._starts[0]) :],
            shape=(num_blocks, self.num_regions, self.row_bytes),
            strides=(step * stride * unit, self._spacing_bytes, 1),
            writeable=False,
        )


class _Address:
    """Raw memory that numpy can wrap; the array keeps this alive, and this its owner."""

    def __init__(
        self,
        address: int,
        typestr: str,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        owner: object,
    ) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "typestr": typestr,
            "shape": shape,
            "strides": strides,
        }


def _extent(regions: Sequence[Region], num_blocks: int) -> tuple[int, int, int]:
    """(base, unit, num_units): every block of every region begins at base + unit * k, k < num."""
    base = min(region.base_address for region in regions)
    unit = math.gcd(
        *(r.block_stride_bytes for r in regions), *(r.base_address - base for r in regions)
    )
    last = max(r.base_address + (num_blocks - 1) * r.block_stride_bytes for r in regions)
    return base, unit, (last - base) // unit + 1


def _clusters(*sides: tuple[Sequence[Region], int]) -> list[list[int]]:
    """Group the regions that one array can reach on each side, (regions, num_blocks).

    They are alike in `block_bytes`; and because numpy counts overlapping rows one by one, they must
    not be too far apart for how they are aligned. A region alone always fits.
    """
    clusters: list[list[int]] = []
    regions = sides[0][0]
    sizes = [region.block_bytes for region in regions]
    for row_bytes in dict.fromkeys(sizes):
        cluster: list[int] = []
        for position in (r for r, size in enumerate(sizes) if size == row_bytes):
            grown = [*cluster, position]
            num_units = max(_extent([side[r] for r in grown], n)[2] for side, n in sides)
            if not cluster or num_units * row_bytes > _MAX_VIEW_BYTES:
                cluster = []
                clusters.append(cluster)
            cluster.append(position)
    return clusters


def _plan(
    target: _Rows, target_positions: Index, source: _Rows, source_positions: Index
) -> Iterator[_Copy]:
    """The calls that copy block `source_positions[i]` to `target_positions[i]`, for every i.

    Few blocks of few bytes are one call each. Long stretches of evenly spaced source blocks are
    read where they lie: one call each. All other blocks are gathered into a temporary and scattered
    from there, chunk by chunk.
    """
    block_bytes = source.row_bytes * source.num_regions
    num_bytes = len(source_positions) * block_bytes
    if (
        len(source_positions) <= _FEW_BLOCKS
        and num_bytes <= _BRIEF_BYTES
        and target.blocks is not None
        and source.blocks is not None
    ):
        for to, of in zip(target_positions.tolist(), source_positions.tolist(), strict=True):
            yield _Copy(target.blocks, to, source.blocks, of)
        return
    # numpy copies a source that might overlap the target, going by first and last byte only: where
    # one memory lies between the regions of the other, that would be a temporary of any size.
    if num_bytes >= CHUNK_BYTES and not np.may_share_memory(target.wide, source.wide):
        rest = np.ones(len(source_positions), dtype=np.bool_)
        for first, last in _stretches(source_positions, max(2, -(-CHUNK_BYTES // block_bytes))):
            step = int(source_positions[first + 1] - source_positions[first])
            blocks = source.stretch(int(source_positions[first]), step, last - first)
            if blocks is not None:
                rows = target.rows(target_positions[first:last])
                yield _Copy(target.wide, rows, blocks, None)
                rest[first:last] = False
        target_positions, source_positions = target_positions[rest], source_positions[rest]
    target_rows = target.rows(target_positions).reshape(-1)
    source_rows = source.rows(source_positions).reshape(-1)
    is_brief = target_rows.size * source.row_bytes <= _BRIEF_BYTES
    is_flat = is_brief or source.row_bytes < _SHORT_ROW_BYTES
    into: _Memory = target.flat if is_flat else target.wide
    out_of: _Memory = source.flat if is_flat else source.wide
    num_rows = max(1, CHUNK_BYTES // source.row_bytes)
    for begin in range(0, target_rows.size, num_rows):
        chunk = slice(begin, begin + num_rows)
        yield _Copy(into, target_rows[chunk], out_of, source_rows[chunk])


def _stretches(positions: Index, min_length: int) -> Iterator[tuple[int, int]]:
    """Where `positions` rises or falls evenly, as (begin, end); neighbours may share an end."""
    steps = np.diff(positions)
    begins = np.flatnonzero(np.append(True, steps[1:] != steps[:-1]))
    ends = np.append(begins[1:], steps.size) + 1
    for i in np.flatnonzero(ends - begins >= min_length):
        yield int(begins[i]), int(ends[i])
