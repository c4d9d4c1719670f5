"""`row_checksums` against `zlib.crc32`, and `row_digests` against the xxhash library."""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt
import pytest
import xxhash

from kvstow._core import ConfigError, row_checksums, row_digests

Bytes = npt.NDArray[np.uint8]


def random_rows(num_rows: int, row_bytes: int) -> Bytes:
    return np.random.default_rng(row_bytes).integers(0, 256, (num_rows, row_bytes), np.uint8)


@pytest.mark.parametrize("row_bytes", [0, 1, 15, 16, 63, 64, 65, 127, 4096, 100_003])
def test_checksums_equal_those_of_zlib(row_bytes: int) -> None:
    rows = random_rows(5, row_bytes)
    found = row_checksums(rows, range(5))
    assert found.dtype == np.uint32
    assert found.tolist() == [zlib.crc32(row.tobytes()) for row in rows]


@pytest.mark.parametrize(
    "row_bytes",
    [0, 1, 16, 17, 120, 128, 129, 240, 241, 1024, 1025, 2047, 2048, 2049, 4096, 100_003],
)
def test_digests_are_xxh3(row_bytes: int) -> None:
    rows = random_rows(5, row_bytes)
    found = row_digests(rows, [4, 0, 2])
    assert found.dtype == np.uint64
    assert found.tolist() == [xxhash.xxh3_64_intdigest(rows[at].tobytes()) for at in (4, 0, 2)]


def test_zeros_have_no_digest_of_zero() -> None:
    """An unused frame is zeros, and must not pass as a sound one."""
    assert row_digests(np.zeros((1, 120), np.uint8), [0])[0] != 0


def test_rows_larger_than_a_batch_are_read_whole() -> None:
    rows = random_rows(2, (64 << 20) + 3)
    assert row_checksums(rows, [1, 0]).tolist() == [zlib.crc32(rows[1]), zlib.crc32(rows[0])]


def test_many_small_rows_keep_their_order_across_batches() -> None:
    rows = random_rows(70, 1 << 20)
    order = np.random.default_rng(0).permutation(70)
    assert row_checksums(rows, order).tolist() == [zlib.crc32(rows[at]) for at in order]


def test_rows_may_be_padded_reversed_repeated_or_read_only() -> None:
    rows = random_rows(8, 64)[::-2, :40]
    rows.flags.writeable = False
    assert row_checksums(rows, [3, 0, 3]).tolist() == [zlib.crc32(rows[at]) for at in (3, 0, 3)]


def test_no_rows_give_no_checksums() -> None:
    assert row_checksums(random_rows(4, 8), []).tolist() == []
    assert row_checksums(np.empty((0, 8), np.uint8), []).tolist() == []


@pytest.mark.parametrize(
    "rows",
    [random_rows(4, 8)[:, ::2], random_rows(4, 8)[:, ::-1], random_rows(4, 8).T],
    ids=["every second byte", "reversed bytes", "transposed"],
)
def test_rows_that_are_not_contiguous_are_refused(rows: Bytes) -> None:
    with pytest.raises(ConfigError, match="not contiguous: pass a copy"):
        row_checksums(rows, [0])


@pytest.mark.parametrize("rows", [np.zeros((2, 2), np.int8), np.zeros(2, np.uint8), [[1, 2]]])
def test_other_arrays_are_refused(rows: Bytes) -> None:
    with pytest.raises(ConfigError, match="two-dimensional uint8 array"):
        row_checksums(rows, [0])


@pytest.mark.parametrize("row_id", [-1, 4, 1 << 70])
def test_a_row_outside_the_array_is_refused(row_id: int) -> None:
    with pytest.raises(ConfigError, match=r"must be 0 to|not in an array of 4 rows"):
        row_checksums(random_rows(4, 8), [row_id])
