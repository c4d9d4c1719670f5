"""The host arena: shape, alignment, prefault, close, and sizes that no machine has."""

from __future__ import annotations

import gc
import os
import sys

import numpy as np
import pytest

from kvstow._core import ConfigError, StateError
from kvstow.transfer import HostArena


def resident_bytes() -> int:
    """Collect the garbage of earlier tests, and return the resident bytes of this process."""
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("slot_bytes", "stride"),
    [(1, 4096), (4095, 4096), (4096, 4096), (4097, 8192), (70_000, 73_728)],
)
def test_slots_are_aligned_rows(slot_bytes: int, stride: int) -> None:
    with HostArena(5, slot_bytes) as arena:
        assert arena.slots.shape == (5, slot_bytes)
        assert arena.slots.dtype == np.uint8
        assert arena.slots.strides == (stride, 1)
        assert (arena.num_slots, arena.slot_bytes, arena.slot_stride_bytes) == (
            5,
            slot_bytes,
            stride,
        )
        assert arena.num_bytes == 5 * stride
        assert arena.base_address % 4096 == 0
        assert arena.slots.ctypes.data == arena.base_address
        assert not arena.slots.any()
        arena.slots[:] = np.arange(1, 6, dtype=np.uint8)[:, None]
        assert (arena.slots == np.arange(1, 6)[:, None]).all()


@pytest.mark.skipif(
    not os.path.exists("/sys/kernel/mm/transparent_hugepage"), reason="a kernel without large pages"
)
def test_memory_asks_for_large_pages() -> None:
    with HostArena(4, 4 << 20) as arena, open("/proc/self/smaps") as lines:
        flags: list[str] = []
        is_arena = False
        for line in lines:
            first, *rest = line.split()
            if "-" in first:
                begin, end = (int(at, 16) for at in first.split("-"))
                is_arena = begin <= arena.base_address < end
            elif is_arena and first == "VmFlags:":
                flags = rest
    assert "hg" in flags


@pytest.mark.parametrize(
    ("slot_bytes", "slots_per_run", "stride"),
    [
        (1000, 1, 4096),
        (1000, 2, 2048),
        (1000, 4, 1024),
        (1024, 16, 1024),
        (1025, 16, 1280),
        (1, 1024, 64),  # padded to a cache line, not less
        (1000, 6, 2048),  # padded to 4096 / gcd(6, 4096)
        (1000, 3, 4096),
        (70_000, 4, 70_656),
    ],
)
def test_runs_of_slots_begin_at_4_kib_with_little_padding(
    slot_bytes: int, slots_per_run: int, stride: int
) -> None:
    with HostArena(3 * slots_per_run, slot_bytes, slots_per_run=slots_per_run) as arena:
        assert (arena.slot_stride_bytes, arena.slots_per_run) == (stride, slots_per_run)
        assert arena.slots.shape == (3 * slots_per_run, slot_bytes)
        runs = arena.base_address + np.arange(3) * slots_per_run * arena.slots.strides[0]
        assert not (runs % 4096).any()


@pytest.mark.parametrize(
    ("slots_per_run", "named"),
    [
        (0, "slots_per_run is 0, outside 1 to 6"),
        (7, "slots_per_run is 7"),
        (4, "num_slots is 6, not a multiple of slots_per_run"),
    ],
)
def test_impossible_runs_are_refused(slots_per_run: int, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        HostArena(6, 100, slots_per_run=slots_per_run)


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads Linux's statm")
def test_prefault_touches_all_pages_that_otherwise_take_no_memory() -> None:
    num_slots, slot_bytes = 64, 1 << 20
    before = resident_bytes()
    with HostArena(num_slots, slot_bytes) as arena:
        assert resident_bytes() - before < arena.num_bytes // 8
    before = resident_bytes()
    with HostArena(num_slots, slot_bytes, num_prefault_threads=2) as arena:
        assert resident_bytes() - before > arena.num_bytes * 7 // 8
        assert not arena.slots.any()
        held = resident_bytes()
    assert held - resident_bytes() > num_slots * slot_bytes * 7 // 8


def test_prefault_reaches_past_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstow.transfer.arena._PREFAULT_CHUNK_BYTES", 3 * 4096)
    before = resident_bytes()
    with HostArena(4096, 4096, num_prefault_threads=3):
        assert resident_bytes() - before > 4096 * 4096 * 7 // 8


def test_closed_arena_refuses_every_use() -> None:
    arena = HostArena(2, 100)
    assert not arena.closed
    arena.close()
    arena.close()
    assert arena.closed
    with pytest.raises(StateError, match="closed"):
        _ = arena.slots
    with pytest.raises(StateError, match="closed"):
        _ = arena.base_address


def test_view_outlives_close() -> None:
    with HostArena(2, 100) as arena:
        view = arena.slots
    view[1] = 7
    assert (view[1] == 7).all()
    assert arena.closed


@pytest.mark.parametrize(
    ("num_slots", "slot_bytes", "num_threads", "named"),
    [
        (0, 4096, 0, "num_slots is 0"),
        (-1, 4096, 0, "num_slots is -1"),
        (2**31, 4096, 0, "num_slots is 2147483648"),
        (2.0, 4096, 0, "num_slots must be an integer, got 2.0"),
        (2, 0, 0, "slot_bytes is 0"),
        (2, -4096, 0, "slot_bytes is -4096"),
        (2, "4096", 0, "slot_bytes must be an integer, got '4096'"),
        (2, 4096, -1, "num_prefault_threads is -1"),
        (2, 4096, 10**6, "num_prefault_threads is 1000000"),
    ],
)
def test_error_names_the_bad_number(
    num_slots: int, slot_bytes: int, num_threads: int, named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        HostArena(num_slots, slot_bytes, num_prefault_threads=num_threads)


@pytest.mark.parametrize("source", [5, (5,), ("a", "b"), "ab", (3, 1.5)])
@pytest.mark.parametrize("name", ["file", "shared"])
def test_error_names_what_is_no_source_of_memory(name: str, source: object) -> None:
    with pytest.raises(ConfigError, match=rf"^{name} is .*; pass "):
        HostArena(2, 4096, **{name: source})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num_slots", "slot_bytes"), [(2**31 - 1, 1 << 30), (4, sys.maxsize // 2), (1, sys.maxsize)]
)
def test_error_of_too_much_memory_names_the_request(num_slots: int, slot_bytes: int) -> None:
    stride = -(-slot_bytes // 4096) * 4096
    with pytest.raises(
        ConfigError, match=rf"{num_slots * stride} bytes .* lower num_slots"
    ) as raised:
        HostArena(num_slots, slot_bytes)
    assert f"{num_slots} slots of {stride} bytes" in str(raised.value)
