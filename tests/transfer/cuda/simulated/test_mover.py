"""The CUDA mover: bytes, tickets, errors, and freed memory."""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.transfer.cuda.simulation import library

from kvstow import ChecksumMismatch, ConfigError, StateError, TransferError
from kvstow.transfer import (
    READY,
    BlockLayout,
    CudaError,
    CudaEvent,
    CudaLink,
    CudaMover,
    HostArena,
    HostEvent,
    HostMover,
    Mover,
    Region,
    Ticket,
    TransferTimeout,
    outcome,
)
from kvstow.transfer.cuda import mover as mover_module
from kvstow.transfer.cuda import pinning as pinning_module
from kvstow.transfer.cuda.interface import Copies, Kernel, Pack, Stream
from kvstow.transfer.cuda.kernels import MAX_BLOCKS
from kvstow.transfer.cuda.lane import Lane
from kvstow.transfer.cuda.link import STAGING_BYTES, cuda_link
from kvstow.transfer.cuda.link_speed import LinkSpeed, Path
from kvstow.transfer.cuda.pace import Pace
from kvstow.transfer.cuda.pinning import pinned_arena
from kvstow.transfer.cuda.runtime import CudaRuntime, cuda_runtime
from kvstow.transfer.cuda.sums import SumRing

INVALID_VALUE, ILLEGAL_ADDRESS = 1, 700
REFUSED, LOST = "cudaError 1:", "cudaError 700:"
LOADS = ("packed", "load"), ("direct", "load")


def device_memory(runtime: CudaRuntime, num_bytes: int) -> npt.NDArray[np.uint8]:
    """Return memory of the simulated GPU, which is memory of this process."""
    memory = (ctypes.c_uint8 * num_bytes).from_address(runtime.allocate(num_bytes))
    return np.frombuffer(memoryview(memory), dtype=np.uint8)


def on_device(arrays: list[npt.NDArray[np.uint8]], device: int = 0) -> BlockLayout:
    layout = BlockLayout.from_arrays(arrays)
    return BlockLayout(layout.num_blocks, layout.regions, layout.owners, device=device)


class Bench:
    """A mover for blocks of two fragments, on a GPU that does only what a test lets it do."""

    def __init__(
        self, *, num_blocks: int = 9, num_slots: int = 16, num_places: int = 2, **options: object
    ) -> None:
        library.by_hand()
        self.runtime = cuda_runtime(0)
        self.memory = device_memory(self.runtime, 2 * num_blocks * 2048).reshape(2, -1, 2048)
        self.memory.flat[:] = np.arange(self.memory.size, dtype=np.uint32).astype(np.uint8)
        layout = on_device(list(self.memory))
        self.arena = pinned_arena(num_slots, layout.slot_bytes, self.runtime)
        self.arena.slots[:] = 0
        self.link = CudaLink(self.runtime, staging_bytes=8192, num_places=num_places)
        self.mover = CudaMover(layout, self.arena, link=self.link, path="packed", **options)  # type: ignore[arg-type]

    def block(self, block: int) -> npt.NDArray[np.uint8]:
        return self.memory[:, block].reshape(-1)

    def land(self, ticket: Ticket) -> None:
        """Let the device go on until the job has ended, and raise its error."""
        while not ticket.poll():
            # A poll may queue more of the job.
            assert library.step() or ticket.poll() or library.step(), "the device is idle"
        ticket.wait(0)

    def after(self) -> CudaEvent:
        return CudaEvent(self.runtime, self.runtime.event())

    def close(self) -> None:
        self.mover.close()
        self.arena.close()
        self.runtime.free(self.memory.ctypes.data)


@contextmanager
def bench(**options: object) -> Iterator[Bench]:
    before = library.allocated_bytes()
    setup = Bench(**options)  # type: ignore[arg-type]
    yield setup
    setup.close()
    if setup.runtime.lost is None:
        assert library.allocated_bytes() == before, "memory of the device was left behind"


def run_all() -> None:
    while library.step():
        pass


# -- bytes -----------------------------------------------------------------------------------------


