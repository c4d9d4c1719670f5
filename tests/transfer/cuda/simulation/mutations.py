"""Wrong versions of the mover, each of which the simulated GPU must report.

python3 -m tests.transfer.cuda.simulation.program tests.transfer.cuda.simulation.mutations

The program edits the mover's source in memory, and runs a scenario after each edit. It prints the
edits that nothing reports, and then its status is 1.
"""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
from tests.transfer.cuda.simulation.library import library, violations

from kvstow import ChecksumMismatch
from kvstow.transfer import BlockLayout, CudaEvent, CudaLink, CudaMover, Region, pinned_arena
from kvstow.transfer.cuda import lane, link, mover, runtime
from kvstow.transfer.cuda.link_speed import Path as TransferPath

NUM_LAYERS, NUM_BLOCKS, NUM_SLOTS = 3, 20, 24
# A slot of 4 KiB has a little padding, so that one copy carries several slots as they are.
FRAGMENT_BYTES, STRIDE_BYTES = 1356, 1376
BLOCKS_PER_PLACE, NUM_IN_JOB, NUM_TURNS = 2, 8, 2
DEVICE_TO_HOST = 2
NUM_TRIES = 16  # the device's order differs between them, and only half show one of the mistakes

# Name of the mistake: (module, text, replacement). An edit that has no text left in the mover is an
# error, so that the table follows the code.
MUTATIONS: dict[str, tuple[ModuleType, str, str]] = {
    "stores do not wait for compute": (
        mover,
        'runtime.wait(place.stream, after)\n        self._launch("gather"',
        'pass\n        self._launch("gather"',
    ),
    "loads do not wait for compute": (
        mover,
        'runtime.wait(place.stream, after)\n        self._launch("scatter"',
        'pass\n        self._launch("scatter"',
    ),
    "direct copies do not wait for compute": (
        mover,
        "self._runtime.wait(place.stream, after)",
        "pass",
    ),
    "only the first place waits for compute": (
        lane,
        "after = event\n",
        "after = event if number == 0 else None\n",
    ),
    "jobs do not wait for earlier writers": (
        lane,
        "self.runtime.wait(place.stream, written)",
        "pass",
    ),
    "the host takes each event as reached": (
        runtime,
        "if status == _SUCCESS:",
        "if status in (_SUCCESS, _NOT_READY):",
    ),
    "a job is done when one stream is": (
        lane,
        "all(map(is_done, job.done))",
        "any(map(is_done, job.done))",
    ),
    "blocks are released when one stream has read": (
        lane,
        "all(map(is_done, job.released))",
        "any(map(is_done, job.released))",
    ),
    "an upload does not wait for the legacy stream": (
        runtime,
        "self._api.streamSynchronize(0)",
        "pass",
    ),
    "work of a place on two streams": (
        mover,
        "runtime.copy(copies, place.stream)\n\n    def _load",
        "runtime.copy(copies, job.places[0].stream)\n\n    def _load",
    ),
    "gather instead of scatter": (mover, 'self._launch("scatter"', 'self._launch("gather"'),
    "scatter instead of gather": (mover, 'self._launch("gather"', 'self._launch("scatter"'),
    "one chunk too few": (mover, "self._num_chunks, ids", "self._num_chunks - 1, ids"),
    "one chunk too many": (mover, "self._num_chunks, ids", "self._num_chunks + 1, ids"),
    "another table": (mover, "self._chunks, self._num_chunks, ids", "sums, self._num_chunks, ids"),
    "a table of garbage": (
        mover,
        "runtime.upload(self._chunks, table.tobytes())",
        "runtime.upload(self._chunks, bytes([255]) * table.nbytes)",
    ),
    "ids of another batch": (mover, "job.block_ids[begin:]", "job.block_ids[begin // 2:]"),
    "one block too few": (mover, "ids, num, place", "ids, num - 1, place"),
    "one block too many": (mover, "ids, num, place", "ids, num + 1, place"),
    "the wrong place": (mover, "place.address, self._stag", "job.places[0].address, self._stag"),
    "the wrong stride of staging": (
        mover,
        "place.address, self._staging_stride",
        "place.address, self._staging_stride - 16",
    ),
    "sums of another block": (
        mover,
        "device_address(job.first_sum + begin)",
        "device_address(0)",
    ),
    "sums are not zeroed": (mover, "self._runtime.zero(sums, SUM_BYTES * num, stream)", "pass"),
    "sums are not fetched": (mover, "[(to, sums, 1)]", "[]"),
    "sums zeroed on another stream": (
        mover,
        "self._runtime.zero(sums, SUM_BYTES * num, stream)",
        "self._runtime.zero(sums, SUM_BYTES * num, self._link.loads._places[0].stream)",
    ),
    "copies of the wrong kind": (
        runtime,
        "kind = _DEVICE_TO_HOST if to_host",
        "kind = _HOST_TO_DEVICE if to_host",
    ),
    "pitches swapped": (
        runtime,
        "to, to_pitch, origin, origin_pitch",
        "to, origin_pitch, origin, to_pitch",
    ),
    "rows of a copy forgotten": (runtime, "num_rows * row_bytes, kind", "row_bytes, kind"),
}


