"""The native copier: what it refuses, what it holds, and the sums of what it copies."""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt
import pytest
from tests.transfer.host.memory import LONG_S, Setup

from kvstow._core import BlockCopier, ConfigError, InvalidBlock, StateError
from kvstow.transfer import READY, BlockLayout, HostArena, HostMover, Region

Bytes = npt.NDArray[np.uint8]

NUM_BLOCKS, BLOCK_BYTES, NUM_SLOTS, SLOT_BYTES, STRIDE_BYTES = 5, 24, 4, 50, 64


class Memory:
    """Two regions, the second with gaps, and slots of random bytes with a rest."""

    def __init__(self) -> None:
        rng = np.random.default_rng(9)
        self.tight = rng.integers(0, 256, NUM_BLOCKS * BLOCK_BYTES, np.uint8)
        self.strided = rng.integers(0, 256, NUM_BLOCKS * 40, np.uint8)
        self.slots = rng.integers(0, 256, NUM_SLOTS * STRIDE_BYTES, np.uint8)

    def copier(self, **other: object) -> BlockCopier:
        given: dict[str, object] = {
            "regions": [(self.tight, BLOCK_BYTES, BLOCK_BYTES), (self.strided, 40, BLOCK_BYTES)],
            "num_blocks": NUM_BLOCKS,
            "slots": self.slots,
            "slot_stride_bytes": STRIDE_BYTES,
            "slot_bytes": SLOT_BYTES,
            "num_slots": NUM_SLOTS,
        }
        return BlockCopier(**{**given, **other})  # type: ignore[arg-type]

    def block(self, block_id: int) -> bytes:
        tight = self.tight[block_id * BLOCK_BYTES :][:BLOCK_BYTES]
        return tight.tobytes() + self.strided[block_id * 40 :][:BLOCK_BYTES].tobytes()

    def slot(self, slot: int) -> bytes:
        return self.slots[slot * STRIDE_BYTES :][:SLOT_BYTES].tobytes()

    def content(self) -> list[bytes]:
        return [memory.tobytes() for memory in (self.tight, self.strided, self.slots)]


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.mark.parametrize("brief", [True, False])
def test_blocks_and_slots_are_copied_in_the_callers_pairs(memory: Memory, brief: bool) -> None:
    copier = memory.copier()
    copier.store([3, 1, 4], [2, 3, 0], brief=brief)
    for block, slot in ((3, 2), (1, 3), (4, 0)):
        assert memory.slot(slot)[: 2 * BLOCK_BYTES] == memory.block(block)
    memory.slots[:] = np.random.default_rng(10).integers(0, 256, memory.slots.shape, np.uint8)
    copier.load([3, 0, 2], [2, 2, 0], brief=brief)
    assert memory.block(0) == memory.slot(2)[: 2 * BLOCK_BYTES]


@pytest.mark.parametrize("brief", [True, False])
def test_sums_are_those_of_the_whole_slots_in_the_callers_order(
    memory: Memory, brief: bool
) -> None:
    sums = memory.copier().store_with_checksums([3, 1, 4], [2, 3, 0], brief=brief)
    assert sums.dtype == np.uint32
    assert sums.tolist() == [zlib.crc32(memory.slot(slot)) for slot in (2, 3, 0)]
    assert memory.slot(2)[: 2 * BLOCK_BYTES] == memory.block(3)


@pytest.mark.parametrize("block_bytes", [1, 100, 4096, 16_384, 16_385, 100_003])
def test_sums_of_long_blocks_equal_those_of_zlib(block_bytes: int) -> None:
    made = Setup(num_blocks=4, num_slots=3, block_bytes=block_bytes, num_regions=2)
    with made.mover as mover, made.arena as arena:
        sums = mover.copy_and_sum(np.array([3, 1]), np.array([2, 0]))
        assert sums.tolist() == [zlib.crc32(arena.slots[slot]) for slot in (2, 0)]
        assert sums.tolist() == arena.compute_checksums(np.array([2, 0])).tolist()
        assert np.array_equal(arena.slots[[2, 0]], [made.block(3), made.block(1)])
        mover.close()
        with pytest.raises(StateError, match="HostMover is closed"):
            mover.copy_and_sum(np.array([3]), np.array([2]))


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "slots", "error", "named"),
    [
        ([1, 5], [0, 1], InvalidBlock, "block 5 is outside 0 to 4"),
        ([1, 2], [0, 4], InvalidBlock, "slot 4 is outside 0 to 3"),
        ([1, 2**62], [0, 1], InvalidBlock, "outside 0 to 4"),
        ([1, -1], [0, 1], InvalidBlock, "block_ids has -1"),
        ([1, 2], [0, -1], InvalidBlock, "host_slots has -1"),
        ([1, 2**64], [0, 1], InvalidBlock, "in no pool"),
        ([1, 2], [0], ConfigError, "2 block_ids but 1 host_slots"),
    ],
)
@pytest.mark.parametrize("brief", [True, False])
def test_refused_job_copies_nothing(
    memory: Memory,
    ids: list[int],
    slots: list[int],
    error: type[Exception],
    named: str,
    brief: bool,
) -> None:
    copier, before = memory.copier(), memory.content()
    for call in (
        lambda: copier.store(ids, slots, brief=brief),
        lambda: copier.load(slots, ids, brief=brief),
        lambda: copier.store_with_checksums(ids, slots, brief=brief),
    ):
        with pytest.raises(error, match=named):
            call()
        assert memory.content() == before


