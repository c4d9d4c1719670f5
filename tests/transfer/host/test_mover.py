"""The host mover: every byte where it belongs, order, failure, and the interpreter lock."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstow._core import ConfigError, InvalidBlock, KvstowError, StateError, TransferError
from kvstow.transfer import (
    READY,
    BlockLayout,
    Event,
    HostArena,
    HostEvent,
    HostMover,
    Region,
    Ticket,
    TransferTimeout,
)
from kvstow.transfer.host import mover as host_mover
from kvstow.transfer.mover import Direction, Index

Bytes = npt.NDArray[np.uint8]

LONG_S = 60.0  # what should happen at once; only a defect waits this long
SHORT_S = 0.05  # what should not happen at all is given this much time to happen


class Setup:
    """A device pool of random bytes, an arena of random bytes, and a mover between them."""

    def __init__(self, num_blocks: int, num_slots: int, block_bytes: int, num_regions: int) -> None:
        rng = np.random.default_rng(1)
        self.device = [
            rng.integers(0, 256, (num_blocks, block_bytes), dtype=np.uint8)
            for _ in range(num_regions)
        ]
        self.layout = BlockLayout.from_arrays(self.device)
        self.arena = HostArena(num_slots, self.layout.slot_bytes)
        self.arena.slots[:] = rng.integers(0, 256, self.arena.slots.shape, dtype=np.uint8)
        self.mover = HostMover(self.layout, self.arena)

    def block(self, block_id: int) -> Bytes:
        return np.concatenate([region[block_id] for region in self.device])

    def snapshot(self) -> tuple[list[Bytes], Bytes]:
        return [region.copy() for region in self.device], self.arena.slots.copy()

    def unchanged(self, snapshot: tuple[list[Bytes], Bytes]) -> bool:
        device, slots = snapshot
        return np.array_equal(device, self.device) and np.array_equal(slots, self.arena.slots)


@pytest.fixture
def setup() -> Iterator[Setup]:
    made = Setup(num_blocks=8, num_slots=6, block_bytes=24, num_regions=3)
    yield made
    made.mover.close()
    made.arena.close()


class Observed:
    """An event that has happened, and that knows when and by whom it was passed."""

    passed = False
    thread: threading.Thread | None = None

    def wait(self) -> None:
        self.passed = True
        self.thread = threading.current_thread()

    def add_done_callback(self, callback: Callable[[], None], /) -> None:
        callback()


class Held(Observed):
    """An event that has happened, and at which the copying thread is held until `go`."""

    def __init__(self) -> None:
        self.reached, self.go = threading.Event(), threading.Event()

    def wait(self) -> None:
        super().wait()
        self.reached.set()
        assert self.go.wait(LONG_S)


# --- bytes ------------------------------------------------------------------------------------


@st.composite
def memories(draw: st.DrawFn) -> tuple[Bytes, tuple[Region, ...], int]:
    """One stretch of random memory with regions in it, strided, with gaps, some interleaved."""
    num_blocks = draw(st.integers(2, 7))
    extents = []  # (offset, stride, block_bytes)
    end = draw(st.integers(0, 5))
    sizes = draw(st.lists(st.integers(1, 40) | st.sampled_from([64, 600]), min_size=1, max_size=3))
    for block_bytes in draw(st.lists(st.sampled_from(sizes), min_size=1, max_size=4)):
        num_interleaved = draw(st.integers(1, 3))
        stride = num_interleaved * block_bytes + draw(st.sampled_from([0, 0, 1, 8, 33]))
        extents += [(end + i * block_bytes, stride, block_bytes) for i in range(num_interleaved)]
        end += num_blocks * stride + draw(st.sampled_from([0, 1, 16, 100]))
    memory = np.random.default_rng(draw(st.integers(0, 2**32))).integers(0, 256, end, np.uint8)
    order = draw(st.permutations(range(len(extents))))
    regions = (Region(memory.ctypes.data + extents[i][0], *extents[i][1:]) for i in order)
    return memory, tuple(regions), num_blocks


@contextmanager
def tuned(
    chunk_bytes: int, brief_bytes: int, few_blocks: int, short_row_bytes: int
) -> Iterator[None]:
    """Drive small jobs down the paths of large ones."""
    with mock.patch.multiple(
        host_mover,
        CHUNK_BYTES=chunk_bytes,
        _BRIEF_BYTES=brief_bytes,
        _FEW_BLOCKS=few_blocks,
        _SHORT_ROW_BYTES=short_row_bytes,
    ):
        yield


def whole_arena(arena: HostArena) -> Bytes:
    """All of an arena's memory, padding included: shape [num_slots, slot_stride_bytes]."""
    shape = (arena.num_slots, arena.slot_stride_bytes)
    return np.lib.stride_tricks.as_strided(arena.slots, shape, (arena.slot_stride_bytes, 1))


