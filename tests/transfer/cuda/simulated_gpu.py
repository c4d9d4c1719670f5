"""A simulated GPU whose queued work runs in any order that CUDA allows: a model checker of order.

Streams are queues. Work of one stream runs in its order, and only events order work of different
streams. Queued work runs when the scheduler, `choose`, picks its stream. Long copies and kernels
run in two halves, so that other work can come in between. The host's calls take effect at once, as
in CUDA. Between two calls the device gets as far as `choose` lets it.

As in CUDA, an event stands for the work before its latest record. A wait is for what the event
stands for when the wait is queued. A wait for an event that was never recorded has no effect.
"""

import ctypes
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np

from kvstow.transfer.cuda.interface import Copies, CudaError, Kernel, MappedMemory, Pack
from kvstow.transfer.cuda.kernels import CHUNK_DTYPE, checksum

GARBAGE = 0xDB

Choose = Callable[[list[int | None]], int | None]
"""Picks one of the streams that can go on; None stands for the host, where it can go on."""


@dataclass(eq=False)
class FakeStream:
    name: int
    queue: deque["Work"] = field(default_factory=deque)


@dataclass(eq=False)
class FakeEvent:
    recorded: "Work | None" = None


@dataclass(eq=False)
class Work:
    """Queued work: its halves, or the work that it waits for."""

    parts: deque[Callable[[], None]]
    stream: FakeStream
    waits_for: "Work | None" = None
    is_done: bool = False


