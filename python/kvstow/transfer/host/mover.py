"""The mover for memory that the CPU can reach: numpy copies on one thread per direction.

The interpreter lock decides the speed. Beside a main thread that computes in Python, each request
for the lock takes up to the switch interval of 5 ms. In that time 50 MB could be copied. So a few
numpy calls copy all regions of a job. Each copies many rows and holds no lock. The submitting
thread makes the index arrays, and the worker only copies.

A brief copy does hold the lock, whichever thread makes it. So a worker would hold up the submitting
thread just as long, and to wake it takes longer than the copy. The submitting thread therefore
carries out a brief job itself if the job need not wait. Its ticket has ended when it is returned.

One call reaches every region because it addresses rows by base + stride + index, as a device kernel
does. numpy sees the memory as one array of overlapping rows, `unit` bytes apart. `unit` divides
every stride and every distance between regions.

```
address     base                base + unit * k
rows        |-row_bytes-|           |-row_bytes-|
                |-row_bytes-|  ...      no index names the rows in between
```
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from kvstow._core import ConfigError
from kvstow.transfer.arena import HostArena
from kvstow.transfer.host.queue import HostQueue, QueuedMover
from kvstow.transfer.layout import BlockLayout, Region
from kvstow.transfer.mover import Direction, Event, Index
from kvstow.transfer.ticket import Ticket

# Bytes of the temporary that a gather passes through. A larger one needs the lock less often. But
# above about 24 MiB glibc maps and unmaps it each time, and the page faults take longer than the
# copy.
CHUNK_BYTES = 16 << 20
# A copy of at most this many bytes takes some 50 us. To release the lock takes longer than to hold
# it for that time, and to wake a worker takes longer than the job.
_BRIEF_BYTES = 256 << 10
# At most this many blocks of a brief job are copied one by one, in about 1 us each. The plan for
# many blocks takes 100 us and more after a step of compute, when the caches hold none of its code.
_FEW_BLOCKS = 16
# Rows shorter than this take flat indexed copies, which are faster. numpy releases the lock in a
# flat copy only above 500 items, and more than `_BRIEF_BYTES` of such rows are always more.
_SHORT_ROW_BYTES = 512
# numpy counts overlapping rows one by one, and refuses an array of more than 2**63 bytes.
_MAX_VIEW_BYTES = 2**62

_Memory = npt.NDArray[np.uint8] | npt.NDArray[np.void]


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
            ConfigError: the layout is of memory on a device.
            StateError: the system starts no more threads.
        """
        super().__init__(layout, arena)
        if layout.device is not None:
            raise ConfigError(
                f"the layout is of memory on CUDA device {layout.device}, which the CPU cannot "
                "reach; build a CudaMover, or call mover_for"
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
        self._start(self._stores, self._loads)

    def _submit(
        self, direction: Direction, block_ids: Index, host_slots: Index, after: Event
    ) -> Ticket:
        is_brief = len(block_ids) * self.layout.slot_bytes <= _BRIEF_BYTES
        if not is_brief:
            # By slot, so that runs are long and the copies walk the arena in one direction.
            order = np.argsort(host_slots)
            block_ids, host_slots = block_ids[order], host_slots[order]
        copies: list[_Copy] = []
        for device, host in self._sides:
            if direction == "store":
                copies += _plan(host, host_slots, device, block_ids)
            else:
                copies += _plan(device, block_ids, host, host_slots)
        queue, targets = (
            (self._stores, host_slots) if direction == "store" else (self._loads, block_ids)
        )
        return queue.submit(partial(self._copy, copies), targets, after, is_brief=is_brief)

    def _copy(self, copies: Sequence[_Copy]) -> None:
        """Make the copies. Each of the two steps of one releases the lock, unless it is brief."""
        for copy in copies:
            rows = copy.source if copy.source_rows is None else copy.source[copy.source_rows]
            copy.target[copy.target_rows] = rows


@dataclass(slots=True)
class _Copy:
    """One copy: `source_rows` of `source`, or all of it, to `target_rows` of `target`."""

    target: _Memory
    target_rows: Index | int
    source: _Memory
    source_rows: Index | int | None


class _Rows:
    """Rows of equal size in several regions, all reached through one array.

    Attributes:
        flat: shape [num_units], one item per row. Its copies have no inner loop: for short rows.
        wide: shape [num_units, row_bytes], uint8. Its copies never hold the interpreter lock.
        blocks: shape [num_blocks, num_regions], an item per row; None if the regions are not evenly
            spaced.
        num_regions: rows of one block.
        row_bytes: bytes of one row.
    """

    def __init__(self, regions: Sequence[Region], num_blocks: int, owner: object) -> None:
        """View the memory of regions with equal `block_bytes`."""
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
        """Return the rows of these blocks, shape [n, num_regions]."""
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
        """Bytes from one region to the next, if they are evenly spaced."""
        has_one = self.num_regions == 1
        return 0 if has_one else int(self._starts[1] - self._starts[0]) * self._unit_bytes

    def stretch(self, first: int, step: int, num_blocks: int) -> npt.NDArray[np.uint8] | None:
        """Return blocks first, first + step, ... as [num_blocks, num_regions, row_bytes].

        Return None if the regions are not evenly spaced, because then no single view covers them.
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
    """Raw memory that numpy can wrap. The array keeps this object alive, and this its owner."""

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
    """Return (base, unit, num_units): each block begins at base + unit * k for a k < num_units."""
    base = min(region.base_address for region in regions)
    unit = math.gcd(
        *(r.block_stride_bytes for r in regions), *(r.base_address - base for r in regions)
    )
    last = max(r.base_address + (num_blocks - 1) * r.block_stride_bytes for r in regions)
    return base, unit, (last - base) // unit + 1


def _clusters(*sides: tuple[Sequence[Region], int]) -> list[list[int]]:
    """Group the regions that one array can reach on each side, (regions, num_blocks).

    Regions of a group have equal `block_bytes`. They must also not be too far apart for their
    alignment, because numpy counts overlapping rows one by one. A single region always fits.
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
    """Yield the copies of block `source_positions[i]` to `target_positions[i]`, for every i.

    - Few blocks of few bytes: one copy per block.
    - A long stretch of evenly spaced source blocks: one copy, which reads them where they lie.
    - All other blocks: chunk by chunk, gathered into a temporary and scattered from there.
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
    # numpy first copies a source that might overlap the target, and looks only at their first and
    # last bytes. If one memory lies between the regions of the other, that copy has any size.
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
    """Yield (begin, end) where `positions` rises or falls evenly; neighbours may share an end."""
    steps = np.diff(positions)
    begins = np.flatnonzero(np.append(True, steps[1:] != steps[:-1]))
    ends = np.append(begins[1:], steps.size) + 1
    for i in np.flatnonzero(ends - begins >= min_length):
        yield int(begins[i]), int(ends[i])
