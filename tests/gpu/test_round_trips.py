"""Stored bytes return unchanged, and transfers touch no other byte of all memory."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
from tests.gpu.memory import LAYOUTS, Path, World, all_bytes, world

from kvstow.transfer import READY

# From less than a warp's access to more than a chunk; 16 does not divide all of them.
SIZES = [64, 1000, 4096, 4104, 16 << 10, 18 << 10, 20_003, 128 << 10]


def _pairs(seed: int, num_blocks: int, num_slots: int) -> tuple[list[int], list[int]]:
    """Return shuffled blocks, and slots of which some are consecutive."""
    chances = random.Random(seed)
    ids = chances.sample(range(1, num_blocks), num_blocks // 2)
    slots = sorted(chances.sample(range(num_slots), len(ids)))
    chances.shuffle(slots)
    return ids, slots


def _expect_only(found: np.ndarray, before: np.ndarray, slots: Sequence[int]) -> None:
    others = np.delete(np.arange(len(before)), slots)
    assert np.array_equal(found[others], before[others])


def _round_trip(w: World, seed: int) -> None:
    ids, slots = _pairs(seed, w.cache.layout.num_blocks, w.arena.num_slots)
    block_bytes = w.cache.layout.slot_bytes
    device, host = w.cache.bytes(), all_bytes(w.arena).copy()
    w.mover.store(ids, slots, after=READY).wait(60)
    found = all_bytes(w.arena).copy()
    for block, slot in zip(ids, slots, strict=True):
        assert np.array_equal(found[slot, :block_bytes], w.cache.slot(device, block))
    _expect_only(found, host, slots)
    if w.arena.slot_stride_bytes > 2 * block_bytes:  # copies include small padding
        rest = slice(block_bytes + 16, None)
        assert np.array_equal(found[slots, rest], host[slots, rest])
    assert np.array_equal(w.cache.bytes(), device), "a store wrote to the device"

    others = random.Random(seed + 1).sample(range(1, w.cache.layout.num_blocks), len(ids))
    w.mover.load(slots, others, after=READY).wait(60)
    for slot, block in zip(slots, others, strict=True):
        w.cache.put(device, block, found[slot])
    assert np.array_equal(w.cache.bytes(), device)
    assert np.array_equal(all_bytes(w.arena), found), "a load wrote to the host"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("path", ["packed", "direct"])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_round_trip_of_every_layout_and_size(kind: str, path: Path, size: int) -> None:
    with world(kind, fragment_bytes=size, path=path) as w:
        _round_trip(w, size)


@pytest.mark.parametrize("path", ["packed", "direct"])
def test_round_trip_of_fragments_of_2_mib(path: Path) -> None:
    with world(fragment_bytes=2 << 20, num_blocks=8, num_slots=9, path=path) as w:
        _round_trip(w, 0)


@pytest.mark.parametrize("path", ["packed", "direct"])
def test_round_trip_through_unpinned_memory(path: Path) -> None:
    with world(is_pinned=False, path=path) as w:
        _round_trip(w, 0)


@pytest.mark.parametrize("path", ["packed", "direct"])
def test_round_trip_through_slots_of_larger_blocks(path: Path) -> None:
    with world(slot_factor=4, path=path) as w:
        assert w.arena.slot_stride_bytes > 2 * w.cache.layout.slot_bytes
        _round_trip(w, 0)


def test_round_trip_of_one_block_and_of_all_blocks() -> None:
    with world(num_blocks=24, num_slots=23) as w:
        device = w.cache.bytes()
        w.mover.store([5], [0], after=READY).wait(60)
        assert np.array_equal(w.arena.slots[0], w.cache.slot(device, 5))
        w.mover.store(list(range(1, 24)), list(range(23)), after=READY).wait(60)
        for block in range(1, 24):
            assert np.array_equal(w.arena.slots[block - 1], w.cache.slot(device, block))


def test_job_without_blocks_has_ended() -> None:
    with world() as w:
        w.mover.store([], [], after=READY).wait(60)
        w.mover.load([], [], after=READY).wait(60)