def positions(base: int, layout: BlockLayout, block_id: int) -> list[int]:
    """Where a block's bytes lie in the memory that begins at `base`, in the order of a slot."""
    return [
        region.base_address - base + block_id * region.block_stride_bytes + byte
        for region in layout.regions
        for byte in range(region.block_bytes)
    ]


@given(
    memories(),
    st.integers(1, 9),
    st.sampled_from([1, 100, 1 << 24]),
    st.sampled_from([0, 1 << 18]),
    st.sampled_from([0, 16]),
    st.sampled_from([0, 512]),
    st.data(),
)
def test_blocks_arrive_and_nothing_else_changes(
    made: tuple[Bytes, tuple[Region, ...], int],
    num_slots: int,
    chunk_bytes: int,
    brief_bytes: int,
    few_blocks: int,
    short_row_bytes: int,
    data: st.DataObject,
) -> None:
    memory, regions, num_blocks = made
    layout = BlockLayout(num_blocks, regions, owners=(memory,))
    # Stores: any blocks, repeated ones too, into distinct slots. Loads: the reverse.
    slots = data.draw(st.lists(st.integers(0, num_slots - 1), unique=True))
    stored = data.draw(
        st.lists(st.integers(1, num_blocks - 1), min_size=len(slots), max_size=len(slots))
    )
    loaded = data.draw(st.lists(st.integers(1, num_blocks - 1), unique=True))
    sources = data.draw(
        st.lists(st.integers(0, num_slots - 1), min_size=len(loaded), max_size=len(loaded))
    )
    rest_bytes = data.draw(st.sampled_from([0, 0, 1, 5000]))  # of a slot made for larger blocks
    with (
        tuned(chunk_bytes, brief_bytes, few_blocks, short_row_bytes),
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
    # At least two chunks of 16 MiB, so that all paths are taken as they are in earnest.
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
    # Odd, far apart, large: numpy would count more than 2**63 bytes in one array over both.
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


def test_what_a_mover_keeps_is_its_own(setup: Setup) -> None:
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


def test_int_sequences_and_integer_arrays_are_equal(setup: Setup) -> None:
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


def test_an_empty_job_has_ended_at_once(setup: Setup) -> None:
    unset = HostEvent()
    for ticket in (
        setup.mover.store([], [], after=unset),
        setup.mover.load(np.zeros(0, np.int32), (), after=unset),
    ):
        assert ticket.poll()
        assert ticket.error is None
        ticket.wait(0)


# --- order ------------------------------------------------------------------------------------


def test_a_store_reads_nothing_before_its_event(setup: Setup) -> None:
    event = HostEvent()
    before = setup.snapshot()
    ticket = setup.mover.store([2, 3], [4, 0], after=event)
    with pytest.raises(TransferTimeout, match="pinned"):
        ticket.wait(SHORT_S)
    assert not ticket.poll()
    assert ticket.error is None
    assert setup.unchanged(before)
    # The compute that fills the blocks, as late as it can be: a store that did not wait has copied
    # stale bytes by now.
    for region in setup.device:
        region[2:4] += 1
    want = [setup.block(2), setup.block(3)]
    event.set()
    ticket.wait(LONG_S)
    assert ticket.poll()
    assert np.array_equal(setup.arena.slots[[4, 0]], want)


def test_a_load_writes_nothing_before_its_event(setup: Setup) -> None:
    event = HostEvent()
    before = setup.snapshot()
    ticket = setup.mover.load([4, 0], [2, 3], after=event)
    with pytest.raises(TransferTimeout):
        ticket.wait(SHORT_S)
    # The compute that still reads the blocks sees what was there.
    assert setup.unchanged(before)
    event.set()
    ticket.wait(LONG_S)
    assert np.array_equal([setup.block(2), setup.block(3)], setup.arena.slots[[4, 0]])


def test_stores_of_one_slot_keep_their_order(setup: Setup) -> None:
    event = HostEvent()
    first = setup.mover.store([1], [0], after=event)
    second = setup.mover.store([2], [0], after=READY)
    with pytest.raises(TransferTimeout):
        second.wait(SHORT_S)
    event.set()
    second.wait(LONG_S)
    assert first.poll()
    assert np.array_equal(setup.arena.slots[0], setup.block(2))


def test_loads_of_one_block_keep_their_order(setup: Setup) -> None:
    event = HostEvent()
    first = setup.mover.load([0, 1], [1, 2], after=event)
    second = setup.mover.load([2, 3], [2, 3], after=READY)
    with pytest.raises(TransferTimeout):
        second.wait(SHORT_S)
    event.set()
    second.wait(LONG_S)
    assert first.poll()
    assert np.array_equal([setup.block(1), setup.block(2)], setup.arena.slots[[0, 2]])


@pytest.mark.parametrize("waiting", ["store", "load"])
def test_a_job_that_waits_does_not_hold_up_the_other_direction(setup: Setup, waiting: str) -> None:
    event = HostEvent()
    if waiting == "store":
        held = setup.mover.store([1], [0], after=event)
        free = setup.mover.load([1], [2], after=READY)
    else:
        held = setup.mover.load([1], [2], after=event)
        free = setup.mover.store([1], [0], after=READY)
    free.wait(LONG_S)
    assert not held.poll()
    event.set()
    held.wait(LONG_S)


def test_events_may_happen_in_any_order(setup: Setup) -> None:
    events = [HostEvent() for _ in range(6)]
    tickets = [setup.mover.store([i + 1], [i], after=event) for i, event in enumerate(events)]
    for ticket, event in zip(reversed(tickets), reversed(events), strict=True):
        assert not ticket.poll()
        event.set()
        ticket.wait(LONG_S)
    assert np.array_equal(setup.arena.slots, [setup.block(i) for i in range(1, 7)])


@pytest.mark.parametrize("direction", ["store", "load"])
def test_a_brief_job_is_over_when_submitted(setup: Setup, direction: str) -> None:
    event = Observed()
    if direction == "store":
        ticket = setup.mover.store([2, 4], [5, 1], after=event)
    else:
        ticket = setup.mover.load([5, 1], [2, 4], after=event)
    assert ticket.poll()
    ticket.wait(0)
    assert event.thread is threading.current_thread()
    assert np.array_equal(setup.arena.slots[[5, 1]], [setup.block(2), setup.block(4)])


@pytest.mark.parametrize("direction", ["store", "load"])
def test_a_job_that_is_not_brief_is_a_workers(setup: Setup, direction: str) -> None:
    event = Observed()
    num_bytes = 2 * setup.layout.slot_bytes
    with mock.patch.object(host_mover, "_BRIEF_BYTES", num_bytes - 1):
        if direction == "store":
            setup.mover.store([2, 4], [5, 1], after=event).wait(LONG_S)
        else:
            setup.mover.load([5, 1], [2, 4], after=event).wait(LONG_S)
    assert event.thread is not threading.current_thread()
    assert np.array_equal(setup.arena.slots[[5, 1]], [setup.block(2), setup.block(4)])


def test_a_brief_job_waits_for_one_that_waits(setup: Setup) -> None:
    event = HostEvent()
    first = setup.mover.store([1], [0], after=event)
    brief = Observed()
    second = setup.mover.store([2], [0], after=brief)
    assert not second.poll()
    assert not brief.passed
    event.set()
    second.wait(LONG_S)
    assert first.poll()
    assert brief.thread is not threading.current_thread()
    assert np.array_equal(setup.arena.slots[0], setup.block(2))


def test_a_brief_job_waits_for_one_under_way(setup: Setup) -> None:
    long = Held()
    with mock.patch.object(host_mover, "_BRIEF_BYTES", 0):
        first = setup.mover.store([1], [0], after=long)
    assert long.reached.wait(LONG_S)  # so it has left the queue
    second = setup.mover.store([2], [0], after=READY)
    with pytest.raises(TransferTimeout):
        second.wait(SHORT_S)
    other_direction = setup.mover.load([3], [4], after=READY)
    assert other_direction.poll()
    long.go.set()
    second.wait(LONG_S)
    assert first.poll()
    assert np.array_equal(setup.arena.slots[0], setup.block(2))


def test_brief_and_long_jobs_keep_their_order(setup: Setup) -> None:
    # One block is brief here, more are not. All name slot 0: whichever is last is what it holds.
    choose = np.random.default_rng(4)
    with mock.patch.object(host_mover, "_BRIEF_BYTES", setup.layout.slot_bytes):
        for _ in range(300):
            submitted = [
                (setup.mover.store(ids, range(len(ids)), after=READY), int(ids[0]))
                for ids in (
                    choose.permutation(np.arange(1, 8))[:num_blocks]
                    for num_blocks in choose.choice([1, 1, 3, 6], size=4).tolist()
                )
            ]
            ticket, last = submitted[-1]
            ticket.wait(LONG_S)
            assert np.array_equal(setup.arena.slots[0], setup.block(last))


def test_brief_jobs_of_several_threads_are_copied_one_at_a_time(setup: Setup) -> None:
    first = Held()
    others = [Observed() for _ in range(3)]
    threads = [
        threading.Thread(target=setup.mover.store, args=([1], [0]), kwargs={"after": event})
        for event in (first, *others)
    ]
    threads[0].start()
    assert first.reached.wait(LONG_S)
    for thread in threads[1:]:
        thread.start()
        thread.join(SHORT_S)
    assert not any(event.passed for event in others)
    first.go.set()
    for thread in threads:
        thread.join(LONG_S)
    setup.mover.store([1], [0], after=READY).wait(LONG_S)
    assert all(event.passed for event in others)


def test_nothing_can_be_submitted_without_an_event(setup: Setup) -> None:
    with pytest.raises(TypeError, match="after"):
        setup.mover.store([1], [0])  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        setup.mover.load([0], [1], READY)  # type: ignore[call-arg]
    for wrong in (None, threading.Event(), 0):
        with pytest.raises(ConfigError, match="expected an Event"):
            setup.mover.store([1], [0], after=wrong)  # type: ignore[arg-type]
    assert isinstance(READY, Event)


def test_an_event_is_set_once() -> None:
    event = HostEvent()
    called: list[bool] = []
    event.add_done_callback(lambda: called.append(True))
    assert not called
    event.set()
    assert called == [True]
    event.wait()
    event.add_done_callback(lambda: called.append(False))
    assert called == [True, False]
    with pytest.raises(StateError, match="set already"):
        event.set(ValueError("late"))
    event.wait()


# --- failure ----------------------------------------------------------------------------------


def test_an_event_that_failed_fails_its_job_and_only_that(setup: Setup) -> None:
    event = HostEvent()
    before = setup.snapshot()
    failed = setup.mover.load([1], [2], after=event)
    cause = ValueError("the step failed")
    event.set(cause)
    with pytest.raises(TransferError, match="the step failed") as raised:
        failed.wait(LONG_S)
    assert raised.value.__cause__ is cause
    assert failed.poll()
    assert failed.error is raised.value
    assert setup.unchanged(before)
    setup.mover.load([1], [2], after=READY).wait(LONG_S)
    assert np.array_equal(setup.block(2), setup.arena.slots[1])


def test_a_copy_that_fails_fails_its_job_and_only_that(setup: Setup) -> None:
    event = HostEvent()
    failed = setup.mover.store([1, 2], [0, 1], after=event)
    behind = setup.mover.store([3], [2], after=READY)
    want = setup.block(3)
    # One beyond the view, which may span far more than the regions' own rows: no checked id comes
    # near it, and numpy itself raises in the worker.
    [(job, _)] = setup.mover._stores._order._waiting.values()
    assert isinstance(job.work, partial)
    copy = job.work.args[0][0]
    copy.source_rows = np.full_like(copy.target_rows, len(copy.source))
    event.set()
    with pytest.raises(TransferError, match="IndexError") as raised:
        failed.wait(LONG_S)
    assert isinstance(raised.value.__cause__, IndexError)
    behind.wait(LONG_S)
    assert np.array_equal(setup.arena.slots[2], want)


@pytest.mark.parametrize("direction", ["store", "load"])
def test_a_brief_job_whose_event_has_failed_fails(setup: Setup, direction: str) -> None:
    event = HostEvent()
    event.set(ValueError("the step failed"))
    before = setup.snapshot()
    if direction == "store":
        ticket = setup.mover.store([1], [2], after=event)
    else:
        ticket = setup.mover.load([2], [1], after=event)
    assert ticket.poll()
    assert "the step failed" in str(ticket.error)
    with pytest.raises(TransferError, match="the step failed"):
        ticket.wait(0)
    assert setup.unchanged(before)
    setup.mover.store([1], [2], after=READY).wait(0)
    assert np.array_equal(setup.arena.slots[2], setup.block(1))


def test_an_interrupt_of_a_brief_job_is_its_submitters(setup: Setup) -> None:
    class Interrupted(Observed):
        def wait(self) -> None:
            raise KeyboardInterrupt

    before = setup.snapshot()
    with pytest.raises(KeyboardInterrupt):
        setup.mover.store([1], [2], after=Interrupted())
    assert setup.unchanged(before)
    # On a worker it is the job's: others go on.
    with mock.patch.object(host_mover, "_BRIEF_BYTES", 0):
        ticket = setup.mover.store([1], [2], after=Interrupted())
        with pytest.raises(TransferError, match="KeyboardInterrupt"):
            ticket.wait(LONG_S)
    setup.mover.store([1], [2], after=READY).wait(LONG_S)
    assert np.array_equal(setup.arena.slots[2], setup.block(1))


def test_a_late_transfer_is_no_failed_one(setup: Setup) -> None:
    event = HostEvent()
    ticket = setup.mover.store([1], [0], after=event)
    for timeout_s in (0, -1.0, 1e-9):
        with pytest.raises(TransferTimeout) as raised:
            ticket.wait(timeout_s)
        assert isinstance(raised.value, KvstowError)
        assert isinstance(raised.value, TimeoutError)
        assert not isinstance(raised.value, TransferError)
    with pytest.raises(ConfigError, match="nan"):
        ticket.wait(float("nan"))
    event.set()
    ticket.wait(float("inf"))
    ticket.wait(0)


# --- closing ----------------------------------------------------------------------------------


def test_close_carries_out_what_is_ready_and_fails_the_rest(setup: Setup) -> None:
    event = HostEvent()
    want = setup.block(1)
    before = setup.arena.slots[1:].copy()
    done = setup.mover.store([1], [0], after=READY)
    held = setup.mover.store([2], [1], after=event)
    behind = setup.mover.store([3], [1], after=READY)
    load = setup.mover.load([5], [6], after=HostEvent())
    setup.mover.close()
    assert done.poll()
    assert done.error is None
    assert np.array_equal(setup.arena.slots[0], want)
    for ticket in (held, behind, load):
        assert ticket.poll()
        with pytest.raises(TransferError, match="closed before"):
            ticket.wait(0)
    event.set()
    assert np.array_equal(setup.arena.slots[1:], before)
    assert not any(thread.name.startswith("kvstow-") for thread in threading.enumerate())
    setup.mover.close()


def test_a_closed_mover_or_arena_takes_nothing(setup: Setup) -> None:
    before = setup.snapshot()
    view = setup.arena.slots
    setup.arena.close()
    with pytest.raises(StateError, match="HostArena is closed"):
        setup.mover.store([1], [0], after=READY)
    setup.mover.close()
    for ids in ([1], []):
        with pytest.raises(StateError, match="HostMover is closed"):
            setup.mover.store(ids, ids, after=READY)
        with pytest.raises(StateError, match="HostMover is closed"):
            setup.mover.load(ids, ids, after=READY)
    assert np.array_equal(view, before[1])
    with pytest.raises(StateError, match="HostArena is closed"):
        HostMover(setup.layout, setup.arena)


def test_close_waits_for_a_brief_job_of_another_thread(setup: Setup) -> None:
    brief = Held()
    submitter = threading.Thread(target=setup.mover.store, args=([1], [0]), kwargs={"after": brief})
    submitter.start()
    assert brief.reached.wait(LONG_S)
    closer = threading.Thread(target=setup.mover.close)
    closer.start()
    closer.join(SHORT_S)
    assert closer.is_alive()
    brief.go.set()
    closer.join(LONG_S)
    assert not closer.is_alive()
    assert np.array_equal(setup.arena.slots[0], setup.block(1))
    submitter.join(LONG_S)


def test_several_may_wait_for_one_ticket(setup: Setup) -> None:
    event = HostEvent()
    ticket = setup.mover.store([1], [0], after=event)
    waiting = [threading.Thread(target=ticket.wait) for _ in range(3)]
    for thread in waiting:
        thread.start()
        thread.join(SHORT_S)
        assert thread.is_alive()
    event.set()
    for thread in waiting:
        thread.join(LONG_S)
        assert not thread.is_alive()
    ticket.wait(0)


def test_an_arena_closed_under_a_job_stays_mapped_until_it_ends(setup: Setup) -> None:
    event = HostEvent()
    want = setup.arena.slots[3].copy()
    ticket = setup.mover.load([3], [2], after=event)
    setup.arena.close()
    event.set()
    ticket.wait(LONG_S)
    assert np.array_equal(setup.block(2), want)


def test_a_mover_dropped_with_work_queued_still_does_it_and_then_ends() -> None:
    made = Setup(num_blocks=4, num_slots=2, block_bytes=16, num_regions=1)
    event = HostEvent()
    ticket = made.mover.store([1], [0], after=event)
    threads = [made.mover._stores._thread, made.mover._loads._thread]
    del made.mover
    gc.collect()
    assert not ticket.poll()
    event.set()
    ticket.wait(LONG_S)
    assert np.array_equal(made.arena.slots[0], made.block(1))
    gc.collect()
    for thread in threads:
        thread.join(LONG_S)
        assert not thread.is_alive()


def test_a_process_may_end_with_a_mover_open() -> None:
    script = """
import numpy as np
from kvstow.transfer import READY, BlockLayout, HostArena, HostEvent, HostMover
layout = BlockLayout.from_arrays([np.ones((4096, 8192), np.uint8)])
arena = HostArena(4096, layout.slot_bytes)
mover = HostMover(layout, arena)
mover.store(range(1, 4096), range(4095), after=READY)
mover.load([0], [1], after=HostEvent())
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], timeout=LONG_S, capture_output=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, b"")


# --- bad input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "slots", "error", "named"),
    [
        ([0, 1], [1, 2], InvalidBlock, r"block_ids\[0\] is 0, the null block"),
        ([1, 8], [1, 2], InvalidBlock, r"block_ids\[1\] is 8, outside 0 to 7"),
        ([1, -1], [1, 2], InvalidBlock, r"block_ids\[1\] is -1, outside 0 to 7"),
        ([1, 2], [1, 6], InvalidBlock, r"host_slots\[1\] is 6, outside 0 to 5"),
        ([1, 2], [-6, 2], InvalidBlock, r"host_slots\[0\] is -6, outside 0 to 5"),
        (np.array([1, 2**64 - 1], np.uint64), [1, 2], InvalidBlock, "18446744073709551615"),
        ([1, 2], [1], ConfigError, "2 block_ids but 1 host_slots"),
        ([], [1], ConfigError, "0 block_ids but 1 host_slots"),
        (
            [[1], [2]],
            [1, 2],
            ConfigError,
            r"block_ids is \w+ of shape \(2, 1",
        ),
        (1, [1], ConfigError, "block_ids is int64 of .* expected 1-D integers"),
        ([1.0], [1], ConfigError, "block_ids is float64 of .* expected 1-D integers"),
        (np.zeros(0), [], ConfigError, "block_ids is float64 of .* expected 1-D integers"),
        ([True], [1], ConfigError, "block_ids is bool of .* expected 1-D integers"),
        (["1"], [1], ConfigError, "block_ids is <U1 of .* expected 1-D integers"),
        ([1, [2, 3]], [1, 2], ConfigError, r"block_ids is \[1, \[2, 3\]\], expected 1-D integers"),
        ([2**70], [1], ConfigError, "block_ids is object of .* expected 1-D integers"),
        ([1], None, ConfigError, "host_slots is object of .* expected 1-D integers"),
    ],
)
def test_bad_pairs_are_refused_and_change_nothing(
    setup: Setup, ids: list[int], slots: list[int], error: type[Exception], named: str
) -> None:
    before = setup.snapshot()
    with pytest.raises(error, match=named):
        setup.mover.store(ids, slots, after=READY)
    with pytest.raises(error, match=named):
        setup.mover.load(slots, ids, after=READY)
    setup.mover.close()
    assert setup.unchanged(before)


def test_a_destination_named_twice_is_refused(setup: Setup) -> None:
    before = setup.snapshot()
    with pytest.raises(InvalidBlock, match="host_slots names destination 3 more than once"):
        setup.mover.store([1, 2, 4], [3, 0, 3], after=READY)
    with pytest.raises(InvalidBlock, match="block_ids names destination 5 more than once"):
        setup.mover.load([0, 1, 2], [5, 5, 4], after=READY)
    setup.mover.close()
    assert setup.unchanged(before)


def test_an_event_that_refuses_leaves_nothing_queued(setup: Setup) -> None:
    class Refusing(Observed):
        def add_done_callback(self, callback: Callable[[], None], /) -> None:
            raise RuntimeError("no")

    before = setup.snapshot()
    with pytest.raises(RuntimeError, match="no"):
        setup.mover.store([1], [0], after=Refusing())
    setup.mover.close()
    assert setup.unchanged(before)


def test_an_arena_of_smaller_slots_is_refused(setup: Setup) -> None:
    with HostArena(2, 71) as arena, pytest.raises(ConfigError, match=r"is 71, .* has 72 bytes"):
        HostMover(setup.layout, arena)


# --- the interpreter lock ---------------------------------------------------------------------


@contextmanager
def lock_given_only_when_released() -> Iterator[None]:
    """No thread is asked to hand over the lock: another runs only where its holder lets go."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)


# The many short rows and the few long ones that numpy treats differently.
@pytest.mark.parametrize("block_bytes", [256, 4096, 65_536])
@pytest.mark.parametrize("order", ["shuffled", "rising"])
def test_copies_run_without_the_interpreter_lock(block_bytes: int, order: str) -> None:
    """See a copy half done: impossible for this thread if the copying one kept the lock.

    Every read of the state below is one that a worker allowed by letting go of the lock inside
    numpy. How often is a matter of luck on a busy machine, hence more than one try.
    """
    num_blocks = (24 << 20) // block_bytes
    made = Setup(num_blocks, num_blocks, block_bytes, num_regions=1)
    ids, slots = np.arange(1, num_blocks), np.arange(num_blocks - 1)
    if order == "shuffled":
        ids = np.random.default_rng(3).permutation(ids)
    wanted = {"scattering"} if order == "rising" else {"gathering", "scattering"}
    first, last = made.arena.slots[0], made.arena.slots[num_blocks - 2]
    seen: set[str] = set()
    with made.mover as mover, made.arena:
        for _ in range(20):
            made.arena.slots[:] = 0
            made.device[0][1:, 0] = 1
            event = Observed()
            with lock_given_only_when_released():
                ticket = mover.store(ids, slots, after=event)
                while not ticket.poll():
                    if event.passed and not first[0]:
                        seen.add("gathering")
                    elif first[0] and not last[0]:
                        seen.add("scattering")
                    time.sleep(0)
            ticket.wait(0)
            if wanted <= seen:
                break
    assert wanted <= seen
