"""The calls of CUDA that a job makes. Each costs the engine's thread some microseconds."""

from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.transfer.cuda.fake_cupy import FakeCupy

from kvstow.transfer import BlockLayout, CudaEvent, CudaLink, CudaMover, HostArena, Region
from kvstow.transfer.cuda import runtime as runtime_module
from kvstow.transfer.cuda.interface import Pack
from kvstow.transfer.cuda.kernels import MAX_BLOCKS

FRAGMENT_BYTES, NUM_LAYERS = 1024, 4
BLOCKS_PER_PLACE = 64
LANES = 32
# Of one block, and of 512 blocks in 8 places: what a trial of this design reached.
MOST_CALLS = {1: 18, 512: 67}


class Counted(SimpleNamespace):
    """Functions of cupy, which count their calls."""

    def __init__(self, calls: Counter[str], **functions: Any) -> None:
        super().__init__(**functions)
        self._calls = calls

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name.startswith("_") or isinstance(value, type) or not callable(value):
            return value

        def counted(*args: Any) -> Any:
            self._calls[name] += 1
            return value(*args)

        return counted


class CountingCupy(FakeCupy):
    """cupy that carries out nothing, and takes each event as reached."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        addresses = iter(range(1 << 40, 1 << 50, 1 << 35))

        def nothing(*_: Any) -> int:
            return 0

        self.cuda.runtime = Counted(
            self.counts,
            **vars(self.cuda.runtime)
            | dict.fromkeys(
                ["streamWaitEvent", "memcpyAsync", "memcpy2DAsync", "memsetAsync"], nothing
            )
            | {"malloc": lambda _: next(addresses), "eventRecord": nothing},
        )
        self.cuda.driver = Counted(self.counts, **vars(self.cuda.driver))
        self.cuda.Stream = lambda **_: SimpleNamespace(ptr=7, cuda_stream=7, device_index=0)
        event = self.cuda.Event

        def make_event(**options: Any) -> Any:
            self.counts["eventCreate"] += 1
            return event(**options)

        self.cuda.Event = make_event

    def RawModule(self, *, code: str, options: tuple[str, ...]) -> SimpleNamespace:
        def get_function(_: str) -> SimpleNamespace:
            def launch(
                grid: tuple[int], block: tuple[int], pack: Pack, shared: int, stream: object
            ) -> None:
                assert grid[0] > 0
                assert block[0] % LANES == 0, "the kernels need whole warps"
                assert shared == 0
                assert stream is not None
                assert 0 < pack.num_blocks <= MAX_BLOCKS
                self.counts["launchKernel"] += 1

            return SimpleNamespace(compile=lambda: None, num_regs=40, kernel=launch)

        return SimpleNamespace(get_function=get_function)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> CountingCupy:
    cupy = CountingCupy()
    cupy.install(monkeypatch)
    monkeypatch.setattr(runtime_module, "_runtimes", {})
    return cupy


@pytest.fixture
def mover(cupy: CountingCupy) -> Iterator[CudaMover]:
    regions = tuple(
        Region((1 << 30) * (layer + 1), FRAGMENT_BYTES, FRAGMENT_BYTES)
        for layer in range(NUM_LAYERS)
    )
    layout = BlockLayout(600, regions, device=0)
    staging_bytes = BLOCKS_PER_PLACE * layout.slot_bytes
    runtime = runtime_module.cuda_runtime(0)
    with HostArena(1100, layout.slot_bytes) as arena:
        link = CudaLink(runtime, staging_bytes=staging_bytes)
        with CudaMover(layout, arena, link=link, path="packed") as mover:
            yield mover


def calls_of(cupy: CountingCupy, work: Callable[[], object]) -> Counter[str]:
    cupy.counts.clear()
    work()
    return Counter({name: num for name, num in cupy.counts.items() if num})


@pytest.mark.parametrize("num", [1, 512])
@pytest.mark.parametrize("way", ["store", "load"])
@pytest.mark.parametrize("has_context", [True, False])
def test_calls_of_a_job(
    cupy: CountingCupy, mover: CudaMover, num: int, way: str, has_context: bool
) -> None:
    stream = cupy.cuda.Stream()
    ids = np.arange(1, num + 1)[::-1]
    slots = np.arange(num)
    if has_context:
        cupy.cuda.driver.ctxSetCurrent(1)

    def submit() -> None:
        after = CudaEvent.record(stream)
        if way == "store":
            mover.store(ids, slots, after=after)
        else:
            mover.load(slots, ids, after=after)

    submit()  # makes the events that later jobs use again
    mover._link.stores.advance()
    mover._link.loads.advance()
    calls = calls_of(cupy, submit)
    # The first batch of a store, and the last of a load, fills an eighth of a place.
    num_batches = 1 if num == 1 else 1 + -(-(num - BLOCKS_PER_PLACE // 8) // BLOCKS_PER_PLACE)
    num_streams = min(num_batches, 3)
    assert calls.pop("ctxGetCurrent") == 2
    assert calls.pop("ctxSetCurrent", 0) == (0 if has_context else 4)
    assert {"eventQuery": 0} | calls == {
        # The event that the job waits for, and where each stream has read and has ended.
        "streamIsCapturing": 1,
        "eventCreate": 1,
        # Whether the engine computes, which slows stores down.
        "eventQuery": 1 if way == "store" else 0,
        "eventRecord": 1 + num_streams * (2 if way == "store" else 1),
        "streamWaitEvent": num_streams,
        "launchKernel": num_batches,
        "memcpyAsync": num_batches,
    }
    assert calls.total() + 2 <= MOST_CALLS[num]


def test_poll_of_a_job_asks_for_one_event_of_each_stream(
    cupy: CountingCupy, mover: CudaMover
) -> None:
    cupy.cuda.driver.ctxSetCurrent(1)
    ticket = mover.store([1], [0], after=CudaEvent.record(cupy.cuda.Stream()))
    calls = calls_of(cupy, ticket.poll)
    assert calls == {"ctxGetCurrent": 1, "eventQuery": 1}
    assert calls_of(cupy, ticket.poll) == {}, "the job has ended"
