"""The CUDA kernels in `pack.cu`, and what the host needs of them: text, chunk table, checksum.

Importing this needs no CUDA. `CudaRuntime` compiles `SOURCE`, and `CudaMover` passes the kernels a
`chunk_table` per layout.

May import: kvstow._core, kvstow.arguments, kvstow.transfer.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files

import numpy as np
import numpy.typing as npt

from kvstow._core import ConfigError
from kvstow.arguments import checked_int
from kvstow.transfer.layout import Region

SOURCE = files(__name__).joinpath("pack.cu").read_text(encoding="utf-8")

# Bytes that a warp has in flight: 32 lanes with 4 loads of 16 bytes each. Shorter chunks waste
# lanes. Longer chunks make the warps' turns differ in length.
CHUNK_BYTES = 2048
# The kernels count the bytes of a slot in 32 bits.
MAX_SLOT_BYTES = 2**32 - 1

# Ids that one launch carries.
MAX_BLOCKS = 960
# The kernels count the chunks of all blocks of a launch in 31 bits.
MAX_TURNS = 2**31 - 1

CHUNK_DTYPE = np.dtype(
    [("base", np.uint64), ("stride", np.uint64), ("offset", np.uint32), ("num_bytes", np.uint32)]
)
"""`struct Chunk` of `pack.cu`."""

IDS_DTYPE = np.dtype(f"V{MAX_BLOCKS * np.dtype(np.int32).itemsize}")
"""`struct Ids` of `pack.cu`: int32 ids as the opaque bytes that cupy passes by value."""


def ids_for_launch(block_ids: npt.NDArray[np.int32]) -> np.void:
    """Return the first `MAX_BLOCKS` ids as the argument of a launch."""
    argument: np.void = block_ids[:MAX_BLOCKS].view(IDS_DTYPE)[0]
    return argument


def chunk_table(regions: Sequence[Region], offsets: Sequence[int]) -> npt.NDArray[np.void]:
    """Return the chunks of the regions in their order: `CHUNK_DTYPE`, shape [num_chunks].

    Args:
        regions: `BlockLayout.regions`, at addresses that the device can use.
        offsets: where each region begins within a slot: `BlockLayout.offsets`.

    Raises:
        ConfigError: there are no regions, or not one offset per region, or a region ends above
            4 GiB in the slot.
    """
    if not regions or len(regions) != len(offsets):
        raise ConfigError(
            f"{len(regions)} regions but {len(offsets)} offsets; pass the regions and offsets of "
            "one BlockLayout"
        )
    pieces = []
    for position, (region, given) in enumerate(zip(regions, offsets, strict=True)):
        offset = checked_int(
            f"offsets[{position}]", given, 0, MAX_SLOT_BYTES, "pass BlockLayout.offsets"
        )
        if offset + region.block_bytes > MAX_SLOT_BYTES:
            raise ConfigError(
                f"regions[{position}] ends at byte {offset + region.block_bytes} of the slot, past "
                f"{MAX_SLOT_BYTES}, which the kernels address at most; make blocks of fewer tokens"
            )
        starts = np.arange(0, region.block_bytes, CHUNK_BYTES, dtype=np.uint64)
        piece = np.empty(len(starts), dtype=CHUNK_DTYPE)
        piece["base"] = starts + np.uint64(region.base_address)
        piece["stride"] = region.block_stride_bytes
        piece["offset"] = starts + np.uint64(offset)
        piece["num_bytes"] = np.minimum(region.block_bytes - starts, CHUNK_BYTES)
        pieces.append(piece)
    return np.concatenate(pieces)


def checksum(slots: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """Return the kernels' checksum of each slot, shape [n], for slots of shape [n, num_bytes].

    It is the sum modulo 2**64 of `byte[p] << 8 * (p % 4)` times the weight of word `p // 4`. See
    `pack.cu` for what it detects. The sums of a slot's parts add up to the sum of the slot.

    Raises:
        ConfigError: `slots` is not a 2-D array of uint8.
    """
    if slots.ndim != 2 or slots.dtype != np.uint8:  # noqa: PLR2004 - rows of bytes
        raise ConfigError(
            f"slots is {slots.dtype} of shape {slots.shape}; pass bytes of shape [n, num_bytes]"
        )
    num_slots, num_bytes = slots.shape
    num_words = -(-num_bytes // 4)
    mixed = np.arange(1, num_words + 1, dtype=np.uint32) * np.uint32(0x9E3779B1)
    weights = (mixed ^ (mixed >> np.uint32(16))).astype(np.uint64)
    sums = np.empty(num_slots, dtype=np.uint64)
    words = np.zeros(num_words, dtype="<u4")
    # Slot by slot, because 64-bit words of all slots would need twice the arena's memory.
    for i, slot in enumerate(slots):
        words.view(np.uint8)[:num_bytes] = slot
        sums[i] = np.sum(words * weights, dtype=np.uint64)
    return sums