def test_memory_that_is_too_short_is_refused(memory: Memory) -> None:
    for other in (
        {"num_blocks": NUM_BLOCKS + 1},
        {"num_slots": NUM_SLOTS + 1},
        {"slot_stride_bytes": 2**63},
        {"regions": [(memory.tight, BLOCK_BYTES, BLOCK_BYTES + 1)]},
        {"slots": memory.slots[:-15]},
    ):
        with pytest.raises(ConfigError, match=r"do not fit in .* bytes of memory"):
            memory.copier(**other)
    with pytest.raises(ConfigError, match="has 48 bytes in all regions, but a slot has 47"):
        memory.copier(slot_bytes=47)


def test_rows_that_overlap_are_refused(memory: Memory) -> None:
    with pytest.raises(ConfigError, match="rows of 24 bytes begin 23 bytes apart"):
        memory.copier(regions=[(memory.tight, BLOCK_BYTES - 1, BLOCK_BYTES)])
    with pytest.raises(ConfigError, match="rows of 50 bytes begin 49 bytes apart"):
        memory.copier(slot_stride_bytes=SLOT_BYTES - 1)


def test_memory_that_cannot_be_written_is_refused(memory: Memory) -> None:
    read_only = memory.slots.copy()
    read_only.flags.writeable = False
    for slots in (read_only, memory.slots[::2], bytes(256), np.zeros(256, np.int32), None, "x"):
        with pytest.raises(ConfigError):
            memory.copier(slots=slots)


def test_regions_and_slots_in_one_memory_are_refused(memory: Memory) -> None:
    whole = np.zeros(NUM_BLOCKS * BLOCK_BYTES + memory.slots.nbytes, np.uint8)
    regions, slots = whole[: NUM_BLOCKS * BLOCK_BYTES], whole[NUM_BLOCKS * BLOCK_BYTES :]
    memory.copier(regions=[(regions, BLOCK_BYTES, BLOCK_BYTES)], slots=slots)
    one_more = whole[1 : NUM_BLOCKS * BLOCK_BYTES + 1]
    with pytest.raises(ConfigError, match="region 0 shares memory with the slots"):
        memory.copier(regions=[(one_more, BLOCK_BYTES, BLOCK_BYTES)], slots=slots)


def test_layout_over_the_arena_is_refused() -> None:
    with HostArena(4, 64) as arena:
        layout = BlockLayout(4, (Region(arena.base_address, 64, 64),), owners=(arena.slots,))
        with pytest.raises(ConfigError, match="shares memory"):
            HostMover(layout, arena)


# -- what is held --------------------------------------------------------------------------------


def test_buffer_cannot_be_resized_while_the_copier_holds_it(memory: Memory) -> None:
    region = bytearray(memory.tight.tobytes())
    copier = memory.copier(regions=[(region, BLOCK_BYTES, BLOCK_BYTES)])
    with pytest.raises(BufferError):
        region.extend(bytes(100))
    with pytest.raises(ValueError, match="cannot resize"):
        memory.slots.resize(10 * memory.slots.nbytes, refcheck=True)
    copier.store([2], [1])
    assert memory.slot(1)[:BLOCK_BYTES] == region[2 * BLOCK_BYTES : 3 * BLOCK_BYTES]
    del copier
    region.extend(bytes(100))


def test_mover_keeps_memory_whose_other_references_are_gone() -> None:
    made = Setup(num_blocks=8, num_slots=6, block_bytes=1 << 20, num_regions=1)
    want = made.block(3)
    arena, mover = made.arena, made.mover
    del made
    with mover, arena:
        mover.store([3], [5], after=READY).wait(LONG_S)
        assert np.array_equal(arena.slots[5], want)
