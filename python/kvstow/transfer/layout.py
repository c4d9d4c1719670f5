"""Where a block's bytes lie: one region per layer and K or V, each a strided row of blocks.

```
region 0   |block 0|pad|block 1|pad| ...      base, then block i at base + i * stride
region 1   |block 0|pad|block 1|pad| ...
slot       |block i of region 0|block i of region 1| ...      tight, in the order of the regions
```
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvstow._core import ConfigError
from kvstow.arguments import checked_int

# Addresses are computed in int64 arrays.
MAX_ADDRESS = 2**63 - 1
# Block ids are int32 everywhere.
MAX_BLOCKS = 2**31 - 1


class Device(Protocol):
    """Of a tensor: "cpu", or "cuda" and which."""

    @property
    def type(self) -> str:
        """Its kind."""

    @property
    def index(self) -> int | None:
        """Which of its kind."""


@runtime_checkable
class Tensor(Protocol):
    """What is asked of a tensor: torch's has it all, and torch need not be imported."""

    @property
    def device(self) -> Device:
        """Where its memory is."""

    @property
    def ndim(self) -> int:
        """Dimensions."""

    @property
    def shape(self) -> Sequence[int]:
        """Items along each dimension."""

    def __len__(self) -> int:
        """Items along the first dimension."""

    def __getitem__(self, part: slice, /) -> Tensor:
        """A view of some of the first dimension."""

    def data_ptr(self) -> int:
        """The address of the first item."""

    def element_size(self) -> int:
        """Bytes of an item."""

    def numel(self) -> int:
        """Items in all."""

    def stride(self) -> Sequence[int]:
        """Items from one to the next, along each dimension."""

    def is_contiguous(self) -> bool:
        """Whether it is one run of bytes, in order."""


@dataclass(frozen=True, slots=True)
class Region:
    """One layer's K, V, or both: block i occupies `block_bytes` from `base + i * stride`.

    Attributes:
        base_address: where block 0 begins.
        block_stride_bytes: from the start of one block to the start of the next.
        block_bytes: what is moved of each block; the rest of the stride is never touched.

    Raises:
        ConfigError: an address or size below 1, or a stride shorter than the block.
    """

    base_address: int
    block_stride_bytes: int
    block_bytes: int

    def __post_init__(self) -> None:
        """Check each number, and turn numpy's integers into Python's."""
        ways_out = {
            "base_address": "pass the address of block 0, as array.ctypes.data gives it",
            "block_bytes": "pass the bytes of one block in this region",
            "block_stride_bytes": "pass the distance from block to block, block_bytes without gaps",
        }
        for name, way_out in ways_out.items():
            number = checked_int(f"Region {name}", getattr(self, name), 1, MAX_ADDRESS, way_out)
            object.__setattr__(self, name, number)
        if self.block_stride_bytes < self.block_bytes:
            raise ConfigError(
                f"block_stride_bytes is {self.block_stride_bytes}, below block_bytes "
                f"{self.block_bytes}, so neighbouring blocks would share bytes; "
                "a region without gaps has a stride equal to block_bytes"
            )

    def end_address(self, num_blocks: int) -> int:
        """The address after the last byte of the last block."""
        return self.base_address + (num_blocks - 1) * self.block_stride_bytes + self.block_bytes


