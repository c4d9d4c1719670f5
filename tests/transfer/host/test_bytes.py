"""The host mover copies each byte to its place, and touches no other."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.transfer.host.memory import LONG_S, Bytes, Setup

from kvstow.transfer import (
    READY,
    BlockLayout,
    Event,
    HostArena,
    HostEvent,
    HostMover,
    Region,
    Ticket,
)
from kvstow.transfer.host import mover as host_mover
from kvstow.transfer.mover import Direction, Index


@st.composite
def memories(draw: st.DrawFn) -> tuple[Bytes, tuple[Region, ...], int]:
    """Draw random memory and its regions: strided, with gaps, some interleaved."""
    num_blocks = draw(st.integers(2, 7))
    extents = []  # (offset, stride, block_bytes)
    end = draw(st.integers(0, 5))
    sizes = draw(
        st.lists(st.integers(1, 40) | st.sampled_from([64, 600, 8300]), min_size=1, max_size=3)
    )
    for block_bytes in draw(st.lists(st.sampled_from(sizes), min_size=1, max_size=4)):
        num_interleaved = draw(st.integers(1, 3))
        stride = num_interleaved * block_bytes + draw(st.sampled_from([0, 0, 1, 8, 33]))
        extents += [(end + i * block_bytes, stride, block_bytes) for i in range(num_interleaved)]
        end += num_blocks * stride + draw(st.sampled_from([0, 1, 16, 100]))
    memory = np.random.default_rng(draw(st.integers(0, 2**32))).integers(0, 256, end, np.uint8)
    order = draw(st.permutations(range(len(extents))))
    regions = (Region(memory.ctypes.data + extents[i][0], *extents[i][1:]) for i in order)
    return memory, tuple(regions), num_blocks


def whole_arena(arena: HostArena) -> Bytes:
    """Return all memory of an arena with its padding, shape [num_slots, slot_stride_bytes]."""
    shape = (arena.num_slots, arena.slot_stride_bytes)
    return np.lib.stride_tricks.as_strided(arena.slots, shape, (arena.slot_stride_bytes, 1))


def positions(base: int, layout: BlockLayout, block_id: int) -> list[int]:
    """Return the positions of a block's bytes in the memory at `base`, in the order of a slot."""
    return [
        region.base_address - base + block_id * region.block_stride_bytes + byte
        for region in layout.regions
        for byte in range(region.block_bytes)
    ]


@given(
    memories(),
    st.integers(1, 9),
    st.sampled_from([0, 1 << 18]),
    st.data(),
)
def test_blocks_arrive_and_nothing_else_changes(
    made: tuple[Bytes, tuple[Region, ...], int],
    num_slots: int,
    brief_bytes: int,
    data: st.DataObject,
) -> None:
    memory, regions, num_blocks = made
    layout = BlockLayout(num_blocks, regions, owners=(memory,))
    # Stores copy any blocks, also repeated ones, to distinct slots. Loads do the reverse.
    slots = data.draw(st.lists(st.integers(0, num_slots - 1), unique=True))
    stored = data.draw(
        st.lists(st.integers(1, num_blocks - 1), min_size=len(slots), max_size=len(slots))
    )
    loaded = data.draw(st.lists(st.integers(1, num_blocks - 1), unique=True))
    sources = data.draw(
        st.lists(st.integers(0, num_slots - 1), min_size=len(loaded), max_size=len(loaded))
    )
    rest_bytes = data.draw(st.sampled_from([0, 0, 1, 5000]))  # the rest of a slot for larger blocks
    with (
        mock.patch.object(host_mover, "_BRIEF_BYTES", brief_bytes),  # 0: as a large job
        HostArena(num_slots, layout.slot_bytes + rest_bytes) as arena,
        HostMover(layout, arena) as mover,
    ):
        host = whole_arena(arena)
        host[:] = np.random.default_rng(0).integers(0, 256, host.shape, np.uint8)
        base = memory.ctypes.data
        device_want, host_want = memory.copy(), host.copy()

        mover.store(stored, slots, after=READY).wait(LONG_S)
        for block_id, slot in zip(stored, slots, strict=True):
            host_want[slot, : layout.slot_bytes] = memory[positions(base, layout, block_id)]
        assert np.array_equal(host, host_want)
        assert np.array_equal(memory, device_want)

        mover.load(sources, loaded, after=READY).wait(LONG_S)
        for slot, block_id in zip(sources, loaded, strict=True):
            device_want[positions(base, layout, block_id)] = host_want[slot, : layout.slot_bytes]
        assert np.array_equal(memory, device_want)
        assert np.array_equal(host, host_want)


