"""The bytes that each block must hold, and the device memory that the replay computes into.

    word(key, group, region, w) = mix((key ^ place[group, region, w]) * odd)        64 bits each

`key` is the first word of the block's digest. `place` is a pseudo-random constant that differs for
each word of each group's block. The function is one to one in the key for a fixed place, and in the
place for a fixed key. So the check finds a block that is stale, swapped, torn between two copies,
half loaded, shifted by a layer, or of another group.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstow._core import ConfigError
from kvstow.replay.device import Array, HostDevice
from kvstow.transfer import BlockLayout

Ids = npt.NDArray[np.integer]
Keys = npt.NDArray[np.uint64]

WORD_BYTES = 8
GARBAGE = 0xDB  # fills fresh device memory; it matches no key
_ODD = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)
_GROUP_SHIFT = 32  # a block has fewer than 2^32 words


@dataclass(frozen=True, slots=True)
class Geometry:
    """The bytes of a token's KV in a group, and the regions that they lie in.

    Each layer has two regions: K and V, or the two states of a recurrent layer. As in an engine
    with a layer-major cache, a region is one array over all blocks. So a block has as many
    fragments as there are regions.
    """

    block_size: int
    num_layers: int
    bytes_per_token: int

    def __post_init__(self) -> None:
        if self.num_layers < 1:
            raise ConfigError(f"--layers is {self.num_layers}; it must be at least 1")
        if self.bytes_per_token < 1 or self.bytes_per_token % self.num_regions:
            raise ConfigError(
                f"--bytes-per-token is {self.bytes_per_token}; it must be a multiple of "
                f"{self.num_regions}: K and V of {self.num_layers} layers"
            )
        if self.region_bytes % WORD_BYTES:
            raise ConfigError(
                f"a block of {self.block_size} tokens takes {self.region_bytes} bytes per K or V "
                f"of a layer; it must be a multiple of {WORD_BYTES}: with --model full pass "
                f"--bytes-per-token {self._next_fitting()}"
            )

    def _next_fitting(self) -> int:
        """Return the next bytes per token with which a block has whole words in each region."""
        step = WORD_BYTES // math.gcd(self.block_size, WORD_BYTES)
        return (self.region_token_bytes // step + 1) * step * self.num_regions

    @property
    def num_regions(self) -> int:
        """Number of fragments of a block: K and V of each layer."""
        return 2 * self.num_layers

    @property
    def region_token_bytes(self) -> int:
        """Bytes of a token in one region."""
        return self.bytes_per_token // self.num_regions

    @property
    def region_bytes(self) -> int:
        """Bytes of a block in one region."""
        return self.block_size * self.region_token_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all regions."""
        return self.block_size * self.bytes_per_token