@dataclass(frozen=True)
class BlockLayout:
    """The memory of one block pool: `num_blocks` blocks, each spread over all regions.

    The addresses must stay valid while a mover uses the layout: `owners` are kept alive with it.

    Attributes:
        num_blocks: blocks in every region, the null block included.
        regions: in the order in which a slot holds them.
        owners: what the regions' memory belongs to.
        device: the CUDA device that the addresses belong to; None for memory that the CPU reaches.
        slot_bytes: bytes of one block over all regions.
        offsets: where each region begins within a slot, in bytes.

    Raises:
        ConfigError: no blocks, no regions, memory past the last address, or regions that share
            bytes. Regions may interleave (K and V side by side in each block).
    """

    num_blocks: int
    regions: tuple[Region, ...]
    owners: tuple[object, ...] = field(default=(), repr=False, compare=False)
    device: int | None = None
    slot_bytes: int = field(init=False)
    offsets: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        """Check the regions against each other, and place them in the slot."""
        num_blocks = checked_int(
            "num_blocks",
            self.num_blocks,
            1,
            MAX_BLOCKS,
            "pass the blocks of the pool, the null block included",
        )
        regions = tuple(self.regions)
        if not regions:
            raise ConfigError("a layout needs at least 1 region, got 0; pass one per layer")
        for position, region in enumerate(regions):
            if not isinstance(region, Region):
                raise ConfigError(
                    f"regions[{position}] is a {type(region).__name__}; pass Region objects, "
                    "or arrays to BlockLayout.from_arrays"
                )
            if region.end_address(num_blocks) > MAX_ADDRESS:
                raise ConfigError(
                    f"regions[{position}] ends at {region.end_address(num_blocks)}, past the last "
                    f"address {MAX_ADDRESS}; lower num_blocks or block_stride_bytes"
                )
        if self.device is not None:
            checked_int("device", self.device, 0, MAX_BLOCKS, "pass the number of a CUDA device")
        _refuse_shared_bytes(regions, num_blocks)
        ends = list(accumulate(region.block_bytes for region in regions))
        object.__setattr__(self, "num_blocks", num_blocks)
        object.__setattr__(self, "regions", regions)
        object.__setattr__(self, "owners", tuple(self.owners))
        object.__setattr__(self, "slot_bytes", ends[-1])
        object.__setattr__(self, "offsets", (0, *ends[:-1]))

    @classmethod
    def from_arrays(cls, arrays: Sequence[npt.NDArray[np.generic]]) -> BlockLayout:
        """Describe host arrays of shape [num_blocks, ...], one region each, and keep them alive.

        The first dimension may be strided; the bytes of one block must be contiguous. Of an array
        of shape [2, num_blocks, ...] pass the halves `a[0]` and `a[1]`.

        Raises:
            ConfigError: something else than a writable numpy array of plain data, blocks that are
                not contiguous, or arrays that differ in `num_blocks` or share bytes.
        """
        regions = [_region_of(f"arrays[{i}]", array) for i, array in enumerate(arrays)]
        return cls(_num_blocks("arrays", arrays), tuple(regions), owners=tuple(arrays))

    @classmethod
    def from_tensors(cls, tensors: Sequence[Tensor]) -> BlockLayout:
        """Describe tensors of shape [num_blocks, ...], one region each, and keep them alive.

        Tensors of torch, on the CPU or on a CUDA device, as they are; all on the same one. The
        first dimension may be strided; the bytes of one block must be contiguous. Of a tensor of
        shape [2, num_blocks, ...] pass the halves `t[0]` and `t[1]`.

        Raises:
            ConfigError: something else than a tensor, one on another kind of device, blocks that
                are not contiguous, or tensors that differ in device or in `num_blocks`, or that
                share bytes.
        """
        regions = [_region_of_tensor(f"tensors[{i}]", t) for i, t in enumerate(tensors)]
        devices = list(dict.fromkeys(str(tensor.device) for tensor in tensors))
        if len(devices) > 1:
            raise ConfigError(
                f"tensors lie on several devices, {', '.join(devices)}; one layout is the memory "
                "of one device, make one layout and one mover for each"
            )
        return cls(
            _num_blocks("tensors", tensors),
            tuple(regions),
            owners=tuple(tensors),
            device=cuda_device(tensors[0]) if tensors else None,
        )


def cuda_device(tensor: Tensor) -> int | None:
    """The number of the CUDA device that a tensor lies on; None on the CPU."""
    return (tensor.device.index or 0) if tensor.device.type == "cuda" else None


def _num_blocks(name: str, arrays: Sequence[Sized]) -> int:
    """The first dimension, which all share."""
    counts = sorted({len(array) for array in arrays})
    if len(counts) > 1:
        raise ConfigError(
            f"{name} differ in num_blocks, their first dimension: {counts}; pass {name} of one pool"
        )
    return counts[0] if counts else 1