# -- the scenario ----------------------------------------------------------------------------------


class World:
    """A cache on the device whose blocks compute rewrites, and a mover of its blocks."""

    def __init__(self, path: TransferPath, *, verify: bool, slot_factor: int) -> None:
        self.gpu, self.verify = runtime.cuda_runtime(0), verify
        layer_bytes = NUM_BLOCKS * STRIDE_BYTES
        self.layers = [self.gpu.allocate(layer_bytes) for _ in range(NUM_LAYERS)]
        for layer in self.layers:
            self.gpu.upload(layer, bytes(layer_bytes))
        self.layout = BlockLayout(
            NUM_BLOCKS,
            tuple(Region(layer, STRIDE_BYTES, FRAGMENT_BYTES) for layer in self.layers),
            device=0,
        )
        self.arena = pinned_arena(NUM_SLOTS, self.layout.slot_bytes * slot_factor, self.gpu)
        staging_bytes = BLOCKS_PER_PLACE * self.arena.slot_stride_bytes
        self.mover = CudaMover(
            self.layout,
            self.arena,
            link=CudaLink(self.gpu, staging_bytes=staging_bytes),
            path=path,
            verify=verify,
        )
        self.compute = self.gpu.stream()
        self.seen = self.gpu.allocate_mapped(NUM_LAYERS * layer_bytes)
        self.values = np.zeros(NUM_BLOCKS, dtype=np.uint8)

    def write(self, ids: list[int]) -> None:
        """Let compute write another value into every byte of each block."""
        for block in ids:
            self.values[block] = random_.randrange(1, 256)
            for layer in self.layers:
                address, value = layer + block * STRIDE_BYTES, int(self.values[block])
                self.gpu._api.memsetAsync(address, value, FRAGMENT_BYTES, self.compute.ptr)

    def read(self) -> npt.NDArray[np.uint8]:
        """Return the device memory as compute reads it, shape [layers, blocks, stride]."""
        size = NUM_BLOCKS * STRIDE_BYTES
        host = self.seen.host.ctypes.data
        for i, layer in enumerate(self.layers):
            stream = self.compute.ptr
            self.gpu._api.memcpyAsync(host + i * size, layer, size, DEVICE_TO_HOST, stream)
        return self.seen.host.reshape(NUM_LAYERS, NUM_BLOCKS, STRIDE_BYTES)

    def expect(self) -> None:
        """Compare all device memory with the values."""
        found = self.read()
        self.gpu._api.streamSynchronize(self.compute.ptr)
        assert (found[:, :, :FRAGMENT_BYTES] == self.values[:, None]).all()
        assert not found[:, :, FRAGMENT_BYTES:].any(), "bytes between blocks changed"

    def after(self) -> CudaEvent:
        return CudaEvent.record(self.compute)

    def turn(self, number: int) -> None:
        ids = random_.sample(range(1, NUM_BLOCKS), 2 * NUM_IN_JOB)
        mine, others = ids[:NUM_IN_JOB], ids[NUM_IN_JOB:]
        first_slot = random_.randrange(NUM_SLOTS - NUM_IN_JOB)
        in_a_row = range(first_slot, first_slot + NUM_IN_JOB)
        slots = random_.sample(in_a_row if number % 2 else range(NUM_SLOTS), NUM_IN_JOB)
        self.write(ids)
        # The second store overwrites what the first may still write.
        first = self.mover.store(others, slots, after=self.after())
        stored = self.values[mine].copy()
        second = self.mover.store(mine, slots, after=self.after())
        while not second.source_released():
            pass
        self.write(mine)
        for ticket in (first, second):
            ticket.wait(30)
        content = self.arena.slots[slots, : self.layout.slot_bytes]
        assert (content == stored[:, None]).all(), "a slot holds other bytes"
        self.read()  # by compute, before the loads overwrite the blocks
        one = self.mover.load(slots, others, after=self.after())
        two = self.mover.load(slots[::-1], others, after=self.after())
        for ticket in (one, two):
            ticket.wait(30)
        self.values[others] = stored[::-1]
        self.expect()
        if self.verify:
            self.arena.slots[slots[0], 9] ^= 1
            damaged = self.mover.load(slots[:1], others[:1], after=self.after())
            while not damaged.poll():
                pass
            assert isinstance(damaged.error, ChecksumMismatch), "damage was not found"
            self.write(others[:1])

    def close(self) -> None:
        self.mover.close()
        self.arena.close()
        self.gpu.free_mapped(self.seen)
        for layer in self.layers:
            self.gpu.free(layer)