class Content:
    """The expected bytes of blocks and of single tokens in one group."""

    def __init__(self, geometry: Geometry, group: int = 0) -> None:
        self.geometry = geometry
        num_words = geometry.region_bytes // WORD_BYTES
        places = np.arange(geometry.num_regions * num_words, dtype=np.uint64)
        places += np.uint64(group << _GROUP_SHIFT)
        self._places = _splitmix64(places).reshape(geometry.num_regions, num_words)
        # The largest unit that divides a token's bytes in a region and a word.
        self.unit_bytes = math.gcd(geometry.region_token_bytes, WORD_BYTES)
        token_units = geometry.region_token_bytes // self.unit_bytes
        # For each offset in a block, the units of its token: their words' places, and how far the
        # words are shifted.
        self._units = np.arange(geometry.block_size * token_units).reshape(-1, token_units)
        word, unit = np.divmod(self._units, WORD_BYTES // self.unit_bytes)
        self._unit_places = self._places[:, word]
        self._unit_shifts = (unit * (8 * self.unit_bytes)).astype(np.uint64)

    def blocks(self, keys: Keys) -> npt.NDArray[np.uint64]:
        """Return whole blocks: `[n, num_regions, words]`."""
        return _mix(keys[:, None, None] ^ self._places)

    def block_bytes(self, key: np.uint64) -> npt.NDArray[np.uint8]:
        """Return one whole block: `[num_regions, region_bytes]`."""
        words = _mix(key ^ self._places)
        return words.view(np.uint8)

    def token_units_at(self, offsets: Ids) -> npt.NDArray[np.int64]:
        """Return the units of the tokens at these offsets in a block: `[n, token_units]`."""
        return self._units[offsets]

    def tokens(self, keys: Keys, offsets: Ids) -> npt.NDArray[np.unsignedinteger]:
        """Return a token of each block, at this offset in it: `[num_regions, n, token_units]`."""
        words = _mix(keys[:, None] ^ self._unit_places[:, offsets])
        return (words >> self._unit_shifts[offsets]).astype(f"<u{self.unit_bytes}")


def page_shape(geometries: Sequence[Geometry]) -> tuple[int, int]:
    """Return the number of regions, and the bytes of each, that a block of any group fits into."""
    num_regions = max(geometry.num_regions for geometry in geometries)
    return num_regions, max(geometry.region_bytes for geometry in geometries)


def device_memory(
    num_blocks: int, geometries: Sequence[Geometry], rank: int = 0, device: HostDevice | None = None
) -> "list[GroupMemory]":
    """Return one rank's layer-major KV cache, as a view per group.

    The bytes of a block differ from rank to rank, as the shards of a model do.

    Block i of one group overlays block i of every other group:

        region 0   |block 0     |block 1     | ...      the group with the largest regions
        region 0   |block 0|    |block 1|    | ...      another group
        region 1   ...
    """
    num_regions, region_bytes = page_shape(geometries)
    device = device or HostDevice()
    pages = device.full((num_regions, num_blocks, region_bytes), GARBAGE)
    return [
        GroupMemory(pages, Content(geometry, rank * len(geometries) + group), device)
        for group, geometry in enumerate(geometries)
    ]


class GroupMemory:
    """One group's view of the device memory, with the writes that stand for compute.

    Attributes:
        content: the expected bytes.
        geometry: the bytes and regions of a block.
        regions: one `[num_blocks, region_bytes]` uint8 array per region: K and V of layer 0, then
            of layer 1, and so on.
    """

    def __init__(self, pages: Array, content: Content, device: HostDevice) -> None:
        self.content = content
        self.geometry = content.geometry
        self._device = device

        def view(item_bytes: int) -> Array:
            num_items = self.geometry.region_bytes // item_bytes
            return pages.view(f"<u{item_bytes}")[: self.geometry.num_regions, :, :num_items]

        self._bytes, self._words, self._units = map(view, (1, WORD_BYTES, content.unit_bytes))
        self.regions = list(self._bytes)

    def layout(self) -> BlockLayout:
        """Return the layout of the blocks."""
        return self._device.layout(self.regions)

    def write_tokens(self, blocks: Ids, keys: Keys, offsets: Ids) -> None:
        """Write one token in each block, at its offset in the block."""
        units = self.content.token_units_at(offsets)
        put = self._device.put
        self._units[:, put(blocks[:, None]), put(units)] = put(self.content.tokens(keys, offsets))

    def write_range(self, table: Ids, keys: Keys, start: int, stop: int) -> None:
        """Write tokens `start` to `stop` of the request with this block table and these keys."""
        size = self.geometry.block_size
        first, last = -(-start // size), stop // size
        if first > last:  # begins and ends in one block
            self._write_part(table[last], keys[last], start - last * size, stop - last * size)
            return
        if start < first * size:
            self._write_part(table[first - 1], keys[first - 1], start % size, size)
        if first < last:
            words = self.content.blocks(keys[first:last])
            put = self._device.put
            self._words[:, put(table[first:last])] = put(words.swapaxes(0, 1))
        if stop > last * size:
            self._write_part(table[last], keys[last], 0, stop - last * size)

    def _write_part(self, block: int, key: np.uint64, start: int, stop: int) -> None:
        token_bytes = self.geometry.region_token_bytes
        part = slice(start * token_bytes, stop * token_bytes)
        content = self._device.put(self.content.block_bytes(key)[:, part])
        self._bytes[:, int(block), part] = content

    def wrong_blocks(self, blocks: Ids, keys: Keys) -> npt.NDArray[np.bool_]:
        """Return for each whole block whether its bytes differ from those of its key."""
        expected = self.content.blocks(keys).swapaxes(0, 1)
        held = self._device.get(self._words[:, self._device.put(blocks)])
        wrong: npt.NDArray[np.bool_] = (held != expected).any(axis=(0, 2))
        return wrong

    def wrong_part(self, block: int, key: np.uint64, num_tokens: int) -> bool:
        """Return whether the first tokens of a block differ from those of its key."""
        part = slice(0, num_tokens * self.geometry.region_token_bytes)
        held = self._device.get(self._bytes[:, int(block), part])
        return not np.array_equal(held, self.content.block_bytes(key)[:, part])


def _mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Mix the bits of each word, in place and one to one."""
    words *= _ODD
    words ^= words >> _HALF
    return words


def _splitmix64(counters: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return a distinct, well-mixed constant for each of the numbers 0, 1, 2, ..."""
    x = (counters + np.uint64(1)) * _ODD
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
