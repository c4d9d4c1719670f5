"""The layout of a block's bytes: one region per layer and K or V, each a strided row of blocks.

```
region 0   |block 0|pad|block 1|pad| ...      base, then block i at base + i * stride
region 1   |block 0|pad|block 1|pad| ...
slot       |block i of region 0|block i of region 1| ...      tight, in the order of the regions
```
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized, ValuesView
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NoReturn, Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvstow._core import ConfigError
from kvstow.arguments import checked_int

# Addresses are computed in int64 arrays.
MAX_ADDRESS = 2**63 - 1
# Block ids are int32 everywhere.
MAX_BLOCKS = 2**31 - 1

_Each = TypeVar("_Each")
# Not Iterable, because one array is that too.
_Several: TypeAlias = Sequence[_Each] | ValuesView[_Each] | Iterator[_Each]


class Device(Protocol):
    """Device of a tensor, for example "cpu" or "cuda:0"."""

    @property
    def type(self) -> str:
        """Kind of device: "cpu", "cuda"."""

    @property
    def index(self) -> int | None:
        """Number of the device among those of its kind."""


@runtime_checkable
class Tensor(Protocol):
    """What a layout reads of a tensor. A torch tensor fits, without an import of torch here."""

    @property
    def device(self) -> Device:
        """Device of its memory."""

    @property
    def shape(self) -> Sequence[int]:
        """Items along each dimension."""

    def __len__(self) -> int:
        """Return the items along the first dimension."""

    def data_ptr(self) -> int:
        """Return the address of the first item."""

    def element_size(self) -> int:
        """Return the bytes of an item."""

    def stride(self) -> Sequence[int]:
        """Return the step along each dimension, in items."""


@dataclass(frozen=True, slots=True)
class Region:
    """One layer's K, V, or both: block i occupies `block_bytes` from `base + i * stride`.

    Attributes:
        base_address: address of block 0.
        block_stride_bytes: bytes from the start of one block to the start of the next.
        block_bytes: bytes of a block that are moved; the rest of the stride is never touched.

    Raises:
        ConfigError: an address or size is below 1, or the stride is shorter than the block.
    """

    base_address: int
    block_stride_bytes: int
    block_bytes: int

    def __post_init__(self) -> None:
        """Check each number, and convert numpy's integers to Python's."""
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
                f"{self.block_bytes}, so neighbouring blocks would share bytes; pass a stride "
                "equal to block_bytes for blocks without gaps"
            )

    def end_address(self, num_blocks: int) -> int:
        """Return the address after the last byte of the last block."""
        return self.base_address + (num_blocks - 1) * self.block_stride_bytes + self.block_bytes


@dataclass(frozen=True)
class BlockLayout:
    """The memory of one block pool: `num_blocks` blocks, each spread over all regions.

    The addresses must stay valid while a mover uses the layout. So it keeps `owners` alive.
    Pickles and deep copies raise `TypeError`, because they would have the addresses of the original
    and other memory as `owners`. `copy.copy` returns the layout itself.

    Attributes:
        num_blocks: blocks in every region, the null block included.
        regions: in the order in which a slot holds them.
        owners: objects that own the regions' memory.
        device: number of the CUDA device of the addresses; None for CPU memory.
        slot_bytes: bytes of one block over all regions.
        offsets: bytes from the start of a slot to each region.

    Raises:
        ConfigError: there are no blocks or no regions, a region ends past the last address, or two
            regions share bytes. Regions may interleave (K and V side by side in each block).
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
            raise ConfigError("regions has 0 entries, expected at least 1: pass one per layer")
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

    def __copy__(self) -> BlockLayout:
        """Return this layout, because nothing changes it."""
        return self

    def __deepcopy__(self, _: object) -> NoReturn:
        """Refuse a copy of `owners` at other addresses."""
        raise TypeError(
            "a BlockLayout cannot be deep-copied, because its addresses are those of its owners: "
            "share this one, or copy the memory and pass the copies to BlockLayout.from_arrays or "
            "from_tensors"
        )

    def __reduce__(self) -> NoReturn:
        """Refuse a pickle, whose addresses would be those of this process."""
        raise TypeError(
            "a BlockLayout cannot be pickled, because its addresses hold in this process only: "
            "call BlockLayout.from_arrays or from_tensors in the process that copies, with its own "
            "arrays or tensors"
        )

    @classmethod
    def from_arrays(cls, arrays: _Several[npt.NDArray[np.generic]]) -> BlockLayout:
        """Return the layout of host arrays of shape [num_blocks, ...], one region each.

        The layout keeps the arrays alive. The first dimension may be strided, but the bytes of one
        block must be contiguous. Of an array `a` of shape [n, num_blocks, ...], with n layers or K
        and V, pass `list(a)`.

        Raises:
            ConfigError: one is not a writable numpy array of plain data, or its blocks are not
                contiguous; or the arrays differ in `num_blocks` or share bytes; or this is one
                array instead of a list.
        """
        arrays = _checked_list("arrays", arrays)
        regions = [_region_of(f"arrays[{i}]", array) for i, array in enumerate(arrays)]
        return cls(_num_blocks("arrays", arrays), tuple(regions), owners=tuple(arrays))

    @classmethod
    def from_tensors(cls, tensors: _Several[Tensor]) -> BlockLayout:
        """Return the layout of tensors of shape [num_blocks, ...], one region each.

        Pass torch tensors that are all on the CPU or all on one CUDA device. The layout keeps them
        alive. The first dimension may be strided, but the bytes of one block must be contiguous.
        Of a tensor `t` of shape [n, num_blocks, ...], with n layers or K and V, pass `list(t)`.

        Raises:
            ConfigError: one is not a tensor, or is on another kind of device, or its blocks are not
                contiguous; or the tensors differ in device or `num_blocks`, or share bytes; or this
                is one tensor instead of a list.
        """
        tensors = _checked_list("tensors", tensors)
        regions = [_region_of_tensor(f"tensors[{i}]", t) for i, t in enumerate(tensors)]
        devices = list(dict.fromkeys(str(tensor.device) for tensor in tensors))
        if len(devices) > 1:
            raise ConfigError(
                f"tensors are on several devices, {', '.join(devices)}; build one layout and one "
                "mover for each device"
            )
        return cls(
            _num_blocks("tensors", tensors),
            tuple(regions),
            owners=tuple(tensors),
            device=cuda_device(tensors[0]) if tensors else None,
        )