random_ = random.Random(1)


def scenario() -> None:
    """Store and load on every path; raise if a byte or an order is wrong."""
    for path, verify, slot_factor in (
        ("packed", False, 1),
        ("packed", True, 1),
        ("packed", False, 4),
        ("direct", False, 1),
    ):
        world = World(path, verify=verify, slot_factor=slot_factor)  # type: ignore[arg-type]
        try:
            for number in range(NUM_TURNS):
                world.turn(number)
        finally:
            world.close()
    assert not (found := violations()), found[0]


# -- edits -----------------------------------------------------------------------------------------


@contextmanager
def edited(module: ModuleType, text: str, wrong: str) -> Iterator[None]:
    """Let the functions of a module run the code of an edited source."""
    source = Path(str(module.__file__)).read_text()
    assert text in source, f"{module.__name__} has no such text: {text}"
    scratch: dict[str, Any] = {"__name__": module.__name__, "__file__": module.__file__}
    exec(compile(source.replace(text, wrong), str(module.__file__), "exec"), scratch)
    before: list[tuple[FunctionType, CodeType]] = []
    of_edit = dict(functions(scratch, module))
    for name, function in functions(vars(module), module):
        before.append((function, function.__code__))
        function.__code__ = of_edit[name].__code__
    assert any(function.__code__ != code for function, code in before), "no function has changed"
    try:
        yield
    finally:
        for function, code in before:
            function.__code__ = code


def functions(names: dict[str, Any], module: ModuleType) -> list[tuple[str, FunctionType]]:
    """Return the functions and methods that a module defines, with their names."""
    found: dict[str, FunctionType] = {}
    for value in list(names.values()):
        members = vars(value).values() if isinstance(value, type) else [value]
        for member in members:
            inner = inspect.unwrap(getattr(member, "__func__", member))
            if isinstance(inner, FunctionType) and inner.__code__.co_filename == module.__file__:
                found[inner.__qualname__] = inner
    return list(found.items())


def reports(run: Callable[[], None]) -> bool:
    """Return whether a scenario fails."""
    try:
        run()
    except Exception as error:
        print(f"    {type(error).__name__}: {str(error)[:90]}")
        violations()
        return True
    return False


def main() -> int:
    scenario()
    missed = []
    for name, mutation in MUTATIONS.items():
        print(name)
        with edited(*mutation):
            is_reported = any(reports(scenario) for _ in range(NUM_TRIES))
        if not is_reported:
            missed.append(name)
        if lost := [gpu for gpu in runtime._runtimes.values() if gpu.lost]:
            forget(lost)
        scenario()  # the mover is whole again, so the next edit alone decides
    print("\n".join(f"MISSED: {name}" for name in missed))
    return 1 if missed else 0


def forget(lost: list[runtime.CudaRuntime]) -> None:
    """Let the next scenario begin with a device that works."""
    library().simulation_repair()
    for gpu in lost:
        gpu.lost = None
    link._links.clear()


if __name__ == "__main__":
    sys.exit(main())