def _region_of(name: str, array: npt.NDArray[np.generic]) -> Region:
    """The region that an array of shape [num_blocks, ...] occupies."""
    if not isinstance(array, np.ndarray):
        raise ConfigError(
            f"{name} is a {type(array).__name__}, not a numpy array; for other memory build Region "
            "objects from its addresses and pass what owns it as owners"
        )
    if array.dtype.hasobject or not array.flags.writeable:
        kind = "holds Python objects" if array.dtype.hasobject else "is read-only"
        raise ConfigError(f"{name} {kind}; a load writes raw bytes, pass a writable plain array")
    if array.ndim == 0 or array.size == 0:
        raise ConfigError(
            f"{name} has shape {array.shape}, which holds no block; pass [num_blocks, ...]"
        )
    block_bytes = array.nbytes // len(array)
    # A first dimension of 1 leaves contiguity to the block; its own stride says nothing then.
    stride_bytes = array.strides[0] if len(array) > 1 else block_bytes
    if not array[:1].flags.c_contiguous or stride_bytes < block_bytes:
        raise _not_contiguous(name, array.shape, array.strides, block_bytes)
    return Region(array.ctypes.data, stride_bytes, block_bytes)


def _region_of_tensor(name: str, tensor: Tensor) -> Region:
    """The region that a tensor of shape [num_blocks, ...] occupies."""
    if not isinstance(tensor, Tensor):
        raise ConfigError(
            f"{name} is a {type(tensor).__name__}, not a tensor; pass tensors of torch, numpy "
            "arrays to from_arrays, or Region objects for other memory"
        )
    if tensor.device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"{name} lies on {tensor.device}; blocks are moved from and to CUDA devices and the "
            "CPU, put the tensor there"
        )
    if tensor.ndim == 0 or tensor.numel() == 0:
        raise ConfigError(
            f"{name} has shape {tuple(tensor.shape)}, which holds no block; pass [num_blocks, ...]"
        )
    item_bytes = tensor.element_size()
    block_bytes = tensor.numel() // len(tensor) * item_bytes
    strides = tuple(stride * item_bytes for stride in tensor.stride())
    stride_bytes = strides[0] if len(tensor) > 1 else block_bytes
    if not tensor[:1].is_contiguous() or stride_bytes < block_bytes:
        raise _not_contiguous(name, tuple(tensor.shape), strides, block_bytes)
    return Region(tensor.data_ptr(), stride_bytes, block_bytes)


def _not_contiguous(
    name: str, shape: tuple[int, ...], strides: tuple[int, ...], block_bytes: int
) -> ConfigError:
    return ConfigError(
        f"{name} has shape {shape} and strides {strides}: its blocks are not "
        f"contiguous runs of {block_bytes} bytes in ascending order; pass a view whose "
        "dimensions after the first are contiguous, or one array per contiguous part"
    )


def _refuse_shared_bytes(regions: Sequence[Region], num_blocks: int) -> None:
    """Raise `ConfigError` if any block of one region shares a byte with any block of another."""
    by_address = sorted(range(len(regions)), key=lambda i: regions[i].base_address)
    reaching: list[int] = []  # earlier regions that end after the current one begins
    for current in by_address:
        base = regions[current].base_address
        reaching = [i for i in reaching if regions[i].end_address(num_blocks) > base]
        for earlier in reaching:
            if _share_bytes(regions[earlier], regions[current], num_blocks):
                low, high = sorted((earlier, current))
                raise ConfigError(
                    f"regions[{low}] and regions[{high}] share bytes ({regions[low]}, "
                    f"{regions[high]}, {num_blocks} blocks); a load into one would overwrite the "
                    "other, name each byte once"
                )
        reaching.append(current)


def _share_bytes(a: Region, b: Region, num_blocks: int) -> bool:
    """Whether some block of `a` and some block of `b` have a byte in common.

    `b` begins where `a` does or after it, and before `a` ends.
    """
    if a.block_stride_bytes == b.block_stride_bytes:
        # All pairs of neighbours are alike: b's block begins in a's, or reaches the next one.
        start = (b.base_address - a.base_address) % a.block_stride_bytes
        return start < a.block_bytes or start + b.block_bytes > a.block_stride_bytes
    starts = a.base_address + np.arange(num_blocks, dtype=np.int64) * a.block_stride_bytes
    # Of b's blocks that begin before a block of a ends, the last one reaches furthest.
    last = (starts + (a.block_bytes - 1) - b.base_address) // b.block_stride_bytes
    last = np.minimum(last, num_blocks - 1)
    ends = b.base_address + last * b.block_stride_bytes + b.block_bytes
    return bool(np.any((last >= 0) & (ends > starts)))