class SimulatedGpu:
    """See `Runtime`.

    Attributes:
        dropped: waits to leave out, as (waiting stream, stream that it waits for).
        seen: all such pairs for which a wait was queued.
        blind: whether the host takes every event as reached.
        fail: the error that a call raises the next time, by the name of the call.
    """

    def __init__(self, choose: Choose, *, dropped: tuple[int, int] | None = None) -> None:
        self.device = 0
        self.identity = "any order"
        self.pci_bus_id = "nowhere"
        self.lost: CudaError | None = None
        self.dropped = dropped
        self.seen: set[tuple[int, int]] = set()
        self.blind = False
        self.fail: dict[str, CudaError] = {}
        self.streams: list[FakeStream] = []
        self.allocated: dict[int, object] = {}
        self._choose = choose

    # -- the device -----------------------------------------------------------------------------

    def _runnable(self) -> list[FakeStream]:
        able = []
        for stream in self.streams:
            if stream.queue:
                before = stream.queue[0].waits_for
                if before is None or before.is_done:
                    able.append(stream)
        return able

    def run(self) -> None:
        """Let the device go on until `choose` picks the host."""
        while able := self._runnable():
            if (chosen := self._choose([*(stream.name for stream in able), None])) is None:
                return
            self._run_part(self.streams[chosen])

    def step(self) -> bool:
        """Let the device do one part; return False if no stream can go on."""
        if not (able := self._runnable()):
            return False
        chosen = self._choose([stream.name for stream in able])
        assert chosen is not None
        self._run_part(self.streams[chosen])
        return True

    def run_all(self) -> None:
        while self.step():
            pass

    def _run_part(self, stream: FakeStream) -> None:
        work = stream.queue[0]
        if work.parts:
            work.parts.popleft()()
        if not work.parts:
            work.is_done = True
            stream.queue.popleft()

    def queue(self, stream: FakeStream, *parts: Callable[[], None]) -> Work:
        work = Work(deque(parts), stream)
        stream.queue.append(work)
        return work

    def _enter(self, call: str) -> None:
        if call in self.fail:
            error = self.fail.pop(call)
            if error.is_fatal:
                self.lost = error
            raise error
        if self.lost is not None:
            raise self.lost
        self.run()

    # -- Runtime --------------------------------------------------------------------------------

    def current(self) -> AbstractContextManager[object]:
        return nullcontext()

    def stream(self) -> FakeStream:
        self.streams.append(FakeStream(len(self.streams)))
        return self.streams[-1]

    def event(self) -> FakeEvent:
        return FakeEvent()

    def record(self, event: FakeEvent, stream: FakeStream) -> None:
        self._enter("record")
        event.recorded = self.queue(stream)

    def record_external(self, stream: FakeStream) -> FakeEvent:
        event = self.event()
        self.record(event, stream)
        return event

    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        self._enter("wait")
        if event.recorded is None:
            return
        pair = (stream.name, event.recorded.stream.name)
        self.seen.add(pair)
        if pair != self.dropped:
            self.queue(stream).waits_for = event.recorded

    def is_done(self, event: FakeEvent) -> bool:
        self._enter("is_done")
        return self.blind or event.recorded is None or event.recorded.is_done

    def synchronize(self, event: FakeEvent) -> None:
        self._enter("synchronize")
        if event.recorded is not None:
            while not event.recorded.is_done:
                assert self.step(), "the host waits for an event that never happens"

    def allocate(self, num_bytes: int) -> int:
        self._enter("allocate")
        memory = np.full(num_bytes + 256, GARBAGE, dtype=np.uint8)
        address = -(-memory.ctypes.data // 256) * 256
        self.allocated[address] = memory
        return address

    def free(self, address: int) -> None:
        is_busy = any(work.parts for stream in self.streams for work in stream.queue)
        assert self.lost or not is_busy, "freed while work is queued"
        del self.allocated[address]

    def allocate_mapped(self, num_bytes: int) -> MappedMemory:
        address = self.allocate(num_bytes)
        view = (ctypes.c_uint8 * num_bytes).from_address(address)
        return MappedMemory(np.frombuffer(memoryview(view), dtype=np.uint8), address)

    def free_mapped(self, memory: MappedMemory) -> None:
        self.free(memory.device_address)

    def upload(self, address: int, data: bytes) -> None:
        self._enter("upload")
        ctypes.memmove(address, data, len(data))

    def zero(self, address: int, num_bytes: int, stream: FakeStream) -> None:
        self._enter("zero")

        def clear() -> None:
            ctypes.memset(address, 0, num_bytes)

        self.queue(stream, clear)

    def copy(self, copies: Copies, stream: FakeStream) -> None:
        self._enter("copy")
        for to, origin, num_rows in copies.runs:

            def move(first: int, last: int, to: int = to, origin: int = origin) -> None:
                for row in range(first, last):
                    ctypes.memmove(
                        to + row * copies.to_pitch_bytes,
                        origin + row * copies.origin_pitch_bytes,
                        copies.row_bytes,
                    )

            self.queue(stream, *_halves(num_rows, move))

    def launch(self, kernel: Kernel, pack: Pack, stream: FakeStream) -> None:
        self._enter(kernel)
        self.queue(stream, *self._kernel(pack, is_gather=kernel == "gather"))

    def register(self, address: int, num_bytes: int) -> None:
        self._enter("register")
        assert address not in self.allocated
        self.allocated[address] = num_bytes

    def unregister(self, address: int) -> None:
        del self.allocated[address]

    def _kernel(self, pack: Pack, *, is_gather: bool) -> Iterator[Callable[[], None]]:
        """Yield the halves of what `pack.cu` does. The launch has copied the ids."""
        ids = np.frombuffer(pack.block_ids.tobytes(), dtype=np.int32)
        assert 0 < pack.num_blocks <= len(ids)

        def move(first: int, last: int) -> None:
            table = np.frombuffer(_bytes(pack.chunks, pack.num_chunks * 24), dtype=CHUNK_DTYPE)
            num_bytes = int((table["offset"] + table["num_bytes"]).max())
            for i in range(first, last):
                place = pack.staging + i * pack.staging_stride_bytes
                for base, stride, offset, size in table.tolist():
                    ends = [place + offset, base + int(ids[i]) * stride]
                    to, origin = ends if is_gather else reversed(ends)
                    ctypes.memmove(to, origin, size)
                if pack.checksums:
                    slot = np.frombuffer(_bytes(place, num_bytes), dtype=np.uint8)
                    sums = np.frombuffer(_bytes(pack.checksums, 8 * (i + 1)), dtype=np.uint64)
                    sums[i : i + 1] += checksum(slot[None])  # wraps, as on the device

        return _halves(pack.num_blocks, move)


def _halves(num: int, move: Callable[[int, int], None]) -> Iterator[Callable[[], None]]:
    middle = (num + 1) // 2
    yield lambda: move(0, middle)
    if middle < num:
        yield lambda: move(middle, num)


def _bytes(address: int, num_bytes: int) -> memoryview:
    return memoryview((ctypes.c_uint8 * num_bytes).from_address(address))