def _checked_list(name: str, given: _Several[_Each]) -> list[_Each]:
    """Return a list, also of a generator. Refuse one array, which is no list of its blocks."""
    shape = getattr(given, "shape", None)
    if shape is not None:
        raise ConfigError(
            f"{name} is one object of shape {tuple(shape)}, expected a list with one for each "
            f"region: pass [{name}] if its first dimension counts blocks, and list({name}) if it "
            "counts layers, or K and V"
        )
    if not isinstance(given, Iterable):
        raise ConfigError(
            f"{name} is of type {type(given).__name__}, expected a list with one for each region"
        )
    return list(given)


def joined(regions: Sequence[Region]) -> list[Region]:
    """Return the regions, joined where they are neighbours in a block as they are in a slot.

    One copy moves a joined region.
    """
    joined: list[Region] = []
    for region in regions:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.block_stride_bytes == region.block_stride_bytes
            and last.base_address + last.block_bytes == region.base_address
            and last.block_bytes + region.block_bytes <= region.block_stride_bytes
        ):
            num_bytes = last.block_bytes + region.block_bytes
            joined[-1] = Region(last.base_address, region.block_stride_bytes, num_bytes)
        else:
            joined.append(region)
    return joined


def cuda_device(tensor: Tensor) -> int | None:
    """Return the number of a tensor's CUDA device; None for a tensor on the CPU."""
    return (tensor.device.index or 0) if tensor.device.type == "cuda" else None


