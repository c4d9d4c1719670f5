"""Block layouts: the regions of a slot and of arrays, and refused regions."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstow._core import ConfigError
from kvstow.transfer import BlockLayout, Region

ADDRESS = 1 << 20


def test_slot_holds_the_regions_in_order_without_gaps() -> None:
    regions = (
        Region(ADDRESS, 64, 48),
        Region(ADDRESS + 4096, 16, 16),
        Region(ADDRESS + 48, 64, 16),
    )
    layout = BlockLayout(8, regions)
    assert layout.slot_bytes == 48 + 16 + 16
    assert layout.offsets == (0, 48, 64)
    assert layout.regions == regions


def test_numpy_integers_become_ints() -> None:
    region = Region(np.int64(ADDRESS), np.uint32(16), np.int32(16))  # type: ignore[arg-type]
    assert type(region.base_address) is int
    assert type(region.block_bytes) is int
    assert type(BlockLayout(np.int64(2), (region,)).num_blocks) is int  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("numbers", "named"),
    [
        ((-1, 16, 16), "base_address is -1"),
        ((0, 16, 16), "base_address is 0"),
        ((2**63, 16, 16), "base_address is 9223372036854775808"),
        ((ADDRESS, 16, 0), "block_bytes is 0"),
        ((ADDRESS, 16, -16), "block_bytes is -16"),
        ((ADDRESS, 0, 16), "block_stride_bytes is 0"),
        ((ADDRESS, 15, 16), "block_stride_bytes is 15, below block_bytes 16"),
        ((ADDRESS, 16.0, 16), "block_stride_bytes must be an integer, got 16.0"),
        ((ADDRESS, 16, True), "block_bytes must be an integer, got True"),
        ((None, 16, 16), "base_address must be an integer, got None"),
    ],
)
def test_region_refuses(numbers: tuple[int, int, int], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Region(*numbers)


@pytest.mark.parametrize("num_blocks", [0, -1, 2**31, 1.5, True])
def test_layout_refuses_num_blocks(num_blocks: int) -> None:
    with pytest.raises(ConfigError, match=r"num_blocks .*null block"):
        BlockLayout(num_blocks, (Region(ADDRESS, 16, 16),))


def test_layout_refuses_what_is_not_a_region() -> None:
    with pytest.raises(ConfigError, match="regions has 0 entries, expected at least 1"):
        BlockLayout(4, ())
    with pytest.raises(ConfigError, match=r"regions\[1\] is a tuple"):
        BlockLayout(4, (Region(ADDRESS, 16, 16), (ADDRESS, 16, 16)))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"regions\[0\] ends at \d+, past the last address"):
        BlockLayout(2**31 - 1, (Region(2**62, 2**40, 1),))


@st.composite
def two_regions(draw: st.DrawFn) -> tuple[Region, Region, int]:
    num_blocks = draw(st.integers(1, 6))
    regions = []
    for _ in range(2):
        block_bytes = draw(st.integers(1, 6))
        stride = draw(st.sampled_from([block_bytes, 12, 16]) | st.integers(block_bytes, 20))
        stride = max(stride, block_bytes)
        regions.append(Region(ADDRESS + draw(st.integers(0, 60)), stride, block_bytes))
    return regions[0], regions[1], num_blocks


def bytes_of(region: Region, num_blocks: int) -> set[int]:
    return {
        region.base_address + block * region.block_stride_bytes + byte
        for block in range(num_blocks)
        for byte in range(region.block_bytes)
    }


@settings(max_examples=2000)
@given(two_regions())
def test_regions_are_refused_exactly_when_they_share_a_byte(
    case: tuple[Region, Region, int],
) -> None:
    a, b, num_blocks = case
    if bytes_of(a, num_blocks) & bytes_of(b, num_blocks):
        with pytest.raises(ConfigError, match=r"regions\[0\] and regions\[1\] share bytes"):
            BlockLayout(num_blocks, (a, b))
    else:
        assert BlockLayout(num_blocks, (a, b)).slot_bytes == a.block_bytes + b.block_bytes


def test_error_names_the_pair_of_regions_that_share_bytes() -> None:
    regions = [Region(ADDRESS + 1024 * i, 16, 16) for i in range(9)]
    regions[7] = Region(regions[2].base_address + 24, 16, 8)
    with pytest.raises(ConfigError, match=r"regions\[2\] and regions\[7\] share bytes"):
        BlockLayout(4, tuple(regions))


def test_interleaved_layers_of_one_allocation_are_accepted() -> None:
    regions = tuple(Region(ADDRESS + 64 * i, 64 * 80, 64) for i in range(80))
    assert BlockLayout(1_000_000, regions).slot_bytes == 64 * 80


def test_from_arrays_finds_each_block_row() -> None:
    kv = np.zeros((2, 5, 3, 4), dtype=np.float16)
    padded = np.zeros((5, 32), dtype=np.uint8)[:, 4:20]
    layout = BlockLayout.from_arrays([kv[0], kv[1], padded])
    assert layout.num_blocks == 5
    assert layout.regions == (
        Region(kv.ctypes.data, 24, 24),
        Region(kv.ctypes.data + 5 * 24, 24, 24),
        Region(padded.ctypes.data, 32, 16),
    )


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_layout_is_made_of_values_and_generators(kind: str) -> None:
    make: Any = pytest.importorskip(kind).zeros
    layers = {"layer 0": make((5, 8)), "layer 1": make((5, 8))}
    build: Any = BlockLayout.from_arrays if kind == "numpy" else BlockLayout.from_tensors
    expected = build(list(layers.values()))
    for several in layers.values(), (layer for layer in layers.values()):
        layout = build(several)
        assert layout == expected
        assert layout.num_blocks == 5
        assert list(map(id, layout.owners)) == list(map(id, layers.values()))


def test_one_array_is_no_list_of_arrays() -> None:
    """It would pass as a list of its blocks, and wrong bytes would come back."""
    with pytest.raises(ConfigError, match=r"one object of shape \(9, 16, 2\).*pass \[arrays\] if"):
        BlockLayout.from_arrays(np.zeros((9, 16, 2)))  # type: ignore[arg-type]


def test_the_error_for_an_array_of_all_layers_names_the_way_that_works() -> None:
    kv = np.zeros((4, 9, 16, 2))
    with pytest.raises(ConfigError, match=r"list\(arrays\) if it counts layers, or K and V"):
        BlockLayout.from_arrays(kv)  # type: ignore[arg-type]
    layout = BlockLayout.from_arrays(list(kv))
    assert (layout.num_blocks, len(layout.regions)) == (9, 4)


def test_from_arrays_accepts_scalars_per_block_and_a_single_block() -> None:
    assert BlockLayout.from_arrays([np.zeros(6, dtype=np.int32)[::3]]).regions[0].block_bytes == 4
    single = np.zeros((4, 8), dtype=np.uint8)[::-1][:1]
    assert BlockLayout.from_arrays([single]).regions == (Region(single.ctypes.data, 8, 8),)


def test_layout_is_never_copied_without_its_memory() -> None:
    layout = BlockLayout.from_arrays([np.zeros((4, 8), np.uint8)])
    with pytest.raises(TypeError, match=r"deep-copied, .*: share this one, or copy the memory"):
        copy.deepcopy({"layouts": [layout]})
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(TypeError, match=r"pickled, .*: call .* in the process that copies"):
            pickle.dumps([layout], protocol)
    assert copy.copy(layout) is layout


def test_from_arrays_keeps_the_memory_alive() -> None:
    array = np.zeros((4, 16), dtype=np.uint8)
    gone = weakref.ref(array)
    layout = BlockLayout.from_arrays([array])
    del array
    gc.collect()
    assert gone() is not None
    del layout
    gc.collect()
    assert gone() is None


def read_only() -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    array = np.zeros((4, 8), dtype=np.uint8)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("array", "named"),
    [
        (np.zeros((4, 8), dtype=np.uint8).T, "not contiguous"),
        (np.zeros((4, 8, 2), dtype=np.uint8)[:, ::2], "not contiguous"),
        (np.zeros((4, 8), dtype=np.uint8)[::-1], "not contiguous"),
        (
            np.lib.stride_tricks.as_strided(np.zeros(64, dtype=np.uint8), (4, 16), (8, 1)),
            "not cont",
        ),
        (np.zeros((0, 8), dtype=np.uint8), "holds no block"),
        (np.zeros((4, 0), dtype=np.uint8), "holds no block"),
        (np.array(1, dtype=np.uint8), "holds no block"),
        (np.zeros((4, 8), dtype=object), "Python objects"),
        (read_only(), "read-only"),
        (np.broadcast_to(np.zeros(8, dtype=np.uint8), (4, 8)), "read-only"),
        ([[0] * 8] * 4, "is of type list"),
    ],
)
def test_from_arrays_refuses(
    array: np.ndarray[tuple[int, ...], np.dtype[np.uint8]], named: str
) -> None:
    with pytest.raises(ConfigError, match=rf"arrays\[1\] .*{named}"):
        BlockLayout.from_arrays([np.zeros((4, 8), dtype=np.uint8), array])


def test_from_arrays_refuses_what_is_no_list() -> None:
    arrays: Any = None
    with pytest.raises(ConfigError, match="arrays is of type NoneType, expected a list"):
        BlockLayout.from_arrays(arrays)


def test_each_way_to_make_a_layout_names_the_other_one() -> None:
    torch = pytest.importorskip("torch")
    array = np.zeros((4, 8), dtype=np.uint8)
    with pytest.raises(
        ConfigError, match=r"is of type Tensor, .*: pass torch tensors to from_tensors"
    ):
        BlockLayout.from_arrays([torch.zeros(4, 8)])
    with pytest.raises(
        ConfigError, match=r"is of type ndarray, .*: pass numpy arrays to from_arrays"
    ):
        BlockLayout.from_tensors([array])  # type: ignore[list-item]


def test_from_arrays_refuses_arrays_of_different_pools() -> None:
    four, five = np.zeros((4, 8), dtype=np.uint8), np.zeros((5, 8), dtype=np.uint8)
    with pytest.raises(ConfigError, match=r"differ in num_blocks.*\[4, 5\]"):
        BlockLayout.from_arrays([four, five])
    with pytest.raises(ConfigError, match=r"regions\[0\] and regions\[1\] share bytes"):
        BlockLayout.from_arrays([four, four])
    with pytest.raises(ConfigError, match="regions has 0 entries, expected at least 1"):
        BlockLayout.from_arrays([])