@given(st.data())
def test_cuda_mover_moves_the_bytes_that_the_host_mover_moves(data: st.DataObject) -> None:
    draw = data.draw
    sizes = draw(st.lists(st.sampled_from([16, 48, 100, 1024, 4096, 5000]), min_size=1, max_size=4))
    num_blocks, num_slots = draw(st.integers(2, 9)), draw(st.integers(1, 9))
    slots_per_run = draw(st.sampled_from([k for k in (1, 2, 4) if num_slots % k == 0]))
    larger = draw(st.sampled_from([0, 0, 3000, 20000]))
    path: Path = draw(st.sampled_from(["packed", "direct"]))
    num_places = draw(st.integers(1, 3))
    pairs = draw(st.integers(0, min(num_blocks - 1, num_slots)))
    ids = draw(st.permutations(range(1, num_blocks)))[:pairs]
    slots = draw(st.permutations(range(num_slots)))[:pairs]

    runtime = cuda_runtime(0)

    def memory(fill: int) -> list[npt.NDArray[np.uint8]]:
        rng, arrays = np.random.default_rng(fill), []
        for size in sizes:
            stride = -(-size // 16) * 16 + 32
            padded = device_memory(runtime, num_blocks * stride).reshape(num_blocks, stride)
            padded[:] = rng.integers(0, 256, padded.shape, np.uint8)
            arrays.append(padded[:, :size])
        return arrays

    results = []
    for kind in ("cuda", "host"):
        blocks, others = memory(1), memory(2)
        arena = pinned_arena(num_slots, sum(sizes) + larger, runtime, slots_per_run=slots_per_run)
        for arrays, is_store in ((blocks, True), (others, False)):
            if kind == "cuda":
                link = CudaLink(runtime, staging_bytes=40_000, num_places=num_places)
                mover: Mover = CudaMover(on_device(arrays), arena, link=link, path=path)
            else:
                mover = HostMover(BlockLayout.from_arrays(arrays), arena)
            with mover:
                ticket = (
                    mover.store(ids, slots, after=READY)
                    if is_store
                    else mover.load(slots, ids, after=READY)
                )
                ticket.wait(10)
        padded = [np.array(array.base) for array in blocks + others]
        results.append([*padded, arena.slots[slots, : sum(sizes)].copy()])
        arena.close()
        for array in blocks + others:
            runtime.free(array.ctypes.data)
    for ours, theirs in zip(*results, strict=True):
        assert np.array_equal(ours, theirs)


def test_consecutive_slots_are_one_copy_within_a_pinned_chunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pinning_module, "MAX_CHUNK_BYTES", 4 * 4096)
    with bench(num_places=3) as setup:
        copies: list[list[int]] = []
        copy = setup.runtime.copy

        def spy(made: Copies, stream: Stream) -> None:
            copies.append([num for _, _, num in made.runs])
            copy(made, stream)

        vars(setup.runtime)["copy"] = spy
        # A place holds two blocks, and slots 4 and 8 each begin a pinned chunk.
        slots = [9, 2, 3, 8, 4, 5, 1]
        setup.land(setup.mover.store(range(1, 8), slots, after=setup.after()))
    assert copies == [[1], [2], [2], [2]]
    with bench() as setup:
        vars(setup.runtime)["copy"] = spy
        copy = CudaRuntime.copy.__get__(setup.runtime)
        copies.clear()
        setup.land(setup.mover.store([1, 2, 3, 4], [2, 3, 4, 7], after=setup.after()))
    assert copies == [[1], [1, 1], [1]], "slot 4 begins a pinned chunk"


def test_launch_carries_no_more_ids_than_it_can() -> None:
    runtime = cuda_runtime(0)
    memory = device_memory(runtime, 1200 * 16).reshape(1200, 16)
    memory.flat[:] = np.arange(memory.size, dtype=np.uint32).astype(np.uint8)
    launched: list[int] = []
    launch = runtime.launch

    def spy(kernel: Kernel, pack: Pack, stream: Stream) -> None:
        launched.append(pack.num_blocks)
        launch(kernel, pack, stream)

    runtime.launch = spy  # type: ignore[method-assign]
    # A place holds 2560 of these small blocks.
    link = CudaLink(runtime, staging_bytes=40_960)
    with (
        pinned_arena(1100, 16, runtime) as arena,
        CudaMover(on_device([memory]), arena, link=link, path="packed") as mover,
    ):
        ids = np.arange(1100, 0, -1)
        mover.store(ids, np.arange(1100), after=READY).wait(60)
        assert np.array_equal(arena.slots[:, :16], memory[ids])
    first = MAX_BLOCKS // 8
    assert launched == [first, MAX_BLOCKS, 1100 - first - MAX_BLOCKS]


def test_launch_has_no_more_turns_than_the_kernels_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstow.transfer.cuda.mover.MAX_TURNS", 3)
    with bench() as setup:
        launched = gathers_of(setup)
        # A block has two chunks, so three turns are one block.
        setup.land(setup.mover.store([1, 2, 3], range(3), after=setup.after()))
        assert launched == [1, 1, 1]


def copies_of(setup: Bench) -> list[list[int]]:
    """Return a list that grows by the rows of each run of copies that is queued."""
    copies: list[list[int]] = []
    copy = setup.runtime.copy

    def spy(made: Copies, stream: Stream) -> None:
        copies.append([num for _, _, num in made.runs])
        copy(made, stream)

    vars(setup.runtime)["copy"] = spy
    return copies


