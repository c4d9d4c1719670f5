"""On a busy device, a transfer moves what was computed before it, and nothing older or newer."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.gpu.memory import Path, World, world

from kvstow import StateError, TransferError
from kvstow.transfer import CudaEvent, HostEvent, Ticket

BUSY_CYCLES = 100_000_000  # some 50 ms, longer than any job of these tests
NUM_TURNS = 30
# A virtual machine may pause for longer than the device is busy, and then a control finds nothing.
CONTROLS = 5

paths = pytest.mark.parametrize("path", ["packed", "direct"])


@pytest.fixture
def torch() -> Any:
    import torch  # noqa: PLC0415 - missing where these tests are only collected

    return torch


def keep_busy(torch: Any, cycles: int = BUSY_CYCLES) -> None:
    """Keep the current stream busy."""
    torch.cuda._sleep(cycles)


def until(is_over: Callable[[], bool]) -> None:
    while not is_over():
        pass


def expect_slots(w: World, slots: list[int], value: int) -> None:
    assert (w.arena.slots[slots] == value).all(), "a slot holds bytes of another step"


@paths
def test_store_is_right_if_blocks_are_rewritten_on_release(torch: Any, path: Path) -> None:
    compute = torch.cuda.Stream()
    ids, slots = list(range(1, 21)), list(range(20))
    left = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    with world(path=path, fragment_bytes=64 << 10, num_blocks=24) as w:
        for turn in range(NUM_TURNS):
            with torch.cuda.stream(compute):
                for _ in range(5):
                    left @ left
                w.cache.fill(ids, turn)
            ticket = w.mover.store(ids, slots, after=CudaEvent.record(compute))
            until(ticket.source_released)
            with torch.cuda.stream(compute):
                w.cache.fill(ids, 255)
            ticket.wait(60)
            expect_slots(w, slots, turn)


@paths
def test_store_waits_for_compute(torch: Any, path: Path) -> None:
    assert not _store_is_early(torch, path, is_idle=False)


@paths
def test_store_that_does_not_wait_reads_stale_bytes(torch: Any, path: Path) -> None:
    """The control of the test above: without the wait, bytes must be wrong."""
    assert any(_store_is_early(torch, path, is_idle=True) for _ in range(CONTROLS))


def _store_is_early(torch: Any, path: Path, *, is_idle: bool) -> bool:
    compute, idle = torch.cuda.Stream(), torch.cuda.Stream()
    with world(path=path) as w:
        w.cache.fill([1, 2, 3], 1)
        torch.cuda.synchronize()
        with torch.cuda.stream(compute):
            keep_busy(torch)
            w.cache.fill([1, 2, 3], 2)
        after = CudaEvent.record(idle if is_idle else compute)
        w.mover.store([1, 2, 3], [4, 9, 5], after=after).wait(60)
        torch.cuda.synchronize()
        return not bool((w.arena.slots[[4, 9, 5]] == 2).all())


@paths
def test_load_waits_for_compute_that_reads(torch: Any, path: Path) -> None:
    assert not _load_is_early(torch, path, is_idle=False)


@paths
def test_load_that_does_not_wait_overwrites_blocks_in_use(torch: Any, path: Path) -> None:
    """The control of the test above: without the wait, bytes must be wrong."""
    assert any(_load_is_early(torch, path, is_idle=True) for _ in range(CONTROLS))


def _load_is_early(torch: Any, path: Path, *, is_idle: bool) -> bool:
    compute, idle = torch.cuda.Stream(), torch.cuda.Stream()
    with world(path=path) as w:
        w.cache.fill([1, 2, 3], 1)
        w.arena.slots[[4, 9, 5]] = 2
        seen = torch.empty_like(w.cache.memory)
        torch.cuda.synchronize()
        with torch.cuda.stream(compute):
            keep_busy(torch)
            seen.copy_(w.cache.memory)
        after = CudaEvent.record(idle if is_idle else compute)
        w.mover.load([4, 9, 5], [1, 2, 3], after=after).wait(60)
        memory, later = seen.cpu().numpy(), w.cache.bytes()
        assert all((w.cache.slot(later, block) == 2).all() for block in (1, 2, 3))
        return not all((w.cache.slot(memory, block) == 1).all() for block in (1, 2, 3))


@paths
def test_loads_and_stores_run_at_once(torch: Any, path: Path) -> None:
    """Many jobs are in flight, which store blocks and load them into other blocks."""
    chances, compute = random.Random(7), torch.cuda.Stream()
    with world(path=path, num_blocks=64, num_slots=128, fragment_bytes=16 << 10) as w:
        values: dict[int, int] = {}  # of each slot that holds a stored block
        for turn in range(NUM_TURNS):
            ids = chances.sample(range(1, 64), 40)
            slots = chances.sample([s for s in range(128) if s not in values], 8)
            mine, loads = ids[:8], list(values)[:32]
            with torch.cuda.stream(compute):
                w.cache.fill(mine, turn)
            running: list[Ticket] = [
                w.mover.store(mine, slots, after=CudaEvent.record(compute)),
                w.mover.load(loads, ids[8 : 8 + len(loads)], after=CudaEvent.record(compute)),
            ]
            for ticket in running:
                ticket.wait(60)
            expect_slots(w, slots, turn)
            memory = w.cache.bytes()
            for slot, block in zip(loads, ids[8:], strict=False):
                assert (w.cache.slot(memory, block) == values[slot]).all()
            values.update(dict.fromkeys(slots, turn))
            for slot in list(values)[:-48]:
                del values[slot]


def test_load_can_wait_for_the_store_of_its_slots(torch: Any) -> None:
    """As an engine does it: the load is submitted once the store's ticket has ended."""
    with world(num_blocks=24) as w:
        for turn in range(NUM_TURNS):
            w.cache.fill([1], turn)
            store = w.mover.store([1], [turn], after=CudaEvent.record(torch.cuda.current_stream()))
            until(store.poll)
            load = w.mover.load([turn], [2], after=CudaEvent.record(torch.cuda.current_stream()))
            load.wait(60)
            assert (w.cache.slot(w.cache.bytes(), 2) == turn).all()


