"""Transfers of two GPUs in one process, from threads with and without a device of their own.

The program then runs the same on wrong versions of the code, which do not guard the device of a
thread. It prints those that nothing reports, and then its status is 1.

python3 -m tests.transfer.cuda.simulation.program tests.transfer.cuda.simulation.two_devices
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import cupy
import numpy as np
from tests.transfer.cuda.simulation.library import forget_contexts, has_context
from tests.transfer.cuda.simulation.mutations import edited, forget, reports

from kvstow.doctor import gpu as doctor
from kvstow.transfer import (
    BlockLayout,
    CudaEvent,
    CudaLink,
    CudaMover,
    HostArena,
    Region,
    pinned_arena,
)
from kvstow.transfer.cuda import lane
from kvstow.transfer.cuda import runtime as runtime_module
from kvstow.transfer.cuda.runtime import cuda_runtime

NUM_BLOCKS, BLOCK_BYTES = 8, 4096
IDS, SLOTS = [3, 1, 5], [0, 4, 2]

# Name of the mistake: (module, text, replacement).
MUTATIONS: dict[str, tuple[ModuleType, str, str]] = {
    "jobs are queued in the thread's own context": (
        lane,
        "with self.runtime.current():",
        "if True:",
    ),
    "calls are made in the thread's own context": (
        runtime_module,
        "with self._reported(doing), self.current():",
        "with self._reported(doing):",
    ),
    "a thread without a context gets none": (
        runtime_module,
        "if self._before != self._context:\n            self._change(self._context)",
        "if self._before not in (0, self._context):\n            self._change(self._context)",
    ),
    "a thread with another context keeps it": (
        runtime_module,
        "if self._before != self._context:\n            self._change(self._context)",
        "if self._before == 0:\n            self._change(self._context)",
    ),
    "a thread does not get back its context": (
        runtime_module,
        "self._change(self._before)",
        "pass",
    ),
    "the device is set, not its context": (
        runtime_module,
        "self._driver.ctxSetCurrent(context)",
        "self._runtime._api.setDevice(max(0, context - 1))",
    ),
    "a device is opened in the caller's thread": (
        runtime_module,
        "thread.submit(self._open).result()",
        "self._open()",
    ),
    "doctor sets the device": (
        doctor,
        "with runtime.current():",
        "with cupy.cuda.Device(device):",
    ),
    "doctor asks in the thread's own context": (doctor, "with runtime.current():", "if True:"),
}


def build(device: int) -> tuple[CudaMover, HostArena]:
    gpu = cuda_runtime(device)
    cache = gpu.allocate(NUM_BLOCKS * BLOCK_BYTES)
    gpu.upload(cache, bytes([7 + device]) * (NUM_BLOCKS * BLOCK_BYTES))
    layout = BlockLayout(NUM_BLOCKS, (Region(cache, BLOCK_BYTES, BLOCK_BYTES),), device=device)
    arena = pinned_arena(NUM_BLOCKS, BLOCK_BYTES, gpu)
    link = CudaLink(gpu, staging_bytes=2 * BLOCK_BYTES)
    return CudaMover(layout, arena, link=link, path="packed", verify=True), arena


def transfer(mover: CudaMover, arena: HostArena, wait_s: float) -> None:
    gpu = mover._runtime
    arena.slots[SLOTS] = 0
    mover.store(IDS, SLOTS, after=CudaEvent.record(gpu.stream())).wait(wait_s)
    assert np.all(arena.slots[SLOTS] == 7 + gpu.device)
    mover.load(SLOTS, IDS, after=CudaEvent.record(gpu.stream())).wait(wait_s)


def in_new_thread(device: int, mover: CudaMover, arena: HostArena, wait_s: float) -> None:
    """Transfer in a thread that has a device of its own, and in one that has none."""

    def with_own() -> None:
        cupy.cuda.runtime.setDevice(1 - device)
        transfer(mover, arena, wait_s)
        assert cupy.cuda.runtime.getDevice() == 1 - device, "the thread's device changed"

    def with_none() -> None:
        transfer(mover, arena, wait_s)
        assert cupy.cuda.driver.ctxGetCurrent() == 0, "the thread has got a context"

    for work in (with_none, with_own):
        with ThreadPoolExecutor(1) as thread:
            thread.submit(work).result()


def scenario(wait_s: float = 60) -> None:
    """Use device 1 alone, then both; raise if a byte or a context is wrong, or a transfer late."""
    second, second_arena = build(1)
    transfer(second, second_arena, wait_s)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(transfer, second, second_arena, wait_s).result()
    findings = list(doctor._gpu(cupy, 1, anew=False))
    assert {finding.status for finding in findings} == {"ok"}, findings
    assert cupy.cuda.driver.ctxGetCurrent() == 0, "this thread has got a context"
    assert has_context(1)
    assert not has_context(0), "a transfer or a check of device 1 initialised device 0"
    first, first_arena = build(0)
    for device, mover, arena in ((0, first, first_arena), (1, second, second_arena)):
        transfer(mover, arena, wait_s)
        in_new_thread(device, mover, arena, wait_s)
    for mover, arena in ((first, first_arena), (second, second_arena)):
        mover.close()
        arena.close()


def main() -> int:
    scenario()
    print("each device moved its own blocks")
    missed = []
    for name, mutation in MUTATIONS.items():
        print(name)
        start_anew()
        with edited(*mutation):
            # If CUDA refuses every call, no transfer ends.
            if not reports(lambda: scenario(wait_s=1)):
                missed.append(name)
    start_anew()
    scenario()
    print("\n".join(f"MISSED: {name}" for name in missed))
    return 1 if missed else 0


def start_anew() -> None:
    """Let the next scenario begin with devices that nothing has initialised."""
    forget(list(runtime_module._runtimes.values()))
    runtime_module._runtimes.clear()
    forget_contexts()


if __name__ == "__main__":
    sys.exit(main())