def test_direct_copies_are_as_long_as_a_place() -> None:
    with (
        bench() as setup,
        CudaMover(setup.mover.layout, setup.arena, link=setup.link, path="direct") as mover,
    ):
        copies = copies_of(setup)
        # A place holds 4 fragments, and each of the two regions has one of every block.
        setup.land(mover.store(range(1, 7), range(6), after=setup.after()))
        assert copies == [[4, 2]] * 2
        for block in range(1, 7):
            assert np.array_equal(setup.arena.slots[block - 1], setup.block(block))


def test_default_link_has_places_for_large_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstow.transfer.cuda.link.STAGING_BYTES", 4096)
    with bench() as setup:
        blocks = setup.memory.reshape(-1)[: 4 * 8192].reshape(4, 8192)
        with (
            pinned_arena(2, 8192, setup.runtime) as arena,
            CudaMover(on_device([blocks]), arena, path="packed") as mover,
        ):
            setup.land(mover.store([3], [1], after=setup.after()))
            assert np.array_equal(arena.slots[1], blocks[3])


# -- pace ------------------------------------------------------------------------------------------


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def paced(setup: Bench, bytes_per_ms: int) -> Clock:
    """Give the stores of a bench a pace of which a test sets the clock."""
    clock = Clock()
    setup.link.stores._pace = Pace(bytes_per_ms, 4096, clock)
    return clock


def busy(setup: Bench) -> CudaEvent:
    """Return the event of compute that still runs, because nothing has let the device go on."""
    stream = setup.runtime.stream()
    setup.runtime.zero(setup.memory.ctypes.data, 16, stream)  # of block 0, which nothing reads
    return CudaEvent.record(stream)


def gathers_of(setup: Bench) -> list[int]:
    """Return a list that grows by the blocks of each kernel that is queued."""
    launched: list[int] = []
    launch = setup.runtime.launch

    def spy(kernel: Kernel, pack: Pack, stream: Stream) -> None:
        launched.append(pack.num_blocks)
        launch(kernel, pack, stream)

    setup.runtime.launch = spy  # type: ignore[method-assign]
    return launched


def test_store_beside_compute_is_queued_at_the_pace_of_its_link() -> None:
    with bench() as setup:
        clock, launched = paced(setup, bytes_per_ms=4096), gathers_of(setup)
        after = busy(setup)
        ticket = setup.mover.store([1, 2, 3, 4, 5, 6], range(6), after=after)
        # A place holds two blocks of 4096 bytes, and the first batch is small.
        assert launched == [1]
        assert not ticket.poll()
        assert launched == [1], "no time has passed"
        clock.now_s += 0.001
        assert not ticket.poll()
        assert launched == [1, 2]
        clock.now_s += 0.001
        ticket.poll()
        assert launched == [1, 2], "the batch before was twice what a millisecond allows"
        clock.now_s += 0.001
        ticket.poll()
        assert launched == [1, 2, 2]
        run_all()
        assert not ticket.poll(), "all that was queued is done, but a block is missing"
        assert not ticket.source_released()
        clock.now_s += 1
        setup.land(ticket)
        assert launched == [1, 2, 2, 1]
        for block in range(1, 7):
            assert np.array_equal(setup.arena.slots[block - 1], setup.block(block))


def test_stores_beside_compute_share_one_pace() -> None:
    with bench() as setup:
        clock, launched = paced(setup, bytes_per_ms=4096), gathers_of(setup)
        after = busy(setup)
        first = setup.mover.store([1], [0], after=after)
        second = setup.mover.store([2], [1], after=after)
        assert launched == [1], "the first store has used all that may be queued at once"
        clock.now_s += 0.001
        assert not second.poll()
        assert launched == [1, 1]
        for ticket in (first, second):
            setup.land(ticket)


def test_pause_between_stores_earns_no_more_than_a_burst() -> None:
    with bench() as setup:
        clock, launched = paced(setup, bytes_per_ms=4096), gathers_of(setup)
        for _ in range(2):
            launched.clear()
            clock.now_s += 100
            after = busy(setup)
            ticket = setup.mover.store([1, 2, 3, 4, 5, 6], range(6), after=after)
            assert launched == [1]
            clock.now_s += 100
            setup.land(ticket)
            assert launched == [1, 2, 2, 1], "a step of that length earns them all"


def test_store_without_compute_and_load_are_queued_at_once() -> None:
    with bench() as setup:
        paced(setup, bytes_per_ms=1)
        launched = gathers_of(setup)
        first = setup.mover.store([1, 2, 3, 4, 5, 6], range(6), after=setup.after())
        second = setup.mover.store([1, 2, 3, 4, 5, 6], range(6, 12), after=READY)
        assert launched == [1, 2, 2, 1] * 2
        for ticket in (first, second):
            setup.land(ticket)
        after = busy(setup)
        setup.mover.load(range(6), [1, 2, 3, 4, 5, 6], after=after)
        assert launched[8:] == [1, 2, 2, 1]