def test_event_records_streams_of_torch_and_addresses(torch: Any) -> None:
    side = torch.cuda.Stream()
    with world() as w:
        for value, stream in enumerate([torch.cuda.current_stream(), side], start=1):
            with torch.cuda.stream(stream):
                keep_busy(torch)
                w.cache.fill([3], value)
            w.mover.store([3], [value], after=CudaEvent.record(stream)).wait(60)
            expect_slots(w, [value], value)
        with torch.cuda.stream(side):
            keep_busy(torch)
            w.cache.fill([3], 9)
        w.mover.store([3], [9], after=CudaEvent.record(side.cuda_stream, device=0)).wait(60)
        expect_slots(w, [9], 9)


def test_event_records_streams_of_cupy(torch: Any) -> None:
    import cupy  # noqa: PLC0415 - missing where these tests are only collected

    stream = cupy.cuda.Stream(non_blocking=True)
    with world() as w:
        held = torch.cuda.Stream()
        with torch.cuda.stream(held):
            keep_busy(torch)
            until_then = torch.cuda.Event()
            until_then.record(held)
        # cupy's stream waits for torch's, and then writes.
        cupy.cuda.runtime.streamWaitEvent(stream.ptr, until_then.cuda_event)
        region = w.cache.layout.regions[0]
        address = region.base_address + 3 * region.block_stride_bytes
        cupy.cuda.runtime.memsetAsync(address, 77, region.block_bytes, stream.ptr)
        w.mover.store([3], [0], after=CudaEvent.record(stream)).wait(60)
        assert (w.arena.slots[0, : region.block_bytes] == 77).all()


def test_cuda_event_serves_other_movers(torch: Any) -> None:
    keep_busy(torch)
    event, notified = CudaEvent.record(torch.cuda.current_stream()), HostEvent()
    event.add_done_callback(notified.set)
    event.wait()
    notified.wait()


def test_stream_under_capture_is_refused(torch: Any) -> None:
    ones, graph = torch.ones(8, device="cuda"), torch.cuda.CUDAGraph()
    refused: list[StateError] = []
    CudaEvent.record(torch.cuda.current_stream())  # compiles the kernels before the capture
    with torch.cuda.graph(graph):
        ones += 1
        try:
            CudaEvent.record(torch.cuda.current_stream())
        except StateError as error:
            refused.append(error)
    assert len(refused) == 1
    graph.replay()
    torch.cuda.synchronize()
    assert (ones == 2).all()


@paths
def test_close_carries_out_begun_jobs(torch: Any, path: Path) -> None:
    compute = torch.cuda.Stream()
    with world(path=path) as w:
        with torch.cuda.stream(compute):
            keep_busy(torch)
            w.cache.fill([1, 2], 5)
        begun = w.mover.store([1, 2], [0, 1], after=CudaEvent.record(compute))
        never = w.mover.load([3], [4], after=HostEvent())
        assert not begun.poll()
        w.mover.close()
        assert begun.poll()
        assert begun.error is None
        expect_slots(w, [0, 1], 5)
        assert isinstance(never.error, TransferError)
        with pytest.raises(StateError, match="closed"):
            w.mover.store([1], [0], after=CudaEvent.record(compute))


def test_tickets_end_when_only_polled(torch: Any) -> None:
    with world() as w:
        after = CudaEvent.record(torch.cuda.current_stream())
        tickets = [w.mover.store([1 + i], [i], after=after) for i in range(16)]
        memory = w.cache.bytes()
        until(lambda: all(ticket.poll() for ticket in tickets))
        for i in range(16):
            assert np.array_equal(w.arena.slots[i], w.cache.slot(memory, 1 + i))