@pytest.mark.parametrize("order", ["shuffled", "rising", "falling"])
@pytest.mark.parametrize(("block_bytes", "num_regions"), [(4096, 2), (65_536, 3), (96, 5)])
def test_large_jobs_arrive(order: str, block_bytes: int, num_regions: int) -> None:
    # Far more than a brief job, without a patch.
    num_blocks = (40 << 20) // (block_bytes * num_regions)
    made = Setup(num_blocks, num_blocks, block_bytes, num_regions)
    ids = np.arange(1, num_blocks, dtype=np.int32)
    slots = np.arange(num_blocks - 1, dtype=np.int32)
    if order == "shuffled":
        rng = np.random.default_rng(2)
        ids, slots = rng.permutation(ids), rng.permutation(slots)
    elif order == "falling":
        ids = ids[::-1]
    with made.mover as mover, made.arena as arena:
        want = np.concatenate([region[ids] for region in made.device], axis=1)
        last_slot = arena.slots[num_blocks - 1].copy()
        mover.store(ids, slots, after=READY).wait(LONG_S)
        assert np.array_equal(arena.slots[slots], want)
        assert np.array_equal(arena.slots[num_blocks - 1], last_slot)
        null_block = made.block(0)
        mover.load(slots, ids[::-1], after=READY).wait(LONG_S)
        got = np.concatenate([region[ids[::-1]] for region in made.device], axis=1)
        assert np.array_equal(got, want)
        assert np.array_equal(made.block(0), null_block)


def test_regions_anywhere_in_the_address_space_are_accepted() -> None:
    # Odd, far apart and large: one array over both would have more than 2**63 bytes for numpy.
    regions = (Region(4097, 1 << 22, 1 << 22), Region(2**46 + 4098, 1 << 22, 1 << 22))
    layout = BlockLayout(2, regions)
    with HostArena(1, layout.slot_bytes) as arena, HostMover(layout, arena) as mover:
        assert mover.layout is layout
        assert mover.arena is arena


def test_arrays_may_be_reused_after_submitting(setup: Setup) -> None:
    event = HostEvent()
    ids, slots = np.array([3, 5]), np.array([1, 0])
    want = [setup.block(3), setup.block(5)]
    ticket = setup.mover.store(ids, slots, after=event)
    ids[:], slots[:] = 1, 5
    event.set()
    ticket.wait(LONG_S)
    assert np.array_equal(setup.arena.slots[[1, 0]], want)


def test_mover_keeps_copies_of_the_arrays(setup: Setup) -> None:
    class Keeping(HostMover):
        def _submit(
            self, direction: Direction, block_ids: Index, host_slots: Index, after: Event
        ) -> Ticket:
            kept.extend((block_ids, host_slots))
            return super()._submit(direction, block_ids, host_slots, after)

    kept: list[Index] = []
    ids, slots = np.array([3, 5]), np.array([1, 0])
    with Keeping(setup.layout, setup.arena) as mover:
        mover.store(ids, slots, after=READY)
    assert [array.tolist() for array in kept] == [[3, 5], [1, 0]]
    assert not any(np.shares_memory(array, given) for array in kept for given in (ids, slots))


def test_int_sequences_and_integer_arrays_give_equal_results(setup: Setup) -> None:
    for ids in (
        [2, 4],
        (2, 4),
        range(2, 5, 2),
        np.array([2, 4], np.uint64),
        np.array([2, 4], ">i4"),
    ):
        setup.arena.slots[:] = 0
        setup.mover.store(ids, np.array([5, 1], np.int8), after=READY).wait(LONG_S)
        assert np.array_equal(setup.arena.slots[[5, 1]], [setup.block(2), setup.block(4)])


def test_empty_job_has_ended_at_once(setup: Setup) -> None:
    unset = HostEvent()
    for ticket in (
        setup.mover.store([], [], after=unset),
        setup.mover.load(np.zeros(0, np.int32), (), after=unset),
    ):
        assert ticket.poll()
        assert ticket.error is None
        ticket.wait(0)