def _num_blocks(name: str, arrays: Sequence[Sized]) -> int:
    """Return the first dimension, which must be equal for all."""
    counts = sorted({len(array) for array in arrays})
    if len(counts) > 1:
        raise ConfigError(
            f"{name} differ in num_blocks, their first dimension: {counts}; pass {name} of one pool"
        )
    return counts[0] if counts else 1


def _region_of(name: str, array: npt.NDArray[np.generic]) -> Region:
    """Return the region of an array of shape [num_blocks, ...]."""
    if not isinstance(array, np.ndarray):
        raise ConfigError(
            f"{name} is of type {type(array).__name__}, expected a numpy array: pass torch tensors "
            "to from_tensors, and build Region objects for other memory"
        )
    if array.dtype.hasobject or not array.flags.writeable:
        kind = "holds Python objects" if array.dtype.hasobject else "is read-only"
        raise ConfigError(f"{name} {kind}; a load writes raw bytes, pass a writable plain array")
    return _region(name, array.ctypes.data, array.shape, array.strides, array.itemsize)


def _region_of_tensor(name: str, tensor: Tensor) -> Region:
    """Return the region of a tensor of shape [num_blocks, ...]."""
    if not isinstance(tensor, Tensor):
        raise ConfigError(
            f"{name} is of type {type(tensor).__name__}, expected a torch tensor: pass numpy "
            "arrays to from_arrays, and build Region objects for other memory"
        )
    if tensor.device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"{name} is on {tensor.device}, expected the CPU or a CUDA device: put the tensor there"
        )
    item_bytes = tensor.element_size()
    strides = tuple(stride * item_bytes for stride in tensor.stride())
    return _region(name, tensor.data_ptr(), tuple(tensor.shape), strides, item_bytes)


def _region(
    name: str, address: int, shape: tuple[int, ...], strides: tuple[int, ...], item_bytes: int
) -> Region:
    """Return the region of `shape` items that are `strides` bytes apart along each dimension."""
    if 0 in (shape or (0,)):
        raise ConfigError(f"{name} has shape {shape}, which holds no block; pass [num_blocks, ...]")
    block_bytes, is_tight = item_bytes, True
    for size, stride in reversed(list(zip(shape[1:], strides[1:], strict=True))):
        is_tight = is_tight and (size == 1 or stride == block_bytes)
        block_bytes *= size
    # With a first dimension of 1, its stride has no meaning.
    stride_bytes = strides[0] if shape[0] > 1 else block_bytes
    if not is_tight or stride_bytes < block_bytes:
        raise ConfigError(
            f"{name} has shape {shape} and strides {strides}: its blocks are not "
            f"contiguous runs of {block_bytes} bytes in ascending order; pass a view whose "
            "dimensions after the first are contiguous, or one array per contiguous part"
        )
    return Region(address, stride_bytes, block_bytes)


def _refuse_shared_bytes(regions: Sequence[Region], num_blocks: int) -> None:
    """Raise `ConfigError` if a block of one region shares a byte with a block of another."""
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
                    f"{regions[high]}, {num_blocks} blocks), so a load into one would overwrite "
                    "the other; name each byte once"
                )
        reaching.append(current)


def _share_bytes(a: Region, b: Region, num_blocks: int) -> bool:
    """Return whether a block of `a` and a block of `b` share a byte.

    `b` begins where `a` does or after it, and before `a` ends.
    """
    if a.block_stride_bytes == b.block_stride_bytes:
        # Every pair of neighbours is equal: b's block begins in a's, or reaches a's next one.
        start = (b.base_address - a.base_address) % a.block_stride_bytes
        return start < a.block_bytes or start + b.block_bytes > a.block_stride_bytes
    starts = a.base_address + np.arange(num_blocks, dtype=np.int64) * a.block_stride_bytes
    # The last of b's blocks that begin before a block of a ends reaches furthest.
    last = (starts + (a.block_bytes - 1) - b.base_address) // b.block_stride_bytes
    last = np.minimum(last, num_blocks - 1)
    ends = b.base_address + last * b.block_stride_bytes + b.block_bytes
    return bool(np.any((last >= 0) & (ends > starts)))
