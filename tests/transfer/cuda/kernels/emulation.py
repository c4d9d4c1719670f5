"""`pack.cu` compiled as C++, and memory in which the tests see every access.

The expected bytes come from plain slices, block by block and region by region. Nothing here uses
chunks or warps. Device and staging are two arrays of random bytes. The tests compare all of both,
and count the stores to every byte.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvstow.transfer.cuda.kernels import CHUNK_DTYPE, MAX_BLOCKS, checksum, chunk_table
from kvstow.transfer.layout import Region

SHIM = Path(__file__).with_name("emulated_cuda.cpp")
# `#pragma unroll` is for CUDA's compiler.
WARNINGS = ("-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Werror")
OPTIMISED = ("-O2", *WARNINGS)
SANITISED = ("-O1", "-fsanitize=undefined", "-static-libubsan", *WARNINGS)
# Memory on either side without blocks, where the tests see a stray store.
MARGIN_BYTES = 256
# Behind the ids of a launch: no test has memory for this block.
NO_ID = 2**31 - 1

Bytes = npt.NDArray[np.uint8]
Table = npt.NDArray[np.void]


class _Arguments(ctypes.Structure):
    _fields_ = (
        ("chunks", ctypes.c_void_p),
        ("num_chunks", ctypes.c_uint64),
        ("ids", ctypes.c_void_p),
        ("num_blocks", ctypes.c_uint64),
        ("staging", ctypes.c_uint64),
        ("staging_stride", ctypes.c_uint64),
        ("checksums", ctypes.c_void_p),
    )


class _Watch(ctypes.Structure):
    _fields_ = (
        ("source_begin", ctypes.c_uint64),
        ("source_end", ctypes.c_uint64),
        ("target_begin", ctypes.c_uint64),
        ("target_end", ctypes.c_uint64),
        ("num_stores", ctypes.c_void_p),
        ("num_outside", ctypes.c_uint64),
        ("num_misaligned", ctypes.c_uint64),
        ("num_diverged", ctypes.c_uint64),
        ("num_endless", ctypes.c_uint64),
    )


@dataclass(frozen=True)
class Grid:
    """A launch of `num_ctas` thread blocks; all of them run, or those in `ran`."""

    num_ctas: int
    num_threads: int
    ran: range | None = None


@dataclass
class Launch:
    """The arguments of the kernels. `staging` is an address modulo 2**64, as on a device."""

    table: Table
    block_ids: Sequence[int]
    staging: int
    staging_stride: int
    checksums: npt.NDArray[np.uint64] | None = None


class Kernels:
    """The compiled kernels."""

    def __init__(self, source: Path, folder: Path, flags: Sequence[str]) -> None:
        compiler = shutil.which("g++")
        if compiler is None:
            pytest.skip("there is no C++ compiler (g++) to compile the kernels with")
        library = folder / f"{source.stem}.so"
        command = [compiler, "-std=c++17", *flags, "-shared", "-fPIC", f'-DKERNELS="{source}"']
        completed = subprocess.run(
            [*command, "-o", str(library), str(SHIM)],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        if completed.returncode:
            pytest.fail(completed.stderr)  # not an AssertionError, which a mutant must raise
        self._launch = ctypes.CDLL(str(library)).launch
        self._launch.restype = None

    def run(
        self, is_gather: bool, launch: Launch, grid: Grid, source: Bytes, target: Bytes
    ) -> npt.NDArray[np.uint16]:
        """Run one kernel, and return how often it stored to each byte of `target`."""
        # One empty chunk more, so that a read past the table moves nothing.
        table = np.zeros(len(launch.table) + 1, dtype=CHUNK_DTYPE)
        table[:-1] = launch.table
        ids = np.full(MAX_BLOCKS, NO_ID, dtype=np.int32)
        num_blocks = len(launch.block_ids)
        ids[:num_blocks] = launch.block_ids
        stores = np.zeros(target.shape, dtype=np.uint16)
        arguments = _Arguments(
            table.ctypes.data,
            len(launch.table),
            ids.ctypes.data,
            num_blocks,
            launch.staging % 2**64,
            launch.staging_stride % 2**64,
            None if launch.checksums is None else launch.checksums.ctypes.data,
        )
        watch = _Watch(
            source.ctypes.data,
            source.ctypes.data + source.nbytes,
            target.ctypes.data,
            target.ctypes.data + target.nbytes,
            stores.ctypes.data,
        )
        ran = range(grid.num_ctas) if grid.ran is None else grid.ran
        self._launch(
            ctypes.c_bool(is_gather),
            ctypes.c_uint(grid.num_ctas),
            ctypes.c_uint(grid.num_threads),
            ctypes.c_uint(ran.start),
            ctypes.c_uint(ran.stop),
            ctypes.byref(arguments),
            ctypes.byref(watch),
        )
        assert watch.num_outside == 0, "loads or stores outside of the memory given"
        assert watch.num_misaligned == 0, "misaligned loads or stores"
        assert watch.num_diverged == 0, "lanes of a warp not at the same shuffle"
        assert watch.num_endless == 0, "a warp that never ends"
        return stores


@dataclass(frozen=True)
class Placement:
    """Regions in one array and slots in another, in bytes from their starts."""

    name: str
    bases: tuple[int, ...]
    strides: tuple[int, ...]
    region_bytes: int
    device_bytes: int
    staging_base: int = 0
    staging_pad: int = 0

    @property
    def slot_bytes(self) -> int:
        return self.region_bytes * len(self.bases)

    @property
    def offsets(self) -> list[int]:
        return [self.region_bytes * r for r in range(len(self.bases))]


def placements(num_layers: int, region_bytes: int, num_blocks: int) -> list[Placement]:
    """Return the memory layouts of caches, and one in which nothing is aligned."""
    size = region_bytes
    layers = range(num_layers)
    padded = size + 48

    def apart(stride: int, first: int = 0) -> tuple[tuple[int, ...], tuple[int, ...], int, int]:
        bases = tuple(first + layer * (num_blocks * stride + 16) for layer in layers)
        return bases, (stride,) * num_layers, size, bases[-1] + num_blocks * stride

    halves = tuple(
        layer * 2 * num_blocks * size + half * size for layer in layers for half in (0, 1)
    )
    one_row = tuple(layer * size for layer in layers)
    return [
        Placement("tight", *apart(size)),
        Placement("padded", *apart(padded), staging_pad=64),
        Placement(
            "K and V interleaved",
            halves,
            (2 * size,) * len(halves),
            size,
            2 * size * num_blocks * num_layers,
        ),
        Placement(
            "all layers of a block in a row",
            one_row,
            (num_layers * size,) * num_layers,
            size,
            num_layers * size * num_blocks,
        ),
        Placement("odd device", *apart(padded + 3, first=5)),
        Placement("odd staging", *apart(padded), staging_base=9, staging_pad=7),
        # Wide accesses and a tail.
        Placement("aligned", *apart(size + -size % 16), staging_pad=-(size * num_layers) % 16),
        # Layer 1 is aligned in both memories, but not in the slot. So a word of the checksum is not
        # a word of memory.
        Placement(
            "aligned across words",
            *apart(size + -size % 16),
            staging_base=-size % 16,
            staging_pad=-(size * num_layers) % 16,
        ),
    ]


def aligned_bytes(num_bytes: int, rng: np.random.Generator) -> Bytes:
    """Return random bytes at an address that is a multiple of 64, with a margin on either side."""
    room = rng.integers(0, 256, num_bytes + 2 * MARGIN_BYTES + 64, dtype=np.uint8)
    return room[-room.ctypes.data % 64 :][: num_bytes + 2 * MARGIN_BYTES]


def whole_regions(regions: Sequence[Region], offsets: Sequence[int]) -> Table:
    """Return a table with one chunk per region of any length."""
    rows = [
        (region.base_address, region.block_stride_bytes, offset, region.block_bytes)
        for region, offset in zip(regions, offsets, strict=True)
    ]
    return np.array(rows, dtype=CHUNK_DTYPE)


def check(
    kernels: Kernels,
    placement: Placement,
    block_ids: Sequence[int],
    grid: Grid,
    *,
    is_gather: bool,
    is_summed: bool = False,
    is_cut: bool = True,
    seed: int = 0,
) -> None:
    """Run one kernel over `placement`, and compare all memory with a copy by numpy."""
    rng = np.random.default_rng(seed)
    stride = placement.slot_bytes + placement.staging_pad
    device = aligned_bytes(placement.device_bytes, rng)
    staging = aligned_bytes(placement.staging_base + len(block_ids) * stride, rng)
    regions = [
        Region(device.ctypes.data + MARGIN_BYTES + base, region_stride, placement.region_bytes)
        for base, region_stride in zip(placement.bases, placement.strides, strict=True)
    ]
    table = (chunk_table if is_cut else whole_regions)(regions, placement.offsets)
    source, target = (device, staging) if is_gather else (staging, device)
    first_slot = MARGIN_BYTES + placement.staging_base

    expected, expected_stores = target.copy(), np.zeros(target.shape, dtype=np.uint16)
    for i, block_id in enumerate(block_ids):
        for r, base in enumerate(placement.bases):
            there = MARGIN_BYTES + base + block_id * placement.strides[r]
            here = first_slot + i * stride + r * placement.region_bytes
            read, written = (there, here) if is_gather else (here, there)
            expected[written : written + placement.region_bytes] = source[
                read : read + placement.region_bytes
            ]
            expected_stores[written : written + placement.region_bytes] += 1

    begun = rng.integers(0, 2**64, len(block_ids), dtype=np.uint64)
    launch = Launch(
        table,
        block_ids,
        staging.ctypes.data + first_slot,
        stride,
        begun.copy() if is_summed else None,
    )
    untouched = source.copy()
    stores = kernels.run(is_gather, launch, grid, source, target)
    np.testing.assert_array_equal(source, untouched)
    np.testing.assert_array_equal(target, expected)
    np.testing.assert_array_equal(stores, expected_stores)
    if launch.checksums is not None:
        slots = np.lib.stride_tricks.as_strided(
            staging[first_slot:], (len(block_ids), placement.slot_bytes), (stride, 1)
        )
        np.testing.assert_array_equal(launch.checksums, begun + checksum(slots))