def test_store_beside_compute_may_fill_all_places_at_once() -> None:
    with bench(num_blocks=12) as setup:
        link = CudaLink(setup.runtime, staging_bytes=8192, num_places=3, busy_bytes_per_ms=1)
        with CudaMover(setup.mover.layout, setup.arena, link=link, path="packed") as mover:
            launched, after = gathers_of(setup), busy(setup)
            mover.store(range(1, 12), range(11), after=after)
            # 28 KiB, because the last batch may exceed the 24 KiB of three places.
            assert launched == [1, 2, 2, 2]


def test_pace_allows_no_more_than_the_time_gives() -> None:
    clock = Clock()
    pace = Pace(1, 1000, clock)
    clock.now_s = 5
    pace.refill()
    assert [pace.take(2500) for _ in range(3)] == [True, True, False]


def test_later_store_waits_until_a_paced_one_is_queued() -> None:
    with bench() as setup:
        clock = paced(setup, bytes_per_ms=4096)
        after = busy(setup)
        first = setup.mover.store([1, 2, 3, 4, 5, 6], range(6), after=after)
        later = setup.mover.store([7], [0], after=setup.after())
        run_all()
        assert not first.poll()
        assert not later.poll()
        clock.now_s += 1
        setup.land(later)
        assert first.poll()
        assert np.array_equal(setup.arena.slots[0], setup.block(7))


def test_direct_store_beside_compute_is_queued_at_the_pace_of_its_link() -> None:
    with (
        bench() as setup,
        CudaMover(setup.mover.layout, setup.arena, link=setup.link, path="direct") as mover,
    ):
        clock, copies = paced(setup, bytes_per_ms=4096), copies_of(setup)
        ticket = mover.store([1, 2, 3, 4], range(4), after=busy(setup))
        assert copies == [[4]], "the fragments of one region are twice what may be queued at once"
        clock.now_s += 0.001
        assert not ticket.poll()
        assert copies == [[4]]
        clock.now_s += 0.001
        setup.land(ticket)
        assert copies == [[4]] * 2


def test_close_does_not_keep_to_the_pace() -> None:
    with bench() as setup:
        paced(setup, bytes_per_ms=1)
        after = busy(setup)
        ticket = setup.mover.store([1, 2, 3, 4, 5, 6], range(6), after=after)
        setup.mover.close()
        assert ticket.poll()
        assert np.array_equal(setup.arena.slots[5], setup.block(6))


def test_lost_device_fails_a_store_that_is_queued_in_part() -> None:
    with bench() as setup:
        clock = paced(setup, bytes_per_ms=4096)
        after = busy(setup)
        ticket = setup.mover.store([1, 2, 3, 4, 5, 6], range(6), after=after)
        clock.now_s += 1
        library.fail("cuLaunchKernel", ILLEGAL_ADDRESS)
        assert ticket.poll()
        assert LOST in str(ticket.error)


def test_refused_call_fails_a_store_that_is_queued_in_part() -> None:
    with bench() as setup:
        clock = paced(setup, bytes_per_ms=4096)
        after = busy(setup)
        ticket = setup.mover.store([1, 2, 3, 4, 5, 6], range(6), after=after)
        clock.now_s += 1
        library.fail("cuLaunchKernel", INVALID_VALUE)
        assert not ticket.poll(), "what was queued before still runs"
        with pytest.raises(CudaError):
            setup.land(ticket)
        setup.land(setup.mover.store([7], [0], after=setup.after()))
        assert np.array_equal(setup.arena.slots[0], setup.block(7))


# -- tickets and events ----------------------------------------------------------------------------


def test_store_releases_its_source_before_it_ends() -> None:
    with bench(num_places=3) as setup:
        ticket = setup.mover.store([1], [0], after=setup.after())
        assert not ticket.source_released()
        while not ticket.source_released():
            assert library.step()
        assert not ticket.poll()
        assert not setup.arena.slots.any(), "the batch has not left the staging memory"
        setup.land(ticket)
        assert ticket.poll()
        assert ticket.error is None


@pytest.mark.parametrize(("path", "direction"), [("direct", "store"), *LOADS])
def test_copy_without_staging_releases_its_source_at_its_end(path: Path, direction: str) -> None:
    with (
        bench() as setup,
        CudaMover(setup.mover.layout, setup.arena, link=setup.link, path=path) as mover,
    ):
        after = setup.after()
        ticket = (
            mover.store([1, 2, 3], range(3), after=after)
            if direction == "store"
            else mover.load(range(3), [1, 2, 3], after=after)
        )
        assert not ticket.source_released(), "no copy has run yet"
        while library.step():
            assert ticket.source_released() == ticket.poll()
        assert ticket.source_released()


