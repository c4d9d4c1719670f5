from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstow import ConfigError
from kvstow.replay import TraceRequest
from kvstow.replay.content import GARBAGE, Content, Geometry, GroupMemory, device_memory
from kvstow.replay.keys import block_digests, digest_words

GEOMETRIES = [
    Geometry(512, num_layers=2, bytes_per_token=8),  # the default: 2 bytes a token and region
    Geometry(512, num_layers=1, bytes_per_token=2),  # 1 byte
    Geometry(16, num_layers=3, bytes_per_token=6 * 12),  # a word and a half
    Geometry(16, num_layers=2, bytes_per_token=4 * 32),  # whole words
]
geometries = pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)

SOME_KEY = 0x0123456789ABCDEF


def keys(*values: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.array(values, dtype=np.uint64)


def memory_of(num_blocks: int, geometry: Geometry) -> GroupMemory:
    """Return the memory of a device with one group."""
    [memory] = device_memory(num_blocks, [geometry])
    return memory


def word_of(key: int, place: int) -> int:
    """Return a word as the head of the module defines it, computed with Python integers."""
    mask, odd = 2**64 - 1, 0x9E3779B97F4A7C15
    x = (place + 1) * odd & mask
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
    word = (key ^ x ^ x >> 31) * odd & mask
    return word ^ word >> 32


@geometries
def test_all_words_of_a_block_differ(geometry: Geometry) -> None:
    words = Content(geometry).blocks(keys(SOME_KEY, SOME_KEY ^ 1))

    assert words.shape == (2, geometry.num_regions, geometry.region_bytes // 8)
    assert len(np.unique(words)) == words.size
    assert words.reshape(2, -1)[0].tolist() == [
        word_of(SOME_KEY, place) for place in range(words[0].size)
    ]


@given(st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=20, unique=True))
def test_blocks_of_two_keys_differ_in_every_word(values: list[int]) -> None:
    words = Content(GEOMETRIES[0]).blocks(keys(*values)).reshape(len(values), -1)

    assert all(len(np.unique(column)) == len(values) for column in words.T)


@geometries
def test_tokens_written_one_by_one_make_a_whole_block(geometry: Geometry) -> None:
    memory = memory_of(4, geometry)
    blocks, asked = np.array([3, 1]), keys(SOME_KEY, 7)
    for offset in range(geometry.block_size):
        assert memory.wrong_blocks(blocks, asked).all()
        memory.write_tokens(blocks, asked, np.array([offset, offset]))

    assert not memory.wrong_blocks(blocks, asked).any()
    assert memory.wrong_blocks(blocks, asked[::-1]).all()
    assert all((region[[0, 2]] == GARBAGE).all() for region in memory.regions)


@geometries
@given(cuts=st.lists(st.integers(0, 2000), max_size=6), blocks=st.permutations(range(1, 5)))
def test_chunks_of_any_size_make_the_same_bytes(
    geometry: Geometry, cuts: list[int], blocks: list[int]
) -> None:
    size, token_bytes = geometry.block_size, geometry.region_token_bytes
    table, asked = np.array(blocks, dtype=np.int32), keys(1, 2, 3, SOME_KEY)
    memory = memory_of(5, geometry)
    whole = [Content(geometry).block_bytes(key) for key in asked]
    expected = np.full((geometry.num_regions, 5, geometry.region_bytes), GARBAGE, dtype=np.uint8)
    ends = sorted({cut % (4 * size) for cut in cuts} | {0, 4 * size})
    for start, stop in pairwise(ends):
        memory.write_range(table, asked, start, stop)
        for token in range(start, stop):
            part = slice(token % size * token_bytes, (token % size + 1) * token_bytes)
            expected[:, blocks[token // size], part] = whole[token // size][:, part]
        assert np.array_equal(np.stack(memory.regions), expected)

    assert not memory.wrong_blocks(table, asked).any()


@geometries
def test_a_part_is_checked_to_its_last_token_only(geometry: Geometry) -> None:
    memory = memory_of(2, geometry)
    table, asked = np.array([1]), keys(SOME_KEY)
    memory.write_range(table, asked, 0, 5)

    assert not memory.wrong_part(1, asked[0], 5)
    assert memory.wrong_part(1, asked[0], 6)
    assert memory.wrong_part(1, asked[0] + np.uint64(1), 5)
    memory.regions[-1][1, 5 * geometry.region_token_bytes - 1] ^= 1
    assert memory.wrong_part(1, asked[0], 5)
    assert not memory.wrong_part(1, asked[0], 4)


@geometries
def test_any_flipped_bit_is_found(geometry: Geometry) -> None:
    memory = memory_of(2, geometry)
    table, asked = np.array([1]), keys(SOME_KEY)
    memory.write_range(table, asked, 0, geometry.block_size)
    for region in memory.regions:
        for byte in (0, geometry.region_bytes // 2, geometry.region_bytes - 1):
            region[1, byte] ^= 0x10
            assert memory.wrong_blocks(table, asked).all()
            region[1, byte] ^= 0x10
    assert not memory.wrong_blocks(table, asked).any()


# -- several groups ----------------------------------------------------------------------------

UNEQUAL = [Geometry(16, 1, 16), Geometry(16, 3, 24), Geometry(16, 2, 16)]


def test_blocks_of_two_groups_differ_in_every_word() -> None:
    words = [Content(UNEQUAL[0], group).blocks(keys(SOME_KEY)) for group in range(4)]

    assert len(np.unique(words)) == np.size(words)


def test_blocks_of_two_ranks_differ_in_every_word() -> None:
    words = [
        memory.content.blocks(keys(SOME_KEY))
        for rank in range(3)
        for memory in device_memory(1, [UNEQUAL[0]] * 2, rank)
    ]

    assert len(np.unique(words)) == np.size(words)


@pytest.mark.parametrize("writer", range(3))
def test_a_block_overlays_only_blocks_with_its_id(writer: int) -> None:
    ids, asked = np.array([1, 2, 3]), keys(1, 2, 3)
    memory = device_memory(4, UNEQUAL)
    assert memory[writer].regions[0].shape == (4, UNEQUAL[writer].region_bytes)
    for other in {0, 1, 2} - {writer}:
        memory[other].write_range(ids, asked, 0, 48)
        memory[writer].write_range(ids[1:2], keys(9), 0, 16)

        assert memory[other].wrong_blocks(ids, asked).tolist() == [False, True, False]
        assert not memory[writer].wrong_blocks(ids[1:2], keys(9)).any()


@pytest.mark.parametrize(
    ("layers", "bytes_per_token", "problem"),
    [
        (0, 8, "layers is 0"),
        (2, 0, "bytes-per-token is 0"),
        (2, 6, "bytes-per-token is 6; it must be a multiple of 4"),
    ],
)
def test_an_invalid_geometry_is_refused(layers: int, bytes_per_token: int, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Geometry(512, layers, bytes_per_token)
    with pytest.raises(ConfigError, match="takes 1 bytes per K or V"):
        Geometry(1, 1, 2)


@pytest.mark.parametrize("block_size", [1, 10, 17, 20, 528])
@pytest.mark.parametrize("layers", [1, 3])
def test_a_geometry_without_whole_words_names_one_that_has_them(
    block_size: int, layers: int
) -> None:
    refused = []
    for times in range(1, 17):
        try:
            Geometry(block_size, layers, 2 * layers * times)
        except ConfigError as error:
            named = int(str(error).rpartition(" --bytes-per-token ")[2])
            assert named > 2 * layers * times
            Geometry(block_size, layers, named)
            refused.append(named)
    assert bool(refused) == (block_size % 8 != 0)


def request(line: int, prompt: int, output: int, *ids: int) -> TraceRequest:
    return TraceRequest(line, 0.0, prompt, output, ids)


def test_digests_follow_the_path_of_ids() -> None:
    first = block_digests(request(1, 48, 0, 5, 6, 7), 16)
    longer = block_digests(request(2, 50, 0, 5, 6, 7, 8), 16)
    moved = block_digests(request(3, 48, 0, 6, 5, 7), 16)

    assert first == longer[:3]
    assert len(set(first) | set(moved)) == 6


def test_generated_blocks_have_digests_of_their_request_only() -> None:
    """The block with the end of the prompt counts as generated, because it has generated tokens."""
    one = block_digests(request(1, 20, 30, 5, 6), 16)
    other = block_digests(request(2, 20, 30, 5, 6), 16)
    short = block_digests(request(3, 10, 30, 5), 16)

    assert len(one) == len(other) == 4  # of 50 tokens, the last one partial
    assert one[0] == other[0]
    assert len({*one, *other[1:], *short}) == 4 + 3 + 3
    assert one == block_digests(request(1, 20, 30, 5, 6), 16)
    assert not set(one) & set(block_digests(request(1, 20, 30, 7, 6), 16)), "not chained"


def test_digest_words_are_the_first_eight_bytes() -> None:
    digests = block_digests(request(1, 48, 0, 5, 6, 7), 16)

    assert digest_words(digests).tolist() == [
        int.from_bytes(digest[:8], "little") for digest in digests
    ]
    assert digest_words([]).size == 0
