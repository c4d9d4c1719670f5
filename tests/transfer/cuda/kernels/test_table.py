"""The chunk table that the host builds for the kernels, and the host's copy of the checksum."""

from __future__ import annotations

from importlib.resources import files

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstow import ConfigError
from kvstow.transfer import BlockLayout, Region
from kvstow.transfer.cuda.kernels import CHUNK_BYTES, CHUNK_DTYPE, SOURCE, checksum, chunk_table

ADDRESS = 1 << 40


def test_source_is_packaged() -> None:
    assert files("kvstow.transfer.cuda.kernels").joinpath("pack.cu").read_text() == SOURCE
    assert SOURCE.count('extern "C" __global__') == 2


def test_row_has_the_layout_of_the_struct() -> None:
    table = chunk_table([Region(0x0102030405060708, 0x1112131415161718, 0x21)], [0x31323334])
    row = bytes.fromhex("0807060504030201 1817161514131211 34333231 21000000")
    assert table.tobytes() == row


@given(st.lists(st.tuples(st.integers(1, 9000), st.integers(0, 99)), min_size=1, max_size=5))
def test_chunks_cover_each_region_once_in_order(shapes: list[tuple[int, int]]) -> None:
    regions = tuple(
        Region(ADDRESS + 2**32 * i, num_bytes + pad, num_bytes)
        for i, (num_bytes, pad) in enumerate(shapes)
    )
    layout = BlockLayout(7, regions)
    rest = chunk_table(layout.regions, layout.offsets).tolist()
    for region, offset in zip(layout.regions, layout.offsets, strict=True):
        done = 0
        while done < region.block_bytes:
            length = min(CHUNK_BYTES, region.block_bytes - done)
            stride = region.block_stride_bytes
            assert rest.pop(0) == (region.base_address + done, stride, offset + done, length)
            done += length
    assert rest == []


def test_table_accepts_a_slot_up_to_its_bound() -> None:
    table = chunk_table([Region(2**62, 2**61, 4095)], [2**32 - 4096])
    assert table.dtype == CHUNK_DTYPE
    assert table[-1].item() == (2**62 + 2048, 2**61, 2**32 - 2048, 2047)


@pytest.mark.parametrize(
    ("sizes", "offsets", "named"),
    [
        ([], [], "0 regions but 0 offsets"),
        ([16, 16], [0], "2 regions but 1 offsets"),
        ([16, 2**32], [0, 16], r"regions\[1\] ends at byte 4294967312 of the slot"),
        ([16, 4096], [0, 2**32 - 4096], r"regions\[1\] ends at byte 4294967296 of the slot"),
        ([16, 16], [0, -16], r"offsets\[1\] is -16"),
        ([16, 16], [0, 2**32], r"offsets\[1\] is 4294967296"),
        ([16], [0.0], r"offsets\[0\] must be an integer"),
    ],
)
def test_table_refuses(sizes: list[int], offsets: list[int], named: str) -> None:
    regions = [Region(ADDRESS * (i + 1), size, size) for i, size in enumerate(sizes)]
    with pytest.raises(ConfigError, match=named):
        chunk_table(regions, offsets)


def by_definition(slot: bytes) -> int:
    total = 0
    for position, byte in enumerate(slot):
        mixed = (position // 4 + 1) * 0x9E3779B1 % 2**32
        total += (byte << 8 * (position % 4)) * (mixed ^ mixed >> 16)
    return total % 2**64


@given(st.lists(st.binary(min_size=21, max_size=21), max_size=3))
def test_checksum_equals_its_definition(slots: list[bytes]) -> None:
    array = np.frombuffer(b"".join(slots), dtype=np.uint8).reshape(len(slots), 21)
    assert checksum(array).tolist() == [by_definition(slot) for slot in slots]


def test_checksum_wraps() -> None:
    slot = np.full((1, 1 << 16), 255, dtype=np.uint8)
    assert checksum(slot).tolist() == [by_definition(slot.tobytes())]


def sum_with(words: dict[int, int]) -> int:
    """Return the checksum of a slot that is 0 except for these words."""
    slot = np.zeros((1, max(words) + 1), dtype="<u4")
    for at, word in words.items():
        slot[0, at] = word
    return int(checksum(slot.view(np.uint8))[0])


positions = st.integers(0, 2**17)
words = st.integers(0, 2**32 - 1) | st.integers(0, 31).map(lambda bit: 1 << bit)


# The sum is linear, so all other words can be 0.
@given(positions, words, words)
def test_one_changed_word_changes_the_checksum(at: int, before: int, after: int) -> None:
    assert (sum_with({at: before}) == sum_with({at: after})) == (before == after)


@given(st.lists(positions, min_size=2, max_size=2, unique=True), words, words)
def test_two_swapped_words_change_the_checksum(at: list[int], first: int, second: int) -> None:
    i, j = at
    assert (sum_with({i: first, j: second}) == sum_with({i: second, j: first})) == (first == second)


@pytest.mark.parametrize(
    "slots", [np.zeros(8, dtype=np.uint8), np.zeros((2, 8), dtype=np.int8), np.zeros((2, 2, 2))]
)
def test_checksum_refuses(slots: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> None:
    with pytest.raises(ConfigError, match=r"slots is .* pass bytes of shape"):
        checksum(slots)