def test_job_begins_when_its_host_event_has_happened() -> None:
    with bench() as setup:
        filled = HostEvent()
        first = setup.mover.store([1], [0], after=filled)
        second = setup.mover.store([2], [0], after=setup.after())
        run_all()
        assert not first.poll()
        assert not second.poll(), "stores of a slot keep their order"
        assert not setup.arena.slots.any()
        setup.memory[:, 1] = 7
        filled.set()
        setup.land(first)
        setup.land(second)
        assert np.array_equal(setup.arena.slots[0], setup.block(2))


@pytest.mark.parametrize("path", ["packed", "direct"])
def test_job_waits_for_compute_of_another_device(path: Path) -> None:
    with bench() as setup:
        other = cuda_runtime(1)
        scratch, stream = other.allocate(16), other.stream()
        other.zero(scratch, 16, stream)
        after = CudaEvent.record(stream)
        with CudaMover(setup.mover.layout, setup.arena, link=setup.link, path=path) as mover:
            library.waits()
            tickets = mover.store([1], [0], after=after), mover.load([1], [2], after=after)
            awaited = [number for _, number in library.waits()]
            assert awaited == [library.number_of(stream.ptr)] * 2
            for ticket in tickets:
                setup.land(ticket)
        assert np.array_equal(setup.arena.slots[0], setup.block(1))
        other.free(scratch)


def test_host_event_that_never_happens_holds_up_no_other_job() -> None:
    with bench() as setup:
        never = HostEvent()
        held = [setup.mover.store([1], [0], after=never), setup.mover.load([1], [2], after=never)]
        setup.land(setup.mover.store([3], [2], after=setup.after()))
        setup.land(setup.mover.load([2], [4], after=READY))
        assert np.array_equal(setup.block(4), setup.block(3))
        assert not any(ticket.poll() for ticket in held)


def test_failed_event_fails_only_its_job() -> None:
    with bench() as setup:
        filled = HostEvent()
        first = setup.mover.store([1], [0], after=filled)
        second = setup.mover.store([2], [1], after=READY)
        filled.set(RuntimeError("the step has crashed"))
        setup.land(second)
        with pytest.raises(TransferError, match="the step has crashed"):
            setup.land(first)
        assert not setup.arena.slots[0].any()


def test_wait_raises_after_its_timeout() -> None:
    with bench() as setup:
        filled = HostEvent()
        ticket = setup.mover.store([1], [0], after=filled)
        with pytest.raises(TransferTimeout, match=r"0\.01 s"):
            ticket.wait(0.01)
        with pytest.raises(ConfigError, match="nan"):
            ticket.wait(float("nan"))
        filled.set()
        setup.land(ticket)


def test_job_without_blocks_has_ended() -> None:
    with bench() as setup:
        assert setup.mover.store([], [], after=HostEvent()).poll()


def test_jobs_wait_for_room_for_their_sums_and_keep_their_order() -> None:
    with bench(verify=True) as setup:
        ids = list(range(1, 9))
        setup.memory[:, ids] = np.arange(8, dtype=np.uint8)[:, None]
        setup.land(setup.mover.store(ids, range(8), after=setup.after()))
        setup.memory[:] = 99
        tickets = [setup.mover.load(range(8), ids, after=setup.after()) for _ in range(4)]
        assert not any(ticket.poll() for ticket in tickets)
        setup.land(tickets[2])
        assert tickets[0].poll()
        assert tickets[1].poll()
        assert not tickets[3].poll()
        setup.land(tickets[3])
        for block in ids:
            assert (setup.block(block) == block - 1).all()


def test_sums_of_a_load_of_more_blocks_than_slots_have_room() -> None:
    with bench(verify=True, num_slots=2) as setup:
        setup.land(setup.mover.store([1, 2], [0, 1], after=setup.after()))
        setup.land(setup.mover.load([0, 1, 0, 1, 0, 1], range(3, 9), after=setup.after()))
        for block in range(3, 9):
            assert np.array_equal(setup.block(block), setup.block(2 - block % 2))


def test_sums_of_jobs_in_flight_do_not_overlap() -> None:
    with bench(verify=True) as setup:
        setup.memory[:] = np.arange(9, dtype=np.uint8)[:, None]  # other sums for each block
        setup.land(setup.mover.store(range(1, 9), range(8), after=setup.after()))
        first = setup.mover.load([0, 1, 2], [1, 2, 3], after=setup.after())
        second = setup.mover.load([3, 4, 5], [4, 5, 6], after=setup.after())
        setup.land(first)
        assert not second.poll()
        # Behind the sums of the second there is room for three, and before them too.
        third = setup.mover.load([0, 1, 2, 6], [1, 2, 3, 7], after=setup.after())
        run_all()  # of the second job, because the third one waits
        setup.land(third)
        assert second.poll()
        assert second.error is None


def test_room_for_sums_is_free_and_inside_of_the_memory() -> None:
    rng, ring = random.Random(0), SumRing(cuda_runtime(0), capacity := 8)
    in_flight: list[tuple[int, int]] = []
    num_times_full = 0
    for _ in range(1000):
        num_blocks = rng.randint(1, capacity)
        while (begin := ring.room_for(num_blocks, in_flight)) is None:
            in_flight.pop(0)
        in_flight.append((begin, num_blocks))
        taken = [at for first, num in in_flight for at in range(first, first + num)]
        assert len({*taken} & {*range(capacity)}) == len(taken)
        num_times_full += len(taken) == capacity
    assert num_times_full > 100
    ring.close()


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call", ["cudaStreamWaitEvent", "cuLaunchKernel", "cudaEventRecord", "cudaMemcpyAsync"]
)
def test_refused_call_fails_its_job_after_its_queued_work(call: str) -> None:
    with bench() as setup:
        good = setup.mover.store([1], [0], after=setup.after())
        library.fail(call, INVALID_VALUE)
        bad = setup.mover.store([2, 3, 4], [1, 2, 3], after=setup.after())
        assert not bad.poll()
        next_one = setup.mover.store([5], [4], after=setup.after())
        setup.land(next_one)
        assert bad.poll()
        assert REFUSED in str(bad.error)
        assert good.error is None
        assert np.array_equal(setup.arena.slots[4], setup.block(5))


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_job_that_an_error_of_another_met_is_carried_out_or_moves_nothing(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    with bench() as setup:
        first = setup.mover.store([1], [0], after=setup.after())
        before = setup.arena.slots[1].copy()
        retire = Lane._retire

        def fail(lane: Lane) -> None:
            monkeypatch.setattr(Lane, "_retire", retire)
            raise error

        monkeypatch.setattr(Lane, "_retire", fail)
        if issubclass(error, Exception):
            setup.land(setup.mover.store([2], [1], after=setup.after()))
            assert np.array_equal(setup.arena.slots[1], setup.block(2))
        else:
            with pytest.raises(error):
                setup.mover.store([2], [1], after=setup.after())
            setup.land(setup.mover.store([3], [2], after=setup.after()))
            setup.mover.close()
            assert np.array_equal(setup.arena.slots[1], before)
        assert first.poll()
        assert first.error is None


@pytest.mark.parametrize(
    "call", ["cuLaunchKernel", "cudaMemcpyAsync", "cudaEventRecord", "cudaEventQuery"]
)
def test_lost_device_fails_all_jobs_and_accepts_no_more(call: str) -> None:
    with bench() as setup:
        flying = setup.mover.store([1], [0], after=setup.after())
        waiting = setup.mover.load([4], [7], after=HostEvent())
        loading = setup.mover.load([5], [6], after=setup.after())
        library.fail(call, ILLEGAL_ADDRESS)
        struck = setup.mover.store([2], [1], after=setup.after())
        for ticket in (flying, struck, waiting, loading):
            assert ticket.poll()
            assert LOST in str(ticket.error)
        with pytest.raises(CudaError, match="restart it"):
            setup.mover.store([3], [2], after=setup.after())


def test_close_carries_out_runnable_jobs_and_fails_the_others() -> None:
    with bench() as setup:
        begun = setup.mover.store([1], [0], after=setup.after())
        never = setup.mover.store([2], [1], after=HostEvent())
        behind = setup.mover.store([3], [1], after=setup.after())
        setup.mover.close()
        setup.mover.close()
        assert begun.error is None
        assert np.array_equal(setup.arena.slots[0], setup.block(1))
        for ticket in (never, behind):
            with pytest.raises(TransferError, match="closed before the transfer began"):
                setup.land(ticket)
        with pytest.raises(StateError, match="closed"):
            setup.mover.store([1], [0], after=READY)


def test_close_leaves_the_jobs_of_another_mover_alone() -> None:
    with bench() as setup:
        filled = HostEvent()
        with CudaMover(setup.mover.layout, setup.arena, link=setup.link, path="packed") as other:
            waiting = other.store([1], [0], after=filled)
            flying = other.store([2], [1], after=setup.after())
            setup.mover.close()
            assert not waiting.poll(), "close fails its own jobs only"
            filled.set()
            for ticket in (flying, waiting):
                setup.land(ticket)
        for block in (1, 2):
            assert np.array_equal(setup.arena.slots[block - 1], setup.block(block))


def test_movers_share_a_link_that_the_last_one_closes() -> None:
    with bench() as setup:
        other = CudaMover(setup.mover.layout, setup.arena, link=setup.link, path="packed")
        setup.mover.close()
        setup.land(other.store([1], [3], after=setup.after()))
        assert np.array_equal(setup.arena.slots[3], setup.block(1))
        assert not setup.link.closed
        other.close()
        assert setup.link.closed
        with pytest.raises(StateError, match="build a new one"):
            CudaMover(setup.mover.layout, setup.arena, link=setup.link, path="packed")


def test_default_link_is_built_anew_after_its_last_mover() -> None:
    with bench() as setup:
        for slot in (0, 1):
            with CudaMover(setup.mover.layout, setup.arena, path="packed") as mover:
                setup.land(mover.store([1], [slot], after=setup.after()))
                assert mover._link.staging_bytes == STAGING_BYTES
        assert np.array_equal(setup.arena.slots[1], setup.block(1))


def test_default_link_stays_open_for_a_mover_that_another_thread_makes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with bench() as setup:
        layout, arena = setup.mover.layout, setup.arena
        last = CudaMover(layout, arena, path="packed")
        closing = threading.Thread(target=last.close)

        def found_while_another_closes(*arguments: int) -> CudaLink:
            found = cuda_link(*arguments)
            closing.start()
            closing.join(0.05)
            return found

        monkeypatch.setattr(mover_module, "cuda_link", found_while_another_closes)
        with CudaMover(layout, arena, path="packed") as mover:
            closing.join(10)
            assert not mover._link.closed
            setup.land(mover.store([1], [3], after=setup.after()))
        assert np.array_equal(arena.slots[3], setup.block(1))
        assert mover._link.closed


@pytest.mark.parametrize("call", ["cudaMalloc", "cudaMemcpy"])
def test_failed_construction_frees_all_memory(call: str) -> None:
    with bench() as setup:
        before = library.allocated_bytes()
        library.fail(call, INVALID_VALUE)
        with pytest.raises(CudaError):
            CudaMover(setup.mover.layout, setup.arena, link=setup.link, path="packed", verify=True)
        assert library.allocated_bytes() == before


# -- checksums -------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 2047, 2048, 4095])
def test_changed_slot_fails_to_load(at: int) -> None:
    with bench(verify=True) as setup:
        setup.land(setup.mover.store([1, 2, 3], [4, 0, 2], after=setup.after()))
        setup.land(setup.mover.load([4, 0, 2], [5, 6, 7], after=setup.after()))
        assert np.array_equal(setup.block(5), setup.block(1))
        setup.arena.slots[0, at] ^= 1
        ticket = setup.mover.load([4, 0], [5, 6], after=setup.after())
        with pytest.raises(ChecksumMismatch, match="host slot 0 does not hold"):
            setup.land(ticket)
        setup.land(setup.mover.load([4, 2], [5, 6], after=setup.after()))
        setup.land(setup.mover.store([2], [0], after=setup.after()))
        setup.land(setup.mover.load([0], [6], after=setup.after()))


def test_sums_are_those_of_the_arena() -> None:
    """A mover checks the slots that an earlier one of the same memory has stored."""
    with bench(verify=True) as setup:
        setup.land(setup.mover.store([1, 2], [0, 1], after=setup.after()))
        with CudaMover(setup.mover.layout, setup.arena, link=setup.link, verify=True) as other:
            setup.land(other.load([0], [3], after=setup.after()))
            assert np.array_equal(setup.block(3), setup.block(1))
            setup.arena.slots[1, 7] ^= 1
            with pytest.raises(ChecksumMismatch, match="host slot 1 does not hold"):
                setup.land(other.load([1], [4], after=setup.after()))


def test_failed_check_names_every_damaged_slot() -> None:
    with bench(verify=True) as setup:
        setup.land(setup.mover.store([1, 2, 3], [4, 0, 2], after=setup.after()))
        for slot in (0, 4):
            setup.arena.slots[slot, 5] ^= 1
        slots = [4, 2, 0, 7]
        ticket = setup.mover.load(slots, [5, 6, 7, 8], after=setup.after())
        with pytest.raises(ChecksumMismatch, match=r"host slot 0 does .*first of 3 damaged slots"):
            setup.land(ticket)
        assert ticket.damaged_slots == (0, 4, 7), "slot 7 was never stored"
        assert outcome([ticket], slots) == [False, True, False, False]


def test_refused_copy_names_no_damaged_slot() -> None:
    with bench(verify=True) as setup:
        setup.land(setup.mover.store([1], [0], after=setup.after()))
        setup.arena.slots[0, 5] ^= 1
        library.fail("cudaMemcpyAsync", INVALID_VALUE)
        ticket = setup.mover.load([0], [5], after=setup.after())
        with pytest.raises(CudaError):
            setup.land(ticket)
        assert ticket.damaged_slots == ()
        assert outcome([ticket], [0]) is False


def test_slot_that_was_never_stored_fails_to_load() -> None:
    with bench(verify=True) as setup:
        with pytest.raises(ChecksumMismatch, match="slot 3 was never stored"):
            setup.land(setup.mover.load([3], [1], after=setup.after()))
        setup.land(setup.mover.store([1], [3], after=setup.after()))
        library.fail("cudaMemcpyAsync", INVALID_VALUE)
        with pytest.raises(CudaError):
            setup.land(setup.mover.store([1], [3], after=setup.after()))
        with pytest.raises(ChecksumMismatch, match="slot 3 was never stored"):
            setup.land(setup.mover.load([3], [1], after=setup.after()))


# -- bad input -------------------------------------------------------------------------------------


def test_mover_refuses_unsuitable_layouts_and_options() -> None:
    with bench() as setup:
        regions = setup.mover.layout.regions

        def build(*regions: Region, device: int | None = 0, **options: object) -> None:
            layout = BlockLayout(9, regions, device=device)
            CudaMover(layout, setup.arena, link=setup.link, **options)  # type: ignore[arg-type]

        with pytest.raises(ConfigError, match="the layout is of CPU memory; pass it to HostMover"):
            build(*regions, device=None)
        with pytest.raises(ConfigError, match="is of CUDA device 1, but the link of CUDA device 0"):
            build(*regions, device=1, path="packed")
        with pytest.raises(
            ConfigError, match=r"regions\[0\] has a base_address of .*multiple of the 16"
        ):
            build(Region(regions[0].base_address + 8, 2048, 1024))
        with pytest.raises(
            ConfigError, match="block_stride_bytes of 1000, not a multiple of the 16"
        ):
            build(Region(regions[0].base_address, 1000, 1000))
        with pytest.raises(ConfigError, match="choose 'auto', 'packed' or 'direct'"):
            build(*regions, path="fast")
        with pytest.raises(ConfigError, match="leave out path='direct'"):
            build(*regions, path="direct", verify=True)
        small = CudaLink(setup.runtime, staging_bytes=4096)
        with (
            HostArena(2, 8192) as arena,
            pytest.raises(ConfigError, match="staging_bytes=8192"),
        ):
            layout = BlockLayout(9, (Region(regions[0].base_address, 8192, 8192),), device=0)
            CudaMover(layout, arena, link=small, path="packed")
        for lane in (small.stores, small.loads):
            lane.close()
        with pytest.raises(ConfigError, match="device is -1"):
            BlockLayout(9, regions, device=-1)
        with pytest.raises(ConfigError, match="on CUDA device 0, which the CPU cannot"):
            HostMover(setup.mover.layout, setup.arena)


def test_path_follows_the_measured_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    with bench() as setup:
        for size, expected in ((2047, "direct"), (2049, "packed")):
            # With this rest between copies, direct copies of `size` bytes reach 0.92 of the peak.
            speed = LinkSpeed(50e9, 50e9, size / 50e9 * 0.08 / 0.92, 400e9, 1e-9)
            monkeypatch.setattr("kvstow.transfer.cuda.mover.link_speed", lambda _, s=speed: s)
            with CudaMover(setup.mover.layout, setup.arena, link=setup.link) as mover:
                assert mover.paths == {"store": expected, "load": expected}


def test_path_of_each_direction_follows_its_speed_and_the_smallest_fragment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with bench() as setup:
        # Direct copies reach 0.92 of the peak of stores from 1023 bytes on, and of loads from 2046.
        speed = LinkSpeed(25e9, 50e9, 1023 / 25e9 * 0.08 / 0.92, 400e9, 1e-9)
        monkeypatch.setattr("kvstow.transfer.cuda.mover.link_speed", lambda _: speed)
        base, paths = setup.memory.ctypes.data, []
        for sizes in (2048, 2048), (2048, 1024), (2048, 512):
            regions = tuple(
                Region(base + at * setup.memory[0].size, 2048, size)
                for at, size in enumerate(sizes)
            )
            layout = BlockLayout(9, regions, device=0)
            with CudaMover(layout, setup.arena, link=setup.link) as mover:
                paths.append((mover.paths["store"], mover.paths["load"]))
    assert paths == [("direct", "direct"), ("direct", "packed"), ("packed", "packed")]


class _Happened:
    """An event that has happened."""

    def wait(self) -> None:
        pass

    def add_done_callback(self, callback: Callable[[], None], /) -> None:
        callback()


class _Failing(_Happened):
    """An event that has happened, and whose `wait` raises an unusual error."""

    def wait(self) -> None:
        raise ValueError("lost it")


def test_any_error_of_an_event_fails_its_job() -> None:
    with bench() as setup:
        ticket = setup.mover.store([1], [0], after=_Failing())
        with pytest.raises(TransferError, match="lost it"):
            setup.land(ticket)


def test_job_without_cuda_events_fails() -> None:
    with bench() as setup:
        library.fail("cudaEventCreateWithFlags", ILLEGAL_ADDRESS)
        ticket = setup.mover.store([1], [0], after=_Happened())
        assert ticket.poll()
        assert LOST in str(ticket.error)
